// A token's keys and values go into cells (KvCell).
#pragma once

#include <algorithm>

#include "fixed.h"

namespace {

// Whether all of it is finite in 16 bits.
bool store_half(const float* k, const float* v, const KvCell& cell, uint8_t* to, int slot) {
    const int D = cell.head_dim;
    uint16_t half[kMaxHeadDim];
    uint16_t* keys = (uint16_t*)to;
    uint16_t* values = (uint16_t*)(to + cell.values_at()) + slot * D;
    for (int d = 0; d < D; d += 16) fstore_half_n(half + d, fload_n(k + d, D - d), D - d);
    for (int d = 0; d < D; d++) keys[d * kPage + slot] = half[d];
    for (int d = 0; d < D; d += 16) fstore_half_n(values + d, fload_n(v + d, D - d), D - d);
    uint16_t most = 0;
    for (int d = 0; d < D; d++) most = std::max(most, (uint16_t)(half[d] & 0x7fff));
    for (int d = 0; d < D; d++) most = std::max(most, (uint16_t)(values[d] & 0x7fff));
    return most < 0x7c00;
}

// Codes of round(x * (127 / amax)), and the scale amax / 127.
float store_codes(const float* x, int n, int8_t* codes) {
    const Rounding to = rounding_of(x, n, 127.0f, 1e-36f);
    const F by = fset(to.by), low = fset(-127.0f), high = fset(127.0f);
    for (int i = 0; i < n; i += 16) {
        const F a = to.by == 0.0f ? fzero() : fload_n(x + i, n - i);
        istore_i8(codes + i, ito(fmin(fmax(fround(fmul(a, by)), low), high)));
    }
    return to.scale;
}

void store_bytes(const float* k, const float* v, const KvCell& cell, uint8_t* to, int slot) {
    const int D = cell.head_dim;
    int8_t codes[kMaxHeadDim];
    int8_t* keys = (int8_t*)to;
    float* scales = (float*)(to + cell.scales_at());
    scales[slot] = store_codes(k, D, codes);
    for (int d = 0; d < D; d++) keys[d * kPage + slot] = codes[d];
    scales[kPage + slot] = store_codes(v, D, codes);
    memcpy(to + cell.values_at() + slot * D, codes, (size_t)D);
}

// Planes of round(x * (32639 / amax)), and the scale amax / 32639.
float store_planes(const float* x, int n, int8_t* high, int8_t* low) {
    const Rounding to = rounding_of(x, n, kFixedMost, kFixedLeast);
    for (int i = 0; i < n; i += 16) Planes(to.by == 0.0f ? fzero() : fload_n(x + i, n - i), to.by).store(high + i, low + i);
    return to.scale;
}

void store_fixed(const float* k, const float* v, const KvCell& cell, uint8_t* to, int slot) {
    const int D = cell.head_dim;
    int8_t planes[2][kMaxHeadDim];
    float* scales = (float*)(to + cell.scales_at());
    scales[slot] = store_planes(k, D, planes[0], planes[1]);
    for (int p = 0; p < 2; p++)
        for (int d = 0; d < D; d += 4) memcpy(to + (d / 4 * 2 + p) * 4 * kPage + 4 * slot, planes[p] + d, 4);
    scales[kPage + slot] = store_planes(v, D, planes[0], planes[1]);
    for (int p = 0; p < 2; p++) {
        uint8_t* at = to + cell.values_at() + (slot / 4 * 2 + p) * 4 * D + slot % 4;
        for (int d = 0; d < D; d++) at[4 * d] = (uint8_t)planes[p][d];
    }
}

void store_floats(const float* k, const float* v, const KvCell& cell, uint8_t* to, int slot) {
    const int D = cell.head_dim;
    float* keys = (float*)to;
    for (int d = 0; d < D; d++) keys[d * kPage + slot] = k[d];
    memcpy(to + cell.values_at() + (size_t)(slot * D) * sizeof(float), v, (size_t)D * sizeof(float));
}

bool store_kv(const float* k, const float* v, int kv_heads, const KvCell& cell, uint8_t* page, int slot) {
    bool finite = true;
    for (int h = 0; h < kv_heads; h++, k += cell.head_dim, v += cell.head_dim, page += cell.bytes()) switch (cell.type) {
            case KvType::Half: finite &= store_half(k, v, cell, page, slot); break;
            case KvType::Byte: store_bytes(k, v, cell, page, slot); break;
            case KvType::Fixed: store_fixed(k, v, cell, page, slot); break;
            case KvType::Float: store_floats(k, v, cell, page, slot); break;
        }
    return finite;
}

}  // namespace
