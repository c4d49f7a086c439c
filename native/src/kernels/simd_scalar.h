// The 16-lane vocabulary in plain C++: the specification that every other simd_*.h must match bit for bit.
// It is what runs on a CPU without a kernel set of its own, and the oracle of the self-test.
#pragma once

#define QUIRE_SCALAR 1

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../half.h"

namespace {

constexpr int kWidth = 16;                          // lanes of a register
constexpr int kTileRows = 1, kTileColumns = 1;      // of the int8 register tile: one row, so there is none
constexpr int kDenseRows = 2, kDenseColumns = 1;    // of the float register tile
constexpr int kMaxQueries = 2, kMaxChains = 2;  // of attention's register tile: queries; queries times vectors

struct F {
    float v[16];
};
struct I {
    int32_t v[16];
};
struct B {
    uint8_t v[64];
};

#define QUIRE_LANES for (int i = 0; i < 16; i++)

inline F fset(float x) {
    F r;
    QUIRE_LANES r.v[i] = x;
    return r;
}
inline F fzero() { return fset(0.0f); }
inline F fload(const float* p) {
    F r;
    QUIRE_LANES r.v[i] = p[i];
    return r;
}
inline F fload_n(const float* p, int n) {
    F r;
    QUIRE_LANES r.v[i] = i < n ? p[i] : 0.0f;
    return r;
}
inline void fstore(float* p, F a) { QUIRE_LANES p[i] = a.v[i]; }
inline void fstore_n(float* p, F a, int n) {
    for (int i = 0; i < n && i < 16; i++) p[i] = a.v[i];
}
inline void fstore_halves(float* low, float* high, F a) {
    for (int i = 0; i < 8; i++) low[i] = a.v[i], high[i] = a.v[8 + i];
}
inline F fload_half_n(const uint16_t* p, int n) {
    F r;
    QUIRE_LANES r.v[i] = i < n ? quire::half_to_float(p[i]) : 0.0f;
    return r;
}
inline F fload_half(const uint16_t* p) { return fload_half_n(p, 16); }
inline void fstore_half_n(uint16_t* p, F a, int n) {
    for (int i = 0; i < n && i < 16; i++) p[i] = quire::float_to_half(a.v[i]);
}
inline F fload_bf16(const uint16_t* p) {
    F r;
    QUIRE_LANES r.v[i] = quire::bfloat_to_float(p[i]);
    return r;
}
inline F fload_i8(const int8_t* p) {
    F r;
    QUIRE_LANES r.v[i] = (float)p[i];
    return r;
}
inline F fload_u4(const uint8_t* p, int shift) {
    F r;
    QUIRE_LANES r.v[i] = (float)((p[i] >> shift) & 15);
    return r;
}
#define QUIRE_BINARY(name, expression)        \
    inline F name(F a, F b) {                 \
        F r;                                  \
        QUIRE_LANES r.v[i] = (expression);    \
        return r;                             \
    }
QUIRE_BINARY(fadd, a.v[i] + b.v[i])
QUIRE_BINARY(fsub, a.v[i] - b.v[i])
QUIRE_BINARY(fmul, a.v[i] * b.v[i])
QUIRE_BINARY(fdiv, a.v[i] / b.v[i])
QUIRE_BINARY(fmax, a.v[i] > b.v[i] ? a.v[i] : b.v[i])  // a NaN in either gives b, as maxps does
QUIRE_BINARY(fmin, a.v[i] < b.v[i] ? a.v[i] : b.v[i])
#undef QUIRE_BINARY
inline F ffma(F a, F b, F c) {
    F r;
    QUIRE_LANES r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
    return r;
}
inline F fabs_(F a) {
    F r;
    QUIRE_LANES r.v[i] = __builtin_fabsf(a.v[i]);
    return r;
}
inline F fround(F a) {
    F r;
    QUIRE_LANES r.v[i] = __builtin_rintf(a.v[i]);
    return r;
}
inline F fkeep(F a, int n, F other) {
    F r;
    QUIRE_LANES r.v[i] = i < n ? a.v[i] : other.v[i];
    return r;
}
inline float hsum(F a) {
    for (int w = 8; w > 0; w /= 2)
        for (int i = 0; i < w; i++) a.v[i] = a.v[i] + a.v[i + w];
    return a.v[0];
}
inline float hmax(F a) {
    for (int w = 8; w > 0; w /= 2)
        for (int i = 0; i < w; i++) a.v[i] = a.v[i] > a.v[i + w] ? a.v[i] : a.v[i + w];
    return a.v[0];
}

inline I iset(int32_t x) {
    I r;
    QUIRE_LANES r.v[i] = x;
    return r;
}
inline I iload_n(const int32_t* p, int n) {
    I r;
    QUIRE_LANES r.v[i] = i < n ? p[i] : 0;
    return r;
}
inline I iadd(I a, I b) {
    QUIRE_LANES a.v[i] += b.v[i];
    return a;
}
inline I isub(I a, I b) {
    QUIRE_LANES a.v[i] -= b.v[i];
    return a;
}
inline I imul(I a, I b) {
    QUIRE_LANES a.v[i] = (int32_t)((uint32_t)a.v[i] * (uint32_t)b.v[i]);
    return a;
}
template <int N> inline I ishl(I a) {
    QUIRE_LANES a.v[i] = (int32_t)((uint32_t)a.v[i] << N);
    return a;
}
template <int N> inline I ishr(I a) {
    QUIRE_LANES a.v[i] >>= N;
    return a;
}
inline I ito(F a) {  // the nearest; anything out of range (or NaN) becomes 0, and its user is NaN anyway
    I r;
    QUIRE_LANES r.v[i] = a.v[i] > -2147483000.0f && a.v[i] < 2147483000.0f ? (int32_t)__builtin_rintf(a.v[i]) : 0;
    return r;
}
inline F fbits(I a) {
    F r;
    __builtin_memcpy(&r, &a, sizeof r);
    return r;
}
inline F ffrom(I a) {
    F r;
    QUIRE_LANES r.v[i] = (float)a.v[i];
    return r;
}
inline F fpow2(I n) {
    F r;
    QUIRE_LANES {
        uint32_t bits = (uint32_t)(n.v[i] + 127) << 23;
        memcpy(&r.v[i], &bits, 4);
    }
    return r;
}
inline void istore_i8(int8_t* p, I a) { QUIRE_LANES p[i] = (int8_t)a.v[i]; }
inline void code_sums(I a, I b, int32_t* of_a, int32_t* of_b) {
    *of_a = *of_b = 0;
    QUIRE_LANES *of_a += a.v[i], *of_b += b.v[i];
}

inline B bload(const uint8_t* p) {
    B r;
    memcpy(r.v, p, 64);
    return r;
}
inline B band(B a, uint8_t mask) {
    for (int i = 0; i < 64; i++) a.v[i] &= mask;
    return a;
}
inline B bor(B a, B b) {
    for (int i = 0; i < 64; i++) a.v[i] |= b.v[i];
    return a;
}
template <int N> inline B bshr(B a) {
    for (int i = 0; i < 64; i++) a.v[i] = (uint8_t)(a.v[i] >> N);
    return a;
}
template <int N> inline B bshl(B a) {
    for (int i = 0; i < 64; i++) a.v[i] = (uint8_t)(a.v[i] << N);
    return a;
}
inline I dot4(I acc, B codes, const int8_t* x) {
    QUIRE_LANES for (int j = 0; j < 4; j++) acc.v[i] += (int32_t)codes.v[4 * i + j] * x[j];
    return acc;
}
inline void bstore(uint8_t* p, B a) { memcpy(p, a.v, 64); }
inline B bsub(B a, uint8_t x) {
    for (int i = 0; i < 64; i++) a.v[i] = (uint8_t)(a.v[i] - x);
    return a;
}
inline void prefetch(const void*) {}

// Single registers: here, the whole vector.
using V = F;
using W = I;
using C = B;
inline V vload(const float* p) { return fload(p); }
inline void vstore(float* p, V a) { fstore(p, a); }
inline V vset(float x) { return fset(x); }
inline V vadd(V a, V b) { return fadd(a, b); }
inline V vfma(V a, V b, V c) { return ffma(a, b, c); }
inline V vbits(W a) { return fbits(a); }
inline V vmul(V a, V b) { return fmul(a, b); }
inline V vwhole(W a, float by) { return fmul(ffrom(a), fset(by)); }
inline W wset(int32_t x) { return iset(x); }
inline C cload(const uint8_t* p) { return bload(p); }
inline C flip_top(C a) { return bsub(a, 128); }
inline W wadd(W a, W b) { return iadd(a, b); }
inline W wtotal(W high, W low, int32_t less) { return isub(iadd(ishl<8>(high), low), iset(less)); }  // 256 high + low - less

// Attention: 2^n * p, where t = n + 1.5 * 2^23 (n a whole number) and the result is a normal number. A NaN in both stays one.
inline F fscale2(F p, F t) {
    QUIRE_LANES {
        uint32_t a, b;
        memcpy(&a, &p.v[i], 4);
        memcpy(&b, &t.v[i], 4);
        a += b << 23;
        memcpy(&p.v[i], &a, 4);
    }
    return p;
}

// Sampling: eight doubles, and their bits as whole numbers.
struct D8 {
    double v[8];
};
struct U8 {
    uint64_t v[8];
};
#define QUIRE_EIGHT for (int i = 0; i < 8; i++)
inline D8 dset(double x) {
    D8 r;
    QUIRE_EIGHT r.v[i] = x;
    return r;
}
inline D8 dload(const double* p) {
    D8 r;
    QUIRE_EIGHT r.v[i] = p[i];
    return r;
}
inline D8 dwiden(const float* p) {
    D8 r;
    QUIRE_EIGHT r.v[i] = (double)p[i];
    return r;
}
inline void dstore(double* p, D8 a) { QUIRE_EIGHT p[i] = a.v[i]; }
inline D8 dadd(D8 a, D8 b) {
    QUIRE_EIGHT a.v[i] += b.v[i];
    return a;
}
inline D8 dsub(D8 a, D8 b) {
    QUIRE_EIGHT a.v[i] -= b.v[i];
    return a;
}
inline D8 dmul(D8 a, D8 b) {
    QUIRE_EIGHT a.v[i] *= b.v[i];
    return a;
}
inline D8 dmax(D8 a, D8 b) {
    QUIRE_EIGHT a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return a;
}
inline D8 dscale2(D8 p, D8 t) {  // 2^n * p, where t = n + 1.5 * 2^52 and the result is a normal number
    QUIRE_EIGHT {
        uint64_t a, b;
        memcpy(&a, &p.v[i], 8);
        memcpy(&b, &t.v[i], 8);
        a += b << 52;
        memcpy(&p.v[i], &a, 8);
    }
    return p;
}
inline U8 uzero() { return {}; }
inline U8 uadd_bits(U8 sum, D8 a) {
    QUIRE_EIGHT {
        uint64_t bits;
        memcpy(&bits, &a.v[i], 8);
        sum.v[i] += bits;
    }
    return sum;
}
inline uint64_t usum(U8 a) {
    uint64_t sum = 0;
    QUIRE_EIGHT sum += a.v[i];
    return sum;
}
#undef QUIRE_EIGHT

#undef QUIRE_LANES

}  // namespace
