// How packed codes become the signed bytes of a dot product on NEON.
#pragma once

#define QUIRE_INLINE inline __attribute__((always_inline))

namespace {

// Codes without a bias that are stored signed reach the dot in the upper bits of their bytes: to move them down would be one more
// operation for each register. Their sums are as many times too large.
template <int BITS, bool BIAS> constexpr int kTimes = stored_less(BITS, BIAS) ? 1 << (8 - BITS) : 1;

// A sum starts from the bits of 1.5 * 2^23 / times, so that it ends as the bits of that number plus the sum, and taking the number away
// is the conversion to float32: exact below 2^22, and a group's sum is at most 32 * 127 * 255.
constexpr int32_t sum_bits(int times) { return times == 16 ? 0x49400000 : times == 4 ? 0x4a400000 : 0x4b400000; }

// The eight quads of four rows of a tile (which begins at p, less the rows before them), as signed bytes: kTimes what they are.
template <int BITS, bool BIAS> QUIRE_INLINE void slice_codes(const uint8_t* p, C (&c)[8]) {
    auto load = [p](int at) __attribute__((always_inline)) { return vld1q_u8(p + at); };
    auto mask = [](uint8x16_t a, uint8_t m) __attribute__((always_inline)) { return vandq_u8(a, vdupq_n_u8(m)); };
    auto put = [&](int q, uint8x16_t a) __attribute__((always_inline)) { c[q] = vreinterpretq_s8_u8(a); };
    if constexpr (BITS == 8) {
        QUIRE_UNROLL
        for (int q = 0; q < 8; q++) put(q, load(64 * q));
    }
    if constexpr (BITS == 4) {
        QUIRE_UNROLL
        for (int j = 0; j < 4; j++) {
            const uint8x16_t v = load(64 * j);
            put(j, BIAS ? mask(v, 15) : vshlq_n_u8(v, 4));
            put(j + 4, BIAS ? vshrq_n_u8(v, 4) : mask(v, 0xf0));
        }
    }
    if constexpr (BITS == 6) {
        QUIRE_UNROLL
        for (int h = 0; h < 2; h++) {
            const uint8x16_t v[3] = {load(192 * h), load(192 * h + 64), load(192 * h + 128)};
            for (int j = 0; j < 3; j++) put(4 * h + j, BIAS ? vshrq_n_u8(v[j], 2) : mask(v[j], 0xfc));
            const uint8x16_t low = vsliq_n_u8(v[2], v[1], 2);
            put(4 * h + 3, BIAS ? mask(vsliq_n_u8(low, v[0], 4), 63) : vsliq_n_u8(vshlq_n_u8(low, 2), v[0], 6));
        }
    }
    if constexpr (BITS == 2 || BITS == 3) {
        const uint8x16_t one = BITS == 3 ? load(128) : vdupq_n_u8(0);
        QUIRE_UNROLL
        for (int q = 0; q < 8; q++) {
            const uint8x16_t two = mask(vshlq_u8(load(64 * (q / 4)), vdupq_n_s8((int8_t)(-2 * (q % 4)))), 3);
            put(q, BITS == 2 ? two : vorrq_u8(two, mask(vshlq_u8(one, vdupq_n_s8((int8_t)(2 - q))), 4)));
        }
    }
    if constexpr (BITS == 5) {
        const uint8x16_t one = load(256);
        QUIRE_UNROLL
        for (int q = 0; q < 8; q++) {
            const uint8x16_t v = load(64 * (q % 4)), four = q < 4 ? mask(v, 15) : vshrq_n_u8(v, 4);
            put(q, vorrq_u8(four, mask(vshlq_u8(one, vdupq_n_s8((int8_t)(4 - q))), 16)));
        }
    }
}

// The same less `base`, where they are not stored so.
template <int BITS, bool BIAS> QUIRE_INLINE void slice_signed(const uint8_t* p, int base, C (&c)[8]) {
    slice_codes<BITS, BIAS>(p, c);
    if constexpr (!BIAS && !stored_less(BITS, BIAS))
        QUIRE_UNROLL
        for (int q = 0; q < 8; q++) c[q] = vsubq_s8(c[q], vdupq_n_s8((int8_t)base));
}

// What slice_signed takes off, or what is off already.
template <int BITS, bool BIAS> QUIRE_INLINE int dot_base(const Matrix& w) {
    return stored_less(BITS, BIAS) ? stored_less(BITS, BIAS) : BIAS ? 0 : w.offset;
}

// A tile, a slice after the other.
template <int BITS, bool BIAS> QUIRE_INLINE void unpack_slices(const uint8_t* tile, int base, uint8_t* to) {
    for (int n = 0; n < 4; n++) {
        C c[8];
        slice_signed<BITS, BIAS>(tile + 16 * n, base, c);
        QUIRE_UNROLL
        for (int q = 0; q < 8; q++) vst1q_s8((int8_t*)to + 128 * n + 16 * q, c[q]);
    }
}

}  // namespace
