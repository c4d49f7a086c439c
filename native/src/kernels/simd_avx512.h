// The 16-lane vocabulary on AVX-512 (F, BW, VL, DQ): one register per virtual vector. The int8 dot is VNNI's; with QUIRE_NO_VNNI, products of
// bytes are added in 16 bits (dots.h).
// Every simd_*.h defines the same names with the same results, bit for bit; simd_scalar.h is the specification.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#ifdef QUIRE_EMULATE
#include "emulated.h"
#endif

namespace {

constexpr int kWidth = 16;                        // lanes of a register
constexpr int kTileRows = 4, kTileColumns = 2;    // of the int8 register tile: rows, registers of columns
constexpr int kDenseRows = 8, kDenseColumns = 2;  // of the float register tile
#ifdef QUIRE_NO_VNNI
#define QUIRE_WORD_SUMS 1
#endif
constexpr int kMaxQueries = 6, kMaxChains = 24;  // of attention's register tile: queries; queries times vectors

using F = __m512;
using I = __m512i;
using B = __m512i;

inline __mmask16 first(int n) { return n >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1); }

inline F fzero() { return _mm512_setzero_ps(); }
inline F fset(float x) { return _mm512_set1_ps(x); }
inline F fload(const float* p) { return _mm512_loadu_ps(p); }
inline F fload_n(const float* p, int n) { return n >= 16 ? fload(p) : _mm512_maskz_loadu_ps(first(n), p); }
inline void fstore(float* p, F a) { _mm512_storeu_ps(p, a); }
inline void fstore_n(float* p, F a, int n) {  // what was stored with a mask cannot be loaded before it has left the store buffer
    if (n >= 16) fstore(p, a);
    else _mm512_mask_storeu_ps(p, first(n), a);
}
inline void fstore_halves(float* low, float* high, F a) {
    _mm256_storeu_ps(low, _mm512_castps512_ps256(a));
    _mm256_storeu_ps(high, _mm512_extractf32x8_ps(a, 1));
}
inline F fload_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline F fload_half_n(const uint16_t* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
inline void fstore_half_n(uint16_t* p, F a, int n) {
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline F fload_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline F fload_i8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline F fadd(F a, F b) { return _mm512_add_ps(a, b); }
inline F fsub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F fmul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F fdiv(F a, F b) { return _mm512_div_ps(a, b); }
inline F ffma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F fmax(F a, F b) { return _mm512_max_ps(a, b); }
inline F fmin(F a, F b) { return _mm512_min_ps(a, b); }
inline F fabs_(F a) { return _mm512_abs_ps(a); }
inline F fround(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F fkeep(F a, int n, F other) { return _mm512_mask_blend_ps(first(n), other, a); }
inline float hsum(F a) {
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
inline __m128 four_largest(F a) {
    const __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    return _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
}
inline float hmax(F a) {
    __m128 c = four_largest(a);
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

inline I iset(int32_t x) { return _mm512_set1_epi32(x); }
inline I iload_n(const int32_t* p, int n) { return n >= 16 ? _mm512_loadu_si512((const void*)p) : _mm512_maskz_loadu_epi32(first(n), p); }
inline I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
inline I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
inline I imul(I a, I b) { return _mm512_mullo_epi32(a, b); }
template <int N> inline I ishl(I a) { return _mm512_slli_epi32(a, N); }
template <int N> inline I ishr(I a) { return _mm512_srai_epi32(a, N); }
inline I ito(F a) { return _mm512_cvtps_epi32(a); }
inline F ffrom(I a) { return _mm512_cvtepi32_ps(a); }
inline F fbits(I a) { return _mm512_castsi512_ps(a); }
inline F fpow2(I n) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23)); }
inline __m128i bytes_of(I a) { return _mm512_cvtepi32_epi8(a); }
inline void istore_i8(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, bytes_of(a)); }

// Of 64 numbers times `by`, as whole numbers 256 high + low: both planes, and the sums of 257 high + low (fixed_products.h).
#ifndef QUIRE_NO_VNNI
#define QUIRE_FOUR_FIXED 1
inline void store_four_fixed(uint8_t* highs, uint8_t* lows, const float* x, float by, I& sum) {
    I whole[4], high[4];
    for (int i = 0; i < 4; i++) {
        whole[i] = ito(fmul(fload(x + 16 * i), fset(by)));
        high[i] = ishr<8>(iadd(whole[i], iset(128)));
        sum = iadd(sum, iadd(whole[i], high[i]));
        whole[i] = _mm512_and_si512(whole[i], iset(255));
    }
    const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const I h = _mm512_packs_epi16(_mm512_packs_epi32(high[0], high[1]), _mm512_packs_epi32(high[2], high[3]));
    const I l = _mm512_packus_epi16(_mm512_packs_epi32(whole[0], whole[1]), _mm512_packs_epi32(whole[2], whole[3]));
    _mm512_storeu_si512((void*)highs, _mm512_permutexvar_epi32(order, h));
    _mm512_storeu_si512((void*)lows, _mm512_permutexvar_epi32(order, l));
}
#endif

inline B bload(const uint8_t* p) { return _mm512_loadu_si512((const void*)p); }
inline B band(B a, uint8_t mask) { return _mm512_and_si512(a, _mm512_set1_epi8((char)mask)); }
inline B bor(B a, B b) { return _mm512_or_si512(a, b); }
template <int N> inline B bshr(B a) { return _mm512_srli_epi16(a, N); }  // bits cross bytes: mask afterwards
template <int N> inline B bshl(B a) { return _mm512_slli_epi16(a, N); }
inline I quad_of(const int8_t* x) {
    int32_t quad;
    __builtin_memcpy(&quad, x, 4);
    return _mm512_set1_epi32(quad);
}
#if !defined(QUIRE_NO_VNNI) && defined(QUIRE_EMULATE)
inline I dot4(I acc, B codes, const int8_t* x) { return emulated_dot(acc, codes, quad_of(x)); }
#elif !defined(QUIRE_NO_VNNI)
inline I dot4(I acc, B codes, const int8_t* x) { return _mm512_dpbusd_epi32(acc, codes, quad_of(x)); }
#else
inline I in_order(I a) {  // a compiler that makes a tree of many sums has no registers for it
    asm("" : "+v"(a));
    return a;
}
inline I pairs(B codes, const int8_t* x) { return _mm512_maddubs_epi16(codes, quad_of(x)); }
inline I add_words(I a, I b) { return in_order(_mm512_add_epi16(a, b)); }
inline I add_products(I sum, I words, I x) { return in_order(_mm512_add_epi32(sum, _mm512_madd_epi16(words, x))); }
inline I add_pairs(I sum, I words) { return add_products(sum, words, _mm512_set1_epi16(1)); }
inline I dot4_signed(I acc, B codes, const int8_t* x) {
    const I quad = quad_of(x), with_sign = _mm512_mask_sub_epi8(quad, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), quad);
    return add_pairs(acc, _mm512_maddubs_epi16(_mm512_abs_epi8(codes), with_sign));
}
#endif
inline F fload_u4(const uint8_t* p, int shift) {
    __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(b, (unsigned)shift), _mm512_set1_epi32(15)));
}
inline void bstore(uint8_t* p, B a) { _mm512_storeu_si512((void*)p, a); }
inline B bsub(B a, uint8_t x) { return _mm512_sub_epi8(a, _mm512_set1_epi8((char)x)); }

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
inline C flip_top(C a) { return _mm512_xor_si512(a, _mm512_set1_epi8((char)128)); }
inline W wtotal(W high, W low, int32_t less) { return isub(iadd(ishl<8>(high), low), iset(less)); }  // 256 high + low - less
inline W wadd(W a, W b) { return iadd(a, b); }
#ifdef QUIRE_WORD_SUMS  // words of two bytes each (fourteen.h)
inline W words_up(C a) { return _mm512_slli_epi16(a, 8); }
inline W sum_words(W a, W b) { return _mm512_add_epi16(a, b); }
// Four quads of high ones and low ones, each [even high][odd high][even low][odd low] as words (fixed_products.h).
inline void store_quads_of_words(uint8_t* to, I high, I low) {
    _mm512_storeu_si512((void*)to, _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(_mm512_packs_epi32(high, low), (_MM_PERM_ENUM)0xd8), 0xd8));
}
// Of bytes that hold a code in their upper six bits: that, four times over; and what three of them hold together in their lower two.
inline C top_six(C a) { return _mm512_and_si512(a, _mm512_set1_epi8((char)0xfc)); }
inline C last_twos(C a, C b, C c) {
    const C two = _mm512_set1_epi8(3);
    const C upper = _mm512_or_si512(_mm512_slli_epi16(_mm512_and_si512(a, two), 4), _mm512_slli_epi16(_mm512_and_si512(b, two), 2));
    return _mm512_slli_epi16(_mm512_or_si512(upper, _mm512_and_si512(c, two)), 2);
}
inline W words_first(C low, C high) { return _mm512_unpacklo_epi8(low, high); }
inline W words_second(C low, C high) { return _mm512_unpackhi_epi8(low, high); }
inline W upper_bytes(W words) { return _mm512_srai_epi16(words, 8); }
inline void store_words(int16_t* to, const int8_t* x) {  // 32 of them
    _mm512_store_si512((void*)to, _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)x)));
}
inline W four_words(const int16_t* x) {
    int64_t four;
    __builtin_memcpy(&four, x, 8);
    return _mm512_set1_epi64(four);
}
inline W sums_of_two(W a, W b) {
    const __m512 x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
    return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)), _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd)));
}
inline I together(const W (&slices)[1]) { return slices[0]; }
#endif
// Assembly: gcc takes a function that only prefetches for one without effect, and drops its calls.
inline void prefetch(const void* p) { asm volatile("prefetcht0 %0" ::"m"(*(const char*)p)); }

