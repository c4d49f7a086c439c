// The thread pool and how work is spread over it: pool [rounds [seed]]. Every item runs once, after all items of the steps before it, whose
// plain writes it sees, whatever the threads' number, their naps, and how many callers there are. With QUIRE_POOL_TEST, whoever opens a step
// also stands still while it does; built with a sanitizer, it looks for races.
#include <stdio.h>
#include <stdlib.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "../src/spread.h"

using namespace quire;

#ifdef QUIRE_POOL_TEST
namespace quire {
void between_shares();
}
void quire::between_shares() {
    thread_local std::minstd_rand random(std::hash<std::thread::id>{}(std::this_thread::get_id()));
    if (random() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
}
#endif

namespace {

[[noreturn]] void fail(const char* what, int threads, int step, int item) {
    fprintf(stderr, "%d threads, step %d, item %d: %s\n", threads, step, item, what);
    exit(1);
}

void nap(int microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

// A job of random steps: most items few, many steps of one item, or of as many as there are threads.
std::vector<int> random_items(std::mt19937& random, int threads) {
    std::vector<int> items(1 + random() % 40);
    const unsigned most[] = {3, 2, 100, 2 * (unsigned)threads + 1};
    const unsigned kind = random() % 4;
    for (int& n : items) n = (int)(random() % most[kind]);
    return items;
}

void run_one(ThreadPool& pool, std::mt19937& random) {
    const int threads = pool.threads();
    const std::vector<int> items = random_items(random, threads);
    const unsigned sleepy = random() % 8;
    std::vector<std::vector<int>> runs(items.size());
    for (size_t s = 0; s < items.size(); s++) runs[s].assign((size_t)items[s], 0);
    pool.run((int)items.size(), items.data(), [&](int step, int item, int thread) {
        if (thread < 0 || thread >= threads) fail("no such thread", threads, step, thread);
        for (int before = step - 1; before >= 0; before--) {
            for (int n : runs[(size_t)before])
                if (n != 1) fail("began before a step was over", threads, step, item);
            if (items[(size_t)before]) break;
        }
        runs[(size_t)step][(size_t)item]++;
        if (sleepy == 0 && (step + item) % 13 == 0) nap(120);
        if (sleepy == 1 && thread == 1) nap(80);  // others do its share
    });
    for (size_t s = 0; s < items.size(); s++)
        for (int i = 0; i < items[s]; i++)
            if (runs[s][(size_t)i] != 1) fail("did not run once", threads, (int)s, i);
}

// All threads are woken, whoever opens a step: nobody leaves an item of theirs before everybody has one.
void meet(ThreadPool& pool) {
    const int threads = pool.threads(), items[] = {threads, 1, threads};
    std::atomic<int> here[3] = {};
    pool.run(3, items, [&](int step, int item, int) {
        if (step == 1) return nap(1000);  // the others sleep meanwhile
        const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        for (here[step]++; here[step] < threads; nap(20))
            if (std::chrono::steady_clock::now() > late) fail("not all threads came", threads, step, item);
    });
}

void check_spread(const Spread& spread, int threads) {
    std::vector<int> seen((size_t)spread.units);
    for (int i = 0; i < spread.items; i++)
        for (int u = spread.from(i); u < spread.to(i); u++) seen[(size_t)u]++;
    for (int n : seen)
        if (n != 1) fail("a unit is not in one item", threads, spread.units, spread.items);
    for (int t = 0; spread.runs && t < threads; t++) {
        const int first = ThreadPool::share_begins(t, spread.items, threads);
        if (ThreadPool::share_of(first, spread.items, threads) != t) fail("a share begins in another one", threads, spread.units, first);
        if (spread.from(first) != t * spread.run || spread.to(first) != (t + 1) * spread.run)
            fail("a share does not begin with its run", threads, spread.units, first);
    }
}

}  // namespace

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? atoi(argv[1]) : 100;
    std::mt19937 seeds(argc > 2 ? (unsigned)atoi(argv[2]) : 1);
    for (int threads : {1, 2, 3, 4, 7, 16}) {
        for (int units = 1; units < 300; units++) {
            check_spread(Spread::streaming(units, threads), threads);
            check_spread(Spread::even(units, threads, 8), threads);
        }
        ThreadPool pool(threads);
        for (int round = 0; round < 5; round++) nap(1000), meet(pool);
        std::vector<std::thread> callers;
        for (int c = 0; c < 3; c++)
            callers.emplace_back([&pool, rounds, seed = (unsigned)seeds()] {
                std::mt19937 random(seed);
                for (int round = 0; round < rounds; round++) {
                    run_one(pool, random);
                    if (random() % 50 == 0) nap(300);  // long enough that threads sleep
                }
            });
        for (std::thread& c : callers) c.join();
    }
    printf("pool: all well\n");
    return 0;
}
