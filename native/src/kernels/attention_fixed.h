// Attention over cells of fixed numbers (fixed.h): queries and weights are rounded to 16 bits as well, once for a chunk, and scores and values are sums of
// products of whole numbers. Those are the same in any order, so what a part is made of is as little affected by its neighbours as in
// attention.h, which has the rest of the rules. A token that a query may not see has a weight of 0.
#pragma once

#include <algorithm>

#include "fixed_products.h"
#include "softmax.h"

namespace {

constexpr size_t kFixedStride = kAttendStride * sizeof(float);  // bytes from one query's quads to the next one's, and weights'
static_assert(kMaxHeadDim / 4 * kQuadBytes <= (int)kFixedStride && kChunk / 4 * kQuadBytes <= (int)kFixedStride, "quads lie where floats would");

constexpr int kOfPage = kPage / kWidth;  // registers of 16 lanes
// How many registers of lanes go with Q queries in a tile.
template <int Q> constexpr int kFixedVectors = kWidth == 16 ? (Q == 1 ? 4 : 2) : kWidth == 8 ? (Q < 3 ? 2 : 1) : Q > 2 ? 2 : 4;

// What belongs to one side of some queries' products.
struct FixedSide {
    const uint8_t* quads;    // + kFixedStride for the next query
    const float* factors;    // a total's
    const int32_t* flipped;  // see Flipped
};

// Scores of Q queries against N registers of tokens: of several pages, or a part of one.
template <int Q, int N>
QUIRE_NOINLINE void score_fixed(const uint8_t* const* keys, const uint8_t* const* next, int lane, const FixedSide& queries, int columns,
                                const float* const* scales, float* scores) {
    W sums[kFixedSums<Q, N>][Q][N];
    clear(sums);
    const uint8_t *at[N], *x = queries.quads;
    QUIRE_UNROLL
    for (int v = 0; v < N; v++) at[v] = keys[v / kOfPage] + 4 * (lane + v % kOfPage * kWidth);
    constexpr int kPages = (N + kOfPage - 1) / kOfPage;
    size_t ahead = 0;
    for (int d = 0; d < columns; d += 4, ahead += 8 * kPage, x += kQuadBytes) {
        if (!lane)
            QUIRE_UNROLL
            for (int p = 0; p < kPages; p++) prefetch(next[p] + ahead), prefetch(next[p] + ahead + 4 * kPage);
        add_quads(sums, at, 4 * kPage, x, kFixedStride);
        QUIRE_UNROLL
        for (int v = 0; v < N; v++) at[v] += 8 * kPage;
    }
    QUIRE_UNROLL
    for (int v = 0; v < N; v++) {
        const int token = lane + v * kWidth;
        const V own = vload(scales[v / kOfPage] + token % kPage);
        QUIRE_UNROLL
        for (int q = 0; q < Q; q++)
            vstore(scores + q * kAttendStride + token, vmul(vwhole(total(sums, q, v, queries.flipped[q]), queries.factors[q]), own));
    }
}
template <int Q, int N>
inline void score_fixed_pages(const uint8_t* const* keys, const uint8_t* const* next, int from, int to, const FixedSide& queries, int columns,
                              const float* const* scales, float* scores) {
    constexpr int kPages = N > kOfPage ? N / kOfPage : 1;
    int p = from;
    for (; p + kPages <= to; p += kPages)
        for (int lane = 0; lane < kPages * kPage; lane += N * kWidth)
            score_fixed<Q, N>(keys + p, next + p, lane, queries, columns, scales + p, scores + p * kPage);
    if constexpr (kPages > 1) score_fixed_pages<Q, N / 2>(keys, next, p, to, queries, columns, scales, scores);
}

// Columns [column, column + N kWidth) of what Q queries' weights make of the values of pages [from, to). Past the last column is whatever lies
// behind it in the cell.
template <int Q, int N>
QUIRE_NOINLINE void value_fixed(const uint8_t* const* values, int from, int to, int reach, int columns, int column, const FixedSide& weights,
                                float* const* part) {
    W sums[kFixedSums<Q, N>][Q][N];
    clear(sums);
    const uint8_t* x = weights.quads + (size_t)(from * kPage / 4 * kQuadBytes);
    for (int p = from; p < to; p++) {
        const uint8_t *at[N], *coming = values[p + reach] + 4 * column;
        QUIRE_UNROLL
        for (int v = 0; v < N; v++) at[v] = values[p] + 4 * (column + v * kWidth);
        for (int quad = 0; quad < kPage / 4; quad++, x += kQuadBytes, coming += 8 * columns) {
            if (column % 16 == 0)
                QUIRE_UNROLL
                for (int v = 0; v < N; v += kOfPage) prefetch(coming + 4 * v * kWidth), prefetch(coming + 4 * (columns + v * kWidth));
            add_quads(sums, at, 4 * (size_t)columns, x, kFixedStride);
            QUIRE_UNROLL
            for (int v = 0; v < N; v++) at[v] += 8 * columns;
        }
    }
    QUIRE_UNROLL
    for (int q = 0; q < Q; q++)
        QUIRE_UNROLL
        for (int v = 0; v < N; v++) vstore(part[q] + column + v * kWidth, vwhole(total(sums, q, v, weights.flipped[q]), weights.factors[q]));
}
template <int Q, int N>
inline void value_fixed_columns(const uint8_t* const* values, int from, int to, int reach, int columns, int column, int end, const FixedSide& weights,
                                float* const* part) {
    for (; column + N * kWidth <= end; column += N * kWidth) value_fixed<Q, N>(values, from, to, reach, columns, column, weights, part);
    if constexpr (N > kOfPage) value_fixed_columns<Q, N / 2>(values, from, to, reach, columns, column, end, weights, part);
}

// A query becomes quads. Returns what a total of its products is to be multiplied by.
inline float fix_query(const float* x, int n, float by, uint8_t* quads, int32_t* flipped) {
    Flipped sum;
    const Rounding to = rounding_of(x, n, kFixedMost, kFixedLeast);
    for (int i = 0; i < n; i += 16, quads += 4 * kQuadBytes) put_fixed(quads, fload_n(x + i, n - i), to.by, sum);
    *flipped = sum.total();
    return to.scale * (256.0f * by);
}

// So do the weights of pages [first, last], times `by`, and zeros for the other pages of [front, pages).
QUIRE_NOINLINE int32_t fix_weights(float* weights, float by, int first, int last, int front, int pages, uint8_t* quads) {
    const int begin = front / 4 * 4, end = (pages + 3) / 4 * 4;
    for (int p = begin; p < first; p++) fstore(weights + p * kPage, fzero());
    for (int p = last + 1; p < end; p++) fstore(weights + p * kPage, fzero());
    Flipped sum;
    for (int p = begin; p < end; p += 4) put_four_fixed(quads + p * (kPage / 4) * kQuadBytes, weights + p * kPage, by, sum);
    return sum.total();
}

// What the queries of a call look at, and what they make of it on the way.
struct FixedCall {
    const AttendArgs& a;
    int columns, front, pages, reach;  // pages [front, pages) are looked at; reach: how many pages ahead things are asked for
    // Of each page, and behind them what is wanted after: the values, then what is coming.
    const uint8_t *keys[kChunk / kPage + kComing], *values[kChunk / kPage + kComing];
    const float* scales[kChunk / kPage];
    uint8_t* quads;  // of queries, then of their weights
    float* scores;   // kAttendStride from one query to the next
    float factors[kMaxAttend];
    int32_t flipped[kMaxAttend];

