// The 16-lane vocabulary on NEON: four registers per virtual vector. With QUIRE_NEON_DOT the int8 dot is one instruction
// per four rows; without, it is a widening multiply and pairwise adds. Both take signed bytes, which is how codes are stored here
// (see stored_less).
#pragma once

#define QUIRE_NEON 1

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "../weight.h"

namespace {

constexpr int kWidth = 4;                         // lanes of a register
constexpr int kTileColumns = 8;                   // registers of columns that rows pass over together: two blocks (neon_rows.h)
constexpr int kDenseRows = 4, kDenseColumns = 4;  // of the float register tile
constexpr int kMaxQueries = 6, kMaxChains = 5;    // of attention's register tile: queries; queries times vectors, as far as they fit

struct F {
    float32x4_t v[4];
};
struct I {
    int32x4_t v[4];
};
struct B {
    uint8x16_t v[4];
};

#define QUIRE_QUARTERS for (int i = 0; i < 4; i++)
#define QUIRE_EACH(N) _Pragma("GCC unroll 8") for (int i = 0; i < (N); i++)

inline F fset(float x) {
    F r;
    QUIRE_QUARTERS r.v[i] = vdupq_n_f32(x);
    return r;
}
inline F fzero() { return fset(0.0f); }
inline F fload(const float* p) {
    F r;
    QUIRE_QUARTERS r.v[i] = vld1q_f32(p + 4 * i);
    return r;
}
inline F fload_n(const float* p, int n) {
    if (n >= 16) return fload(p);
    float t[16] = {};
    for (int i = 0; i < n; i++) t[i] = p[i];
    return fload(t);
}
inline void fstore(float* p, F a) { QUIRE_QUARTERS vst1q_f32(p + 4 * i, a.v[i]); }
inline void fstore_n(float* p, F a, int n) {
    if (n >= 16) return fstore(p, a);
    float t[16];
    fstore(t, a);
    for (int i = 0; i < n; i++) p[i] = t[i];
}
inline F fload_half(const uint16_t* p) {
    const float16x8_t a = vreinterpretq_f16_u16(vld1q_u16(p)), b = vreinterpretq_f16_u16(vld1q_u16(p + 8));
    return {{vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a), vcvt_f32_f16(vget_low_f16(b)), vcvt_high_f32_f16(b)}};
}
inline F fload_half_n(const uint16_t* p, int n) {
    if (n >= 16) return fload_half(p);
    uint16_t t[16] = {};
    for (int i = 0; i < n; i++) t[i] = p[i];
    return fload_half(t);
}
inline void fstore_half_n(uint16_t* p, F a, int n) {
    uint16_t t[16];
    QUIRE_QUARTERS vst1_u16(t + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
    for (int i = 0; i < (n < 16 ? n : 16); i++) p[i] = t[i];
}
inline F fload_bf16(const uint16_t* p) {
    const uint16x8_t a = vld1q_u16(p), b = vld1q_u16(p + 8);
    const uint32x4_t v[4] = {vshll_n_u16(vget_low_u16(a), 16), vshll_high_n_u16(a, 16), vshll_n_u16(vget_low_u16(b), 16), vshll_high_n_u16(b, 16)};
    F r;
    QUIRE_QUARTERS r.v[i] = vreinterpretq_f32_u32(v[i]);
    return r;
}
inline F widen_bytes(uint8x16_t b) {
    uint16x8_t low = vmovl_u8(vget_low_u8(b)), high = vmovl_u8(vget_high_u8(b));
    return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(low))),
             vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)))}};
}
inline F fload_i8(const int8_t* p) {
    int8x16_t b = vld1q_s8(p);
    int16x8_t low = vmovl_s8(vget_low_s8(b)), high = vmovl_s8(vget_high_s8(b));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
inline F fload_u4(const uint8_t* p, int shift) {
    uint8x16_t b = vshlq_u8(vld1q_u8(p), vdupq_n_s8((int8_t)-shift));
    return widen_bytes(vandq_u8(b, vdupq_n_u8(15)));
}
#define QUIRE_BINARY(name, expression)          \
    inline F name(F a, F b) {                   \
        F r;                                    \
        QUIRE_QUARTERS r.v[i] = (expression);   \
        return r;                               \
    }
QUIRE_BINARY(fadd, vaddq_f32(a.v[i], b.v[i]))
QUIRE_BINARY(fsub, vsubq_f32(a.v[i], b.v[i]))
QUIRE_BINARY(fmul, vmulq_f32(a.v[i], b.v[i]))
QUIRE_BINARY(fdiv, vdivq_f32(a.v[i], b.v[i]))
// Not vmaxq and vminq: those let a NaN through where the other kernel sets return b.
QUIRE_BINARY(fmax, vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]))
QUIRE_BINARY(fmin, vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]))
#undef QUIRE_BINARY
inline F ffma(F a, F b, F c) {
    QUIRE_QUARTERS c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]);
    return c;
}
// One number for all lanes: a load into one of them, because loading it into all of them takes a vector pipe.
struct S {
    float32x4_t v;
};
inline S sload(const float* p) {
    S s;
    asm("ldr %s0, %1" : "=w"(s.v) : "m"(*p));
    return s;
}
inline F ffma(S a, F b, F c) {
    QUIRE_QUARTERS c.v[i] = vfmaq_laneq_f32(c.v[i], b.v[i], a.v, 0);
    return c;
}
template <int LANE> inline F ffma_lane(float32x4_t a, F b, F c) {
    QUIRE_QUARTERS c.v[i] = vfmaq_laneq_f32(c.v[i], b.v[i], a, LANE);
    return c;
}
inline F fabs_(F a) {
    QUIRE_QUARTERS a.v[i] = vabsq_f32(a.v[i]);
    return a;
}
inline F fround(F a) {
    QUIRE_QUARTERS a.v[i] = vrndnq_f32(a.v[i]);
    return a;
}
inline F fkeep(F a, int n, F other) {
    const int32x4_t lane = {0, 1, 2, 3};
    QUIRE_QUARTERS a.v[i] = vbslq_f32(vcltq_s32(lane, vdupq_n_s32(n - 4 * i)), a.v[i], other.v[i]);
    return a;
}
inline float hsum(F a) {
    float32x4_t c = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    float32x2_t d = vadd_f32(vget_low_f32(c), vget_high_f32(c));
    return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}
