// See thread_pool.h. On Linux a thread sleeps on the upper half of the ticket itself (futex); elsewhere on one condition
// variable for all pools, which is as right and a little slower.
#include "thread_pool.h"

#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>

#if defined(__linux__)
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#endif

namespace quire {

namespace {

// Longer than waits inside a job on cores of our own, so that those cost no system call; short enough that a thread whose
// turn cannot come, because the one it waits for has lost its core, soon leaves it a core to come back on.
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kCaller = 1 << 16;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

uint32_t phase_of(uint64_t ticket) { return (uint32_t)(ticket >> 32); }
uint32_t left_of(uint64_t ticket) { return (uint32_t)ticket; }

#if defined(__linux__)
static_assert(sizeof(std::atomic<uint64_t>) == 8, "the futex is half of the ticket");
constexpr uint32_t kCallerBit = 1, kWorkerBit = 2;

long futex(const void* word, int op, uint32_t value, uint32_t bits) {
    return syscall(SYS_futex, word, op | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, bits);
}

void pin(std::thread& thread, int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (core < 0 || core >= CPU_SETSIZE) return;
    CPU_SET(core, &set);
    pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);  // a core that is gone: the thread stays unpinned
}
#else
std::mutex sleep_mutex;
std::condition_variable awake;
void pin(std::thread&, int) {}
#endif

}  // namespace

ThreadPool::ThreadPool(int threads, std::vector<int> cores) {
    const uint32_t start = phase_of(ticket_.load());
    workers_.reserve((size_t)threads);
    for (int t = 1; t < threads; t++) {
        try {
            workers_.emplace_back([this, t, start] { take_part(t, start); });
        } catch (const std::system_error& e) {
            end();
            throw std::runtime_error("only " + std::to_string(t) + " of " + std::to_string(threads) + " threads could be started: " + e.what());
        }
        if (!cores.empty()) pin(workers_.back(), cores[(size_t)t % cores.size()]);
    }
}

ThreadPool::~ThreadPool() { end(); }

void ThreadPool::end() {
    std::lock_guard<std::mutex> turn(turn_);
    stop_.store(true, std::memory_order_relaxed);
    publish(phase_of(ticket_.load()) + 1, 0);
    wake(true);
    for (auto& w : workers_) w.join();
}

void ThreadPool::publish(uint32_t phase, int items) {
    finished_.store(0, std::memory_order_relaxed);
    ticket_.store((uint64_t)phase << 32 | (uint32_t)items, std::memory_order_seq_cst);
}

int ThreadPool::open_from(int step) {
    for (; step < job_.steps; step++)
        if (job_.items[step] > 0) {
            step_ = step;
            return items_ = job_.items[step];
        }
    return 0;
}

void ThreadPool::run_job(const Job& job) {
    std::lock_guard<std::mutex> turn(turn_);
    uint32_t phases = 0;
    for (int i = 0; i < job.steps; i++) phases += job.items[i] > 0;
    if (!phases) return;
    const uint32_t now = phase_of(ticket_.load(std::memory_order_relaxed));
    job_ = job;
    publish(now + 1, open_from(0));
    if (!workers_.empty()) wake(true);
    take_part(0, now + 1 + phases);
}

// Thread 0 returns when the phase is `until`: its job is done. Workers begin with the phase they have seen, and stay.
void ThreadPool::take_part(int thread, uint32_t until) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    if (thread && phase_of(ticket) == until) wait(until, false), ticket = ticket_.load(std::memory_order_acquire);
    for (;;) {
        const uint32_t phase = phase_of(ticket);
        if (thread ? stop_.load(std::memory_order_relaxed) : phase == until) return;
        int taken = 0, items = 0;
        // A thread that was away for long finds another phase here, and its exchange fails: it can take nothing of a step
        // that it has not seen.
        while (left_of(ticket) && phase_of(ticket) == phase) {
            if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
            items = items_;
            job_.work(job_.self, step_, items - (int)left_of(ticket), thread);
            taken++;
            ticket = ticket_.load(std::memory_order_acquire);
        }
        if (taken && finished_.fetch_add(taken, std::memory_order_acq_rel) + taken == items) {
            const int next = open_from(step_ + 1);  // once it is published, what we opened is no longer ours to read
            publish(phase + 1, next);
            if (next > 1) wake(true);
            else if (!next && thread) wake(false);
        } else if (!left_of(ticket)) {
            wait(phase, thread == 0);
        }
        ticket = ticket_.load(std::memory_order_acquire);
    }
}

// Returns once the phase is another one.
void ThreadPool::wait(uint32_t phase, bool caller) {
    auto changed = [&] { return phase_of(ticket_.load(std::memory_order_acquire)) != phase; };
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 16; i++) {
            if (changed()) return;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    sleep(phase, caller);
}

// Sleepers make themselves known, then look at the phase; wakers change the phase, then look for sleepers. All four are
// sequentially consistent, so one of the two sees the other.
void ThreadPool::sleep(uint32_t phase, bool caller) {
    const int weight = caller ? kCaller : 1;
    asleep_.fetch_add(weight, std::memory_order_seq_cst);
#if defined(__linux__)
    while (phase_of(ticket_.load(std::memory_order_seq_cst)) == phase)
        futex(phase_word(), FUTEX_WAIT_BITSET, phase, caller ? kCallerBit : kWorkerBit);
#else
    std::unique_lock<std::mutex> lock(sleep_mutex);
    awake.wait(lock, [&] { return phase_of(ticket_.load(std::memory_order_seq_cst)) != phase; });
#endif
    asleep_.fetch_sub(weight, std::memory_order_relaxed);
}

void ThreadPool::wake(bool everybody) {
    const int asleep = asleep_.load(std::memory_order_seq_cst);
    if (everybody ? !asleep : asleep < kCaller) return;
#if defined(__linux__)
    futex(phase_word(), FUTEX_WAKE_BITSET, INT32_MAX, everybody ? kCallerBit | kWorkerBit : kCallerBit);
#else
    std::lock_guard<std::mutex> lock(sleep_mutex);
    awake.notify_all();
#endif
}

const std::atomic<uint32_t>* ThreadPool::phase_word() const {
    auto* halves = reinterpret_cast<const std::atomic<uint32_t>*>(&ticket_);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return halves;
#else
    return halves + 1;
#endif
}

}  // namespace quire
