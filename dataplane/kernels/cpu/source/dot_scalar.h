// Integer products of one block of 32 columns of a panel with rows of activations, in plain C++.
#pragma once

#include "vector_scalar.h"

namespace tidegate {
namespace TIER {

struct Int8 {
    using Activation = int8_t;
    static constexpr int BYTES = 512;  // of a block of a panel as stored: [8][16 outputs][4 columns]
    static constexpr int UNPACKED = 512;
    static constexpr int32_t OFFSET = 0;

    static void unpack(const uint8_t* from, uint8_t* to) { std::memcpy(to, from, BYTES); }

    template <int R>
    static void dot_unpacked(const uint8_t* w, const int8_t* x, int64_t stride, I (&out)[R]) {
        for (int r = 0; r < R; ++r) {
            for (int g = 0; g < 8; ++g) {
                const int8_t* four = x + r * stride + g * 4;
                const int8_t* at = reinterpret_cast<const int8_t*>(w) + g * 64;
                LANES {
                    out[r].v[i] += at[i * 4] * four[0] + at[i * 4 + 1] * four[1] + at[i * 4 + 2] * four[2] +
                                   at[i * 4 + 3] * four[3];
                }
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
        for (int i = 0; i < BYTES; ++i) {
            to[i] = from[i] & 15;
            to[BYTES + i] = from[i] >> 4;
        }
    }

    template <int R>
    static void dot_unpacked(const uint8_t* w, const int8_t* x, int64_t stride, I (&out)[R]) {
        Int8::dot_unpacked<R>(w, x, stride, out);
    }

    template <int R>
    static void dot(const uint8_t* w, const int8_t* x, int64_t stride, I (&out)[R]) {
        uint8_t unpacked[UNPACKED];
        unpack(w, unpacked);
        dot_unpacked<R>(unpacked, x, stride, out);
    }
};

}  // namespace TIER
}  // namespace tidegate
