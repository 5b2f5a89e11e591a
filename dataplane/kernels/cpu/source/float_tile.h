// The product of FLOAT32: rows times panels of sixteen outputs, in registers.
#pragma once

namespace tidegate {
namespace TIER {

// Where `panels` panels lie: output lane j of column i of panel p at p · panel + i · column + j.
struct Panels {
    const float* at;
    int64_t panel, column;
};

// out[r][p] (+)= Σᵢ x[r][i] · w[i][p], i ascending in every lane, so that a sum does not depend on the tile's shape.
template <int R, int P>
inline void float_tile(const float* x, int64_t x_stride, Panels w, int64_t columns, float* out, int64_t out_stride,
                       bool add) {
    F sums[R][P];
    UNROLL
    for (int r = 0; r < R; ++r) {
        UNROLL
        for (int p = 0; p < P; ++p) sums[r][p] = add ? load(out + r * out_stride + p * PANEL) : zero();
    }
    const float* column = w.at;
    for (int64_t i = 0; i < columns; ++i, column += w.column) {
        F weights[P];
        UNROLL
        for (int p = 0; p < P; ++p) weights[p] = load(column + p * w.panel);
        UNROLL
        for (int r = 0; r < R; ++r) {
            const F value = set(x[r * x_stride + i]);
            UNROLL
            for (int p = 0; p < P; ++p) sums[r][p] = fma(value, weights[p], sums[r][p]);
        }
    }
    UNROLL
    for (int r = 0; r < R; ++r) {
        UNROLL
        for (int p = 0; p < P; ++p) store(out + r * out_stride + p * PANEL, sums[r][p]);
    }
}

// The tile for the rows that are left.
template <int R, int P>
inline void some_rows(int64_t rows, const float* x, int64_t x_stride, Panels w, int64_t columns, float* out,
                      int64_t out_stride, bool add) {
    if constexpr (R > 0) {
        if (rows == R) {
            float_tile<R, P>(x, x_stride, w, columns, out, out_stride, add);
        } else {
            some_rows<R - 1, P>(rows, x, x_stride, w, columns, out, out_stride, add);
        }
    }
}

template <int P>
inline void all_rows(int64_t rows, const float* x, int64_t x_stride, Panels w, int64_t columns, float* out,
                     int64_t out_stride, bool add) {
    constexpr int FEW = min_of(FLOAT_ROWS, 6);
    int64_t row = 0;
    for (; row + FLOAT_ROWS <= rows; row += FLOAT_ROWS) {
        float_tile<FLOAT_ROWS, P>(x + row * x_stride, x_stride, w, columns, out + row * out_stride, out_stride, add);
    }
    for (; row < rows; row += FEW) {
        some_rows<FEW, P>(min_of(rows - row, FEW), x + row * x_stride, x_stride, w, columns, out + row * out_stride,
                          out_stride, add);
    }
}

// out [rows, panels · 16] (+)= x [rows, columns] · w.
NOT_INLINE void float_product(int64_t rows, int64_t panels, const float* x, int64_t x_stride, Panels w, int64_t columns,
                          float* out, int64_t out_stride, bool add) {
    int64_t panel = 0;
    for (; rows == 1 && panel + 4 <= panels; panel += 4) {
        float_tile<1, 4>(x, x_stride, {w.at + panel * w.panel, w.panel, w.column}, columns, out + panel * PANEL,
                         out_stride, add);
    }
    for (; FLOAT_PANELS > 1 && panel + FLOAT_PANELS <= panels; panel += FLOAT_PANELS) {
        all_rows<FLOAT_PANELS>(rows, x, x_stride, {w.at + panel * w.panel, w.panel, w.column}, columns,
                               out + panel * PANEL, out_stride, add);
    }
    for (; panel < panels; ++panel) {
        all_rows<1>(rows, x, x_stride, {w.at + panel * w.panel, w.panel, w.column}, columns, out + panel * PANEL,
                    out_stride, add);
    }
}

}  // namespace TIER
}  // namespace tidegate
