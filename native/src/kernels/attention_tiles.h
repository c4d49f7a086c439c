// Attention over cells of fixed numbers with matrix tiles (AMX-INT8): 16 queries against 16 tokens, or columns, 64 numbers at a time. Sums are those
// of attention_fixed.h, to the bit, and so is what becomes of them.
//
// A page's keys lie as a tile wants them; values are laid out so first, all columns of a chunk, once for all queries. Then 32 queries at a time go
// through scores, weights and values, while what they make of one is still in the first cache. Sums of one product become floats while the tile
// unit makes the next ones.
#pragma once

#include "attention_fixed.h"

namespace {

constexpr int kTileSide = 16, kTileDepth = 64;  // rows of a tile, and columns of bytes that are multiplied at once
constexpr int kTiledFrom = 6;                   // queries of a call
constexpr int kTwoSides = 2 * kTileSide;        // queries that share a load of keys or values
constexpr int kTilePages = kTileDepth / kPage;

// One side of tiles' products: high planes and low ones of tiles, one tile behind the other. Of queries or weights rows are kFixedStride apart.
struct TileRows {
    const uint8_t* high;
    size_t low, tile;  // bytes to the low plane, to the next tile
};
struct TileCells {
    const uint8_t* high;
    size_t row, low, tile;
};
struct TileSums {  // of kTwoSides rows: high . high, and the rest
    alignas(64) int32_t high[kTwoSides * 16], rest[kTwoSides * 16];
};

// sums of 16 G rows. step(i, k) for k from 0 to 3 is done beside the products of tile i: what needs the other units meanwhile.
#ifdef QUIRE_EMULATE
template <int G, class Step> inline void tile_products(const TileRows& rows, const TileCells& cells, int tiles, TileSums& sums, Step&& step) {
    for (int i = 0; i < tiles; i++)
        for (int k = 0; k < 4; k++) step(i, k);
    for (int i = 0; i < G * 256; i++) {
        int32_t high = 0, rest = 0;
        for (int k = 0; k < tiles * kTileDepth; k++) {
            const int8_t* x = (const int8_t*)rows.high + (size_t)(i / 16) * kFixedStride + (size_t)(k / kTileDepth) * rows.tile + k % kTileDepth;
            const int8_t* y = (const int8_t*)cells.high + (size_t)(k / kTileDepth) * cells.tile + (size_t)(k % kTileDepth / 4) * cells.row + 4 * (i % 16) + k % 4;
            high += x[0] * y[0], rest += x[0] * y[cells.low] + x[rows.low] * y[0];
        }
        sums.high[i] = high, sums.rest[i] = rest;
    }
}
struct TileShape {
    TileShape() {}
};
#else
struct TileShape {
    struct alignas(64) Config {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    TileShape() {
        static constexpr Config config;
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    ~TileShape() { asm volatile("tilerelease" ::: "memory"); }
};
#define QUIRE_TILE_LOAD(T, FROM, ROW) asm volatile("tileloadd (%0,%1,1), %%tmm" #T ::"r"(FROM), "r"(ROW) : "memory")
#define QUIRE_TILE_STORE(T, TO) asm volatile("tilestored %%tmm" #T ", (%0,%1,1)" ::"r"(TO), "r"((size_t)64) : "memory")
#define QUIRE_TILE_DOT(SUM, X, Y) asm volatile("tdpbssd %%tmm" #Y ", %%tmm" #X ", %%tmm" #SUM ::)
#define QUIRE_TILE_CLEAR(T) asm volatile("tilezero %%tmm" #T ::)
template <int G, class Step>
inline __attribute__((always_inline)) void tile_products(const TileRows& rows, const TileCells& cells, int tiles, TileSums& sums, Step&& step) {
    const uint8_t *x = rows.high, *z = x + kTileSide * kFixedStride, *y = cells.high;
    QUIRE_TILE_CLEAR(0);
    QUIRE_TILE_CLEAR(1);
    if constexpr (G > 1) {
        QUIRE_TILE_CLEAR(2);
        QUIRE_TILE_CLEAR(3);
    }
    for (int i = 0; i < tiles; i++, x += rows.tile, z += rows.tile, y += cells.tile) {
        QUIRE_TILE_LOAD(4, y, cells.row);
        QUIRE_TILE_LOAD(6, x, kFixedStride);
        QUIRE_TILE_DOT(0, 6, 4);
        step(i, 0);
        if constexpr (G > 1) {
            QUIRE_TILE_LOAD(7, z, kFixedStride);
            QUIRE_TILE_DOT(2, 7, 4);
        }
        step(i, 1);
        QUIRE_TILE_LOAD(5, y + cells.low, cells.row);
        QUIRE_TILE_DOT(1, 6, 5);
        if constexpr (G > 1) QUIRE_TILE_DOT(3, 7, 5);
        step(i, 2);
        QUIRE_TILE_LOAD(6, x + rows.low, kFixedStride);
        QUIRE_TILE_DOT(1, 6, 4);
        step(i, 3);
        if constexpr (G > 1) {
            QUIRE_TILE_LOAD(7, z + rows.low, kFixedStride);
            QUIRE_TILE_DOT(3, 7, 4);
        }
    }
    QUIRE_TILE_STORE(0, sums.high);
    QUIRE_TILE_STORE(1, sums.rest);
    if constexpr (G > 1) {
        QUIRE_TILE_STORE(2, sums.high + 256);
        QUIRE_TILE_STORE(3, sums.rest + 256);
    }
}
#undef QUIRE_TILE_LOAD
#undef QUIRE_TILE_STORE
#undef QUIRE_TILE_DOT
#undef QUIRE_TILE_CLEAR
#endif


// Scores of a page's tokens, and the values of 16 columns: what becomes of one row's sums after another, a few of them beside each of the next
// products. All of it is kept by value, and so in registers: tile instructions may read any memory, as far as the compiler knows.
struct ScoreRows {
    const int32_t* from;
    const float* by;
    float* to;
    F own, level;

