// The loop of int8 products of eight rows, by name: slice after slice, tile after tile. A compiler keeps neither the registers (the 32 are
// just enough) nor the order: a multiplication's result leaves its pipe one cycle later than a dot product's, a multiply-add's two, and a pipe
// that goes back to dot products stands still for as long. So the floats of all eight rows come together, after the dots; with bytes, those of two
// tiles (neon_pairs.h). With packed codes that would be slower: they need registers, and operations among the floats. One tile has:
//
//   v0-7   sums of a group    v8-15    results    v16-23  codes, then products    v24-27  quads of four rows of x, then products
//   v28    scales of the slice    v29, v31    what belongs to four rows    v30    mask
#pragma once

#include "neon_pairs.h"
#include "neon_slice_args.h"

namespace {

struct alignas(16) LoopConstants {
    uint32_t mask[4];
    float by[4];  // float16 scales are multiplied by this, where codes are times 16
    constexpr explicit LoopConstants(uint32_t of) : mask{of, of, of, of}, by{0.0625f, 0.0625f, 0.0625f, 0.0625f} {}
};
template <int BITS, int HALF> constexpr LoopConstants kLoopConstants{BITS == 6 ? 0xfcfcfcfcu : HALF ? 0xf0f0f0f0u : 0x0f0f0f0fu};

// clang-format off
// Eight registers of codes, four for the first sixteen columns and four for the others: bytes side by side; or packed: four bits 32 bytes
// apart, eight 64. What comes in a crowd holds up the operations behind it: the later four come among the dot products
// of the first, in four pieces.
#define QUIRE_MASK(R) "and v" #R ".16b, v" #R ".16b, v30.16b\n"
#define QUIRE_CODES(R, AT) "ldr q" #R ", [c_, #" #AT "]\n"
#define QUIRE_ASK(AT) "prfm pldl1keep, [ahead_, #" #AT "]\n"
// One packed tile on (x25: code_step), and some bytes.
#define QUIRE_PASS(P) "add " #P "_, " #P "_, x25\n"
#define QUIRE_ON(P, BY) "add " #P "_, " #P "_, #" #BY "\n"
#define QUIRE_EARLY_BYTES QUIRE_CODES(16, 0) QUIRE_CODES(17, 16) QUIRE_CODES(18, 32) QUIRE_CODES(19, 48)
#define QUIRE_ASK_BOTH QUIRE_ASK(0) "add ahead_, ahead_, as_\n prfm pldl1keep, [be_]\n add be_, be_, bs_\n"
#define QUIRE_LATE_BYTES QUIRE_CODES(20, 64), QUIRE_CODES(21, 80) QUIRE_ASK_BOTH, QUIRE_CODES(22, 96), QUIRE_CODES(23, 112) QUIRE_ON(c, 512)
#define QUIRE_EARLY_FOUR \
    QUIRE_CODES(16, 0) QUIRE_CODES(17, 32) QUIRE_CODES(18, 64) QUIRE_CODES(19, 96) QUIRE_MASK(16) QUIRE_MASK(17) QUIRE_MASK(18) QUIRE_MASK(19)
#define QUIRE_LATE_FOUR \
    QUIRE_CODES(20, 128) QUIRE_CODES(21, 160), QUIRE_CODES(22, 192) QUIRE_CODES(23, 224) QUIRE_PASS(c) QUIRE_ASK(0), \
    QUIRE_MASK(20) QUIRE_MASK(21) QUIRE_ASK(40) "add ahead_, ahead_, as_\n", QUIRE_MASK(22) QUIRE_MASK(23)
#define QUIRE_EARLY_EIGHT QUIRE_CODES(16, 0) QUIRE_CODES(17, 64) QUIRE_CODES(18, 128) QUIRE_CODES(19, 192)
#define QUIRE_LATE_EIGHT \
    QUIRE_CODES(20, 256) QUIRE_ASK(64), QUIRE_CODES(21, 320), QUIRE_CODES(22, 384) QUIRE_ASK_BOTH, QUIRE_CODES(23, 448) QUIRE_PASS(c)

#define QUIRE_BEGIN_LOW "ldr q0, [st_]\n ldr q1, [st_, #16]\n ldr q2, [st_, #32]\n ldr q3, [st_, #48]\n"
#define QUIRE_BEGIN_HIGH "ldr q4, [st_, #64]\n ldr q5, [st_, #80]\n ldr q6, [st_, #96]\n ldr q7, [st_, #112]\n add st_, st_, step_\n"
#define QUIRE_DOT(A, B, C, D, CODES, J) \
    "sdot v" #A ".4s, v" #CODES ".16b, v24.4b[" #J "]\n sdot v" #B ".4s, v" #CODES ".16b, v25.4b[" #J "]\n" \
    "sdot v" #C ".4s, v" #CODES ".16b, v26.4b[" #J "]\n sdot v" #D ".4s, v" #CODES ".16b, v27.4b[" #J "]\n"
// Sixteen columns of eight rows: how their sums start, if they do, four code registers, where the rows' quads are, and what comes in between.
#define QUIRE_HALF_OF(LOW, HIGH, C0, C1, C2, C3, X0, X1, X2, X3, X4, X5, X6, X7, P0, P1, P2, P3) \
    LOW "ldr q24, [x_, #" #X0 "]\n ldr q25, [x_, #" #X1 "]\n ldr q26, [x_, #" #X2 "]\n ldr q27, [x_, #" #X3 "]\n" \
    QUIRE_DOT(0, 1, 2, 3, C0, 0) QUIRE_DOT(0, 1, 2, 3, C1, 1) QUIRE_DOT(0, 1, 2, 3, C2, 2) QUIRE_DOT(0, 1, 2, 3, C3, 3) \
    HIGH "ldr q24, [x_, #" #X4 "]\n ldr q25, [x_, #" #X5 "]\n ldr q26, [x_, #" #X6 "]\n ldr q27, [x_, #" #X7 "]\n" \
    QUIRE_DOT(4, 5, 6, 7, C0, 0) P0 QUIRE_DOT(4, 5, 6, 7, C1, 1) P1 QUIRE_DOT(4, 5, 6, 7, C2, 2) P2 QUIRE_DOT(4, 5, 6, 7, C3, 3) P3
#define QUIRE_HALF(...) QUIRE_HALF_OF(__VA_ARGS__)
#define QUIRE_FIRST(...) QUIRE_HALF(QUIRE_BEGIN_LOW, QUIRE_BEGIN_HIGH, 16, 17, 18, 19, 0, 32, 64, 96, 128, 160, 192, 224, __VA_ARGS__)
#define QUIRE_LAST QUIRE_HALF("", "", 20, 21, 22, 23, 16, 48, 80, 112, 144, 176, 208, 240, "", "", "", "")

// Factors of the slice into register R: floats, or halves that become floats here. They are asked for well before they are used.
#define QUIRE_FLOATS(R, FROM) "ldr q" #R ", [" #FROM "_]\n"
#define QUIRE_HALVES(R, FROM) "ldr d" #R ", [" #FROM "_]\n fcvtl v" #R ".4s, v" #R ".4h\n"
#define QUIRE_SIXTEENTHS(R, FROM) "ldr q16, [%[k], #16]\n" QUIRE_HALVES(R, FROM) "fmul v" #R ".4s, v" #R ".4s, v16.4s\n"

#define QUIRE_EXCESS(P, AT) "ldr q" #P ", [ex_, #" #AT "]\n"
#define QUIRE_TIMES(P, SUM, OWN, J) "fmla v" #P ".4s, v" #SUM ".4s, v" #OWN ".s[" #J "]\n"
#define QUIRE_ADD(A, P) "fmla v" #A ".4s, v28.4s, v" #P ".4s\n"
#define QUIRE_LANE(A, BIAS, OWN, J) "fmla v" #A ".4s, v" #BIAS ".4s, v" #OWN ".s[" #J "]\n"
// acc += scale * (sx * sum). The first sixteen columns' codes are no longer needed.
#define QUIRE_SUMS \
    "ldr q29, [sx_]\n" QUIRE_EXCESS(16, 0) QUIRE_EXCESS(17, 16) QUIRE_EXCESS(18, 32) QUIRE_EXCESS(19, 48) \
    QUIRE_TIMES(16, 0, 29, 0) QUIRE_TIMES(17, 1, 29, 1) QUIRE_TIMES(18, 2, 29, 2) QUIRE_TIMES(19, 3, 29, 3) \
    "ldr q31, [sx_, #16]\n" QUIRE_EXCESS(24, 64) QUIRE_EXCESS(25, 80) QUIRE_EXCESS(26, 96) QUIRE_EXCESS(27, 112) \
    QUIRE_TIMES(24, 4, 31, 0) QUIRE_TIMES(25, 5, 31, 1) QUIRE_TIMES(26, 6, 31, 2) QUIRE_TIMES(27, 7, 31, 3) \
    QUIRE_ADD(8, 16) QUIRE_ADD(9, 17) QUIRE_ADD(10, 18) QUIRE_ADD(11, 19) QUIRE_ADD(12, 24) QUIRE_ADD(13, 25) QUIRE_ADD(14, 26) QUIRE_ADD(15, 27)
// acc += bias * sxs, with the bias in register R
#define QUIRE_BIASES(R, LOW, HIGH) \
    QUIRE_LANE(8, R, LOW, 0) QUIRE_LANE(9, R, LOW, 1) QUIRE_LANE(10, R, LOW, 2) QUIRE_LANE(11, R, LOW, 3) \
    QUIRE_LANE(12, R, HIGH, 0) QUIRE_LANE(13, R, HIGH, 1) QUIRE_LANE(14, R, HIGH, 2) QUIRE_LANE(15, R, HIGH, 3)
#define QUIRE_SXS(LOW, HIGH, S) "ldr q" #LOW ", [sxs_, #" #S "]\n ldr q" #HIGH ", [sxs_, #" #S " + 16]\n"
#define QUIRE_GROUP32(FACTOR, ...) QUIRE_FIRST(__VA_ARGS__) QUIRE_LAST QUIRE_SUMS
#define QUIRE_GROUP32_BIAS(FACTOR, ...) \
    QUIRE_FIRST(__VA_ARGS__) QUIRE_LAST FACTOR(20, b) QUIRE_SXS(21, 22, 0) QUIRE_SUMS QUIRE_BIASES(20, 21, 22)

#define QUIRE_NAMES(DO) \
    DO(c, 3) DO(s, 4) DO(b, 5) DO(x, 6) DO(sx, 7) DO(sxs, 8) DO(ex, 9) DO(st, 10) DO(step, 11) DO(n, 12) DO(ahead, 13) DO(as, 14) DO(be, 15) DO(bs, 16)
#define QUIRE_NAME(P, X) #P "_ .req x" #X "\n"
#define QUIRE_UNNAME(P, X) ".unreq " #P "_\n"
// x25: code_step    x26: slices    x27: asks    x28: the slice
// Arguments are loaded one by one at first: a pair would wait for two stores to reach the cache.
#define QUIRE_ARG(X, AT) "ldr " #X ", [%[a], #" #AT "]\n"
#define QUIRE_OPEN \
    QUIRE_ARG(c_, 0) QUIRE_ARG(s_, 8) QUIRE_ARG(b_, 16) QUIRE_ARG(x25, 24) QUIRE_ARG(x26, 88) QUIRE_ARG(x27, 96) QUIRE_ARG(bs_, 104) \
    QUIRE_ARG(n_, 128) QUIRE_ARG(x_, 32) QUIRE_ARG(sx_, 40) QUIRE_ARG(sxs_, 48) QUIRE_ARG(ex_, 56) QUIRE_ARG(st_, 64) QUIRE_ARG(step_, 72) \
    "mov x28, #0\n b 3f\n"
#define QUIRE_AGAIN \
    "ldp n_, x_, [%[a], #128]\n madd n_, x28, x_, n_\n ldp x_, sx_, [%[a], #32]\n ldp sxs_, ex_, [%[a], #48]\n ldp st_, step_, [%[a], #64]\n"
#define QUIRE_TAKE \
    "ldr ahead_, [x27]\n ldr as_, [x27, #8]\n ldr be_, [x27, #16]\n" \
    "ldp q8, q9, [n_]\n ldp q10, q11, [n_, #32]\n ldp q12, q13, [n_, #64]\n ldp q14, q15, [n_, #96]\n" QUIRE_ARG(n_, 80)
#define QUIRE_ADD_LANE(R) "ldr q16, [sxs_]\n add sxs_, sxs_, ex_\n fadd v" #R ".4s, v" #R ".4s, v16.4s\n"
#define QUIRE_LEAVE_LANE(R) "str q" #R ", [x_]\n add x_, x_, sx_\n"
#define QUIRE_EIGHT_LANES(DO) DO(8) DO(9) DO(10) DO(11) DO(12) DO(13) DO(14) DO(15)
#define QUIRE_LEAVE \
    "ldp x_, sx_, [%[a], #144]\n ldp sxs_, ex_, [%[a], #160]\n madd x_, x28, sxs_, x_\n cbz ex_, 2f\n" \
    "add sxs_, ex_, x28, lsl #4\n ldr ex_, [%[a], #176]\n" QUIRE_EIGHT_LANES(QUIRE_ADD_LANE) "2:\n" QUIRE_EIGHT_LANES(QUIRE_LEAVE_LANE) \
    "ldp x_, sx_, [%[a], #112]\n add c_, c_, x_\n add s_, s_, sx_\n add b_, b_, sx_\n" \
    "add x27, x27, #40\n add x28, x28, #1\n cmp x28, x26\n b.ne 0b\n"
#define QUIRE_SLICE_LOOP(BODY, OPEN, TAKE, ...)                                                                  \
    asm volatile(QUIRE_NAMES(QUIRE_NAME) "ldr q30, [%[k]]\n" OPEN QUIRE_OPEN "0:\n" QUIRE_AGAIN "3:\n" QUIRE_TAKE TAKE                                         \
                 "1:\n" BODY QUIRE_LEAVE QUIRE_NAMES(QUIRE_UNNAME)                                                         \
                 :                                                                                                                     \
                 : [a] "r"(&a), [k] "r"(&kLoopConstants<BITS, UNPACKS ? 1 : HALF>)                                                                  \
                 : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15",                 \
                   "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31", "x3", "x4", "x5",   \
                   "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x25", "x26", "x27", "x28", __VA_ARGS__)
// A tile, and the scales of the next (of the last one again): to convert halves among the dot products would hold those up.
#define QUIRE_TILE(EARLY, LATE, GROUP, SCALE, FACTOR, STEP) \
    EARLY GROUP(FACTOR, QUIRE_##LATE) "subs n_, n_, #1\n csel x17, " STEP ", xzr, ne\n add s_, s_, x17\n add b_, b_, x17\n" SCALE(28, s) \
    QUIRE_ON(sx, 64) QUIRE_ON(x, 512) QUIRE_ON(ex, 256) QUIRE_ON(sxs, 64) "b.ne 1b\n add s_, s_, " STEP "\n add b_, b_, " STEP "\n"
#define QUIRE_SLICE(EARLY, LATE, GROUP)                                                                                              \
    if constexpr (!HALVES)                                                                                                           \
        QUIRE_SLICE_LOOP(QUIRE_TILE(EARLY, LATE, GROUP, QUIRE_FLOATS, QUIRE_FLOATS, "x19"), "mov x19, #128\n", QUIRE_FLOATS(28, s), "x16", "x17", "x19"); \
    else if constexpr (HALF)                                                                                                         \
        QUIRE_SLICE_LOOP(QUIRE_TILE(EARLY, LATE, GROUP, QUIRE_SIXTEENTHS, QUIRE_HALVES, "x25"), "", QUIRE_SIXTEENTHS(28, s), "x16", "x17"); \
    else QUIRE_SLICE_LOOP(QUIRE_TILE(EARLY, LATE, GROUP, QUIRE_HALVES, QUIRE_HALVES, "x25"), "", QUIRE_HALVES(28, s), "x16", "x17")
#define QUIRE_SLICE_UNPACKING(BODY)                                                                                                  \
    QUIRE_SLICE_LOOP(BODY, "ldr x24, [%[k]]\n", "ldr x17, [x27, #24]\n ldr x19, [x27, #32]\n", "x16", "x17", "x19", "x20", "x21", "x22", "x23", "x24")

// Adds eight rows of x against some slices to their results. BITS: 0 for unpacked codes. HALF: see Coded. HALVES: factors are float16. UNPACKS: see
// SliceAsks; bytes without a bias, an even number of tiles.
template <int BITS, int HALF, int GROUP, bool BIAS, bool HALVES, bool UNPACKS = false> QUIRE_INLINE void slice_loop(const SliceArgs& a) {
    if constexpr (GROUP == 16) {
        if constexpr (BITS == 6) QUIRE_SLICE_LOOP(QUIRE_TWO_GROUPS(QUIRE_SIX4, 192, QUIRE_WITHOUT, QUIRE_PASS(c), QUIRE_ASKING_SIX), "", "", "x16");
        else if constexpr (BIAS) QUIRE_SLICE_LOOP(QUIRE_TWO_GROUPS(QUIRE_BYTES4, 64, QUIRE_WITH, QUIRE_ON(c, 512), QUIRE_ASKING), "", "", "x16");
        else QUIRE_SLICE_LOOP(QUIRE_TWO_GROUPS(QUIRE_BYTES4, 64, QUIRE_WITHOUT, QUIRE_ON(c, 512), QUIRE_ASKING), "", "", "x16");
        return;
    }
    if constexpr (BITS == 0)
        if (a.tiles % 2 == 0) {
            if constexpr (UNPACKS) QUIRE_SLICE_UNPACKING(QUIRE_TWO_TILES(QUIRE_WITHOUT, QUIRE_UNPACKING));
            else if constexpr (BIAS) QUIRE_SLICE_LOOP(QUIRE_TWO_TILES(QUIRE_WITH, QUIRE_ASKING), "", "", "x16");
            else QUIRE_SLICE_LOOP(QUIRE_TWO_TILES(QUIRE_WITHOUT, QUIRE_ASKING), "", "", "x16");
            return;
        }
    if constexpr (BITS == 0 && !UNPACKS && !BIAS) { QUIRE_SLICE(QUIRE_EARLY_BYTES, LATE_BYTES, QUIRE_GROUP32); }
    if constexpr (BITS == 0 && BIAS) { QUIRE_SLICE(QUIRE_EARLY_BYTES, LATE_BYTES, QUIRE_GROUP32_BIAS); }
    if constexpr (BITS == 4 && !BIAS) { QUIRE_SLICE(QUIRE_EARLY_FOUR, LATE_FOUR, QUIRE_GROUP32); }
    if constexpr (BITS == 4 && BIAS) { QUIRE_SLICE(QUIRE_EARLY_FOUR, LATE_FOUR, QUIRE_GROUP32_BIAS); }
    if constexpr (BITS == 8) { QUIRE_SLICE(QUIRE_EARLY_EIGHT, LATE_EIGHT, QUIRE_GROUP32); }
}
// clang-format on

}  // namespace
