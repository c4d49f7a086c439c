// Weights of 14 bits on NEON, in place of fourteen.h: the same sums in the same order. Per tile and slice a row has 24 dot products for 32
// columns, and five operations that make a float of their sum and add it up.
#pragma once

#include "neon_rows.h"

namespace {

// The lower bits of the eight quads of a slice, four times what they should be; see slice_codes.
QUIRE_INLINE void lower_codes(const uint8_t* tile, int slice, C (&c)[8]) { slice_codes<6, false, 0>(tile + 512, slice, 32, c); }

// One lane of a panel, its numbers side by side, as in OneRow.
struct FourteenRow {
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

// `tiles` tiles of a block from t0 on against one row. Lines come in their order, and are asked for a little ahead.
inline F fourteen_row(const Matrix& w, const uint8_t* block, const uint8_t* then, int t0, int tiles, const FourteenRow& x, F acc) {
    const uint8_t *tile = block + (size_t)t0 * w.code_step, *scale_at = block + w.scale_at + (size_t)t0 * w.factor_step;
    for (int t = 0; t < tiles; t++, tile += w.code_step, scale_at += w.factor_step) {
        W sum[4], rest[4];
        QUIRE_UNROLL
        for (int n = 0; n < 4; n++) sum[n] = rest[n] = vdupq_n_s32(0);
        const X high[2] = {xload(x.codes[t]), xload(x.codes[t] + 16)}, low[2] = {xload(x.codes[t] + 32), xload(x.codes[t] + 48)};
        each<8>([&](auto q) __attribute__((always_inline)) {
            prefetch(tile + kNear + 64 * q);
            QUIRE_UNROLL
            for (int n = 0; n < 4; n++) {
                const C c = cload(tile + 64 * q + 16 * n);
                sum[n] = wdot<q % 4>(sum[n], c, high[q / 4]);
                rest[n] = wdot<q % 4>(rest[n], c, low[q / 4]);
            }
        });
        each<4>([&](auto n) __attribute__((always_inline)) {
            prefetch(tile + kNear + 512 + 128 * n), prefetch(tile + kNear + 576 + 128 * n);
            C c[8];
            lower_codes(tile, n, c);
            each<8>([&](auto q) __attribute__((always_inline)) { rest[n] = wdot<q % 4>(rest[n], c[q], high[q / 4]); });
        });
        if (__builtin_expect(then != nullptr, 0)) ask_then(then, t0 + t, 1);
        const F scale = half_sixteen(scale_at);
        const float own = x.scale[t];
        QUIRE_UNROLL
        for (int n = 0; n < 4; n++) {
            const V whole = vcvtq_n_f32_s32(vaddq_s32(vshlq_n_s32(sum[n], 8), rest[n]), 8);
            acc.v[n] = vfmaq_f32(acc.v[n], scale.v[n], vmulq_n_f32(whole, own));
        }
    }
    return acc;
}

// R lanes of a panel against a slice of some tiles, whose `lower` bits lie as the upper bytes do. `scale` has 16 floats for a tile.
template <int R>
QUIRE_INLINE void fourteen_slice(const uint8_t* codes, const uint8_t* lower, size_t code_step, const float* scale, int tiles, const Lanes& x, size_t to_low,
                                 const uint8_t* coming, size_t step, V (&acc)[R]) {
    constexpr int kStep = R < 4 ? R : 4;
    for (int t = 0; t < tiles; t++, codes += code_step, lower += 512, scale += 16) {
        for (size_t line = 0; line < step; line += 64) prefetch(coming + line);
        coming += step;
        const int8_t* high = x.codes + 512 * (size_t)t;
        W sum[R];
        auto dots = [&](const int8_t* from, const uint8_t* bytes) __attribute__((always_inline)) {
            each<2>([&](auto h) __attribute__((always_inline)) {
                C c[4];
                each<4>([&](auto j) __attribute__((always_inline)) { c[j] = cload(bytes + 64 * (4 * h + j)); });
                each<R / kStep>([&](auto part) __attribute__((always_inline)) {
                    X q[kStep];
                    each<kStep>([&](auto r) __attribute__((always_inline)) { q[r] = xload(from + 32 * (kStep * part + r) + 16 * h); });
                    each<4>([&](auto j) __attribute__((always_inline)) {
                        each<kStep>([&](auto r) __attribute__((always_inline)) { sum[kStep * part + r] = wdot<j>(sum[kStep * part + r], c[j], q[r]); });
                    });
                });
            });
        };
        each<R>([&](auto r) __attribute__((always_inline)) { sum[r] = vdupq_n_s32(0); });
        dots(high, codes);
        each<R>([&](auto r) __attribute__((always_inline)) { sum[r] = vshlq_n_s32(sum[r], 8); });
        dots(high + to_low, codes);
        dots(high, lower);
        const V sw = vload(scale);
        each<R / kStep>([&](auto part) __attribute__((always_inline)) {
            const float* sx = x.sx + 16 * t + kStep * part;
            const V own = kStep == 4 ? vld1q_f32(sx) : vcombine_f32(vld1_f32(sx), vdup_n_f32(0));
            each<kStep>([&](auto r) __attribute__((always_inline)) {
                constexpr int n = kStep * part + r;
                acc[n] = vfmaq_f32(acc[n], sw, vmulq_laneq_f32(vcvtq_n_f32_s32(sum[n], 8), own, r));
            });
        });
    }
}

constexpr int kFourteenTiles = 24;  // that rows pass over at a time

void fourteen_one_row(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, const Epilogue& e) {
    FourteenRow row;
    for (int b = b0; b < b1; b++) {
        F acc = fzero();
        for (int t0 = 0; t0 < w.tiles; t0 += FourteenRow::kTiles) {
            const int tiles = w.tiles - t0 < FourteenRow::kTiles ? w.tiles - t0 : FourteenRow::kTiles;
            if (b == b0 || w.tiles > FourteenRow::kTiles) row.take(x, s, t0, tiles);
            acc = fourteen_row(w, w.block(b), b + 1 == b1 ? e.then : nullptr, t0, tiles, row, acc);
        }
        finish(e, 0, 16 * (b - b0), acc);
    }
}

void fourteen_rows(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, int m, const Epilogue& e) {
    if (m == 1) return fourteen_one_row(w, b0, b1, x, s, e);
    alignas(64) float sums[kMaxTall * 16], scale[kFourteenTiles][16];
    alignas(64) uint8_t lower[kFourteenTiles][512];
    const int chunks = (w.tiles + kFourteenTiles - 1) / kFourteenTiles, most = (w.tiles + chunks - 1) / chunks, groups = (m + 7) / 8;
    const size_t step = (w.code_step / 4 + (size_t)groups - 1) / (size_t)groups;  // bytes that are asked for with every tile of a slice
    for (int b = b0; b < b1; b++)
        for (int t0 = 0; t0 < w.tiles; t0 += most) {
            const int tiles = w.tiles - t0 < most ? w.tiles - t0 : most, next = t0 + tiles < w.tiles ? t0 + tiles : 0;
            const uint8_t *block = w.block(b), *codes = block + (size_t)t0 * w.code_step, *then = b + 1 < b1 ? w.block(b + 1) : e.then;
            const uint8_t* coming = next ? block + (size_t)next * w.code_step : then ? then : codes;
            for (int t = 0; t < tiles; t++) {
                fstore(scale[t], scale_of(w, b, t0 + t, 0));
                for (int slice = 0; slice < 4; slice++) {
                    C c[8];
                    lower_codes(codes + (size_t)t * w.code_step, slice, c);
                    QUIRE_UNROLL
                    for (int q = 0; q < 8; q++) vst1q_s8((int8_t*)lower[t] + 64 * q + 16 * slice, c[q]);
                }
            }
            for (int first = 0; first < m; first += 8) {
                const uint8_t* panel = x + (size_t)(first / 16) * s.bytes;
                const Lanes lanes = Lanes(panel, s, t0).from(first % 16);
                if (!next) ask_results(e, first, first + 8 < m ? first + 8 : m, 16 * (b - b0));
                const Place place{sums + 16 * first, t0 == 0, next ? nullptr : &e, first, m - first < 8 ? m - first : 8, 16 * (b - b0)};
                auto some = [&](auto rows) {
                    constexpr int R = decltype(rows)::value;
                    for (int slice = 0; slice < 4; slice++, coming += step * (size_t)tiles) {
                        V acc[R];
                        place.take(slice, acc);
                        fourteen_slice<R>(codes + 16 * slice, lower[0] + 16 * slice, w.code_step, scale[0] + 4 * slice, tiles, lanes, s.low, coming, step, acc);
                        place.leave(slice, acc);
                    }
                };
                if (place.rows > 4) some(std::integral_constant<int, 8>{});
                else if (place.rows > 2) some(std::integral_constant<int, 4>{});
                else some(std::integral_constant<int, 2>{});
            }
        }
}

}  // namespace
