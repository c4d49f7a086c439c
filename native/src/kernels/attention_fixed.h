// Attention over cells of fixed numbers (fixed.h): queries and weights are rounded to 16 bits as well, and scores and values are sums of
// products of whole numbers. Those are the same in any order, so what a part is made of is as little affected by its neighbours as in
// attention.h, which has the rest of the rules. A token that a query may not see has a weight of 0.
//
// A weight is to hold the scale of its token's values, and the largest of a chunk is to be a large whole number. Both come by themselves where a
// scale is 2^level times something below 2: scores get the level, so that 2^(score + level - the largest of these) is at most 1 and goes to whole
// numbers by a factor of its token alone. What is added up for the total is that power times 2^-level. A part's values stay sums of whole
// numbers (256 . high . high + the rest), and its total has their unit (kFixedUnit).
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
    const float* factors;    // a total's; of queries
    const int32_t* flipped;  // see Flipped
};

// Scores of Q queries against N registers of tokens: of several pages, or a part of one.
template <int Q, int N>
QUIRE_NOINLINE void score_fixed(const uint8_t* const* keys, const uint8_t* const* next, int lane, const FixedSide& queries, int columns,
                                const float* const* scales, const float* levels, float* scores) {
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
        const V own = vload(scales[v / kOfPage] + token % kPage), level = vload(levels + token);
        QUIRE_UNROLL
        for (int q = 0; q < Q; q++)
            vstore(scores + q * kAttendStride + token, vfma(vwhole(total(sums, q, v, queries.flipped[q]), queries.factors[q]), own, level));
    }
}
template <int Q, int N>
inline void score_fixed_pages(const uint8_t* const* keys, const uint8_t* const* next, int from, int to, const FixedSide& queries, int columns,
                              const float* const* scales, const float* levels, float* scores) {
    constexpr int kPages = N > kOfPage ? N / kOfPage : 1;
    int p = from;
    for (; p + kPages <= to; p += kPages)
        for (int lane = 0; lane < kPages * kPage; lane += N * kWidth)
            score_fixed<Q, N>(keys + p, next + p, lane, queries, columns, scales + p, levels + p * kPage, scores + p * kPage);
    if constexpr (kPages > 1) score_fixed_pages<Q, N / 2>(keys, next, p, to, queries, columns, scales, levels, scores);
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
        for (int v = 0; v < N; v++) vstore(part[q] + column + v * kWidth, vwhole(total(sums, q, v, weights.flipped[q]), 1.0f));
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

// 2^x for x <= 0, to about 3e-6 of it, which is a tenth of what a weight is rounded by; otherwise as fexp2.
inline F fexp2_fixed(F x) {
    x = fmax(fset(-100.0f), x);
    const F t = fadd(x, fset(0x1.8p23f));
    const F r = fsub(x, fsub(t, fset(0x1.8p23f)));
    F p = ffma(fset(0x1.3a02ccp-7f), r, fset(0x1.c9fc46p-5f));
    p = ffma(p, r, fset(0x1.ec0378p-3f));
    p = ffma(p, r, fset(0x1.62e12cp-1f));
    p = ffma(p, r, fset(1.0f));
    return fscale2(p, t);
}

// What the scales of a chunk's values bring to its weights.
constexpr float kLeastLevel = -60.0f;
constexpr float kWholes = 0x1p23f;  // added to a number from 0 to 2^23 it leaves the nearest whole one in the lower bits
struct TokenScales {
    alignas(64) float level[kChunk];  // a scale is 2^level times 1 to 2 (less where it is below 2^kLeastLevel)
    alignas(64) float back[kChunk];   // 2^-level
    alignas(64) float code[kChunk];   // what makes a whole number of 2^(score + level - ..)
    alignas(64) float nothing[kChunk];

    void put(int page, const float* scales) {
        const F scale = fload(scales);
        int32_t bits[kPage];
        float levels[kPage];
        memcpy(bits, scales, sizeof bits);
        for (int i = 0; i < kPage; i++) levels[i] = (float)((bits[i] >> 23) - 127);
        const F own = fmax(fload(levels), fset(kLeastLevel));
        const F power = fpow2(ito(fsub(fzero(), own)));
        fstore(level + page * kPage, own);
        fstore(back + page * kPage, ffma(scale, fzero(), power));  // not a number where the scale is not one
        fstore(code + page * kPage, fmul(fmul(scale, power), fset(256 * kFixedUnit)));
        fstore(nothing + page * kPage, fzero());
    }
};

// A query's scores (with levels, unless they are to be capped) of tokens [from, seen) become weights, whole numbers as floats.
template <bool Some>
QUIRE_NOINLINE void weigh_fixed(float* scores, int from, int seen, float cap, const TokenScales& tokens, const PartShape& shape, float* part) {
    const int first = from / kPage, last = (seen - 1) / kPage, hidden = from - first * kPage, there = seen - last * kPage;
    auto keep = [&](F x, int p, F other) {
        if (p == last) x = fkeep(x, there, other);
        return Some && p == first ? fkeep(other, hidden, x) : x;
    };
    F top = fset(-__builtin_inff());
    for (int p = first; p <= last; p++) {
        F s = fload(scores + p * kPage);
        if constexpr (Some)
            if (cap > 0.0f) fstore(scores + p * kPage, s = fadd(fcap(s, fset(cap * 1.44269504f)), fload(tokens.level + p * kPage)));
        top = fhigher(keep(s, p, fset(-__builtin_inff())), top);
    }
    const float high = fhighest(top);
    F sum = fzero();
    for (int p = first; p <= last; p++) {
        const F power = fexp2_fixed(fsub(fload(scores + p * kPage), fset(high)));
        const F whole = fsub(ffma(power, fload(tokens.code + p * kPage), fset(kWholes)), fset(kWholes));
        sum = keep(ffma(power, fload(tokens.back + p * kPage), sum), p, sum);
        fstore(scores + p * kPage, keep(whole, p, fzero()));
    }
    part[shape.high] = high;
    part[shape.total] = hsum(sum) * kFixedUnit;
}

// Whole numbers of pages [first, last] become quads, and zeros those of the other pages of [begin, end).
inline void clear_others(float* weights, int first, int last, int begin, int end) {
    for (int p = begin; p < first; p++) fstore(weights + p * kPage, fzero());
    for (int p = last + 1; p < end; p++) fstore(weights + p * kPage, fzero());
}
QUIRE_NOINLINE int32_t fix_weights(float* weights, int first, int last, int front, int pages, uint8_t* quads) {
    const int begin = front / 4 * 4, end = (pages + 3) / 4 * 4;
    clear_others(weights, first, last, begin, end);
    Flipped sum;
    for (int p = begin; p < end; p += 4) put_four_fixed(quads + p * (kPage / 4) * kQuadBytes, weights + p * kPage, 1.0f, sum);
    return sum.total();
}

// What the queries of a call look at, and what they make of it on the way: `count` of them from `base` on.
struct FixedCall {
    const AttendArgs& a;
    int base, count;
    int columns, front = kChunk / kPage, pages = 0, reach = 0;  // pages [front, pages) are looked at; reach: how many pages ahead things are asked for
    // Of each page, and behind them what is wanted after: the values, then what is coming.
    const uint8_t *keys[kChunk / kPage + kComing], *values[kChunk / kPage + kComing];
    const float* scales[kChunk / kPage];
    TokenScales tokens;
    uint8_t* quads;        // of queries
    float* scores;         // kAttendStride from one query to the next
    uint8_t* weight_quads;
    float factors[kMaxAttend];
    int32_t flipped[kMaxAttend], weight_flipped[kFixedTogether];

    explicit FixedCall(const AttendArgs& args, bool some)
        : a(args), base(0), count(args.count), columns(args.cell.head_dim), quads(args.scratch), scores((float*)(quads + kMaxAttend * kFixedStride)),
          weight_quads((uint8_t*)(scores + kMaxAttend * kAttendStride)) {
        const float scale = a.cap > 0.0f ? a.scale * (2.88539008f / a.cap) : a.scale * 1.44269504f;
        int longest = 0, begin = some ? kChunk : 0;
        for (int q = 0; q < a.count; q++) {
            uint8_t* kept = at(q) + kFixedStride - 2 * sizeof(float);  // behind the quads, for the next call
            if (!a.again) {
                factors[q] = fix_query(a.query[q], columns, scale, at(q), flipped + q);
                memcpy(kept, factors + q, sizeof(float)), memcpy(kept + sizeof(float), flipped + q, sizeof(float));
            } else {
                memcpy(factors + q, kept, sizeof(float)), memcpy(flipped + q, kept + sizeof(float), sizeof(float));
            }
            longest = std::max(longest, a.seen[q]);
            if (some) begin = std::min(begin, a.from[q]);
        }
        front = begin / kPage, pages = (longest + kPage - 1) / kPage;
        values[front] = nullptr;  // of no page, there is nothing to ask for
        for (int p = front; p < pages; p++) {
            keys[p] = a.cells + (size_t)a.pages[p] * a.page_stride;
            values[p] = keys[p] + a.cell.values_at();
            scales[p] = (const float*)(keys[p] + a.cell.scales_at());
            prefetch(scales[p]), prefetch(scales[p] + kPage);
        }
        for (int p = front; p < pages; p++) tokens.put(p, scales[p] + kPage);
        reach = pages - front < kComing ? pages - front : kComing;
        for (int i = 0; i < kComing; i++) {
            keys[pages + i] = values[front + i < pages ? front + i : front];
            values[pages + i] = i < a.ahead ? a.coming[i] : values[front];
        }
    }
    uint8_t* at(int q) const { return quads + (size_t)q * kFixedStride; }
    const float* levels() const { return a.cap > 0.0f ? tokens.nothing : tokens.level; }

    // One thing after the other for all queries: each waits for sums over lanes.
    template <bool Some> void weigh_all() {
        const PartShape shape(columns);
        for (int i = 0; i < count; i++) {
            const int q = base + i;
            weigh_fixed<Some>(scores + i * kAttendStride, Some ? a.from[q] : 0, a.seen[q], a.cap, tokens, shape, a.part[q]);
        }
        for (int i = 0; i < count; i++) {
            const int q = base + i;
            weight_flipped[i] = fix_weights(scores + i * kAttendStride, (Some ? a.from[q] : 0) / kPage, (a.seen[q] - 1) / kPage, front, pages,
                                            weight_quads + (size_t)i * kFixedStride);
        }
    }

    // Queries that go together, at most `most` of them: body is given their number, the first one's after `base`, and the pages that they look at.
    template <class Body> void for_tiles(int most, Body&& body) const {
        const int tiles = (count + most - 1) / most, each = count / tiles, more = count % tiles;
        for (int t = 0, first = 0; t < tiles; t++) {
            const int n = each + (t < more);
            int from = kChunk, to = 0;
            for (int q = base + first; q < base + first + n; q++) from = std::min(from, a.from[q]), to = std::max(to, a.seen[q]);
            body(n, first, std::max(front, from / kPage), (to + kPage - 1) / kPage);
            first += n;
        }
    }
};

// Some: with windows, a cap, or both.
template <bool Some> void attend_together(FixedCall& call) {
    const bool several = call.count > kMaxQueries;  // tiles: then cells stay in the first cache while all of them look there
    constexpr int kNear = 4;
    for (int page = call.front, end; page < call.pages; page = end) {
        end = several ? std::min(page + kNear, call.pages) : call.pages;
        call.for_tiles(kMaxQueries, [&](int n, int first, int from, int to) {
            with_count(n, [&](auto n_) {
                constexpr int Q = decltype(n_)::value;
                const int q = call.base + first;
                score_fixed_pages<Q, kFixedVectors<Q>>(call.keys, call.keys + call.reach, std::max(from, page), std::min(to, end),
                                                       {call.at(q), call.factors + q, call.flipped + q}, call.columns, call.scales, call.levels(),
                                                       call.scores + first * kAttendStride);
            });
        });
    }
    call.weigh_all<Some>();
    const int wide = (call.columns + 15) / 16 * 16, step = several ? 16 : wide;
    for (int column = 0; column < wide; column += step)
        call.for_tiles(kMaxQueries, [&](int n, int first, int from, int to) {
            with_count(n, [&](auto n_) {
                constexpr int Q = decltype(n_)::value;
                value_fixed_columns<Q, kFixedVectors<Q>>(call.values, from, to, call.reach, call.columns, column, column + step,
                                                         {call.weight_quads + (size_t)first * kFixedStride, nullptr, call.weight_flipped + first},
                                                         call.a.part + call.base + first);
            });
        });
}

inline void attend_fixed(const AttendArgs& a) {
    const bool some = a.windowed || a.cap > 0.0f;
    FixedCall call(a, some);
    for (call.base = 0; call.base < a.count; call.base += call.count) {
        call.count = std::min(kFixedTogether, a.count - call.base);
        some ? attend_together<true>(call) : attend_together<false>(call);
    }
    merge_parts(a, call.columns);
}

}  // namespace
