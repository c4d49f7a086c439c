// The int8 products on NEON, in place of the general ones of gemm.h and linear.h: the same sums in the same order, arranged for
// a CPU with two vector pipes, where a conversion costs as much as two dot products. A kernel works on a slice: four rows of
// a block, whose 32 columns of a tile are eight registers of codes. Here is one row of x, and what several have in common with it
// (neon_rows.h).
//
// For each group, slice and row that leaves two operations beside eight dot products (three with a bias): sums start from a load, one
// multiply-add by what belongs to the row makes floats of them, another adds them up.
#pragma once

#include "neon_codes.h"

namespace {

// What one row brings to two groups, beside its codes.
struct alignas(16) TwoGroups {
    float own[4];            // scale, scale, scale * sum, scale * sum
    float excess[2][2][4];   // [group][half]: of the sums that are multiplied by the scale; see Coded
    uint32_t start[2][2][4];  // four bits only: what sums of bytes as they are and of their upper halves start from
};

}  // namespace

#ifdef QUIRE_NEON_DOT
#include "neon_loops.h"
#include "neon_row.h"
#endif

namespace {

// A body for each of 0 to N - 1, unrolled before the compiler looks at it: what it indexes stays in registers.
template <class Body, int... I> QUIRE_INLINE void each_of(std::integer_sequence<int, I...>, const Body& body) {
    (body(std::integral_constant<int, I>{}), ...);
}
template <int N, class Body> QUIRE_INLINE void each(const Body& body) { each_of(std::make_integer_sequence<int, N>{}, body); }

// Loads by name, because a compiler would rather copy a register: that takes a vector pipe, these do not.
QUIRE_INLINE W load_again(const uint32_t* from) {
    W d;
    asm volatile("ldr %q0, %1" : "=w"(d) : "m"(*(const uint32_t(*)[4])from));
    return d;
}
QUIRE_INLINE V load_again(const float* from) {
    V d;
    asm volatile("ldr %q0, %1" : "=w"(d) : "m"(*(const float(*)[4])from));
    return d;
}

QUIRE_INLINE F half_sixteen(const uint8_t* p) {
    const float16x8_t a = vreinterpretq_f16_u16(vld1q_u16((const uint16_t*)p)), b = vreinterpretq_f16_u16(vld1q_u16((const uint16_t*)p + 8));
    return {{vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a), vcvt_f32_f16(vget_low_f16(b)), vcvt_high_f32_f16(b)}};
}

// Factors that are bytes times a float16 of 256 columns, without converting: the byte, its top bit flipped, is put into the
// bits of 2^15, which makes 2^15 + 128 + code, and one fma multiplies and takes the rest away. All of it is exact.
struct ByteFactors {
    V super[4] = {}, less[4] = {};

    QUIRE_INLINE void begin(const uint8_t* halves) {
        const F f = half_sixteen(halves);
        for (int n = 0; n < 4; n++) super[n] = f.v[n], less[n] = vmulq_f32(f.v[n], vdupq_n_f32(-32896.0f));
    }
    QUIRE_INLINE V of(const uint8_t* codes, int n) const {
        const uint8x16_t flipped = veorq_u8(vld1q_u8(codes), vdupq_n_u8(128));
        const uint16x8_t eight = n < 2 ? vshll_n_u8(vget_low_u8(flipped), 8) : vshll_high_n_u8(flipped, 8), top = vdupq_n_u16(0x4700);
        return vfmaq_f32(less[n], super[n], vreinterpretq_f32_u16(n % 2 ? vzip2q_u16(eight, top) : vzip1q_u16(eight, top)));
    }
    QUIRE_INLINE F of(const uint8_t* codes) const { return {{of(codes, 0), of(codes, 1), of(codes, 2), of(codes, 3)}}; }
};

inline bool byte_factors(const Matrix& w) { return w.scales == Scales::Byte && !w.wide; }
inline bool half_factors(const Matrix& w) { return w.scales == Scales::Half && !w.wide; }

constexpr int kSuper = 8;  // tiles whose byte factors share a scale
enum class Kind { Half, Byte, Other };

