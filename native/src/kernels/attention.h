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

// Scores of Q queries against the 16 tokens of each of P pages: Q * P independent chains.
template <int Q, int P> inline void page_scores(const uint16_t* const* keys, const float* const* query, int head_dim, F* s) {
    F acc[P][Q];
    for (int p = 0; p < P; p++)
        for (int q = 0; q < Q; q++) acc[p][q] = fzero();
    for (int d = 0; d < head_dim; d++) {
        QUIRE_UNROLL
        for (int p = 0; p < P; p++) {
            F k = fload_half(keys[p] + d * kPage);
            QUIRE_UNROLL
            for (int q = 0; q < Q; q++) acc[p][q] = ffma(fset(query[q][d]), k, acc[p][q]);
        }
    }
    for (int p = 0; p < P; p++)
        for (int q = 0; q < Q; q++) s[p * Q + q] = acc[p][q];
}

// Columns [d, d + 16 C) of: out[q] = out[q] * correction[q] + sum over tokens of p[q][t] * values[t], in order.
template <int Q, int C>
inline void value_columns(const uint16_t* values, int head_dim, int d, int tokens, const float (*p)[kPage],
                          const float* correction, float* const* out) {
    F acc[Q][C];
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < C; c++) acc[q][c] = fmul(fload(out[q] + d + 16 * c), fset(correction[q]));
    for (int t = 0; t < tokens; t++) {
        QUIRE_UNROLL
        for (int c = 0; c < C; c++) {
            F v = fload_half_n(values + t * head_dim + d + 16 * c, head_dim - d - 16 * c);
            QUIRE_UNROLL
            for (int q = 0; q < Q; q++) acc[q][c] = ffma(fset(p[q][t]), v, acc[q][c]);
        }
    }
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < C; c++) fstore(out[q] + d + 16 * c, acc[q][c]);
}

template <int Q>
inline void page_values(const uint16_t* values, int head_dim, int tokens, const float (*p)[kPage], const float* correction,
                        float* const* out) {
    constexpr int kColumns = kMaxChains / Q >= 4 ? 4 : kMaxChains / Q >= 2 ? 2 : 1;
    int d = 0;
    for (; d + 16 * kColumns <= head_dim; d += 16 * kColumns)
        value_columns<Q, kColumns>(values, head_dim, d, tokens, p, correction, out);
    for (; d < head_dim; d += 16) value_columns<Q, 1>(values, head_dim, d, tokens, p, correction, out);
}

template <int Q> void attend_queries(const AttendArgs& a, int first) {
    alignas(64) float out[Q][kMaxHeadDim];
    alignas(64) float p[Q][kPage];
    alignas(64) float correction[16];
    float high[Q], total[Q], added[Q] = {};
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
    constexpr int kPages = kMaxChains / Q >= 4 ? 4 : kMaxChains / Q >= 2 ? 2 : 1;
    F s[kPages * Q];
    for (int start = 0; start < longest; start += kPage) {
        const int page = start / kPage, ready = page % kPages;
        if (ready == 0) {  // scores run ahead by up to kPages pages; the last ones repeat a page that is there
            const uint16_t* keys[kPages];
            const int last = (longest - 1) / kPage;
            for (int i = 0; i < kPages; i++) {
                const int at = page + i < last ? page + i : last;
                keys[i] = a.keys + (size_t)a.pages[at] * a.page_stride;
            }
            page_scores<Q, kPages>(keys, query, a.head_dim, s);
        }
        int fewest = kPage;
        bool rescale = false;
        alignas(64) float shift[16] = {};
        for (int q = 0; q < Q; q++) {
            const int n = seen[q] - start;
            if (n < fewest) fewest = n;
            if (n <= 0) continue;
            F score = fkeep(fmul(s[ready * Q + q], fset(a.scale)), n, fset(lowest));
            float top = hmax(score);
            top = top > high[q] ? top : high[q];
            F e = fexp(fsub(score, fset(top)));
            shift[q] = high[q] - top;
            rescale |= shift[q] != 0.0f;
            high[q] = top;
            added[q] = hsum(e);
            fstore(p[q], e);
        }
        // e^0 is exactly 1, so the exponential can be left out where no maximum moved.
        fstore(correction, rescale ? fexp(fload(shift)) : fset(1.0f));
        for (int q = 0; q < Q; q++)
            if (seen[q] > start) total[q] = __builtin_fmaf(total[q], correction[q], added[q]);
        const uint16_t* values = a.values + (size_t)a.pages[page] * a.page_stride;
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
