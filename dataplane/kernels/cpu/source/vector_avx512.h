// Sixteen lanes as one register of AVX-512 (F, BW, DQ, VL).
#pragma once

#include "vector_x86.h"

namespace tidegate {
namespace TIER {

struct F {
    __m512 v;
};
struct I {
    __m512i v;
};

inline F set(float x) { return {_mm512_set1_ps(x)}; }
inline F zero() { return {_mm512_setzero_ps()}; }
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
inline __mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
inline F load_part(const float* p, int64_t count) { return {_mm512_maskz_loadu_ps(first_lanes(count), p)}; }
inline void store_part(float* p, F x, int64_t count) { _mm512_mask_storeu_ps(p, first_lanes(count), x.v); }
inline F load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

inline F operator+(F x, F y) { return {_mm512_add_ps(x.v, y.v)}; }
inline F operator-(F x, F y) { return {_mm512_sub_ps(x.v, y.v)}; }
inline F operator*(F x, F y) { return {_mm512_mul_ps(x.v, y.v)}; }
inline F operator/(F x, F y) { return {_mm512_div_ps(x.v, y.v)}; }
// x · y + z
inline F fma(F x, F y, F z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
// Of a NaN and a number both give y.
inline F max(F x, F y) { return {_mm512_max_ps(x.v, y.v)}; }
inline F min(F x, F y) { return {_mm512_min_ps(x.v, y.v)}; }
inline F abs(F x) { return {_mm512_abs_ps(x.v)}; }
// Where x < y, `yes`, elsewhere `no`.
inline F where_less(F x, F y, F yes, F no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ), no.v, yes.v)};
}

inline I round(F x) { return {_mm512_cvtps_epi32(x.v)}; }
inline F to_float(I x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline I set_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
// x · 2ⁿ, |n| ≤ 126.
inline F scale_by_power(F x, I n) {
    return x * F{_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))};
}

// Lane i with i + 8, then with i + 4, i + 2, i + 1: one order for every tier.
inline float sum(F x) {
    return sum8(_mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1)));
}
inline float largest(F x) {
    return largest8(_mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1)));
}
inline int32_t sum(I x) {
    return sum8(_mm256_add_epi32(_mm512_castsi512_si256(x.v), _mm512_extracti64x4_epi64(x.v, 1)));
}
inline void store_bytes(int8_t* p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x.v));
}

constexpr int FLOAT_ROWS = 12;  // of a tile of FLOAT32: 12 rows of two panels are 24 of 32 registers
constexpr int FLOAT_PANELS = 2;
constexpr int QUANTISED_ROWS = 8;

}  // namespace TIER
}  // namespace tidegate
