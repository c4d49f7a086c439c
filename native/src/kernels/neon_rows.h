// Int8 products of two rows and more on NEON, in place of gemm.h's and linear.h's: the same sums in the same order. Rows are taken eight
// at a time over some tiles of a block, whose sums wait in memory as [8 lanes][slice][lane][4] until the last tiles have been added.
//
// A few rows read the packed codes: storing a register takes a vector pipe, so that unpacking into memory pays only where many rows use
// it. They go over a block after the other. Many rows have the codes of two blocks unpacked in the first cache, and pass over both; bytes
// stay where they are.
#pragma once

#include "neon.h"

namespace {

constexpr int kChunkTiles = 3 * kSuper;  // that rows pass over at a time
constexpr int kSums = 8 * 32 * 16;       // floats: 8 blocks of 32 rows, 2 of 128
static_assert(kPair == 2 && kSums >= kPair * kMaxTall * 16, "every call has room for two blocks");

struct Factors {
    alignas(64) float scale[kChunkTiles][2][16];
    alignas(64) float bias[kChunkTiles][2][16];

    // Scales are divided by what codes of either half are times.
    template <int GROUP, bool BIAS, int LOW, int HIGH> void fill(const Matrix& w, int b, int t0, int tiles) {
        const uint8_t* block = w.block(b);
        ByteFactors scales, biases;
        auto put = [&](auto own, auto other) __attribute__((always_inline)) {
            for (int t = 0; t < tiles; t++) {
                const size_t at = (size_t)(t0 + t);
                for (int part = 0; part < 32 / GROUP; part++) {
                    F s = own(at, part);
                    each<4>([&](auto n) __attribute__((always_inline)) {
                        constexpr int kTimes = n < 2 ? LOW : HIGH;
                        if constexpr (kTimes != 1) s.v[n] = vmulq_n_f32(s.v[n], 1.0f / kTimes);
                    });
                    fstore(scale[t][part], s);
                    if constexpr (BIAS) fstore(bias[t][part], other(at, part));
                }
            }
        };
        if (half_factors(w))
            return put([&](size_t t, int part) { return half_sixteen(block + w.scale_at + t * w.scale_bytes + 32 * (size_t)part); },
                       [&](size_t t, int part) { return half_sixteen(block + w.bias_at + t * w.scale_bytes + 32 * (size_t)part); });
        if (!byte_factors(w))
            return put([&](size_t t, int part) { return scale_of(w, block, (int)t, part); },
                       [&](size_t t, int part) { return bias_of(w, block, (int)t, part); });
        auto bytes = [&](ByteFactors& f, size_t super_at, size_t from, size_t t, int part) __attribute__((always_inline)) {
            if (t % kSuper == 0 && part == 0) f.begin(block + super_at + 4 * t);
            return f.of(block + from + t * w.scale_bytes + 16 * (size_t)part);
        };
        put([&](size_t t, int part) { return bytes(scales, w.super_at, w.scale_at, t, part); },
            [&](size_t t, int part) { return bytes(biases, w.bias_super_at, w.bias_at, t, part); });
    }
};

inline void ask_ahead(const uint8_t* from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) prefetch(from + at);
}

template <bool BIAS> inline void ask_factors(const Matrix& w, const uint8_t* block, int t0, int tiles) {
    ask_ahead(block + w.scale_at + (size_t)t0 * w.scale_bytes, (size_t)tiles * w.scale_bytes);
    if (BIAS && w.super_at != w.bias_at) ask_ahead(block + w.bias_at + (size_t)t0 * w.scale_bytes, (size_t)tiles * w.scale_bytes);
}

// Results of rows [r0, r1) will be left in this column: their lines, which another core may have, come in the meantime.
inline void ask_results(const Epilogue& e, int r0, int r1, int column) {
    for (int r = r0; r < r1; r++) {
        asm volatile("prfm pstl1keep, %a0" ::"p"(e.out + (size_t)r * e.out_stride + column));
        if (e.residual) prefetch(e.residual + (size_t)r * e.residual_stride + column);
    }
}

// What eight lanes of a panel begin their sums with, where that is the same for all.
struct alignas(64) SumStarts {
    uint32_t of[8][4];
    constexpr SumStarts() : of{} {
        for (auto& lane : of)
            for (uint32_t& bits : lane) bits = sum_bits(1);
    }
};
constexpr SumStarts kSumStarts;

