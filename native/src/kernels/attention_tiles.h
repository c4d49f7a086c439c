// Attention over cells of fixed numbers with matrix tiles (AMX-INT8): 16 queries against 16 tokens, or columns, 64 numbers at a time. Sums are those
// of attention_fixed.h, to the bit. What comes before and after them is that file's, too.
//
// A page's keys lie as a tile wants them; values are laid out so first, 16 columns of a chunk at a time, once for all queries.
#pragma once

#include "attention_fixed.h"

namespace {

constexpr int kTileSide = 16, kTileDepth = 64;  // rows of a tile, and columns of bytes that are multiplied at once
constexpr int kTiledFrom = 6;                   // queries of a call

// One side of tiles' products: high planes and low ones of tiles, one tile behind the other.
struct TileCells {
    const uint8_t* high;
    size_t row, low, tile;  // bytes to the next row, to the low plane, to the next tile
};

// sums[0] = high . high, sums[1] = the rest, of 16 queries. Two of these may be under way, with different T.
#ifdef QUIRE_EMULATE
template <int> inline void tile_products(const uint8_t* queries, const TileCells& cells, int tiles, int32_t (*sums)[256]) {
    for (int i = 0; i < 256; i++) {
        const int8_t* x = (const int8_t*)queries + (size_t)(i / 16) * kFixedStride;
        sums[0][i] = sums[1][i] = 0;
        for (int k = 0; k < tiles * kTileDepth; k++) {
            const int8_t* y = (const int8_t*)cells.high + (size_t)(k / kTileDepth) * cells.tile + (size_t)(k % kTileDepth / 4) * cells.row + 4 * (i % 16) + k % 4;
            sums[0][i] += x[k] * y[0], sums[1][i] += x[k] * y[cells.low] + x[k + kPlaneBytes] * y[0];
        }
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
#define QUIRE_TILE_PRODUCTS(HIGH, REST)                                                                 \
    QUIRE_TILE_CLEAR(HIGH);                                                                             \
    QUIRE_TILE_CLEAR(REST);                                                                             \
    for (int i = 0; i < tiles; i++, queries += kTileDepth, y += cells.tile) {                           \
        QUIRE_TILE_LOAD(4, queries, kFixedStride);                                                      \
        QUIRE_TILE_LOAD(6, y, cells.row);                                                               \
        QUIRE_TILE_DOT(HIGH, 4, 6);                                                                     \
        QUIRE_TILE_LOAD(5, queries + kPlaneBytes, kFixedStride);                                        \
        QUIRE_TILE_DOT(REST, 5, 6);                                                                     \
        QUIRE_TILE_LOAD(7, y + cells.low, cells.row);                                                   \
        QUIRE_TILE_DOT(REST, 4, 7);                                                                     \
    }                                                                                                   \
    QUIRE_TILE_STORE(HIGH, sums[0]);                                                                    \
    QUIRE_TILE_STORE(REST, sums[1])
template <int T> inline void tile_products(const uint8_t* queries, const TileCells& cells, int tiles, int32_t (*sums)[256]) {
    const uint8_t* y = cells.high;
    if constexpr (T) {
        QUIRE_TILE_PRODUCTS(2, 3);
    } else {
        QUIRE_TILE_PRODUCTS(0, 1);
    }
}
#undef QUIRE_TILE_LOAD
#undef QUIRE_TILE_STORE
#undef QUIRE_TILE_DOT
#undef QUIRE_TILE_CLEAR
#undef QUIRE_TILE_PRODUCTS
#endif

// Products of queries with cells, 16 queries at a time. Sums become floats while the next ones are made: before, they have not reached memory.
struct TileRun {
    struct Made {
        alignas(64) int32_t sums[2][256];
        int first, count = 0, at;
    };
    Made made[2];
    int turn = 0;

    // put(at) gives what is done with the totals of one query.
    template <class Put> inline void add(const FixedCall& call, int first, int n, size_t begin, const TileCells& cells, int tiles, int at, Put&& put) {
        Made& now = made[turn];
        if (turn) tile_products<1>(call.at(first) + begin, cells, tiles, now.sums);
        else tile_products<0>(call.at(first) + begin, cells, tiles, now.sums);
        drain(made[turn ^= 1], put);
        now.first = first, now.count = n, now.at = at;
    }
    template <class Put> inline void end(Put&& put) { drain(made[turn ^ 1], put); }

    template <class Put> static inline void drain(Made& m, Put&& put) {
        if (!m.count) return;
        const auto then = put(m.at);
        QUIRE_UNROLL
        for (int r = 0; r < m.count; r++)
            then(m.first + r, wtotal(_mm512_load_si512(m.sums[0] + 16 * r), _mm512_load_si512(m.sums[1] + 16 * r), 0));
        m.count = 0;
    }
};

// 16 queries that go together: the first, their number, and the pages that they look at.
template <class Body> inline void for_sixteen(const FixedCall& call, Body&& body) {
    for (int first = 0; first < call.a.count; first += kTileSide) {
        const int n = std::min(kTileSide, call.a.count - first);
        int from = kChunk, to = 0;
        for (int q = first; q < first + n; q++) from = std::min(from, call.a.from[q]), to = std::max(to, call.a.seen[q]);
        body(first, n, std::max(call.front, from / kPage), (to + kPage - 1) / kPage);
    }
}

inline void score_tiles(const FixedCall& call) {
    TileRun run;
    auto put = [&](int page) {
        return [own = vload(call.scales[page]), to = call.scores + page * kPage, factors = call.factors](int q, W sums) __attribute__((always_inline)) {
            vstore(to + q * kAttendStride, vmul(vwhole(sums, factors[q]), own));
        };
    };
    constexpr size_t kRow = 8 * kPage;  // a quad of both planes
    for (int page = call.front; page < call.pages; page++) {
        for (int line = 0; line < call.columns / 2; line++) prefetch(call.keys[page + call.reach] + 64 * line);
        const TileCells keys{call.keys[page], kRow, kRow / 2, kRow * kTileDepth / 4};
        for_sixteen(call, [&](int first, int n, int from, int to) {
            if (page >= from && page < to) run.add(call, first, n, 0, keys, call.columns / kTileDepth, page, put);
        });
    }
    run.end(put);
}

// 16 columns of the values of all pages, as tiles: 64 tokens after another, a high plane and a low one.
constexpr size_t kValueTile = 2 * kTileSide * 64;
constexpr int kTilePages = kTileDepth / kPage;
inline void lay_out_values(const FixedCall& call, int column, uint8_t* to) {
    const size_t row = 4 * (size_t)call.columns;
    for (int page = call.front; page < call.pages; page++) {
        const uint8_t *from = call.values[page] + 4 * column, *coming = call.values[page + call.reach] + 4 * column;
        const int place = page - call.front;
        uint8_t* high = to + (size_t)(place / kTilePages) * kValueTile + (size_t)(place % kTilePages) * 256;
        for (int quad = 0; quad < 4; quad++, from += 2 * row, coming += 2 * row, high += 64) {
            prefetch(coming), prefetch(coming + row);
            bstore(high, bload(from)), bstore(high + kValueTile / 2, bload(from + row));
        }
    }
    for (int place = call.pages - call.front; place % kTilePages; place++) {  // whatever lies there instead of weights
        uint8_t* high = to + (size_t)(place / kTilePages) * kValueTile + (size_t)(place % kTilePages) * 256;
        for (int quad = 0; quad < 4; quad++, high += 64) bstore(high, iset(0)), bstore(high + kValueTile / 2, iset(0));
    }
}

inline void value_tiles(const FixedCall& call, uint8_t* room) {
    TileRun run;
    auto put = [&](int column) {
        return [column, parts = call.a.part, factors = call.factors](int q, W sums) __attribute__((always_inline)) { vstore(parts[q] + column, vwhole(sums, factors[q])); };
    };
    for (int column = 0; column < call.columns; column += kTileSide) {
        uint8_t* tiles = room + (size_t)(column / kTileSide % 2) * (kChunk / kTileDepth) * kValueTile;
        lay_out_values(call, column, tiles);
        for_sixteen(call, [&](int first, int n, int from, int to) {
            const int before = (from - call.front) / kTilePages, count = (to - call.front + kTilePages - 1) / kTilePages - before;
            const TileCells values{tiles + (size_t)before * kValueTile, 64, kValueTile / 2, kValueTile};
            run.add(call, first, n, (size_t)(call.front * kPage + before * kTileDepth), values, count, column, put);
        });
    }
    run.end(put);
}

inline bool can_tile(const AttendArgs& a) { return a.count >= kTiledFrom && a.cell.head_dim % kTileDepth == 0; }

template <bool Some> void attend_tiled(const AttendArgs& a) {
    FixedCall call(a, Some);
    {
        const TileShape shape;
        score_tiles(call);
    }
    call.weigh_all<Some>();
    const TileShape shape;
    value_tiles(call, (uint8_t*)(call.scores + kMaxAttend * kAttendStride));
}

}  // namespace
