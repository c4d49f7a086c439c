// Many rows at once. Weights are unpacked once per chunk of columns into the first cache, as bytes (or float32 for dense
// types) with their scales, and all rows of the item pass over them in register tiles of kTileRows x kTileColumns registers.
// Partial sums wait in memory between chunks: storing a float and loading it back changes nothing.
//
// The tile works on single registers of kWidth lanes (types V, W, C of the simd headers), not on 16-lane vectors, so
// that its shape fits the register file of each instruction set.
#pragma once

#include <type_traits>

#include "dots.h"

namespace {

constexpr int kChunk = 16;  // tiles of 32 columns unpacked at a time
constexpr int kMaxTall = 128;   // rows in one call
constexpr int kPair = kTileColumns * kWidth > 16 ? kTileColumns * kWidth / 16 : 1;  // blocks unpacked together
constexpr int kSlices = 16 / kWidth;                                                // registers across a block

inline void finish(const Epilogue& e, int m, int column, F acc) {
    if (e.bias) acc = fadd(acc, fload(e.bias + column));
    if (e.residual) acc = fadd(fload(e.residual + (size_t)m * e.residual_stride + column), acc);
    fstore(e.out + (size_t)m * e.out_stride + column, acc);
}

// The quads of 32 bytes with kNibbleRows.
inline B nibble_rows(const uint8_t* p) {
    uint8_t codes[64];
    for (int i = 0; i < 32; i++) codes[i] = p[i] & 15, codes[32 + i] = (uint8_t)(p[i] >> 4 ^ 8);
    return bload(codes);
}

// f(quad, codes) for the eight quads of a tile, as unsigned bytes; in no particular order. NEON has its own way.
template <int BITS, bool BIAS, class Function> inline void each_quad(const uint8_t* p, Function take) {
    constexpr uint8_t kLess = stored_less(BITS, BIAS);
    auto f = [&](int q, B codes) __attribute__((always_inline)) {
        if constexpr (kLess) codes = band(bsub(codes, kLess), (uint8_t)(2 * kLess - 1));
        take(q, codes);
    };
    if constexpr (BITS == 8) {
        QUIRE_UNROLL
        for (int q = 0; q < 8; q++) f(q, bload(p + 64 * q));
    }
    if constexpr (BITS == 4 && kNibbleRows) {
        for (int q = 0; q < 8; q++) f(q, nibble_rows(p + 32 * q));
    } else if constexpr (BITS == 4) {
        QUIRE_UNROLL
        for (int j = 0; j < 4; j++) {
            B v = bload(p + 64 * j);
            f(j, band(v, 15));
            f(j + 4, band(bshr<4>(v), 15));
        }
    }
    if constexpr (BITS == 2) {
        QUIRE_UNROLL
        for (int h = 0; h < 2; h++) {
            B v = bload(p + 64 * h);
            f(4 * h, band(v, 3));
            f(4 * h + 1, band(bshr<2>(v), 3));
            f(4 * h + 2, band(bshr<4>(v), 3));
            f(4 * h + 3, band(bshr<6>(v), 3));
        }
    }
    if constexpr (BITS == 6) {
        QUIRE_UNROLL
        for (int h = 0; h < 2; h++) {
            const B a = bload(p + 192 * h), b = bload(p + 192 * h + 64), c = bload(p + 192 * h + 128);
            f(4 * h, band(bshr<2>(a), 63));
            f(4 * h + 1, band(bshr<2>(b), 63));
            f(4 * h + 2, band(bshr<2>(c), 63));
            f(4 * h + 3, bor(bor(bshl<4>(band(a, 3)), bshl<2>(band(b, 3))), band(c, 3)));
        }
    }
    if constexpr (BITS == 5) {
        const B one = bload(p + 256);
        auto top = [one](int q) {
            switch (q) {
                case 0: return bshl<4>(one);
                case 1: return bshl<3>(one);
                case 2: return bshl<2>(one);
                case 3: return bshl<1>(one);
                case 4: return one;
                case 5: return bshr<1>(one);
                case 6: return bshr<2>(one);
                default: return bshr<3>(one);
            }
        };
        QUIRE_UNROLL
        for (int j = 0; j < 4; j++) {
            B v = bload(p + 64 * j);
            f(j, bor(band(v, 15), band(top(j), 16)));
            f(j + 4, bor(band(bshr<4>(v), 15), band(top(j + 4), 16)));
        }
    }
    if constexpr (BITS == 3) {
        const B one = bload(p + 128);
        auto top = [one](int q) {
            switch (q) {
                case 0: return bshl<2>(one);
                case 1: return bshl<1>(one);
                case 2: return one;
                case 3: return bshr<1>(one);
                case 4: return bshr<2>(one);
                case 5: return bshr<3>(one);
                case 6: return bshr<4>(one);
                default: return bshr<5>(one);
            }
        };
        QUIRE_UNROLL
        for (int h = 0; h < 2; h++) {
            B v = bload(p + 64 * h);
            f(4 * h, bor(band(v, 3), band(top(4 * h), 4)));
            f(4 * h + 1, bor(band(bshr<2>(v), 3), band(top(4 * h + 1), 4)));
            f(4 * h + 2, bor(band(bshr<4>(v), 3), band(top(4 * h + 2), 4)));
            f(4 * h + 3, bor(band(bshr<6>(v), 3), band(top(4 * h + 3), 4)));
        }
    }
}

}  // namespace

