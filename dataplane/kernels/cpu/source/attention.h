// Paged attention, reading keys and values in the blocks where they lie.
//
// The keys of a request are taken in tiles of KEY_TILE at fixed places of its sequence, and tiles in spans of KEY_SPAN.
// A span is a softmax by itself, merged with those before it. For a query a key that it does not see counts as exactly
// 0, so what it attends to is the same to the bit in whatever chunk, batch or thread it is computed.
#pragma once

namespace tidegate {
namespace TIER {

constexpr int64_t FEW_ROWS = 16;  // with which memory is the limit, not arithmetic
constexpr float NO_PEAK = -1e30f;  // of scores when no key was seen; finite, so that differences are numbers

// What a piece works with, in the thread's scratch. Rows are queries times the heads that share the key head.
struct Workspace {
    float* queries;  // [rows, width], scaled
    float* scores;   // [rows, KEY_TILE]
    float* keys;     // [KEY_TILE / 16][width][16]: panels of sixteen keys, as a FLOAT32 matrix has
    float* values;   // [KEY_TILE, width], for heads that are not whole panels
    Softmax sofar, span;
};

inline Softmax softmax_at(float*& at, int64_t rows, int64_t width) {
    const Softmax out{at, at + rows, at + 2 * rows};
    at += rows * (width + 2);
    return out;
}

inline Workspace workspace_at(float* at, int64_t share, int64_t width) {
    const int64_t rows = max_of(share, QUERY_ROWS);
    Workspace out;
    out.queries = at;
    out.scores = out.queries + rows * width;
    out.keys = out.scores + rows * KEY_TILE;
    out.values = out.keys + KEY_TILE * width;
    at = out.values + KEY_TILE * width;
    out.sofar = softmax_at(at, rows, width);
    out.span = softmax_at(at, rows, width);
    return out;
}

inline void store_kv(const Step& step, const Operation& op, int64_t row) {
    const int64_t slot = step.in.slots[row], dim = step.in.head_dim, size = step.in.block_size;
    const float* k = at(step, op.y) + row * op.y.stride;
    const float* v = at(step, op.z) + row * op.z.stride;
    for (int64_t head = 0; head < step.attention.key_heads; ++head, k += dim, v += dim) {
        const int64_t offset = slot % size * dim;
        copy(k, kv_block(step, step.in.keys, op.layer, head, slot / size) + offset, dim);
        copy(v, kv_block(step, step.in.values, op.layer, head, slot / size) + offset, dim);
    }
}

// One request's keys or values of one head and layer.
struct Paged {
    const float* pool;  // of the head: [blocks, block_size · dim]
    const int64_t* table;
    int64_t block_size, dim;

