// Int8 products of two rows and more on NEON, in place of gemm.h's and linear.h's: the same sums in the same order. Rows are taken eight
// at a time over some tiles of a block, whose sums wait in memory as [8 lanes][slice][lane][4] until the last tiles have been added.
//
// A few rows read the packed codes: storing a register takes a vector pipe, so that unpacking into memory pays only where many rows use
// it. They go over a block after the other. Many rows have a block's codes unpacked in the first cache (those of two where a bias has groups of
// 16), and pass over them; bytes stay where they are. In between, the integer pipes, which have nothing else to do, unpack what comes next meanwhile.
#pragma once

#include <optional>
#include <utility>

#include "neon_slices.h"

namespace {

constexpr int kMeanwhileRows = 64;       // up to so many, unpacking is worth hiding: that takes one block at a time
constexpr int kShareTiles = 3 * kSuper;  // that rows pass over at a time where the first cache has to hold biases, or more than one block's bytes
constexpr int kSums = 8 * 32 * 16;       // floats: 8 blocks of 32 rows, 2 of 128
static_assert(kPair == 2 && kSums >= kPair * kMaxTall * 16, "every call has room for two blocks");

// Whether eight rows have a loop of their own over unpacked codes, and over packed ones (which asks for what comes next).
#ifdef QUIRE_NEON_DOT
constexpr bool kByName = true;
#else
constexpr bool kByName = false;
#endif
template <int BITS, int GROUP, bool BIAS>
constexpr bool kPackedByName = kByName && (GROUP == 32 ? BITS == 4 || (BITS == 8 && !BIAS) : BITS == 6 && !BIAS);

// Some tiles of a block.
template <int BITS, int GROUP, bool BIAS> struct BlockTiles {
    using Of = Coded<BITS, BIAS>;
    static constexpr bool kInPlace = BITS == 8 && kPackedByName<BITS, GROUP, BIAS>;  // unpacked codes would be the same
    static constexpr int kUnpackedTimes = unpacked_times<BITS, BIAS>();
    static constexpr bool kMeanwhile = kByName && BITS == 4 && GROUP == 32 && !BIAS;  // codes can be unpacked while rows pass over others
    static constexpr int kPieces = 16;                                                // in which a tile is unpacked then
    const Matrix& w;
    const uint8_t* tile = nullptr;  // the first one
    int tiles = 0;
    const uint8_t* then = nullptr;  // the first one after these, if they are to be unpacked, `then_tiles` of them; so many `pieces` are
    int then_tiles = 0, pieces = 0;
    Factors factors;
    alignas(64) uint8_t sides[1 + kMeanwhile][kChunkTiles][512];  // [tile][slice][quad]
    uint8_t (*codes)[512] = sides[0], (*spare)[512] = sides[kMeanwhile];  // of these tiles, and of those to come

    explicit BlockTiles(const Matrix& weight) : w(weight) {}  // clears nothing

    void begin(int b, int t0, int count) {
        tile = w.block(b) + (size_t)t0 * w.code_step;
        tiles = count;
    }

    // For eight rows at a time, from memory.
    void unpack(int b, int t0) {
        if (kInPlace && half_factors(w)) return;
        int t = 0;
        if (then == tile && pieces == kPieces) std::swap(codes, spare), t = then_tiles;
        const uint8_t* from = tile + w.code_step * (size_t)t;
        const size_t step = w.code_step;
        const int offset = w.offset;
        for (; t < tiles && !kInPlace; t++, from += step) unpack_slices<BITS, BIAS>(from, offset, codes[t]);
        then = nullptr;
        factors.template fill<GROUP, BIAS, kUnpackedTimes, kUnpackedTimes>(w, b, t0, tiles);
    }

    // What comes after these tiles is unpacked meanwhile, as far as there are as many, two by two.
    void expect(int b, int t0, int count) {
        then_tiles = (count < tiles ? count : tiles) / 2 * 2;
        then = then_tiles ? w.block(b) + (size_t)t0 * w.code_step : nullptr;
        pieces = 0;
    }

    // As many lanes as `place` has rows against what is unpacked.
    void unpacked(int b, int t0, const Lanes& x, Coming& coming, const Place& place) {
        if constexpr (kInPlace) {
            if (place.rows <= 4 && half_factors(w)) factors.template fill<GROUP, BIAS, Of::times(0), Of::times(1)>(w, b, t0, tiles);
            return packed(b, t0, x, coming, place);
        }
#ifdef QUIRE_NEON_DOT
        if constexpr (kMeanwhile)
            if (place.rows > 4 && then && pieces < kPieces)
                return by_name<0, false, true>(codes[0], 128, (const uint8_t*)factors.scale, (const uint8_t*)factors.bias, x, coming, place);
        if (place.rows > 4)
            return by_name<0, false>(codes[0], 128, (const uint8_t*)factors.scale, (const uint8_t*)factors.bias, x, coming, place);
#endif
        (void)coming;
        some(x, place, [&](int t, int slice, auto, C(&c)[8]) __attribute__((always_inline)) {
            for (int q = 0; q < 8; q++) c[q] = cload(codes[t] + 128 * slice + 16 * q);
        });
    }

    // The same straight from the packed codes.
    void packed(int b, int t0, const Lanes& x, Coming& coming, const Place& place) {
#ifdef QUIRE_NEON_DOT
        if constexpr (kPackedByName<BITS, GROUP, BIAS>)
            if (place.rows > 4) {
                if constexpr (GROUP == 32)
                    if (half_factors(w)) {
                        const uint8_t* factor = w.block(b) + (size_t)t0 * w.factor_step;
                        return by_name<BITS, true>(tile, 16, factor + w.scale_at, factor + w.bias_at, x, coming, place);
                    }
                return by_name<BITS, false>(tile, 16, (const uint8_t*)factors.scale, (const uint8_t*)factors.bias, x, coming, place);
            }
#endif
        (void)b, (void)t0, (void)coming;
        some(x, place, [&](int t, int slice, auto half, C(&c)[8]) __attribute__((always_inline)) {
            slice_codes<BITS, BIAS, decltype(half)::value>(tile + w.code_step * (size_t)t, slice, w.offset, c);
        });
    }

    // Whether `packed` reads factors for so many rows.
    bool reads_factors(int rows) const {
        const bool by_name = kPackedByName<BITS, GROUP, BIAS> && GROUP == 32 && half_factors(w);
        return !by_name || (rows % 8 && rows % 8 <= 4);
    }

  private:
#ifdef QUIRE_NEON_DOT
    // Slices lie `apart`. UNPACKS: a piece of what comes next with each.
    template <int PACKED, bool HALVES, bool UNPACKS = false>
    void by_name(const uint8_t* from, size_t apart, const uint8_t* scale, const uint8_t* bias, const Lanes& x, Coming& coming, const Place& place) {
        constexpr int kEach = PACKED == 4 ? 2 : 4;
        constexpr size_t kFactors = HALVES ? 8 : 16;  // bytes for a slice
        if constexpr (UNPACKS)
            for (SliceAsks& asks : coming.slice) {
                // A quad of slices 0 and 2, or 1 and 3.
                asks.packed = then + 16 * (size_t)pieces;
                asks.unpacked = spare[0] + 128 * (size_t)(pieces % 2) + 16 * (size_t)(pieces / 2);
                pieces++;
            }
        SliceArgs a;
        a.codes = from, a.scale = scale, a.bias = bias, a.code_step = w.code_step;
        a.x = x.codes, a.sx = x.sx, a.sxs = x.sxs, a.excess = x.excess, a.start = x.start[0], a.step = 4 * x.step[0];
        a.tiles = tiles, a.slices = kEach, a.asks = coming.slice, a.beside_step = coming.beside_step;
        a.codes_back = (long)apart - tiles * (PACKED ? (long)w.code_step : 512);
        a.factors_back = (long)kFactors - tiles * (HALVES ? (long)w.code_step : 128);
        place.ends(0, a);
        each<4 / kEach>([&](auto half) __attribute__((always_inline)) {
            if constexpr (half) a.pass(kFactors, x.start[half], 4 * x.step[half]);
            if constexpr (UNPACKS) {
                if (__builtin_expect(then_tiles < tiles, 0)) return in_parts(a, apart, place);
                slice_loop<0, 0, GROUP, BIAS, false, true>(a);
            } else slice_loop<PACKED, half, GROUP, BIAS, HALVES>(a);
        });
        place.finish();
    }

    // Where less is to be unpacked than is passed over.
    void in_parts(const SliceArgs& all, size_t apart, const Place& place) {
        for (int slice = 0; slice < 4; slice++) {
            SliceArgs a = all;
            a.codes += apart * (size_t)slice, a.scale += 16 * slice, a.asks += slice, a.slices = 1;
            SliceArgs rest = a;
            a.tiles = then_tiles;
            place.ends(slice, a);
            a.leave = place.acc + 32 * slice, a.leave_lane = 16, a.residual = nullptr;
            slice_loop<0, 0, GROUP, BIAS, false, true>(a);
            rest.move(then_tiles);
            place.ends(slice, rest);
            rest.take = a.leave;
            slice_loop<0, 0, GROUP, BIAS, false>(rest);
        }
    }
#endif

    template <class Codes> void some(const Lanes& x, const Place& place, const Codes& take) {
        if (place.rows > 4) lanes<8>(x, place, take);
        else if (place.rows > 2) lanes<4>(x, place, take);
        else lanes<2>(x, place, take);
    }

    template <int R, class Codes> void lanes(const Lanes& x, const Place& place, const Codes& take) {
        each<Of::kHalves>([&](auto half) __attribute__((always_inline)) {
            constexpr int kEach = 4 / Of::kHalves;
            for (int slice = kEach * half; slice < kEach * (half + 1); slice++) {
                V a[R];
                place.take(slice, a);
                for (int t = 0; t < tiles; t++) {
                    C c[8];
                    take(t, slice, half, c);
                    slice_rows<R, GROUP, BIAS>(c, factors.scale[t][0] + 4 * slice, factors.bias[t][0] + 4 * slice, x, t, x.start[half], x.step[half], a);
                }
                place.leave(slice, a);
            }
        });
    }
};

template <int BITS, int GROUP, bool BIAS> struct Rows {
    using Of = Coded<BITS, BIAS>;
    const Matrix& w;
    const uint8_t* x;
    const QuantShape& s;
    const int m;
    alignas(64) float acc[kSums];

    Rows(const Matrix& weight, const uint8_t* panels, const QuantShape& shape, int rows) : w(weight), x(panels), s(shape), m(rows) {}

    int tall() const { return (m + 7) / 8 * 8; }
    Place place(int block, int lane, int t0, int next, int column, const Epilogue& e) {
        return {acc + 16 * (block * tall() + lane), t0 == 0, next ? nullptr : &e, lane, m - lane < 8 ? m - lane : 8, column};
    }

    // What a panel brings to tiles [t0, t0 + tiles), with `sums` filled where they are needed.
    Lanes panel(int p, int t0, int tiles, const int (&shift)[2], PanelSums& sums) const {
        const uint8_t* from = x + (size_t)p * s.bytes;
        Lanes lanes(from, s, t0);
        constexpr bool kOwnSums = BIAS && GROUP == 16;
        if (kOwnSums || shift[0] || shift[1]) {
            sums.fill<GROUP, BIAS>(from, s, t0, tiles, m - 16 * p < 16 ? (m - 16 * p + 7) / 8 * 8 : 16, shift);
            lanes.take<kOwnSums>(sums, shift);
        }
        return lanes;
    }

    // Tiles of a chunk: of even size, and whole super-blocks, whose factors share a scale.
    int chunk(int most) const {
        const int chunks = (w.tiles + most - 1) / most;
        return ((w.tiles + chunks - 1) / chunks + kSuper - 1) / kSuper * kSuper;
    }

    // The same, of one size where that is possible: what is unpacked meanwhile is as much as what is passed over.
    int even_chunk() const {
        for (int n = kShareTiles; 2 * n > kShareTiles; n--)
            if (w.tiles % n == 0 && (n % kSuper == 0 || !byte_factors(w))) return n;
        return chunk(kShareTiles);
    }

    void few(int b0, int b1, const Epilogue& e) {
        const int together = kSums / (16 * tall()) < 8 ? kSums / (16 * tall()) : 8;  // blocks that share what is made of the rows
        const int most = chunk(kShareTiles), shift[2] = {Of::shift(0, w.offset), Of::kHalves == 2 ? Of::shift(1, w.offset) : 0};
        BlockTiles<BITS, GROUP, BIAS> block(w);
        PanelSums panel_sums[2];
        std::optional<Lanes> first, second;
        for (int b = b0; b < b1; b += together) {
            const int blocks = b1 - b < together ? b1 - b : together;
            for (int t0 = 0; t0 < w.tiles; t0 += most) {
                const int tiles = w.tiles - t0 < most ? w.tiles - t0 : most;
                if (!first || most < w.tiles) {  // one chunk: the same for all blocks
                    first = panel(0, t0, tiles, shift, panel_sums[0]);
                    if (m > 16) second = panel(1, t0, tiles, shift, panel_sums[1]);
                }
                for (int i = 0; i < blocks; i++) {
                    const int next = t0 + most < w.tiles ? t0 + most : 0, from = i + 1 < blocks ? t0 : next;
                    const int at = i + 1 < blocks ? b + i + 1 : next ? b : b + together;
                    block.begin(b + i, t0, tiles);
                    if (!next) ask_results(e, 0, m, 16 * (b + i - b0));
                    const uint8_t* coming = at < b1 ? w.block(at) : e.then;
                    const uint8_t* wanted = coming ? coming + (size_t)from * w.code_step : block.tile;
                    if (at < b1) ask_supers(w, at, from);
                    if (!kPackedByName<BITS, GROUP, BIAS> || m <= 4) ask_ahead(wanted, (size_t)most * w.code_step);
                    if (block.reads_factors(m)) block.factors.template fill<GROUP, BIAS, Of::times(0), Of::times(1)>(w, b + i, t0, tiles);
                    Coming then(wanted, w.code_step / 4, tiles, {x, x, x, x}, 0);
                    for (int lane = 0; lane < m; lane += 8)
                        block.packed(b + i, t0, (lane < 16 ? first : second)->from(lane % 16), then, place(i, lane, t0, next, 16 * (b + i - b0), e));
                }
            }
        }
    }

    void many(int b0, int b1, const Epilogue& e) {
        using Tiles = BlockTiles<BITS, GROUP, BIAS>;
        const bool meanwhile = Tiles::kMeanwhile && m <= kMeanwhileRows;
        const int pair = meanwhile || !BIAS || GROUP == 32 ? 1 : kPair;  // or what a panel brings would be made for each block
        const int most = meanwhile ? even_chunk() : chunk(pair == 1 && !BIAS ? kChunkTiles : kShareTiles);
        const int by = Tiles::kUnpackedTimes * (unpacked_less<BITS, BIAS>(w.offset) - w.offset), shift[2] = {by, by};
        Tiles block[kPair] = {Tiles(w), Tiles(w)};
        PanelSums panel_sums;
        for (int b = b0; b < b1; b += pair) {
            const int blocks = b1 - b < pair ? b1 - b : pair;
            for (int t0 = 0; t0 < w.tiles; t0 += most) {
                const int tiles = w.tiles - t0 < most ? w.tiles - t0 : most, next = t0 + tiles < w.tiles ? t0 + tiles : 0;
                for (int i = 0; i < blocks; i++) block[i].begin(b + i, t0, tiles), block[i].unpack(b + i, t0);
                const int after = next ? b : b + pair, passes = tall() / 8;
                // Codes are asked for before they are read: those that come next, or, where these are read already, those after them.
                const int from = !meanwhile ? next : next + most < w.tiles ? next + most : 0, wanted = meanwhile && !from ? after + pair : after;
                for (int i = 0; i < blocks; i++) {
                    if (after + i < w.blocks) ask_supers(w, after + i, next);
                    if (meanwhile && after + i < b1) block[i].expect(after + i, next, w.tiles - next < most ? w.tiles - next : most);
                }
                for (int pass = 0, p = 0; p < (m + 15) / 16; p++) {
                    const Lanes lanes = panel(p, t0, tiles, shift, panel_sums);
                    for (int lane = 16 * p; lane < m && lane < 16 * p + 16; lane += 8, pass++) {
                        if (!next) ask_results(e, lane, lane + 8 < m ? lane + 8 : m, 16 * (b - b0));
                        const int then = pass + 1;  // the next eight lanes, or the first ones over what comes next
                        const Lanes lanes_then = then < passes ? Lanes(x + (size_t)(then / 2) * s.bytes, s, t0).from(then % 2 * 8) : Lanes(x, s, next);
                        for (int i = 0; i < blocks; i++) {
                            Coming asks = coming(wanted + i < w.blocks ? wanted + i : b + i, from, tiles, pass, passes, lanes_then, i, pair == 1);
                            block[i].unpacked(b + i, t0, lanes.from(lane % 16), asks, place(i, lane, t0, next, 16 * (b + i - b0), e));
                        }
                    }
                }
            }
        }
    }

    // While lanes pass over an unpacked block: their share of the tiles that the block in its place will have, and the next lanes' codes,
    // or what they have beside them. The more passes there are, the fewer slices it takes to ask for a tile's codes: the others ask for that, too.
    Coming coming(int b, int t0, int tiles, int pass, int passes, const Lanes& then, int block, bool alone) const {
        const uint8_t *codes = (const uint8_t*)then.codes, *excess = (const uint8_t*)then.excess, *sx = (const uint8_t*)then.sx;
        const size_t slices = !alone || passes < 4 ? 4 : passes < 8 ? 2 : 1, step = (w.code_step + slices * (size_t)passes - 1) / (slices * (size_t)passes);
        const uint8_t* weights = w.block(b) + (size_t)t0 * w.code_step + step * slices * (size_t)(pass * tiles);
        if (block) return {weights, step, tiles, {excess, excess + 64, sx, sx + 64}, 256};
        Coming found(weights, step, tiles, {codes, codes + 64, codes + 128, codes + 192}, 512);
        const uint8_t* const beside[3] = {excess, excess + 64, sx};
        for (size_t i = slices; i < 4; i++) found.slice[i].ahead = beside[i - slices], found.slice[i].ahead_step = i - slices < 2 ? 256 : 64;
        return found;
    }
};

// Rows from which unpacking pays: where eight have no loop over packed codes, for them.
template <int BITS, int GROUP, bool BIAS> constexpr int kMany = kPackedByName<BITS, GROUP, BIAS> ? 25 : kByName ? 5 : 17;

template <int BITS, int GROUP, bool BIAS>
void affine_rows(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, int m, const Epilogue& e) {
    Rows<BITS, GROUP, BIAS> rows(w, x, s, m);
    if (m < kMany<BITS, GROUP, BIAS>) rows.few(b0, b1, e);
    else rows.many(b0, b1, e);
}

}  // namespace
