// Threads that walk the tasks of a job together.
//
// A job is a list of tasks, each cut into chunks; a task begins when the one before it is complete. Chunks are claimed
// one by one, so a thread that the system has taken off its core delays the others by one chunk at most, and one that
// never woke up not at all. A thread without a chunk spins for a few microseconds, then yields its core, then sleeps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace tidegate {

class Job {
public:
    virtual ~Job() = default;
    virtual int64_t tasks() const = 0;
    // How many chunks a task has, at most Pool::MOST_CHUNKS; none skips it.
    virtual int64_t chunks(int64_t task) const = 0;
    virtual void execute(int64_t task, int64_t chunk, int thread) = 0;
};

class Pool {
public:
    static constexpr int64_t MOST_CHUNKS = (1 << 20) - 1;

    // `threads` of them take part in a job, the one that calls `run` among them.
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }
    // Returns when every task is complete. One job at a time; a second caller waits.
    void run(Job& job);

private:
    void work(int thread);
    bool claim(int thread);
    void advance(int64_t task, int thread);
    void publish(uint64_t state);
    void wake_sleepers();
    template <class Done>
    void wait(int& idle, Done done);

    const int threads_;
    std::vector<std::thread> workers_;
    std::mutex callers_;
    Job* job_ = nullptr;  // read only by the owner of a claimed chunk, and so while `run` is on the stack

    // task (24 bits) | chunks of the task (20) | the next to be claimed (20). All a claim needs is in this one word.
    alignas(64) std::atomic<uint64_t> state_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<bool> finished_{true};
    std::atomic<bool> stopping_{false};
    std::atomic<int> sleepers_{0};
    std::mutex sleep_;
    std::condition_variable wake_;
};

}  // namespace tidegate
