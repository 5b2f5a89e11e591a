// Sixteen lanes as four registers of NEON (64-bit ARM).
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace tidegate {
namespace TIER {

struct F {
    float32x4_t v[4];
};
struct I {
    int32x4_t v[4];
};

#define QUARTERS UNROLL for (int i = 0; i < 4; ++i)

inline F set(float x) { return {{vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}}; }
inline F zero() { return set(0.0f); }
inline F load(const float* p) {
    return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
inline void store(float* p, F x) { QUARTERS vst1q_f32(p + i * 4, x.v[i]); }
inline F load_part(const float* p, int64_t count) {
    float all[16] = {};
    for (int64_t i = 0; i < min_of(count, 16); ++i) all[i] = p[i];
    return load(all);
}
inline void store_part(float* p, F x, int64_t count) {
    float all[16];
    store(all, x);
    for (int64_t i = 0; i < min_of(count, 16); ++i) p[i] = all[i];
}
inline F load_half(const uint16_t* p) {
    F out;
    QUARTERS out.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + i * 4)));
    return out;
}

inline F operator+(F x, F y) {
    QUARTERS x.v[i] = vaddq_f32(x.v[i], y.v[i]);
    return x;
}
inline F operator-(F x, F y) {
    QUARTERS x.v[i] = vsubq_f32(x.v[i], y.v[i]);
    return x;
}
inline F operator*(F x, F y) {
    QUARTERS x.v[i] = vmulq_f32(x.v[i], y.v[i]);
    return x;
}
inline F operator/(F x, F y) {
    QUARTERS x.v[i] = vdivq_f32(x.v[i], y.v[i]);
    return x;
}
// x · y + z
inline F fma(F x, F y, F z) {
    QUARTERS z.v[i] = vfmaq_f32(z.v[i], x.v[i], y.v[i]);
    return z;
}
// Of a NaN and a number both give y, as elsewhere; vmaxq and vminq would give the NaN.
inline F max(F x, F y) {
    QUARTERS y.v[i] = vbslq_f32(vcgtq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]);
    return y;
}
inline F min(F x, F y) {
    QUARTERS y.v[i] = vbslq_f32(vcltq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]);
    return y;
}
inline F abs(F x) {
    QUARTERS x.v[i] = vabsq_f32(x.v[i]);
    return x;
}
// Where x < y, `yes`, elsewhere `no`.
inline F where_less(F x, F y, F yes, F no) {
    QUARTERS no.v[i] = vbslq_f32(vcltq_f32(x.v[i], y.v[i]), yes.v[i], no.v[i]);
    return no;
}

inline I round(F x) {
    I out;
    QUARTERS out.v[i] = vcvtnq_s32_f32(x.v[i]);
    return out;
}
inline F to_float(I x) {
    F out;
    QUARTERS out.v[i] = vcvtq_f32_s32(x.v[i]);
    return out;
}
inline I set_int(int32_t x) { return {{vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}}; }
// x · 2ⁿ, |n| ≤ 126.
inline F scale_by_power(F x, I n) {
    QUARTERS x.v[i] =
        vmulq_f32(x.v[i], vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.v[i], vdupq_n_s32(127)), 23)));
    return x;
}

// Lane i with i + 8, then with i + 4, i + 2, i + 1: one order for every tier.
inline float sum(F x) {
    const float32x4_t four = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float largest(F x) {
    float all[16], top;
    store(all, x);
    top = all[0];
    for (int i = 1; i < 16; ++i) top = all[i] > top ? all[i] : top;
    return top;
}
inline int32_t sum(I x) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3])));
}
inline void store_bytes(int8_t* p, I x) {
    const int16x8_t low = vcombine_s16(vqmovn_s32(x.v[0]), vqmovn_s32(x.v[1]));
    const int16x8_t high = vcombine_s16(vqmovn_s32(x.v[2]), vqmovn_s32(x.v[3]));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}

// Eight columns of sixteen rows that lie `stride` apart become eight rows of sixteen: to[column · 16 + row].
inline void transpose16x8(const float* from, int64_t stride, float* to) {
    for (int row = 0; row < 16; row += 4, from += 4 * stride, to += 4) {
        for (int column = 0; column < 8; column += 4) {
            const float32x4_t a = vld1q_f32(from + column), b = vld1q_f32(from + stride + column);
            const float32x4_t c = vld1q_f32(from + 2 * stride + column), d = vld1q_f32(from + 3 * stride + column);
            const float32x4x2_t ac = vzipq_f32(a, c), bd = vzipq_f32(b, d);
            const float32x4x2_t low = vzipq_f32(ac.val[0], bd.val[0]), high = vzipq_f32(ac.val[1], bd.val[1]);
            vst1q_f32(to + column * 16, low.val[0]);
            vst1q_f32(to + (column + 1) * 16, low.val[1]);
            vst1q_f32(to + (column + 2) * 16, high.val[0]);
            vst1q_f32(to + (column + 3) * 16, high.val[1]);
        }
    }
}

constexpr int FLOAT_ROWS = 6;    // of a tile of FLOAT32: 6 rows of 16 outputs are 24 of 32 registers
constexpr int FLOAT_PANELS = 1;
constexpr int QUANTISED_ROWS = 4;

}  // namespace TIER
}  // namespace tidegate