// What the rows of a panel bring to every block beside their codes and scales, over some tiles: made once.
struct PanelSums {
    alignas(64) uint32_t start[2][2 * kChunkTiles][16][4];  // [half][group][lane]: where sums do not begin with kSumStarts
    alignas(64) float sxs[2 * kChunkTiles][16];             // scale * sum, for the bias

    template <int GROUP, bool BIAS> void fill(const uint8_t* panel, const QuantShape& s, int t0, int tiles, int rows, const int (&shift)[2]) {
        const int32_t* sum = (const int32_t*)(panel + s.sum) + 32 * (size_t)t0;
        const float* scale = (const float*)(panel + s.sx) + 16 * (size_t)t0;
        for (int t = 0; t < tiles; t++, sum += 32, scale += 16)
            for (int part = 0; part < 32 / GROUP; part++)
                for (int lane = 0; lane < rows; lane += 4) {
                    const int g = 32 / GROUP * t + part;
                    const int32_t* of = sum + lane;
                    const W total = GROUP == 32 ? vaddq_s32(vld1q_s32(of), vld1q_s32(of + 16)) : vld1q_s32(of + 16 * part);
                    if constexpr (BIAS) vst1q_f32(sxs[g] + lane, vmulq_f32(vld1q_f32(scale + lane), vcvtq_f32_s32(total)));
                    for (int half = 0; half < 2; half++)
                        if (shift[half]) {
                            const uint32x4_t from = vreinterpretq_u32_s32(vmlaq_n_s32(vdupq_n_s32((int32_t)sum_bits(1)), total, shift[half]));
                            each<4>([&](auto i) __attribute__((always_inline)) { vst1q_u32(start[half][g][lane + i], vdupq_laneq_u32(from, i)); });
                        }
                }
    }
};

// The lanes of a panel that a product reads, from a chunk's first tile on.
struct Lanes {
    const int8_t* codes;      // + 512 per tile
    const float *sx, *excess;  // + 16, + 64 per tile
    const float* sxs = nullptr;  // + 16 per group
    const uint32_t* start[2] = {kSumStarts.of[0], kSumStarts.of[0]};  // + step per group; of either half
    size_t step[2] = {};

    Lanes(const uint8_t* panel, const QuantShape& s, int t0)
        : codes((const int8_t*)panel + 512 * (size_t)t0), sx((const float*)(panel + s.sx) + 16 * (size_t)t0),
          excess((const float*)(panel + s.excess) + 64 * (size_t)t0) {}

    void take(const PanelSums& sums, const int (&shift)[2]) {
        sxs = sums.sxs[0];
        for (int half = 0; half < 2; half++)
            if (shift[half]) start[half] = sums.start[half][0][0], step[half] = 64;
    }

    Lanes from(int lane) const {
        Lanes x = *this;
        x.codes += 32 * lane, x.sx += lane, x.excess += 4 * lane;
        if (sxs) x.sxs += lane;
        for (int half = 0; half < 2; half++)
            if (step[half]) x.start[half] += 4 * lane;
        return x;
    }
};

// Whether eight rows have a loop of their own over unpacked codes, and over packed ones (which asks for what comes next).
#ifdef QUIRE_NEON_DOT
constexpr bool kByName = true;
#else
constexpr bool kByName = false;
#endif
template <int BITS, int GROUP, bool BIAS>
constexpr bool kPackedByName = kByName && (GROUP == 32 ? BITS == 4 || (BITS == 8 && !BIAS) : BITS == 6 && !BIAS);

