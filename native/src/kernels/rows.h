// Kernels over rows of float32: exp, norms, activation quantization, rope, and one row out of a packed matrix.
// Included by each isa_*.cpp after its simd header; everything is private to that file, so that no two builds of one
// inline function can be mixed up by the linker.
#pragma once

#include "../half.h"
#include "../kernels.h"

#define QUIRE_INLINE __attribute__((always_inline)) inline
#define QUIRE_UNROLL _Pragma("GCC unroll 8")
#define QUIRE_UNROLL16 _Pragma("GCC unroll 16")
// One copy of it, whatever it is given.
#if defined(__clang__)
#define QUIRE_ONCE __attribute__((noinline))
#else
#define QUIRE_ONCE __attribute__((noinline, noclone))
#endif

namespace {

using namespace quire;

#ifndef QUIRE_NEON  // it has its own
using S = F;  // one number for all lanes
inline S sload(const float* p) { return fset(*p); }
inline I icodes(F a) { return ito(fmin(fmax(fround(a), fset(-127.0f)), fset(127.0f))); }  // rounded, between -127 and 127
#endif

// e^x to about 1 ulp, with a fixed order of operations. NaN stays NaN.
#ifndef QUIRE_NEON  // it has its own
inline F fexp(F x) {
    x = fmax(fset(-104.0f), x);  // below: 0. The constant comes first so that a NaN passes
    x = fmin(fset(89.0f), x);    // above: infinity
    F n = fround(fmul(x, fset(1.44269504f)));
    F r = ffma(n, fset(-0x1.62e43p-1f), x);
    r = ffma(n, fset(0x1.05c61p-29f), r);  // ln 2 lies just below its float32
    F p = fset(1.0f / 5040);
    p = ffma(p, r, fset(1.0f / 720));
    p = ffma(p, r, fset(1.0f / 120));
    p = ffma(p, r, fset(1.0f / 24));
    p = ffma(p, r, fset(1.0f / 6));
    p = ffma(p, r, fset(0.5f));
    p = ffma(p, r, fset(1.0f));
    p = ffma(p, r, fset(1.0f));
    I whole = ito(n), half = ishr<1>(whole);  // 2^n in two steps: each factor is a normal number
    return fmul(fmul(p, fpow2(half)), fpow2(isub(whole, half)));
}
#endif

void exp_rows(const float* x, int n, float* out) {
    for (int i = 0; i < n; i += 16) fstore_n(out + i, fexp(fload_n(x + i, n - i)), n - i);
}

// int8 per 32 columns: q = round(x * (127 / amax)), sx = amax / 127 without its two lowest bits, so that kSumPoint * sx is exact. Groups
// too small for 127 / amax become zeros; one too large for kSumPoint * sx (1e33) has a scale that is not a number.
inline float group_scale(float amax) {
    if (amax >= kScaleLimit) return bits_to_float(0x7fc00000);
    return bits_to_float(float_to_bits(amax / 127.0f) & ~3u);
}
__attribute__((always_inline)) inline void quantize_group(F a, F b, float inv, float scale, int g, uint8_t* panel, int lane, const QuantShape& s) {
    a = fmul(a, fset(inv)), b = fmul(b, fset(inv));
    const I qa = icodes(a), qb = icodes(b);
    int8_t* codes = (int8_t*)panel + 512 * (size_t)g + 32 * lane;
    istore_i8(codes, qa);
    istore_i8(codes + 16, qb);
    int32_t* sum = (int32_t*)(panel + s.sum) + lane;
    ((float*)(panel + s.sx) + lane)[16 * g] = scale;
    if constexpr (QuantShape::kHasExcess) {
        float* excess = (float*)(panel + s.excess) + 64 * (size_t)g + 4 * lane;
        for (int i = 0; i < 4; i++) excess[i] = -kSumPoint * scale;
    }
    code_sums(qa, qb, sum + 32 * g, sum + 32 * g + 16);
    ((float*)(panel + s.sxs) + lane)[16 * g] = scale * (float)(sum[32 * g] + sum[32 * g + 16]);
    if (!s.fine()) return;
    const F step = fset(256.0f);
    const I la = icodes(fmul(fsub(a, fround(a)), step)), lb = icodes(fmul(fsub(b, fround(b)), step));
    istore_i8(codes + s.low, la);
    istore_i8(codes + s.low + 16, lb);
    int32_t of_a, of_b;
    code_sums(la, lb, &of_a, &of_b);
    ((int32_t*)(panel + s.low_sum) + lane)[16 * g] = of_a + of_b;
}
void quantize(const float* x, int first_group, int groups, uint8_t* panel, int lane, const QuantShape& s) {
#ifndef QUIRE_SCALAR  // four at a time, while the next four wait for their maxima and divisions; the last four once more if others are left
    if (groups >= 4) {
        float inv[2][4], scale[2][4];
        factors_of_four(x, inv[0], scale[0]);
        for (int g = 0, turn = 0;; turn ^= 1) {
            const int next = g + 8 <= groups ? g + 4 : groups - 4;
            if (next != g) factors_of_four(x + 32 * next, inv[!turn], scale[!turn]);
            for (int i = 0; i < 4; i++) {
                const float* from = x + 32 * (g + i);
                quantize_group(fload(from), fload(from + 16), inv[turn][i], scale[turn][i], first_group + g + i, panel, lane, s);
            }
            if (next == g) return;
            g = next;
        }
    }
#endif
    for (int g = first_group; g < first_group + groups; g++, x += 32) {
        const F a = fload(x), b = fload(x + 16);
        const float amax = hmax(fmax(fabs_(a), fabs_(b)));
        const bool tiny = amax < 1e-36f;
        quantize_group(a, b, tiny ? 0.0f : 127.0f / amax, tiny ? 0.0f : group_scale(amax), g, panel, lane, s);
    }
}

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
    F sum = fzero();
    for (int i = 0; i < n; i += 16) {
        F v = fload_n(x + i, n - i);
        sum = ffma(v, v, sum);
    }
    float inverse = 1.0f / __builtin_sqrtf(hsum(sum) / (float)n + eps);
    for (int i = 0; i < n; i += 16)
        fstore_n(out + i, fmul(fmul(fload_n(x + i, n - i), fset(inverse)), fload_n(weight + i, n - i)), n - i);
}

