// Integer products of one block of 32 columns of a panel with rows of activations, for AVX2.
//
// UINT4 multiplies unsigned weights with signed activations in vpmaddubsw: 16 bits hold the sum of a whole block's
// pairs (8 · 2 · 15 · 127 = 30,480). INT8 would not fit, and is widened: 16-bit weights and activations in vpmaddwd.
#pragma once

#include "vector_avx2.h"

namespace tidegate {
namespace TIER {

inline __m256i load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m256i broadcast4(const void* p) {
    return _mm256_castps_si256(_mm256_broadcast_ss(static_cast<const float*>(p)));
}

// A sum that is to be made now: compilers that reorder additions of integers keep all products alive instead, far more
// than there are registers.
inline void settle(__m256i& sum) { __asm__("" : "+x"(sum)); }

struct Uint4 {
    using Activation = int8_t;
    static constexpr int BYTES = 256;      // of a block of a panel as stored: 32 columns of 16 outputs
    static constexpr int UNPACKED = 512;
    static constexpr int32_t OFFSET = 0;

    // [4][16 outputs][4 columns], columns 4g… in the low and 16 + 4g… in the high nibbles → [8][16 outputs][4 columns]
    static void unpack(const uint8_t* from, uint8_t* to) {
        const __m256i low = _mm256_set1_epi8(15);
        for (int i = 0; i < BYTES; i += 32) {
            const __m256i pair = load_bytes(from + i);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm256_and_si256(pair, low));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + BYTES + i),
                                _mm256_and_si256(_mm256_srli_epi16(pair, 4), low));
        }
    }

    template <int R>
    static void dot_unpacked(const uint8_t* w, const int8_t* x, int64_t stride, I (&out)[R]) {
        __m256i a[R], b[R];
        UNROLL
        for (int r = 0; r < R; ++r) a[r] = b[r] = _mm256_setzero_si256();
        UNROLL
        for (int g = 0; g < 8; ++g) {
            const __m256i wa = load_bytes(w + g * 64), wb = load_bytes(w + g * 64 + 32);
            UNROLL
            for (int r = 0; r < R; ++r) {
                const __m256i four = broadcast4(x + r * stride + g * 4);
                a[r] = _mm256_add_epi16(a[r], _mm256_maddubs_epi16(wa, four));
                b[r] = _mm256_add_epi16(b[r], _mm256_maddubs_epi16(wb, four));
                settle(a[r]);
                settle(b[r]);
            }
        }
        const __m256i ones = _mm256_set1_epi16(1);
        UNROLL
        for (int r = 0; r < R; ++r) out[r] = {_mm256_madd_epi16(a[r], ones), _mm256_madd_epi16(b[r], ones)};
    }

    template <int R>
    static void dot(const uint8_t* w, const int8_t* x, int64_t stride, I (&out)[R]) {
        const __m256i low = _mm256_set1_epi8(15);
        __m256i a[R], b[R];
        UNROLL
        for (int r = 0; r < R; ++r) a[r] = b[r] = _mm256_setzero_si256();
        UNROLL
        for (int g = 0; g < 4; ++g) {
            const __m256i pa = load_bytes(w + g * 64), pb = load_bytes(w + g * 64 + 32);
            const __m256i la = _mm256_and_si256(pa, low), ha = _mm256_and_si256(_mm256_srli_epi16(pa, 4), low);
            const __m256i lb = _mm256_and_si256(pb, low), hb = _mm256_and_si256(_mm256_srli_epi16(pb, 4), low);
            UNROLL
            for (int r = 0; r < R; ++r) {
                const __m256i first = broadcast4(x + r * stride + g * 4);
                const __m256i later = broadcast4(x + r * stride + 16 + g * 4);
                a[r] = _mm256_add_epi16(a[r], _mm256_maddubs_epi16(la, first));
                b[r] = _mm256_add_epi16(b[r], _mm256_maddubs_epi16(lb, first));
                a[r] = _mm256_add_epi16(a[r], _mm256_maddubs_epi16(ha, later));
                b[r] = _mm256_add_epi16(b[r], _mm256_maddubs_epi16(hb, later));
                settle(a[r]);
                settle(b[r]);
            }
        }
        const __m256i ones = _mm256_set1_epi16(1);
        UNROLL
        for (int r = 0; r < R; ++r) out[r] = {_mm256_madd_epi16(a[r], ones), _mm256_madd_epi16(b[r], ones)};
    }
};

struct Int8 {
    using Activation = int16_t;
    static constexpr int BYTES = 512;
    static constexpr int UNPACKED = 1024;
    static constexpr int32_t OFFSET = 0;

    // Eight outputs of four columns as bytes → columns 0, 1 and columns 2, 3 of the eight as 16-bit pairs.
    static void widen(const uint8_t* from, __m256i& first, __m256i& later) {
        const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                               0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
        const __m256i sorted = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(load_bytes(from), order), 0xD8);
        first = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(sorted));
        later = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(sorted, 1));
    }

    // [8][16 outputs][4 columns] bytes → [16][16 outputs][2 columns] of 16 bits
    static void unpack(const uint8_t* from, uint8_t* to) {
        for (int g = 0; g < 8; ++g) {
            __m256i* out = reinterpret_cast<__m256i*>(to + g * 128);
            __m256i first, later;
            for (int half = 0; half < 2; ++half) {
                widen(from + g * 64 + half * 32, first, later);
                _mm256_storeu_si256(out + half, first);
                _mm256_storeu_si256(out + 2 + half, later);
            }
        }
    }

    template <int R>
    static void dot_unpacked(const uint8_t* w, const int16_t* x, int64_t stride, I (&out)[R]) {
        UNROLL
        for (int g = 0; g < 16; ++g) {
            const __m256i wa = load_bytes(w + g * 64), wb = load_bytes(w + g * 64 + 32);
            UNROLL
            for (int r = 0; r < R; ++r) {
                const __m256i two = broadcast4(x + r * stride + g * 2);
                out[r].a = _mm256_add_epi32(out[r].a, _mm256_madd_epi16(wa, two));
                out[r].b = _mm256_add_epi32(out[r].b, _mm256_madd_epi16(wb, two));
                settle(out[r].a);
                settle(out[r].b);
            }
        }
    }

    template <int R>
    static void dot(const uint8_t* w, const int16_t* x, int64_t stride, I (&out)[R]) {
        UNROLL
        for (int g = 0; g < 8; ++g) {
            __m256i fa, la, fb, lb;
            widen(w + g * 64, fa, la);
            widen(w + g * 64 + 32, fb, lb);
            UNROLL
            for (int r = 0; r < R; ++r) {
                const __m256i first = broadcast4(x + r * stride + g * 4);
                const __m256i later = broadcast4(x + r * stride + g * 4 + 2);
                out[r].a = _mm256_add_epi32(out[r].a, _mm256_madd_epi16(fa, first));
                out[r].b = _mm256_add_epi32(out[r].b, _mm256_madd_epi16(fb, first));
                out[r].a = _mm256_add_epi32(out[r].a, _mm256_madd_epi16(la, later));
                out[r].b = _mm256_add_epi32(out[r].b, _mm256_madd_epi16(lb, later));
                settle(out[r].a);
                settle(out[r].b);
            }
        }
    }
};

}  // namespace TIER
}  // namespace tidegate