inline float hmax(F a) {
    auto larger = [](float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); };
    float32x4_t c = larger(larger(a.v[0], a.v[2]), larger(a.v[1], a.v[3]));
    c = larger(c, vextq_f32(c, c, 2));
    return vgetq_lane_f32(larger(c, vdupq_laneq_f32(c, 1)), 0);
}

inline I iset(int32_t x) {
    I r;
    QUIRE_QUARTERS r.v[i] = vdupq_n_s32(x);
    return r;
}
inline I iadd(I a, I b) {
    QUIRE_QUARTERS a.v[i] = vaddq_s32(a.v[i], b.v[i]);
    return a;
}
inline I ito(F a) {
    I r;
    QUIRE_QUARTERS r.v[i] = vcvtnq_s32_f32(a.v[i]);
    return r;
}
inline F ffrom(I a) {
    F r;
    QUIRE_QUARTERS r.v[i] = vcvtq_f32_s32(a.v[i]);
    return r;
}
// Between -127 and 127, rounded: a whole number is what the lower bits of the sum with kPoint are, above kPointBits. An instruction that
// rounds or converts takes its pipe, of which there is one, for two cycles.
constexpr float kPoint = 0x1.8p23f;
constexpr int32_t kPointBits = 0x4b400000;
inline I icodes(F a) {
    I r;
    QUIRE_QUARTERS r.v[i] = vreinterpretq_s32_f32(
        vaddq_f32(vminq_f32(vmaxnmq_f32(a.v[i], vdupq_n_f32(-127.0f)), vdupq_n_f32(127.0f)), vdupq_n_f32(kPoint)));
    return r;
}
// Of four groups of 32: 127 / amax and group_scale, both 0 where amax is too small. The maxima meet in hmax's order.
inline void factors_of_four(const float* x, float* inv, float* scale) {
    auto larger = [](float32x4_t a, float32x4_t b) { return vbslq_f32(vcagtq_f32(a, b), a, b); };  // without their signs
    float32x4_t most[4];
    for (int g = 0; g < 4; g++) {
        F c = fload(x + 32 * g);
        QUIRE_QUARTERS c.v[i] = larger(c.v[i], vld1q_f32(x + 32 * g + 16 + 4 * i));
        most[g] = larger(larger(c.v[0], c.v[2]), larger(c.v[1], c.v[3]));
    }
    auto two = [&](float32x4_t a, float32x4_t b) {
        const float64x2_t p = vreinterpretq_f64_f32(a), q = vreinterpretq_f64_f32(b);
        return larger(vreinterpretq_f32_f64(vzip1q_f64(p, q)), vreinterpretq_f32_f64(vzip2q_f64(p, q)));
    };
    const float32x4_t a = two(most[0], most[1]), b = two(most[2], most[3]);
    const float32x4_t amax = vabsq_f32(larger(vuzp1q_f32(a, b), vuzp2q_f32(a, b)));
    const uint32x4_t tiny = vcltq_f32(amax, vdupq_n_f32(1e-36f));
    auto unless_tiny = [&](float32x4_t v) { return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), tiny)); };
    vst1q_f32(inv, unless_tiny(vdivq_f32(vdupq_n_f32(127.0f), amax)));
    const uint32x4_t bits = vbicq_u32(vreinterpretq_u32_f32(vdivq_f32(amax, vdupq_n_f32(127.0f))), vdupq_n_u32(3));
    const uint32x4_t large = vcgeq_f32(amax, vdupq_n_f32(quire::kScaleLimit));
    vst1q_f32(scale, unless_tiny(vreinterpretq_f32_u32(vbslq_u32(large, vdupq_n_u32(0x7fc00000), bits))));
}
inline F fpow2(I n) {
    F r;
    QUIRE_QUARTERS r.v[i] = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.v[i], vdupq_n_s32(127)), 23));
    return r;
}
inline void istore_i8(int8_t* p, I a) {
    auto narrow = [](int32x4_t x, int32x4_t y) { return vuzp1q_s16(vreinterpretq_s16_s32(x), vreinterpretq_s16_s32(y)); };
    vst1q_s8(p, vuzp1q_s8(vreinterpretq_s8_s16(narrow(a.v[0], a.v[1])), vreinterpretq_s8_s16(narrow(a.v[2], a.v[3]))));
}
inline void code_sums(I a, I b, int32_t* of_a, int32_t* of_b) {  // of icodes
    auto sum = [](const I& x) {
        const int32_t all = vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3])));
        return (int32_t)((uint32_t)all - 16u * (uint32_t)kPointBits);
    };
    *of_a = sum(a);
    *of_b = sum(b);
}

