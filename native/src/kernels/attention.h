// Attention over the cells of KV pages (KvCell): keys have their tokens in lanes, values their columns.
//
// A query's past is cut into chunks of 256 tokens by absolute position. What a chunk gives (a part) depends on nothing but
// the chunk: scores (an fma chain over head_dim), their maximum, weights 2^(score - maximum), the weights summed lane by
// lane over the pages and then by the fixed tree, and the values in token order, one fma each. Parts are merged in order,
// one after the other. So it does not matter who computes a part, when, or beside which other queries: they share loads
// and nothing else. Tokens that a query may not see are never multiplied in: stale memory is harmless. A window leaves tokens
// out at the front of a part and moves no cut: what remains is added in the same order, in the same lanes.
//
// Few queries read the cells directly; more first widen 64 tokens to float32, once for all of them.
#pragma once

#include <type_traits>

#include "attention_fixed.h"
#include "softmax.h"

namespace {

inline F widen(const float* p) { return fload(p); }
inline F widen(const uint16_t* p) { return fload_half(p); }
inline F widen(const int8_t* p) { return fload_i8(p); }
inline F widen_n(const float* p, int n) { return fload_n(p, n); }
inline F widen_n(const uint16_t* p, int n) { return fload_half_n(p, n); }
inline F widen_n(const int8_t* p, int n) { return fkeep(fload_i8(p), n, fzero()); }

// Halves in cells that few queries look at, whose queries and weights are woven: each multiplied by its lane of fwoven(). On NEON alone.
struct Woven {
    uint16_t half;
};
template <class T> constexpr bool kWoven = std::is_same_v<T, Woven>;

// How many vectors go with Q queries in a register tile.
constexpr int vectors_for(int q) { return kMaxChains / q >= 4 ? 4 : kMaxChains / q >= 2 ? 2 : 1; }

// Scores of Q queries against the 16 tokens of each of P pages: Q * P independent chains. Cells are read once and in an
// order that no hardware foresees, so what comes next is asked for on the way.
template <int Q, int P, class T>
QUIRE_NOINLINE void score_tile(const T* const* keys, const T* const* next, const float* query, int head_dim, float* scores) {
    F acc[Q][P];
    QUIRE_UNROLL
    for (int q = 0; q < Q; q++)
        QUIRE_UNROLL
        for (int p = 0; p < P; p++) acc[q][p] = fzero();
    for (int d = 0; d < head_dim; d++) {
#ifdef QUIRE_NEON
        if constexpr (P == 1 && sizeof(T) == 4) {
            add_row(acc, keys[0] + d * kPage, query + d);
            continue;
        }
#endif
        F k[P];
        QUIRE_UNROLL
        for (int p = 0; p < P; p++) {
            k[p] = widen(keys[p] + d * kPage);
            if constexpr (sizeof(T) < sizeof(float))
                if (d % (int)(4 / sizeof(T)) == 0) prefetch(next[p] + d * kPage);
        }
        QUIRE_UNROLL
        for (int q = 0; q < Q; q++) {
            const S x = sload(query + q * kAttendStride + d);
            QUIRE_UNROLL
            for (int p = 0; p < P; p++) acc[q][p] = ffma(x, k[p], acc[q][p]);
        }
    }
    QUIRE_UNROLL
    for (int q = 0; q < Q; q++)
        QUIRE_UNROLL
        for (int p = 0; p < P; p++) fstore(scores + q * kAttendStride + p * kPage, acc[q][p]);
}

template <int Q, int P, class T>
inline void score_pages(const T* const* keys, const T* const* next, int from, int pages, const float* query, int head_dim,
                        float* scores) {
    int p = from;
    for (; p + P <= pages; p += P) score_tile<Q, P>(keys + p, next + p, query, head_dim, scores + p * kPage);
    if constexpr (P > 1) score_pages<Q, P / 2>(keys, next, p, pages, query, head_dim, scores);
}

// Columns [column, column + 16 C) of: out[q] += weights[q][t] * values[t] for tokens [from, to), in order. A segment holds
// Span tokens.
template <int Q, int C, int Span, class T>
QUIRE_NOINLINE void value_tile(const T* const* segments, const T* const* next, int stride, int column, int from, int to,
                       const float* weights, float* const* out) {
    F acc[Q][C];
    QUIRE_UNROLL
    for (int q = 0; q < Q; q++)
        QUIRE_UNROLL
        for (int c = 0; c < C; c++) acc[q][c] = fload(out[q] + column + 16 * c);
    for (int t = from; t < to;) {
        const int segment = t / Span, end = to < (segment + 1) * Span ? to : (segment + 1) * Span;
        const size_t at = (size_t)(t % Span * stride + column);
        const T* row = segments[segment] + at;
        const T* coming = sizeof(T) < sizeof(float) ? next[segment] + at : row;
        for (; t < end; t++, row += stride, coming += stride) {
#ifdef QUIRE_NEON
            if constexpr (C == 1 && sizeof(T) == 4) {
                add_row(acc, row, weights + t);
                continue;
            }
#endif
            F v[C];
            QUIRE_UNROLL
            for (int c = 0; c < C; c++) {
                v[c] = widen(row + 16 * c);
                if constexpr (sizeof(T) < sizeof(float))
                    if (c % (int)(4 / sizeof(T)) == 0) prefetch(coming + 16 * c);
            }
            QUIRE_UNROLL
            for (int q = 0; q < Q; q++) {
                const S w = sload(weights + q * kAttendStride + t);
                QUIRE_UNROLL
                for (int c = 0; c < C; c++) acc[q][c] = ffma(w, v[c], acc[q][c]);
            }
        }
    }
    QUIRE_UNROLL
    for (int q = 0; q < Q; q++)
        QUIRE_UNROLL
        for (int c = 0; c < C; c++) fstore(out[q] + column + 16 * c, acc[q][c]);
}

template <int Q, int C, int Span, class T>
inline void value_columns(const T* const* segments, const T* const* next, int stride, int column, int width, int from, int to,
                          const float* weights, float* const* out) {
    for (; column + 16 * C <= width; column += 16 * C)
        value_tile<Q, C, Span>(segments, next, stride, column, from, to, weights, out);
    if constexpr (C > 1) value_columns<Q, C / 2, Span>(segments, next, stride, column, width, from, to, weights, out);
}

#ifdef QUIRE_NEON
template <int Q, int P>
inline void score_pages(const Woven* const* keys, const Woven* const* next, int from, int pages, const float* query, int head_dim, float* scores) {
    score_halves<Q>((const uint16_t* const*)keys, (const uint16_t* const*)next, from, pages, query, head_dim, scores);
}
template <int Q, int C, int Span>
inline void value_columns(const Woven* const* pages, const Woven* const* next, int stride, int, int width, int from, int to, const float* weights,
                          float* const* out) {
    value_halves<Q>((const uint16_t* const*)pages, (const uint16_t* const*)next, stride, width, from, to, weights, out);
}
#endif

// The tokens that all Q queries see go together; the few that only some of them see go one query at a time.
template <int Q, int Span, class T>
inline void add_values(const T* const* segments, const T* const* next, int stride, int width, int from, int to,
                       const int32_t* seen, int offset, const float* weights, float* const* out) {
    int shared = to;
    for (int q = 0; q < Q; q++)
        if (seen[q] - offset < shared) shared = seen[q] - offset;
    if (shared > from) value_columns<Q, vectors_for(Q), Span>(segments, next, stride, 0, width, from, shared, weights, out);
    if (shared < from) shared = from;
    for (int q = 0; q < Q; q++) {
        const int end = seen[q] - offset < to ? seen[q] - offset : to;
        if (end > shared)
            value_columns<1, vectors_for(1), Span>(segments, next, stride, 0, width, shared, end, weights + q * kAttendStride, out + q);
    }
}

// The same where windows may begin inside: before the last query's first token, too, they go one at a time.
template <int Q, int Span, class T>
inline void add_some_values(const T* const* segments, const T* const* next, int stride, int width, int to, const int32_t* first,
                            const int32_t* seen, int offset, const float* weights, float* const* out) {
    int front = 0, shared = to;
    for (int q = 0; q < Q; q++) {
        if (first[q] - offset > front) front = first[q] - offset;
        if (seen[q] - offset < shared) shared = seen[q] - offset;
    }
    const bool together = front < shared;
    auto one = [&](int q, int from, int end) {
        if (from < end)
            value_columns<1, vectors_for(1), Span>(segments, next, stride, 0, width, from, end, weights + q * kAttendStride, out + q);
    };
    auto begin = [&](int q) { return first[q] - offset > 0 ? first[q] - offset : 0; };
    auto end = [&](int q) { return seen[q] - offset < to ? seen[q] - offset : to; };
    for (int q = 0; q < Q; q++) one(q, begin(q), together ? front : end(q));
    if (!together) return;
    value_columns<Q, vectors_for(Q), Span>(segments, next, stride, 0, width, front, shared, weights, out);
    for (int q = 0; q < Q; q++) one(q, shared, end(q));
}

#ifdef QUIRE_NEON
// The queries, scaled and woven; false where one is too large for that.
inline bool weave_queries(const AttendArgs& a, F scale, float* queries) {
    const F by = fmul(scale, fwoven());
    F most = fzero();
    for (int q = 0; q < a.count; q++)
        for (int d = 0; d < a.cell.head_dim; d += 16) {
            const F x = fmul(fload(a.query[q] + d), by);
            most = fhigher(fabs_(x), most);
            fstore(queries + q * kAttendStride + d, x);
        }
    return fhighest(most) < __builtin_inff();
}
#endif

// Some: with windows, a cap, or both. Without them every trace of either is gone.
template <class T, bool Some> void attend_cells(const AttendArgs& a) {
    constexpr Owed kScaled = sizeof(T) == 1 ? Owed::Both : Owed::Nothing;
    const int D = a.cell.head_dim, wide = (D + 15) / 16 * 16;
    const PartShape shape(D);
    float* queries = (float*)a.scratch;
    float* scores = queries + kMaxAttend * kAttendStride;
    float* block = scores + kMaxAttend * kAttendStride;
    int longest = 0, begin = Some ? kChunk : 0;
    const F scale = fset(Some && a.cap > 0.0f ? a.scale * (2.88539008f / a.cap) : a.scale * 1.44269504f);
#ifdef QUIRE_NEON
    const bool weave = sizeof(T) == 2 && a.finite && a.count < 6 && D % 16 == 0 && weave_queries(a, scale, queries);
#else
    constexpr bool weave = false;
#endif
    for (int q = 0; q < a.count; q++) {
        int at = 0;
        for (; at + 16 <= D && !weave; at += 16) fstore(queries + q * kAttendStride + at, fmul(fload(a.query[q] + at), scale));
        if (at < D && !weave) fstore(queries + q * kAttendStride + at, fmul(fload_n(a.query[q] + at, D - at), scale));
        for (int d = 0; d < wide; d += 16) fstore(a.part[q] + d, fzero());
        if (a.seen[q] > longest) longest = a.seen[q];
        if (Some && a.from[q] < begin) begin = a.from[q];
    }

    // Keys and values of each page, and behind them what is wanted after: the values, then what is coming.
    constexpr int kPages = kChunk / kPage, kAhead = kComing;
    const int pages = (longest + kPage - 1) / kPage, front = Some ? begin / kPage : 0;
    const T *keys[kPages + kAhead], *values[kPages + kAhead];
    const float* scales[kPages];
    values[front] = nullptr;  // of no page, there is nothing to ask for
    for (int p = front; p < pages; p++) {
        const uint8_t* cell = a.cells + (size_t)a.pages[p] * a.page_stride;
        keys[p] = (const T*)cell;
        values[p] = (const T*)(cell + a.cell.values_at());
        if constexpr (kScaled == Owed::Both) {
            scales[p] = (const float*)(cell + a.cell.scales_at());
            prefetch(scales[p]), prefetch(scales[p] + kPage);
        }
    }
    const int reach = pages - front < kAhead ? pages - front : kAhead;  // how many pages ahead things are asked for: nothing is left out
    for (int i = 0; i < kAhead; i++) {
        keys[pages + i] = values[front + i < pages ? front + i : front];
        values[pages + i] = i < a.ahead ? (const T*)a.coming[i] : values[front];
    }
    auto weigh_one = [&](int q, auto type) {
        constexpr bool kWeave = kWoven<decltype(type)>;
        float* own = scores + q * kAttendStride;
        if constexpr (Some)
            weigh_some<kScaled, kWeave>(own, a.from[q], a.seen[q], a.cap, scales, shape, a.part[q]);
        else
            weigh<kScaled, kWeave>(own, a.seen[q], scales, shape, a.part[q]);
    };
    auto few = [&](auto n, auto type) {
        constexpr int Q = decltype(n)::value;
        using As = const decltype(type)* const*;
        const As k = (As)keys, v = (As)values;
        score_pages<Q, vectors_for(Q)>(k, k + reach, front, pages, queries, D, scores);
        for (int q = 0; q < Q; q++) weigh_one(q, type);
        if constexpr (Some)
            add_some_values<Q, kPage>(v, v + reach, D, D, longest, a.from, a.seen, 0, scores, a.part);
        else
            add_values<Q, kPage>(v, v + reach, D, D, 0, longest, a.seen, 0, scores, a.part);
    };
#ifdef QUIRE_NEON
    if constexpr (sizeof(T) == 2)
        if (weave)
            return with_count(a.count, [&](auto n) {
                if constexpr (decltype(n)::value < 6) few(n, Woven{});
            });
#endif
    if (a.count <= kMaxQueries && D % 16 == 0) return with_count(a.count, [&](auto n) { few(n, T{}); });

    const int tiles = (a.count + kMaxQueries - 1) / kMaxQueries, each = a.count / tiles, more = a.count % tiles;
    auto for_tiles = [&](auto&& body) {
        for (int t = 0, first = 0; t < tiles; t++) {
            const int n = each + (t < more);
            with_count(n, [&](auto count) { body(count, first); });
            first += n;
        }
    };
    constexpr int kBlockPages = kAttendBlock / kPage;
    for (int page = front; page < pages; page += kBlockPages) {
        const float* widened[kBlockPages];
        for (int p = 0; p < kBlockPages; p++) {
            widened[p] = block + p * D * kPage;
            for (int d = 0; d < D && page + p < pages; d++) {
                fstore(block + (p * D + d) * kPage, widen(keys[page + p] + d * kPage));
                if (d % (int)(4 / sizeof(T)) == 0) prefetch(keys[page + p + reach] + d * kPage);
            }
        }
        for_tiles([&](auto n, int first) {
            constexpr int Q = decltype(n)::value;
            int here = 0, before = 0;
            for (int q = 0; q < Q; q++) here = a.seen[first + q] > here ? a.seen[first + q] : here;
            here = (here + kPage - 1) / kPage - page;
            if constexpr (Some) {
                before = kChunk;
                for (int q = 0; q < Q; q++) before = a.from[first + q] < before ? a.from[first + q] : before;
                before = before / kPage > page ? before / kPage - page : 0;
            }
            const size_t at = (size_t)(first * kAttendStride);
            score_pages<Q, vectors_for(Q)>(widened, widened, before, here < kBlockPages ? here : kBlockPages, queries + at, D,
                                           scores + at + page * kPage);
        });
    }
    for (int q = 0; q < a.count; q++) weigh_one(q, T{});
    for (int start = front * kPage; start < longest; start += kAttendBlock) {
        const int tokens = longest - start < kAttendBlock ? longest - start : kAttendBlock;
        for (int t = 0; t < tokens; t++) {
            const T* row = values[(start + t) / kPage] + (start + t) % kPage * D;
            const T* coming = values[(start + t) / kPage + reach] + (start + t) % kPage * D;
            int d = 0;
            for (; d + 16 <= D; d += 16) {
                fstore(block + t * wide + d, widen(row + d));
                if (d % (int)(64 / sizeof(T)) == 0) prefetch(coming + d);
            }
            if (d < D) fstore(block + t * wide + d, widen_n(row + d, D - d));
        }
        const float* segment = block;
        for_tiles([&](auto n, int first) {
            constexpr int Q = decltype(n)::value;
            const float* weights = scores + first * kAttendStride + start;
            if constexpr (Some)
                add_some_values<Q, kAttendBlock>(&segment, &segment, wide, wide, tokens, a.from + first, a.seen + first, start,
                                                 weights, a.part + first);
            else
                add_values<Q, kAttendBlock>(&segment, &segment, wide, wide, 0, tokens, a.seen + first, start, weights,
                                            a.part + first);
        });
    }
}

void attend(const AttendArgs& a) {
    const bool some = a.windowed || a.cap > 0.0f;
    switch (a.cell.type) {
        case KvType::Half: some ? attend_cells<uint16_t, true>(a) : attend_cells<uint16_t, false>(a); break;
        case KvType::Byte: some ? attend_cells<int8_t, true>(a) : attend_cells<int8_t, false>(a); break;
        case KvType::Fixed: return attend_fixed(a);
        case KvType::Float: attend_cells<float, false>(a); break;
    }
    merge_parts(a, a.cell.head_dim);
}

void finish(const float* sum, int head_dim, float* out) {
    const F share = fset(1.0f / sum[PartShape(head_dim).total]);  // a division takes as long as fourteen products on a Neoverse-N1
    for (int d = 0; d < head_dim; d += 16) fstore_n(out + d, fmul(fload(sum + d), share), head_dim - d);
}

}  // namespace