    explicit FixedCall(const AttendArgs& args, bool some) : a(args), columns(args.cell.head_dim), quads(args.scratch), scores((float*)(quads + kMaxAttend * kFixedStride)) {
        const float scale = a.cap > 0.0f ? a.scale * (2.88539008f / a.cap) : a.scale * 1.44269504f;
        int longest = 0, begin = some ? kChunk : 0;
        for (int q = 0; q < a.count; q++) {
            factors[q] = fix_query(a.query[q], columns, scale, at(q), flipped + q);
            if (a.seen[q] > longest) longest = a.seen[q];
            if (some && a.from[q] < begin) begin = a.from[q];
        }
        front = begin / kPage, pages = (longest + kPage - 1) / kPage;
        values[front] = nullptr;  // of no page, there is nothing to ask for
        for (int p = front; p < pages; p++) {
            keys[p] = a.cells + (size_t)a.pages[p] * a.page_stride;
            values[p] = keys[p] + a.cell.values_at();
            scales[p] = (const float*)(keys[p] + a.cell.scales_at());
            prefetch(scales[p]), prefetch(scales[p] + kPage);
        }
        reach = pages - front < kComing ? pages - front : kComing;
        for (int i = 0; i < kComing; i++) {
            keys[pages + i] = values[front + i < pages ? front + i : front];
            values[pages + i] = i < a.ahead ? a.coming[i] : values[front];
        }
    }
    uint8_t* at(int q) const { return quads + (size_t)q * kFixedStride; }
    FixedSide side(int q) const { return {at(q), factors + q, flipped + q}; }