// The mean is taken twice: what the first sum lost to rounding, the sum of the differences finds again.
void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* out) {
    F sum = fzero();
    for (int i = 0; i < n; i += 16) sum = fadd(sum, fload_n(x + i, n - i));
    const F near = fset(hsum(sum) / (float)n);
    F rest = fzero(), squares = fzero();
    for (int i = 0; i < n; i += 16) {
        F v = fkeep(fsub(fload_n(x + i, n - i), near), n - i, fzero());
        rest = fadd(rest, v);
        squares = ffma(v, v, squares);
    }
    const float left = hsum(rest) / (float)n, square = hsum(squares) / (float)n - left * left;
    const float variance = square < 0.0f ? 0.0f : square;
    const F more = fset(left), inverse = fset(1.0f / __builtin_sqrtf(variance + eps));
    for (int i = 0; i < n; i += 16) {
        F v = fmul(fsub(fsub(fload_n(x + i, n - i), near), more), inverse);
        v = fmul(v, fload_n(weight + i, n - i));
        if (bias) v = fadd(v, fload_n(bias + i, n - i));
        fstore_n(out + i, v, n - i);
    }
}

void accumulate(const float* x, float factor, int n, float* sum) {
    for (int i = 0; i < n; i += 16) fstore_n(sum + i, ffma(fset(factor), fload_n(x + i, n - i), fload_n(sum + i, n - i)), n - i);
}

void rope(const float* x, const RopeArgs& r, float* out) {
    const int half = r.dim / 2;
    for (int h = 0; h < r.heads; h++, x += r.head_dim, out += r.head_dim) {
        if (r.pairs) {
            int i = 0;
#ifdef QUIRE_NEON
            for (; i + 4 <= half; i += 4) {
                const float32x4x2_t ab = vld2q_f32(x + 2 * i);
                const float32x4_t c = vld1q_f32(r.cos + i), s = vld1q_f32(r.sin + i);
                vst2q_f32(out + 2 * i, {{vsubq_f32(vmulq_f32(ab.val[0], c), vmulq_f32(ab.val[1], s)),
                                         vaddq_f32(vmulq_f32(ab.val[0], s), vmulq_f32(ab.val[1], c))}});
            }
#endif
            for (; i < half; i++) {
                float a = x[2 * i], b = x[2 * i + 1];
                out[2 * i] = a * r.cos[i] - b * r.sin[i];
                out[2 * i + 1] = a * r.sin[i] + b * r.cos[i];
            }
        } else {
            for (int i = 0; i < half; i += 16) {
                int n = half - i;
                F a = fload_n(x + i, n), b = fload_n(x + half + i, n), c = fload_n(r.cos + i, n), s = fload_n(r.sin + i, n);
                fstore_n(out + i, fsub(fmul(a, c), fmul(b, s)), n);
                fstore_n(out + half + i, fadd(fmul(a, s), fmul(b, c)), n);
            }
        }
        for (int i = r.dim; i < r.head_dim; i++) out[i] = x[i];
    }
}