// Attention: 2^n * p, where t = n + 1.5 * 2^23 (n a whole number) and the result is a normal number. A NaN in both stays one.
inline F fscale2(F p, F t) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
}

// Sampling: eight doubles, and their bits as whole numbers.
using D8 = __m512d;
using U8 = __m512i;
inline D8 dset(double x) { return _mm512_set1_pd(x); }
inline D8 dload(const double* p) { return _mm512_loadu_pd(p); }
inline D8 dwiden(const float* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
inline void dstore(double* p, D8 a) { _mm512_storeu_pd(p, a); }
inline D8 dadd(D8 a, D8 b) { return _mm512_add_pd(a, b); }
inline D8 dsub(D8 a, D8 b) { return _mm512_sub_pd(a, b); }
inline D8 dmul(D8 a, D8 b) { return _mm512_mul_pd(a, b); }
inline D8 dmax(D8 a, D8 b) { return _mm512_max_pd(a, b); }
inline D8 dscale2(D8 p, D8 t) {  // 2^n * p, where t = n + 1.5 * 2^52 and the result is a normal number
    return _mm512_castsi512_pd(_mm512_add_epi64(_mm512_castpd_si512(p), _mm512_slli_epi64(_mm512_castpd_si512(t), 52)));
}
inline U8 uzero() { return _mm512_setzero_si512(); }
inline U8 uadd_bits(U8 sum, D8 a) { return _mm512_add_epi64(sum, _mm512_castpd_si512(a)); }
inline uint64_t usum(U8 a) { return (uint64_t)_mm512_reduce_add_epi64(a); }

}  // namespace

#include "x86_factors.h"