inline B bload(const uint8_t* p) {
    B r;
    QUIRE_QUARTERS r.v[i] = vld1q_u8(p + 16 * i);
    return r;
}
inline B band(B a, uint8_t mask) {
    QUIRE_QUARTERS a.v[i] = vandq_u8(a.v[i], vdupq_n_u8(mask));
    return a;
}
inline B bor(B a, B b) {
    QUIRE_QUARTERS a.v[i] = vorrq_u8(a.v[i], b.v[i]);
    return a;
}
template <int N> inline B bshr(B a) {
    QUIRE_QUARTERS a.v[i] = vshrq_n_u8(a.v[i], N);
    return a;
}
template <int N> inline B bshl(B a) {
    QUIRE_QUARTERS a.v[i] = vshlq_n_u8(a.v[i], N);
    return a;
}
inline void bstore(uint8_t* p, B a) { QUIRE_QUARTERS vst1q_u8(p + 16 * i, a.v[i]); }
inline B bsub(B a, uint8_t x) {
    QUIRE_QUARTERS a.v[i] = vsubq_u8(a.v[i], vdupq_n_u8(x));
    return a;
}
inline void prefetch(const void* p) { asm volatile("prfm pldl1keep, %a0" ::"p"(p)); }

// Single registers. X holds four quads of a row: the dot product takes one by its index.
using V = float32x4_t;
using W = int32x4_t;
using C = int8x16_t;
using X = int8x16_t;
inline V vload(const float* p) { return vld1q_f32(p); }
inline void vstore(float* p, V a) { vst1q_f32(p, a); }
inline V vset(float x) { return vdupq_n_f32(x); }
inline V vfma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
inline V vmul(V a, V b) { return vmulq_f32(a, b); }
inline V vwhole(W a, float by) { return vmulq_n_f32(vcvtq_f32_s32(a), by); }
inline W wset(int32_t x) { return vdupq_n_s32(x); }
inline C cload(const uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
inline X xload(const int8_t* p) { return vld1q_s8(p); }
template <int J> inline W wdot(W acc, C codes, X x) {
#ifdef QUIRE_NEON_DOT
    return vdotq_laneq_s32(acc, codes, x, J);
#else
    const int8x16_t q = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), J));
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(codes), vget_low_s8(q)));
    const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(codes), vget_high_s8(q)));
    return vaddq_s32(acc, vpaddq_s32(low, high));
