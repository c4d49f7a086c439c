// How packed codes become the signed bytes of a dot product on NEON.
#pragma once

namespace {

// What codes of rows 0 to 7 of a block (half 0) and of its others are when they reach a dot product: `times` what they should be, because
// those in the upper bits of their bytes stay there (to move them down would be one more operation for each register), and `less` so much.
template <int BITS, bool BIAS> struct Coded {
    static constexpr int kHalves = BITS == 4 ? 2 : 1;  // that differ
    static constexpr int times(int half) { return BITS == 4 ? (half ? 16 : 1) : BITS == 6 && !BIAS ? 4 : 1; }
    static constexpr int less(int half, int offset) {
        if (BITS == 4) return half ? 8 : 0;
        return stored_less(BITS, BIAS) ? stored_less(BITS, BIAS) : BIAS ? 0 : offset;
    }
    // What a sum is to have more for each 1 in the sum of x.
    static constexpr int shift(int half, int offset) { return times(half) * (less(half, offset) - offset); }
    static constexpr int half(int slice) { return BITS == 4 ? slice / 2 : 0; }
};

// A sum starts from the bits of kSumPoint / times, so that it ends as the bits of that number plus the sum, and a multiplication that
// takes the excess away again is the conversion to float32: exact below 2^22, and a group's sum is at most 32 * 127 * 255.
constexpr uint32_t sum_bits(int times) { return times == 16 ? 0x49400000u : times == 4 ? 0x4a400000u : 0x4b400000u; }

// Whether Coded says `less` of codes that are not stored so: one subtraction for each register, which eight rows share. For one row their
// sum begins with less instead.
template <int BITS, bool BIAS> constexpr bool kSubtracts = !BIAS && BITS != 4 && !stored_less(BITS, BIAS);

// The eight quads of the four rows of a slice, as Coded says, or as they are stored.
template <int BITS, bool BIAS, int HALF, bool STORED = false> QUIRE_INLINE void slice_codes(const uint8_t* tile, int slice, int offset, C (&c)[8]) {
    const uint8_t* p = tile + 16 * (BITS == 4 ? slice % 2 : slice);
    auto load = [p](int at) __attribute__((always_inline)) { return vld1q_u8(p + at); };
    auto mask = [](uint8x16_t a, uint8_t m) __attribute__((always_inline)) { return vandq_u8(a, vdupq_n_u8(m)); };
    auto put = [&](int q, uint8x16_t a) __attribute__((always_inline)) { c[q] = vreinterpretq_s8_u8(a); };
    if constexpr (BITS == 8) {
        QUIRE_UNROLL
        for (int q = 0; q < 8; q++) put(q, load(64 * q));
    }
    if constexpr (BITS == 4) {
        QUIRE_UNROLL
        for (int q = 0; q < 8; q++) put(q, mask(load(32 * q), HALF ? 0xf0 : 15));
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
    if constexpr (kSubtracts<BITS, BIAS> && !STORED)
        QUIRE_UNROLL
        for (int q = 0; q < 8; q++) c[q] = vsubq_s8(c[q], vdupq_n_s8((int8_t)offset));
}

// A tile, a slice after the other, all of it `times` unpacked_times and `less` unpacked_less.
template <int BITS, bool BIAS> constexpr int unpacked_times() { return BITS == 4 && BIAS ? 1 : Coded<BITS, BIAS>::times(1); }
template <int BITS, bool BIAS> constexpr int unpacked_less(int offset) { return BITS == 4 ? (BIAS ? 0 : 8) : Coded<BITS, BIAS>::less(0, offset); }
template <int BITS, bool BIAS> QUIRE_INLINE void unpack_slices(const uint8_t* tile, int offset, uint8_t* to) {
    auto put = [to](int slice, int q, C c) __attribute__((always_inline)) { vst1q_s8((int8_t*)to + 128 * slice + 16 * q, c); };
    if constexpr (BITS == 4) {
        QUIRE_UNROLL
        for (int q = 0; q < 8; q++)
            QUIRE_UNROLL
            for (int n = 0; n < 2; n++) {
                const uint8x16_t v = vld1q_u8(tile + 32 * q + 16 * n);
                const uint8x16_t low = BIAS ? vandq_u8(v, vdupq_n_u8(15)) : veorq_u8(vshlq_n_u8(v, 4), vdupq_n_u8(128));
                const uint8x16_t high = BIAS ? vshrq_n_u8(veorq_u8(v, vdupq_n_u8(128)), 4) : vandq_u8(v, vdupq_n_u8(0xf0));
                put(n, q, vreinterpretq_s8_u8(low));
                put(n + 2, q, vreinterpretq_s8_u8(high));
            }
    } else {
        for (int n = 0; n < 4; n++) {
            C c[8];
            slice_codes<BITS, BIAS, 0>(tile, n, offset, c);
            QUIRE_UNROLL
            for (int q = 0; q < 8; q++) put(n, q, c[q]);
        }
    }
}

}  // namespace
