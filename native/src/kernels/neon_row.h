// One row of x against 16 rows of weights, by name, for the reasons of neon_loops.h. Two groups at a time, so that dot products and floats
// take turns half as often.
//
//   v0-3  results    v4-7, v8-11  sums of either group    v12-15  quads of x, then factors    v16-23  codes, then factors
//   v24, v25  bytes of factors and what completes them    v26, v27  scratch    v28  128 in every byte    v29  -1.5 * 2^23 / times
//   v30  mask    v31  the groups' scales, and what their biases are multiplied by
#pragma once

namespace {

// Pointers to the first two groups.
struct RowArgs {
    const uint8_t *codes, *scale, *bias;
    const int8_t* x;
    const float* own;     // per two groups: scale, scale, scale * sum, scale * sum, of x
    const float* supers;  // byte factors only, see ByteFactors: of the scales, then of the biases
    long count;           // of two groups
    size_t far;           // how far ahead lines are asked for, into the second cache
};

template <int TIMES> struct alignas(16) RowConstants {
    uint32_t start[4] = {(uint32_t)sum_bits(TIMES), (uint32_t)sum_bits(TIMES), (uint32_t)sum_bits(TIMES), (uint32_t)sum_bits(TIMES)};
    uint32_t mask[4] = {kCodeMask<TIMES>, kCodeMask<TIMES>, kCodeMask<TIMES>, kCodeMask<TIMES>};
    uint8_t place[4][16] = {};  // four bytes each into the second lowest byte of a float of 2^15
    uint8_t top[16] = {};
    constexpr RowConstants() {
        for (int n = 0; n < 4; n++)
            for (int i = 0; i < 16; i++) place[n][i] = (uint8_t)(i % 4 == 1 ? 4 * n + i / 4 : i % 4 == 3 ? 16 : 255);
        for (uint8_t& byte : top) byte = 0x47;
    }
};
template <int TIMES> constexpr RowConstants<TIMES> kRowConstants;

// clang-format off
#define QUIRE_ROW_BEGIN \
    "ldr q4, [%[k]]\n ldr q5, [%[k]]\n ldr q6, [%[k]]\n ldr q7, [%[k]]\n ldr q8, [%[k]]\n ldr q9, [%[k]]\n ldr q10, [%[k]]\n ldr q11, [%[k]]\n" \
    "ldr q31, [%[own]]\n add %[own], %[own], #16\n"
#define QUIRE_ASK_CODES(AT) "prfm pldl2keep, [%[cf], #" #AT "]\n prfm pldl1keep, [%[c], #1024 + " #AT "]\n"
#define QUIRE_ASK_FACTORS(P) "prfm pldl2keep, [%[" #P "], %[far]]\n prfm pldl1keep, [%[" #P "], #512]\n"

// Four bits: a line of a tile at AT, quads J of x.
#define QUIRE_SPLIT_LOW(H, R) "ushr v" #H ".16b, v" #R ".16b, #4\n and v" #R ".16b, v" #R ".16b, v30.16b\n"
#define QUIRE_SPLIT_HIGH(H, R) "and v" #H ".16b, v" #R ".16b, v30.16b\n shl v" #R ".16b, v" #R ".16b, #4\n"
#define QUIRE_ROW_DOT(D, CODES, X, J) "sdot v" #D ".4s, v" #CODES ".16b, v" #X ".4b[" #J "]\n"
#define QUIRE_ROW_LINE(SPLIT, AT, D0, D1, D2, D3, X, Y, J) \
    "ldr q16, [%[c], #" #AT "]\n ldr q17, [%[c], #" #AT " + 16]\n ldr q18, [%[c], #" #AT " + 32]\n ldr q19, [%[c], #" #AT " + 48]\n" \
    QUIRE_ASK_CODES(AT) SPLIT(20, 16) SPLIT(21, 17) SPLIT(22, 18) SPLIT(23, 19) \
    QUIRE_ROW_DOT(D0, 16, X, J) QUIRE_ROW_DOT(D1, 17, X, J) QUIRE_ROW_DOT(D2, 18, X, J) QUIRE_ROW_DOT(D3, 19, X, J) \
    QUIRE_ROW_DOT(D0, 20, Y, J) QUIRE_ROW_DOT(D1, 21, Y, J) QUIRE_ROW_DOT(D2, 22, Y, J) QUIRE_ROW_DOT(D3, 23, Y, J)
#define QUIRE_ROW_FOUR_BY(SPLIT) \
    "ldr q12, [%[x]]\n ldr q13, [%[x], #16]\n ldr q14, [%[x], #32]\n ldr q15, [%[x], #48]\n add %[x], %[x], #64\n" \
    QUIRE_ROW_LINE(SPLIT, 0, 4, 5, 6, 7, 12, 13, 0) QUIRE_ROW_LINE(SPLIT, 64, 4, 5, 6, 7, 12, 13, 1) \
    QUIRE_ROW_LINE(SPLIT, 128, 4, 5, 6, 7, 12, 13, 2) QUIRE_ROW_LINE(SPLIT, 192, 4, 5, 6, 7, 12, 13, 3) \
    QUIRE_ROW_LINE(SPLIT, 256, 8, 9, 10, 11, 14, 15, 0) QUIRE_ROW_LINE(SPLIT, 320, 8, 9, 10, 11, 14, 15, 1) \
    QUIRE_ROW_LINE(SPLIT, 384, 8, 9, 10, 11, 14, 15, 2) QUIRE_ROW_LINE(SPLIT, 448, 8, 9, 10, 11, 14, 15, 3) \
    "add %[c], %[c], #512\n add %[cf], %[cf], #512\n"
#define QUIRE_ROW_FOUR QUIRE_ROW_FOUR_BY(QUIRE_SPLIT_LOW)
#define QUIRE_ROW_FOUR_SIGNED QUIRE_ROW_FOUR_BY(QUIRE_SPLIT_HIGH)

// Six bits, signed: a slice of 16 columns.
#define QUIRE_ROW_SLICE(AT, D, X, A, B, C, E) \
    "ldr q" #A ", [%[c], #" #AT "]\n ldr q" #B ", [%[c], #" #AT " + 64]\n ldr q" #C ", [%[c], #" #AT " + 128]\n ldr q" #E ", [%[c], #" #AT " + 128]\n" \
    "sli v" #E ".16b, v" #B ".16b, #2\n and v" #B ".16b, v" #B ".16b, v30.16b\n shl v" #E ".16b, v" #E ".16b, #2\n and v" #C ".16b, v" #C ".16b, v30.16b\n" \
    "sli v" #E ".16b, v" #A ".16b, #6\n and v" #A ".16b, v" #A ".16b, v30.16b\n" \
    QUIRE_ROW_DOT(D, B, X, 1) QUIRE_ROW_DOT(D, C, X, 2) QUIRE_ROW_DOT(D, A, X, 0) QUIRE_ROW_DOT(D, E, X, 3)
#define QUIRE_ROW_SIX_SIGNED \
    "ldr q12, [%[x]]\n ldr q13, [%[x], #16]\n add %[x], %[x], #32\n" \
    QUIRE_ROW_SLICE(0, 4, 12, 16, 17, 18, 19) QUIRE_ROW_SLICE(16, 5, 12, 20, 21, 22, 23) QUIRE_ASK_CODES(0) QUIRE_ASK_CODES(64) \
    QUIRE_ROW_SLICE(32, 6, 12, 16, 17, 18, 19) QUIRE_ROW_SLICE(48, 7, 12, 20, 21, 22, 23) QUIRE_ASK_CODES(128) \
    QUIRE_ROW_SLICE(192, 8, 13, 16, 17, 18, 19) QUIRE_ROW_SLICE(208, 9, 13, 20, 21, 22, 23) QUIRE_ASK_CODES(192) QUIRE_ASK_CODES(256) \
    QUIRE_ROW_SLICE(224, 10, 13, 16, 17, 18, 19) QUIRE_ROW_SLICE(240, 11, 13, 20, 21, 22, 23) QUIRE_ASK_CODES(320) \
    "add %[c], %[c], #384\n add %[cf], %[cf], #384\n"

// Factors of 16 rows of group G (0 or 1). Halves are there at once, in D0-D3; bytes are placed in T0-T3, and later made into D0-D3
// with the supers at S: what takes two cycles, three or four in its pipe keeps together.
#define QUIRE_PLACE_HALVES(P, G, T0, T1, T2, T3, D0, D1, D2, D3) \
    "ldr q26, [%[" #P "], #32 * " #G "]\n ldr q27, [%[" #P "], #32 * " #G " + 16]\n" \
    "fcvtl v" #D0 ".4s, v26.4h\n fcvtl2 v" #D1 ".4s, v26.8h\n fcvtl v" #D2 ".4s, v27.4h\n fcvtl2 v" #D3 ".4s, v27.8h\n"
#define QUIRE_MAKE_HALVES(S, T0, T1, T2, T3, D0, D1, D2, D3)
#define QUIRE_PLACE(N, T) "ldr q" #T ", [%[k], #32 + 16 * " #N "]\n tbl v" #T ".16b, {v24.16b, v25.16b}, v" #T ".16b\n"
#define QUIRE_PLACE_BYTES(P, G, T0, T1, T2, T3, D0, D1, D2, D3) \
    "ldr q24, [%[" #P "], #16 * " #G "]\n eor v24.16b, v24.16b, v28.16b\n" QUIRE_PLACE(0, T0) QUIRE_PLACE(1, T1) QUIRE_PLACE(2, T2) QUIRE_PLACE(3, T3)
#define QUIRE_MAKE(N, S, T, D) \
    "ldr q" #D ", [%[supers], #" #S " + 64 + 16 * " #N "]\n ldr q26, [%[supers], #" #S " + 16 * " #N "]\n fmla v" #D ".4s, v26.4s, v" #T ".4s\n"
#define QUIRE_MAKE_BYTES(S, T0, T1, T2, T3, D0, D1, D2, D3) \
    QUIRE_MAKE(0, S, T0, D0) QUIRE_MAKE(1, S, T1, D1) QUIRE_MAKE(2, S, T2, D2) QUIRE_MAKE(3, S, T3, D3)

#define QUIRE_ROW_FLOAT(R) "fadd v" #R ".4s, v" #R ".4s, v29.4s\n"
#define QUIRE_ROW_TIMES(R, J) "fmul v" #R ".4s, v" #R ".4s, v31.s[" #J "]\n"
#define QUIRE_ROW_ADD(A, P, D) "fmla v" #A ".4s, v" #P ".4s, v" #D ".4s\n"
#define QUIRE_ROW_LANE(A, P, J) "fmla v" #A ".4s, v" #P ".4s, v31.s[" #J "]\n"
// acc += (scale * own) * sum; with a bias, acc += bias * (own * sum of x), one group after the other.
#define QUIRE_ROW_SCALES(PLACE, MAKE) \
    PLACE(s, 0, 12, 13, 14, 15, 20, 21, 22, 23) PLACE(s, 1, 16, 17, 18, 19, 12, 13, 14, 15) \
    QUIRE_ROW_FLOAT(4) QUIRE_ROW_FLOAT(5) QUIRE_ROW_FLOAT(6) QUIRE_ROW_FLOAT(7) \
    QUIRE_ROW_FLOAT(8) QUIRE_ROW_FLOAT(9) QUIRE_ROW_FLOAT(10) QUIRE_ROW_FLOAT(11) \
    MAKE(0, 12, 13, 14, 15, 20, 21, 22, 23) MAKE(0, 16, 17, 18, 19, 12, 13, 14, 15)
#define QUIRE_ROW_SCALED \
    QUIRE_ROW_TIMES(20, 0) QUIRE_ROW_TIMES(21, 0) QUIRE_ROW_TIMES(22, 0) QUIRE_ROW_TIMES(23, 0) \
    QUIRE_ROW_TIMES(12, 1) QUIRE_ROW_TIMES(13, 1) QUIRE_ROW_TIMES(14, 1) QUIRE_ROW_TIMES(15, 1) \
    QUIRE_ROW_ADD(0, 20, 4) QUIRE_ROW_ADD(1, 21, 5) QUIRE_ROW_ADD(2, 22, 6) QUIRE_ROW_ADD(3, 23, 7)
#define QUIRE_ROW_SECOND QUIRE_ROW_ADD(0, 12, 8) QUIRE_ROW_ADD(1, 13, 9) QUIRE_ROW_ADD(2, 14, 10) QUIRE_ROW_ADD(3, 15, 11)
#define QUIRE_ROW_PLAIN(PLACE, MAKE) QUIRE_ROW_SCALES(PLACE, MAKE) QUIRE_ROW_SCALED QUIRE_ROW_SECOND
#define QUIRE_ROW_BIASES(A0, A1, A2, A3, B0, B1, B2, B3) \
    QUIRE_ROW_LANE(0, A0, 2) QUIRE_ROW_LANE(1, A1, 2) QUIRE_ROW_LANE(2, A2, 2) QUIRE_ROW_LANE(3, A3, 2) QUIRE_ROW_SECOND \
    QUIRE_ROW_LANE(0, B0, 3) QUIRE_ROW_LANE(1, B1, 3) QUIRE_ROW_LANE(2, B2, 3) QUIRE_ROW_LANE(3, B3, 3)
#define QUIRE_ROW_BIASES_QUIRE_MAKE_HALVES QUIRE_ROW_BIASES(16, 17, 18, 19, 20, 21, 22, 23)
#define QUIRE_ROW_BIASES_QUIRE_MAKE_BYTES \
    QUIRE_MAKE_BYTES(128, 16, 17, 18, 19, 20, 21, 22, 23) QUIRE_MAKE_BYTES(128, 4, 5, 6, 7, 16, 17, 18, 19) \
    QUIRE_ROW_BIASES(20, 21, 22, 23, 16, 17, 18, 19)
#define QUIRE_ROW_BIASED(PLACE, MAKE) \
    QUIRE_ROW_SCALES(PLACE, MAKE) PLACE(b, 0, 16, 17, 18, 19, 16, 17, 18, 19) QUIRE_ROW_SCALED PLACE(b, 1, 4, 5, 6, 7, 20, 21, 22, 23) \
    QUIRE_ROW_BIASES_##MAKE
#define QUIRE_ROW_LOOP(CODES, SUMS, FORM, STEP, NEXT)                                                                                \
    asm volatile("ldr q25, [%[k], #96]\n movi v28.16b, #128\n dup v29.4s, %w[less]\n ldr q30, [%[k], #16]\n"                          \
                 "1:\n" QUIRE_ROW_BEGIN CODES QUIRE_ASK_FACTORS(s) SUMS(QUIRE_PLACE_##FORM, QUIRE_MAKE_##FORM) "add %[s], %[s], #" #STEP "\n" NEXT                 \
                 "subs %[n], %[n], #1\n b.ne 1b\n"                                                                                    \
                 : "+w"(r0), "+w"(r1), "+w"(r2), "+w"(r3), [c] "+&r"(codes), [cf] "+&r"(ahead), [s] "+&r"(scale),       \
                   [b] "+&r"(bias), [x] "+&r"(x), [own] "+&r"(own), [n] "+&r"(count)                                                  \
                 : [k] "r"(&kRowConstants<kBy>), [supers] "r"(a.supers), [far] "r"(a.far), [less] "r"((uint32_t)sum_bits(kBy) | 0x80000000u) \
                 : "cc", "memory", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", \
                   "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31")

// Adds to the results of 16 rows, which the compiler can only have in the four registers that are left.
template <int BITS, bool BIAS, bool BYTES> QUIRE_INLINE void row_loop(const RowArgs& a, F& acc) {
    constexpr int kBy = kTimes<BITS, BIAS>;
    register float32x4_t r0 asm("v0") = acc.v[0];
    register float32x4_t r1 asm("v1") = acc.v[1];
    register float32x4_t r2 asm("v2") = acc.v[2];
    register float32x4_t r3 asm("v3") = acc.v[3];
    const uint8_t *codes = a.codes, *ahead = a.codes + a.far, *scale = a.scale, *bias = a.bias;
    const int8_t* x = a.x;
    const float* own = a.own;
    long count = a.count;
#define QUIRE_ASK_BIAS QUIRE_ASK_FACTORS(b)
    if constexpr (BITS == 4 && !BIAS && !BYTES) QUIRE_ROW_LOOP(QUIRE_ROW_FOUR_SIGNED, QUIRE_ROW_PLAIN, HALVES, 64, "");
    if constexpr (BITS == 4 && !BIAS && BYTES) QUIRE_ROW_LOOP(QUIRE_ROW_FOUR_SIGNED, QUIRE_ROW_PLAIN, BYTES, 32, "");
    if constexpr (BITS == 4 && BIAS && !BYTES) QUIRE_ROW_LOOP(QUIRE_ROW_FOUR, QUIRE_ROW_BIASED, HALVES, 64, QUIRE_ASK_BIAS "add %[b], %[b], #64\n");
    if constexpr (BITS == 4 && BIAS && BYTES) QUIRE_ROW_LOOP(QUIRE_ROW_FOUR, QUIRE_ROW_BIASED, BYTES, 32, QUIRE_ASK_BIAS "add %[b], %[b], #32\n");
    if constexpr (BITS == 6 && !BIAS && BYTES) QUIRE_ROW_LOOP(QUIRE_ROW_SIX_SIGNED, QUIRE_ROW_PLAIN, BYTES, 32, "");
    acc = {{r0, r1, r2, r3}};
}
// clang-format on

}  // namespace
