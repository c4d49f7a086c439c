// Products of fixed numbers (fixed.h), as each set makes them. A register tile is W sums[kFixedSums][Q][N]: of Q queries and N registers of lanes.
//
//   CellQuad    a quad of each lane, from both planes
//   add_quad    a cell's quad times a quad of the other side
//   total       what the sums come to
//   put_fixed   sixteen numbers of the other side; quads are kQuadBytes apart
//   Flipped     what totals of these numbers have too much where the instruction wants an unsigned side: 128 more in every byte of a cell
#pragma once

#include "fixed.h"


namespace {

#ifdef QUIRE_WORD_SUMS
// Without a dot product of bytes: words, every second number of a quad. A cell's number goes whole against the other's high byte, its high byte against
// the other's low one.
constexpr int kQuadBytes = 16;
struct CellQuad {
    W even, odd, high_even, high_odd;
};
QUIRE_INLINE CellQuad cell_quad(const uint8_t* high, const uint8_t* low) {
    const C h = cload(high), l = cload(low);
    const W up = words_up(h), high_odd = upper_bytes(h);
    return {sum_words(up, upper_bytes(words_up(l))), sum_words(words_up(high_odd), upper_bytes(l)), upper_bytes(up), high_odd};
}
template <int Q, int N> constexpr int kFixedSums = 1;
template <int Q, int N> QUIRE_INLINE void add_quad(W (&sums)[1][Q][N], int q, int v, const CellQuad& cell, const uint8_t* x) {
    W& sum = sums[0][q][v];
    sum = add_products(sum, cell.even, quad_of((const int8_t*)x));
    sum = add_products(sum, cell.odd, quad_of((const int8_t*)x + 4));
    sum = add_products(sum, cell.high_even, quad_of((const int8_t*)x + 8));
    sum = add_products(sum, cell.high_odd, quad_of((const int8_t*)x + 12));
}
template <int Q, int N> QUIRE_INLINE W total(const W (&sums)[1][Q][N], int q, int v, int32_t) { return sums[0][q][v]; }
struct Flipped {
    inline int32_t total() const { return 0; }
};
inline void put_fixed(uint8_t* quads, F x, float by, Flipped&) {
    const Planes planes(x, by);
    store_quads_of_words(quads, planes.high, isub(planes.whole, ishl<8>(planes.high)));
}
#elif defined(QUIRE_NEON)
constexpr int kQuadBytes = 8;  // four high ones, four low ones
struct CellQuad {
    C high, low;
};
QUIRE_INLINE CellQuad cell_quad(const uint8_t* high, const uint8_t* low) { return {cload(high), cload(low)}; }
template <int Q, int N> constexpr int kFixedSums = 2;
template <int Q, int N> QUIRE_INLINE void add_quad(W (&sums)[2][Q][N], int q, int v, const CellQuad& cell, const uint8_t* x) {
    const X quads = vcombine_s8(vld1_s8((const int8_t*)x), vdup_n_s8(0));
    sums[0][q][v] = wdot<0>(sums[0][q][v], cell.high, quads);
    sums[1][q][v] = wdot<0>(wdot<1>(sums[1][q][v], cell.high, quads), cell.low, quads);
}
template <int Q, int N> QUIRE_INLINE W total(const W (&sums)[2][Q][N], int q, int v, int32_t) {
    return vaddq_s32(vshlq_n_s32(sums[0][q][v], 8), sums[1][q][v]);
}
struct Flipped {
    inline int32_t total() const { return 0; }
};
inline void put_fixed(uint8_t* quads, F x, float by, Flipped&) {
    const Planes planes(x, by);
    const int32x4_t h = vreinterpretq_s32_s8(planes.high), l = vreinterpretq_s32_s8(planes.low);
    vst1q_s32((int32_t*)quads, vzip1q_s32(h, l)), vst1q_s32((int32_t*)quads + 4, vzip2q_s32(h, l));
}
#else
constexpr int kQuadBytes = 4, kPlaneBytes = 256;  // low ones lie so far behind high ones
static_assert(kPlaneBytes >= kMaxHeadDim && kPlaneBytes >= kChunk, "planes must not overlap");
struct CellQuad {
    C high, low;
};
QUIRE_INLINE CellQuad cell_quad(const uint8_t* high, const uint8_t* low) { return {flip_top(cload(high)), flip_top(cload(low))}; }
template <int Q, int N> constexpr int kFixedSums = Q * N <= (kWidth == 16 ? 8 : 4) ? 3 : 2;  // with a third, none waits for another
template <int S, int Q, int N> QUIRE_INLINE void add_quad(W (&sums)[S][Q][N], int q, int v, const CellQuad& cell, const uint8_t* x) {
    const int8_t *high = (const int8_t*)x, *low = high + kPlaneBytes;
    sums[0][q][v] = dot4(sums[0][q][v], cell.high, high);
    sums[1][q][v] = dot4(sums[1][q][v], cell.high, low);
    sums[S - 1][q][v] = dot4(sums[S - 1][q][v], cell.low, high);
}
template <int S, int Q, int N> QUIRE_INLINE W total(const W (&sums)[S][Q][N], int q, int v, int32_t flipped) {
    const W cross = S == 3 ? wadd(sums[1][q][v], sums[S - 1][q][v]) : sums[1][q][v];
    return wtotal(sums[0][q][v], cross, flipped);
}
struct Flipped {
    I sum = iset(0);  // of 257 high + low
    inline int32_t total() const { return 128 * (int32_t)hsum(ffrom(sum)); }  // of at most 256 numbers: exact
};
inline void put_fixed(uint8_t* quads, F x, float by, Flipped& flipped) {
    const Planes planes(x, by);
    planes.store((int8_t*)quads, (int8_t*)quads + kPlaneBytes);
    flipped.sum = iadd(flipped.sum, iadd(planes.whole, planes.high));
}
#endif

#ifdef QUIRE_NEON_DOT
// In the order it is written: nothing waits for a sum that is still under way, and both pipes have dot products all the time.
inline C ask_bytes(const uint8_t* p) {
    C r;
    asm volatile("ldr %q0, %1" : "=w"(r) : "m"(*(const uint8_t(*)[16])p));
    return r;
}
inline C ask_quads(const uint8_t* p) {
    C r;
    asm volatile("ldr %d0, %1" : "=w"(r) : "m"(*(const uint8_t(*)[8])p));
    return r;
}
template <int J> inline void dot_now(W& sum, C cell, C quads) {
    asm volatile("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(sum) : "w"(cell), "w"(quads), "i"(J));
}
#endif

// Sixty-four of them.
inline void put_four_fixed(uint8_t* quads, const float* x, float by, Flipped& flipped) {
#ifdef QUIRE_FOUR_FIXED  // it has its own
    store_four_fixed(quads, quads + kPlaneBytes, x, by, flipped.sum);
#else
    for (int i = 0; i < 4; i++) put_fixed(quads + (size_t)(4 * i * kQuadBytes), fload(x + 16 * i), by, flipped);
#endif
}

// Every query's quad at x, `stride` bytes apart, times that of every register of cells, whose low plane is `low` bytes behind the high one.
template <int S, int Q, int N>
QUIRE_INLINE void add_quads(W (&sums)[S][Q][N], const uint8_t* const (&cells)[N], size_t low, const uint8_t* x, size_t stride) {
#ifdef QUIRE_NEON_DOT
    C cell[N];
    for (int v = 0; v < N; v++) cell[v] = ask_bytes(cells[v]);
    QUIRE_UNROLL
    for (int q = 0; q < Q; q++) {
        const C quads = ask_quads(x + q * stride);
        for (int v = 0; v < N; v++) dot_now<0>(sums[0][q][v], cell[v], quads);
        for (int v = 0; v < N; v++) dot_now<1>(sums[1][q][v], cell[v], quads);
    }
    for (int v = 0; v < N; v++) cell[v] = ask_bytes(cells[v] + low);
    QUIRE_UNROLL
    for (int q = 0; q < Q; q++) {
        const C quads = ask_quads(x + q * stride);
        for (int v = 0; v < N; v++) dot_now<0>(sums[1][q][v], cell[v], quads);
    }
#else
    CellQuad quads[N];
    QUIRE_UNROLL
    for (int v = 0; v < N; v++) quads[v] = cell_quad(cells[v], cells[v] + low);
    QUIRE_UNROLL
    for (int q = 0; q < Q; q++)
        QUIRE_UNROLL
        for (int v = 0; v < N; v++) add_quad(sums, q, v, quads[v], x + (size_t)q * stride);
#endif
}
template <int S, int Q, int N> QUIRE_INLINE void clear(W (&sums)[S][Q][N]) {
    QUIRE_UNROLL
    for (int s = 0; s < S; s++)
        QUIRE_UNROLL
        for (int q = 0; q < Q; q++)
            QUIRE_UNROLL
            for (int v = 0; v < N; v++) sums[s][q][v] = wset(0);
}

}  // namespace