    inline __attribute__((always_inline)) void put(int r) const {
        const int32_t* sums = from + 16 * r;
        fstore(to + kAttendStride * r, ffma(fmul(ffrom(wtotal(_mm512_load_si512(sums), _mm512_load_si512(sums + kTwoSides * 16), 0)), fset(by[r])), own, level));
    }
};
struct ValueRows {
    const int32_t* from;
    const float *old, *now;
    float *const *sum, *const *part;
    int column;

    inline __attribute__((always_inline)) void put(int r) const {
        const int32_t* sums = from + 16 * r;
        const F own = ffrom(wtotal(_mm512_load_si512(sums), _mm512_load_si512(sums + kTwoSides * 16), 0));
        if (float* into = sum[r]) fstore(into + column, ffma(own, fset(now[r]), fmul(fload(into + column), fset(old[r]))));
        else fstore(part[r] + column, own);
    }
};
// Of `count` rows those of step k of tile i, each step having N; and those that no step had.
template <int N, class Rows> inline __attribute__((always_inline)) void put_some(const Rows& rows, int count, int i, int k) {
    const int first = (4 * i + k) * N;
    if (first + N > count) return;
    QUIRE_UNROLL
    for (int r = 0; r < N; r++) rows.put(first + r);
}
template <int N, class Rows> inline void put_rest(const Rows& rows, int count, int tiles) {
    for (int r = std::min(4 * tiles * N, count / N * N); r < count; r++) rows.put(r);
}

// 64 numbers from 0 to 32639 as 256 high + low: quads of the first page's tokens, of the second one's, and so on.
inline __attribute__((always_inline)) void store_tile_planes(uint8_t* to, const I (&whole)[4]) {
    const I a = _mm512_packs_epi32(whole[0], whole[1]), b = _mm512_packs_epi32(whole[2], whole[3]), half = _mm512_set1_epi16(128), low = _mm512_set1_epi16(255);
    const I high_a = _mm512_srli_epi16(_mm512_add_epi16(a, half), 8), high_b = _mm512_srli_epi16(_mm512_add_epi16(b, half), 8);
    _mm512_storeu_si512((void*)to, _mm512_packus_epi16(high_a, high_b));
    _mm512_storeu_si512((void*)(to + kTileDepth), _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low)));
}

// Scores become weights in place, one row after another, of every token from 0 to a multiple of 64: a quarter of a row in each step.
struct WeighRows {
    const TokenScales* tokens;
    float* scores;
    const int32_t *seen, *end;
    float *high, *total;
    int to, at;  // tokens that some row sees; those of this row that are weights already
    float coming;  // the highest score of the row that is next
    F top, sum;

