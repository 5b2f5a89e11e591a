// Integer products of one block of 32 columns of a panel with rows of activations, for AVX-512 VNNI.
//
// vpdpbusd adds, in each lane of 32 bits, four products of unsigned with signed bytes: weights with activations. INT8
// weights are made unsigned by adding 128, and 128 · Σ x is taken off again, exactly.
#pragma once

#include <cstring>

#include "vector_avx512.h"

namespace tidegate {
namespace TIER {

inline __m512i load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline __m512i broadcast4(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
}

// [8][16 outputs][4 columns] of unsigned bytes, as `weights_at` reads 64 of them.
template <int R, class Load>
inline void add_products(const uint8_t* w, const int8_t* x, int64_t stride, I (&out)[R], Load weights_at) {
    UNROLL
    for (int g = 0; g < 8; ++g) {
        const __m512i weights = weights_at(w + g * 64);
        UNROLL
        for (int r = 0; r < R; ++r) {
            out[r].v = _mm512_dpbusd_epi32(out[r].v, weights, broadcast4(x + r * stride + g * 4));
        }
    }
}

struct Uint4 {
    using Activation = int8_t;
    static constexpr int BYTES = 256;  // of a block of a panel as stored: 32 columns of 16 outputs
    static constexpr int UNPACKED = 512;
    static constexpr int32_t OFFSET = 0;

    // [4][16 outputs][4 columns], columns 4g… in the low and 16 + 4g… in the high nibbles → [8][16 outputs][4 columns]
    static void unpack(const uint8_t* from, uint8_t* to) {
        const __m512i low = _mm512_set1_epi8(15);
        for (int i = 0; i < BYTES; i += 64) {
            const __m512i pair = load_bytes(from + i);
            _mm512_storeu_si512(to + i, _mm512_and_si512(pair, low));
            _mm512_storeu_si512(to + BYTES + i, _mm512_and_si512(_mm512_srli_epi16(pair, 4), low));
        }
    }

    template <int R>
    static void dot_unpacked(const uint8_t* w, const int8_t* x, int64_t stride, I (&out)[R]) {
        add_products<R>(w, x, stride, out, [](const uint8_t* p) { return load_bytes(p); });
    }

    template <int R>
    static void dot(const uint8_t* w, const int8_t* x, int64_t stride, I (&out)[R]) {
        const __m512i low = _mm512_set1_epi8(15);
        UNROLL
        for (int g = 0; g < 4; ++g) {
            const __m512i pair = load_bytes(w + g * 64);
            const __m512i first = _mm512_and_si512(pair, low);
            const __m512i later = _mm512_and_si512(_mm512_srli_epi16(pair, 4), low);
            UNROLL
            for (int r = 0; r < R; ++r) {
                const int8_t* at = x + r * stride + g * 4;
                out[r].v = _mm512_dpbusd_epi32(out[r].v, first, broadcast4(at));
                out[r].v = _mm512_dpbusd_epi32(out[r].v, later, broadcast4(at + 16));
            }
        }
    }
};

struct Int8 {
    using Activation = int8_t;
    static constexpr int BYTES = 512;
    static constexpr int UNPACKED = 512;
    static constexpr int32_t OFFSET = -128;

    static __m512i unsigned_of(const uint8_t* w) {
        return _mm512_xor_si512(load_bytes(w), _mm512_set1_epi8(static_cast<char>(-128)));
    }

    static void unpack(const uint8_t* from, uint8_t* to) {
        for (int i = 0; i < BYTES; i += 64) _mm512_storeu_si512(to + i, unsigned_of(from + i));
    }

    template <int R>
    static void dot_unpacked(const uint8_t* w, const int8_t* x, int64_t stride, I (&out)[R]) {
        add_products<R>(w, x, stride, out, [](const uint8_t* p) { return load_bytes(p); });
    }

    template <int R>
    static void dot(const uint8_t* w, const int8_t* x, int64_t stride, I (&out)[R]) {
        add_products<R>(w, x, stride, out, [](const uint8_t* p) { return unsigned_of(p); });
    }
};

}  // namespace TIER
}  // namespace tidegate
