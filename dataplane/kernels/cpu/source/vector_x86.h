// What the instruction sets of x86 have in common: eight lanes of AVX2, in which sixteen end.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace tidegate {
namespace TIER {

// Lane i with i + 4, then with i + 2, i + 1.
inline float sum8(__m256 eight) {
    __m128 v = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}
inline float largest8(__m256 eight) {
    __m128 v = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)));
}
inline int32_t sum8(__m256i eight) {
    __m128i v = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xB1)));
}

inline void transpose8(const float* from, int64_t stride, float* to) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(from + i * stride);
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(to + i * 16, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * 16, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}
// Eight columns of sixteen rows that lie `stride` apart become eight rows of sixteen: to[column · 16 + row].
inline void transpose16x8(const float* from, int64_t stride, float* to) {
    transpose8(from, stride, to);
    transpose8(from + 8 * stride, stride, to + 8);
}

}  // namespace TIER
}  // namespace tidegate