    inline __attribute__((always_inline)) void step() {
        if (seen == end) return;
        if (at == 0) {
            if (*seen < kChunk) {
                next(part(*tokens, scores, *seen, to, high));
                if (seen < end) coming = highest(scores, *seen);
                return;
            }
            top = fset(*high = coming), sum = fzero();
        }
        block<true>(*tokens, scores, at, kChunk, top, sum);
        if (at == kTileDepth && seen + 1 < end) coming = highest(scores + kAttendStride, seen[1]);  // before anything waits for it
        at = (at + kTileDepth) % kChunk;
        if (at == 0) next(sum);
    }
    inline __attribute__((always_inline)) void next(F all) {
        *total = hsum(all) * kFixedUnit;
        scores += kAttendStride, seen++, high++, total++;
    }
    inline void rest() {
        while (seen < end) step();
    }
    static QUIRE_NOINLINE F part(const TokenScales& tokens, float* s, int seen, int to, float* high) {
        const F top = fset(*high = highest(s, seen));
        F sum = fzero();
        int t = 0;
        for (; t + kTileDepth <= seen; t += kTileDepth) block<true>(tokens, s, t, seen, top, sum);
        for (; t < to; t += kTileDepth) block<false>(tokens, s, t, seen, top, sum);
        return sum;
    }
    static inline float highest(const float* s, int seen) {
        const F lowest = fset(-__builtin_inff());
        F most[4] = {lowest, lowest, lowest, lowest};
        int t = 0;
        for (; t + kTileDepth <= seen; t += kTileDepth)
            QUIRE_UNROLL
            for (int i = 0; i < 4; i++) most[i] = fhigher(fload(s + t + 16 * i), most[i]);
        for (; t < seen; t += kPage) most[0] = fhigher(fkeep(fload(s + t), seen - t, lowest), most[0]);
        return fhighest(fhigher(fhigher(most[0], most[1]), fhigher(most[2], most[3])));
    }
    template <bool Whole> static inline __attribute__((always_inline)) void block(const TokenScales& tokens, float* s, int t, int seen, F top, F& sum) {
        I whole[4];
        QUIRE_UNROLL
        for (int i = 0; i < 4; i++) {
            const int at = t + 16 * i;
            const F power = fexp2_fixed(fsub(fload(s + at), top));
            whole[i] = isub(_mm512_castps_si512(ffma(power, fload(tokens.code + at), fset(kWholes))), iset(0x4b000000));
            if constexpr (Whole) {
                sum = ffma(power, fload(tokens.back + at), sum);
            } else {
                const __mmask16 there = seen > at ? first(seen - at) : (__mmask16)0;
                sum = _mm512_mask3_fmadd_ps(power, fload(tokens.back + at), sum, there);
                whole[i] = _mm512_maskz_mov_epi32(there, whole[i]);
            }
        }
        store_tile_planes((uint8_t*)s + 2 * t, whole);
    }
};

constexpr size_t kValueTile = 2 * kTileSide * kTileDepth;                 // 64 tokens by 16 columns
constexpr size_t kValueColumns = kChunk / kTileDepth * kValueTile + 128;  // 16 columns of a chunk; 128: so that not all lie in the same sets of the cache

// At most kTwoSides queries that go together.
struct TileGroup {
    const FixedCall& call;
    float* scores;  // then weights, in their place: of 64 tokens 64 high bytes and 64 low ones
    int base = 0, count = 0, from = 0, to = 0;  // tokens [from, to) are what any of them sees
    alignas(64) float high[kTwoSides], total[kTwoSides], old[kTwoSides], now[kTwoSides];

