// The inner loop of int8 products of eight rows, by name. A compiler keeps neither the registers (the 32 are just enough) nor the
// order: a multiplication's result leaves its pipe one cycle later than a dot product's, a multiply-add's two, and a pipe that goes
// back to dot products stands still for as long. So the floats of all eight rows come together, after the dots.
//
//   v0-7   sums of a group    v8-15    results    v16-23  codes, then products    v24-27  quads of four rows of x, then products
//   v28    scales of the slice    v29, v31    what belongs to four rows    v30    -1.5 * 2^23
#pragma once

namespace {

// What is added up over some tiles of a block, a slice (four rows of it) after the other.
struct BlockArgs {
    const uint8_t* codes;           // packed, or bytes [tile][slice][quad]
    const uint8_t *scale, *bias;    // float [tile][2 groups][16 rows], or float16 as they are packed
    const int8_t* x;                // of the first of eight lanes
    const float *sx, *sxs;
    long tiles;
    float* acc;                     // [slice][lane][4]
    long more;                      // 0: sums start from nothing, not from acc
    const uint8_t* ahead;           // packed codes only: what will be wanted, a line for each tile of a slice and four bits
};

// Of the codes that one operation is enough for: in the lower four bits, or, signed, in the upper four or six.
template <int TIMES> constexpr uint32_t kCodeMask = TIMES == 16 ? 0xf0f0f0f0u : TIMES == 4 ? 0xfcfcfcfcu : 0x0f0f0f0fu;

template <int TIMES> alignas(16) constexpr uint32_t kLoopConstants[2][4] = {
    {(uint32_t)sum_bits(TIMES), (uint32_t)sum_bits(TIMES), (uint32_t)sum_bits(TIMES), (uint32_t)sum_bits(TIMES)},  // sums start here
    {kCodeMask<TIMES>, kCodeMask<TIMES>, kCodeMask<TIMES>, kCodeMask<TIMES>},
};

// clang-format off
#define QUIRE_ALL(OP) OP(0) OP(1) OP(2) OP(3) OP(4) OP(5) OP(6) OP(7)

// Eight registers of codes, four for the first sixteen columns and four for the others: bytes side by side; or packed, 64 bytes apart:
// four bits (with a bias, or signed), six signed bits, or eight. Loads that come in a crowd hold up the operations behind them: bytes are
// loaded in two halves.
#define QUIRE_EARLY_BYTES "ldr q16, [%[c]]\n ldr q17, [%[c], #16]\n ldr q18, [%[c], #32]\n ldr q19, [%[c], #48]\n"
#define QUIRE_LATE_BYTES "ldr q20, [%[c], #64]\n ldr q21, [%[c], #80]\n ldr q22, [%[c], #96]\n ldr q23, [%[c], #112]\n add %[c], %[c], #512\n"
#define QUIRE_MASK(R) "and v" #R ".16b, v" #R ".16b, v31.16b\n"
#define QUIRE_LOAD_FOUR \
    "ldr q20, [%[c]]\n ldr q21, [%[c], #64]\n ldr q22, [%[c], #128]\n ldr q23, [%[c], #192]\n add %[c], %[c], #256\n" \
    "ldr q31, [%[k], #16]\n prfm pldl1keep, [%[ahead]]\n add %[ahead], %[ahead], #64\n"
#define QUIRE_NIBBLES(LOW, HIGH) "and v" #LOW ".16b, v" #HIGH ".16b, v31.16b\n ushr v" #HIGH ".16b, v" #HIGH ".16b, #4\n"
#define QUIRE_CODES_FOUR QUIRE_LOAD_FOUR QUIRE_NIBBLES(16, 20) QUIRE_NIBBLES(17, 21) QUIRE_NIBBLES(18, 22) QUIRE_NIBBLES(19, 23)
#define QUIRE_SIGNED(LOW, HIGH) "shl v" #LOW ".16b, v" #HIGH ".16b, #4\n" QUIRE_MASK(HIGH)
#define QUIRE_CODES_FOUR_SIGNED QUIRE_LOAD_FOUR QUIRE_SIGNED(16, 20) QUIRE_SIGNED(17, 21) QUIRE_SIGNED(18, 22) QUIRE_SIGNED(19, 23)
// The fourth register is what the lower bits of the three before it make.
#define QUIRE_FOURTH(A, B, C, D) \
    "sli v" #D ".16b, v" #B ".16b, #2\n" QUIRE_MASK(B) "shl v" #D ".16b, v" #D ".16b, #2\n sli v" #D ".16b, v" #A ".16b, #6\n" QUIRE_MASK(A) QUIRE_MASK(C)
#define QUIRE_CODES_SIX \
    "ldr q31, [%[k], #16]\n ldr q16, [%[c]]\n ldr q17, [%[c], #64]\n ldr q18, [%[c], #128]\n ldr q19, [%[c], #128]\n" QUIRE_FOURTH(16, 17, 18, 19) \
    "ldr q20, [%[c], #192]\n ldr q21, [%[c], #256]\n ldr q22, [%[c], #320]\n ldr q23, [%[c], #320]\n add %[c], %[c], #384\n" \
    "prfm pldl1keep, [%[ahead]]\n prfm pldl1keep, [%[ahead], #48]\n add %[ahead], %[ahead], #96\n" QUIRE_FOURTH(20, 21, 22, 23)
#define QUIRE_EARLY_EIGHT "ldr q16, [%[c]]\n ldr q17, [%[c], #64]\n ldr q18, [%[c], #128]\n ldr q19, [%[c], #192]\n prfm pldl1keep, [%[ahead]]\n"
#define QUIRE_LATE_EIGHT \
    "ldr q20, [%[c], #256]\n ldr q21, [%[c], #320]\n ldr q22, [%[c], #384]\n ldr q23, [%[c], #448]\n add %[c], %[c], #512\n" \
    "prfm pldl1keep, [%[ahead], #64]\n add %[ahead], %[ahead], #128\n"

#define QUIRE_BEGIN(A, B, C, D) "ldr q" #A ", [%[k]]\n ldr q" #B ", [%[k]]\n ldr q" #C ", [%[k]]\n ldr q" #D ", [%[k]]\n"
#define QUIRE_GOES_ON(A, B, C, D)
#define QUIRE_DOT(A, B, C, D, CODES, J) \
    "sdot v" #A ".4s, v" #CODES ".16b, v24.4b[" #J "]\n sdot v" #B ".4s, v" #CODES ".16b, v25.4b[" #J "]\n" \
    "sdot v" #C ".4s, v" #CODES ".16b, v26.4b[" #J "]\n sdot v" #D ".4s, v" #CODES ".16b, v27.4b[" #J "]\n"
// Sixteen columns of eight rows: how their sums start, four code registers, and where the rows' quads are.
#define QUIRE_HALF(START, C0, C1, C2, C3, X0, X1, X2, X3, X4, X5, X6, X7) \
    START(0, 1, 2, 3) "ldr q24, [%[x], #" #X0 "]\n ldr q25, [%[x], #" #X1 "]\n ldr q26, [%[x], #" #X2 "]\n ldr q27, [%[x], #" #X3 "]\n" \
    QUIRE_DOT(0, 1, 2, 3, C0, 0) QUIRE_DOT(0, 1, 2, 3, C1, 1) QUIRE_DOT(0, 1, 2, 3, C2, 2) QUIRE_DOT(0, 1, 2, 3, C3, 3) \
    START(4, 5, 6, 7) "ldr q24, [%[x], #" #X4 "]\n ldr q25, [%[x], #" #X5 "]\n ldr q26, [%[x], #" #X6 "]\n ldr q27, [%[x], #" #X7 "]\n" \
    QUIRE_DOT(4, 5, 6, 7, C0, 0) QUIRE_DOT(4, 5, 6, 7, C1, 1) QUIRE_DOT(4, 5, 6, 7, C2, 2) QUIRE_DOT(4, 5, 6, 7, C3, 3)
#define QUIRE_FIRST QUIRE_HALF(QUIRE_BEGIN, 16, 17, 18, 19, 0, 32, 64, 96, 128, 160, 192, 224)
#define QUIRE_SECOND(START) QUIRE_HALF(START, 20, 21, 22, 23, 16, 48, 80, 112, 144, 176, 208, 240)

// Factors of the slice into register R, S bytes after those of the tile's first group: floats, or halves that become floats here. They
// are asked for well before they are used.
#define QUIRE_FLOATS(R, FROM, S) "ldr q" #R ", [%[" #FROM "], #" #S "]\n"
#define QUIRE_HALVES(R, FROM, S) "ldr d" #R ", [%[" #FROM "]]\n fcvtl v" #R ".4s, v" #R ".4h\n"

#define QUIRE_FLOAT(R) "fadd v" #R ".4s, v" #R ".4s, v30.4s\n"
#define QUIRE_TIMES(P, OWN, J) "fmul v" #P ".4s, v28.4s, v" #OWN ".s[" #J "]\n"
#define QUIRE_ADD(A, P, D) "fmla v" #A ".4s, v" #P ".4s, v" #D ".4s\n"
#define QUIRE_LANE(A, BIAS, OWN, J) "fmla v" #A ".4s, v" #BIAS ".4s, v" #OWN ".s[" #J "]\n"
// acc += (scale * sx) * sum. The first sixteen columns' codes are no longer needed.
#define QUIRE_SUMS \
    "ldr q29, [%[sx]]\n ldr q31, [%[sx], #16]\n" QUIRE_ALL(QUIRE_FLOAT) \
    QUIRE_TIMES(24, 29, 0) QUIRE_TIMES(25, 29, 1) QUIRE_TIMES(26, 29, 2) QUIRE_TIMES(27, 29, 3) \
    QUIRE_TIMES(16, 31, 0) QUIRE_TIMES(17, 31, 1) QUIRE_TIMES(18, 31, 2) QUIRE_TIMES(19, 31, 3) \
    QUIRE_ADD(8, 24, 0) QUIRE_ADD(9, 25, 1) QUIRE_ADD(10, 26, 2) QUIRE_ADD(11, 27, 3) \
    QUIRE_ADD(12, 16, 4) QUIRE_ADD(13, 17, 5) QUIRE_ADD(14, 18, 6) QUIRE_ADD(15, 19, 7)
// acc += bias * sxs, with the bias in register R
#define QUIRE_BIASES(R, LOW, HIGH) \
    QUIRE_LANE(8, R, LOW, 0) QUIRE_LANE(9, R, LOW, 1) QUIRE_LANE(10, R, LOW, 2) QUIRE_LANE(11, R, LOW, 3) \
    QUIRE_LANE(12, R, HIGH, 0) QUIRE_LANE(13, R, HIGH, 1) QUIRE_LANE(14, R, HIGH, 2) QUIRE_LANE(15, R, HIGH, 3)
#define QUIRE_SXS(LOW, HIGH, S) "ldr q" #LOW ", [%[sxs], #" #S "]\n ldr q" #HIGH ", [%[sxs], #" #S " + 16]\n"
#define QUIRE_NEXT "add %[sx], %[sx], #64\n add %[x], %[x], #512\n"
#define QUIRE_GROUP32(LATE, FACTOR) QUIRE_FIRST LATE FACTOR(28, s, 0) QUIRE_SECOND(QUIRE_GOES_ON) QUIRE_SUMS
#define QUIRE_GROUP32_BIAS(LATE, FACTOR) \
    QUIRE_FIRST LATE FACTOR(28, s, 0) QUIRE_SECOND(QUIRE_GOES_ON) FACTOR(20, b, 0) QUIRE_SXS(21, 22, 0) QUIRE_SUMS QUIRE_BIASES(20, 21, 22)
#define QUIRE_GROUP16(LATE, FACTOR) FACTOR(28, s, 0) QUIRE_FIRST QUIRE_SUMS FACTOR(28, s, 64) LATE QUIRE_SECOND(QUIRE_BEGIN) QUIRE_SUMS
#define QUIRE_GROUP16_BIAS(LATE, FACTOR) \
    FACTOR(28, s, 0) QUIRE_FIRST QUIRE_SUMS FACTOR(28, b, 0) QUIRE_SXS(29, 31, 0) QUIRE_BIASES(28, 29, 31) \
    FACTOR(28, s, 64) LATE QUIRE_SECOND(QUIRE_BEGIN) QUIRE_SUMS FACTOR(28, b, 64) QUIRE_SXS(29, 31, 64) QUIRE_BIASES(28, 29, 31)

#define QUIRE_VECTORS "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", \
    "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31"
#define QUIRE_ZEROS "movi v8.2d, #0\n movi v9.2d, #0\n movi v10.2d, #0\n movi v11.2d, #0\n movi v12.2d, #0\n movi v13.2d, #0\n movi v14.2d, #0\n movi v15.2d, #0\n"
#define QUIRE_LESS [less] "r"((uint32_t)sum_bits(TIMES) | 0x80000000u)

// From one slice to the next: back to the first tile, and on by what a slice has of it.
#define QUIRE_BACK(P, SHIFT, ON) "sub %[" #P "], %[" #P "], %[tiles], lsl #" #SHIFT "\n add %[" #P "], %[" #P "], #" #ON "\n"

#define QUIRE_BLOCK_LOOP(EARLY, LATE, GROUP, FACTOR, MORE, BACK)                                                                     \
    asm volatile("dup v30.4s, %w[less]\n mov %[slices], #4\n"                                                                        \
                 "2:\n mov %[n], %[tiles]\n" QUIRE_ZEROS "cbz %[more], 1f\n"                                                    \
                 "ldp q8, q9, [%[at]]\n ldp q10, q11, [%[at], #32]\n ldp q12, q13, [%[at], #64]\n ldp q14, q15, [%[at], #96]\n"     \
                 "1:\n" EARLY GROUP(LATE, FACTOR) QUIRE_NEXT MORE "subs %[n], %[n], #1\n b.ne 1b\n"                                  \
                 "stp q8, q9, [%[at]]\n stp q10, q11, [%[at], #32]\n stp q12, q13, [%[at], #64]\n stp q14, q15, [%[at], #96]\n add %[at], %[at], #128\n" \
                 QUIRE_BACK(x, 9, 0) QUIRE_BACK(sx, 6, 0) BACK "subs %[slices], %[slices], #1\n b.ne 2b\n"                           \
                 : [c] "+&r"(codes), [s] "+&r"(scale), [b] "+&r"(bias), [x] "+&r"(x), [sx] "+&r"(sx), [sxs] "+&r"(sxs), [n] "=&r"(n),\
                   [slices] "=&r"(slices), [at] "+&r"(at), [ahead] "+&r"(ahead)                                                      \
                 : [k] "r"(kLoopConstants<TIMES>), QUIRE_LESS, [tiles] "r"(a.tiles), [more] "r"(a.more)                                                  \
                 : "cc", "memory", QUIRE_VECTORS)
#define QUIRE_NEXT_FLOATS(P) "add %[" #P "], %[" #P "], #128\n"
#define QUIRE_NEXT_HALVES(P) "add %[" #P "], %[" #P "], #32\n"
#define QUIRE_BACK_FLOATS(P) QUIRE_BACK(P, 7, 16)
#define QUIRE_BACK_HALVES(P) QUIRE_BACK(P, 5, 8)
#define QUIRE_NEXT_SXS(SHIFT) "add %[sxs], %[sxs], #1 << " #SHIFT "\n"

#define QUIRE_BLOCK(EARLY, LATE, GROUP, BACK)                                                                                        \
    if constexpr (HALVES) QUIRE_BLOCK_LOOP(EARLY, LATE, GROUP, QUIRE_HALVES, QUIRE_NEXT_HALVES(s), BACK QUIRE_BACK_HALVES(s));       \
    else QUIRE_BLOCK_LOOP(EARLY, LATE, GROUP, QUIRE_FLOATS, QUIRE_NEXT_FLOATS(s), BACK QUIRE_BACK_FLOATS(s))
#define QUIRE_BLOCK_BIAS(EARLY, LATE, GROUP, SXS, BACK)                                                                              \
    if constexpr (HALVES)                                                                                                            \
        QUIRE_BLOCK_LOOP(EARLY, LATE, GROUP, QUIRE_HALVES, QUIRE_NEXT_HALVES(s) QUIRE_NEXT_HALVES(b) QUIRE_NEXT_SXS(SXS),            \
                         BACK QUIRE_BACK_HALVES(s) QUIRE_BACK_HALVES(b) QUIRE_BACK(sxs, SXS, 0));                                    \
    else QUIRE_BLOCK_LOOP(EARLY, LATE, GROUP, QUIRE_FLOATS, QUIRE_NEXT_FLOATS(s) QUIRE_NEXT_FLOATS(b) QUIRE_NEXT_SXS(SXS),           \
                          BACK QUIRE_BACK_FLOATS(s) QUIRE_BACK_FLOATS(b) QUIRE_BACK(sxs, SXS, 0))

// Eight rows of x against the four slices of a block. BITS: 0 for unpacked codes. TIMES: see kTimes. HALVES: factors are float16.
template <int BITS, int TIMES, int GROUP, bool BIAS, bool HALVES> inline void block_loop(const BlockArgs& a) {
    const uint8_t *codes = a.codes, *scale = a.scale, *bias = a.bias, *ahead = a.ahead;
    const float *sx = a.sx, *sxs = a.sxs;
    const int8_t* x = a.x;
    float* at = a.acc;
    long n, slices;
    if constexpr (BITS == 0 && GROUP == 32 && !BIAS) { QUIRE_BLOCK(QUIRE_EARLY_BYTES, QUIRE_LATE_BYTES, QUIRE_GROUP32, QUIRE_BACK(c, 9, 128)); }
    if constexpr (BITS == 0 && GROUP == 32 && BIAS) { QUIRE_BLOCK_BIAS(QUIRE_EARLY_BYTES, QUIRE_LATE_BYTES, QUIRE_GROUP32_BIAS, 6, QUIRE_BACK(c, 9, 128)); }
    if constexpr (BITS == 0 && GROUP == 16 && !BIAS) { QUIRE_BLOCK(QUIRE_EARLY_BYTES, QUIRE_LATE_BYTES, QUIRE_GROUP16, QUIRE_BACK(c, 9, 128)); }
    if constexpr (BITS == 0 && GROUP == 16 && BIAS) { QUIRE_BLOCK_BIAS(QUIRE_EARLY_BYTES, QUIRE_LATE_BYTES, QUIRE_GROUP16_BIAS, 7, QUIRE_BACK(c, 9, 128)); }
    if constexpr (BITS == 4 && GROUP == 32 && !BIAS) { QUIRE_BLOCK(QUIRE_CODES_FOUR_SIGNED, "", QUIRE_GROUP32, QUIRE_BACK(c, 8, 16)); }
    if constexpr (BITS == 4 && GROUP == 32 && BIAS) { QUIRE_BLOCK_BIAS(QUIRE_CODES_FOUR, "", QUIRE_GROUP32_BIAS, 6, QUIRE_BACK(c, 8, 16)); }
    if constexpr (BITS == 6 && GROUP == 16 && !BIAS && !HALVES) { QUIRE_BLOCK(QUIRE_CODES_SIX, "", QUIRE_GROUP16, QUIRE_BACK(c, 8, 0) QUIRE_BACK(c, 7, 16)); }
    if constexpr (BITS == 8 && GROUP == 32 && !BIAS) { QUIRE_BLOCK(QUIRE_EARLY_EIGHT, QUIRE_LATE_EIGHT, QUIRE_GROUP32, QUIRE_BACK(c, 9, 16)); }
}
// clang-format on

}  // namespace