#endif
}

// The exponentials of rows.h and attention.h, step by step for some registers: alone, each would wait for itself. A sum takes the
// place of its addend, so constants come from memory again and again: a copy from a register takes a vector pipe, a load does
// not. vmaxq and vminq do here what fmax and fmin do, as only x may be a NaN.
inline float32x4_t ask(const float* p) {
    float32x4_t r;
    asm volatile("ldr %q0, %1" : "=w"(r) : "m"(*(const float(*)[4])p));
    return r;
}
#define QUIRE_FOUR(x) {x, x, x, x}
template <int N> inline void exp_of(float32x4_t (&x)[N]) {
    alignas(16) static constexpr float kTerms[7][4] = {QUIRE_FOUR(1.0f / 720), QUIRE_FOUR(1.0f / 120), QUIRE_FOUR(1.0f / 24),
                                                       QUIRE_FOUR(1.0f / 6),   QUIRE_FOUR(0.5f),       QUIRE_FOUR(1.0f),
                                                       QUIRE_FOUR(1.0f)};
    float32x4_t t[N], p[N];
    QUIRE_EACH(N) x[i] = vminq_f32(vdupq_n_f32(89.0f), vmaxq_f32(vdupq_n_f32(-104.0f), x[i]));
    QUIRE_EACH(N) t[i] = vaddq_f32(vmulq_f32(x[i], vdupq_n_f32(1.44269504f)), vdupq_n_f32(kPoint));
    QUIRE_EACH(N) {
        const float32x4_t n = vsubq_f32(t[i], vdupq_n_f32(kPoint));
        x[i] = vfmaq_f32(vfmaq_f32(x[i], n, vdupq_n_f32(-0x1.62e43p-1f)), n, vdupq_n_f32(0x1.05c61p-29f));
    }
    QUIRE_EACH(N) p[i] = vfmaq_f32(ask(kTerms[0]), vdupq_n_f32(1.0f / 5040), x[i]);
    for (int term = 1; term < 7; term++) QUIRE_EACH(N) p[i] = vfmaq_f32(ask(kTerms[term]), p[i], x[i]);
    auto power = [](int32x4_t e) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(e, vdupq_n_s32(127)), 23)); };
    QUIRE_EACH(N) {
        const int32x4_t whole = vsubq_s32(vreinterpretq_s32_f32(t[i]), vdupq_n_s32(kPointBits)), half = vshrq_n_s32(whole, 1);
        x[i] = vmulq_f32(vmulq_f32(p[i], power(half)), power(vsubq_s32(whole, half)));
    }
}
inline F fexp(F x) {
    exp_of(x.v);
    return x;
}
// silu(gate) * up of 32 columns
inline void swiglu_columns(const float* gate, const float* up, float* out) {
    float32x4_t x[8];
    QUIRE_EACH(8) x[i] = vsubq_f32(vdupq_n_f32(0.0f), vld1q_f32(gate + 4 * i));
    exp_of(x);
    QUIRE_EACH(8) x[i] = vmulq_f32(vdivq_f32(vld1q_f32(gate + 4 * i), vaddq_f32(vdupq_n_f32(1.0f), x[i])), vld1q_f32(up + 4 * i));
    QUIRE_EACH(8) vst1q_f32(out + 4 * i, x[i]);
}
inline F fscale2(F p, F t) {  // 2^n * p, where t = n + 1.5 * 2^23
    QUIRE_QUARTERS p.v[i] = vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p.v[i]), vshlq_n_s32(vreinterpretq_s32_f32(t.v[i]), 23)));
    return p;
}
// 2^x, see attention.h. Eight of these go together where there are as many: four wait for their own results. A NaN stays one.
template <int N> inline void exp2_of(float32x4_t (&x)[N]) {
    alignas(16) static constexpr float kTerms[5][4] = {QUIRE_FOUR(0x1.3cea88p-7f), QUIRE_FOUR(0x1.c6b752p-5f), QUIRE_FOUR(0x1.ebf9bcp-3f),
                                                       QUIRE_FOUR(0x1.62e42ap-1f), QUIRE_FOUR(1.0f)};
    const float32x4_t point = vdupq_n_f32(0x1.8p23f);
    float32x4_t t[N], p[N];
    QUIRE_EACH(N) x[i] = vmaxq_f32(vdupq_n_f32(-100.0f), x[i]);
    QUIRE_EACH(N) t[i] = vaddq_f32(x[i], point);
    QUIRE_EACH(N) p[i] = vsubq_f32(t[i], point);
    QUIRE_EACH(N) x[i] = vsubq_f32(x[i], p[i]);
    QUIRE_EACH(N) p[i] = vfmaq_f32(ask(kTerms[0]), vdupq_n_f32(0x1.5bba14p-10f), x[i]);
    for (int term = 1; term < 5; term++) QUIRE_EACH(N) p[i] = vfmaq_f32(ask(kTerms[term]), p[i], x[i]);
    QUIRE_EACH(N) x[i] = vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p[i]), vshlq_n_s32(vreinterpretq_s32_f32(t[i]), 23)));
}
inline F fexp2(F x) {
    exp2_of(x.v);
    return x;
}
inline void fexp2_both(F& a, F& b) {
    float32x4_t x[8];
    QUIRE_QUARTERS x[i] = a.v[i], x[4 + i] = b.v[i];
    exp2_of(x);
    QUIRE_QUARTERS a.v[i] = x[i], b.v[i] = x[4 + i];
}
#undef QUIRE_FOUR

