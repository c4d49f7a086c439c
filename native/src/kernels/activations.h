// Kernels of the functions between products, beside SwiGLU: both forms of gelu, the clamped gate of gpt-oss, tanh for caps.
// As in rows.h, a fixed order of operations; constants come first in fmin and fmax so that a NaN passes.
#pragma once

#include "rows.h"

namespace {

// e^x - 1 for |x| up to 18, to about 2 ulp also where x is small.
inline F fexpm1(F x) {
    F n = fround(fmul(x, fset(1.44269504f)));
    F r = ffma(n, fset(-0x1.62e43p-1f), x);
    r = ffma(n, fset(0x1.05c61p-29f), r);
    F p = fset(1.0f / 40320);
    p = ffma(p, r, fset(1.0f / 5040));
    p = ffma(p, r, fset(1.0f / 720));
    p = ffma(p, r, fset(1.0f / 120));
    p = ffma(p, r, fset(1.0f / 24));
    p = ffma(p, r, fset(1.0f / 6));
    p = ffma(p, r, fset(0.5f));
    p = ffma(fmul(r, r), p, r);
    F whole = fpow2(ito(n));
    return ffma(whole, p, fsub(whole, fset(1.0f)));
}

inline F ftanh(F x) {
    x = fmin(fset(9.0f), fmax(fset(-9.0f), x));  // beyond: 1 to the last bit
    F m = fexpm1(fadd(x, x));
    return fdiv(m, fadd(m, fset(2.0f)));
}

// gelu's tanh form: 0.5 (1 + tanh(z)) is 1 / (1 + e^(-2z)).
void geglu(const float* gate, const float* up, int n, float* out) {
    const F one = fset(1.0f);
    for (int i = 0; i < n; i += 16) {
        F g = fload_n(gate + i, n - i);
        F cubic = fmul(fmul(g, g), fset(0.044715f));
        F z = fmul(ffma(cubic, g, g), fset(-1.5957691216f));  // -2 sqrt(2 / pi)
        fstore_n(out + i, fmul(fdiv(g, fadd(one, fexp(z))), fload_n(up + i, n - i)), n - i);
    }
}

// x * normal_cdf(x) = max(x, 0) - |x| / 2 * erfc(|x| / sqrt 2), so that neither tail is a difference of near numbers.
// erfc(y) = e^(-y^2) t p(2t - 1) with t = 1 / (1 + y / 2); p is a fit over [0, 14] with a relative error of 5e-8.
void gelu(const float* x, int n, float* out) {
    const F one = fset(1.0f);
    for (int i = 0; i < n; i += 16) {
        F v = fload_n(x + i, n - i), a = fmin(fset(20.0f), fabs_(v));  // beyond: the tail is 0
        F t = fdiv(one, ffma(a, fset(0.35355339f), one)), s = fsub(fadd(t, t), one);
        F p = fset(-0.000231975063798f);
        p = ffma(p, s, fset(0.000379514618544f));
        p = ffma(p, s, fset(0.00148940633517f));
        p = ffma(p, s, fset(-0.00322000542656f));
        p = ffma(p, s, fset(-0.0107414126396f));
        p = ffma(p, s, fset(0.0182178262621f));
        p = ffma(p, s, fset(0.139734759927f));
        p = ffma(p, s, fset(0.34358048439f));
        p = ffma(p, s, fset(0.510791361332f));
        F half = fmul(a, fset(0.5f));
        F tail = fmul(fmul(half, fmul(p, t)), fexp(fmul(half, fsub(fzero(), a))));
        fstore_n(out + i, fsub(fmax(fzero(), v), tail), n - i);
    }
}

void softcap(const float* x, float cap, int n, float* out) {
    const F by = fset(cap);
    for (int i = 0; i < n; i += 16) fstore_n(out + i, fmul(by, ftanh(fdiv(fload_n(x + i, n - i), by))), n - i);
}

// g sigmoid(1.702 g) (u + 1), with g at most `limit` and u between -limit and limit.
void clamped(const float* gate, const float* up, float limit, int n, float* out) {
    const F one = fset(1.0f), high = fset(limit), low = fset(-limit);
    for (int i = 0; i < n; i += 16) {
        F g = fmin(high, fload_n(gate + i, n - i)), u = fmin(high, fmax(low, fload_n(up + i, n - i)));
        F swish = fdiv(g, fadd(one, fexp(fmul(g, fset(-1.702f)))));
        fstore_n(out + i, fmul(swish, fadd(u, one)), n - i);
    }
}

}  // namespace
