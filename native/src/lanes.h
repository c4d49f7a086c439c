// Vectors of sixteen bytes that every CPU here has, as the compiler's own types, and rows of words that become columns.
#pragma once

#include <stdint.h>

namespace quire {

using Four = uint32_t __attribute__((vector_size(16)));
using Two = uint64_t __attribute__((vector_size(16)));
using Eight = uint16_t __attribute__((vector_size(16)));

template <int A, int B, int C, int D> inline Four pick(Four a, Four b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, A, B, C, D);
#else
    return __builtin_shuffle(a, b, Four{A, B, C, D});
#endif
}

// Numbers from FIRST on, one of a and one of b in each word.
template <int FIRST> inline Four in_pairs(Eight a, Eight b) {
    constexpr int F = FIRST;
#if defined(__clang__)
    return (Four)__builtin_shufflevector(a, b, F, F + 8, F + 1, F + 9, F + 2, F + 10, F + 3, F + 11);
#else
    return (Four)__builtin_shuffle(a, b, Eight{F, F + 8, F + 1, F + 9, F + 2, F + 10, F + 3, F + 11});
#endif
}

// Four words each of four rows: word j of every row becomes one vector.
inline void transpose(const Four (&row)[4], Four (&word)[4]) {
    const Four a = pick<0, 4, 1, 5>(row[0], row[1]), b = pick<2, 6, 3, 7>(row[0], row[1]);
    const Four c = pick<0, 4, 1, 5>(row[2], row[3]), d = pick<2, 6, 3, 7>(row[2], row[3]);
    word[0] = pick<0, 1, 4, 5>(a, c), word[1] = pick<2, 3, 6, 7>(a, c);
    word[2] = pick<0, 1, 4, 5>(b, d), word[3] = pick<2, 3, 6, 7>(b, d);
}

}  // namespace quire