#ifdef QUIRE_NEON
#include "neon_rows.h"
#else

namespace {

// kExtraLanes: lanes whose extras lie together, as many as are multiplied at a time, so that few lines are read.
// kFromPoint: whether sums start from the bits of kSumPoint, and end as the bits of that number plus the sum: one fma with sx and `excess`
// takes it away, exactly, and multiplies. Matrix tiles start from 0.
#ifdef QUIRE_AMX
constexpr int kExtraLanes = 16;
constexpr bool kFromPoint = false;
#else
constexpr int kExtraLanes = 8;
constexpr bool kFromPoint = true;
#endif

// What some rows of a panel bring to a tile of 32 columns beside their codes.
template <int GROUP> struct Extra {
    float sx[kExtraLanes];
    float excess[kExtraLanes];  // -kSumPoint * sx
    struct {
        uint32_t start[kExtraLanes];  // what the integer sum starts from
        float sxs[kExtraLanes];       // sx * sum, for the bias
    } part[32 / GROUP];

    // Its lanes from `lane` on.
    const Extra* from(int lane) const { return (const Extra*)(sx + lane); }
};

template <int GROUP, int MOST> using Extras = Extra<GROUP>[16 / kExtraLanes][MOST];  // of a panel

// Made once, so that a product's inner loop has nothing to do in scalar registers. `by`: what a sum needs for each of the row's codes, because
// of what weights are stored more. Lanes past the last row are zeros: what a panel has there may be no number, or one that is slow to multiply.
template <int GROUP, bool BIAS, int MOST>
inline void fill_extras(const uint8_t* panel, const QuantShape& s, int t0, int tiles, int rows, int by, Extras<GROUP, MOST>& to) {
    const float *scale = (const float*)(panel + s.sx) + 16 * (size_t)t0, *sxs = (const float*)(panel + s.sxs) + 16 * (size_t)t0;
    const int32_t* sum = (const int32_t*)(panel + s.sum) + 32 * (size_t)t0;
    const I times = iset(by), point = iset(kFromPoint ? (int32_t)float_to_bits(kSumPoint) : 0);
    for (int t = 0; t < tiles; t++, scale += 16, sxs += 16, sum += 32) {
        Extra<GROUP>&first = to[0][t], &second = to[16 / kExtraLanes - 1][t];
        auto store = [](F lanes, void* low, void* high) {
            if constexpr (kExtraLanes == 16) fstore((float*)low, lanes);
            else fstore_halves((float*)low, (float*)high, lanes);
        };
        const F known = fload_n(scale, rows);
        store(known, first.sx, second.sx);
        if constexpr (kFromPoint) store(fmul(known, fset(-kSumPoint)), first.excess, second.excess);
        for (int part = 0; part < 32 / GROUP; part++) {
            const I total = GROUP == 32 ? iadd(iload_n(sum, rows), iload_n(sum + 16, rows)) : iload_n(sum + 16 * part, rows);
            auto &one = first.part[part], &other = second.part[part];
            store(fbits(iadd(imul(total, times), point)), one.start, other.start);
            if constexpr (BIAS) store(GROUP == 32 ? fload_n(sxs, rows) : fmul(known, ffrom(total)), one.sxs, other.sxs);
        }
    }
}

// Lanes of a panel, from the chunk's first tile on.
template <int GROUP> struct Lanes {
    const int8_t* codes;        // + 512 per tile
    const Extra<GROUP>* extra;  // + 1 per tile

    template <int MOST>
    Lanes(const int8_t* panel, const Extras<GROUP, MOST>& extras, int lane)
        : codes(panel + 32 * lane), extra(extras[lane / kExtraLanes]->from(lane % kExtraLanes)) {}
};

// The packed weights that will be unpacked next, asked for a few lines at a time while rows pass over the chunk before: all at
// once they would wait for each other, and the rows for them. Codes alone: scales that lie apart from them are few, and asking for them
// gains nothing.
class Ahead {
    const uint8_t *at_[kPair] = {}, *end_[kPair] = {};
    int now_ = 0, count_ = 0, each_ = 0;

