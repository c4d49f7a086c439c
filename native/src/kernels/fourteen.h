// Weights of 14 bits, in general; NEON has its own. Both bytes of x meet the upper byte of a code, and the first one its lower six bits.
#pragma once

#include "gemm.h"

namespace {

// The lower bits of a tile, four times over, as bytes in the order of the upper ones: for many rows.
inline void lay_out(const uint8_t* __restrict six, uint8_t* __restrict to) {  // or no compiler makes vectors of it
    for (int half = 0; half < 2; half++, six += 192, to += 256)
        for (int i = 0; i < 64; i++) {
            const uint8_t a = six[i], b = six[64 + i], c = six[128 + i];
            to[i] = a & 0xfc, to[64 + i] = b & 0xfc, to[128 + i] = c & 0xfc;
            to[192 + i] = (uint8_t)((a & 3) << 6 | (b & 3) << 4 | (c & 3) << 2);
        }
}

#ifndef QUIRE_WORD_SUMS
constexpr int kFourteenRows = kWidth == 16 && kDenseRows >= 8 ? 8 : 2;  // whose sums fit the registers

// What a tile makes of R lanes: 256 * sum(upper * q) + sum(upper * r + 4 * lower * q). `total` and `rest` are the sums of q and of r: upper
// bytes of weights are 128 more than they should be, and lower bits 32.
template <int R, bool LAID>
inline void fourteen_sums(const uint8_t* tile, const uint8_t* lower, const int8_t* high, const int8_t* low, const uint32_t (&total)[R], const uint32_t (&rest)[R], I (&d)[R]) {
    QUIRE_UNROLL
    for (int r = 0; r < R; r++) d[r] = iset((int32_t)(0u - 128u * total[r]));
    each_quad<8, false>(tile, [&](int q, B codes) __attribute__((always_inline)) {
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) d[r] = dot4(d[r], codes, high + 32 * r + 4 * q);
    });
    QUIRE_UNROLL
    for (int r = 0; r < R; r++) d[r] = LAID ? ishl<8>(d[r]) : iadd(ishl<6>(d[r]), iset((int32_t)(0u - 32u * total[r])));
    each_quad<LAID ? 8 : 6, false>(lower, [&](int q, B codes) __attribute__((always_inline)) {
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) d[r] = dot4(d[r], codes, high + 32 * r + 4 * q);
    });
    QUIRE_UNROLL
    for (int r = 0; r < R; r++) d[r] = iadd(LAID ? d[r] : ishl<2>(d[r]), iset((int32_t)(0u - 128u * (rest[r] + (LAID ? total[r] : 0)))));
    each_quad<8, false>(tile, [&](int q, B codes) __attribute__((always_inline)) {
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) d[r] = dot4(d[r], codes, low + 32 * r + 4 * q);
    });
}
#else
constexpr int kFourteenRows = kWidth == 16 ? 8 : 4;

// The same with whole codes, four times over, in words, which are 128 more than they should be; their upper bytes are what they should be. Interleaving bytes
// makes words of four rows in the order of `first` (rows 0, 1 of four) and `second` (2, 3), two sums for each row.
template <int R, bool LAID>
inline void fourteen_sums(const uint8_t* tile, const uint8_t* lower, const int8_t* high, const int8_t* low, const uint32_t (&total)[R], const uint32_t (&)[R], I (&d)[R]) {
    alignas(64) int16_t x[R][64];
    for (int r = 0; r < R; r++) store_words(x[r], high + 32 * r), store_words(x[r] + 32, low + 32 * r);
    W sums[R][kSlices];
    for (int slice = 0; slice < kSlices; slice++) {
        W first[R], second[R];
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) first[r] = second[r] = wset(0);
        const uint8_t *at = tile + 4 * kWidth * slice, *below = lower + 4 * kWidth * slice;
        auto quad = [&](int q, C rest) __attribute__((always_inline)) {
            const C upper = flip_top(cload(at + 64 * q));
            const W a = words_first(rest, upper), b = words_second(rest, upper), up = upper_bytes(a), other = upper_bytes(b);
            QUIRE_UNROLL
            for (int r = 0; r < R; r++) {
                const W four = four_words(x[r] + 4 * q), fine = four_words(x[r] + 32 + 4 * q);
                first[r] = add_products(add_products(first[r], a, four), up, fine);
                second[r] = add_products(add_products(second[r], b, four), other, fine);
            }
        };
        if constexpr (LAID) {
            for (int q = 0; q < 8; q++) quad(q, cload(below + 64 * q));
        } else {
            for (int q = 0; q < 8; q += 4, below += 192) {
                const C six[3] = {cload(below), cload(below + 64), cload(below + 128)};
                for (int j = 0; j < 3; j++) quad(q + j, top_six(six[j]));
                quad(q + 3, last_twos(six[0], six[1], six[2]));
            }
        }
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) sums[r][slice] = sums_of_two(first[r], second[r]);
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; r++) d[r] = iadd(together(sums[r]), iset((int32_t)(0u - 128u * total[r])));
}
#endif

