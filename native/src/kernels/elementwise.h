// Kernels of the elementwise ops: a function of each name in ../elementwise.h, with the signature that is there.
// As in rows.h, a fixed order of operations; constants come first in fmin and fmax so that a NaN passes.
#pragma once

#include "rows.h"

namespace {

// out = f(a), or f(a, b), 16 numbers at a time.
template <class Function> QUIRE_INLINE void each(const float* a, int n, float* out, Function f) {
    for (int i = 0; i < n; i += 16) fstore_n(out + i, f(fload_n(a + i, n - i)), n - i);
}
template <class Function> QUIRE_INLINE void each(const float* a, const float* b, int n, float* out, Function f) {
    for (int i = 0; i < n; i += 16) fstore_n(out + i, f(fload_n(a + i, n - i), fload_n(b + i, n - i)), n - i);
}

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

void add(const float* a, const float* b, float, int n, float* out) {
    each(a, b, n, out, [](F x, F y) { return fadd(x, y); });
}

void scale(const float* x, const float*, float factor, int n, float* out) {
    each(x, n, out, [by = fset(factor)](F v) { return fmul(v, by); });
}

void swiglu(const float* gate, const float* up, float, int n, float* out) {
    const F one = fset(1.0f);
    int i = 0;
#ifdef QUIRE_NEON
    for (; i + 32 <= n; i += 32) swiglu_columns(gate + i, up + i, out + i);
#endif
    for (; i < n; i += 16) {
        F g = fload_n(gate + i, n - i);
        F sigmoid_times = fdiv(g, fadd(one, fexp(fsub(fzero(), g))));
        fstore_n(out + i, fmul(sigmoid_times, fload_n(up + i, n - i)), n - i);
    }
}

void sigmoid_gate(const float* x, const float* gate, float, int n, float* out) {
    each(x, gate, n, out, [one = fset(1.0f)](F v, F g) { return fdiv(v, fadd(one, fexp(fsub(fzero(), g)))); });
}

// gelu's tanh form: 0.5 (1 + tanh(z)) is 1 / (1 + e^(-2z)).
void geglu(const float* gate, const float* up, float, int n, float* out) {
    each(gate, up, n, out, [one = fset(1.0f)](F g, F u) {
        F cubic = fmul(fmul(g, g), fset(0.044715f));
        F z = fmul(ffma(cubic, g, g), fset(-1.5957691216f));  // -2 sqrt(2 / pi)
        return fmul(fdiv(g, fadd(one, fexp(z))), u);
    });
}

// x * normal_cdf(x) = max(x, 0) - |x| / 2 * erfc(|x| / sqrt 2), so that neither tail is a difference of near numbers.
// erfc(y) = e^(-y^2) t p(2t - 1) with t = 1 / (1 + y / 2); p is a fit over [0, 14] with a relative error of 5e-8.
void gelu(const float* x, const float*, float, int n, float* out) {
    each(x, n, out, [one = fset(1.0f)](F v) {
        F a = fmin(fset(20.0f), fabs_(v));  // beyond: the tail is 0
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
        return fsub(fmax(fzero(), v), tail);
    });
}

void softcap(const float* x, const float*, float cap, int n, float* out) {
    each(x, n, out, [by = fset(cap)](F v) { return fmul(by, ftanh(fdiv(v, by))); });
}

// g sigmoid(1.702 g) (u + 1), with g at most `limit` and u between -limit and limit: the activation of gpt-oss's experts.
void clamped(const float* gate, const float* up, float limit, int n, float* out) {
    each(gate, up, n, out, [one = fset(1.0f), high = fset(limit), low = fset(-limit)](F gates, F ups) {
        F g = fmin(high, gates), u = fmin(high, fmax(low, ups));
        F swish = fdiv(g, fadd(one, fexp(fmul(g, fset(-1.702f)))));
        return fmul(swish, fadd(u, one));
    });
}

}  // namespace
