// One run of a program: its inputs, its tasks, and the memory that the tasks share.
#pragma once

#include <cstdint>

#include "abi.h"

namespace tidegate {

constexpr int64_t PANEL = 16;       // outputs that lie side by side in a packed matrix, and lanes of a vector
constexpr int64_t BLOCK = 32;       // columns that share a scale
constexpr int64_t KEY_TILE = 64;    // keys that one pass of a softmax takes in
constexpr int64_t KEY_SPAN = 512;   // keys that are attended to by themselves before they are merged with those before
constexpr int64_t QUERY_ROWS = 96;  // queries times heads that a prefill attends with at a time

// What an operation is cut into. A LINEAR of quantised weights is two, an ATTEND three.
enum Phase { WHOLE, QUANTISE, MULTIPLY, STORE, ATTEND_SPANS, MERGE };

struct Task {
    Phase phase;
    const Operation* operation;
};

// A task's chunks: `rows` rows each (the last may have fewer), of a product also `panels` panels of outputs.
struct Split {
    int64_t chunks, rows, panels, panel_groups;
};

// A row's block of 32 quantised activations: x ≈ scale · q.
struct Quantised {
    float scale;
    float sum;      // scale · Σ q
    int32_t total;  // Σ q
};

// Softmax so far of some rows: out [rows, width] is Σ exp(score − peak) · v, total Σ exp(score − peak).
struct Softmax {
    float* peak;
    float* total;
    float* out;
};

// A part of the step's attention that one thread computes: `queries` tokens of a request from row `row`, the first at
// `position`, for one key head. A decode is cut by spans of keys, and leaves its part in `partial` if there are more.
struct Piece {
    int64_t request, row, queries, position, head;
    int64_t first_key, last_key;  // the span [first_key, last_key)
    int64_t partial;              // −1: writes its result
};

// A decode whose spans are to be merged: those at `partial` … `partial + spans`.
struct Merge {
    int64_t row, position, head, partial, spans;
};

struct Attention {
    const Piece* pieces;
    const int64_t* groups;  // [group_count + 1] where in `pieces` each chunk begins
    int64_t group_count;
    const Merge* merges;
    int64_t merge_count;
    int64_t key_heads, share, width;  // share: query heads of a key head; width: head_dim in whole panels
    float* partials;                  // each: peaks [share], totals [share], out [share, width]
};

struct Step {
    Inputs in;
    Attention attention;
    void* activations;      // [n, columns], bytes or 16-bit words as the tier multiplies them
    Quantised* quantised;   // [n, columns / BLOCK]
};

// What an instruction set offers. `scratch` is a thread's own memory.
struct Tier {
    void (*execute)(const Step&, const Task&, const Split&, int64_t chunk, uint8_t* scratch);
    int64_t activation_bytes;  // the most that one quantised activation takes
};

extern const Tier TIER_OF_LIBRARY;

// Static, as this header is compiled for an instruction set and without: the linker must not take one for the other.
static constexpr int64_t min_of(int64_t x, int64_t y) { return x < y ? x : y; }
static constexpr int64_t max_of(int64_t x, int64_t y) { return x < y ? y : x; }
static constexpr int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

static inline float* at(const Step& step, const Columns& value) {
    return value.buffer < 0 ? step.in.output + value.at : step.in.arena + value.buffer * step.in.n_max + value.at;
}
static inline float* kv_block(const Step& step, float* const* pool, int64_t layer, int64_t head, int64_t block) {
    return pool[layer] + (head * step.in.blocks + block) * step.in.block_size * step.in.head_dim;
}
static inline Softmax partial_of(const Attention& attention, int64_t index) {
    float* at = attention.partials + index * attention.share * (attention.width + 2);
    return {at, at + attention.share, at + 2 * attention.share};
}
// Of the scratch of a piece: queries, scores, two softmax states, keys turned and values.
static inline int64_t attention_floats(int64_t share, int64_t width) {
    return max_of(share, QUERY_ROWS) * (3 * width + KEY_TILE + 4) + 2 * KEY_TILE * width;
}

}  // namespace tidegate