    const float* at(int64_t key) const {
        return pool + (table[key / block_size] * block_size + key % block_size) * dim;
    }
    // The first key behind the block of `key`.
    int64_t block_end(int64_t key) const { return (key / block_size + 1) * block_size; }
};

inline Paged paged(const Step& step, float* const* pool, int64_t layer, const Piece& piece) {
    return {kv_block(step, pool, layer, piece.head, 0), step.in.tables + piece.request * step.in.table_width,
            step.in.block_size, step.in.head_dim};
}

// Keys [from, to) of the tile at `first` as columns of panels; columns of a whole panel's other keys are what is there.
inline void turn_keys(const Paged& keys, int64_t first, int64_t from, int64_t to, int64_t width, float* out) {
    const bool together = keys.block_size % PANEL == 0 && keys.dim % 8 == 0;
    for (int64_t panel = first + (from - first) / PANEL * PANEL; panel < to; panel += PANEL) {
        float* columns = out + (panel - first) * width;
        if (together) {
            const float* at = keys.at(panel);
            for (int64_t i = 0; i < keys.dim; i += 8) transpose16x8(at + i, keys.dim, columns + i * PANEL);
            continue;
        }
        for (int64_t lane = 0; lane < PANEL; ++lane) {
            const bool there = panel + lane >= from && panel + lane < to;
            const float* at = there ? keys.at(panel + lane) : nullptr;
            for (int64_t i = 0; i < keys.dim; ++i) columns[i * PANEL + lane] = there ? at[i] : 0.0f;
        }
    }
}

// Ask for the rows of keys [from, to), so that they are on their way while others are worked on. A block of a head is
// about as large as a page, where the processor's own prefetching stops.
inline void prefetch(const Paged& rows, int64_t from, int64_t to) {
    constexpr int64_t LINE_FLOATS = 16;
    while (from < to) {
        const int64_t end = min_of(to, rows.block_end(from));
        const float* at = rows.at(from);
        for (int64_t i = 0; i < (end - from) * rows.dim; i += LINE_FLOATS) __builtin_prefetch(at + i);
        from = end;
    }
}

// Sixteen scores of keys from `key` on, those outside [from, to) −∞.
inline F seen_scores(F scores, int64_t key, int64_t from, int64_t to) {
    if (key >= from && key + PANEL <= to) return scores;
    float kept[PANEL];
    store(kept, scores);
    for (int64_t i = 0; i < PANEL; ++i) {
        if (key + i < from || key + i >= to) kept[i] = -__builtin_inff();
    }
    return load(kept);
}

// Scores of a row's tile become weights exp(score − peak), and what was summed before is scaled to the new peak.
inline void soften(float* scores, int64_t tile, int64_t from, int64_t to, float cap, int64_t row, int64_t width,
                   const Softmax& state) {
    constexpr int VECTORS = KEY_TILE / PANEL;
    F v[VECTORS];
    F top = set(state.peak[row]);
    UNROLL
    for (int i = 0; i < VECTORS; ++i) {
        const int64_t key = tile + i * PANEL;
        if (key + PANEL <= from || key >= to) {
            v[i] = set(-__builtin_inff());
            continue;
        }
        v[i] = load(scores + i * PANEL);
        if (cap > 0.0f) v[i] = softcap(v[i], set(cap));
        v[i] = seen_scores(v[i], key, from, to);
        top = max(v[i], top);
    }
    const float peak = largest(top);
    F total = zero();
    UNROLL
    for (int i = 0; i < VECTORS; ++i) {
        v[i] = exp(v[i] - set(peak));
        store(scores + i * PANEL, v[i]);
        total = total + v[i];
    }
    if (peak != state.peak[row]) {
        float factor[PANEL];
        store(factor, exp(set(state.peak[row] - peak)));
        state.total[row] *= factor[0];
        float* out = state.out + row * width;
        for (int64_t i = 0; i < width; i += PANEL) store(out + i, load(out + i) * set(factor[0]));
    }
    state.peak[row] = peak;
    state.total[row] += sum(total);
}

// out += weights · values over keys [from, to), run by run of keys that lie one after another.
inline void add_values(const Paged& values, int64_t from, int64_t to, int64_t rows, const float* weights,
                       int64_t width, float* copied, float* out) {
    const int64_t panels = width / PANEL;
    if (values.dim % PANEL) {
        for (int64_t key = from; key < to; ++key) copy(values.at(key), copied + (key - from) * width, values.dim);
        float_product(rows, panels, weights, KEY_TILE, {copied, PANEL, width}, to - from, out, width, true);
        return;
    }
    while (from < to) {
        const float* at = values.at(from);
        int64_t end = min_of(to, values.block_end(from));
        while (end < to && values.at(end) == at + (end - from) * values.dim) {
            end = min_of(to, end + values.block_size);
        }
        float_product(rows, panels, weights, KEY_TILE, {at, PANEL, values.dim}, end - from, out, width, true);
        weights += end - from;
        from = end;
    }
}

// The first key that a query at `position` sees.
inline int64_t first_seen(const Operation& op, int64_t position) {
    return op.window && position >= op.window ? position - op.window + 1 : 0;
}

// Attend with the piece's queries to the keys [first, last) of one span.
inline void attend_span(const Step& step, const Operation& op, const Piece& piece, int64_t first, int64_t last,
                        const Workspace& work, const Softmax& state) {
    const int64_t share = step.attention.share, width = step.attention.width, rows = piece.queries * share;
    const Paged keys = paged(step, step.in.keys, op.layer, piece);
    const Paged values = paged(step, step.in.values, op.layer, piece);
    for (int64_t r = 0; r < rows; ++r) {
        state.peak[r] = NO_PEAK;
        state.total[r] = 0.0f;
    }
    for (int64_t i = 0; i < rows * width; i += PANEL) store(state.out + i, zero());
    const int64_t begin = max_of(first, first_seen(op, piece.position));
    const int64_t end = min_of(last, piece.position + piece.queries);
    for (int64_t tile = first; tile < end; tile += KEY_TILE) {
        const int64_t from = max_of(tile, begin), to = min_of(tile + KEY_TILE, end);
        if (from >= to) continue;
        if (rows <= FEW_ROWS) prefetch(values, from, to);
        turn_keys(keys, tile, from, to, width, work.keys);
        const int64_t skipped = (from - tile) / PANEL, panels = ceil_div(to - tile, PANEL) - skipped;
        float_product(rows, panels, work.queries, width, {work.keys + skipped * PANEL * width, PANEL * width, PANEL},
                      keys.dim, work.scores + skipped * PANEL, KEY_TILE, false);
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t position = piece.position + r / share;
            soften(work.scores + r * KEY_TILE, tile, max_of(tile, first_seen(op, position)),
                   min_of(tile + KEY_TILE, position + 1), static_cast<float>(op.cap), r, width, state);
        }
        if (rows <= FEW_ROWS) prefetch(keys, to, min_of(to + KEY_TILE, end));
        add_values(values, from, to, rows, work.scores + (from - tile), width, work.values, state.out);
    }
}

// Take the softmax of a later span into that of all before it.
inline void merge(const Softmax& before, const Softmax& later, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; ++r) {
        const float peak = later.peak[r] > before.peak[r] ? later.peak[r] : before.peak[r];
        float old_factor[PANEL], new_factor[PANEL];
        store(old_factor, exp(set(before.peak[r] - peak)));
        store(new_factor, exp(set(later.peak[r] - peak)));
        const F a = set(old_factor[0]), b = set(new_factor[0]);
        before.total[r] = before.total[r] * old_factor[0] + later.total[r] * new_factor[0];
        before.peak[r] = peak;
        float* out = before.out + r * width;
        const float* more = later.out + r * width;
        for (int64_t i = 0; i < width; i += PANEL) store(out + i, load(out + i) * a + load(more + i) * b);
    }
}

