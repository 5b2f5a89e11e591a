// LINEAR: a chunk of rows times a chunk of panels, for weights of each format.
//
// A packed matrix is cut into panels of sixteen outputs; the last is filled up with zeros. Of a panel
//   FLOAT32   values [columns][16 outputs]
//   INT8      values [blocks][8][16 outputs][4 columns], of 32 columns each
//   UINT4     values [blocks][4][16 outputs][4 columns], columns 4g… in the low and 16 + 4g… in the high nibbles
//             scales [blocks][16 outputs] of half precision, and beside each sixteen as many minima, if there are any
#pragma once

namespace tidegate {
namespace TIER {

constexpr int64_t COLUMN_BLOCK = 256;  // of FLOAT32: sixteen kilobytes of a panel stay in the first cache

constexpr float SMALLEST_PEAK = 1e-30f;  // of activations that are not taken for 0

struct Range {
    int64_t row, rows, panel, panels;
};

inline Range range_of(const Step& step, const Matrix& weight, const Split& split, int64_t chunk) {
    Range out;
    out.row = chunk / split.panel_groups * split.rows;
    out.panel = chunk % split.panel_groups * split.panels;
    const int64_t all = ceil_div(weight.rows, PANEL), rows_left = step.in.n - out.row;
    out.rows = min_of(split.rows, rows_left);
    out.panels = min_of(split.panels, all - out.panel);
    return out;
}

inline void add_bias(const float* bias, float* out, int64_t stride, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; ++r, out += stride) {
        int64_t i = 0;
        for (; i + PANEL <= width; i += PANEL) store(out + i, load(out + i) + load(bias + i));
        if (i < width) store_part(out + i, load_part(out + i, width - i) + load_part(bias + i, width - i), width - i);
    }
}

// The last panel of a matrix whose rows are not whole panels, by way of a buffer.
inline void float_last_panel(const float* x, int64_t x_stride, const Matrix& weight, int64_t panel, float* out,
                             int64_t out_stride, int64_t rows) {
    float buffer[FLOAT_ROWS * PANEL];
    const Panels w{reinterpret_cast<const float*>(weight.values) + panel * PANEL * weight.columns, 0, PANEL};
    for (int64_t row = 0; row < rows; row += FLOAT_ROWS) {
        const int64_t some = rows - row < FLOAT_ROWS ? rows - row : FLOAT_ROWS;
        all_rows<1>(some, x + row * x_stride, x_stride, w, weight.columns, buffer, PANEL, false);
        for (int64_t r = 0; r < some; ++r) {
            store_part(out + (row + r) * out_stride, load(buffer + r * PANEL), weight.rows - panel * PANEL);
        }
    }
}

inline void float_linear(const Step& step, const Operation& op, const Split& split, int64_t chunk) {
    const Matrix& weight = op.weight;
    const Range range = range_of(step, weight, split, chunk);
    const float* x = at(step, op.x) + range.row * op.x.stride;
    float* out = at(step, op.out) + range.row * op.out.stride + range.panel * PANEL;
    const int64_t width = min_of(range.panels * PANEL, weight.rows - range.panel * PANEL);
    const int64_t whole = width / PANEL, panel_floats = PANEL * weight.columns;
    const float* values = reinterpret_cast<const float*>(weight.values) + range.panel * panel_floats;
    for (int64_t column = 0; column < weight.columns; column += COLUMN_BLOCK) {
        const int64_t columns = min_of(COLUMN_BLOCK, weight.columns - column);
        float_product(range.rows, whole, x + column, op.x.stride,
                      {values + column * PANEL, panel_floats, PANEL}, columns, out, op.out.stride, column > 0);
    }
    if (whole < range.panels) {
        float_last_panel(x, op.x.stride, weight, range.panel + whole, out + whole * PANEL, op.out.stride, range.rows);
    }
    if (op.a) add_bias(op.a + range.panel * PANEL, out, op.out.stride, range.rows, width);
}

template <class Activation>
inline void store_quantised(Activation* p, I x) {
    if constexpr (sizeof(Activation) == 1) {
        store_bytes(p, x);
    } else {
        store_words(p, x);
    }
}

// Rows of x to signed bytes with a scale per block: q = round(x · 127 / max |x|). What is not finite makes its row NaN.
template <class W>
inline void quantise(const Step& step, const Operation& op, int64_t row, int64_t rows) {
    using Activation = typename W::Activation;
    const int64_t columns = op.weight.columns, blocks = columns / BLOCK;
    for (int64_t r = row; r < row + rows; ++r) {
        const float* x = at(step, op.x) + r * op.x.stride;
        Activation* q = static_cast<Activation*>(step.activations) + r * columns;
        Quantised* about = step.quantised + r * blocks;
        for (int64_t block = 0; block < blocks; ++block, x += BLOCK, q += BLOCK, ++about) {
            const F first = load(x), later = load(x + PANEL);
            const float peak = largest(max(abs(first), abs(later)));
            const float broken = sum(first * zero() + later * zero());  // NaN if a number is not finite, or else 0
            const float inverse = peak > SMALLEST_PEAK ? 127.0f / peak : 0.0f;
            I a = round(first * set(inverse)), b = round(later * set(inverse));
            if (broken != 0.0f) a = b = set_int(0);
            store_quantised(q, a);
            store_quantised(q + PANEL, b);
            const int32_t total = sum(a) + sum(b);
            const float scale = peak / 127.0f + broken;
            *about = {scale, scale * static_cast<float>(total), total};
        }
    }
}

struct Scales {
    const uint16_t* at;
    int64_t stride;  // 16, or 32 with minima
};

// sums[r · 16 …] = Σ over blocks, in order, of scale · x's scale · Σ q·x + minimum · x's sum. The products within a
// block are exact integers, so a row's result depends on nothing but the row and the weights.
//
// The sums of several rows lie in memory between blocks: in registers they would push out the integers of the loop.
template <class W, int R, bool UNPACKED, bool MINIMA>
inline void quantised_tile(const uint8_t* w, Scales scales, const typename W::Activation* x, int64_t stride,
                           const Quantised* about, int64_t blocks, float* sums) {
    UNROLL
    for (int r = 0; r < R; ++r) store(sums + r * PANEL, zero());
    for (int64_t block = 0; block < blocks; ++block) {
        I dots[R];
        UNROLL
        for (int r = 0; r < R; ++r) dots[r] = set_int(W::OFFSET * (W::OFFSET ? about[r * blocks + block].total : 0));
        if constexpr (UNPACKED) {
            W::template dot_unpacked<R>(w, x + block * BLOCK, stride, dots);
        } else {
            W::template dot<R>(w, x + block * BLOCK, stride, dots);
        }
        w += UNPACKED ? W::UNPACKED : W::BYTES;
        const F scale = load_half(scales.at), minimum = MINIMA ? load_half(scales.at + PANEL) : zero();
        UNROLL
        for (int r = 0; r < R; ++r) {
            const Quantised& row = about[r * blocks + block];
            F sum = fma(to_float(dots[r]), scale * set(row.scale), load(sums + r * PANEL));
            if constexpr (MINIMA) sum = fma(minimum, set(row.sum), sum);
            store(sums + r * PANEL, sum);
        }
        if constexpr (R > 1) KEEP_IN_MEMORY(sums);
        scales.at += scales.stride;
    }
}

// One panel's product with `rows` rows, R at a time.
template <class W, int R, bool UNPACKED, bool MINIMA>
NOT_INLINE void quantised_rows(const Step& step, const Operation& op, const uint8_t* w, Scales scales, int64_t panel,
                           int64_t row, int64_t rows) {
    const int64_t columns = op.weight.columns, blocks = columns / BLOCK;
    const int64_t lanes = min_of(PANEL, op.weight.rows - panel * PANEL);
    const F bias = op.a ? load_part(op.a + panel * PANEL, lanes) : zero();
    for (; rows >= R; row += R, rows -= R) {
        alignas(64) float sums[R * PANEL];
        quantised_tile<W, R, UNPACKED, MINIMA>(
            w, scales, static_cast<const typename W::Activation*>(step.activations) + row * columns, columns,
            step.quantised + row * blocks, blocks, sums);
        float* out = at(step, op.out) + row * op.out.stride + panel * PANEL;
        for (int r = 0; r < R; ++r, out += op.out.stride) {
            const F value = op.a ? load(sums + r * PANEL) + bias : load(sums + r * PANEL);
            if (lanes == PANEL) {
                store(out, value);
            } else {
                store_part(out, value, lanes);
            }
        }
    }
    if constexpr (R > 1) {
        if (rows > 0) quantised_rows<W, R / 2, UNPACKED, MINIMA>(step, op, w, scales, panel, row, rows);
    }
}

template <class W, bool MINIMA>
inline void quantised_linear(const Step& step, const Operation& op, const Split& split, int64_t chunk,
                             uint8_t* scratch) {
    const Range range = range_of(step, op.weight, split, chunk);
    const int64_t blocks = op.weight.columns / BLOCK, halves = MINIMA ? 2 * PANEL : PANEL;
    for (int64_t panel = range.panel; panel < range.panel + range.panels; ++panel) {
        const uint8_t* w = op.weight.values + panel * blocks * W::BYTES;
        const Scales scales{reinterpret_cast<const uint16_t*>(op.weight.scales) + panel * blocks * halves, halves};
        if (range.rows > QUANTISED_ROWS) {
            for (int64_t block = 0; block < blocks; ++block) {
                W::unpack(w + block * W::BYTES, scratch + block * W::UNPACKED);
            }
            quantised_rows<W, QUANTISED_ROWS, true, MINIMA>(step, op, scratch, scales, panel, range.row, range.rows);
        } else {
            quantised_rows<W, QUANTISED_ROWS, false, MINIMA>(step, op, w, scales, panel, range.row, range.rows);
        }
    }
}

inline void linear(const Step& step, const Operation& op, const Split& split, int64_t chunk, uint8_t* scratch) {
    const Matrix& weight = op.weight;
    if (weight.format == FLOAT32) {
        float_linear(step, op, split, chunk);
    } else if (weight.format == UINT4) {
        quantised_linear<Uint4, true>(step, op, split, chunk, scratch);
    } else if (weight.minima) {
        quantised_linear<Int8, true>(step, op, split, chunk, scratch);
    } else {
        quantised_linear<Int8, false>(step, op, split, chunk, scratch);
    }
}

// One row of a packed matrix as numbers: scale · q + minimum, rounded as `packing.unpack` rounds.
inline void unpack_row(const Matrix& weight, int64_t row, float* out) {
    const int64_t panel = row / PANEL, lane = row % PANEL;
    if (weight.format == FLOAT32) {
        const float* at = reinterpret_cast<const float*>(weight.values) + panel * PANEL * weight.columns + lane;
        for (int64_t i = 0; i < weight.columns; ++i) out[i] = at[i * PANEL];
        return;
    }
    const int64_t blocks = weight.columns / BLOCK, halves = weight.minima ? 2 * PANEL : PANEL;
    const bool nibbles = weight.format == UINT4;
    const int64_t bytes = nibbles ? BLOCK * PANEL / 2 : BLOCK * PANEL;
    const uint8_t* w = weight.values + panel * blocks * bytes + lane * 4;
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(weight.scales) + panel * blocks * halves;
    for (int64_t block = 0; block < blocks; ++block, w += bytes, scales += halves) {
        float pair[2][PANEL];
        store(pair[0], load_half(scales));
        store(pair[1], weight.minima ? load_half(scales + PANEL) : zero());
        const float scale = pair[0][lane], minimum = pair[1][lane];
        for (int64_t i = 0; i < BLOCK; ++i) {
            const int64_t group = i / 4, at = nibbles ? group % 4 * 64 + i % 4 : group * 64 + i % 4;
            const int q = !nibbles ? static_cast<int8_t>(w[at]) : group < 4 ? w[at] & 15 : w[at] >> 4;
            out[block * BLOCK + i] = scale * static_cast<float>(q) + minimum;
        }
    }
}

}  // namespace TIER
}  // namespace tidegate
