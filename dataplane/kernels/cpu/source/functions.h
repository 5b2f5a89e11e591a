// exp, tanh and what is made of them, on sixteen lanes. NaN in, NaN out.
#pragma once

namespace tidegate {
namespace TIER {

// Within 2 ulp: eˣ = 2ⁿ · eʳ with n the nearest integer to x / ln 2 and |r| ≤ ln 2 / 2, ln 2 in two parts, the
// first exact in so many bits that n · ln 2 is too (Cody & Waite 1980, ch. 6), eʳ by its Taylor series to r⁷/7!.
// exp(0) is exactly 1. Results below the smallest normal number are 0.
inline F exp(F x) {
    const F lowest = set(-87.33654f), highest = set(88.72283f);
    const F inside = min(highest, max(lowest, x));
    const F n = to_float(round(inside * set(1.44269504f)));
    const F r = fma(n, set(2.12194440e-4f), fma(n, set(-0.693359375f), inside));
    F p = set(1.98412698e-4f);
    p = fma(p, r, set(1.38888889e-3f));
    p = fma(p, r, set(8.33333333e-3f));
    p = fma(p, r, set(4.16666667e-2f));
    p = fma(p, r, set(1.66666667e-1f));
    p = fma(p, r, set(0.5f));
    p = fma(p, r * r, r) + set(1.0f);
    // In two steps, as 2ⁿ of the largest x is not a number of 32 bits.
    const F half = n * set(0.5f);
    const I first = round(half);
    const I second = round(n - to_float(first));
    const F value = scale_by_power(scale_by_power(p, first), second);
    const F bounded = where_less(x, lowest, zero(), value);
    return where_less(highest, x, set(__builtin_inff()), bounded);
}

// Within 4 ulp: near 0 by the odd series that Cephes uses (Moshier 1992), beyond by exp.
inline F tanh(F x) {
    const F z = x * x;
    F p = set(-5.70498872745e-3f);
    p = fma(p, z, set(2.06390887954e-2f));
    p = fma(p, z, set(-5.37397155531e-2f));
    p = fma(p, z, set(1.33314422036e-1f));
    p = fma(p, z, set(-3.33332819422e-1f));
    const F near = fma(p * z, x, x);
    const F far = set(1.0f) - set(2.0f) / (exp(x + x) + set(1.0f));
    return where_less(abs(x), set(0.625f), near, far);
}

// x / (1 + e⁻ˣ)
inline F silu(F x) { return x / (set(1.0f) + exp(zero() - x)); }

// x/2 · (1 + tanh(u)), u = √(2/π) · (x + 0.044715 · x³), which is x / (1 + e⁻²ᵘ).
inline F gelu_tanh(F x) {
    const F u = fma(x * x * x, set(0.044715f), x) * set(1.5957691216f);
    return x / (set(1.0f) + exp(zero() - u));
}

inline F softcap(F x, F cap) { return tanh(x / cap) * cap; }

}  // namespace TIER
}  // namespace tidegate
