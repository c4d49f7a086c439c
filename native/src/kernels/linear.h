// The linear kernels. gemv and gemm are one template, so that a row's result cannot depend on how many rows ride along.
//
// Affine, for one output (row m of x, column n), over groups in order:
//   acc = fma(sw * sx, float(sum(code * q) - offset * sum(q)), acc);  with a bias:  acc = fma(bw, sx * sum(q), acc)
// Dense: four accumulators, taken in turn by k, each an fma chain; then (a0 + a1) + (a2 + a3).
// After that: + bias, then residual + result.
#pragma once

#include "rows.h"

namespace {

// The eight quads of a tile as unsigned bytes.
template <int BITS> inline void unpack(const uint8_t* p, B c[8]) {
    if constexpr (BITS == 8) {
        for (int q = 0; q < 8; q++) c[q] = bload(p + 64 * q);
        return;
    }
    if constexpr (BITS == 4 || BITS == 5 || BITS == 6) {
        for (int j = 0; j < 4; j++) {
            B v = bload(p + 64 * j);
            c[j] = band(v, 15);
            c[j + 4] = band(bshr<4>(v), 15);
        }
    }
    if constexpr (BITS == 2 || BITS == 3) {
        for (int h = 0; h < 2; h++) {
            B v = bload(p + 64 * h);
            c[4 * h] = band(v, 3);
            c[4 * h + 1] = band(bshr<2>(v), 3);
            c[4 * h + 2] = band(bshr<4>(v), 3);
            c[4 * h + 3] = band(bshr<6>(v), 3);
        }
    }
    if constexpr (BITS == 6) {
        for (int h = 0; h < 2; h++) {
            B v = bload(p + 256 + 64 * h);
            c[4 * h] = bor(c[4 * h], band(bshl<4>(v), 0x30));
            c[4 * h + 1] = bor(c[4 * h + 1], band(bshl<2>(v), 0x30));
            c[4 * h + 2] = bor(c[4 * h + 2], band(v, 0x30));
            c[4 * h + 3] = bor(c[4 * h + 3], band(bshr<2>(v), 0x30));
        }
    }
    if constexpr (BITS == 5) {
        B v = bload(p + 256);
        c[0] = bor(c[0], band(bshl<4>(v), 16));
        c[1] = bor(c[1], band(bshl<3>(v), 16));
        c[2] = bor(c[2], band(bshl<2>(v), 16));
        c[3] = bor(c[3], band(bshl<1>(v), 16));
        c[4] = bor(c[4], band(v, 16));
        c[5] = bor(c[5], band(bshr<1>(v), 16));
        c[6] = bor(c[6], band(bshr<2>(v), 16));
        c[7] = bor(c[7], band(bshr<3>(v), 16));
    }
    if constexpr (BITS == 3) {
        B v = bload(p + 128);
        c[0] = bor(c[0], band(bshl<2>(v), 4));
        c[1] = bor(c[1], band(bshl<1>(v), 4));
        c[2] = bor(c[2], band(v, 4));
        c[3] = bor(c[3], band(bshr<1>(v), 4));
        c[4] = bor(c[4], band(bshr<2>(v), 4));
        c[5] = bor(c[5], band(bshr<3>(v), 4));
        c[6] = bor(c[6], band(bshr<4>(v), 4));
        c[7] = bor(c[7], band(bshr<5>(v), 4));
    }
}

template <int BITS> inline I dot_quad(I acc, B c, const int8_t* x) {
    if constexpr (BITS == 8) return dot4_8(acc, c, x);
    return dot4(acc, c, x);
}

inline void finish(const Epilogue& e, int m, int column, F acc) {
    if (e.bias) acc = fadd(acc, fload(e.bias + column));
    if (e.residual) acc = fadd(fload(e.residual + (size_t)m * e.residual_stride + column), acc);
    fstore(e.out + (size_t)m * e.out_stride + column, acc);
}

// Block b of w against R rows of x.
template <int BITS, int GROUP, bool BIAS, int R>
inline void affine_tile(const Matrix& w, int b, const uint8_t* x, const QuantShape& s, F acc[R]) {
    constexpr int kParts = 32 / GROUP, kQuads = GROUP / 4;
    const uint8_t* block = w.block(b);
    const int shift = BITS == 8 && kSigned8 ? 128 - w.offset : -w.offset;  // codes may reach the dot less 128
    const int tiles = w.tiles;
    const size_t code_bytes = w.code_bytes;
    // One row streams the weights through once: ask for what the next block (or the next 8 KiB) needs while this one runs.
    const size_t ahead = w.block_bytes < 8192 ? w.block_bytes : 8192;
    for (int r = 0; r < R; r++) acc[r] = fzero();
    for (int t = 0; t < tiles; t++) {
        B c[8];
        const uint8_t* tile = block + (size_t)t * code_bytes;
        if constexpr (R == 1) {
            for (int i = 0; i < BITS; i++) prefetch(tile + ahead + 64 * i);
            prefetch(block + w.scale_at + (size_t)t * w.scale_bytes + ahead);
            if constexpr (BIAS) prefetch(block + w.bias_at + (size_t)t * w.scale_bytes + ahead);
        }
        unpack<BITS>(tile, c);
        for (int part = 0; part < kParts; part++) {
            const F sw = scale_of(w, block, t, part);
            F bw = fzero();
            if constexpr (BIAS) bw = bias_of(w, block, t, part);
            const int g = t * kParts + part;
            const size_t sums = GROUP == 32 ? s.sum32 : s.sum16, scaled = GROUP == 32 ? s.sxs32 : s.sxs16;
            const int8_t* q = (const int8_t*)x + 32 * t + GROUP * part;
            I d[R];  // one chain per row, advanced together: their latencies overlap
            QUIRE_UNROLL
            for (int r = 0; r < R; r++) d[r] = iset(shift * ((const int32_t*)(x + (size_t)r * s.stride + sums))[g]);
            if constexpr (R == 1) {  // integers: splitting the chain in two changes nothing
                I odd = iset(0);
                QUIRE_UNROLL
                for (int j = 0; j < kQuads; j += 2) {
                    d[0] = dot_quad<BITS>(d[0], c[kQuads * part + j], q + 4 * j);
                    odd = dot_quad<BITS>(odd, c[kQuads * part + j + 1], q + 4 * j + 4);
                }
                d[0] = iadd(d[0], odd);
            } else {
                QUIRE_UNROLL
                for (int j = 0; j < kQuads; j++) {
                    QUIRE_UNROLL
                    for (int r = 0; r < R; r++)
                        d[r] = dot_quad<BITS>(d[r], c[kQuads * part + j], q + (size_t)r * s.stride + 4 * j);
                }
            }
            QUIRE_UNROLL
            for (int r = 0; r < R; r++) {
                const uint8_t* row = x + (size_t)r * s.stride;
                acc[r] = ffma(fmul(sw, fset(((const float*)(row + s.sx))[t])), ffrom(d[r]), acc[r]);
                if constexpr (BIAS) acc[r] = ffma(bw, fset(((const float*)(row + scaled))[g]), acc[r]);
            }
        }
    }
}

template <int BITS, int GROUP, bool BIAS, int R>
void affine_rows(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, int m0, const Epilogue& e) {
    F acc[R];
    for (int b = b0; b < b1; b++) {
        affine_tile<BITS, GROUP, BIAS, R>(w, b, x + (size_t)m0 * s.stride, s, acc);
        for (int r = 0; r < R; r++) finish(e, m0 + r, 16 * (b - b0), acc[r]);
    }
}

template <int BITS, int GROUP, bool BIAS>
void affine_blocks(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, int m, const Epilogue& e) {
    if (m == 1) return affine_rows<BITS, GROUP, BIAS, 1>(w, b0, b1, x, s, 0, e);
    for (int b = b0; b < b1; b++) {  // a block stays in the first cache while the rows pass
        Epilogue here = e;
        here.out += 16 * (b - b0);
        if (e.bias) here.bias += 16 * (b - b0);
        if (e.residual) here.residual += 16 * (b - b0);
        int i = 0;
        for (; i + kMaxRows <= m; i += kMaxRows) affine_rows<BITS, GROUP, BIAS, kMaxRows>(w, b, b + 1, x, s, i, here);
        if constexpr (kMaxRows > 4)
            for (; i + 4 <= m; i += 4) affine_rows<BITS, GROUP, BIAS, 4>(w, b, b + 1, x, s, i, here);
        for (; i + 2 <= m; i += 2) affine_rows<BITS, GROUP, BIAS, 2>(w, b, b + 1, x, s, i, here);
        for (; i < m; i++) affine_rows<BITS, GROUP, BIAS, 1>(w, b, b + 1, x, s, i, here);
    }
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
        default: return affine_bits<8>(w, b0, b1, x, s, m, e);
    }
}