    size_t add(const uint8_t* from, size_t bytes) {
        at_[count_] = from, end_[count_++] = from + bytes;
        return bytes;
    }

   public:
    // Tiles [t0, t0 + tiles) of up to kPair blocks from b on, in `calls` calls of ask.
    Ahead(const Matrix& w, int b, int t0, int tiles, int calls) {
        size_t bytes = 0;
        for (int i = b; i < b + kPair && i < w.blocks; i++) {
            bytes += add(w.block(i) + (size_t)t0 * w.code_step, (size_t)tiles * w.code_step);
        }
        each_ = (int)((bytes / 64 + kPair + (size_t)calls - 1) / (size_t)calls);
    }

    void ask() {
        for (int i = 0; i < each_ && now_ < count_; i++) {
            prefetch(at_[now_]);
            if ((at_[now_] += 64) >= end_[now_]) now_++;
        }
    }
};

// Where the sums of some rows come from and go to: partial ones to memory, and to their place with the last chunk.
struct Sums {
    float* partial;
    size_t stride;
    bool first;         // chunk: sums start from 0
    const Epilogue* e;  // with the last chunk, else nothing
    int row, column;    // of the epilogue

    Sums from(int lane) const {
        Sums s = *this;
        s.partial += (size_t)lane * stride, s.row += lane;
        return s;
    }
};

inline V sums_before(const Sums& s, int r, int column) { return s.first ? vset(0.0f) : vload(s.partial + (size_t)r * s.stride + (size_t)column); }

// What `finish` does to a block, for one register.
inline void finish_register(const Epilogue& e, size_t row, size_t column, V acc) {
    if (e.bias) acc = vadd(acc, vload(e.bias + column));
    if (e.residual) acc = vadd(vload(e.residual + row * e.residual_stride + column), acc);
    vstore(e.out + row * e.out_stride + column, acc);
}

inline void sums_after(const Sums& s, int r, int column, V acc) {
    if (s.e) finish_register(*s.e, (size_t)(s.row + r), (size_t)(s.column + column), acc);
    else vstore(s.partial + (size_t)r * s.stride + (size_t)column, acc);
}

// Some tiles of one block, unpacked.
struct Chunk {
    alignas(64) uint8_t codes[kChunk][512];  // [tile][quad][16 rows][4 columns], less `base` for tiles
    alignas(64) float scale[kChunk][2][16];  // [tile][part][row]
    alignas(64) float bias[kChunk][2][16];
};

}  // namespace

#ifdef QUIRE_AMX
#include "amx.h"
#else
namespace {
constexpr bool kTiles = false;
}  // namespace
#endif