    // One thing after the other for all queries: each waits for sums over lanes.
    template <bool Some> void weigh_all() {
        const PartShape shape(columns);
        Rounding to[kMaxAttend];
        for (int q = 0; q < a.count; q++) {
            float* own = scores + q * kAttendStride;
            Weights all;
            if constexpr (Some) all = weigh_some<Owed::Values, false>(own, a.from[q], a.seen[q], a.cap, scales, shape, a.part[q]);
            else all = weigh<Owed::Values>(own, a.seen[q], scales, shape, a.part[q]);
            to[q] = rounding_of(all.most, all.sum, kFixedMost, kFixedLeast);
        }
        for (int q = 0; q < a.count; q++) {
            factors[q] = to[q].scale * 256.0f;
            flipped[q] = fix_weights(scores + q * kAttendStride, to[q].by, (Some ? a.from[q] : 0) / kPage, (a.seen[q] - 1) / kPage, front, pages, at(q));
        }
    }

    // Queries that go together, at most `most` of them: body is given their number, the first, and the pages that they look at.
    template <class Body> void for_tiles(int most, Body&& body) const {
        const int tiles = (a.count + most - 1) / most, each = a.count / tiles, more = a.count % tiles;
        for (int t = 0, first = 0; t < tiles; t++) {
            const int n = each + (t < more);
            int from = kChunk, to = 0;
            for (int q = first; q < first + n; q++) from = std::min(from, a.from[q]), to = std::max(to, a.seen[q]);
            body(n, first, std::max(front, from / kPage), (to + kPage - 1) / kPage);
            first += n;
        }
    }
};

// Some: with windows, a cap, or both.
template <bool Some> void attend_fixed(const AttendArgs& a) {
    FixedCall call(a, Some);
    const bool several = a.count > kMaxQueries;  // tiles: then cells stay in the first cache while all of them look there
    constexpr int kNear = 4;
    for (int page = call.front, end; page < call.pages; page = end) {
        end = several ? std::min(page + kNear, call.pages) : call.pages;
        call.for_tiles(kMaxQueries, [&](int n, int first, int from, int to) {
            with_count(n, [&](auto count) {
                constexpr int Q = decltype(count)::value;
                score_fixed_pages<Q, kFixedVectors<Q>>(call.keys, call.keys + call.reach, std::max(from, page), std::min(to, end), call.side(first),
                                                       call.columns, call.scales, call.scores + first * kAttendStride);
            });
        });
    }
    call.weigh_all<Some>();
    const int wide = (call.columns + 15) / 16 * 16, step = several ? 16 : wide;
    for (int column = 0; column < wide; column += step)
        call.for_tiles(kMaxQueries, [&](int n, int first, int from, int to) {
            with_count(n, [&](auto count) {
                constexpr int Q = decltype(count)::value;
                value_fixed_columns<Q, kFixedVectors<Q>>(call.values, from, to, call.reach, call.columns, column, column + step, call.side(first),
                                                         a.part + first);
            });
        });
}

}  // namespace
