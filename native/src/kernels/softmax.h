// A chunk's scores become weights, and what else attention's kernels have in common.
#pragma once

#include "rows.h"

#define QUIRE_NOINLINE __attribute__((noinline))  // register tiles spill when they share a function with other things

#ifdef QUIRE_NEON
#include "neon_attention.h"
#endif

namespace {

// 2^x for x <= 0, to about 2 ulp, and exactly 1 for 0. Never below 2^-101: that adds nothing to a sum that has a 1 in it,
// and it keeps products out of the subnormals. NaN stays NaN.
#ifndef QUIRE_NEON  // it has its own
inline F fexp2(F x) {
    x = fmax(fset(-100.0f), x);
    const F t = fadd(x, fset(0x1.8p23f));
    const F r = fsub(x, fsub(t, fset(0x1.8p23f)));  // -0.5 to 0.5
    F p = fset(0x1.5bba14p-10f);
    p = ffma(p, r, fset(0x1.3cea88p-7f));
    p = ffma(p, r, fset(0x1.c6b752p-5f));
    p = ffma(p, r, fset(0x1.ebf9bcp-3f));
    p = ffma(p, r, fset(0x1.62e42ap-1f));
    p = ffma(p, r, fset(1.0f));
    return fscale2(p, t);
}
inline void fexp2_both(F& a, F& b) { a = fexp2(a), b = fexp2(b); }

// For maxima that a NaN must not become, and where a zero's sign does not matter.
inline F fhigher(F a, F b) { return fmax(a, b); }
inline float fhighest(F a) { return hmax(a); }

// See neon_attention.h.
inline F fwoven() { return fset(1.0f); }
#endif

// height * tanh(x), where t = 2 log2(e) x: tanh(x) is E / (E + 2) with E = e^2x - 1, and E is taken as 2^n (2^r - 1) + (2^n - 1),
// which loses nothing near 0. NaN stays NaN.
inline F fcap(F t, F height) {
    t = fmin(fset(60.0f), fmax(fset(-60.0f), t));
    const F n = fround(t), r = fsub(t, n), power = fpow2(ito(n));
    F p = fset(1.52527338e-5f);  // ln(2)^k / k!
    p = ffma(p, r, fset(1.54035304e-4f));
    p = ffma(p, r, fset(1.33335581e-3f));
    p = ffma(p, r, fset(9.61812911e-3f));
    p = ffma(p, r, fset(5.55041087e-2f));
    p = ffma(p, r, fset(2.40226507e-1f));
    p = ffma(p, r, fset(6.93147181e-1f));
    const F e = ffma(fmul(p, r), power, fsub(power, fset(1.0f)));
    return fmul(height, fdiv(e, fadd(e, fset(2.0f))));
}

// Which scales of a page (16 of keys, 16 of values) are still to come in.
enum class Owed { Nothing, Both };

// A page's weights, with its values' scales in them.
template <Owed Due, bool Weave> inline void put_weights(float* scores, int page, const float* const* scales, F e) {
    if constexpr (Due != Owed::Nothing) e = fmul(e, fload(scales[page] + kPage));
    if constexpr (Weave) e = fmul(e, fwoven());
    fstore(scores + page * kPage, e);
}

// Weights of whole pages, an even number, and their sum.
template <Owed Due, bool Weave> QUIRE_NOINLINE F weigh_pages(float* scores, int pages, float high, const float* const* scales) {
    F sum = fzero();
    for (int p = 0; p < pages; p += 2) {
        F a = fsub(fload(scores + p * kPage), fset(high)), b = fsub(fload(scores + (p + 1) * kPage), fset(high));
        fexp2_both(a, b);
        sum = fadd(fadd(sum, a), b);
        put_weights<Due, Weave>(scores, p, scales, a);
        put_weights<Due, Weave>(scores, p + 1, scales, b);
    }
    return sum;
}

// Scores become weights in place. The keys' scales come in before, the values' after. Weave: the weights are woven.
template <Owed Due, bool Weave = false> inline void weigh(float* scores, int seen, const float* const* scales, const PartShape& shape, float* part) {
    const int last = (seen - 1) / kPage, there = seen - last * kPage;  // tokens of the last page
    const F lowest = fset(-__builtin_inff());
    auto score = [&](int p) {
        F s = fload(scores + p * kPage);
        if constexpr (Due == Owed::Both) fstore(scores + p * kPage, s = fmul(s, fload(scales[p])));
        return s;
    };
    F top[4] = {lowest, lowest, lowest, fhigher(fkeep(score(last), there, lowest), lowest)};
    int p = 0;
    for (; p + 4 <= last; p += 4)
        QUIRE_UNROLL
        for (int i = 0; i < 4; i++) top[i] = fhigher(score(p + i), top[i]);
    for (; p < last; p++) top[0] = fhigher(score(p), top[0]);
    const float high = fhighest(fhigher(fhigher(top[0], top[1]), fhigher(top[2], top[3])));
    F sum = weigh_pages<Due, Weave>(scores, last / 2 * 2, high, scales);
    auto weight = [&](F e, int at) {
        sum = fadd(sum, e);
        put_weights<Due, Weave>(scores, at, scales, e);
    };
    auto one = [&](int at) { return fexp2(fsub(fload(scores + at * kPage), fset(high))); };
    if (last % 2) weight(one(last - 1), last - 1);
    weight(fkeep(one(last), there, fzero()), last);
    part[shape.high] = high;
    part[shape.total] = hsum(sum);
}

// The same for tokens [from, seen), with the scores capped where there is a cap.
template <Owed Due, bool Weave>
void weigh_some(float* scores, int from, int seen, float cap, const float* const* scales, const PartShape& shape, float* part) {
    const int first = from / kPage, last = (seen - 1) / kPage, hidden = from - first * kPage, there = seen - last * kPage;
    auto keep = [&](F x, int p, F other) {
        if (p == last) x = fkeep(x, there, other);
        return p == first ? fkeep(other, hidden, x) : x;
    };
    const F height = fset(cap * 1.44269504f);
    F top = fset(-__builtin_inff());
    for (int p = first; p <= last; p++) {
        F s = fload(scores + p * kPage);
        if constexpr (Due == Owed::Both) s = fmul(s, fload(scales[p]));
        if (cap > 0.0f) s = fcap(s, height);
        fstore(scores + p * kPage, s);
        top = fmax(keep(s, p, fset(-__builtin_inff())), top);
    }
    const float high = hmax(top);
    F sum = fzero();
    for (int p = first; p <= last; p++) {
        F e = keep(fexp2(fsub(fload(scores + p * kPage), fset(high))), p, fzero());
        sum = fadd(sum, e);
        put_weights<Due, Weave>(scores, p, scales, e);
    }
    part[shape.high] = high;
    part[shape.total] = hsum(sum);
}

void merge(const float* part, int head_dim, float* sum) {
    const PartShape shape(head_dim);
    const float high = part[shape.high] > sum[shape.high] ? part[shape.high] : sum[shape.high];
    const F old = fexp2(fset(sum[shape.high] - high)), now = fexp2(fset(part[shape.high] - high));
    for (int d = 0; d < head_dim; d += 16) fstore(sum + d, ffma(fload(part + d), now, fmul(fload(sum + d), old)));
    float a[16], b[16];
    fstore(a, old);
    fstore(b, now);
    sum[shape.total] = __builtin_fmaf(part[shape.total], b[0], sum[shape.total] * a[0]);
    sum[shape.high] = high;
}

inline void merge_parts(const AttendArgs& a, int width) {
    for (int q = 0; q < a.count; q++)
        if (a.sum[q]) merge(a.part[q], width, a.sum[q]);
}

template <int N> struct Count {
    static constexpr int value = N;
};
template <class Body> inline void with_count(int n, Body&& body) {
    switch (n) {
        case 1: return body(Count<1>{});
        case 2: return body(Count<2>{});
        default: break;
    }
    if constexpr (kMaxQueries >= 6) switch (n) {
        case 3: return body(Count<3>{});
        case 4: return body(Count<4>{});
        case 5: return body(Count<5>{});
        default: return body(Count<6>{});
    }
}

}  // namespace
