// The functions that Python calls. Nothing is thrown across: what fails for want of memory or threads says so.

#include <mutex>
#include <new>
#include <system_error>

#include "run.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Executor {
    explicit Executor(int threads) : pool(threads) {}

    tidegate::Pool pool;
    std::mutex alone;  // of the workspaces
    tidegate::Workspaces work;
};

}  // namespace

// The size of an Operation and of the Inputs, which Python checks against its own.
EXPORT int64_t tidegate_operation_bytes() { return sizeof(tidegate::Operation); }
EXPORT int64_t tidegate_inputs_bytes() { return sizeof(tidegate::Inputs); }

// Null: the system refused memory or a thread.
EXPORT void* tidegate_executor(int64_t threads) {
    try {
        return new Executor(static_cast<int>(threads));
    } catch (const std::system_error&) {
        return nullptr;
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

EXPORT void tidegate_free_executor(void* executor) { delete static_cast<Executor*>(executor); }

EXPORT void* tidegate_load(const tidegate::Operation* operations, int64_t count) {
    try {
        return new tidegate::Program(operations, count);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

EXPORT void tidegate_free_program(void* program) { delete static_cast<tidegate::Program*>(program); }

// 0, or 1 when memory ran out; what was computed until then is undefined.
EXPORT int64_t tidegate_run(void* executor, void* program, const tidegate::Inputs* in) {
    Executor& with = *static_cast<Executor*>(executor);
    std::lock_guard<std::mutex> lock(with.alone);
    try {
        tidegate::Run run(*static_cast<tidegate::Program*>(program), *in, tidegate::TIER_OF_LIBRARY, with.pool.threads(), with.work);
        with.pool.run(run);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}
