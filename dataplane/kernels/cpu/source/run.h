// A loaded program, and one run of it as a job of the pool.
#pragma once

#include <memory>
#include <vector>

#include "abi.h"
#include "pool.h"
#include "step.h"

namespace tidegate {

// Memory on the boundary of a cache line that grows and is kept; its contents do not outlive a growth.
class Buffer {
public:
    uint8_t* reserve(int64_t bytes);

private:
    std::unique_ptr<uint8_t[]> memory_;
    int64_t size_ = 0;
};

// What runs write beside their arena, kept from one to the next.
struct Workspaces {
    Buffer activations, quantised, partials;
    std::vector<Buffer> threads;
    std::vector<Piece> pieces;
    std::vector<Merge> merges;
    std::vector<int64_t> groups;
    std::vector<Split> splits;
};

// Operations as tasks, and what all of them need of scratch.
struct Program {
    explicit Program(const Operation* operations, int64_t count);

    std::vector<Operation> operations;
    std::vector<Task> tasks;
    int64_t quantised_columns = 0;  // the widest activations to be quantised, 0: none
    int64_t unpacked_columns = 0;   // the widest quantised matrix
    const Operation* attend = nullptr;
};

class Run final : public Job {
public:
    Run(const Program& program, const Inputs& in, const Tier& tier, int threads, Workspaces& work);

    int64_t tasks() const override { return static_cast<int64_t>(program_.tasks.size()); }
    int64_t chunks(int64_t task) const override { return work_.splits[static_cast<size_t>(task)].chunks; }
    void execute(int64_t task, int64_t chunk, int thread) override;

private:
    void plan_attention(int threads);
    void add_decode(int64_t request, int64_t row);
    void add_prefill(int64_t request, int64_t row);
    void group_pieces(int threads);
    Split split_of(const Task& task, int threads) const;

    const Program& program_;
    const Tier& tier_;
    Workspaces& work_;
    Step step_;
    std::vector<uint8_t*> scratch_;
    int64_t partials_ = 0;
};

}  // namespace tidegate