// `tiles` tiles of block b from t0 on against R lanes of a panel. `laid`: their lower bits as bytes, or none.
template <int R, bool LAID>
inline void fourteen_tiles(const Matrix& w, int b, int t0, int tiles, const uint8_t (*laid)[512], const uint8_t* panel, const QuantShape& s, int lane, F (&acc)[R]) {
    const uint8_t* block = w.block(b);
    const size_t ahead = w.block_bytes < 8192 ? w.block_bytes : 8192;
    for (int t = t0; t < t0 + tiles; t++) {
        const uint8_t* tile = block + (size_t)t * w.code_step;
        for (int i = 0; lane == 0 && i < 16; i++) prefetch(tile + ahead + 64 * i);
        const int8_t* high = (const int8_t*)panel + 512 * (size_t)t + 32 * lane;
        const float* sx = (const float*)(panel + s.sx) + 16 * (size_t)t + lane;
        const uint32_t *sum = (const uint32_t*)(panel + s.sum) + 32 * (size_t)t + lane, *low_sum = (const uint32_t*)(panel + s.low_sum) + 16 * (size_t)t + lane;
        uint32_t total[R], rest[R];  // of lanes that are no rows they may be anything
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) total[r] = sum[r] + sum[16 + r], rest[r] = low_sum[r];
        I d[R];
        fourteen_sums<R, LAID>(tile, LAID ? laid[t - t0] : tile + 512, high, high + s.low, total, rest, d);
        const F sw = scale_of(w, b, t, 0), least = fset(0x1p-8f);
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) acc[r] = ffma(sw, fmul(fset(sx[r]), fmul(ffrom(d[r]), least)), acc[r]);
    }
}

void fourteen_rows(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, int m, const Epilogue& e) {
    alignas(64) float sums[kMaxTall][16];
    alignas(64) uint8_t laid[kChunk][512];
    const bool many = m > kFourteenRows;
    const int most = many ? kChunk : w.tiles;  // what stays in the first cache while rows pass over it; or one pass
    for (int b = b0; b < b1; b++)
        for (int t0 = 0; t0 < w.tiles; t0 += most) {
            const int tiles = w.tiles - t0 < most ? w.tiles - t0 : most;
            for (int t = 0; many && t < tiles; t++) lay_out(w.block(b) + (size_t)(t0 + t) * w.code_step + 512, laid[t]);
            auto some = [&](int first, auto rows) {
                constexpr int R = decltype(rows)::value;
                F acc[R];
                for (int r = 0; r < R; r++) acc[r] = t0 ? fload(sums[first + r]) : fzero();
                const uint8_t* panel = x + (size_t)(first / 16) * s.bytes;
                if (many) fourteen_tiles<R, true>(w, b, t0, tiles, laid, panel, s, first % 16, acc);
                else fourteen_tiles<R, false>(w, b, t0, tiles, nullptr, panel, s, first % 16, acc);
                for (int r = 0; r < R; r++) {
                    if (t0 + tiles < w.tiles) fstore(sums[first + r], acc[r]);
                    else if (first + r < m) finish(e, first + r, 16 * (b - b0), acc[r]);
                }
            };
            int first = 0;
            for (; m - first > kFourteenRows / 2; first += kFourteenRows) some(first, std::integral_constant<int, kFourteenRows>{});
            if constexpr (kFourteenRows > 4)
                if (m - first > 2) some(first, std::integral_constant<int, 4>{}), first += 4;
            if constexpr (kFourteenRows > 2)
                if (m - first > 1) some(first, std::integral_constant<int, 2>{}), first += 2;
            if (first < m) some(first, std::integral_constant<int, 1>{});
        }
}

}  // namespace