template <Type TYPE> inline F dense_load(const uint8_t* block, int k) {
    if constexpr (TYPE == Type::F32) return fload((const float*)block + 16 * (size_t)k);
    if constexpr (TYPE == Type::F16) return fload_half((const uint16_t*)block + 16 * (size_t)k);
    return fload_bf16((const uint16_t*)block + 16 * (size_t)k);
}

template <Type TYPE, int R>
void dense_rows(const Matrix& w, int b, const float* x, size_t stride, int m0, const Epilogue& e, int column) {
    const uint8_t* block = w.block(b);
    const int k = w.k;
    F acc[4][R];
    for (int j = 0; j < 4; j++)
        for (int r = 0; r < R; r++) acc[j][r] = fzero();
    x += (size_t)m0 * stride;
    int i = 0;
    for (; i + 4 <= k; i += 4) {
        for (int j = 0; j < 4; j++) {
            F v = dense_load<TYPE>(block, i + j);
            for (int r = 0; r < R; r++) acc[j][r] = ffma(fset(x[(size_t)r * stride + i + j]), v, acc[j][r]);
        }
    }
    for (int j = 0; i < k; i++, j++) {
        F v = dense_load<TYPE>(block, i);
        for (int r = 0; r < R; r++) acc[j][r] = ffma(fset(x[(size_t)r * stride + i]), v, acc[j][r]);
    }
    for (int r = 0; r < R; r++)
        finish(e, m0 + r, column, fadd(fadd(acc[0][r], acc[1][r]), fadd(acc[2][r], acc[3][r])));
}

template <Type TYPE>
void dense_blocks(const Matrix& w, int b0, int b1, const float* x, size_t stride, int m, const Epilogue& e) {
    for (int b = b0; b < b1; b++) {
        int i = 0, column = 16 * (b - b0);
        for (; i + 4 <= m; i += 4) dense_rows<TYPE, 4>(w, b, x, stride, i, e, column);
        for (; i + 2 <= m; i += 2) dense_rows<TYPE, 2>(w, b, x, stride, i, e, column);
        for (; i < m; i++) dense_rows<TYPE, 1>(w, b, x, stride, i, e, column);
    }
}

void linear_dense(const Matrix& w, int b0, int b1, const float* x, size_t stride, int m, const Epilogue& e) {
    if (w.type == Type::F32) return dense_blocks<Type::F32>(w, b0, b1, x, stride, m, e);
    if (w.type == Type::F16) return dense_blocks<Type::F16>(w, b0, b1, x, stride, m, e);
    return dense_blocks<Type::BF16>(w, b0, b1, x, stride, m, e);
}

}  // namespace