// Sums of the 16 rows of a tile against one row of x, as the bits of floats that begin with `start`, of either half. Codes of 8 bits are
// taken a line of memory at a time, the others a slice.
template <int BITS, int GROUP, bool BIAS>
QUIRE_INLINE void tile_sums(const uint8_t* tile, X first, X second, const uint32_t (&start)[32 / GROUP][2], W (&d)[32 / GROUP][4]) {
    constexpr int kParts = 32 / GROUP;
    QUIRE_UNROLL
    for (int part = 0; part < kParts; part++)
        QUIRE_UNROLL
        for (int n = 0; n < 4; n++) d[part][n] = vreinterpretq_s32_u32(vdupq_n_u32(start[part][Coded<BITS, BIAS>::half(n)]));
    if constexpr (BITS == 8) {
        each<8>([&](auto q) __attribute__((always_inline)) {  // lines in their order, which is what memory gives fastest
            QUIRE_UNROLL
            for (int n = 0; n < 4; n++) {
                W& sum_of = d[q < 4 ? 0 : kParts - 1][n];
                sum_of = wdot<q % 4>(sum_of, vreinterpretq_s8_u8(vld1q_u8(tile + 64 * q + 16 * n)), q < 4 ? first : second);
            }
        });
    } else {
        each<4>([&](auto n) __attribute__((always_inline)) {
            C c[8];
            slice_codes<BITS, BIAS, Coded<BITS, BIAS>::half(n), true>(tile, n, 0, c);
            each<4>([&](auto j) __attribute__((always_inline)) {
                d[0][n] = wdot<j>(d[0][n], c[j], first);
                d[kParts - 1][n] = wdot<j>(d[kParts - 1][n], c[j + 4], second);
            });
        });
    }
}

// One lane of a panel, its numbers side by side: in a panel they are half a kilobyte apart, where they would keep to a few sets of the
// first cache and be pushed out of it by the weights.
struct OneRow {
    static constexpr int kTiles = 512;
    alignas(64) int8_t codes[32 * kTiles];
    alignas(64) float scale[kTiles];
    alignas(64) int32_t sum[2 * kTiles];
    alignas(64) TwoGroups own[kTiles];

    template <int BITS, int GROUP, bool BIAS> QUIRE_INLINE void take(const uint8_t* x, const QuantShape& s, int tiles, int offset) {
        using Of = Coded<BITS, BIAS>;
        for (int t = 0; t < tiles; t++) {
            vst1q_s8(codes + 32 * t, vld1q_s8((const int8_t*)x + 512 * (size_t)t));
            vst1q_s8(codes + 32 * t + 16, vld1q_s8((const int8_t*)x + 512 * (size_t)t + 16));
            scale[t] = ((const float*)(x + s.sx))[16 * (size_t)t];
            sum[2 * t] = ((const int32_t*)(x + s.sum))[32 * (size_t)t], sum[2 * t + 1] = ((const int32_t*)(x + s.sum))[32 * (size_t)t + 16];
            const V excess = vld1q_f32((const float*)(x + s.excess) + 64 * (size_t)t);
            for (int part = 0; part < 32 / GROUP; part++) {
                const int g = 32 / GROUP * t + part, total = GROUP == 32 ? sum[2 * t] + sum[2 * t + 1] : sum[2 * t + part];
                TwoGroups& to = own[g / 2];
                to.own[g % 2] = scale[t], to.own[2 + g % 2] = scale[t] * (float)total;
                uint32_t start[2];
                for (int half = 0; half < Of::kHalves; half++) {
                    vst1q_f32(to.excess[g % 2][half], vmulq_n_f32(excess, 1.0f / (float)Of::times(half)));
                    start[half] = sum_bits(Of::times(half)) + (uint32_t)(Of::shift(half, offset) * total);
                }
                if constexpr (BITS == 4) {  // the upper codes are in both
                    vst1q_u32(to.start[g % 2][0], vdupq_n_u32(start[0] + start[1]));
                    vst1q_u32(to.start[g % 2][1], vdupq_n_u32(start[1]));
                }
            }
        }
    }
};

inline void prefetch_far(const void* p) { asm volatile("prfm pldl2keep, %a0" ::"p"(p)); }

