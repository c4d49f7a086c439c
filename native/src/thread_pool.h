// One persistent pool. A job is a list of steps, a step a number of items: a step begins when the one before it is complete,
// and within it threads take items as they come free. The caller takes part.
//
// There is no barrier. Whoever finishes the last item of a step opens the next one and goes on; nobody waits for a thread
// that holds no item. So a worker that still sleeps, or that the system took off its core, delays a job by at most the one
// item it holds, and a caller whose workers never come does the whole job itself. Threads with nothing to take spin briefly,
// then sleep: an idle pool costs nothing, and a core that we cannot use is left to whoever can.
#pragma once

#include <stdint.h>

#include <atomic>
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

    int threads() const { return (int)workers_.size() + 1; }

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

private:
    struct Job {
        void (*work)(void*, int step, int item, int thread);
        void* self;
        const int* items;
        int steps;
    };
    void run_job(const Job& job);
    void end();
    int open_from(int step);  // the first step at or after it that has items; how many, 0: there is none
    void publish(uint32_t phase, int items);
    void take_part(int thread, uint32_t until);
    void wait(uint32_t phase, bool caller);
    void sleep(uint32_t phase, bool caller);
    void wake(bool everybody);
    const std::atomic<uint32_t>* phase_word() const;

    // phase << 32 | items of the open step that nobody has taken. The phase goes up by one when a step opens and when a job
    // ends, so one word says everything: what can be taken, and whether something happened since a thread last looked.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int> finished_{0};  // items of the open step
    alignas(64) std::atomic<int> asleep_{0};    // workers; the caller counts kCaller
    // Of the open step. Written by whoever opens it; read only with an item of it in hand.
    Job job_{};
    int step_ = 0, items_ = 0;
    std::atomic<bool> stop_{false};
    std::mutex turn_;
    std::vector<std::thread> workers_;
};

}  // namespace quire
