#include "run.h"

#include <algorithm>

namespace tidegate {
namespace {

constexpr int64_t CHUNKS_PER_THREAD = 8;    // so that the last ones end at about the same time
constexpr int64_t SMALLEST_PRODUCT = 32768;  // multiplications that are worth a chunk: a few microseconds
constexpr int64_t SMALLEST_COPY = 8192;      // the same of floats
constexpr int64_t FLOAT_ROW_CHUNK = 120;     // rows of FLOAT32 at once, whole tiles of every instruction set
constexpr int64_t ACTIVATION_BYTES = 1 << 17;  // of quantised rows at once, which stay in the second cache
constexpr int64_t QUANTISED_ROW_CHUNK = 120;
constexpr int64_t QUANTISED_TILE = 24;  // rows: whole tiles of every instruction set
constexpr int64_t SMALLEST_ATTENTION = 4096;  // pairs of queries and keys

}  // namespace

uint8_t* Buffer::reserve(int64_t bytes) {
    constexpr int64_t LINE = 64;
    if (bytes > size_) {
        memory_.reset();
        memory_.reset(new uint8_t[static_cast<size_t>(bytes + LINE)]);
        size_ = bytes;
    }
    const uintptr_t at = reinterpret_cast<uintptr_t>(memory_.get());
    return memory_.get() + (LINE - at % LINE) % LINE;
}

Program::Program(const Operation* from, int64_t count) : operations(from, from + count) {
    for (const Operation& op : operations) {
        if (op.kind == LINEAR) {
            if (op.weight.format != FLOAT32) {
                tasks.push_back({QUANTISE, &op});
                quantised_columns = max_of(quantised_columns, op.weight.columns);
                unpacked_columns = max_of(unpacked_columns, op.weight.columns);
            }
            tasks.push_back({MULTIPLY, &op});
        } else if (op.kind == ATTEND) {
            tasks.push_back({STORE, &op});
            tasks.push_back({ATTEND_SPANS, &op});
            tasks.push_back({MERGE, &op});
            attend = &op;
        } else {
            tasks.push_back({WHOLE, &op});
        }
    }
}

Run::Run(const Program& program, const Inputs& in, const Tier& tier, int threads, Workspaces& work)
    : program_(program), tier_(tier), work_(work), step_{} {
    step_.in = in;
    int64_t scratch = program.unpacked_columns * PANEL * 2;  // bytes, at most two a weight
    step_.activations = work.activations.reserve(in.n * program.quantised_columns * tier.activation_bytes);
    const int64_t blocks = in.n * program.quantised_columns / BLOCK;
    step_.quantised =
        reinterpret_cast<Quantised*>(work.quantised.reserve(blocks * static_cast<int64_t>(sizeof(Quantised))));
    if (program.attend) {
        plan_attention(threads);
        const int64_t floats = attention_floats(step_.attention.share, step_.attention.width);
        scratch = max_of(scratch, floats * static_cast<int64_t>(sizeof(float)));
    }
    work.threads.resize(static_cast<size_t>(threads));
    for (Buffer& buffer : work.threads) scratch_.push_back(buffer.reserve(scratch));
    work.splits.clear();
    for (const Task& task : program.tasks) work.splits.push_back(split_of(task, threads));
}

void Run::execute(int64_t task, int64_t chunk, int thread) {
    const size_t at = static_cast<size_t>(task);
    tier_.execute(step_, program_.tasks[at], work_.splits[at], chunk, scratch_[static_cast<size_t>(thread)]);
}

// Who attends to what, the same in every layer. The longest pieces come first: prefills from their ends, then decodes.
void Run::plan_attention(int threads) {
    Attention& all = step_.attention;
    all.key_heads = program_.attend->y.width / step_.in.head_dim;
    all.share = program_.attend->x.width / step_.in.head_dim / all.key_heads;
    all.width = ceil_div(step_.in.head_dim, PANEL) * PANEL;
    work_.pieces.clear();
    work_.merges.clear();
    int64_t row = step_.in.n;
    for (int64_t request = step_.in.requests - 1; request >= 0; --request) {
        row -= step_.in.counts[request];
        if (step_.in.counts[request] == 1) {
            add_decode(request, row);
        } else {
            add_prefill(request, row);
        }
    }
    group_pieces(threads);
    const int64_t floats = partials_ * all.share * (all.width + 2);
    all.partials = reinterpret_cast<float*>(work_.partials.reserve(floats * static_cast<int64_t>(sizeof(float))));
    all.pieces = work_.pieces.data();
    all.merges = work_.merges.data();
    all.merge_count = static_cast<int64_t>(work_.merges.size());
    all.groups = work_.groups.data();
    all.group_count = static_cast<int64_t>(work_.groups.size()) - 1;
}

void Run::add_decode(int64_t request, int64_t row) {
    const int64_t position = step_.in.starts[request], keys = position + 1, spans = ceil_div(keys, KEY_SPAN);
    for (int64_t head = 0; head < step_.attention.key_heads; ++head) {
        if (spans == 1) {
            work_.pieces.push_back({request, row, 1, position, head, 0, keys, -1});
            continue;
        }
        work_.merges.push_back({row, position, head, partials_, spans});
        for (int64_t span = 0; span < spans; ++span) {
            const int64_t first = span * KEY_SPAN;
            work_.pieces.push_back({request, row, 1, position, head, first, min_of(first + KEY_SPAN, keys), partials_++});
        }
    }
}

void Run::add_prefill(int64_t request, int64_t row) {
    const int64_t count = step_.in.counts[request], start = step_.in.starts[request];
    const int64_t tile = max_of(1, QUERY_ROWS / step_.attention.share);
    for (int64_t at = (count - 1) / tile * tile; at >= 0; at -= tile) {
        const int64_t queries = min_of(tile, count - at), position = start + at;
        for (int64_t head = 0; head < step_.attention.key_heads; ++head) {
            work_.pieces.push_back({request, row + at, queries, position, head, 0, position + queries, -1});
        }
    }
}

// Neighbours in one chunk until it is worth its claim.
void Run::group_pieces(int threads) {
    const auto cost = [this](const Piece& piece) {
        return (piece.last_key - piece.first_key) * piece.queries * step_.attention.share;
    };
    int64_t all = 0;
    for (const Piece& piece : work_.pieces) all += cost(piece);
    int64_t enough = max_of(SMALLEST_ATTENTION, all / (threads * CHUNKS_PER_THREAD));
    enough = max_of(enough, all / (Pool::MOST_CHUNKS / 2));
    work_.groups.assign(1, 0);
    int64_t held = 0;
    for (size_t i = 0; i < work_.pieces.size(); ++i) {
        held += cost(work_.pieces[i]);
        if (held >= enough || i + 1 == work_.pieces.size()) {
            work_.groups.push_back(static_cast<int64_t>(i) + 1);
            held = 0;
        }
    }
}

Split Run::split_of(const Task& task, int threads) const {
    const Operation& op = *task.operation;
    const int64_t n = step_.in.n, wanted = threads * CHUNKS_PER_THREAD;
    if (task.phase == ATTEND_SPANS) return {step_.attention.group_count, 0, 0, 1};
    if (task.phase == MERGE) return {step_.attention.merge_count, 0, 0, 1};
    if (task.phase != MULTIPLY) {
        const int64_t width = max_of(max_of(op.out.width, op.x.width), 1);
        const int64_t rows = max_of(ceil_div(n, wanted), ceil_div(SMALLEST_COPY, width));
        return {ceil_div(n, rows), rows, 0, 1};
    }
    const Matrix& weight = op.weight;
    const bool plain = weight.format == FLOAT32;
    int64_t most = FLOAT_ROW_CHUNK;
    if (!plain) {
        const int64_t fitting = ACTIVATION_BYTES / weight.columns / QUANTISED_TILE * QUANTISED_TILE;
        most = min_of(max_of(fitting, QUANTISED_TILE), QUANTISED_ROW_CHUNK);
    }
    const int64_t row_groups = ceil_div(n, most);
    const int64_t tile = plain ? FLOAT_ROW_CHUNK / 10 : QUANTISED_TILE;
    const int64_t rows = min_of(n, ceil_div(ceil_div(n, row_groups), tile) * tile);
    const int64_t all = ceil_div(weight.rows, PANEL);
    const int64_t groups_of_rows = ceil_div(n, rows);
    int64_t panels = ceil_div(all * groups_of_rows, wanted);
    panels = max_of(panels, ceil_div(SMALLEST_PRODUCT, rows * weight.columns * PANEL));
    if (plain) panels = ceil_div(panels, 4) * 4;
    panels = min_of(panels, all);
    const int64_t panel_groups = ceil_div(all, panels);
    return {groups_of_rows * panel_groups, rows, panels, panel_groups};
}

}  // namespace tidegate
