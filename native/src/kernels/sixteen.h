// Weights of 16 bits, in general; NEON has its own. Codes are read where they are: nothing is to be unpacked.
#pragma once

#include "gemm.h"

namespace {

#ifndef QUIRE_WORD_DOTS
constexpr int kSixteenRows = kWidth == 16 && kDenseRows >= 8 ? 8 : 2;  // whose sums fit the registers

// What a tile makes of R lanes: 256 * sum(upper * q) + sum(upper * r + lower * q). `total` and `rest` are the sums of q and of r: bytes of
// weights are 128 more than they should be.
template <int R>
inline void sixteen_sums(const uint8_t* tile, const int8_t* high, const int8_t* low, const uint32_t (&total)[R], const uint32_t (&rest)[R], I (&d)[R]) {
    QUIRE_UNROLL
    for (int r = 0; r < R; r++) d[r] = iset((int32_t)(0u - 128u * total[r]));
    each_quad<8, false>(tile, [&](int q, B codes) __attribute__((always_inline)) {
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) d[r] = dot4_8(d[r], codes, high + 32 * r + 4 * q);
    });
    QUIRE_UNROLL
    for (int r = 0; r < R; r++) d[r] = iadd(ishl<8>(d[r]), iset((int32_t)(0u - 128u * (total[r] + rest[r]))));
    each_quad<8, false>(tile, [&](int q, B codes) __attribute__((always_inline)) {
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) d[r] = dot4_8(d[r], codes, low + 32 * r + 4 * q);
    });
    each_quad<8, false>(tile + 512, [&](int q, B codes) __attribute__((always_inline)) {
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) d[r] = dot4_8(d[r], codes, high + 32 * r + 4 * q);
    });
}
#else
constexpr int kSixteenRows = 4;

// The same with whole codes: as words they are 128 more than they should be, and their upper bytes are what they should be.
struct Words {
    __m256i even, odd;  // of four columns

    Words(__m256i upper, __m256i lower) {
        const __m256i low = _mm256_set1_epi16(255), flip = _mm256_set1_epi16((int16_t)0x8000);
        even = _mm256_xor_si256(_mm256_or_si256(_mm256_slli_epi16(upper, 8), _mm256_and_si256(lower, low)), flip);
        odd = _mm256_xor_si256(_mm256_or_si256(_mm256_andnot_si256(low, upper), _mm256_srli_epi16(lower, 8)), flip);
    }
    explicit Words(const int8_t* x) {
        const __m256i quad = quad_of(x);
        even = _mm256_srai_epi16(_mm256_slli_epi16(quad, 8), 8), odd = _mm256_srai_epi16(quad, 8);
    }
    Words upper() const {
        Words w = *this;
        w.even = _mm256_srai_epi16(even, 8), w.odd = _mm256_srai_epi16(odd, 8);
        return w;
    }
    __m256i dot(__m256i acc, const Words& x) const {
        return _mm256_add_epi32(_mm256_add_epi32(acc, _mm256_madd_epi16(even, x.even)), _mm256_madd_epi16(odd, x.odd));
    }
};

template <int R>
inline void sixteen_sums(const uint8_t* tile, const int8_t* high, const int8_t* low, const uint32_t (&total)[R], const uint32_t (&)[R], I (&d)[R]) {
    QUIRE_UNROLL
    for (int r = 0; r < R; r++) d[r] = iset((int32_t)(0u - 128u * total[r]));
    for (int q = 0; q < 8; q++) {
        const B upper = bload(tile + 64 * q), lower = bload(tile + 512 + 64 * q);
        const Words a(upper.a, lower.a), b(upper.b, lower.b), up = a.upper(), other = b.upper();
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) {
            const Words x(high + 32 * r + 4 * q), rest(low + 32 * r + 4 * q);
            d[r] = {up.dot(a.dot(d[r].a, x), rest), other.dot(b.dot(d[r].b, x), rest)};
        }
    }
}
#endif

// `tiles` tiles of block b from t0 on against R lanes of a panel.
template <int R>
inline void sixteen_tiles(const Matrix& w, int b, int t0, int tiles, const uint8_t* panel, const QuantShape& s, int lane, F (&acc)[R]) {
    const uint8_t* block = w.block(b);
    const size_t ahead = w.block_bytes < 8192 ? w.block_bytes : 8192;
    for (int t = t0; t < t0 + tiles; t++) {
        const uint8_t* tile = block + (size_t)t * w.code_bytes;
        for (int i = 0; lane == 0 && i < 16; i++) prefetch(tile + ahead + 64 * i);
        const int8_t* high = (const int8_t*)panel + 512 * (size_t)t + 32 * lane;
        const float* sx = (const float*)(panel + s.sx) + 16 * (size_t)t + lane;
        const uint32_t *sum = (const uint32_t*)(panel + s.sum) + 32 * (size_t)t + lane, *low_sum = (const uint32_t*)(panel + s.low_sum) + 16 * (size_t)t + lane;
        uint32_t total[R], rest[R];  // of lanes that are no rows they may be anything
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) total[r] = sum[r] + sum[16 + r], rest[r] = low_sum[r];
        I d[R];
        sixteen_sums<R>(tile, high, high + s.low, total, rest, d);
        const F sw = scale_of(w, block, t, 0), least = fset(0x1p-8f);
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) acc[r] = ffma(sw, fmul(fset(sx[r]), fmul(ffrom(d[r]), least)), acc[r]);
    }
}

void sixteen_rows(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, int m, const Epilogue& e) {
    alignas(64) float sums[kMaxTall][16];
    const int most = m <= kSixteenRows ? w.tiles : kChunk;  // one pass; or what stays in the first cache while rows pass over it
    for (int b = b0; b < b1; b++)
        for (int t0 = 0; t0 < w.tiles; t0 += most) {
            const int tiles = w.tiles - t0 < most ? w.tiles - t0 : most;
            auto some = [&](int first, auto rows) {
                constexpr int R = decltype(rows)::value;
                F acc[R];
                for (int r = 0; r < R; r++) acc[r] = t0 ? fload(sums[first + r]) : fzero();
                sixteen_tiles<R>(w, b, t0, tiles, x + (size_t)(first / 16) * s.bytes, s, first % 16, acc);
                for (int r = 0; r < R; r++) {
                    if (t0 + tiles < w.tiles) fstore(sums[first + r], acc[r]);
                    else if (first + r < m) finish(e, first + r, 16 * (b - b0), acc[r]);
                }
            };
            int first = 0;
            for (; m - first > kSixteenRows / 2; first += kSixteenRows) some(first, std::integral_constant<int, kSixteenRows>{});
            if constexpr (kSixteenRows > 4)
                if (m - first > 2) some(first, std::integral_constant<int, 4>{}), first += 4;
            if constexpr (kSixteenRows > 2)
                if (m - first > 1) some(first, std::integral_constant<int, 2>{}), first += 2;
            if (first < m) some(first, std::integral_constant<int, 1>{});
        }
}

}  // namespace
