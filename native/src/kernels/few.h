// A few rows at once: up to one panel, multiplied straight from the packed codes; unpacking those into memory pays where many rows use
// them. A wide matrix goes by passes of some tiles over some blocks, so that what rows bring to those stays in the first cache.
#pragma once

#include "gemm.h"

namespace {

template <int BITS> inline B less_base(B codes) {
    if constexpr (code_base(BITS) != 0) codes = bsub(codes, (uint8_t)code_base(BITS));
    return codes;
}

// Rows of a call up to which affine_few is the faster way (one panel at most), and how many it takes along in one pass over a
// block: their sums must fit the registers.
constexpr bool kManyRegisters = kWidth == 16 && kDenseRows >= 8;
constexpr int kFewAffine = kManyRegisters ? 16 : 2;

constexpr int kFewTiles = 128;  // up to which rows pass over all tiles of a block at a time
constexpr int kFewPass = 64;    // of a wider one: what rows bring to so many stays in the first cache
constexpr int kFewSpan = 8;     // blocks that pass there one after the other, while their sums wait

// Some rows of a panel, from one tile on.
template <int GROUP> struct FewRows {
    const int8_t* codes;
    size_t step;  // from one tile's codes to the next
    const Extra<GROUP>* extra;
};

// `tiles` tiles of block b from t0 on against R rows.
template <int BITS, int GROUP, bool BIAS, int R>
inline void affine_few(const Matrix& w, int b, int t0, int tiles, const FewRows<GROUP>& x, F (&acc)[R]) {
    constexpr int kParts = 32 / GROUP;
    const uint8_t* block = w.block(b);
    const size_t code_step = w.code_step;
    const size_t ahead = w.block_bytes < 8192 ? w.block_bytes : 8192;
    const int8_t* q = x.codes;
    for (int t = 0; t < tiles; t++, q += x.step) {
        const uint8_t* tile = block + (size_t)(t0 + t) * code_step;
        for (int i = 0; i < BITS; i++) prefetch(tile + ahead + 64 * i);
        prefetch(block + w.scale_at + (size_t)(t0 + t) * w.factor_step + ahead);
        if constexpr (BIAS) prefetch(block + w.bias_at + (size_t)(t0 + t) * w.factor_step + ahead);
        const Extra<GROUP>& extra = x.extra[t];
        Dots<Lanes16, BITS, GROUP> d[kParts][R];
        QUIRE_UNROLL
        for (int part = 0; part < kParts; part++)
            for (int r = 0; r < R; r++) d[part][r].total = iset((int32_t)extra.part[part].start[r]);
        each_quad<BITS, BIAS>(tile, [&](int j, B codes) __attribute__((always_inline)) {
            codes = less_base<BITS>(codes);
            QUIRE_UNROLL
            for (int r = 0; r < R; r++) d[j / (GROUP / 4)][r].add(j % (GROUP / 4), codes, q + 32 * r + 4 * j);
        });
        QUIRE_UNROLL
        for (int part = 0; part < kParts; part++) {
            const F sw = scale_of(w, b, t0 + t, part);
            F bw = sw;
            if constexpr (BIAS) bw = bias_of(w, b, t0 + t, part);
            QUIRE_UNROLL
            for (int r = 0; r < R; r++) {
                acc[r] = ffma(sw, ffma(fbits(d[part][r].total), fset(extra.sx[r]), fset(extra.excess[r])), acc[r]);
                if constexpr (BIAS) acc[r] = ffma(bw, fset(extra.part[part].sxs[r]), acc[r]);
            }
        }
    }
}

// The rows of one panel (m of them) against some blocks, some tiles at a time.
template <int BITS, int GROUP, bool BIAS> class Few {
    const Matrix& w_;
    const uint8_t* x_;
    const QuantShape& s_;
    const int m_, shift_;
    const bool whole_;
    bool copied_ = false;
    int t0_ = 0, tiles_ = 0;  // of the pass
    alignas(64) Extras<GROUP, kFewTiles> extras_;  // not cleared, nor are the others: what is read was written
    alignas(64) uint8_t copy_[kFewPass * 256];
    alignas(64) float sums_[kFewSpan][QuantShape::kLanes * 16];

    // Up to 8 rows' codes lie in half of a panel or less, and so would fill some of the first cache's sets: they are laid together.
    template <int LINES> void copy() {
        const uint8_t* from = x_ + 512 * (size_t)t0_;
        for (int t = 0; t < tiles_; t++)
            QUIRE_UNROLL
            for (int i = 0; i < LINES; i++) bstore(copy_ + 64 * (LINES * t + i), bload(from + 512 * (size_t)t + 64 * i));
    }

    // Lanes [lane, lane + R). Only those below m are rows; what is made of the others is dropped.
    template <int R> void lanes(int b, int lane, float* sums, const Epilogue& e, int column) {
        F acc[R];
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) acc[r] = t0_ ? fload(sums + 16 * (lane + r)) : fzero();
        const Lanes<GROUP> x((const int8_t*)x_ + 512 * (size_t)t0_, extras_, lane);
        const FewRows<GROUP> rows{copied_ ? (const int8_t*)copy_ : x.codes, copied_ ? 32 * (size_t)R : 512, x.extra};
        affine_few<BITS, GROUP, BIAS, R>(w_, b, t0_, tiles_, rows, acc);
        const bool last = t0_ + tiles_ == w_.tiles;
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) {
            if (!last) fstore(sums + 16 * (lane + r), acc[r]);
            else if (lane + r < m_) finish(e, lane + r, column, acc[r]);
        }
    }

   public:
    Few(const Matrix& w, const uint8_t* panel, const QuantShape& s, int rows)
        : w_(w), x_(panel), s_(s), m_(rows), shift_(code_base(BITS) - w.offset), whole_(w.tiles <= kFewTiles) {}

    // How many tiles make a pass, of even size, and how many of `blocks` blocks it goes over.
    int tiles() const {
        const int passes = whole_ ? 1 : (w_.tiles + kFewPass - 1) / kFewPass;
        return (w_.tiles + passes - 1) / passes;
    }
    int span(int blocks) const { return whole_ || blocks < kFewSpan ? blocks : kFewSpan; }

    void begin(int t0, int blocks) {
        t0_ = t0, tiles_ = w_.tiles - t0 < tiles() ? w_.tiles - t0 : tiles();
        fill_extras<GROUP, BIAS>(x_, s_, t0, tiles_, m_, shift_, extras_);
        copied_ = !whole_ && m_ <= 8 && 2 * blocks >= kFewSpan;  // for fewer it takes longer than it saves
        if (copied_) m_ > 4 ? copy<4>() : m_ > 2 ? copy<2>() : copy<1>();
    }

    void block(int b, int place, const Epilogue& e, int column) {
        float* sums = sums_[whole_ ? 0 : place];
        int lane = 0;
        if constexpr (kManyRegisters) {
            for (; m_ - lane > 4; lane += 8) lanes<8>(b, lane, sums, e, column);
            if (m_ - lane > 2) lanes<4>(b, lane, sums, e, column), lane += 4;
        }
        if (lane < m_) lanes<2>(b, lane, sums, e, column);
    }
};

template <int BITS, int GROUP, bool BIAS>
void affine_panel_rows(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, int m, const Epilogue& e) {
    Few<BITS, GROUP, BIAS> few(w, x, s, m);
    for (int from = b0, end; from < b1; from = end) {
        end = from + few.span(b1 - from);
        for (int t0 = 0; t0 < w.tiles; t0 += few.tiles()) {
            few.begin(t0, end - from);
            for (int b = from; b < end; b++) few.block(b, b - from, e, 16 * (b - b0));
        }
    }
}

}  // namespace
