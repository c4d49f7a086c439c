// Attention over float16 pages of 16 tokens: keys [head_dim][16], values [16][head_dim].
//
// A query meets its past page by page, in order: scores of 16 tokens (an fma chain over head_dim), the page's maximum and
// sum by the fixed tree, the running sum and output rescaled, then one fma per token in order. Queries computed together
// share the loads and nothing else. Tokens that a query may not see are never multiplied in: stale memory is harmless.
#pragma once

#include "rows.h"

namespace {

void store_kv(const float* k, const float* v, int kv_heads, int head_dim, uint16_t* key_page, uint16_t* value_page, int slot) {
    uint16_t half[kMaxHeadDim];
    for (int h = 0; h < kv_heads; h++) {
        for (int d = 0; d < head_dim; d += 16) fstore_half_n(half + d, fload_n(k + d, head_dim - d), head_dim - d);
        for (int d = 0; d < head_dim; d++) key_page[d * kPage + slot] = half[d];
        uint16_t* to = value_page + slot * head_dim;
        for (int d = 0; d < head_dim; d += 16) fstore_half_n(to + d, fload_n(v + d, head_dim - d), head_dim - d);
        k += head_dim;
        v += head_dim;
        key_page += head_dim * kPage;
        value_page += head_dim * kPage;
    }
}

template <int Q> inline void page_scores(const uint16_t* keys, const float* const* query, int head_dim, F s[Q]) {
    for (int q = 0; q < Q; q++) s[q] = fzero();
    for (int d = 0; d < head_dim; d++) {
        F k = fload_half(keys + d * kPage);
        for (int q = 0; q < Q; q++) s[q] = ffma(fset(query[q][d]), k, s[q]);
    }
}

// out[q] = out[q] * correction[q] + sum over `tokens` of p[q][t] * values[t], in order.
template <int Q>
inline void page_values(const uint16_t* values, int head_dim, int tokens, const float (*p)[kPage], const float* correction,
                        float* const* out) {
    for (int d = 0; d < head_dim; d += 16) {
        F acc[Q];
        const int n = head_dim - d;
        for (int q = 0; q < Q; q++) acc[q] = fmul(fload(out[q] + d), fset(correction[q]));
        if (n >= 16) {
            for (int t = 0; t < tokens; t++) {
                F v = fload_half(values + t * head_dim + d);
                for (int q = 0; q < Q; q++) acc[q] = ffma(fset(p[q][t]), v, acc[q]);
            }
        } else {
            for (int t = 0; t < tokens; t++) {
                F v = fload_half_n(values + t * head_dim + d, n);
                for (int q = 0; q < Q; q++) acc[q] = ffma(fset(p[q][t]), v, acc[q]);
            }
        }
        for (int q = 0; q < Q; q++) fstore(out[q] + d, acc[q]);
    }
}

template <int Q> void attend_queries(const AttendArgs& a, int first) {
    alignas(64) float out[Q][kMaxHeadDim];
    alignas(64) float p[Q][kPage];
    float high[Q], total[Q], correction[Q];
    float* rows[Q];
    const float* const* query = a.query + first;
    const int32_t* seen = a.seen + first;
    const float lowest = -__builtin_inff();
    int longest = 0;
    for (int q = 0; q < Q; q++) {
        for (int d = 0; d < a.head_dim; d += 16) fstore(out[q] + d, fzero());
        high[q] = lowest;
        total[q] = 0.0f;
        rows[q] = out[q];
        if (seen[q] > longest) longest = seen[q];
    }
    for (int start = 0, page = 0; start < longest; start += kPage, page++) {
        const size_t at = (size_t)a.pages[page] * a.page_stride;
        F s[Q];
        page_scores<Q>(a.keys + at, query, a.head_dim, s);
        int fewest = kPage;
        for (int q = 0; q < Q; q++) {
            int n = seen[q] - start;
            if (n < fewest) fewest = n;
            if (n <= 0) continue;
            F score = fkeep(fmul(s[q], fset(a.scale)), n, fset(lowest));
            float top = hmax(score);
            top = top > high[q] ? top : high[q];
            F e = fexp(fsub(score, fset(top)));
            float shift[16];
            fstore(shift, fexp(fset(high[q] - top)));
            correction[q] = shift[0];
            total[q] = __builtin_fmaf(total[q], correction[q], hsum(e));
            high[q] = top;
            fstore(p[q], e);
        }
        const uint16_t* values = a.values + at;
        if (fewest >= kPage) {
            page_values<Q>(values, a.head_dim, kPage, p, correction, rows);
        } else {
            for (int q = 0; q < Q; q++) {
                int n = seen[q] - start;
                if (n > 0) page_values<1>(values, a.head_dim, n < kPage ? n : kPage, p + q, correction + q, rows + q);
            }
        }
    }
    for (int q = 0; q < Q; q++)
        for (int d = 0; d < a.head_dim; d += 16)
            fstore_n(a.out[first + q] + d, fdiv(fload(out[q] + d), fset(total[q])), a.head_dim - d);
}

void attend(const AttendArgs& a) {
    int i = 0;
    if constexpr (kMaxQueries >= 8)
        for (; i + 8 <= a.count; i += 8) attend_queries<8>(a, i);
    for (; i + 4 <= a.count; i += 4) attend_queries<4>(a, i);
    switch (a.count - i) {
        case 3: return attend_queries<3>(a, i);
        case 2: return attend_queries<2>(a, i);
        case 1: return attend_queries<1>(a, i);
        default: return;
    }
}

}  // namespace
