// Integer products of one block of 32 columns of a panel with rows of activations, for NEON with sdot.
//
// sdot adds, in each lane of 32 bits, four products of signed bytes; nibbles of 0…15 are signed bytes too.
#pragma once

#include <cstring>

#include "vector_neon.h"

namespace tidegate {
namespace TIER {

inline int8x16_t broadcast4(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

struct Int8 {
    using Activation = int8_t;
    static constexpr int BYTES = 512;  // of a block of a panel as stored: [8][16 outputs][4 columns]
    static constexpr int UNPACKED = 512;
    static constexpr int32_t OFFSET = 0;

    static void unpack(const uint8_t* from, uint8_t* to) { std::memcpy(to, from, BYTES); }

    template <int R>
    static void dot_unpacked(const uint8_t* w, const int8_t* x, int64_t stride, I (&out)[R]) {
        const int8_t* weights = reinterpret_cast<const int8_t*>(w);
        for (int g = 0; g < 8; ++g) {
            UNROLL
            for (int r = 0; r < R; ++r) {
                const int8x16_t four = broadcast4(x + r * stride + g * 4);
                QUARTERS out[r].v[i] = vdotq_s32(out[r].v[i], vld1q_s8(weights + g * 64 + i * 16), four);
            }
        }
    }

    template <int R>
    static void dot(const uint8_t* w, const int8_t* x, int64_t stride, I (&out)[R]) {
        dot_unpacked<R>(w, x, stride, out);
    }
};

struct Uint4 {
    using Activation = int8_t;
    static constexpr int BYTES = 256;
    static constexpr int UNPACKED = 512;
    static constexpr int32_t OFFSET = 0;

    // [4][16 outputs][4 columns], columns 4g… in the low and 16 + 4g… in the high nibbles → [8][16 outputs][4 columns]
    static void unpack(const uint8_t* from, uint8_t* to) {
        for (int i = 0; i < BYTES; i += 16) {
            const uint8x16_t pair = vld1q_u8(from + i);
            vst1q_u8(to + i, vandq_u8(pair, vdupq_n_u8(15)));
            vst1q_u8(to + BYTES + i, vshrq_n_u8(pair, 4));
        }
    }

    template <int R>
    static void dot_unpacked(const uint8_t* w, const int8_t* x, int64_t stride, I (&out)[R]) {
        Int8::dot_unpacked<R>(w, x, stride, out);
    }

    template <int R>
    static void dot(const uint8_t* w, const int8_t* x, int64_t stride, I (&out)[R]) {
        for (int g = 0; g < 4; ++g) {
            int8x16_t first[4], later[4];
            QUARTERS {
                const uint8x16_t pair = vld1q_u8(w + g * 64 + i * 16);
                first[i] = vreinterpretq_s8_u8(vandq_u8(pair, vdupq_n_u8(15)));
                later[i] = vreinterpretq_s8_u8(vshrq_n_u8(pair, 4));
            }
            UNROLL
            for (int r = 0; r < R; ++r) {
                const int8x16_t a = broadcast4(x + r * stride + g * 4), b = broadcast4(x + r * stride + 16 + g * 4);
                QUARTERS out[r].v[i] = vdotq_s32(vdotq_s32(out[r].v[i], first[i], a), later[i], b);
            }
        }
    }
};

}  // namespace TIER
}  // namespace tidegate
