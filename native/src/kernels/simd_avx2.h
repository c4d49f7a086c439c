// The 16-lane vocabulary on AVX2 with FMA and F16C: two registers per virtual vector. With QUIRE_AVX_VNNI the int8 dot is
// one instruction; without, products of bytes are added in 16 bits (dots.h).
#pragma once

#include <immintrin.h>
#include <stdint.h>

#ifdef QUIRE_EMULATE
#include "emulated.h"
#endif

namespace {

constexpr int kWidth = 8;                         // lanes of a register
constexpr int kDenseRows = 4, kDenseColumns = 2;  // of the float register tile
// Of the int8 register tile: rows, registers of columns.
#ifdef QUIRE_AVX_VNNI
constexpr int kTileRows = 4, kTileColumns = 1;
#else
#define QUIRE_WORD_SUMS 1
constexpr int kTileRows = 2, kTileColumns = 2;
#endif
constexpr int kMaxQueries = 6, kMaxChains = 6;  // of attention's register tile: queries; queries times vectors

struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};
using B = I;

inline __m256i lanes(int n, int from) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n - from), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline F fset(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F fzero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F fload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F fload_n(const float* p, int n) {
    if (n >= 16) return fload(p);
    return {_mm256_maskload_ps(p, lanes(n, 0)), n > 8 ? _mm256_maskload_ps(p + 8, lanes(n, 8)) : _mm256_setzero_ps()};
}
inline void fstore(float* p, F v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
inline void fstore_n(float* p, F v, int n) {
    if (n >= 16) return fstore(p, v);
    _mm256_maskstore_ps(p, lanes(n, 0), v.a);
    if (n > 8) _mm256_maskstore_ps(p + 8, lanes(n, 8), v.b);
}
inline void fstore_halves(float* low, float* high, F v) {
    _mm256_storeu_ps(low, v.a);
    _mm256_storeu_ps(high, v.b);
}
inline F fload_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline F fload_half_n(const uint16_t* p, int n) {
    if (n >= 16) return fload_half(p);
    uint16_t t[16] = {};
    for (int i = 0; i < n; i++) t[i] = p[i];
    return fload_half(t);
}
inline void fstore_half_n(uint16_t* p, F v, int n) {
    __m128i a = _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT), b = _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT);
    if (n >= 16) {
        _mm_storeu_si128((__m128i*)p, a);
        _mm_storeu_si128((__m128i*)(p + 8), b);
        return;
    }
    uint16_t t[16];
    _mm_storeu_si128((__m128i*)t, a);
    _mm_storeu_si128((__m128i*)(t + 8), b);
    for (int i = 0; i < n; i++) p[i] = t[i];
}
inline __m256 widen_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline F fload_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
inline F fload_i8(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
inline __m256 nibble(const uint8_t* p, int shift) {
    __m256i v = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(v, shift), _mm256_set1_epi32(15)));
}
inline F fload_u4(const uint8_t* p, int shift) { return {nibble(p, shift), nibble(p + 8, shift)}; }
inline F fadd(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F fsub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F fmul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F fdiv(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fmax(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F fmin(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F ffma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F fabs_(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F fround(F x) {
    return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline F fkeep(F x, int n, F other) {
    return {_mm256_blendv_ps(other.a, x.a, _mm256_castsi256_ps(lanes(n, 0))),
            _mm256_blendv_ps(other.b, x.b, _mm256_castsi256_ps(lanes(n, 8)))};
}
inline float hsum(F x) {
    __m256 b = _mm256_add_ps(x.a, x.b);
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
inline __m128 four_largest(F x) {
    const __m256 b = _mm256_max_ps(x.a, x.b);
    return _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
}
inline float hmax(F x) {
    __m128 c = four_largest(x);
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

inline I iset(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I iload_n(const int32_t* p, int n) {
    if (n >= 16) return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
    return {_mm256_maskload_epi32(p, lanes(n, 0)), n > 8 ? _mm256_maskload_epi32(p + 8, lanes(n, 8)) : _mm256_setzero_si256()};
}
inline I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I isub(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline I imul(I x, I y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
template <int N> inline I ishl(I x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N> inline I ishr(I x) { return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)}; }
inline I ito(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F fbits(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline F ffrom(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline F fpow2(I n) {
    const __m256i bias = _mm256_set1_epi32(127);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.a, bias), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.b, bias), 23))};
}
inline __m128i bytes_of(I x) {  // values fit: the saturation never acts
    const __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    return _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
}
inline void istore_i8(int8_t* p, I x) { _mm_storeu_si128((__m128i*)p, bytes_of(x)); }

inline B bload(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
inline B band(B x, uint8_t mask) {
    const __m256i m = _mm256_set1_epi8((char)mask);
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
inline B bor(B x, B y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
template <int N> inline B bshr(B x) { return {_mm256_srli_epi16(x.a, N), _mm256_srli_epi16(x.b, N)}; }
template <int N> inline B bshl(B x) { return {_mm256_slli_epi16(x.a, N), _mm256_slli_epi16(x.b, N)}; }
inline __m256i quad_of(const int8_t* x) {
    int32_t quad;
    __builtin_memcpy(&quad, x, 4);
    return _mm256_set1_epi32(quad);
}
#ifdef QUIRE_AVX_VNNI
#ifdef QUIRE_EMULATE
inline __m256i dot4(__m256i acc, __m256i codes, const int8_t* x) { return emulated_dot(acc, codes, quad_of(x)); }
#else
inline __m256i dot4(__m256i acc, __m256i codes, const int8_t* x) { return _mm256_dpbusd_avx_epi32(acc, codes, quad_of(x)); }
#endif
inline I dot4(I acc, B codes, const int8_t* x) { return {dot4(acc.a, codes.a, x), dot4(acc.b, codes.b, x)}; }
#else
inline __m256i in_order(__m256i a) {  // a compiler that makes a tree of many sums has no registers for it
    asm("" : "+x"(a));
    return a;
}
inline __m256i pairs(__m256i codes, const int8_t* x) { return _mm256_maddubs_epi16(codes, quad_of(x)); }
inline __m256i add_words(__m256i a, __m256i b) { return in_order(_mm256_add_epi16(a, b)); }
inline __m256i add_products(__m256i sum, __m256i words, __m256i x) { return in_order(_mm256_add_epi32(sum, _mm256_madd_epi16(words, x))); }
inline __m256i add_pairs(__m256i sum, __m256i words) { return add_products(sum, words, _mm256_set1_epi16(1)); }
inline __m256i dot4_signed(__m256i acc, __m256i codes, const int8_t* x) {
    return add_pairs(acc, _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(quad_of(x), codes)));
}
inline I pairs(B codes, const int8_t* x) { return {pairs(codes.a, x), pairs(codes.b, x)}; }
inline I add_words(I x, I y) { return {add_words(x.a, y.a), add_words(x.b, y.b)}; }
inline I add_pairs(I sum, I words) { return {add_pairs(sum.a, words.a), add_pairs(sum.b, words.b)}; }
inline I dot4_signed(I acc, B codes, const int8_t* x) { return {dot4_signed(acc.a, codes.a, x), dot4_signed(acc.b, codes.b, x)}; }
#endif
inline void bstore(uint8_t* p, B x) {
    _mm256_storeu_si256((__m256i*)p, x.a);
    _mm256_storeu_si256((__m256i*)(p + 32), x.b);
}
inline B bsub(B x, uint8_t y) {
    const __m256i v = _mm256_set1_epi8((char)y);
    return {_mm256_sub_epi8(x.a, v), _mm256_sub_epi8(x.b, v)};
}

// Single registers.
using V = __m256;
using W = __m256i;
using C = __m256i;
inline V vload(const float* p) { return _mm256_loadu_ps(p); }
inline void vstore(float* p, V a) { _mm256_storeu_ps(p, a); }
inline V vset(float x) { return _mm256_set1_ps(x); }
inline V vadd(V a, V b) { return _mm256_add_ps(a, b); }
inline V vfma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V vbits(W a) { return _mm256_castsi256_ps(a); }
inline V vmul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V vwhole(W a, float by) { return _mm256_mul_ps(_mm256_cvtepi32_ps(a), _mm256_set1_ps(by)); }
inline W wset(int32_t x) { return _mm256_set1_epi32(x); }
inline C cload(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline C flip_top(C a) { return _mm256_xor_si256(a, _mm256_set1_epi8((char)128)); }
inline W wadd(W a, W b) { return _mm256_add_epi32(a, b); }
inline W wtotal(W high, W low, int32_t less) {  // 256 high + low - less
    return _mm256_sub_epi32(wadd(_mm256_slli_epi32(high, 8), low), wset(less));
}
#ifdef QUIRE_WORD_SUMS  // words of two bytes each (fourteen.h)
inline W words_up(C a) { return _mm256_slli_epi16(a, 8); }
inline W sum_words(W a, W b) { return _mm256_add_epi16(a, b); }
// Four quads of high ones and low ones, each [even high][odd high][even low][odd low] as words (fixed_products.h).
inline __m256i quads_of_words(__m256i high, __m256i low) {
    return _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(_mm256_packs_epi32(high, low), 0xd8), 0xd8);
}
inline void store_quads_of_words(uint8_t* to, I high, I low) {
    _mm256_storeu_si256((__m256i*)to, quads_of_words(high.a, low.a));
    _mm256_storeu_si256((__m256i*)(to + 32), quads_of_words(high.b, low.b));
}
// Of bytes that hold a code in their upper six bits: that, four times over; and what three of them hold together in their lower two.
inline C top_six(C a) { return _mm256_and_si256(a, _mm256_set1_epi8((char)0xfc)); }
inline C last_twos(C a, C b, C c) {
    const C two = _mm256_set1_epi8(3);
    const C upper = _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(a, two), 4), _mm256_slli_epi16(_mm256_and_si256(b, two), 2));
    return _mm256_slli_epi16(_mm256_or_si256(upper, _mm256_and_si256(c, two)), 2);
}
inline W words_first(C low, C high) { return _mm256_unpacklo_epi8(low, high); }
inline W words_second(C low, C high) { return _mm256_unpackhi_epi8(low, high); }
inline W upper_bytes(W words) { return _mm256_srai_epi16(words, 8); }
inline void store_words(int16_t* to, const int8_t* x) {  // 32 of them
    _mm256_store_si256((__m256i*)to, _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)x)));
    _mm256_store_si256((__m256i*)to + 1, _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(x + 16))));
}
inline W four_words(const int16_t* x) {
    int64_t four;
    __builtin_memcpy(&four, x, 8);
    return _mm256_set1_epi64x(four);
}
inline W sums_of_two(W a, W b) { return _mm256_hadd_epi32(a, b); }
inline I together(const W (&slices)[2]) { return {slices[0], slices[1]}; }
#endif
// Assembly: gcc takes a function that only prefetches for one without effect, and drops its calls.
inline void prefetch(const void* p) { asm volatile("prefetcht0 %0" ::"m"(*(const char*)p)); }

// Attention: 2^n * p, where t = n + 1.5 * 2^23 (n a whole number) and the result is a normal number. A NaN in both stays one.
inline __m256 scale2(__m256 p, __m256 t) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}
inline F fscale2(F p, F t) { return {scale2(p.a, t.a), scale2(p.b, t.b)}; }

// Sampling: eight doubles, and their bits as whole numbers.
struct D8 {
    __m256d a, b;
};
using U8 = I;
inline D8 dset(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
inline D8 dload(const double* p) { return {_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4)}; }
inline D8 dwiden(const float* p) { return {_mm256_cvtps_pd(_mm_loadu_ps(p)), _mm256_cvtps_pd(_mm_loadu_ps(p + 4))}; }
inline void dstore(double* p, D8 x) {
    _mm256_storeu_pd(p, x.a);
    _mm256_storeu_pd(p + 4, x.b);
}
inline D8 dadd(D8 x, D8 y) { return {_mm256_add_pd(x.a, y.a), _mm256_add_pd(x.b, y.b)}; }
inline D8 dsub(D8 x, D8 y) { return {_mm256_sub_pd(x.a, y.a), _mm256_sub_pd(x.b, y.b)}; }
inline D8 dmul(D8 x, D8 y) { return {_mm256_mul_pd(x.a, y.a), _mm256_mul_pd(x.b, y.b)}; }
inline D8 dmax(D8 x, D8 y) { return {_mm256_max_pd(x.a, y.a), _mm256_max_pd(x.b, y.b)}; }
inline __m256d scale2_wide(__m256d p, __m256d t) {
    return _mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(p), _mm256_slli_epi64(_mm256_castpd_si256(t), 52)));
}
inline D8 dscale2(D8 p, D8 t) { return {scale2_wide(p.a, t.a), scale2_wide(p.b, t.b)}; }  // 2^n * p, where t = n + 1.5 * 2^52
inline U8 uzero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline U8 uadd_bits(U8 sum, D8 x) {
    return {_mm256_add_epi64(sum.a, _mm256_castpd_si256(x.a)), _mm256_add_epi64(sum.b, _mm256_castpd_si256(x.b))};
}
inline uint64_t usum(U8 x) {
    uint64_t t[4];
    _mm256_storeu_si256((__m256i*)t, _mm256_add_epi64(x.a, x.b));
    return t[0] + t[1] + t[2] + t[3];
}

}  // namespace

#include "x86_factors.h"
