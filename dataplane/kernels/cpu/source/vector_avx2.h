// Sixteen lanes as two registers of AVX2 with FMA and F16C.
#pragma once

#include "vector_x86.h"

namespace tidegate {
namespace TIER {

struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};

inline F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}

inline __m256i first_lanes(int64_t count) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lanes);
}
inline F load_part(const float* p, int64_t count) {
    return {_mm256_maskload_ps(p, first_lanes(count)), _mm256_maskload_ps(p + 8, first_lanes(count - 8))};
}
inline void store_part(float* p, F v, int64_t count) {
    _mm256_maskstore_ps(p, first_lanes(count), v.a);
    _mm256_maskstore_ps(p + 8, first_lanes(count - 8), v.b);
}
inline F load_half(const uint16_t* p) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}

inline F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
// x · y + z
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F abs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
// Where x < y, `yes`, elsewhere `no`.
inline F where_less(F x, F y, F yes, F no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}

inline I round(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I set_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
// x · 2ⁿ, |n| ≤ 126.
inline F scale_by_power(F x, I n) {
    const __m256i bias = _mm256_set1_epi32(127);
    return x * F{_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.a, bias), 23)),
                 _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.b, bias), 23))};
}

// Lane i with i + 8, then with i + 4, i + 2, i + 1: one order for every tier.
inline float sum(F x) {
    return sum8(_mm256_add_ps(x.a, x.b));
}
inline float largest(F x) {
    return largest8(_mm256_max_ps(x.a, x.b));
}

inline __m128i narrow(I x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
    return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
inline void store_bytes(int8_t* p, I x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x)); }
inline void store_words(int16_t* p, I x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
}
inline int32_t sum(I x) {
    return sum8(_mm256_add_epi32(x.a, x.b));
}

constexpr int FLOAT_ROWS = 6;    // of a tile of FLOAT32: 6 rows of 16 outputs are 12 of 16 registers
constexpr int FLOAT_PANELS = 1;
constexpr int QUANTISED_ROWS = 6;

}  // namespace TIER
}  // namespace tidegate