// R rows of x against a slice of tile t. Scales and biases are of this slice, 16 floats from one group to the next.
template <int R, int GROUP, bool BIAS>
QUIRE_INLINE void slice_rows(const C (&c)[8], const float* scale, const float* bias, const Lanes& x, int t, const uint32_t* start, size_t step, V (&acc)[R]) {
    constexpr int kStep = R < 4 ? R : 4, kParts = 32 / GROUP;
    const int8_t* codes = x.codes + 512 * (size_t)t;
    const float *sx = x.sx + 16 * t, *excess = x.excess + 64 * t;
    auto some = [](const float* p) __attribute__((always_inline)) {
        if constexpr (kStep == 4) return vld1q_f32(p);
        return vcombine_f32(vld1_f32(p), vdup_n_f32(0));
    };
    each<R / kStep>([&](auto of) __attribute__((always_inline)) {
        constexpr int r0 = decltype(of)::value * kStep;
        const V own = some(sx + r0);
        each<kParts>([&](auto part) __attribute__((always_inline)) {
            const uint32_t* from = start + step * (size_t)(kParts * t + part);
            W d[kStep];
            each<kStep>([&](auto r) __attribute__((always_inline)) { d[r] = load_again(from + 4 * (r0 + r)); });
            each<GROUP / 16>([&](auto h) __attribute__((always_inline)) {
                X q[kStep];
                each<kStep>([&](auto r) __attribute__((always_inline)) { q[r] = xload(codes + 32 * (r0 + r) + GROUP * part + 16 * h); });
                each<4>([&](auto j) __attribute__((always_inline)) {
                    each<kStep>([&](auto r) __attribute__((always_inline)) {
                        d[r] = wdot<j>(d[r], c[GROUP / 4 * part + 4 * h + j], q[r]);
                    });
                });
            });
            const V sw = vload(scale + 16 * part);
            V bw = sw, times = own;
            if constexpr (BIAS) bw = vload(bias + 16 * part), times = some(x.sxs + 16 * (kParts * t + part) + r0);
            each<kStep>([&](auto r) __attribute__((always_inline)) {
                const V product = vfmaq_laneq_f32(load_again(excess + 4 * (r0 + r)), vreinterpretq_f32_s32(d[r]), own, r);
                acc[r0 + r] = vfmaq_f32(acc[r0 + r], sw, product);
                if constexpr (BIAS) acc[r0 + r] = vfmaq_laneq_f32(acc[r0 + r], bw, times, r);
            });
        });
    });
}

// Where the sums of some rows (at most eight) and a block are between two chunks, and where they go after the last.
struct Place {
    float* acc;  // [slice][lane][4]
    bool fresh;  // they begin with nothing
    const Epilogue* last;  // or nothing
    int row, rows, column;

    template <int R> QUIRE_INLINE void take(int slice, V (&a)[R]) const {
        const float* at = acc + 32 * slice;
        if (fresh) each<R>([&](auto r) __attribute__((always_inline)) { a[r] = vdupq_n_f32(0); });
        else each<R>([&](auto r) __attribute__((always_inline)) { a[r] = vload(at + 4 * r); });
    }

    template <int R> QUIRE_INLINE void leave(int slice, V (&a)[R]) const {
        if (!last) {
            float* at = acc + 32 * slice;
            each<R>([&](auto r) __attribute__((always_inline)) { vstore(at + 4 * r, a[r]); });
            return;
        }
        const int from = column + 4 * slice;
        if (last->bias) {
            const V bias = vload(last->bias + from);
            each<R>([&](auto r) __attribute__((always_inline)) { a[r] = vaddq_f32(a[r], bias); });
        }
        if (rows == R) return put<R>(from, a);
        each<R>([&](auto r) __attribute__((always_inline)) {
            if (r < rows) Place{acc, fresh, last, row + r, 1, column}.template put<1>(from, (V(&)[1])a[r]);
        });
    }

  private:
    template <int R> QUIRE_INLINE void put(int from, V (&a)[R]) const {
        if (last->residual) {
            const float* at = last->residual + (size_t)row * last->residual_stride + from;
            each<R>([&](auto r) __attribute__((always_inline)) { a[r] = vaddq_f32(vload(at + r * last->residual_stride), a[r]); });
        }
        float* at = last->out + (size_t)row * last->out_stride + from;
        const size_t stride = last->out_stride;
        each<R>([&](auto r) __attribute__((always_inline)) { vstore(at + r * stride, a[r]); });
    }
};

// What will be wanted next, asked for with every tile of a slice: one by one, because a CPU forgets what it is asked for all at once.
struct Coming {
    const uint8_t* weights;  // step bytes on with every tile, through the four slices
    size_t step;
    const uint8_t* x[4];  // for each slice from its beginning, x_step bytes on
    size_t x_step;
};