// Sampling: eight doubles, and their bits as whole numbers.
struct D8 {
    float64x2_t v[4];
};
struct U8 {
    uint64x2_t v[4];
};
inline D8 dset(double x) {
    D8 r;
    QUIRE_QUARTERS r.v[i] = vdupq_n_f64(x);
    return r;
}
inline D8 dload(const double* p) {
    D8 r;
    QUIRE_QUARTERS r.v[i] = vld1q_f64(p + 2 * i);
    return r;
}
inline D8 dwiden(const float* p) {
    D8 r;
    QUIRE_QUARTERS r.v[i] = vcvt_f64_f32(vld1_f32(p + 2 * i));
    return r;
}
inline void dstore(double* p, D8 a) { QUIRE_QUARTERS vst1q_f64(p + 2 * i, a.v[i]); }
inline D8 dadd(D8 a, D8 b) {
    QUIRE_QUARTERS a.v[i] = vaddq_f64(a.v[i], b.v[i]);
    return a;
}
inline D8 dsub(D8 a, D8 b) {
    QUIRE_QUARTERS a.v[i] = vsubq_f64(a.v[i], b.v[i]);
    return a;
}
inline D8 dmul(D8 a, D8 b) {
    QUIRE_QUARTERS a.v[i] = vmulq_f64(a.v[i], b.v[i]);
    return a;
}
inline D8 dmax(D8 a, D8 b) {
    QUIRE_QUARTERS a.v[i] = vbslq_f64(vcgtq_f64(a.v[i], b.v[i]), a.v[i], b.v[i]);
    return a;
}
inline D8 dscale2(D8 p, D8 t) {  // 2^n * p, where t = n + 1.5 * 2^52 and the result is a normal number
    QUIRE_QUARTERS p.v[i] = vreinterpretq_f64_s64(
        vaddq_s64(vreinterpretq_s64_f64(p.v[i]), vshlq_n_s64(vreinterpretq_s64_f64(t.v[i]), 52)));
    return p;
}
inline U8 uzero() {
    U8 r;
    QUIRE_QUARTERS r.v[i] = vdupq_n_u64(0);
    return r;
}
inline U8 uadd_bits(U8 sum, D8 a) {
    QUIRE_QUARTERS sum.v[i] = vaddq_u64(sum.v[i], vreinterpretq_u64_f64(a.v[i]));
    return sum;
}
inline uint64_t usum(U8 a) { return vaddvq_u64(vaddq_u64(vaddq_u64(a.v[0], a.v[1]), vaddq_u64(a.v[2], a.v[3]))); }

#undef QUIRE_QUARTERS

}  // namespace
