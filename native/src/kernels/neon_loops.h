// The inner loop of int8 products of eight rows, by name. A compiler keeps neither the registers (the 32 are just enough) nor the
// order: a multiplication's result leaves its pipe one cycle later than a dot product's, a multiply-add's two, and a pipe that goes
// back to dot products stands still for as long. So the floats of all eight rows come together, after the dots.
//
//   v0-7   sums of a group    v8-15    results    v16-23  codes, then products    v24-27  quads of four rows of x, then products
//   v28    scales of the slice, then its biases    v29, v31    what belongs to four rows    v30    -1.5 * 2^23
#pragma once

namespace {

// What is added up over the tiles of a slice: pointers to its first tile, and how far it is to the next one.
struct SliceArgs {
    const uint8_t* codes;
    const float *scale, *bias;  // of the slice's four rows; 32 floats from one tile to the next, 16 from one group to the next
    const int8_t* x;            // of the first of eight lanes
    const float *sx, *sxs;
    long tiles;
    float* acc;
    size_t stride;         // in bytes, from a lane to the next
    const uint8_t* ahead;  // packed codes only: what will be wanted, a line for each tile and four bits
};

// Of the codes that one operation is enough for: in the lower four bits, or, signed, in the upper four or six.
template <int TIMES> constexpr uint32_t kCodeMask = TIMES == 16 ? 0xf0f0f0f0u : TIMES == 4 ? 0xfcfcfcfcu : 0x0f0f0f0fu;

template <int TIMES> alignas(16) constexpr uint32_t kLoopConstants[2][4] = {
    {(uint32_t)sum_bits(TIMES), (uint32_t)sum_bits(TIMES), (uint32_t)sum_bits(TIMES), (uint32_t)sum_bits(TIMES)},  // sums start here
    {kCodeMask<TIMES>, kCodeMask<TIMES>, kCodeMask<TIMES>, kCodeMask<TIMES>},
};

// clang-format off
#define QUIRE_ALL(OP) OP(0) OP(1) OP(2) OP(3) OP(4) OP(5) OP(6) OP(7)

// Eight registers of codes: bytes side by side; or packed, 64 bytes apart: four bits (with a bias, or signed), six signed bits, or eight.
#define QUIRE_CODES_BYTES \
    "ldr q16, [%[c]]\n ldr q17, [%[c], #16]\n ldr q18, [%[c], #32]\n ldr q19, [%[c], #48]\n" \
    "ldr q20, [%[c], #64]\n ldr q21, [%[c], #80]\n ldr q22, [%[c], #96]\n ldr q23, [%[c], #112]\n add %[c], %[c], #512\n"
#define QUIRE_MASK(R) "and v" #R ".16b, v" #R ".16b, v24.16b\n"
#define QUIRE_LOAD_FOUR \
    "ldr q16, [%[c]]\n ldr q17, [%[c], #64]\n ldr q18, [%[c], #128]\n ldr q19, [%[c], #192]\n ldr q24, [%[k], #16]\n add %[c], %[c], #256\n" \
    "prfm pldl1keep, [%[ahead]]\n add %[ahead], %[ahead], #64\n"
#define QUIRE_CODES_FOUR \
    QUIRE_LOAD_FOUR "ushr v20.16b, v16.16b, #4\n ushr v21.16b, v17.16b, #4\n ushr v22.16b, v18.16b, #4\n ushr v23.16b, v19.16b, #4\n" \
    QUIRE_MASK(16) QUIRE_MASK(17) QUIRE_MASK(18) QUIRE_MASK(19)
#define QUIRE_UPPER(TO, R) "and v" #TO ".16b, v" #R ".16b, v24.16b\n shl v" #R ".16b, v" #R ".16b, #4\n"
#define QUIRE_CODES_FOUR_SIGNED QUIRE_LOAD_FOUR QUIRE_UPPER(20, 16) QUIRE_UPPER(21, 17) QUIRE_UPPER(22, 18) QUIRE_UPPER(23, 19)
// The fourth register is what the lower bits of the three before it make.
#define QUIRE_FOURTH(A, B, D) \
    "sli v" #D ".16b, v" #B ".16b, #2\n" QUIRE_MASK(B) "shl v" #D ".16b, v" #D ".16b, #2\n sli v" #D ".16b, v" #A ".16b, #6\n" QUIRE_MASK(A)
#define QUIRE_CODES_SIX \
    "ldr q24, [%[k], #16]\n ldr q16, [%[c]]\n ldr q17, [%[c], #64]\n ldr q18, [%[c], #128]\n ldr q19, [%[c], #128]\n" \
    "ldr q20, [%[c], #192]\n ldr q21, [%[c], #256]\n ldr q22, [%[c], #320]\n ldr q23, [%[c], #320]\n add %[c], %[c], #384\n" \
    "prfm pldl1keep, [%[ahead]]\n prfm pldl1keep, [%[ahead], #48]\n add %[ahead], %[ahead], #96\n" \
    QUIRE_FOURTH(16, 17, 19) QUIRE_MASK(18) QUIRE_FOURTH(20, 21, 23) QUIRE_MASK(22)
#define QUIRE_CODES_EIGHT \
    "ldr q16, [%[c]]\n ldr q17, [%[c], #64]\n ldr q18, [%[c], #128]\n ldr q19, [%[c], #192]\n" \
    "ldr q20, [%[c], #256]\n ldr q21, [%[c], #320]\n ldr q22, [%[c], #384]\n ldr q23, [%[c], #448]\n add %[c], %[c], #512\n" \
    "prfm pldl1keep, [%[ahead]]\n prfm pldl1keep, [%[ahead], #64]\n add %[ahead], %[ahead], #128\n"

#define QUIRE_BEGIN(R) "ldr q" #R ", [%[k]]\n"
#define QUIRE_DOT(A, B, C, D, CODES, J) \
    "sdot v" #A ".4s, v" #CODES ".16b, v24.4b[" #J "]\n sdot v" #B ".4s, v" #CODES ".16b, v25.4b[" #J "]\n" \
    "sdot v" #C ".4s, v" #CODES ".16b, v26.4b[" #J "]\n sdot v" #D ".4s, v" #CODES ".16b, v27.4b[" #J "]\n"
// Sixteen columns of eight rows: four code registers, and where the rows' quads are.
#define QUIRE_HALF(C0, C1, C2, C3, X0, X1, X2, X3, X4, X5, X6, X7) \
    "ldr q24, [%[x], #" #X0 "]\n ldr q25, [%[x], #" #X1 "]\n ldr q26, [%[x], #" #X2 "]\n ldr q27, [%[x], #" #X3 "]\n" \
    QUIRE_DOT(0, 1, 2, 3, C0, 0) QUIRE_DOT(0, 1, 2, 3, C1, 1) QUIRE_DOT(0, 1, 2, 3, C2, 2) QUIRE_DOT(0, 1, 2, 3, C3, 3) \
    "ldr q24, [%[x], #" #X4 "]\n ldr q25, [%[x], #" #X5 "]\n ldr q26, [%[x], #" #X6 "]\n ldr q27, [%[x], #" #X7 "]\n" \
    QUIRE_DOT(4, 5, 6, 7, C0, 0) QUIRE_DOT(4, 5, 6, 7, C1, 1) QUIRE_DOT(4, 5, 6, 7, C2, 2) QUIRE_DOT(4, 5, 6, 7, C3, 3)
#define QUIRE_FIRST QUIRE_HALF(16, 17, 18, 19, 0, 32, 64, 96, 128, 160, 192, 224)
#define QUIRE_SECOND QUIRE_HALF(20, 21, 22, 23, 16, 48, 80, 112, 144, 176, 208, 240)

#define QUIRE_FLOAT(R) "fadd v" #R ".4s, v" #R ".4s, v30.4s\n"
#define QUIRE_TIMES(P, OWN, J) "fmul v" #P ".4s, v28.4s, v" #OWN ".s[" #J "]\n"
#define QUIRE_ADD(A, P, D) "fmla v" #A ".4s, v" #P ".4s, v" #D ".4s\n"
#define QUIRE_LANE(A, J) "fmla v" #A ".4s, v28.4s, v29.s[" #J "]\n"
// acc += (scale * sx) * sum, of the group whose scales are at S. The first sixteen columns' codes are no longer needed.
#define QUIRE_SUMS(S) \
    "ldr q28, [%[s], #" #S "]\n ldr q29, [%[sx]]\n ldr q31, [%[sx], #16]\n" QUIRE_ALL(QUIRE_FLOAT) \
    QUIRE_TIMES(24, 29, 0) QUIRE_TIMES(25, 29, 1) QUIRE_TIMES(26, 29, 2) QUIRE_TIMES(27, 29, 3) \
    QUIRE_TIMES(16, 31, 0) QUIRE_TIMES(17, 31, 1) QUIRE_TIMES(18, 31, 2) QUIRE_TIMES(19, 31, 3) \
    QUIRE_ADD(8, 24, 0) QUIRE_ADD(9, 25, 1) QUIRE_ADD(10, 26, 2) QUIRE_ADD(11, 27, 3) \
    QUIRE_ADD(12, 16, 4) QUIRE_ADD(13, 17, 5) QUIRE_ADD(14, 18, 6) QUIRE_ADD(15, 19, 7)
// acc += bias * sxs
#define QUIRE_BIASES(S) \
    "ldr q28, [%[b], #" #S "]\n ldr q29, [%[sxs], #" #S "]\n" QUIRE_LANE(8, 0) QUIRE_LANE(9, 1) QUIRE_LANE(10, 2) QUIRE_LANE(11, 3) \
    "ldr q29, [%[sxs], #" #S " + 16]\n" QUIRE_LANE(12, 0) QUIRE_LANE(13, 1) QUIRE_LANE(14, 2) QUIRE_LANE(15, 3)
#define QUIRE_NEXT "add %[s], %[s], #128\n add %[sx], %[sx], #64\n add %[x], %[x], #512\n"
#define QUIRE_GROUP32(BIAS) QUIRE_ALL(QUIRE_BEGIN) QUIRE_FIRST QUIRE_SECOND QUIRE_SUMS(0) BIAS(0)
#define QUIRE_GROUP16(BIAS) \
    QUIRE_ALL(QUIRE_BEGIN) QUIRE_FIRST QUIRE_SUMS(0) BIAS(0) QUIRE_ALL(QUIRE_BEGIN) QUIRE_SECOND QUIRE_SUMS(64) BIAS(64)
#define QUIRE_NO_BIAS(S)

#define QUIRE_TAKE(R) "ldr q" #R ", [%[at]]\n add %[at], %[at], %[stride]\n"
#define QUIRE_LEAVE(R) "str q" #R ", [%[at]]\n add %[at], %[at], %[stride]\n"
#define QUIRE_RESULTS(OP) OP(8) OP(9) OP(10) OP(11) OP(12) OP(13) OP(14) OP(15)

#define QUIRE_SLICE_LOOP(CODES, GROUP, BIAS, MORE)                                                                                   \
    asm volatile("dup v30.4s, %w[less]\n" QUIRE_RESULTS(QUIRE_TAKE)                                                                  \
                 "1:\n" CODES GROUP(BIAS) QUIRE_NEXT MORE "subs %[n], %[n], #1\n b.ne 1b\n"                                          \
                 "mov %[at], %[back]\n" QUIRE_RESULTS(QUIRE_LEAVE)                                                                   \
                 : [c] "+&r"(codes), [s] "+&r"(scale), [b] "+&r"(bias), [x] "+&r"(x), [sx] "+&r"(sx), [sxs] "+&r"(sxs), [n] "+&r"(tiles),\
                   [at] "+&r"(at), [ahead] "+&r"(ahead)                                                                              \
                 : [k] "r"(kLoopConstants<TIMES>), [less] "r"((uint32_t)sum_bits(TIMES) | 0x80000000u), [back] "r"(a.acc), [stride] "r"(a.stride)     \
                 : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", \
                   "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31")

// Eight rows of x against one slice. BITS: 0 for unpacked codes. TIMES: see kTimes.
template <int BITS, int TIMES, int GROUP, bool BIAS> inline void slice_loop(const SliceArgs& a) {
    const uint8_t* codes = a.codes;
    const float *scale = a.scale, *bias = a.bias, *sx = a.sx, *sxs = a.sxs;
    const int8_t* x = a.x;
    const uint8_t* ahead = a.ahead;
    float* at = a.acc;
    long tiles = a.tiles;
    if constexpr (BITS == 0 && GROUP == 32 && !BIAS) QUIRE_SLICE_LOOP(QUIRE_CODES_BYTES, QUIRE_GROUP32, QUIRE_NO_BIAS, "");
    if constexpr (BITS == 0 && GROUP == 32 && BIAS)
        QUIRE_SLICE_LOOP(QUIRE_CODES_BYTES, QUIRE_GROUP32, QUIRE_BIASES, "add %[b], %[b], #128\n add %[sxs], %[sxs], #64\n");
    if constexpr (BITS == 0 && GROUP == 16 && !BIAS) QUIRE_SLICE_LOOP(QUIRE_CODES_BYTES, QUIRE_GROUP16, QUIRE_NO_BIAS, "");
    if constexpr (BITS == 0 && GROUP == 16 && BIAS)
        QUIRE_SLICE_LOOP(QUIRE_CODES_BYTES, QUIRE_GROUP16, QUIRE_BIASES, "add %[b], %[b], #128\n add %[sxs], %[sxs], #128\n");
    if constexpr (BITS == 4 && GROUP == 32 && !BIAS) QUIRE_SLICE_LOOP(QUIRE_CODES_FOUR_SIGNED, QUIRE_GROUP32, QUIRE_NO_BIAS, "");
    if constexpr (BITS == 4 && GROUP == 32 && BIAS)
        QUIRE_SLICE_LOOP(QUIRE_CODES_FOUR, QUIRE_GROUP32, QUIRE_BIASES, "add %[b], %[b], #128\n add %[sxs], %[sxs], #64\n");
    if constexpr (BITS == 6 && GROUP == 16 && !BIAS) QUIRE_SLICE_LOOP(QUIRE_CODES_SIX, QUIRE_GROUP16, QUIRE_NO_BIAS, "");
    if constexpr (BITS == 8 && GROUP == 32 && !BIAS) QUIRE_SLICE_LOOP(QUIRE_CODES_EIGHT, QUIRE_GROUP32, QUIRE_NO_BIAS, "");
}
// clang-format on

}  // namespace
