// How units of work (blocks of a matrix, groups of columns) become items that threads take one after another.
#pragma once

#include <atomic>
#include <cstdint>

namespace quire {

struct Spread {
    int units = 0, items = 0;
    int run = 0, runs = 0;  // the first items: so many of this length
    int piece = 1;          // the length of the others, the last one perhaps shorter

    // Items of one length: enough to share out evenly, and no longer than `most`.
    static Spread even(int units, int threads, int most) {
        const int piece = units / (8 * threads);
        return make(units, 0, 0, piece < 1 ? 1 : piece > most ? most : piece);
    }

    // Where memory is what takes the time: first one long run for each thread, in which whoever asked for the next lines is the one
    // who wants them, then short ones for those who are done early.
    static Spread streaming(int units, int threads) {
        if (threads == 1) return make(units, 1, units, 1);
        const int piece = units / (32 * threads);
        return make(units, threads, units * 15 / (16 * threads), piece < 1 ? 1 : piece);
    }

    int from(int item) const { return item < runs ? item * run : runs * run + (item - runs) * piece; }
    int to(int item) const {
        const int end = item < runs ? (item + 1) * run : runs * run + (item - runs + 1) * piece;
        return end < units ? end : units;
    }

  private:
    static Spread make(int units, int runs, int run, int piece) {
        Spread s;
        if (run < 1) runs = 0;
        s.units = units, s.runs = runs, s.run = run, s.piece = piece;
        s.items = runs + (units - runs * run + piece - 1) / piece;
        return s;
    }
};

// Long runs by thread: each gets the one of its own number if nobody has been faster, so that it can be known beforehand what a thread
// will read first in a step.
class Claims {
    mutable std::atomic<uint32_t> taken_{0};

  public:
    static constexpr int kMost = 32;
    void reset() { taken_.store(0, std::memory_order_relaxed); }
    int take(int item, int thread, int runs) const {
        if (item >= runs || runs > kMost) return item;
        for (int i = thread < runs ? thread : 0;; i = (i + 1) % runs)  // as many items as runs: one is left
            if (!(taken_.fetch_or(1u << i, std::memory_order_relaxed) >> i & 1u)) return i;
    }
};

}  // namespace quire
