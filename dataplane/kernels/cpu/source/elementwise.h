// Operations that take a row by itself: norms, rotations, activations and copies.
//
// `out` may lie exactly where an input does: what is read of a row at a column is read before it is written there.
#pragma once

namespace tidegate {
namespace TIER {

// apply(i, get, put) for each sixteen columns of a row; get and put take part of them at the end.
template <class Apply>
inline void each_vector(int64_t width, Apply apply) {
    int64_t i = 0;
    for (; i + PANEL <= width; i += PANEL) {
        apply(i, [](const float* p) { return load(p); }, [](float* p, F v) { store(p, v); });
    }
    if (i < width) {
        const int64_t left = width - i;
        apply(
            i, [left](const float* p) { return load_part(p, left); },
            [left](float* p, F v) { store_part(p, v, left); });
    }
}


inline void copy(const float* from, float* to, int64_t width) {
    each_vector(width, [=](int64_t i, auto get, auto put) { put(to + i, get(from + i)); });
}

inline void add(const float* x, const float* y, float* out, int64_t width) {
    each_vector(width, [=](int64_t i, auto get, auto put) { put(out + i, get(x + i) + get(y + i)); });
}

inline void scale(const float* x, float factor, float* out, int64_t width) {
    each_vector(width, [=](int64_t i, auto get, auto put) { put(out + i, get(x + i) * set(factor)); });
}

inline void softcap(const float* x, float cap, float* out, int64_t width) {
    each_vector(width, [=](int64_t i, auto get, auto put) { put(out + i, softcap(get(x + i), set(cap))); });
}

inline void rms_norm(const float* x, const Operation& op, float* out) {
    const float* weight = op.a;
    for (int64_t group = 0; group < op.x.width; group += op.size, x += op.size, out += op.size) {
        F squares = zero();
        each_vector(op.size, [&](int64_t i, auto get, auto) { squares = fma(get(x + i), get(x + i), squares); });
        const float mean = sum(squares) / static_cast<float>(op.size);
        const F inverse = set(1.0f / __builtin_sqrtf(mean + static_cast<float>(op.factor)));
        each_vector(op.size,
                    [=](int64_t i, auto get, auto put) { put(out + i, get(x + i) * inverse * get(weight + i)); });
    }
}

inline void layer_norm(const float* x, const Operation& op, float* out) {
    const float *weight = op.a, *bias = op.b;
    const float size = static_cast<float>(op.x.width);
    F total = zero();
    each_vector(op.x.width, [&](int64_t i, auto get, auto) { total = total + get(x + i); });
    const float mean = sum(total) / size;
    F squares = zero();
    const int64_t whole = op.x.width / PANEL * PANEL;
    for (int64_t i = 0; i < whole; i += PANEL) {
        const F away = load(x + i) - set(mean);
        squares = fma(away, away, squares);
    }
    float rest = 0.0f;  // of the columns beyond whole vectors, whose empty lanes would count as numbers
    for (int64_t i = whole; i < op.x.width; ++i) rest += (x[i] - mean) * (x[i] - mean);
    const float variance = (sum(squares) + rest) / size;
    const F inverse = set(1.0f / __builtin_sqrtf(variance + static_cast<float>(op.factor)));
    each_vector(op.x.width, [=](int64_t i, auto get, auto put) {
        put(out + i, fma((get(x + i) - set(mean)) * inverse, get(weight + i), get(bias + i)));
    });
}

// Columns i and i + r/2 of each head are a pair: (a, b) → (a · cos − b · sin, b · cos + a · sin).
inline void rotate(const Step& step, const Operation& op, int64_t row, const float* x, float* out) {
    const int64_t half = op.turned / 2;
    const float* cosines = op.a + step.in.positions[row] * op.turned;
    const float* sines = op.b + step.in.positions[row] * op.turned;
    for (int64_t head = 0; head < op.x.width; head += op.size, x += op.size, out += op.size) {
        each_vector(half, [=](int64_t i, auto get, auto put) {
            const F first = get(x + i), second = get(x + half + i), c = get(cosines + i), s = get(sines + i);
            put(out + i, first * c - second * s);
            put(out + half + i, fma(first, s, second * c));
        });
        if (op.turned < op.size) copy(x + op.turned, out + op.turned, op.size - op.turned);
    }
}

inline void silu_mul(const float* x, float* out, int64_t width) {
    each_vector(width, [=](int64_t i, auto get, auto put) { put(out + i, silu(get(x + i)) * get(x + width + i)); });
}

inline void gelu_tanh_mul(const float* x, float* out, int64_t width) {
    each_vector(width,
                [=](int64_t i, auto get, auto put) { put(out + i, gelu_tanh(get(x + i)) * get(x + width + i)); });
}

inline void gelu_tanh(const float* x, float* out, int64_t width) {
    each_vector(width, [=](int64_t i, auto get, auto put) { put(out + i, gelu_tanh(get(x + i))); });
}

// One row of an operation that is neither a product nor attention.
inline void one_row(const Step& step, const Operation& op, int64_t row) {
    float* out = at(step, op.out) + row * op.out.stride;
    const float* x = op.x.width ? at(step, op.x) + row * op.x.stride : nullptr;
    const int64_t width = op.out.width;
    switch (op.kind) {
        case EMBED: return unpack_row(op.weight, step.in.ids[row], out);
        case TAKE: return copy(step.in.source + step.in.rows[row] * step.in.source_stride, out, width);
        case ADD: return add(x, at(step, op.y) + row * op.y.stride, out, width);
        case SCALE: return scale(x, static_cast<float>(op.factor), out, width);
        case SOFTCAP: return softcap(x, static_cast<float>(op.cap), out, width);
        case RMS_NORM: return rms_norm(x, op, out);
        case LAYER_NORM: return layer_norm(x, op, out);
        case ROTATE: return rotate(step, op, row, x, out);
        case SILU_MUL: return silu_mul(x, out, width);
        case GELU_TANH_MUL: return gelu_tanh_mul(x, out, width);
        case GELU_TANH: return gelu_tanh(x, out, width);
        default: return;
    }
}

}  // namespace TIER
}  // namespace tidegate
