// Weights of 16 bits on NEON, in place of sixteen.h: the same sums in the same order. Per tile and slice a row has 24 dot products for 32
// columns, and four multiply-adds that make floats of their two sums and add them up (see neon.h).
#pragma once

#include "neon_rows.h"

namespace {

// One lane of a panel, its numbers side by side, as in OneRow.
struct SixteenRow {
    static constexpr int kTiles = 256;
    alignas(64) int8_t codes[kTiles][64];  // upper bytes, then lower ones
    alignas(64) float scale[kTiles];

    void take(const uint8_t* x, const QuantShape& s, int t0, int tiles) {
        for (int t = 0; t < tiles; t++) {
            const uint8_t* from = x + 512 * (size_t)(t0 + t);
            memcpy(codes[t], from, 32);
            memcpy(codes[t] + 32, from + s.low, 32);
            scale[t] = ((const float*)(x + s.sx))[16 * (size_t)(t0 + t)];
        }
    }
};

// `tiles` tiles of a block from t0 on against one row. Lines come in their order.
inline F sixteen_row(const Matrix& w, const uint8_t* block, size_t far, int t0, int tiles, const SixteenRow& x, F acc) {
    const uint8_t *tile = block + (size_t)t0 * w.code_bytes, *scale_at = block + w.scale_at + (size_t)t0 * w.scale_bytes;
    for (int t = 0; t < tiles; t++, tile += 1024, scale_at += 32) {
        W upper[4], lower[4];
        QUIRE_UNROLL
        for (int n = 0; n < 4; n++) upper[n] = load_again(kSumStarts.of[0]), lower[n] = load_again(kSumStarts.of[0]);
        const X high[2] = {xload(x.codes[t]), xload(x.codes[t] + 16)}, low[2] = {xload(x.codes[t] + 32), xload(x.codes[t] + 48)};
        each<8>([&](auto q) __attribute__((always_inline)) {
            prefetch_far(tile + far + 64 * q);
            QUIRE_UNROLL
            for (int n = 0; n < 4; n++) {
                const C c = cload(tile + 64 * q + 16 * n);
                upper[n] = wdot<q % 4>(upper[n], c, high[q / 4]);
                lower[n] = wdot<q % 4>(lower[n], c, low[q / 4]);
            }
        });
        each<8>([&](auto q) __attribute__((always_inline)) {
            prefetch_far(tile + 512 + far + 64 * q);
            QUIRE_UNROLL
            for (int n = 0; n < 4; n++) lower[n] = wdot<q % 4>(lower[n], cload(tile + 512 + 64 * q + 16 * n), high[q / 4]);
        });
        prefetch_far(scale_at + far);
        const F scale = half_sixteen(scale_at);
        const V own = vdupq_n_f32(x.scale[t]), excess = vmulq_n_f32(own, -kSumPoint);
        QUIRE_UNROLL
        for (int n = 0; n < 4; n++) acc.v[n] = vfmaq_f32(acc.v[n], scale.v[n], vfmaq_f32(excess, vreinterpretq_f32_s32(upper[n]), own));
        QUIRE_UNROLL
        for (int n = 0; n < 4; n++)
            acc.v[n] = vfmaq_f32(acc.v[n], vmulq_n_f32(scale.v[n], 0x1p-8f), vfmaq_f32(excess, vreinterpretq_f32_s32(lower[n]), own));
    }
    return acc;
}

// R lanes of a panel against a slice of some tiles, whose factors are those of `scale`: of the upper sums, then of the lower ones.
template <int R>
QUIRE_INLINE void sixteen_slice(const uint8_t* codes, const float* scale, int tiles, const Lanes& x, size_t to_low, const uint8_t* coming, size_t step,
                                V (&acc)[R]) {
    for (int t = 0; t < tiles; t++, codes += 1024, scale += 32) {
        for (size_t line = 0; line < step; line += 64) prefetch(coming + line);
        coming += step;
        const int8_t* high = x.codes + 512 * (size_t)t;
        const float *sx = x.sx + 16 * t, *excess = x.excess + 64 * t;
        W upper[R], lower[R];
        each<R>([&](auto r) __attribute__((always_inline)) { upper[r] = load_again(kSumStarts.of[0]), lower[r] = load_again(kSumStarts.of[0]); });
        each<2>([&](auto h) __attribute__((always_inline)) {
            X q[R], rest[R];
            each<R>([&](auto r) __attribute__((always_inline)) { q[r] = xload(high + 32 * r + 16 * h), rest[r] = xload(high + to_low + 32 * r + 16 * h); });
            each<4>([&](auto j) __attribute__((always_inline)) {
                const C c = cload(codes + 64 * (4 * h + j)), d = cload(codes + 512 + 64 * (4 * h + j));
                each<R>([&](auto r) __attribute__((always_inline)) { upper[r] = wdot<j>(upper[r], c, q[r]); });
                each<R>([&](auto r) __attribute__((always_inline)) { lower[r] = wdot<j>(lower[r], c, rest[r]); });
                each<R>([&](auto r) __attribute__((always_inline)) { lower[r] = wdot<j>(lower[r], d, q[r]); });
            });
        });
        const V own = R == 4 ? vld1q_f32(sx) : vcombine_f32(vld1_f32(sx), vdup_n_f32(0)), sw = vload(scale), less = vload(scale + 16);
        each<R>([&](auto r) __attribute__((always_inline)) {
            acc[r] = vfmaq_f32(acc[r], sw, vfmaq_laneq_f32(load_again(excess + 4 * r), vreinterpretq_f32_s32(upper[r]), own, r));
        });
        each<R>([&](auto r) __attribute__((always_inline)) {
            acc[r] = vfmaq_f32(acc[r], less, vfmaq_laneq_f32(load_again(excess + 4 * r), vreinterpretq_f32_s32(lower[r]), own, r));
        });
    }
}

constexpr int kSixteenTiles = 24;  // that rows pass over at a time

void sixteen_rows(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, int m, const Epilogue& e) {
    if (m == 1) {
        SixteenRow row;
        for (int b = b0; b < b1; b++) {
            F acc = fzero();
            for (int t0 = 0; t0 < w.tiles; t0 += SixteenRow::kTiles) {
                const int tiles = w.tiles - t0 < SixteenRow::kTiles ? w.tiles - t0 : SixteenRow::kTiles;
                if (b == b0 || w.tiles > SixteenRow::kTiles) row.take(x, s, t0, tiles);
                acc = sixteen_row(w, w.block(b), far_from(w, b, b0, b1, e.then), t0, tiles, row, acc);
            }
            finish(e, 0, 16 * (b - b0), acc);
        }
        return;
    }
    alignas(64) float sums[kMaxTall * 16], scale[kSixteenTiles][2][16];
    const int chunks = (w.tiles + kSixteenTiles - 1) / kSixteenTiles, most = (w.tiles + chunks - 1) / chunks, groups = (m + 3) / 4;
    const size_t step = (size_t)(256 + groups - 1) / (size_t)groups;  // bytes that are asked for with every tile of a slice
    for (int b = b0; b < b1; b++)
        for (int t0 = 0; t0 < w.tiles; t0 += most) {
            const int tiles = w.tiles - t0 < most ? w.tiles - t0 : most, next = t0 + tiles < w.tiles ? t0 + tiles : 0;
            const uint8_t *block = w.block(b), *codes = block + (size_t)t0 * w.code_bytes, *then = b + 1 < b1 ? w.block(b + 1) : e.then;
            const uint8_t* coming = next ? block + (size_t)next * w.code_bytes : then ? then : codes;
            if (next || then) ask_ahead((next ? block : then) + w.scale_at + (size_t)next * w.scale_bytes, (size_t)most * w.scale_bytes);
            for (int t = 0; t < tiles; t++) {
                const F own = scale_of(w, block, t0 + t, 0);
                fstore(scale[t][0], own), fstore(scale[t][1], fmul(own, fset(0x1p-8f)));
            }
            for (int first = 0; first < m; first += 4) {
                const uint8_t* panel = x + (size_t)(first / 16) * s.bytes;
                const Lanes lanes = Lanes(panel, s, t0).from(first % 16);
                if (!next) ask_results(e, first, first + 4 < m ? first + 4 : m, 16 * (b - b0));
                const Place place{sums + 16 * (first / 8 * 8) + 4 * (first % 8), t0 == 0, next ? nullptr : &e, first, m - first < 4 ? m - first : 4, 16 * (b - b0)};
                auto some = [&](auto rows) {
                    constexpr int R = decltype(rows)::value;
                    for (int slice = 0; slice < 4; slice++, coming += step * (size_t)tiles) {
                        V acc[R];
                        place.take(slice, acc);
                        sixteen_slice<R>(codes + 16 * slice, scale[0][0] + 4 * slice, tiles, lanes, s.low, coming, step, acc);
                        place.leave(slice, acc);
                    }
                };
                if (place.rows > 2) some(std::integral_constant<int, 4>{});
                else some(std::integral_constant<int, 2>{});
            }
        }
}

}  // namespace