// Write what `queries` tokens from `row` attend to with the heads of one key head.
inline void finish(const Step& step, const Operation& op, int64_t row, int64_t queries, int64_t head,
                   const Softmax& state) {
    const int64_t share = step.attention.share, width = step.attention.width, dim = step.in.head_dim;
    for (int64_t r = 0; r < queries * share; ++r) {
        float* out = at(step, op.out) + (row + r / share) * op.out.stride + (head * share + r % share) * dim;
        const float* from = state.out + r * width;
        const F total = set(state.total[r]);
        each_vector(dim, [=](int64_t i, auto, auto put) { put(out + i, load(from + i) / total); });
    }
}

inline void load_queries(const Step& step, const Operation& op, const Piece& piece, float* out) {
    const int64_t share = step.attention.share, width = step.attention.width, dim = step.in.head_dim;
    for (int64_t r = 0; r < piece.queries * share; ++r, out += width) {
        const float* q =
            at(step, op.x) + (piece.row + r / share) * op.x.stride + (piece.head * share + r % share) * dim;
        scale(q, static_cast<float>(op.factor), out, dim);
    }
}

inline void attend(const Step& step, const Operation& op, const Piece& piece, uint8_t* scratch) {
    const Attention& all = step.attention;
    const Workspace work = workspace_at(reinterpret_cast<float*>(scratch), all.share, all.width);
    const int64_t begin = first_seen(op, piece.position) / KEY_SPAN * KEY_SPAN;
    if (piece.partial >= 0) {
        if (piece.last_key <= begin) return;
        load_queries(step, op, piece, work.queries);
        attend_span(step, op, piece, piece.first_key, piece.last_key, work, partial_of(all, piece.partial));
        return;
    }
    load_queries(step, op, piece, work.queries);
    attend_span(step, op, piece, begin, begin + KEY_SPAN, work, work.sofar);
    for (int64_t span = begin + KEY_SPAN; span < piece.last_key; span += KEY_SPAN) {
        attend_span(step, op, piece, span, span + KEY_SPAN, work, work.span);
        merge(work.sofar, work.span, piece.queries * all.share, all.width);
    }
    finish(step, op, piece.row, piece.queries, piece.head, work.sofar);
}

inline void merge_spans(const Step& step, const Operation& op, const Merge& of) {
    const Attention& all = step.attention;
    const int64_t begin = first_seen(op, of.position) / KEY_SPAN;
    const Softmax sofar = partial_of(all, of.partial + begin);
    for (int64_t span = begin + 1; span < of.spans; ++span) {
        merge(sofar, partial_of(all, of.partial + span), all.share, all.width);
    }
    finish(step, op, of.row, 1, of.head, sofar);
}

}  // namespace TIER
}  // namespace tidegate
