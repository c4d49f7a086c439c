// Int8 products of two rows and more on NEON, in place of gemm.h's and linear.h's: the same sums in the same order. Rows are taken eight
// at a time over some tiles of a block, whose sums wait in memory as [8 lanes][slice][lane][4].
//
// A few rows read the packed codes: storing a register takes a vector pipe, so that unpacking into memory pays only where many rows use
// it. They go over a block after the other. Many rows have the codes of two blocks unpacked in the first cache, and pass over both.
#pragma once

#include "neon.h"

namespace {

constexpr int kFewChunk = 4 * kSuper, kManyChunk = 3 * kSuper;  // tiles that rows pass over at a time
constexpr int kSums = 8 * 32 * 16;                              // floats: 8 blocks of 32 rows, 2 of 128
static_assert(kPair == 2 && kSums >= kPair * kMaxTall * 16, "every call has room for two blocks");

struct Factors {
    alignas(64) float scale[kFewChunk][2][16];
    alignas(64) float bias[kFewChunk][2][16];

    template <int GROUP, bool BIAS> void fill(const Matrix& w, int b, int t0, int tiles) {
        const uint8_t* block = w.block(b);
        ByteFactors scales, biases;
        auto put = [&](auto own, auto other) __attribute__((always_inline)) {
            for (int t = 0; t < tiles; t++) {
                const size_t at = (size_t)(t0 + t);
                for (int part = 0; part < 32 / GROUP; part++) {
                    fstore(scale[t][part], own(at, part));
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

// Results of rows [r0, r1) will be left in this column: their lines, which another core may have, come in the meantime.
inline void ask_results(const Epilogue& e, int r0, int r1, int column) {
    for (int r = r0; r < r1; r++) {
        asm volatile("prfm pstl1keep, %a0" ::"p"(e.out + (size_t)r * e.out_stride + column));
        if (e.residual) prefetch(e.residual + (size_t)r * e.residual_stride + column);
    }
}

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
    static constexpr int kParts = 32 / GROUP, kBy = kTimes<BITS, BIAS>;
    const Matrix& w;
    const int base;
    const bool shifted;
    const uint8_t* tile = nullptr;  // the first one
    int tiles = 0;
    bool fresh = true;  // sums start from nothing, not from what is in memory
    Factors factors;
    alignas(64) uint8_t codes[kManyChunk][512];  // [tile][slice][quad]

    BlockTiles(const Matrix& weight, int less, bool moved) : w(weight), base(less), shifted(moved) {}  // clears nothing

    void begin(int b, int t0, int count) {
        tile = w.block(b) + (size_t)t0 * w.code_bytes;
        tiles = count;
        fresh = t0 == 0;
    }

    // For eight rows at a time, from memory.
    void unpack(int b, int t0) {
        factors.template fill<GROUP, BIAS>(w, b, t0, tiles);
        if (kByName && !shifted)
            for (int t = 0; t < tiles; t++) unpack_slices<BITS, BIAS>(tile + 64 * (size_t)(BITS * t), base, codes[t]);
    }

    // `rows` lanes (8, or what is left) against what is unpacked.
    void unpacked(const Lanes& x, int rows, float* acc) {
#ifdef QUIRE_NEON_DOT
        if (rows > 4 && !shifted)
            return block_loop<0, kBy, GROUP, BIAS, false>(
                {codes[0], (const uint8_t*)factors.scale, (const uint8_t*)factors.bias, x.codes, x.sx, x.sxs, tiles, acc, !fresh, nullptr});
#endif
        some(x, rows, acc);
    }

    // The same straight from the packed codes. Those at `next` are wanted after them: asked for one by one, because a CPU forgets what it
    // is asked for all at once.
    void packed(int b, int t0, const Lanes& x, int rows, const uint8_t* next, float* acc) {
#ifdef QUIRE_NEON_DOT
        if constexpr (kPackedByName<BITS, GROUP, BIAS>)
            if (rows > 4 && !shifted) {
                const uint8_t *block = w.block(b), *scale = (const uint8_t*)factors.scale, *bias = (const uint8_t*)factors.bias;
                if constexpr (GROUP == 32)
                    if (half_factors(w)) {
                        scale = block + w.scale_at + (size_t)t0 * w.scale_bytes, bias = block + w.bias_at + (size_t)t0 * w.scale_bytes;
                        return block_loop<BITS, kBy, GROUP, BIAS, true>({tile, scale, bias, x.codes, x.sx, x.sxs, tiles, acc, !fresh, next});
                    }
                return block_loop<BITS, kBy, GROUP, BIAS, false>({tile, scale, bias, x.codes, x.sx, x.sxs, tiles, acc, !fresh, next});
            }
#endif
        (void)b, (void)t0, (void)next;
        some(x, rows, acc);
    }

    // Whether `packed` reads factors for so many rows.
    bool reads_factors(int rows) const {
        const bool by_name = kPackedByName<BITS, GROUP, BIAS> && GROUP == 32 && !shifted && half_factors(w);
        return !by_name || (rows % 8 && rows % 8 <= 4);
    }

  private:
    void some(const Lanes& x, int rows, float* acc) {
        if (rows > 4) lanes<8>(x, acc);
        else if (rows > 2) lanes<4>(x, acc);
        else lanes<2>(x, acc);
    }

    template <int R> void lanes(const Lanes& x, float* acc) {
        auto pass = [&](auto moved) __attribute__((always_inline)) {
            for (int slice = 0; slice < 4; slice++, acc += 32) {
                V a[R];
                each<R>([&](auto r) __attribute__((always_inline)) { a[r] = fresh ? vdupq_n_f32(0) : vload(acc + 4 * r); });
                for (int t = 0; t < tiles; t++) {
                    C c[8];
                    slice_signed<BITS, BIAS>(tile + 64 * (size_t)(BITS * t) + 16 * slice, base, c);
                    slice_rows<R, BITS, GROUP, BIAS, decltype(moved)::value>(c, factors.scale[t][0] + 4 * slice, factors.bias[t][0] + 4 * slice,
                                                                             x.codes + 512 * (size_t)t, x.sx + 16 * t, x.shift + 16 * kParts * t,
                                                                             x.sxs + 16 * kParts * t, a);
                }
                each<R>([&](auto r) __attribute__((always_inline)) { vstore(acc + 4 * r, a[r]); });
            }
        };
        if (shifted) pass(std::true_type{});
        else pass(std::false_type{});
    }
};

template <int BITS, int GROUP, bool BIAS> struct Rows {
    const Matrix& w;
    const uint8_t* x;
    const QuantShape& s;
    const int m, base, shift;
    alignas(64) float acc[kSums];

    Rows(const Matrix& weight, const uint8_t* panels, const QuantShape& shape, int rows)
        : w(weight), x(panels), s(shape), m(rows), base(dot_base<BITS, BIAS>(w)), shift(kTimes<BITS, BIAS> * (base - w.offset)) {}

    int tall() const { return (m + 7) / 8 * 8; }
    float* sums(int block, int lane) { return acc + 16 * (block * tall() + lane); }

    // What a panel brings to tiles [t0, t0 + tiles), with its sums in `extras` where they are needed.
    Lanes panel(int p, int t0, int tiles, Extras<kFewChunk>& extras) const {
        const uint8_t* from = x + (size_t)p * s.bytes;
        Lanes lanes(from, s, t0);
        if (BIAS || shift) {
            extras.template sums<GROUP, BIAS>(from, s, t0, tiles, shift);
            lanes.take_sums(extras);
        }
        return lanes;
    }

    void few(int b0, int b1, const Epilogue& e) {
        const int together = kSums / (16 * tall()) < 8 ? kSums / (16 * tall()) : 8;  // blocks that share what is made of the rows
        // Of even size, and whole super-blocks, whose factors share a scale.
        const int chunks = (w.tiles + kFewChunk - 1) / kFewChunk, most = ((w.tiles + chunks - 1) / chunks + kSuper - 1) / kSuper * kSuper;
        BlockTiles<BITS, GROUP, BIAS> block(w, base, shift != 0);
        Extras<kFewChunk> extras[2];
        for (int b = b0; b < b1; b += together) {
            const int blocks = b1 - b < together ? b1 - b : together;
            for (int t0 = 0; t0 < w.tiles; t0 += most) {
                const int tiles = w.tiles - t0 < most ? w.tiles - t0 : most;
                const Lanes first = panel(0, t0, tiles, extras[0]), second = m > 16 ? panel(1, t0, tiles, extras[1]) : first;
                for (int i = 0; i < blocks; i++) {
                    const int next = t0 + most < w.tiles ? t0 + most : 0, from = i + 1 < blocks ? t0 : next;
                    const int at = i + 1 < blocks ? b + i + 1 : next ? b : b + together;
                    block.begin(b + i, t0, tiles);
                    if (!next) ask_results(e, 0, m, 16 * (b + i - b0));
                    const uint8_t* coming = at < b1 ? w.block(at) : e.then;
                    const uint8_t* wanted = coming ? coming + (size_t)from * w.code_bytes : block.tile;
                    if (coming) {
                        ask_ahead(coming + w.scale_at + (size_t)from * w.scale_bytes, (size_t)most * w.scale_bytes);
                        if (BIAS && w.super_at != w.bias_at) ask_ahead(coming + w.bias_at + (size_t)from * w.scale_bytes, (size_t)most * w.scale_bytes);
                    }
                    if (!kPackedByName<BITS, GROUP, BIAS> || m <= 4 || shift) ask_ahead(wanted, (size_t)most * w.code_bytes);
                    if (block.reads_factors(m)) block.factors.template fill<GROUP, BIAS>(w, b + i, t0, tiles);
                    for (int lane = 0; lane < m; lane += 8)
                        block.packed(b + i, t0, (lane < 16 ? first : second).from(lane % 16), m - lane, wanted, sums(i, lane));
                }
            }
            leave(b - b0, blocks, e);
        }
    }

    void many(int b0, int b1, const Epilogue& e) {
        const int chunks = (w.tiles + kManyChunk - 1) / kManyChunk, most = ((w.tiles + chunks - 1) / chunks + kSuper - 1) / kSuper * kSuper;
        BlockTiles<BITS, GROUP, BIAS> block[kPair] = {{w, base, shift != 0}, {w, base, shift != 0}};
        Extras<kFewChunk> extras;
        for (int b = b0; b < b1; b += kPair) {
            const int blocks = b1 - b < kPair ? b1 - b : kPair;
            for (int t0 = 0; t0 < w.tiles; t0 += most) {
                const int tiles = w.tiles - t0 < most ? w.tiles - t0 : most, next = t0 + tiles < w.tiles ? t0 + tiles : 0;
                for (int i = 0; i < blocks; i++) block[i].begin(b + i, t0, tiles), block[i].unpack(b + i, t0);
                Ahead ahead(w, next ? b : b + kPair, next, w.tiles - next < most ? w.tiles - next : most, tall() / 8);
                for (int p = 0; p < (m + 15) / 16; p++) {
                    const Lanes lanes = panel(p, t0, tiles, extras);
                    for (int lane = 16 * p; lane < m && lane < 16 * p + 16; lane += 8) {
                        ahead.ask();
                        if (!next) ask_results(e, lane, lane + 8 < m ? lane + 8 : m, 16 * (b - b0));
                        for (int i = 0; i < blocks; i++) block[i].unpacked(lanes.from(lane % 16), m - lane, sums(i, lane));
                    }
                }
            }
            leave(b - b0, blocks, e);
        }
    }

    void leave(int first, int blocks, const Epilogue& e) {
        for (int r = 0; r < m; r++)
            for (int i = 0; i < blocks; i++) {
                const float* from = sums(i, r / 8 * 8) + 4 * (r % 8);
                finish(e, r, 16 * (first + i), F{{vload(from), vload(from + 32), vload(from + 64), vload(from + 96)}});
            }
    }
};

// Rows from which unpacking pays: where eight have no loop over packed codes, for them.
template <int BITS, int GROUP, bool BIAS> constexpr int kMany = kPackedByName<BITS, GROUP, BIAS> ? 33 : kByName ? 5 : 17;

template <int BITS, int GROUP, bool BIAS>
void affine_rows(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, int m, const Epilogue& e) {
    Rows<BITS, GROUP, BIAS> rows(w, x, s, m);
    if (m < (rows.shift ? 17 : kMany<BITS, GROUP, BIAS>)) rows.few(b0, b1, e);
    else rows.many(b0, b1, e);
}

}  // namespace
