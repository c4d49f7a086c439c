// How units of work (blocks of a matrix, groups of columns) become items that threads take one after another.
#pragma once

#include "thread_pool.h"

namespace quire {

struct Spread {
    int units = 0, items = 0;
    int run = 0, runs = 0;  // each thread's share begins with a run of this length; 0: none does
    int piece = 1;          // the length of the other items, the last one perhaps shorter

    // Items of one length: enough to share out evenly, and no longer than `most`.
    static Spread even(int units, int threads, int most) {
        const int piece = units / (8 * threads);
        return make(units, 0, 0, piece < 1 ? 1 : piece > most ? most : piece);
    }

    // Where memory is what takes the time: one long run for each thread, in which whoever asked for the next lines is the one
    // who wants them, then short ones, for those who are done early, too.
    static Spread streaming(int units, int threads) {
        if (threads == 1) return make(units, 1, units, 1);
        const int piece = units / (32 * threads);
        return make(units, threads, units * 15 / (16 * threads), piece < 1 ? 1 : piece);
    }

    int from(int item) const {
        if (!runs) return item * piece;
        const int thread = ThreadPool::share_of(item, items, runs);
        return begins(item, thread) ? thread * run : runs * run + (item - thread - 1) * piece;
    }
    int to(int item) const {
        const bool begun = runs && begins(item, ThreadPool::share_of(item, items, runs));
        const int end = from(item) + (begun ? run : piece);
        return end < units ? end : units;
    }
    // Whether the same thread will most likely do the next item, too.
    bool goes_on(int item) const { return runs && item + 1 < items && !begins(item + 1, ThreadPool::share_of(item + 1, items, runs)); }

  private:
    bool begins(int item, int thread) const { return item == ThreadPool::share_begins(thread, items, runs); }
    static Spread make(int units, int runs, int run, int piece) {
        Spread s;
        if (run < 1) runs = 0;
        s.units = units, s.runs = runs, s.run = run, s.piece = piece;
        s.items = runs + (units - runs * run + piece - 1) / piece;
        return s;
    }
};

}  // namespace quire