    TileGroup(const FixedCall& c, float* room) : call(c), scores(room) {}
    bool two() const { return count > kTileSide; }
    void begin(int b) {
        base = b, count = std::min(kTwoSides, call.count - b), from = kChunk, to = 0;
        for (int q = base; q < base + count; q++) from = std::min(from, call.a.from[q]), to = std::max(to, call.a.seen[q]);
    }

    // This group's part of a page of the next chunk: a context is longer than what the second cache holds.
    void ask(int page) const {
        if (page >= call.a.follow) return;
        const uint8_t* cell = call.a.cells + (size_t)call.a.following[page] * call.a.page_stride;
        const int lines = (int)(call.a.cell.bytes() / 64), last = lines * std::min(base + kTwoSides, call.count) / call.count;
        for (int line = lines * base / call.count; line < last; line++) asm volatile("prefetcht1 %0" ::"m"(cell[64 * line]));
    }

    template <int G, int N> QUIRE_NOINLINE void score() {
        TileSums sums[2];
        const float *levels = call.levels(), *by = call.factors + base;
        constexpr size_t kRow = 8 * kPage;  // a quad of both planes
        const TileRows queries{call.at(base), kPlaneBytes, kTileDepth};
        const int tiles = call.columns / kTileDepth, last = (to - 1) / kPage;
        ScoreRows rows{};
        int count_ = 0;
        for (int page = from / kPage; page <= last; page++, count_ = G * kTileSide) {
            TileSums& made = sums[page % 2];
            tile_products<G>(queries, {call.keys[page], kRow, kRow / 2, kRow * kTileDepth / 4}, tiles, made,
                             [&](int i, int k) __attribute__((always_inline)) { put_some<N>(rows, count_, i, k); });
            put_rest<N>(rows, count_, tiles);
            ask(page);
            rows = {made.high, by, scores + page * kPage, fload(call.scales[page]), fload(levels + page * kPage)};
        }
        put_rest<N>(rows, count_, 0);
    }

    WeighRows weighing() { return {&call.tokens, scores, call.a.seen + base, call.a.seen + base + count, high, total, to, 0, WeighRows::highest(scores, call.a.seen[base]), fzero(), fzero()}; }

    // The same with windows, caps, or both, for all rows.
    void weigh_some() {
        const PartShape shape(call.columns);
        for (int r = 0; r < count; r++) {
            const int q = base + r, begin = from / kTileDepth * kTilePages, end = (to + kTileDepth - 1) / kTileDepth * kTilePages;
            float part[kMaxHeadDim + 16], *s = scores + (size_t)r * kAttendStride;
            weigh_fixed<true>(s, call.a.from[q], call.a.seen[q], call.a.cap, call.tokens, shape, part);
            high[r] = part[shape.high], total[r] = part[shape.total];
            clear_others(s, call.a.from[q] / kPage, (call.a.seen[q] - 1) / kPage, begin, end);
            for (int p = begin; p < end; p += kTilePages) {
                I whole[4];
                for (int i = 0; i < 4; i++) whole[i] = ito(fload(s + (p + i) * kPage));
                store_tile_planes((uint8_t*)(s + p * kPage / 2), whole);
            }
        }
    }