// acc += scale * (s * sum, without its excess) of 16 rows; by name, so that they stay together (see neon_loops.h).
template <int BITS, bool BIAS>
QUIRE_INLINE void add_scaled(F& acc, const F& scale, V s, const float (&excess)[2][4], const W (&sum)[4]) {
    V p[4];
    each<4>([&](auto n) __attribute__((always_inline)) { p[n] = load_again(excess[Coded<BITS, BIAS>::half(n)]); });
    asm volatile("fmla %4.4s, %12.4s, %16.s[0]\n fmla %5.4s, %13.4s, %16.s[0]\n fmla %6.4s, %14.4s, %16.s[0]\n fmla %7.4s, %15.4s, %16.s[0]\n"
                 "fmla %0.4s, %4.4s, %8.4s\n fmla %1.4s, %5.4s, %9.4s\n fmla %2.4s, %6.4s, %10.4s\n fmla %3.4s, %7.4s, %11.4s\n"
                 : "+w"(acc.v[0]), "+w"(acc.v[1]), "+w"(acc.v[2]), "+w"(acc.v[3]), "+&w"(p[0]), "+&w"(p[1]), "+&w"(p[2]), "+&w"(p[3])
                 : "w"(scale.v[0]), "w"(scale.v[1]), "w"(scale.v[2]), "w"(scale.v[3]), "w"(sum[0]), "w"(sum[1]), "w"(sum[2]), "w"(sum[3]), "w"(s));
}

constexpr size_t kNear = 1024, kNearBytes = 512;  // how far ahead lines are asked for; of 8-bit codes, which take the fewest cycles

// While a run's last block is read, from tile t on: a little of the beginning of what comes then. A CPU finds out about the rest by itself.
inline void ask_then(const uint8_t* then, int t, int tiles) {
    for (int line = 0; line < 2 * tiles; line++) prefetch_far(then + 128 * (size_t)t + 64 * (size_t)line);
}

#ifdef QUIRE_NEON_DOT
// Tiles of a block from t0 on, as many as come in whole groups of two: how many those were.
template <int BITS, int GROUP, bool BIAS, Kind KIND>
inline int row_by_name(const Matrix& w, int b, int t0, int tiles, const OneRow& x, const uint8_t* then, F& acc) {
    constexpr int kEach = GROUP / 16;                                        // tiles of two groups
    const int most = KIND == Kind::Byte || then ? kSuper : OneRow::kTiles;  // with the same supers, or between asking
    const int done = tiles - tiles % kEach;
    const uint8_t* block = w.block(b);
    alignas(64) float supers[4][16];
    for (int t = 0; t < done; t += most) {
        if (then) ask_then(then, t0 + t, kSuper);
        const size_t at = (size_t)(t0 + t);
        auto put = [&](size_t from, float (*to)[16]) __attribute__((always_inline)) {
            ByteFactors f;
            f.begin(w.supers(b) + from + 4 * at);
            QUIRE_UNROLL
            for (int n = 0; n < 4; n++) vst1q_f32(to[0] + 4 * n, f.super[n]), vst1q_f32(to[1] + 4 * n, f.less[n]);
        };
        if constexpr (KIND == Kind::Byte) put(0, supers);
        if constexpr (KIND == Kind::Byte && BIAS) put(w.bias_super_at, supers + 2);
        const RowArgs args = {block + at * w.code_step, block + w.scale_at + at * w.factor_step, block + w.bias_at + at * w.factor_step,
                              x.codes + 32 * t, x.own + t / kEach, supers[0], (done - t < most ? done - t : most) / kEach};
        row_loop<BITS, BIAS, KIND == Kind::Byte>(args, acc);
    }
    return done;
}
#endif

