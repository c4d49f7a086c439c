// How units of work (blocks of a matrix, groups of columns) become items that threads take one after another.
#pragma once

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

}  // namespace quire