// Some tiles of a block.
template <int BITS, int GROUP, bool BIAS> struct BlockTiles {
    using Of = Coded<BITS, BIAS>;
    static constexpr int kParts = 32 / GROUP;
    static constexpr bool kInPlace = BITS == 8 && kPackedByName<BITS, GROUP, BIAS>;  // unpacked codes would be the same
    static constexpr int kUnpackedTimes = BITS == 4 ? 1 : Of::times(0);
    const Matrix& w;
    const uint8_t* tile = nullptr;  // the first one
    int tiles = 0;
    Factors factors;
    alignas(64) uint8_t codes[kChunkTiles][512];  // [tile][slice][quad]

    explicit BlockTiles(const Matrix& weight) : w(weight) {}  // clears nothing

    void begin(int b, int t0, int count) {
        tile = w.block(b) + (size_t)t0 * w.code_bytes;
        tiles = count;
    }

    // For eight rows at a time, from memory.
    void unpack(int b, int t0) {
        if (kInPlace && half_factors(w)) return;
        factors.template fill<GROUP, BIAS, kUnpackedTimes, kUnpackedTimes>(w, b, t0, tiles);
        for (int t = 0; t < tiles && !kInPlace; t++) unpack_slices<BITS, BIAS>(tile + 64 * (size_t)(BITS * t), w.offset, codes[t]);
    }

    // As many lanes as `place` has rows against what is unpacked.
    void unpacked(int b, int t0, const Lanes& x, const Coming& coming, const Place& place) {
        if constexpr (kInPlace) {
            if (place.rows <= 4 && half_factors(w)) factors.template fill<GROUP, BIAS, Of::times(0), Of::times(1)>(w, b, t0, tiles);
            return packed(b, t0, x, coming, place);
        }
#ifdef QUIRE_NEON_DOT
        if (place.rows > 4)
            return by_name<0, false>(codes[0], 128, (const uint8_t*)factors.scale, (const uint8_t*)factors.bias, x, coming, place);
#endif
        (void)coming;
        some(x, place, [&](int t, int slice, auto, C(&c)[8]) __attribute__((always_inline)) {
            for (int q = 0; q < 8; q++) c[q] = cload(codes[t] + 128 * slice + 16 * q);
        });
    }

    // The same straight from the packed codes.
    void packed(int b, int t0, const Lanes& x, const Coming& coming, const Place& place) {
#ifdef QUIRE_NEON_DOT
        if constexpr (kPackedByName<BITS, GROUP, BIAS>)
            if (place.rows > 4) {
                if constexpr (GROUP == 32)
                    if (half_factors(w)) {
                        const uint8_t* factor = w.block(b) + (size_t)t0 * w.scale_bytes;
                        return by_name<BITS, true>(tile, 16, factor + w.scale_at, factor + w.bias_at, x, coming, place);
                    }
                return by_name<BITS, false>(tile, 16, (const uint8_t*)factors.scale, (const uint8_t*)factors.bias, x, coming, place);
            }
#endif
        (void)b, (void)t0, (void)coming;
        some(x, place, [&](int t, int slice, auto half, C(&c)[8]) __attribute__((always_inline)) {
            slice_codes<BITS, BIAS, decltype(half)::value>(tile + 64 * (size_t)(BITS * t), slice, w.offset, c);
        });
    }

    // Whether `packed` reads factors for so many rows.
    bool reads_factors(int rows) const {
        const bool by_name = kPackedByName<BITS, GROUP, BIAS> && GROUP == 32 && half_factors(w);
        return !by_name || (rows % 8 && rows % 8 <= 4);
    }

  private:
#ifdef QUIRE_NEON_DOT
    // Slices lie `apart`.
    template <int PACKED, bool HALVES>
    void by_name(const uint8_t* from, size_t apart, const uint8_t* scale, const uint8_t* bias, const Lanes& x, const Coming& coming,
                 const Place& place) {
        constexpr size_t kFactors = HALVES ? 8 : 16;  // bytes for a slice
        each<PACKED == 4 ? 2 : 1>([&](auto half) __attribute__((always_inline)) {
            constexpr int kEach = PACKED == 4 ? 2 : 4;
            for (int i = 0; i < kEach; i++) {
                const int slice = kEach * half + i;
                V acc[8];
                place.take(slice, acc);
                slice_loop<PACKED, half, GROUP, BIAS, HALVES>({from + apart * (size_t)i, scale + kFactors * (size_t)slice, bias + kFactors * (size_t)slice,
                                                               x.codes, x.sx, x.sxs, x.excess, x.start[half], 4 * x.step[half], tiles,
                                                               coming.weights + coming.step * (size_t)(slice * tiles), coming.step,
                                                               coming.x[slice], coming.x_step}, acc);
                place.leave(slice, acc);
            }
        });
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
        if (BIAS || shift[0] || shift[1]) {
            sums.fill<GROUP, BIAS>(from, s, t0, tiles, m - 16 * p < 16 ? (m - 16 * p + 7) / 8 * 8 : 16, shift);
            lanes.take(sums, shift);
        }
        return lanes;
    }

    // Tiles of a chunk: of even size, and whole super-blocks, whose factors share a scale.
    int chunk() const {
        const int chunks = (w.tiles + kChunkTiles - 1) / kChunkTiles;
        return ((w.tiles + chunks - 1) / chunks + kSuper - 1) / kSuper * kSuper;
    }

    void few(int b0, int b1, const Epilogue& e) {
        const int together = kSums / (16 * tall()) < 8 ? kSums / (16 * tall()) : 8;  // blocks that share what is made of the rows
        const int most = chunk(), shift[2] = {Of::shift(0, w.offset), Of::kHalves == 2 ? Of::shift(1, w.offset) : 0};
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
                    const uint8_t* wanted = coming ? coming + (size_t)from * w.code_bytes : block.tile;
                    if (coming) ask_factors<BIAS>(w, coming, from, most);
                    if (!kPackedByName<BITS, GROUP, BIAS> || m <= 4) ask_ahead(wanted, (size_t)most * w.code_bytes);
                    if (block.reads_factors(m)) block.factors.template fill<GROUP, BIAS, Of::times(0), Of::times(1)>(w, b + i, t0, tiles);
                    const Coming then{wanted, BITS * 16, {x, x, x, x}, 0};
                    for (int lane = 0; lane < m; lane += 8)
                        block.packed(b + i, t0, (lane < 16 ? first : second)->from(lane % 16), then, place(i, lane, t0, next, 16 * (b + i - b0), e));
                }
            }
        }
    }

    void many(int b0, int b1, const Epilogue& e) {
        const int most = chunk(), by = BlockTiles<BITS, GROUP, BIAS>::kUnpackedTimes * (unpacked_less<BITS, BIAS>(w.offset) - w.offset), shift[2] = {by, by};
        BlockTiles<BITS, GROUP, BIAS> block[kPair] = {BlockTiles<BITS, GROUP, BIAS>(w), BlockTiles<BITS, GROUP, BIAS>(w)};
        PanelSums panel_sums;
        for (int b = b0; b < b1; b += kPair) {
            const int blocks = b1 - b < kPair ? b1 - b : kPair;
            for (int t0 = 0; t0 < w.tiles; t0 += most) {
                const int tiles = w.tiles - t0 < most ? w.tiles - t0 : most, next = t0 + tiles < w.tiles ? t0 + tiles : 0;
                for (int i = 0; i < blocks; i++) block[i].begin(b + i, t0, tiles), block[i].unpack(b + i, t0);
                const int after = next ? b : b + kPair, passes = tall() / 8;
                for (int i = 0; i < blocks; i++)
                    if (after + i < w.blocks) ask_factors<BIAS>(w, w.block(after + i), next, most);
                for (int pass = 0, p = 0; p < (m + 15) / 16; p++) {
                    const Lanes lanes = panel(p, t0, tiles, shift, panel_sums);
                    for (int lane = 16 * p; lane < m && lane < 16 * p + 16; lane += 8, pass++) {
                        if (!next) ask_results(e, lane, lane + 8 < m ? lane + 8 : m, 16 * (b - b0));
                        const Lanes then = pass + 1 < passes ? Lanes(x + (size_t)((pass + 1) / 2) * s.bytes, s, t0).from((pass + 1) % 2 * 8) : Lanes(x, s, next);
                        for (int i = 0; i < blocks; i++)
                            block[i].unpacked(b + i, t0, lanes.from(lane % 16), coming(after + i < w.blocks ? after + i : b + i, next, tiles, pass, passes, then, i),
                                              place(i, lane, t0, next, 16 * (b + i - b0), e));
                    }
                }
            }
        }
    }

    // While lanes pass over an unpacked block: their share of the tiles that the block in its place will have, and the next lanes' codes,
    // or what they have beside them.
    Coming coming(int b, int t0, int tiles, int pass, int passes, const Lanes& then, int block) const {
        const size_t step = w.code_bytes / (4 * (size_t)passes);
        Coming c{w.block(b) + (size_t)t0 * w.code_bytes + step * (size_t)(4 * pass * tiles), step, {}, block ? 256u : 512u};
        for (int slice = 0; slice < 4; slice++) c.x[slice] = (block ? (const uint8_t*)then.excess : (const uint8_t*)then.codes) + 64 * slice;
        if (block) c.x[2] = (const uint8_t*)then.sx, c.x[3] = c.x[2] + 64 * tiles / 2;
        return c;
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
