// The linear kernels. A row's result cannot depend on how many rows ride along, so every path computes, for one output
// (row m of x, column n):
//   affine, over groups in order:
//     acc = fma(sw, sx * float(sum(code * q) - offset * sum(q)), acc);  with a bias:  acc = fma(bw, sx * sum(q), acc)
//     (the integers are exact, so their order is free: that is where the paths differ)
//   14 bits, over groups of 32 in order, with x in two bytes (q and, in 256ths of a step, r):
//     acc = fma(sw, sx * (float(256 * sum(upper * q) + sum(upper * r + 4 * lower * q)) / 256), acc)
//   dense: one fma chain over k in order.
// After that: + bias, then residual + result.
//
// One row streams the weights through once (gemv, here), and a few do so together (few.h). More rows: gemm.h.
#pragma once

#include "gemm.h"
#ifdef QUIRE_NEON
#include "neon_dense.h"
#include "neon_fourteen.h"
#else
#include "few.h"
#include "fourteen.h"
#endif

namespace {

#ifndef QUIRE_NEON  // it has its own
// Columns of one row that are added one after the other: dot products take their time, so that two chains run side by side.
#ifdef QUIRE_WORD_SUMS
template <int GROUP> constexpr int kChain = GROUP;
#else
template <int GROUP> constexpr int kChain = 16;
#endif

// Block b of w against one row: a lane of a panel.
template <int BITS, int GROUP, bool BIAS>
inline F affine_row(const Matrix& w, int b, const uint8_t* x, const QuantShape& s, int lane) {
    const uint8_t* block = w.block(b);
    constexpr int kParts = 32 / GROUP, kChains = 32 / kChain<GROUP>;
    const int shift = code_base(BITS) - w.offset;
    const int tiles = w.tiles;
    const size_t code_step = w.code_step;
    // Ask for what the next block (or the next 8 KiB) needs while this one runs.
    const size_t ahead = w.block_bytes < 8192 ? w.block_bytes : 8192;
    const float* sx = (const float*)(x + s.sx) + lane;
    const int32_t* sum = (const int32_t*)(x + s.sum) + lane;
    x += 32 * lane;
    F acc = fzero();
    for (int t = 0; t < tiles; t++) {
        const uint8_t* tile = block + (size_t)t * code_step;
        for (int i = 0; i < BITS; i++) prefetch(tile + ahead + 64 * i);
        prefetch(block + w.scale_at + (size_t)t * w.factor_step + ahead);
        if constexpr (BIAS) prefetch(block + w.bias_at + (size_t)t * w.factor_step + ahead);
        const int8_t* q = (const int8_t*)x + 512 * (size_t)t;
        const int32_t first = sum[32 * t], second = sum[32 * t + 16];
        const int32_t total[2] = {GROUP == 32 ? first + second : first, second};
        Dots<Lanes16, BITS, 32 / kChains> d[kChains];
        for (int i = 0; i < kChains; i++) d[i].total = iset(i < kParts ? shift * total[i] : 0);
        each_quad<BITS, BIAS>(tile, [&](int j, B codes) __attribute__((always_inline)) {
            d[j * kChains / 8].add(j % (8 / kChains), less_base<BITS>(codes), q + 4 * j);
        });
        if constexpr (kChains > kParts) d[0].total = iadd(d[0].total, d[1].total);
        const F scale = fset(sx[16 * t]);
        for (int part = 0; part < kParts; part++) {
            acc = ffma(scale_of(w, b, t, part), fmul(scale, ffrom(d[part].total)), acc);
            if constexpr (BIAS) acc = ffma(bias_of(w, b, t, part), fset(sx[16 * t] * (float)total[part]), acc);
        }
    }
    return acc;
}

template <int BITS, int GROUP, bool BIAS>
void affine_one_row(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, const Epilogue& e) {
    for (int b = b0; b < b1; b++) finish(e, 0, 16 * (b - b0), affine_row<BITS, GROUP, BIAS>(w, b, x, s, 0));
}

// Whether a GGUF type has this form. Others come from elsewhere and always pass over unpacked codes: half of the compiler's time would be theirs.
template <int BITS, int GROUP, bool BIAS>
constexpr bool kCommon = GROUP == 32 ? BITS == 4 || BITS == 5 || BITS == 8 : BIAS ? BITS == 2 : BITS == 3 || BITS == 6 || BITS == 8;

// Row by row, as every other path must come out: for a set without a tile, where rows gain nothing by each other.
template <int BITS, int GROUP, bool BIAS>
void affine_each_row(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, int m, const Epilogue& e) {
    for (int i = 0; i < m; i++) {
        const uint8_t* panel = x + (size_t)(i / QuantShape::kLanes) * s.bytes;
        for (int b = b0; b < b1; b++)
            finish(e, i, 16 * (b - b0), affine_row<BITS, GROUP, BIAS>(w, b, panel, s, i % QuantShape::kLanes));
    }
}

template <int BITS, int GROUP, bool BIAS>
void affine_rows(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, int m, const Epilogue& e) {
    if constexpr (kTileRows == 1) {
        affine_each_row<BITS, GROUP, BIAS>(w, b0, b1, x, s, m, e);
    } else {
        if constexpr (kCommon<BITS, GROUP, BIAS>) {
            if (m <= kFewAffine) return affine_panel_rows<BITS, GROUP, BIAS>(w, b0, b1, x, s, m, e);
        }
        affine_gemm<BITS, GROUP, BIAS>(w, b0, b1, x, s, m, e);
    }
}

#endif

template <int BITS, int GROUP, bool BIAS>
void affine_blocks(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, int m, const Epilogue& e) {
    if (m > 1) return affine_rows<BITS, GROUP, BIAS>(w, b0, b1, x, s, m, e);
    affine_one_row<BITS, GROUP, BIAS>(w, b0, b1, x, s, e);
}

template <int BITS>
void affine_bits(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, int m, const Epilogue& e) {
    if (w.group == 32) {
        if (w.bias) return affine_blocks<BITS, 32, true>(w, b0, b1, x, s, m, e);
        return affine_blocks<BITS, 32, false>(w, b0, b1, x, s, m, e);
    }
    if (w.bias) return affine_blocks<BITS, 16, true>(w, b0, b1, x, s, m, e);
    return affine_blocks<BITS, 16, false>(w, b0, b1, x, s, m, e);
}

void linear_affine(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, int m, const Epilogue& e) {
    switch (w.bits) {
        case 2: return affine_bits<2>(w, b0, b1, x, s, m, e);
        case 3: return affine_bits<3>(w, b0, b1, x, s, m, e);
        case 4: return affine_bits<4>(w, b0, b1, x, s, m, e);
        case 5: return affine_bits<5>(w, b0, b1, x, s, m, e);
        case 6: return affine_bits<6>(w, b0, b1, x, s, m, e);
        case 14: return fourteen_rows(w, b0, b1, x, s, m, e);
        default: return affine_bits<8>(w, b0, b1, x, s, m, e);
    }
}

template <Type TYPE> inline F dense_load(const uint8_t* block, int k) {
    if constexpr (TYPE == Type::F32) return fload((const float*)block + 16 * (size_t)k);
    if constexpr (TYPE == Type::F16) return fload_half((const uint16_t*)block + 16 * (size_t)k);
    return fload_bf16((const uint16_t*)block + 16 * (size_t)k);
}

#ifndef QUIRE_NEON  // it has its own
// C blocks from b on against one row: their chains run side by side.
template <Type TYPE, int C>
void dense_row(const Matrix& w, int b, const float* x, const Epilogue& e, int column) {
    constexpr size_t kBytes = TYPE == Type::F32 ? 64 : 32;  // of one column of a block
    const uint8_t* block[C];
    F acc[C];
    QUIRE_UNROLL
    for (int c = 0; c < C; c++) block[c] = w.block(b + c), acc[c] = fzero();
    const size_t ahead = w.block_bytes * C < 4096 ? w.block_bytes * C : 4096;
    for (int i = 0; i < w.k; i++) {
        if ((size_t)i * kBytes % 64 == 0)
            QUIRE_UNROLL
            for (int c = 0; c < C; c++) prefetch(block[c] + (size_t)i * kBytes + ahead);
        const S v = sload(x + i);
        QUIRE_UNROLL
        for (int c = 0; c < C; c++) acc[c] = ffma(v, dense_load<TYPE>(block[c], i), acc[c]);
    }
    QUIRE_UNROLL
    for (int c = 0; c < C; c++) finish(e, 0, column + 16 * c, acc[c]);
}
#endif

// C blocks from b on against R rows, without widening the weights first: that pays where many rows use them.
template <Type TYPE, int R, int C>
void dense_few(const Matrix& w, int b, const float* x, size_t stride, const Epilogue& e, int row, int column) {
    constexpr size_t kBytes = TYPE == Type::F32 ? 64 : 32;  // of one column of a block
    const uint8_t* block[C];
    F acc[R][C];
    QUIRE_UNROLL
    for (int c = 0; c < C; c++) {
        block[c] = w.block(b + c);
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) acc[r][c] = fzero();
    }
    const size_t ahead = w.block_bytes * C < 4096 ? w.block_bytes * C : 4096;
    for (int i = 0; i < w.k; i++) {
        F v[C];
        QUIRE_UNROLL
        for (int c = 0; c < C; c++) {
            if ((size_t)i * kBytes % 64 == 0) prefetch(block[c] + (size_t)i * kBytes + ahead);
            v[c] = dense_load<TYPE>(block[c], i);
        }
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) {
            const S q = sload(x + (size_t)r * stride + (size_t)i);
            QUIRE_UNROLL
            for (int c = 0; c < C; c++) acc[r][c] = ffma(q, v[c], acc[r][c]);
        }
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; r++)
        QUIRE_UNROLL
        for (int c = 0; c < C; c++) finish(e, row + r, column + 16 * c, acc[r][c]);
}