// `tiles` tiles of block b of w, from t0 on, against one row.
template <int BITS, int GROUP, bool BIAS, Kind KIND>
inline F affine_row_by(const Matrix& w, int b, const uint8_t* then, int t0, int tiles, const OneRow& x, F acc) {
    constexpr int kParts = 32 / GROUP;
    const uint8_t* block = w.block(b);
    using Of = Coded<BITS, BIAS>;
    const int shift[2] = {kSubtracts<BITS, BIAS> ? -w.offset : Of::shift(0, w.offset), Of::shift(1, w.offset)};
    const size_t step = w.code_step;
    int done = 0;
#ifdef QUIRE_NEON_DOT
    if constexpr (KIND != Kind::Other && (BITS == 4 ? GROUP == 32 : BITS == 6 && GROUP == 16 && !BIAS && KIND == Kind::Byte))
        if (BITS == 4 || !Of::shift(0, w.offset)) done = row_by_name<BITS, GROUP, BIAS, KIND>(w, b, t0, tiles, x, then, acc);
#endif
    t0 += done;
    const uint8_t *tile = block + (size_t)t0 * w.code_step, *scale_at = block + w.scale_at + (size_t)t0 * step;
    const uint8_t* bias_at = block + w.bias_at + (size_t)t0 * step;
    const int8_t* q = x.codes + 32 * done;
    const float* sx = x.scale + done;
    const int32_t* sum = x.sum + 2 * done;
    ByteFactors scales, biases;
    for (int t = 0; t < tiles - done; t++, tile += step, scale_at += step, bias_at += step, q += 32, sx++, sum += 2) {
        if constexpr (KIND == Kind::Byte)
            if (t % kSuper == 0) {
                scales.begin(w.supers(b) + 4 * (size_t)(t0 + t));
                if constexpr (BIAS) biases.begin(w.supers(b) + w.bias_super_at + 4 * (size_t)(t0 + t));
            }
        QUIRE_UNROLL
        for (int i = 0; i <= BITS; i++) prefetch(tile + (BITS == 8 ? kNearBytes : kNear) + 64 * i);
        if (__builtin_expect(then != nullptr, 0)) ask_then(then, t0 + t, 1);
        const int32_t total[2] = {kParts == 1 ? sum[0] + sum[1] : sum[0], sum[1]};
        uint32_t start[kParts][2];
        QUIRE_UNROLL
        for (int part = 0; part < kParts; part++)
            for (int half = 0; half < Of::kHalves; half++)
                start[part][half] = sum_bits(Of::times(half)) + (uint32_t)(shift[half] * total[part]);
        W found[kParts][4];
        tile_sums<BITS, GROUP, BIAS>(tile, xload(q), xload(q + 16), start, found);
        QUIRE_UNROLL
        for (int part = 0; part < kParts; part++) {
            const F scale = KIND == Kind::Half   ? half_sixteen(scale_at + 32 * part)
                            : KIND == Kind::Byte ? scales.of(scale_at + 16 * part)
                                                 : scale_of(w, b, t0 + t, part);
            [[maybe_unused]] const int g = kParts * (done + t) + part;
            if constexpr (kParts == 2) add_scaled<BITS, BIAS>(acc, scale, sload(sx).v, x.own[g / 2].excess[g % 2], found[part]);
            else  // the weights stream through the first cache: what can be made from the scale is not read
                QUIRE_UNROLL
                for (int n = 0; n < 4; n++) {
                    const V excess = vdupq_n_f32(-kSumPoint / (float)Of::times(Of::half(n)) * *sx);
                    acc.v[n] = vfmaq_f32(acc.v[n], scale.v[n], vfmaq_n_f32(excess, vreinterpretq_f32_s32(found[part][n]), *sx));
                }
            if constexpr (BIAS) {
                const F bias = KIND == Kind::Half   ? half_sixteen(bias_at + 32 * part)
                               : KIND == Kind::Byte ? biases.of(bias_at + 16 * part)
                                                    : bias_of(w, b, t0 + t, part);
                QUIRE_UNROLL
                for (int n = 0; n < 4; n++) acc.v[n] = vfmaq_n_f32(acc.v[n], bias.v[n], *sx * (float)total[part]);
            }
        }
    }
    return acc;
}

template <int BITS, int GROUP, bool BIAS>
void affine_one_row(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, const Epilogue& e) {
    OneRow row;
    auto blocks = [&](auto kind) {
        for (int b = b0; b < b1; b++) {
            F acc = fzero();
            for (int t0 = 0; t0 < w.tiles; t0 += OneRow::kTiles) {
                const int tiles = w.tiles - t0 < OneRow::kTiles ? w.tiles - t0 : OneRow::kTiles;
                if (b == b0 || w.tiles > OneRow::kTiles) {
                    const QuantShape rest = s.from(t0, 0);
                    row.template take<BITS, GROUP, BIAS>(x + QuantShape::at(t0, 0), rest, tiles, w.offset);
                }
                acc = affine_row_by<BITS, GROUP, BIAS, decltype(kind)::value>(w, b, b + 1 == b1 ? e.then : nullptr, t0, tiles, row, acc);
            }
            finish(e, 0, 16 * (b - b0), acc);
        }
    };
    if (half_factors(w)) return blocks(std::integral_constant<Kind, Kind::Half>{});
    if (byte_factors(w)) return blocks(std::integral_constant<Kind, Kind::Byte>{});
    blocks(std::integral_constant<Kind, Kind::Other>{});
}

}  // namespace
