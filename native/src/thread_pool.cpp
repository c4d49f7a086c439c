// See thread_pool.h. On Linux a thread sleeps on the phase itself (futex); elsewhere on one condition variable for all pools, which is as
// right and a little slower.
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

#ifdef QUIRE_POOL_TEST
void between_shares();  // of the test: stands still at random
#else
static inline void between_shares() {}
#endif

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

// A share's word: phase << 48 | end << 24 | begin.
constexpr int kPhaseAt = 48, kEndAt = 24;
constexpr uint64_t kMask = ((uint64_t)1 << kEndAt) - 1;
constexpr uint32_t kMostPhases = 60000;
constexpr uint64_t kOne = 1, kLast = (uint64_t)1 << kEndAt;

uint64_t phase_of(uint64_t word) { return word >> kPhaseAt; }
uint64_t tag_of(uint32_t phase) { return phase & 0xffff; }
int begin_of(uint64_t word) { return (int)(word & kMask); }
int end_of(uint64_t word) { return (int)(word >> kEndAt & kMask); }
uint64_t word_of(uint64_t tag, int begin, int end) { return tag << kPhaseAt | (uint64_t)end << kEndAt | (uint64_t)begin; }

#if defined(__linux__)
static_assert(sizeof(std::atomic<uint32_t>) == 4, "it is a futex");
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

ThreadPool::ThreadPool(int threads, std::vector<int> cores) : threads_(threads), shares_(new Share[(size_t)threads]) {
    for (int t = 1; t < threads; t++) {
        try {
            workers_.emplace_back([this, t] { take_part(t, 0); });
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
    publish(0);
    wake(true);
    for (auto& w : workers_) w.join();
}

// The phase goes first: who is about to sleep sees it. The caller's share is the last to be written: when it says that the job is over, nobody
// writes shares of that job any more.
void ThreadPool::publish(int items) {
    const uint32_t phase = phase_.load(std::memory_order_relaxed) + 1;
    items_ = items;
    finished_.store(0, std::memory_order_relaxed);
    phase_.store(phase, std::memory_order_seq_cst);
    for (int t = threads_; t-- > 0;) {
        between_shares();
        shares_[(size_t)t].word.store(word_of(tag_of(phase), share_begins(t, items, threads_), share_begins(t + 1, items, threads_)),
                                      std::memory_order_release);
    }
}

// Does what comes from `step` on by itself, up to a step that has something for several threads; how many items that one has, 0: there is none.
int ThreadPool::advance(int step, int thread) {
    for (; step < job_.steps && job_.items[step] < 2; step++)
        if (job_.items[step] > 0) job_.work(job_.self, step, 0, thread);
    step_ = step;
    return step < job_.steps ? job_.items[step] : 0;
}

void ThreadPool::run_job(const Job& job) {
    std::lock_guard<std::mutex> turn(turn_);
    if (threads_ == 1) {
        for (int step = 0; step < job.steps; step++)
            for (int i = 0; i < job.items[step]; i++) job.work(job.self, step, i, 0);
        return;
    }
    uint32_t phases = 0;
    for (int i = 0; i < job.steps; i++) {
        phases += job.items[i] > 1;
        if ((uint64_t)job.items[i] > kMask || phases > kMostPhases) throw std::length_error("a job of more steps or items than words have room for");
    }
    job_ = job;
    if (!phases) return (void)advance(0, 0);
    const uint32_t now = phase_.load(std::memory_order_relaxed);
    open(0, 0);
    take_part(0, tag_of(now + 1 + phases));
}

// Opens what comes from `step` on. Waking others comes last, with nothing in hand: whoever is woken may well be given the core of who woke it.
void ThreadPool::open(int step, int thread) {
    for (int items; (items = advance(step, thread)); step = step_ + 1) {
        publish(items);
        if (finished_.fetch_add(1, std::memory_order_acq_rel) != items) return wake(true);
    }  // meanwhile others have done it all
    publish(0);
    if (thread) wake(false);
}

// Does what is left of a share, the thread's own from the front and others' from the back; returns how many items that were. All of them are of
// one step: while a thread has not told of one, no other step opens.
int ThreadPool::take_share(int whose, int thread) {
    std::atomic<uint64_t>& share = shares_[(size_t)whose].word;
    const bool own = whose == thread;
    int taken = 0;
    for (uint64_t word = share.load(std::memory_order_acquire); begin_of(word) < end_of(word);) {
        const int item = own ? begin_of(word) : end_of(word) - 1;
        if (!share.compare_exchange_weak(word, own ? word + kOne : word - kLast, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
        job_.work(job_.self, step_, item, thread);
        taken++;
        word = share.load(std::memory_order_acquire);
    }
    return taken;
}

// Thread 0 returns when the phase is `until`: its job is done. Workers begin with the first phase, and stay.
void ThreadPool::take_part(int thread, uint64_t until) {
    const std::atomic<uint64_t>& own = shares_[(size_t)thread].word;
    for (;;) {
        const uint64_t phase = phase_of(own.load(std::memory_order_acquire));
        if (thread ? stop_.load(std::memory_order_relaxed) : phase == until) return;
        int taken = 0;
        for (int i = 0; i < threads_; i++) taken += take_share((thread + i) % threads_, thread);
        if (!taken) {
            wait(thread, phase);
            continue;
        }
        const int all = items_ + 1;
        if (finished_.fetch_add(taken, std::memory_order_acq_rel) + taken == all) open(step_ + 1, thread);
    }
}

// Returns once the phase is another one.
void ThreadPool::wait(int thread, uint64_t phase) {
    const std::atomic<uint64_t>& own = shares_[(size_t)thread].word;
    auto changed = [&] { return phase_of(own.load(std::memory_order_acquire)) != phase; };
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 16; i++) {
            if (changed()) return;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    const uint32_t now = phase_.load(std::memory_order_seq_cst);
    if (tag_of(now) == phase) sleep(now, thread == 0);
}

// Sleepers make themselves known, then look at the phase; wakers change the phase, then look for sleepers. All four are
// sequentially consistent, so one of the two sees the other.
void ThreadPool::sleep(uint32_t now, bool caller) {
    const int weight = caller ? kCaller : 1;
    asleep_.fetch_add(weight, std::memory_order_seq_cst);
#if defined(__linux__)
    while (phase_.load(std::memory_order_seq_cst) == now) futex(&phase_, FUTEX_WAIT_BITSET, now, caller ? kCallerBit : kWorkerBit);
#else
    std::unique_lock<std::mutex> lock(sleep_mutex);
    awake.wait(lock, [&] { return phase_.load(std::memory_order_seq_cst) != now; });
#endif
    asleep_.fetch_sub(weight, std::memory_order_relaxed);
}

void ThreadPool::wake(bool everybody) {
    const int asleep = asleep_.load(std::memory_order_seq_cst);
    if (everybody ? !asleep : asleep < kCaller) return;
#if defined(__linux__)
    futex(&phase_, FUTEX_WAKE_BITSET, INT32_MAX, everybody ? kCallerBit | kWorkerBit : kCallerBit);
#else
    std::lock_guard<std::mutex> lock(sleep_mutex);
    awake.notify_all();
#endif
}

}  // namespace quire
