// What Python hands over: plain structs, mirrored field by field in executor.py.
//
// All integers are 64 bits wide, so that no field needs padding. Pointers stay owned by Python.
#pragma once

#include <cstdint>

namespace tidegate {

// The order of executor.py's KINDS.
enum Kind : int64_t {
    EMBED,
    TAKE,
    LINEAR,
    ADD,
    SCALE,
    SOFTCAP,
    RMS_NORM,
    LAYER_NORM,
    ROTATE,
    SILU_MUL,
    GELU_TANH_MUL,
    GELU_TANH,
    ATTEND,
};

enum Format : int64_t { FLOAT32, INT8, UINT4 };

// A range of columns of a value in the arena, or with buffer < 0 of the run's output.
struct Columns {
    int64_t buffer, stride, at, width;
};

struct Matrix {
    int64_t format, rows, columns;
    int64_t minima;  // whether `scales` holds minima beside the scales
    const uint8_t* values;
    const uint8_t* scales;
};

struct Operation {
    int64_t kind;
    Columns out, x, y, z;  // of Attend x, y, z are q, k, v
    Matrix weight;
    const float* a;    // bias, norm weight or cosines
    const float* b;    // norm bias or sines
    int64_t size;      // columns of a norm's group or of a head
    int64_t turned;    // columns of a head that rotate
    int64_t layer;
    int64_t window;    // keys a query sees; 0: all
    double factor;     // factor, epsilon or the scale of scores
    double cap;        // soft-cap; 0: none
};

struct Inputs {
    int64_t n, n_max;
    float* arena;
    const int64_t* ids;
    const int64_t* positions;
    // The paged KV, per layer [key heads, blocks, block_size · head_dim], and the step's requests, decodes first.
    float* const* keys;
    float* const* values;
    int64_t blocks, block_size, head_dim;
    const int64_t* slots;   // [n]
    const int64_t* tables;  // [requests, table_width]
    int64_t table_width, requests;
    const int64_t* starts;  // [requests]
    const int64_t* counts;  // [requests]
    const float* source;    // what Take takes rows of, `source_stride` floats apart
    int64_t source_stride;
    const int64_t* rows;
    float* output;
    int64_t output_width;
};

}  // namespace tidegate
