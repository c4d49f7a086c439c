// Instructions written out: with QUIRE_EMULATE the self-test runs kernel sets that this CPU lacks. Nothing else is ever built so.
#pragma once

#include <stdint.h>
#include <string.h>

namespace {

// Each lane of 32 bits gets four products of an unsigned byte and a signed one (vpdpbusd).
template <class Register> inline Register emulated_dot(Register sums, Register codes, Register x) {
    uint32_t sum[sizeof sums / 4];
    uint8_t code[sizeof sums];
    int8_t other[sizeof sums];
    memcpy(sum, &sums, sizeof sums), memcpy(code, &codes, sizeof sums), memcpy(other, &x, sizeof sums);
    for (size_t i = 0; i < sizeof sums; i++) sum[i / 4] += (uint32_t)(code[i] * other[i]);
    memcpy(&sums, sum, sizeof sums);
    return sums;
}

// 16 rows of 32 signed bytes against 16 columns of as many, which lie four by four (tdpbssd).
inline void emulated_tile(const int8_t* x, const uint8_t* codes, int32_t* sums) {
    for (int i = 0; i < 256; i++) {
        sums[i] = 0;
        for (int k = 0; k < 32; k++) sums[i] += x[32 * (i / 16) + k] * (int8_t)codes[64 * (k / 4) + 4 * (i % 16) + k % 4];
    }
}

}  // namespace
