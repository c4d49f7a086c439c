// One row over dense weights on ARM: four columns at a time, so that one load of x serves them lane by lane.
#pragma once

#include "gemm.h"

namespace {

template <Type TYPE> inline F dense_load(const uint8_t* block, int k);

// C blocks from b on: their chains run side by side.
template <Type TYPE, int C>
void dense_row(const Matrix& w, int b, const float* x, const Epilogue& e, int column) {
    constexpr size_t kBytes = TYPE == Type::F32 ? 256 : 128;  // of four columns of a block
    const uint8_t* block[C];
    F acc[C];
    QUIRE_UNROLL
    for (int c = 0; c < C; c++) block[c] = w.block(b + c), acc[c] = fzero();
    const size_t ahead = w.block_bytes * C < 4096 ? w.block_bytes * C : 4096;
    int i = 0;
    for (; i + 4 <= w.k; i += 4) {
        const float32x4_t v = vld1q_f32(x + i);
        size_t at = (size_t)i * (kBytes / 4) + ahead;
        if (at >= w.block_bytes) at += (C - 1) * w.block_bytes;  // past its end: in the block that comes after these C
        QUIRE_UNROLL
        for (int c = 0; c < C; c++)
            QUIRE_UNROLL
            for (size_t line = 0; line < kBytes; line += 64) prefetch(block[c] + at + line);
        QUIRE_UNROLL
        for (int c = 0; c < C; c++) acc[c] = ffma_lane<0>(v, dense_load<TYPE>(block[c], i), acc[c]);
        QUIRE_UNROLL
        for (int c = 0; c < C; c++) acc[c] = ffma_lane<1>(v, dense_load<TYPE>(block[c], i + 1), acc[c]);
        QUIRE_UNROLL
        for (int c = 0; c < C; c++) acc[c] = ffma_lane<2>(v, dense_load<TYPE>(block[c], i + 2), acc[c]);
        QUIRE_UNROLL
        for (int c = 0; c < C; c++) acc[c] = ffma_lane<3>(v, dense_load<TYPE>(block[c], i + 3), acc[c]);
    }
    for (; i < w.k; i++)
        QUIRE_UNROLL
        for (int c = 0; c < C; c++) acc[c] = ffma(sload(x + i), dense_load<TYPE>(block[c], i), acc[c]);
    QUIRE_UNROLL
    for (int c = 0; c < C; c++) finish(e, 0, column + 16 * c, acc[c]);
}

}  // namespace
