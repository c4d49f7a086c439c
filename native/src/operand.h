// Rows of x as a product reads them: int8 panels for affine weights, float32 rows for dense ones. Views of both cost nothing,
// so one head's columns or one row of a panel can be multiplied where they lie.
#pragma once

#include <string.h>

#include "kernels.h"

namespace quire {

struct Operand {
    const uint8_t* panel = nullptr;  // of the first row
    QuantShape shape;
    const float* rows = nullptr;
    size_t stride = 0;  // floats from one row to the next

    // From that column on; a multiple of 32 where there are panels.
    Operand columns(int first) const {
        Operand o = *this;
        if (panel) o.panel += QuantShape::at(first / 32, 0), o.shape = shape.from(first / 32, 0);
        if (rows) o.rows += first;
        return o;
    }
};

// How many bytes a number of x has in the panels that a weight reads; 0: it reads rows.
inline int bytes_of_x(const Matrix& w) { return w.type != Type::Affine ? 0 : w.bits == 14 ? 2 : 1; }

// Rows [0, m) of x against blocks [b0, b1) of w.
inline void multiply(const Kernels& k, const Matrix& w, int b0, int b1, const Operand& x, int m, const Epilogue& e) {
    if (w.type == Type::Affine) k.linear_affine(w, b0, b1, x.panel, x.shape, m, e);
    else k.linear_dense(w, b0, b1, x.rows, x.stride, m, e);
}

// One row of a panel into another panel's lane, as it is.
inline void copy_lane(const QuantShape& s, const uint8_t* from, int lane, uint8_t* to, int to_lane) {
    const int groups = s.k / 32;
    const uint8_t* codes = from + 32 * lane;
    uint8_t* out = to + 32 * to_lane;
    for (int g = 0; g < groups; g++) memcpy(out + 512 * g, codes + 512 * g, 32);
    const float* sx = (const float*)(from + s.sx) + lane;
    float* out_sx = (float*)(to + s.sx) + to_lane;
    for (int g = 0; g < groups; g++) out_sx[16 * g] = sx[16 * g];
    const int32_t* sum = (const int32_t*)(from + s.sum) + lane;
    int32_t* out_sum = (int32_t*)(to + s.sum) + to_lane;
    for (int g = 0; g < 2 * groups; g++) out_sum[16 * g] = sum[16 * g];
    const uint8_t* excess = from + s.excess + 16 * lane;
    uint8_t* out_excess = to + s.excess + 16 * to_lane;
    for (int g = 0; QuantShape::kHasExcess && g < groups; g++) memcpy(out_excess + 256 * g, excess + 256 * g, 16);
    const float* sxs = (const float*)(from + s.sxs) + lane;
    float* out_sxs = (float*)(to + s.sxs) + to_lane;
    for (int g = 0; g < groups; g++) out_sxs[16 * g] = sxs[16 * g];
    if (!s.fine()) return;
    for (int g = 0; g < groups; g++) memcpy(out + s.low + 512 * g, codes + s.low + 512 * g, 32);
    const int32_t* low = (const int32_t*)(from + s.low_sum) + lane;
    int32_t* out_low = (int32_t*)(to + s.low_sum) + to_lane;
    for (int g = 0; g < groups; g++) out_low[16 * g] = low[16 * g];
}

}  // namespace quire
