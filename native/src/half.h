// float16 and bfloat16 <-> float32, one number at a time, exactly as the hardware does it (round to nearest even).
#pragma once

#include <stdint.h>
#include <string.h>

namespace quire {

static inline float bits_to_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline uint32_t float_to_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}
static inline float bfloat_to_float(uint16_t h) { return bits_to_float((uint32_t)h << 16); }

static inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    if (exponent == 31) return bits_to_float(sign | 0x7f800000u | (mantissa ? (mantissa << 13) | 0x400000u : 0));
    if (exponent) return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
    float tiny = (float)mantissa * 0x1p-24f;  // exact
    return bits_to_float(sign | float_to_bits(tiny));
}

static inline uint16_t float_to_half(float f) {
    uint32_t bits = float_to_bits(f), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // rounds to infinity
    if (magnitude < 0x38800000) {                                   // subnormal: add so that the unit is 2^-24
        float shifted = bits_to_float(magnitude) + 0.5f;
        return (uint16_t)(sign | (float_to_bits(shifted) - 0x3f000000));
    }
    uint32_t odd = magnitude >> 13 & 1;
    return (uint16_t)(sign | ((magnitude - 0x38000000 + 0xfff + odd) >> 13));
}

}  // namespace quire
