// The 16-lane vocabulary on NEON: four registers per virtual vector. With QUIRE_NEON_DOT the int8 dot is one instruction
// per four rows; without, it is a widening multiply and pairwise adds. Both take signed bytes, which is how codes are stored here
// (see stored_less).
#pragma once

#define QUIRE_NEON 1

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

namespace {

constexpr int kWidth = 4;                         // lanes of a register
constexpr int kTileRows = 8, kTileColumns = 8;    // of an int8 tile: rows in registers; registers of columns, one after the other
constexpr int kDenseRows = 4, kDenseColumns = 4;  // of the float register tile
constexpr bool kTwoDots = false;                  // 8-bit codes need a dot of their own
constexpr int kMaxQueries = 6, kMaxChains = 5;  // of attention's register tile: queries; queries times vectors, as far as they fit

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
    F r;
    QUIRE_QUARTERS r.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
    return r;
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
    F r;
    QUIRE_QUARTERS r.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
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
    float t[4];
    vst1q_f32(t, c);
    float x = t[0] > t[2] ? t[0] : t[2], y = t[1] > t[3] ? t[1] : t[3];
    return x > y ? x : y;
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
inline I isub(I a, I b) {
    QUIRE_QUARTERS a.v[i] = vsubq_s32(a.v[i], b.v[i]);
    return a;
}
inline I ihalve(I a) {
    QUIRE_QUARTERS a.v[i] = vshrq_n_s32(a.v[i], 1);
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
inline F fpow2(I n) {
    F r;
    QUIRE_QUARTERS r.v[i] = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.v[i], vdupq_n_s32(127)), 23));
    return r;
}
inline void istore_i8(int8_t* p, I a) {
    int16x8_t low = vcombine_s16(vmovn_s32(a.v[0]), vmovn_s32(a.v[1]));
    int16x8_t high = vcombine_s16(vmovn_s32(a.v[2]), vmovn_s32(a.v[3]));
    vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
inline int32_t isum(I a) { return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3]))); }

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
inline V vmul(V a, V b) { return vmulq_f32(a, b); }
inline V vfma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
inline V vfrom(W a) { return vcvtq_f32_s32(a); }
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
template <int J> inline W wdot8(W acc, C codes, X x) { return wdot<J>(acc, codes, x); }

// Attention: 2^n * p, where t = n + 1.5 * 2^23 (n a whole number) and the result is a normal number. A NaN in both stays one.
inline F fscale2(F p, F t) {
    QUIRE_QUARTERS p.v[i] = vreinterpretq_f32_s32(
        vaddq_s32(vreinterpretq_s32_f32(p.v[i]), vshlq_n_s32(vreinterpretq_s32_f32(t.v[i]), 23)));
    return p;
}

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
