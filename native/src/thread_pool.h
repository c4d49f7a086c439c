// One persistent pool. A job is a list of steps, a step a number of items: a step begins when the one before it is complete,
// and within it each thread takes the items of its own share, in order, then what others have not come to. The caller takes part.
//
// Shares are the same part of every step, so that where items follow rows or columns a thread reads what it has written itself, a
// step before, which its own cache still has; and threads meet in one word of memory only where one helps another out.
//
// There is no barrier. Whoever finishes the last item of a step opens the next one and goes on (a step of one item it does by itself, at
// once); nobody waits for a thread that holds no item. So a worker that still sleeps, or that the system took off its core, delays a job
// by at most the one item it holds, and a caller whose workers never come does the whole job itself. Threads with nothing to take spin
// briefly, then sleep: an idle pool costs nothing, and a core that we cannot use is left to whoever can.
#pragma once

#include <stdint.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace quire {

class ThreadPool {
public:
    // `cores`: what the threads are pinned to, in turn; the first is the caller's, who is left alone. Empty pins nothing.
    // Throws std::runtime_error when the system does not give that many threads.
    explicit ThreadPool(int threads, std::vector<int> cores = {});
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return threads_; }

    // Runs work(step, item, thread) for every item below items[step], for every step below `steps`, in the order of the
    // steps; returns when all is done. `work` must not throw. Jobs of several callers take turns.
    template <class Work> void run(int steps, const int* items, Work&& work) {
        using W = std::remove_reference_t<Work>;
        run_job({[](void* w, int step, int item, int thread) { (*static_cast<W*>(w))(step, item, thread); },
                 const_cast<void*>(static_cast<const void*>(&work)), items, steps});
    }

    // Runs work(item) for every item below `items`.
    template <class Work> void for_each(int items, Work&& work) {
        run(1, &items, [&](int, int item, int) { work(item); });
    }

    // Which of `threads` shares of a step of `items` an item is in, and where a share begins.
    static int share_of(int item, int items, int threads) { return (int)((((int64_t)item + 1) * threads - 1) / items); }
    static int share_begins(int share, int items, int threads) { return (int)((int64_t)items * share / threads); }

private:
    struct Job {
        void (*work)(void*, int step, int item, int thread);
        void* self;
        const int* items;
        int steps;
    };
    // What is left of a thread's share of the open step, and the lower bits of its phase, in one word: an exchange of what was there before a
    // thread lost its core fails.
    struct alignas(64) Share {
        std::atomic<uint64_t> word{0};
    };
    void run_job(const Job& job);
    void end();
    int advance(int step, int thread);
    void open(int step, int thread);
    void publish(int items);
    void take_part(int thread, uint64_t until);
    int take_share(int whose, int thread);
    void wait(int thread, uint64_t phase);
    void sleep(uint32_t now, bool caller);
    void wake(bool everybody);

    const int threads_;
    // Goes up by one when a step opens and when a job ends; what threads sleep on.
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<int> finished_{0};  // items of the open step; whoever opened it counts as one more, until all shares are written
    alignas(64) std::atomic<int> asleep_{0};    // workers; the caller counts kCaller
    std::unique_ptr<Share[]> shares_;
    // Of the open step. Written by whoever opens it; read only by that thread, or with an item of it in hand.
    Job job_{};
    int step_ = 0, items_ = 0;
    std::atomic<bool> stop_{false};
    std::mutex turn_;
    std::vector<std::thread> workers_;
};

}  // namespace quire