// Code q (0 to 7: which quad) of a row inside a tile; see weight.h. Whole bytes and six bits as they are stored.
inline uint32_t code_at(const uint8_t* tile, int bits, int lane, int q) {
    const uint8_t* half = tile + 192 * (q / 4) + lane;  // of 6 bits
    switch (bits) {
        case 8: return tile[64 * q + lane];
        case 6: return q % 4 < 3 ? half[64 * (q % 4)] >> 2u : (half[0] & 3u) << 4 | (half[64] & 3u) << 2 | (half[128] & 3u);
        case 2: return (tile[64 * (q / 4) + lane] >> (2 * (q % 4))) & 3u;
        case 3: return ((tile[64 * (q / 4) + lane] >> (2 * (q % 4))) & 3u) | ((tile[128 + lane] >> q) & 1u) << 2;
        default: break;
    }
    if (bits == 4 && kNibbleRows) return lane < 32 ? tile[32 * q + lane] & 15u : (tile[32 * q + lane - 32] >> 4u) ^ 8u;
    uint32_t code = (tile[64 * (q % 4) + lane] >> (q < 4 ? 0 : 4)) & 15u;
    if (bits == 5) code |= ((tile[256 + lane] >> q) & 1u) << 4;
    return code;
}

// Factors `index` of 16 rows in a region, as float32.
inline F factors(const Matrix& w, const uint8_t* region, int index) {
    return w.wide ? fload((const float*)region + 16 * index) : fload_half((const uint16_t*)region + 16 * index);
}

// Scales (and biases) of 16 rows for group `part` of tile t, as float32. Exact, as long as a wide factor is a short one.
inline F scale_of(const Matrix& w, int b, int t, int part) {
    const uint8_t* block = w.block(b);
    if (w.scales == Scales::Half) return factors(w, block + w.scale_at + (size_t)t * w.factor_step, part);
    const uint8_t* codes = block + w.scale_at + (size_t)t * w.factor_step + 16 * part;
    F super = factors(w, w.supers(b), t / 8);
    return fmul(super, w.scales == Scales::Byte ? fload_i8((const int8_t*)codes) : fload_u4(codes, 0));
}
inline F bias_of(const Matrix& w, int b, int t, int part) {
    const uint8_t* block = w.block(b);
    if (w.scales == Scales::Half) return factors(w, block + w.bias_at + (size_t)t * w.factor_step, part);
    F super = factors(w, w.supers(b) + w.bias_super_at, t / 8);
    if (w.scales == Scales::Byte)
        return fmul(super, fload_i8((const int8_t*)(block + w.bias_at + (size_t)t * w.factor_step) + 16 * part));
    return fmul(super, fload_u4(block + w.scale_at + (size_t)t * w.factor_step + 16 * part, 4));
}

// One row, exactly: the product and the sum each rounded once.
void dequantize_row(const Matrix& w, int row, float* out) {
    const uint8_t* block = w.block(row / 16);
    const int r = row % 16;
    if (w.type != Type::Affine) {
        for (int i = 0; i < w.k; i++) {
            size_t at = (size_t)i * 16 + (size_t)r;
            out[i] = w.type == Type::F32   ? ((const float*)block)[at]
                     : w.type == Type::F16 ? half_to_float(((const uint16_t*)block)[at])
                                           : bfloat_to_float(((const uint16_t*)block)[at]);
        }
        return;
    }
    float scale[16], bias[16];
    const uint8_t less = stored_less(w.bits, w.bias);
    for (int t = 0; t < w.tiles; t++) {
        const uint8_t* tile = block + (size_t)t * w.code_step;
        for (int part = 0; part < 32 / w.group; part++) {
            fstore(scale, scale_of(w, row / 16, t, part));
            if (w.bias) fstore(bias, bias_of(w, row / 16, t, part));
            auto code = [&](const uint8_t* from, int bits, int i, uint8_t flip) { return (int)(code_at(from, bits, 4 * r + i % 4, i / 4) ^ flip); };
            for (int i = part * w.group; i < (part + 1) * w.group; i++) {
                float v;
                if (w.bits == 14) v = (float)(64 * (code(tile, 8, i, less) - 128) + code(tile + 512, 6, i, stored_less(6, false)) - 32) * (scale[r] * 0x1p-6f);
                else v = (float)(code(tile, w.bits, i, less) - w.offset) * scale[r];
                out[32 * t + i] = w.bias ? v + bias[r] : v;
            }
        }
    }
}

}  // namespace
