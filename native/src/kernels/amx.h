// Matrix tiles (AMX-INT8): 16 rows of x against 16 columns, one group of 32 columns of k at a time, because each
// group has its own scales. The tile unit makes the integer sums; AVX-512 scales and adds them, two groups behind, so that
// the two overlap. Scaling is what takes the time: beside tile instructions one of the two 512-bit multipliers is off. Exact
// integers: the same bits as every other kernel set.
//
// Written in assembly: the compiler's intrinsics do not tell it which memory they read.
#pragma once

namespace {

constexpr bool kTiles = true;
constexpr int kTilesFrom = 17;  // rows of a call: up to one panel, multiplying straight from the packed codes is faster

// Registers 0, 1: sums, 16 x 16 int32. 2, 3: x and codes of a group.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 32, 64};
    uint8_t rows[16] = {16, 16, 16, 8};
};

#ifdef QUIRE_EMULATE
struct TileScope {
    TileScope() {}
};
template <int> inline void tile_group(const int8_t* x, const uint8_t* codes, int32_t* buffer) { emulated_tile(x, codes, buffer); }
#else
// Tiles are configured while this lives; releasing them keeps context switches cheap.
struct TileScope {
    TileScope() {
        static constexpr TileShapes shapes;
        asm volatile("ldtilecfg %0" ::"m"(shapes));
    }
    ~TileScope() { asm volatile("tilerelease" ::: "memory"); }
};

// sums = x . codes over one group, stored in buffer.
#define QUIRE_TILE(SUMS)                                                       \
    asm volatile("tilezero %%tmm" #SUMS                                        \
                 "\n\ttileloadd (%0,%1,1), %%tmm2"                             \
                 "\n\ttileloadd (%2,%3,1), %%tmm3"                             \
                 "\n\ttdpbssd %%tmm3, %%tmm2, %%tmm" #SUMS                     \
                 "\n\ttilestored %%tmm" #SUMS ", (%4,%3,1)" ::"r"(x),          \
                 "r"((size_t)32), "r"(codes), "r"((size_t)64), "r"(buffer)     \
                 : "memory")

template <int SUMS> inline void tile_group(const int8_t* x, const uint8_t* codes, int32_t* buffer) {
    if constexpr (SUMS == 0) QUIRE_TILE(0);
    else QUIRE_TILE(1);
}
#undef QUIRE_TILE
#endif

// The scales of a panel's rows and their products with sums: where they are, or in its extras.
struct TileScales {
    const float *sx, *sxs;
    size_t step;  // per tile

    TileScales(const uint8_t* panel, const QuantShape& s, int t0)
        : sx((const float*)(panel + s.sx) + 16 * (size_t)t0), sxs((const float*)(panel + s.sxs) + 16 * (size_t)t0), step(16) {}
    explicit TileScales(const Extra<32>* extra) : sx(extra->sx), sxs(extra->part[0].sxs), step(sizeof *extra / sizeof(float)) {}
};

// The first R lanes of a panel against one unpacked block. The tile unit always does all 16; what it makes of lanes past the
// last row is scaled by the zeros that the extras have for them, or not looked at; nothing of it is stored.
template <int R, bool BIAS>
inline void tile_block(const Chunk& chunk, int tiles, const Lanes<32>& x, TileScales scales, bool shifted, int rows, const Sums& to, int column,
                       Ahead& ahead) {
    alignas(64) int32_t sums[4][256];  // a tile's store must land before it can be read: drain two groups later
    F a[R];
    QUIRE_UNROLL16
    for (int r = 0; r < R; r++) a[r] = sums_before(to, r, column);
    auto drain = [&](int g, int32_t* d) __attribute__((always_inline)) {
        const float *sx = scales.sx + scales.step * (size_t)g, *sxs = scales.sxs + scales.step * (size_t)g;
        if (shifted)  // only for 8-bit codes with an offset that is not 128
            for (int r = 0; r < R; r++) {
                const I more = iset((int32_t)x.extra[g].part[0].start[r]);
                _mm512_store_si512(d + 16 * r, iadd(_mm512_load_si512(d + 16 * r), more));
            }
        const F sw = fload(chunk.scale[g][0]);
        F bw = sw;
        if constexpr (BIAS) bw = fload(chunk.bias[g][0]);
        QUIRE_UNROLL16
        for (int r = 0; r < R; r++) {
            a[r] = ffma(sw, fmul(fset(sx[r]), ffrom(_mm512_load_si512(d + 16 * r))), a[r]);
            if constexpr (BIAS) a[r] = ffma(bw, fset(sxs[r]), a[r]);
        }
    };
    auto codes = [&](int g) { return chunk.codes[g]; };
    auto lanes = [&](int g) { return x.codes + 512 * (size_t)g; };
    int g = 0;
    for (; g + 4 <= tiles; g += 4) {
        ahead.ask();
        tile_group<0>(lanes(g), codes(g), sums[0]);
        if (g) drain(g - 2, sums[2]);
        tile_group<1>(lanes(g + 1), codes(g + 1), sums[1]);
        if (g) drain(g - 1, sums[3]);
        tile_group<0>(lanes(g + 2), codes(g + 2), sums[2]);
        drain(g, sums[0]);
        tile_group<1>(lanes(g + 3), codes(g + 3), sums[3]);
        drain(g + 1, sums[1]);
    }
    if (g) drain(g - 2, sums[2]), drain(g - 1, sums[3]);
    for (; g < tiles; g++) {
        tile_group<0>(lanes(g), codes(g), sums[0]);
        drain(g, sums[0]);
    }
    QUIRE_UNROLL16
    for (int r = 0; r < R; r++)
        if (r < rows) sums_after(to, r, column, a[r]);
}

// `rows` rows of a panel against `blocks` unpacked blocks.
template <bool BIAS>
void tile_panel(const Chunk* chunk, int blocks, int tiles, const Lanes<32>& x, TileScales scales, int rows, bool shifted, const Sums& to,
                Ahead& ahead) {
    auto pass = [&](auto lanes) __attribute__((always_inline)) {
        for (int i = 0; i < blocks; i++) tile_block<decltype(lanes)::value, BIAS>(chunk[i], tiles, x, scales, shifted, rows, to, 16 * i, ahead);
    };
    if (rows > 12) pass(std::integral_constant<int, 16>{});
    else if (rows > 8) pass(std::integral_constant<int, 12>{});
    else pass(std::integral_constant<int, 8>{});
}

}  // namespace