    // As merge() does it, for all at once; what is left are the values.
    void meet() {
        const PartShape shape(call.columns);
        alignas(64) float before[kTwoSides], higher[kTwoSides];
        for (int r = 0; r < count; r++) {
            const float* into = call.a.sum[base + r];
            before[r] = into ? into[shape.high] : high[r];
            higher[r] = high[r] > before[r] ? high[r] : before[r];
        }
        for (int r = 0; r < count; r += 16) {
            fstore(old + r, fexp2(fsub(fload(before + r), fload(higher + r))));
            fstore(now + r, fexp2(fsub(fload(high + r), fload(higher + r))));
        }
        for (int r = 0; r < count; r++) {
            float *into = call.a.sum[base + r], *part = call.a.part[base + r];
            if (into) into[shape.total] = __builtin_fmaf(total[r], now[r], into[shape.total] * old[r]), into[shape.high] = higher[r];
            else part[shape.total] = total[r], part[shape.high] = high[r];
        }
    }

    // Meanwhile rows of another group become weights.
    template <int G> QUIRE_NOINLINE void multiply(const uint8_t* values, WeighRows next) {
        TileSums sums[2];
        const int begin = from / kTileDepth, tiles = (to + kTileDepth - 1) / kTileDepth - begin;
        const TileRows weights{(const uint8_t*)scores + 2 * kTileDepth * begin, kTileDepth, 2 * kTileDepth};
        ValueRows rows{};
        int count_ = 0;
        for (int column = 0; column < call.columns; column += kTileSide, count_ = count) {
            const uint8_t* at = values + (size_t)column / kTileSide * kValueColumns + (size_t)begin * kValueTile;
            TileSums& made = sums[column / kTileSide % 2];
            tile_products<G>(weights, {at, 64, kValueTile / 2, kValueTile}, tiles, made, [&](int i, int k) __attribute__((always_inline)) {
                put_some<2>(rows, count_, i, k);
                next.step();
            });
            put_rest<2>(rows, count_, tiles);
            rows = {made.high, old, now, call.a.sum + base, call.a.part + base, column};
        }
        put_rest<2>(rows, count_, 0);
        next.rest();
    }
};

// Values of a chunk as tiles, the 64 tokens of a tile as weights have them.
inline void lay_out_values(const FixedCall& call, uint8_t* to) {
    const size_t row = 4 * (size_t)call.columns;
    for (int page = call.front; page < call.pages; page++) {
        const uint8_t* from = call.values[page];
        uint8_t* tile = to + (size_t)(page / kTilePages) * kValueTile + (size_t)(page % kTilePages) * 64;
        for (int quad = 0; quad < 4; quad++, from += 2 * row, tile += 4 * 64) {
            uint8_t* at = tile;
            for (size_t column = 0; column < row; column += 64, at += kValueColumns)
                bstore(at, bload(from + column)), bstore(at + kValueTile / 2, bload(from + row + column));
        }
    }
}

inline bool can_tile(const AttendArgs& a) { return a.count >= kTiledFrom && a.cell.head_dim % kTileDepth == 0; }

inline void attend_tiled(const AttendArgs& a) {
    const bool some = a.windowed || a.cap > 0.0f;
    FixedCall call(a, some);
    uint8_t* values = call.weight_quads;
    lay_out_values(call, values);
    const TileShape shape;
    TileGroup groups[2] = {{call, call.scores}, {call, call.scores + kTwoSides * kAttendStride}};
    auto score = [&](TileGroup& g, int base) {
        g.begin(base);
        if (g.two()) call.columns == kTileDepth ? g.score<2, 8>() : g.score<2, 4>();
        else g.score<1, 4>();
        if (some) g.weigh_some();
    };
    score(groups[0], 0);
    if (!some) groups[0].weighing().rest();
    for (int base = 0, turn = 0; base < call.count; base += kTwoSides, turn ^= 1) {
        TileGroup &own = groups[turn], &next = groups[turn ^ 1];
        WeighRows rows{};
        if (base + kTwoSides < call.count) {
            score(next, base + kTwoSides);
            if (!some) rows = next.weighing();
        }
        own.meet();
        own.two() ? own.multiply<2>(values, rows) : own.multiply<1>(values, rows);
    }
}

}  // namespace
