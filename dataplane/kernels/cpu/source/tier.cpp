// Everything that is computed, compiled for one instruction set. TIER names it and is the namespace of all its code, so
// that the linker can take none of it for a function of the same name that was compiled for another.

#include "step.h"

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#define NOT_INLINE static __attribute__((noinline))
// The compiler may not carry what lies there in registers over this point.
#define KEEP_IN_MEMORY(pointer) __asm__ volatile("" : "+r"(pointer) : : "memory")

#if defined(TIER_AVX512)
#define TIER avx512
#include "dot_avx512.h"
#elif defined(TIER_AVX2)
#define TIER avx2
#include "dot_avx2.h"
#elif defined(TIER_NEON)
#define TIER neon
#include "dot_neon.h"
#else
#define TIER scalar
#include "dot_scalar.h"
#endif

#include "functions.h"
#include "float_tile.h"
#include "linear.h"
#include "elementwise.h"
#include "attention.h"

namespace tidegate {
namespace TIER {

inline void quantise_rows(const Step& step, const Operation& op, int64_t row, int64_t rows) {
    if (op.weight.format == UINT4) {
        quantise<Uint4>(step, op, row, rows);
    } else {
        quantise<Int8>(step, op, row, rows);
    }
}

static void execute(const Step& step, const Task& task, const Split& split, int64_t chunk, uint8_t* scratch) {
    const Operation& op = *task.operation;
    const Attention& attention = step.attention;
    const int64_t row = chunk * split.rows, end = min_of(row + split.rows, step.in.n);
    switch (task.phase) {
        case MULTIPLY: return linear(step, op, split, chunk, scratch);
        case QUANTISE: return quantise_rows(step, op, row, end - row);
        case WHOLE:
            for (int64_t r = row; r < end; ++r) one_row(step, op, r);
            return;
        case STORE:
            for (int64_t r = row; r < end; ++r) store_kv(step, op, r);
            return;
        case ATTEND_SPANS:
            for (int64_t i = attention.groups[chunk]; i < attention.groups[chunk + 1]; ++i) {
                attend(step, op, attention.pieces[i], scratch);
            }
            return;
        case MERGE: return merge_spans(step, op, attention.merges[chunk]);
    }
}

}  // namespace TIER

const Tier TIER_OF_LIBRARY = {TIER::execute, max_of(sizeof(TIER::Uint4::Activation), sizeof(TIER::Int8::Activation))};

}  // namespace tidegate