namespace {

// `base` is what each code loses on the way, so that it fits a signed byte.
template <int BITS, int GROUP, bool BIAS>
void unpack_chunk(const Matrix& w, int b, int t0, int tiles, int base, Chunk& to) {
    const uint8_t* block = w.block(b);
    for (int t = 0; t < tiles; t++) {
        uint8_t* out = to.codes[t];
        each_quad<BITS, BIAS>(block + (size_t)(t0 + t) * w.code_step, [&](int q, B codes) __attribute__((always_inline)) {
            if constexpr (kTiles || code_base(BITS)) codes = bsub(codes, (uint8_t)base);
            bstore(out + 64 * q, codes);
        });
        for (int part = 0; part < 32 / GROUP; part++) {
            fstore(to.scale[t][part], scale_of(w, b, t0 + t, part));
            if constexpr (BIAS) fstore(to.bias[t][part], bias_of(w, b, t0 + t, part));
        }
    }
}

// R rows against N registers of columns, from `slice` of chunk[0] on, over `tiles` tiles.
template <int R, int N, int BITS, int GROUP, bool BIAS>
inline void affine_tile(const Chunk* chunk, int slice, int tiles, const Lanes<GROUP>& x, const Sums& sums) {
    constexpr int kParts = 32 / GROUP;
    const Chunk* from[N];
    int lane[N];
    V a[R][N];
    for (int n = 0; n < N; n++) {
        from[n] = chunk + (slice + n) / kSlices;
        lane[n] = (slice + n) % kSlices * kWidth;
        for (int r = 0; r < R; r++) a[r][n] = sums_before(sums, r, (slice + n) * kWidth);
    }
    for (int t = 0; t < tiles; t++) {
        const Extra<GROUP>& extra = x.extra[t];
        for (int part = 0; part < kParts; part++) {
            Dots<Register, BITS, GROUP> d[R][N];
            QUIRE_UNROLL
            for (int r = 0; r < R; r++) {
                const W start = wset((int32_t)extra.part[part].start[r]);
                for (int n = 0; n < N; n++) d[r][n].total = start;
            }
            QUIRE_UNROLL
            for (int j = 0; j < GROUP / 4; j++) {
                QUIRE_UNROLL
                for (int n = 0; n < N; n++) {
                    const C c = cload(from[n]->codes[t] + 64 * (GROUP / 4 * part + j) + 4 * lane[n]);
                    QUIRE_UNROLL
                    for (int r = 0; r < R; r++) d[r][n].add(j, c, x.codes + 512 * (size_t)t + 32 * r + GROUP * part + 4 * j);
                }
            }
            QUIRE_UNROLL
            for (int n = 0; n < N; n++) {
                const V sw = vload(from[n]->scale[t][part] + lane[n]);
                V bw = sw;
                if constexpr (BIAS) bw = vload(from[n]->bias[t][part] + lane[n]);
                QUIRE_UNROLL
                for (int r = 0; r < R; r++) {
                    a[r][n] = vfma(sw, vfma(vbits(d[r][n].total), vset(extra.sx[r]), vset(extra.excess[r])), a[r][n]);
                    if constexpr (BIAS) a[r][n] = vfma(bw, vset(extra.part[part].sxs[r]), a[r][n]);
                }
            }
        }
    }
    for (int n = 0; n < N; n++)
        for (int r = 0; r < R; r++) sums_after(sums, r, (slice + n) * kWidth, a[r][n]);
}

// `rows` rows of a panel from `lane` on against `blocks` unpacked blocks.
template <int R, int BITS, int GROUP, bool BIAS>
inline int affine_strip(const Chunk* chunk, int blocks, int tiles, const int8_t* codes, const Extras<GROUP, kChunk>& extras, int lane, int rows,
                        const Sums& sums, Ahead& ahead) {
    for (; rows - lane >= R; lane += R) {
        ahead.ask();
        const Lanes<GROUP> x(codes, extras, lane);
        const Sums of = sums.from(lane);
        int slice = 0;
        for (; slice + kTileColumns <= blocks * kSlices; slice += kTileColumns)
            affine_tile<R, kTileColumns, BITS, GROUP, BIAS>(chunk, slice, tiles, x, of);
        if constexpr (kPair > 1)
            for (; slice < blocks * kSlices; slice++) affine_tile<R, 1, BITS, GROUP, BIAS>(chunk, slice, tiles, x, of);
    }
    return lane;
}

template <int BITS, int GROUP, bool BIAS>
void affine_panel(const Chunk* chunk, int blocks, int tiles, const int8_t* codes, const Extras<GROUP, kChunk>& extras, int rows,
                  const Sums& sums, Ahead& ahead) {
    int lane = 0;
    lane = affine_strip<kTileRows, BITS, GROUP, BIAS>(chunk, blocks, tiles, codes, extras, lane, rows, sums, ahead);
    if constexpr (kTileRows > 4)
        lane = affine_strip<4, BITS, GROUP, BIAS>(chunk, blocks, tiles, codes, extras, lane, rows, sums, ahead);
    if constexpr (kTileRows > 2)
        lane = affine_strip<2, BITS, GROUP, BIAS>(chunk, blocks, tiles, codes, extras, lane, rows, sums, ahead);
    affine_strip<1, BITS, GROUP, BIAS>(chunk, blocks, tiles, codes, extras, lane, rows, sums, ahead);
}

// Blocks whose sums wait in memory together: what rows bring beside their codes is made once for all of them. Matrix tiles mostly need none.
constexpr int kSpan = kTiles ? kPair : 8;

using Unpack = void (*)(const Matrix&, int b, int t0, int tiles, int base, Chunk&);

// Once for all forms whose codes are added alike: calling `unpack` costs nothing, and copies would cost a minute of compiling.
template <int BITS, int GROUP, bool BIAS>
QUIRE_ONCE void affine_passes(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, int m, const Epilogue& e, int base,
                              Unpack unpack) {
    alignas(64) float acc[kSpan * kMaxTall * 16];
    Chunk chunk[kPair];
    alignas(64) Extras<GROUP, kChunk> extras[kMaxTall / 16];
    const int shift = base - w.offset;
    const int panels = (m + 15) / 16;
    const int chunks = (w.tiles + kChunk - 1) / kChunk, most = (w.tiles + chunks - 1) / chunks;  // of even size
    auto rows_of = [m](int panel) { return m - 16 * panel < 16 ? m - 16 * panel : 16; };
#ifdef QUIRE_AMX
    auto plain = [&](int panel) { return !shift && rows_of(panel) == 16; };  // its scales and sums are read where they are
    const TileScope scope;
#else
    auto plain = [](int) { return false; };
#endif
    for (int from = b0; from < b1; from += kSpan)
        for (int t0 = 0, tiles; t0 < w.tiles; t0 += tiles) {
            tiles = w.tiles - t0 < most ? w.tiles - t0 : most;
            for (int i = 0; i < panels; i++)
                if (!plain(i)) fill_extras<GROUP, BIAS>(x + (size_t)i * s.bytes, s, t0, tiles, rows_of(i), shift, extras[i]);
            const bool last = t0 + tiles == w.tiles;
            const int end = b1 - from < kSpan ? b1 : from + kSpan;
            for (int b = from; b < end; b += kPair) {
                const int blocks = end - b < kPair ? end - b : kPair;
                for (int i = 0; i < blocks; i++) unpack(w, b + i, t0, tiles, base, chunk[i]);
                const bool more = b + kPair < end;
                const int then = more ? t0 : last ? 0 : t0 + tiles;
                Ahead ahead(w, more ? b + kPair : last ? end : from, then, w.tiles - then < most ? w.tiles - then : most,
                            kTiles ? panels * blocks * (tiles < 4 ? 1 : tiles / 4) : m / kTileRows + 1);
                for (int i = 0; i < panels; i++) {
                    const uint8_t* panel = x + (size_t)i * s.bytes;
                    const int8_t* codes = (const int8_t*)panel + 512 * (size_t)t0;
                    float* partial = acc + (size_t)((b - from) * kMaxTall * 16 + 16 * i * 16 * blocks);
                    const Sums sums{partial, (size_t)(16 * blocks), t0 == 0, last ? &e : nullptr, 16 * i, 16 * (b - b0)};
#ifdef QUIRE_AMX
                    const TileScales scales = plain(i) ? TileScales(panel, s, t0) : TileScales(extras[i][0]);
                    tile_panel<BIAS>(chunk, blocks, tiles, Lanes<GROUP>(codes, extras[i], 0), scales, rows_of(i), shift != 0, sums, ahead);
#else
                    affine_panel<BITS, GROUP, BIAS>(chunk, blocks, tiles, codes, extras[i], rows_of(i), sums, ahead);
#endif
                }
            }
        }
}

template <int BITS, int GROUP, bool BIAS>
void affine_gemm(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, int m, const Epilogue& e) {
    const int base = !kTiles ? code_base(BITS) : BITS == 8 ? 128 : w.offset;
    affine_passes<summed_as(BITS), GROUP, BIAS>(w, b0, b1, x, s, m, e, base, unpack_chunk<BITS, GROUP, BIAS>);
}

}  // namespace

