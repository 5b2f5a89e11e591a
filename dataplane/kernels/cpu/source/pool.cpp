#include "pool.h"

#include <sched.h>

namespace tidegate {
namespace {

constexpr int SPINS = 100;   // of a pause each: a few microseconds, about what lies between two tasks of a small step
constexpr int YIELDS = 40;   // then of giving the core away, if anybody wants it
constexpr int CHUNK_BITS = 20;
constexpr uint64_t CHUNK_MASK = (uint64_t{1} << CHUNK_BITS) - 1;

uint64_t packed(int64_t task, int64_t chunks) {
    return static_cast<uint64_t>(task) << (2 * CHUNK_BITS) | static_cast<uint64_t>(chunks) << CHUNK_BITS;
}

int64_t task_of(uint64_t state) { return static_cast<int64_t>(state >> (2 * CHUNK_BITS)); }
int64_t chunks_of(uint64_t state) { return static_cast<int64_t>(state >> CHUNK_BITS & CHUNK_MASK); }
int64_t next_of(uint64_t state) { return static_cast<int64_t>(state & CHUNK_MASK); }
bool has_chunk(uint64_t state) { return next_of(state) < chunks_of(state); }

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

}  // namespace

Pool::Pool(int threads) : threads_(threads) {
    try {
        for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
    } catch (...) {
        stopping_ = true;
        wake_sleepers();
        for (auto& worker : workers_) worker.join();
        throw;
    }
}

Pool::~Pool() {
    stopping_ = true;
    wake_sleepers();
    for (auto& worker : workers_) worker.join();
}

void Pool::run(Job& job) {
    std::lock_guard<std::mutex> alone(callers_);
    job_ = &job;
    finished_ = false;
    advance(-1, 0);
    for (int idle = 0; !finished_.load(std::memory_order_acquire);) {
        if (claim(0)) {
            idle = 0;
        } else {
            wait(idle, [this] { return finished_.load(); });
        }
    }
}

void Pool::work(int thread) {
    for (int idle = 0; !stopping_.load(std::memory_order_relaxed);) {
        if (claim(thread)) {
            idle = 0;
        } else {
            wait(idle, [this] { return stopping_.load(); });
        }
    }
}

// Claim a chunk and compute it. Whatever task the state names at that instant is the current one and cannot end
// before this chunk is done, so nothing else needs to be looked up or checked.
bool Pool::claim(int thread) {
    uint64_t state = state_.load(std::memory_order_acquire);
    while (has_chunk(state)) {
        if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
        job_->execute(task_of(state), next_of(state), thread);
        if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks_of(state)) advance(task_of(state), thread);
        return true;
    }
    return false;
}

// The thread that completed `task` opens the next one. Tasks of a single chunk it computes itself, unannounced.
void Pool::advance(int64_t task, int thread) {
    for (++task; task < job_->tasks(); ++task) {
        const int64_t chunks = job_->chunks(task);
        if (chunks == 1) job_->execute(task, 0, thread);
        if (chunks <= 1) continue;
        done_.store(0, std::memory_order_relaxed);
        publish(packed(task, chunks));
        return;
    }
    finished_ = true;
    wake_sleepers();
}

void Pool::publish(uint64_t state) {
    state_ = state;
    wake_sleepers();
}

// Sequentially consistent with `wait`: either a sleeper sees the change or this sees the sleeper.
void Pool::wake_sleepers() {
    if (sleepers_.load() == 0) return;
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
}

template <class Done>
void Pool::wait(int& idle, Done done) {
    if (++idle <= SPINS) {
        pause();
    } else if (idle <= SPINS + YIELDS) {
        sched_yield();
    } else {
        std::unique_lock<std::mutex> lock(sleep_);
        ++sleepers_;
        wake_.wait(lock, [&] { return has_chunk(state_.load()) || done(); });
        --sleepers_;
        idle = 0;
    }
}

}  // namespace tidegate
