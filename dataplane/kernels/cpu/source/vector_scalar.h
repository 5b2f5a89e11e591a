// Sixteen lanes in plain C++, for every processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace tidegate {
namespace TIER {

struct F {
    float v[16];
};
struct I {
    int32_t v[16];
};

#define LANES for (int i = 0; i < 16; ++i)

inline F set(float x) {
    F out;
    LANES out.v[i] = x;
    return out;
}
inline F zero() { return set(0.0f); }
inline F load(const float* p) {
    F out;
    LANES out.v[i] = p[i];
    return out;
}
inline void store(float* p, const F& x) { LANES p[i] = x.v[i]; }
inline F load_part(const float* p, int64_t count) {
    F out;
    LANES out.v[i] = i < count ? p[i] : 0.0f;
    return out;
}
inline void store_part(float* p, const F& x, int64_t count) {
    LANES if (i < count) p[i] = x.v[i];
}

inline float from_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (magnitude < 0x400) {  // zero and subnormal: units of 2⁻²⁴
        const float value = static_cast<float>(magnitude) * 0x1p-24f;
        return sign ? -value : value;
    }
    const uint32_t bits = sign | ((magnitude << 13) + (112u << 23));
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline F load_half(const uint16_t* p) {
    F out;
    LANES out.v[i] = from_half(p[i]);
    return out;
}

inline F operator+(const F& x, const F& y) {
    F out;
    LANES out.v[i] = x.v[i] + y.v[i];
    return out;
}
inline F operator-(const F& x, const F& y) {
    F out;
    LANES out.v[i] = x.v[i] - y.v[i];
    return out;
}
inline F operator*(const F& x, const F& y) {
    F out;
    LANES out.v[i] = x.v[i] * y.v[i];
    return out;
}
inline F operator/(const F& x, const F& y) {
    F out;
    LANES out.v[i] = x.v[i] / y.v[i];
    return out;
}
// x · y + z, rounded twice: a fused one would be a call to the library here.
inline F fma(const F& x, const F& y, const F& z) {
    F out;
    LANES out.v[i] = x.v[i] * y.v[i] + z.v[i];
    return out;
}
// Of a NaN and a number both give y.
inline F max(const F& x, const F& y) {
    F out;
    LANES out.v[i] = x.v[i] > y.v[i] ? x.v[i] : y.v[i];
    return out;
}
inline F min(const F& x, const F& y) {
    F out;
    LANES out.v[i] = x.v[i] < y.v[i] ? x.v[i] : y.v[i];
    return out;
}
inline F abs(const F& x) {
    F out;
    LANES out.v[i] = __builtin_fabsf(x.v[i]);
    return out;
}
// Where x < y, `yes`, elsewhere `no`.
inline F where_less(const F& x, const F& y, const F& yes, const F& no) {
    F out;
    LANES out.v[i] = x.v[i] < y.v[i] ? yes.v[i] : no.v[i];
    return out;
}

// To the nearest, ties to even, for |x| < 2²²; what is outside (a NaN) gives any number.
inline I round(const F& x) {
    I out;
    LANES {
        const float shifted = x.v[i] + 0x1.8p23f;
        int32_t bits;
        std::memcpy(&bits, &shifted, sizeof bits);
        out.v[i] = static_cast<int32_t>(static_cast<uint32_t>(bits) - 0x4b400000u);
    }
    return out;
}
inline F to_float(const I& x) {
    F out;
    LANES out.v[i] = static_cast<float>(x.v[i]);
    return out;
}
inline I set_int(int32_t x) {
    I out;
    LANES out.v[i] = x;
    return out;
}
// x · 2ⁿ, |n| ≤ 126.
inline F scale_by_power(const F& x, const I& n) {
    F out;
    LANES {
        const uint32_t bits = (static_cast<uint32_t>(n.v[i]) + 127u) << 23;
        float power;
        std::memcpy(&power, &bits, sizeof power);
        out.v[i] = x.v[i] * power;
    }
    return out;
}

// Lane i with i + 8, then with i + 4, i + 2, i + 1: one order for every tier.
inline float sum(const F& x) {
    float v[8];
    for (int i = 0; i < 8; ++i) v[i] = x.v[i] + x.v[i + 8];
    for (int i = 0; i < 4; ++i) v[i] += v[i + 4];
    for (int i = 0; i < 2; ++i) v[i] += v[i + 2];
    return v[0] + v[1];
}
inline float largest(const F& x) {
    float v = x.v[0];
    LANES v = x.v[i] > v ? x.v[i] : v;
    return v;
}
inline int32_t sum(const I& x) {
    int32_t total = 0;
    LANES total += x.v[i];
    return total;
}
inline void store_bytes(int8_t* p, const I& x) { LANES p[i] = static_cast<int8_t>(x.v[i]); }

// Eight columns of sixteen rows that lie `stride` apart become eight rows of sixteen: to[column · 16 + row].
inline void transpose16x8(const float* from, int64_t stride, float* to) {
    for (int column = 0; column < 8; ++column) LANES to[column * 16 + i] = from[i * stride + column];
}

constexpr int FLOAT_ROWS = 2;
constexpr int FLOAT_PANELS = 1;
constexpr int QUANTISED_ROWS = 2;

}  // namespace TIER
}  // namespace tidegate