#endif

namespace {

constexpr int kDenseChunk = 128;  // columns widened at a time

// R rows against N registers of columns over k columns of widened weights [block][k][16].
template <int R, int N>
inline void dense_tile(const float (*wide)[kDenseChunk * 16], int slice, int k, const float* x, size_t x_stride, float* acc,
                       size_t stride) {
    const float* from[N];
    V a[R][N];
    for (int n = 0; n < N; n++) {
        from[n] = wide[(slice + n) / kSlices] + (slice + n) % kSlices * kWidth;
        for (int r = 0; r < R; r++) a[r][n] = vload(acc + r * stride + (size_t)((slice + n) * kWidth));
    }
    for (int i = 0; i < k; i++) {
        V v[N];
        QUIRE_UNROLL
        for (int n = 0; n < N; n++) v[n] = vload(from[n] + 16 * i);
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) {
            const V q = vset(x[r * x_stride + (size_t)i]);
            QUIRE_UNROLL
            for (int n = 0; n < N; n++) a[r][n] = vfma(q, v[n], a[r][n]);
        }
    }
    for (int n = 0; n < N; n++)
        for (int r = 0; r < R; r++) vstore(acc + r * stride + (size_t)((slice + n) * kWidth), a[r][n]);
}

template <int R>
inline int dense_strip(const float (*wide)[kDenseChunk * 16], int blocks, int k, const float* x, size_t x_stride, int row, int m,
                       float* acc, size_t stride) {
    for (; m - row >= R; row += R) {
        int slice = 0;
        for (; slice + kDenseColumns <= blocks * kSlices; slice += kDenseColumns)
            dense_tile<R, kDenseColumns>(wide, slice, k, x + (size_t)row * x_stride, x_stride, acc + (size_t)row * stride, stride);
        for (; slice < blocks * kSlices; slice++)
            dense_tile<R, 1>(wide, slice, k, x + (size_t)row * x_stride, x_stride, acc + (size_t)row * stride, stride);
    }
    return row;
}

