// See thread_pool.h. Both kinds of waiting (for a job, at a barrier) watch one word: spin, then yield, then sleep.
#include "thread_pool.h"

#include <sched.h>

namespace quire {

namespace {

constexpr int kSpins = 3000;  // 60 to 200 us of pause instructions: longer than any wait inside a step on cores of our own
constexpr int kYields = 20;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
    for (int t = 1; t < threads; t++) workers_.emplace_back([this, t] { work(t); });
}

ThreadPool::~ThreadPool() {
    {
        std::lock_guard<std::mutex> turn(turn_);
        stop_ = true;
        epoch_.fetch_add(1, std::memory_order_seq_cst);
        std::lock_guard<std::mutex> lock(sleep_);
        wake_.notify_all();
    }
    for (auto& w : workers_) w.join();
}

// Returns once `word` is no longer `seen`.
void ThreadPool::park(const std::atomic<uint32_t>& word, uint32_t seen) {
    for (int i = 0; i < kSpins; i++) {
        if (word.load(std::memory_order_acquire) != seen) return;
        pause();
    }
    for (int i = 0; i < kYields; i++) {
        if (word.load(std::memory_order_acquire) != seen) return;
        sched_yield();
    }
    std::unique_lock<std::mutex> lock(sleep_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return word.load(std::memory_order_seq_cst) != seen; });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

void ThreadPool::barrier() {
    if (workers_.empty()) return;
    uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == (uint32_t)workers_.size()) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst)) {
            std::lock_guard<std::mutex> lock(sleep_);
            wake_.notify_all();
        }
    } else {
        park(phase_, phase);
    }
}

void ThreadPool::dispatch(Function function, void* job) {
    function_ = function;
    job_ = job;
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) {
        std::lock_guard<std::mutex> lock(sleep_);
        wake_.notify_all();
    }
    function(job, 0);
    barrier();
}

void ThreadPool::work(int thread) {
    uint32_t seen = 0;
    for (;;) {
        park(epoch_, seen);
        seen++;
        if (stop_) return;
        function_(job_, thread);
        barrier();
    }
}

}  // namespace quire
