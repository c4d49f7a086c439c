// One persistent pool. The caller takes part; workers spin briefly for the next job, then sleep: an idle pool costs nothing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace quire {

class ThreadPool {
public:
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return (int)workers_.size() + 1; }

    // Runs job(thread) on every thread, and returns when all have. Jobs of several callers take turns.
    template <class Job> void run(Job&& job) {
        std::lock_guard<std::mutex> turn(turn_);
        dispatch([](void* j, int thread) { (*static_cast<Job*>(j))(thread); }, &job);
    }

    // Inside a job: waits until every thread of the pool is here.
    void barrier();

    // Runs work(item) for every item below `items`, shared out as threads come free.
    template <class Work> void for_each(int items, Work&& work) {
        std::atomic<int> next{0};
        run([&](int) {
            for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) work(i);
        });
    }

private:
    using Function = void (*)(void*, int);
    void dispatch(Function function, void* job);
    void work(int thread);
    void park(const std::atomic<uint32_t>& word, uint32_t seen);

    std::vector<std::thread> workers_;
    std::mutex turn_;
    Function function_ = nullptr;
    void* job_ = nullptr;
    bool stop_ = false;
    alignas(64) std::atomic<uint32_t> epoch_{0};    // one per job
    alignas(64) std::atomic<uint32_t> arrived_{0};  // at the barrier
    alignas(64) std::atomic<uint32_t> phase_{0};    // one per barrier passed
    std::atomic<int> sleepers_{0};
    std::mutex sleep_;
    std::condition_variable wake_;
};

}  // namespace quire