template <class Widen>
void dense_gemm(const Matrix& w, int b0, int b1, const float* x, size_t x_stride, int m, const Epilogue& e, Widen widen) {
    constexpr int kBlocks = kDenseColumns * kWidth > 16 ? kDenseColumns * kWidth / 16 : 1;
    alignas(64) float acc[kMaxTall * 16 * kBlocks];
    alignas(64) float wide[kBlocks][kDenseChunk * 16];
    for (int b = b0; b < b1; b += kBlocks) {
        const int blocks = b1 - b < kBlocks ? b1 - b : kBlocks;
        const size_t stride = (size_t)(16 * blocks);
        for (size_t i = 0; i < (size_t)m * stride; i += 16) fstore(acc + i, fzero());
        for (int k0 = 0; k0 < w.k; k0 += kDenseChunk) {
            const int k = w.k - k0 < kDenseChunk ? w.k - k0 : kDenseChunk;
            for (int i = 0; i < blocks; i++) widen(b + i, k0, k, wide[i]);
            int row = dense_strip<kDenseRows>(wide, blocks, k, x + k0, x_stride, 0, m, acc, stride);
            if constexpr (kDenseRows > 2) row = dense_strip<2>(wide, blocks, k, x + k0, x_stride, row, m, acc, stride);
            dense_strip<1>(wide, blocks, k, x + k0, x_stride, row, m, acc, stride);
        }
        for (int r = 0; r < m; r++)
            for (int i = 0; i < blocks; i++) finish(e, r, 16 * (b - b0 + i), fload(acc + (size_t)r * stride + (size_t)(16 * i)));
    }
}

}  // namespace
