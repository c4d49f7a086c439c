// Attention's register tiles on NEON, with instructions in the order they are written: asm volatile keeps it, and leaves the
// registers to the compiler. Widening a half takes one pipe two cycles for four numbers; done right before its products it
// makes them wait. So the next row's halves are widened between the products of this one, which then run at the rate of both pipes.
//
// A shift and a mask make a float32 of a half, too: 2^-112 of it, where it is finite. They take the other pipe, or either.
// So every second row is widened that way, and multiplied by 2^112 times what it should be, which changes no bit of a product.
#pragma once

#include "rows.h"

namespace {

inline float32x4_t ask_half(const uint16_t* p) {
    float32x4_t r;
    asm volatile("ldr %d0, %1" : "=w"(r) : "m"(*(const uint16_t(*)[4])p));
    return r;
}
inline float32x4_t ask_one(const float* p) {
    float32x4_t r;
    asm volatile("ldr %s0, %1" : "=w"(r) : "m"(*p));
    return r;
}
inline float32x4_t widen_now(float32x4_t x) {
    float32x4_t r;
    asm volatile("fcvtl %0.4s, %1.4h" : "=w"(r) : "w"(x));
    return r;
}
inline float32x4_t shift_now(float32x4_t x) {
    float32x4_t r;
    asm volatile("sshll %0.4s, %1.4h, #13" : "=w"(r) : "w"(x));
    return r;
}
inline void mask_now(float32x4_t& x) {  // of a sign that the shift has made longer
    asm volatile("and %0.16b, %0.16b, %1.16b" : "+w"(x) : "w"(vdupq_n_u32(0x8fffe000)));
}
inline void fma_now(float32x4_t& acc, float32x4_t k, float32x4_t x) {
    asm volatile("fmla %0.4s, %1.4s, %2.s[0]" : "+w"(acc) : "w"(k), "w"(x));
}

// 1 for every row that is converted, 2^112 for every one that is shifted.
inline F fwoven() {
    const float lanes[4] = {1.0f, 0x1p112f, 1.0f, 0x1p112f};
    const float32x4_t v = vld1q_f32(lanes);
    return {{v, v, v, v}};
}

// See attention.h.
inline F fhigher(F a, F b) {
    for (int i = 0; i < 4; i++) b.v[i] = vmaxnmq_f32(a.v[i], b.v[i]);
    return b;
}
inline float fhighest(F a) { return vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(a.v[0], a.v[2]), vmaxnmq_f32(a.v[1], a.v[3]))); }

// acc[q] += x[q * kAttendStride] * row, for 16 floats of a row.
template <int Q> inline void add_row(F (&acc)[Q][1], const float* row, const float* x) {
    float32x4_t k[4];
    for (int i = 0; i < 4; i++) k[i] = ask(row + 4 * i);
    QUIRE_UNROLL
    for (int q = 0; q < Q; q++) {
        const float32x4_t s = ask_one(x + q * kAttendStride);
        for (int i = 0; i < 4; i++) fma_now(acc[q][0].v[i], k[i], s);
    }
}

// The same for a row that is in registers already; meanwhile `next`, 16 halves, becomes another: odd rows are shifted.
struct Even {
    float32x4_t v[4];
    void begin(int i, float32x4_t half) { v[i] = widen_now(half); }
    void end(int) {}
};
struct Odd {
    float32x4_t v[4];
    void begin(int i, float32x4_t half) { v[i] = shift_now(half); }
    void end(int i) { mask_now(v[i]); }
};
template <int Q, class Row, class Other> inline void add_row(F (&acc)[Q], const Row& now, Other& then, const uint16_t* next, const float* x) {
    float32x4_t s[Q], half[4];
    QUIRE_UNROLL
    for (int q = 0; q < Q && Q < 5; q++) s[q] = ask_one(x + q * kAttendStride);
    for (int i = 0; i < 4; i++) half[i] = ask_half(next + 4 * i);
    QUIRE_UNROLL
    for (int q = 0; q < Q; q++) {
        if (Q >= 5) s[q] = ask_one(x + q * kAttendStride);
        for (int i = 0; i < 4; i++) {
            const int step = 4 * q + i;
            if (step % Q == 0) then.begin(step / Q, half[step / Q]);
            fma_now(acc[q].v[i], now.v[i], s[q]);
            if (step % Q == Q - 1) then.end(step / Q);
        }
    }
}
template <class Row> inline void widen_row(Row& row, const uint16_t* from) {
    for (int i = 0; i < 4; i++) row.begin(i, ask_half(from + 4 * i)), row.end(i);
}

// score_pages and value_columns of woven halves, for up to five queries: registers for two rows are left then. See attention.h.
template <int Q>
QUIRE_NOINLINE void score_halves(const uint16_t* const* keys, const uint16_t* const* next, int from, int pages, const float* query,
                                 int head_dim, float* scores) {
    for (int p = from; p < pages; p++) {
        F acc[Q];
        QUIRE_UNROLL
        for (int q = 0; q < Q; q++) acc[q] = fzero();
        const uint16_t *row = keys[p], *ahead = next[p];
        const float* x = query;
        Even even;
        Odd odd;
        widen_row(even, row);
        for (int d = 2; d <= head_dim; d += 2, row += 2 * kPage, ahead += 2 * kPage, x += 2) {
            prefetch(ahead);
            add_row(acc, even, odd, row + kPage, x);
            add_row(acc, odd, even, d < head_dim ? row + 2 * kPage : row, x + 1);
        }
        QUIRE_UNROLL
        for (int q = 0; q < Q; q++) fstore(scores + q * kAttendStride + p * kPage, acc[q]);
    }
}

// Four pages at a time, 16 columns after another: what is asked for ahead comes evenly, a line for two tokens.
template <int Q>
QUIRE_NOINLINE void value_halves(const uint16_t* const* pages, const uint16_t* const* next, int stride, int width, int from, int to,
                                 const float* weights, float* const* out) {
    constexpr int kBlock = 4 * kPage;
    auto row_at = [&](int t, int column) { return pages[t / kPage] + t % kPage * stride + column; };
    for (int start = from, end; start < to; start = end) {
        end = start - start % kBlock + kBlock < to ? start - start % kBlock + kBlock : to;
        for (int column = 0; column < width; column += 16) {
            F acc[Q];
            QUIRE_UNROLL
            for (int q = 0; q < Q; q++) acc[q] = fload(out[q] + column);
            const uint16_t* row = row_at(start, column);
            Even even;
            Odd odd;
            int t = start;
            if (t % 2) {
                widen_row(odd, row);
                if (t + 1 < end) row = row_at(t + 1, column);
                add_row(acc, odd, even, row, weights + t), t++;
            } else {
                widen_row(even, row);
            }
            while (t < end) {
                const int last = t - t % kPage + kPage < end ? t - t % kPage + kPage : end;
                const uint16_t *ahead = next[t / kPage] + (size_t)(column * kPage), *after = last < end ? row_at(last, column) : row;
                for (; t + 2 <= last; t += 2, ahead += 32) {
                    prefetch(ahead);
                    add_row(acc, even, odd, row + stride, weights + t);
                    row = t + 2 < last ? row + 2 * stride : after;
                    add_row(acc, odd, even, row, weights + t + 1);
                }
                if (t < last) add_row(acc, even, odd, row, weights + t), t++;  // the last of all: pages are even
            }
            QUIRE_UNROLL
            for (int q = 0; q < Q; q++) fstore(out[q] + column, acc[q]);
        }
    }
}

}  // namespace
