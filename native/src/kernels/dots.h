// The integer sum of one group: its quads of codes times the row's. Integers are exact, so how they are added is each kernel set's own
// affair. Where there is no dot product of bytes (QUIRE_WORD_SUMS), an instruction adds two products in 16 bits; as many of those as
// cannot overflow are added there, and only their sums become 32 bits. 8-bit codes lose 128 first: then the sign goes to the row's
// number, and two products of at most 128 * 127 fit as well.
#pragma once

#include "rows.h"

namespace {

// code_base: what codes have lost when they meet Dots. summed_as: codes of so many bits are added like these.
#ifdef QUIRE_WORD_SUMS
constexpr int code_base(int bits) { return bits == 8 ? 128 : 0; }
constexpr int summed_as(int bits) { return bits < 4 ? 4 : bits; }
#else
constexpr int code_base(int) { return 0; }
constexpr int summed_as(int) { return 8; }
#endif

struct Lanes16 {
    using Sum = I;
    using Codes = B;
};
struct Register {
    using Sum = W;
    using Codes = C;
};

// add takes a quad's place in its group; of a run of kRun quads the first comes first and the last last.
template <class Over, int BITS, int GROUP> struct Dots {
    using Sum = typename Over::Sum;
    using Codes = typename Over::Codes;
    Sum total;
#ifdef QUIRE_WORD_SUMS
    static constexpr int kQuads = GROUP / 4, kFit = BITS <= 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1, kRun = kFit < kQuads ? kFit : kQuads;
    static_assert(BITS == 8 || kRun * 2 * ((1 << BITS) - 1) * 127 < 1 << 15, "sums of 16 bits overflow");
    Sum words[kQuads / kRun];

    __attribute__((always_inline)) inline void add(int quad, Codes codes, const int8_t* x) {
        if constexpr (BITS == 8) {
            total = dot4_signed(total, codes, x);
        } else {
            const int run = quad / kRun;
            words[run] = quad % kRun ? add_words(words[run], pairs(codes, x)) : pairs(codes, x);
            if (quad % kRun == kRun - 1) total = add_pairs(total, words[run]);
        }
    }
#else
    __attribute__((always_inline)) inline void add(int, Codes codes, const int8_t* x) { total = dot4(total, codes, x); }
#endif
};

}  // namespace
