// Kernels of layers that carry a state: a short convolution, the gated delta rule, and the gate behind attention. As in
// rows.h, a fixed order of operations: a column's sum runs over its rows in order, whatever is computed beside it.
#pragma once

#include "rows.h"

namespace {

// silu of the sum over taps of weight[j] * rows[j], for n columns.
void conv(const float* const* rows, const float* weight, size_t stride, int taps, int n, float* out) {
    const F one = fset(1.0f);
    for (int i = 0; i < n; i += 16) {
        F y = fmul(fload_n(weight + i, n - i), fload_n(rows[0] + i, n - i));
        for (int j = 1; j < taps; j++) y = ffma(fload_n(weight + (size_t)j * stride + i, n - i), fload_n(rows[j] + i, n - i), y);
        fstore_n(out + i, fdiv(y, fadd(one, fexp(fsub(fzero(), y)))), n - i);
    }
}

// x * factor / sqrt(|x|^2 + 1e-6)
void unit(const float* x, float factor, int n, float* out) {
    F sum = fzero();
    for (int i = 0; i < n; i += 16) {
        F v = fload_n(x + i, n - i);
        sum = ffma(v, v, sum);
    }
    const F by = fset(factor / __builtin_sqrtf(hsum(sum) + 1e-6f));
    for (int i = 0; i < n; i += 16) fstore_n(out + i, fmul(fload_n(x + i, n - i), by), n - i);
}

// 16 N columns of the delta rule, or n of them where N is 1.
template <int N> inline void delta_columns(const DeltaArgs& a, int first, int n) {
    const size_t stride = (size_t)a.columns;
    const F slow = fset(a.slow);
    F sum[N], change[N];
    QUIRE_UNROLL for (int c = 0; c < N; c++) sum[c] = fzero();
    const float* from = a.from + first;
    for (int i = 0; i < a.rows; i++, from += stride) {
        const F k = fset(a.k[i]);
        QUIRE_UNROLL for (int c = 0; c < N; c++) {
            const F s = N == 1 ? fload_n(from, n) : fload(from + 16 * c);
            sum[c] = ffma(fmul(s, slow), k, sum[c]);
        }
    }
    QUIRE_UNROLL for (int c = 0; c < N; c++) {
        const F v = N == 1 ? fload_n(a.v + first, n) : fload(a.v + first + 16 * c);
        change[c] = fmul(fsub(v, sum[c]), fset(a.beta));
        sum[c] = fzero();
    }
    from = a.from + first;
    float* to = a.to + first;
    for (int i = 0; i < a.rows; i++, from += stride, to += stride) {
        const F k = fset(a.k[i]), q = fset(a.q[i]);
        QUIRE_UNROLL for (int c = 0; c < N; c++) {
            const F s = ffma(k, change[c], fmul(N == 1 ? fload_n(from, n) : fload(from + 16 * c), slow));
            if (N == 1) fstore_n(to, s, n);
            else fstore(to + 16 * c, s);
            sum[c] = ffma(s, q, sum[c]);
        }
    }
    QUIRE_UNROLL for (int c = 0; c < N; c++) {
        if (N == 1) fstore_n(a.out + first, sum[c], n);
        else fstore(a.out + first + 16 * c, sum[c]);
    }
}

void delta(const DeltaArgs& a) {
    int i = 0;
    for (; i + 64 <= a.columns; i += 64) delta_columns<4>(a, i, 64);
    for (; i < a.columns; i += 16) delta_columns<1>(a, i, a.columns - i);
}

}  // namespace