constexpr int kFewBlocks = kWidth == 16 && kDenseRows >= 8 ? 2 : 1;  // whose sums fit the registers
constexpr int kFewRows = 8;

template <Type TYPE, int C>
inline void dense_few_rows(const Matrix& w, int b, const float* x, size_t stride, int m, const Epilogue& e, int column) {
    for (int row = 0; row < m; row += 4) {
        const float* from = x + (size_t)row * stride;
        switch (m - row) {
            case 1: dense_few<TYPE, 1, C>(w, b, from, stride, e, row, column); break;
            case 2: dense_few<TYPE, 2, C>(w, b, from, stride, e, row, column); break;
            case 3: dense_few<TYPE, 3, C>(w, b, from, stride, e, row, column); break;
            default: dense_few<TYPE, 4, C>(w, b, from, stride, e, row, column);
        }
    }
}

template <Type TYPE>
void dense_blocks(const Matrix& w, int b0, int b1, const float* x, size_t stride, int m, const Epilogue& e) {
    if (m > 1 && m <= kFewRows) {
        int b = b0;
        for (; b + kFewBlocks <= b1; b += kFewBlocks) dense_few_rows<TYPE, kFewBlocks>(w, b, x, stride, m, e, 16 * (b - b0));
        for (; b < b1; b++) dense_few_rows<TYPE, 1>(w, b, x, stride, m, e, 16 * (b - b0));
        return;
    }
    if (m > 1) {
        auto widen = [&](int b, int from, int count, float* to) {
            const uint8_t* block = w.block(b);
            for (int i = 0; i < count; i++) fstore(to + 16 * i, dense_load<TYPE>(block, from + i));
        };
        return dense_gemm(w, b0, b1, x, stride, m, e, widen);
    }
    int b = b0;
    for (; b + 2 <= b1; b += 2) dense_row<TYPE, 2>(w, b, x, e, 16 * (b - b0));
    for (; b < b1; b++) dense_row<TYPE, 1>(w, b, x, e, 16 * (b - b0));
}

void linear_dense(const Matrix& w, int b0, int b1, const float* x, size_t stride, int m, const Epilogue& e) {
    if (w.type == Type::F32) return dense_blocks<Type::F32>(w, b0, b1, x, stride, m, e);
    if (w.type == Type::F16) return dense_blocks<Type::F16>(w, b0, b1, x, stride, m, e);
    return dense_blocks<Type::BF16>(w, b0, b1, x, stride, m, e);
}

}  // namespace
