// Numbers of 16 bits that share a scale, as two planes of signed bytes: x = 256 high + low, and so |x| <= 127 * 256 + 127. A product of two such
// rows is taken without low * low, in whole numbers: 256 (high . high) + (high . low + low . high), which fits 32 bits for 256 columns and
// is the same in whatever order it is added.
//
// Cells have planes of quads, [16 lanes][4 bytes], so that a lane of a sum meets four of its numbers at a time; the other side (a query, or
// weights) has quads of its own, which are for every lane: as each set multiplies them (fixed_products.h).
#pragma once

#include "rows.h"

namespace {

constexpr float kFixedMost = 127 * 256 + 127;
constexpr float kFixedLeast = 1e-34f;  // of a largest number: below, 32639 over it would not be finite

// How numbers of a row become whole ones: the nearest ones to x * by, which are zeros where the row is too small, or where it is not
// finite: that has a scale that is not a number, so that whoever looks at it finds out.
struct Rounding {
    float by, scale;
};
inline Rounding rounding_of(F most, F sum, float top, float least) {
    const float amax = hmax(most);
    const bool finite = hsum(sum) < __builtin_inff(), usable = finite && amax >= least;
    return {usable ? top / amax : 0.0f, usable ? amax / top : finite ? 0.0f : __builtin_nanf("")};
}
inline Rounding rounding_of(const float* x, int n, float top, float least) {
    F most = fzero(), sum = fzero();
    for (int i = 0; i < n; i += 16) {
        const F a = fabs_(fload_n(x + i, n - i));
        most = fmax(a, most);
        sum = fadd(sum, a);
    }
    return rounding_of(most, sum, top, least);
}

// Sixteen numbers as whole ones, in planes: 256 high + low, where half of 256 goes up.
struct Planes {
#ifdef QUIRE_NEON
    int8x16_t high, low;
    inline Planes(F x, float by) {  // rounded as by a conversion, see icodes
        int16x8_t whole[2];
        for (int i = 0; i < 4; i++) x.v[i] = vaddq_f32(vmulq_n_f32(x.v[i], by), vdupq_n_f32(kPoint));
        for (int i = 0; i < 2; i++) whole[i] = vuzp1q_s16(vreinterpretq_s16_f32(x.v[2 * i]), vreinterpretq_s16_f32(x.v[2 * i + 1]));
        high = vcombine_s8(vrshrn_n_s16(whole[0], 8), vrshrn_n_s16(whole[1], 8));
        low = vuzp1q_s8(vreinterpretq_s8_s16(whole[0]), vreinterpretq_s8_s16(whole[1]));
    }
    inline void store(int8_t* highs, int8_t* lows) const { vst1q_s8(highs, high), vst1q_s8(lows, low); }
#else
    I whole, high;
    inline Planes(F x, float by) : whole(ito(fmul(x, fset(by)))), high(ishr<8>(iadd(whole, iset(128)))) {}
    inline void store(int8_t* highs, int8_t* lows) const { istore_i8(highs, high), istore_i8(lows, isub(whole, ishl<8>(high))); }
#endif
};

}  // namespace
