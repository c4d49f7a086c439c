// Weights of 16 bits, in general; NEON has its own. Codes are read where they are: nothing is to be unpacked.
#pragma once

#include "gemm.h"

namespace {

// `tiles` tiles of block b from t0 on against R lanes of a panel.
template <int R>
inline void sixteen_tiles(const Matrix& w, int b, int t0, int tiles, const uint8_t* panel, const QuantShape& s, int lane, F (&acc)[R]) {
    const uint8_t* block = w.block(b);
    const size_t ahead = w.block_bytes < 8192 ? w.block_bytes : 8192;
    for (int t = t0; t < t0 + tiles; t++) {
        const uint8_t* tile = block + (size_t)t * w.code_bytes;
        for (int i = 0; i < 16; i++) prefetch(tile + ahead + 64 * i);
        const int8_t *high = (const int8_t*)panel + 512 * (size_t)t + 32 * lane, *low = high + s.low;
        const float* sx = (const float*)(panel + s.sx) + 16 * (size_t)t + lane;
        const uint32_t *sum = (const uint32_t*)(panel + s.sum) + 32 * (size_t)t + lane, *rest = (const uint32_t*)(panel + s.low_sum) + 16 * (size_t)t + lane;
        I upper[R], lower[R];  // bytes of weights are 128 more than they should be
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) {
            const uint32_t total = sum[r] + sum[16 + r];  // of lanes that are no rows it may be anything
            upper[r] = iset((int32_t)(0u - 128u * total)), lower[r] = iset((int32_t)(0u - 128u * (total + rest[r])));
        }
        each_quad<8, false>(tile, [&](int q, B codes) __attribute__((always_inline)) {
            QUIRE_UNROLL
            for (int r = 0; r < R; r++) {
                upper[r] = dot4_8(upper[r], codes, high + 32 * r + 4 * q);
                lower[r] = dot4_8(lower[r], codes, low + 32 * r + 4 * q);
            }
        });
        each_quad<8, false>(tile + 512, [&](int q, B codes) __attribute__((always_inline)) {
            QUIRE_UNROLL
            for (int r = 0; r < R; r++) lower[r] = dot4_8(lower[r], codes, high + 32 * r + 4 * q);
        });
        const F sw = scale_of(w, block, t, 0), less = fmul(sw, fset(0x1p-8f));
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) {
            const F own = fset(sx[r]);
            acc[r] = ffma(sw, fmul(own, ffrom(upper[r])), acc[r]);
            acc[r] = ffma(less, fmul(own, ffrom(lower[r])), acc[r]);
        }
    }
}

constexpr int kSixteenRows = kWidth == 16 && kDenseRows >= 8 ? 8 : 2;  // whose sums fit the registers

void sixteen_rows(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, int m, const Epilogue& e) {
    alignas(64) float sums[kMaxTall][16];
    const int most = m <= kSixteenRows ? w.tiles : kChunk;  // one pass; or what stays in the first cache while rows pass over it
    for (int b = b0; b < b1; b++)
        for (int t0 = 0; t0 < w.tiles; t0 += most) {
            const int tiles = w.tiles - t0 < most ? w.tiles - t0 : most;
            auto some = [&](int first, auto rows) {
                constexpr int R = decltype(rows)::value;
                F acc[R];
                for (int r = 0; r < R; r++) acc[r] = t0 ? fload(sums[first + r]) : fzero();
                sixteen_tiles<R>(w, b, t0, tiles, x + (size_t)(first / 16) * s.bytes, s, first % 16, acc);
                for (int r = 0; r < R; r++) {
                    if (t0 + tiles < w.tiles) fstore(sums[first + r], acc[r]);
                    else if (first + r < m) finish(e, first + r, 16 * (b - b0), acc[r]);
                }
            };
            int first = 0;
            for (; m - first > kSixteenRows / 2; first += kSixteenRows) some(first, std::integral_constant<int, kSixteenRows>{});
            if constexpr (kSixteenRows > 4)
                if (m - first > 2) some(first, std::integral_constant<int, 4>{}), first += 4;
            if constexpr (kSixteenRows > 2)
                if (m - first > 1) some(first, std::integral_constant<int, 2>{}), first += 2;
            if (first < m) some(first, std::integral_constant<int, 1>{});
        }
}

}  // namespace
