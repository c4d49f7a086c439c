// What slices of eight rows work on, on NEON: what rows and weights bring beside their codes, and where sums begin and end. Included by
// neon_rows.h.
#pragma once

#include "neon.h"
#include "neon_slice_args.h"

namespace {

constexpr int kChunkTiles = 4 * kSuper;  // that rows pass over at a time, at most

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
            return put([&](size_t t, int part) { return half_sixteen(block + w.scale_at + t * w.factor_step + 32 * (size_t)part); },
                       [&](size_t t, int part) { return half_sixteen(block + w.bias_at + t * w.factor_step + 32 * (size_t)part); });
        if (!byte_factors(w))
            return put([&](size_t t, int part) { return scale_of(w, b, (int)t, part); },
                       [&](size_t t, int part) { return bias_of(w, b, (int)t, part); });
        auto bytes = [&](ByteFactors& f, size_t super_at, size_t from, size_t t, int part) __attribute__((always_inline)) {
            if (t % kSuper == 0 && part == 0) f.begin(w.supers(b) + super_at + 4 * t);
            return f.of(block + from + t * w.factor_step + 16 * (size_t)part);
        };
        put([&](size_t t, int part) { return bytes(scales, 0, w.scale_at, t, part); },
            [&](size_t t, int part) { return bytes(biases, w.bias_super_at, w.bias_at, t, part); });
    }
};

inline void ask_ahead(const uint8_t* from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) prefetch(from + at);
}

// What byte factors are multiplied by, from tile t on.
inline void ask_supers(const Matrix& w, int b, int t) {
    if (w.scales == Scales::Half) return;
    const uint8_t* from = w.supers(b) + 4 * (size_t)t;
    prefetch(from);
    if (w.bias) prefetch(from + w.bias_super_at);
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
    alignas(64) float sxs[2 * kChunkTiles][16];             // scale * sum, for the bias of groups of 16

    template <int GROUP, bool BIAS> void fill(const uint8_t* panel, const QuantShape& s, int t0, int tiles, int rows, const int (&shift)[2]) {
        const int32_t* sum = (const int32_t*)(panel + s.sum) + 32 * (size_t)t0;
        const float* scale = (const float*)(panel + s.sx) + 16 * (size_t)t0;
        for (int t = 0; t < tiles; t++, sum += 32, scale += 16)
            for (int part = 0; part < 32 / GROUP; part++)
                for (int lane = 0; lane < rows; lane += 4) {
                    const int g = 32 / GROUP * t + part;
                    const int32_t* of = sum + lane;
                    const W total = GROUP == 32 ? vaddq_s32(vld1q_s32(of), vld1q_s32(of + 16)) : vld1q_s32(of + 16 * part);
                    if constexpr (BIAS && GROUP == 16) vst1q_f32(sxs[g] + lane, vmulq_f32(vld1q_f32(scale + lane), vcvtq_f32_s32(total)));
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
    const int8_t* codes;                                              // + 512 per tile
    const float *sx, *excess;                                         // + 16, + 64 per tile
    const float* sxs;                                                 // + 16 per group
    const uint32_t* start[2] = {kSumStarts.of[0], kSumStarts.of[0]};  // + step per group; of either half
    size_t step[2] = {};

    Lanes(const uint8_t* panel, const QuantShape& s, int t0)
        : codes((const int8_t*)panel + 512 * (size_t)t0), sx((const float*)(panel + s.sx) + 16 * (size_t)t0),
          excess((const float*)(panel + s.excess) + 64 * (size_t)t0), sxs((const float*)(panel + s.sxs) + 16 * (size_t)t0) {}

    template <bool SUMS> void take(const PanelSums& sums, const int (&shift)[2]) {
        if (SUMS) sxs = sums.sxs[0];
        for (int half = 0; half < 2; half++)
            if (shift[half]) start[half] = sums.start[half][0][0], step[half] = 64;
    }

    Lanes from(int lane) const {
        Lanes x = *this;
        x.codes += 32 * lane, x.sx += lane, x.excess += 4 * lane, x.sxs += lane;
        for (int half = 0; half < 2; half++)
            if (step[half]) x.start[half] += 4 * lane;
        return x;
    }
};

// R rows of x against a slice of tile t. Scales and biases are of this slice, 16 floats from one group to the next.
template <int R, int GROUP, bool BIAS>
QUIRE_INLINE void slice_rows(const C (&c)[8], const float* scale, const float* bias, const Lanes& x, int t, const uint32_t* start, size_t step,
                             V (&acc)[R]) {
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
    float* acc;            // [slice][lane][4]
    bool fresh;            // they begin with nothing
    const Epilogue* last;  // nothing before the last chunk
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
        if (rows == R) put<R, true>(from, a);
        else put<R, false>(from, a);
    }

    // The same by slice_loop, from `slice` on: whole results go where they belong, others wait for `finish`.
    bool whole() const { return last && !last->bias && rows == 8; }
    void ends(int slice, SliceArgs& a) const {
        const bool direct = whole();
        a.take = fresh ? kNothing : acc + 32 * slice, a.take_slice = fresh ? 0 : 128;
        a.leave = direct ? last->out + (size_t)row * last->out_stride + column + 4 * slice : acc + 32 * slice;
        a.leave_lane = direct ? 4 * last->out_stride : 16, a.leave_slice = direct ? 16 : 128;
        a.residual = direct && last->residual ? last->residual + (size_t)row * last->residual_stride + column + 4 * slice : nullptr;
        a.residual_lane = direct ? 4 * last->residual_stride : 0;
    }
    void finish() const {
        if (!last || whole()) return;
        for (int slice = 0; slice < 4; slice++) {
            V a[8];
            each<8>([&](auto r) __attribute__((always_inline)) { a[r] = vload(acc + 32 * slice + 4 * r); });
            leave(slice, a);
        }
    }

  private:
    static constexpr float kNothing[32] = {};

    template <int R, bool ALL> QUIRE_INLINE void put(int from, V (&a)[R]) const {
        const size_t stride = last->out_stride, before = last->residual_stride;
        float* to = last->out + (size_t)row * stride + from;
        const float* residual = last->residual ? last->residual + (size_t)row * before + from : nullptr;
        if (residual)
            each<R>([&](auto r) __attribute__((always_inline)) {
                if (ALL || r < rows) a[r] = vaddq_f32(vload(residual + r * before), a[r]);
            });
        each<R>([&](auto r) __attribute__((always_inline)) {
            if (ALL || r < rows) vstore(to + r * stride, a[r]);
        });
    }
};

// What will be wanted next, asked for with every tile of a slice: one by one, because a CPU forgets what it is asked for all at once.
struct Coming {
    SliceAsks slice[4];
    size_t beside_step;

    // First bytes from `weights` on, slice after slice; beside them the others.
    Coming(const uint8_t* weights, size_t step, int tiles, const uint8_t* const (&others)[4], size_t others_step) : beside_step(others_step) {
        for (int i = 0; i < 4; i++) slice[i].ahead = weights + step * (size_t)(i * tiles), slice[i].ahead_step = step, slice[i].beside = others[i];
    }
};

}  // namespace
