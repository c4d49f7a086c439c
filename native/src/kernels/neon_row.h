// One row of x against 16 rows of weights, by name, for the reasons of neon_loops.h. Two groups at a time, so that dot products and floats
// take turns half as often.
//
// Four bits are two rows of weights in a byte, of which only the upper code is taken out: the sum of the bytes as they are, less that of
// the upper codes, is the lower codes' sum.
//
//   v0-3  results    v4-7, v8-11  sums of either group    v12-15  quads of x, then factors    v16-23  codes, then factors and products
//   v24, v25  bytes of factors and what completes them    v26, v27  scratch    v28  128 in every byte
//   v30  mask    v31  the groups' scales, and what their biases are multiplied by
#pragma once

namespace {

// Pointers to the first two groups.
struct RowArgs {
    const uint8_t *codes, *scale, *bias;
    const int8_t* x;
    const TwoGroups* own;
    const float* supers;  // byte factors only, see ByteFactors: of the scales, then of the biases
    long count;           // of two groups
};

template <int BITS> struct alignas(16) RowConstants {
    uint32_t start[4] = {sum_bits(4), sum_bits(4), sum_bits(4), sum_bits(4)};  // of six bits
    uint32_t mask[4] = {kMask, kMask, kMask, kMask};
    uint8_t place[4][16] = {};  // four bytes each into the second lowest byte of a float of 2^15
    uint8_t top[16] = {};
    static constexpr uint32_t kMask = BITS == 4 ? 0xf0f0f0f0 : 0xfcfcfcfc;
    constexpr RowConstants() {
        for (int n = 0; n < 4; n++)
            for (int i = 0; i < 16; i++) place[n][i] = (uint8_t)(i % 4 == 1 ? 4 * n + i / 4 : i % 4 == 3 ? 16 : 255);
        for (uint8_t& byte : top) byte = 0x47;
    }
};
template <int BITS> constexpr RowConstants<BITS> kRowConstants;

// clang-format off
#define QUIRE_OWN "ldr q31, [%[own]]\n"
#define QUIRE_OWN_NEXT "add %[own], %[own], #144\n"
#define QUIRE_ROW_BEGIN_PAIRS \
    "ldr q4, [%[own], #80]\n ldr q5, [%[own], #80]\n ldr q6, [%[own], #96]\n ldr q7, [%[own], #96]\n" \
    "ldr q8, [%[own], #112]\n ldr q9, [%[own], #112]\n ldr q10, [%[own], #128]\n ldr q11, [%[own], #128]\n" QUIRE_OWN
#define QUIRE_ROW_BEGIN_SAME \
    "ldr q4, [%[k]]\n ldr q5, [%[k]]\n ldr q6, [%[k]]\n ldr q7, [%[k]]\n ldr q8, [%[k]]\n ldr q9, [%[k]]\n ldr q10, [%[k]]\n ldr q11, [%[k]]\n" QUIRE_OWN
// kNear ahead.
#define QUIRE_ROW_ASK(AT) "prfm pldl1keep, [%[c], #1024 + " #AT "]\n"
#define QUIRE_ROW_ON(BY) "add %[c], %[c], #" #BY "\n add %[s], %[s], #" #BY "\n add %[b], %[b], #" #BY "\n"

#define QUIRE_ROW_DOT(D, CODES, X, J) "sdot v" #D ".4s, v" #CODES ".16b, v" #X ".4b[" #J "]\n"
#define QUIRE_ROW_MASK(H, R) "and v" #H ".16b, v" #R ".16b, v30.16b\n"
// Four bits: a line of a tile at AT, two quads of 16 rows, J and K of x.
#define QUIRE_ROW_LINE(ASK, AT, D0, D1, D2, D3, X, J, K) \
    "ldr q16, [%[c], #" #AT "]\n ldr q17, [%[c], #" #AT " + 16]\n ldr q18, [%[c], #" #AT " + 32]\n ldr q19, [%[c], #" #AT " + 48]\n" \
    QUIRE_ROW_ASK(ASK) QUIRE_ROW_MASK(20, 16) QUIRE_ROW_MASK(21, 17) QUIRE_ROW_MASK(22, 18) QUIRE_ROW_MASK(23, 19) \
    QUIRE_ROW_DOT(D0, 16, X, J) QUIRE_ROW_DOT(D1, 17, X, J) QUIRE_ROW_DOT(D2, 20, X, J) QUIRE_ROW_DOT(D3, 21, X, J) \
    QUIRE_ROW_DOT(D0, 18, X, K) QUIRE_ROW_DOT(D1, 19, X, K) QUIRE_ROW_DOT(D2, 22, X, K) QUIRE_ROW_DOT(D3, 23, X, K)
#define QUIRE_ROW_FOUR(T) \
    QUIRE_ROW_BEGIN_PAIRS "ldr q12, [%[x]]\n ldr q13, [%[x], #16]\n ldr q14, [%[x], #32]\n ldr q15, [%[x], #48]\n add %[x], %[x], #64\n" \
    QUIRE_ROW_LINE(0, 0, 4, 5, 6, 7, 12, 0, 1) QUIRE_ROW_LINE(64, 64, 4, 5, 6, 7, 12, 2, 3) \
    QUIRE_ROW_LINE(128, 128, 4, 5, 6, 7, 13, 0, 1) QUIRE_ROW_LINE(192, 192, 4, 5, 6, 7, 13, 2, 3) \
    QUIRE_ROW_LINE(256, T, 8, 9, 10, 11, 14, 0, 1) QUIRE_ROW_LINE(320, T + 64, 8, 9, 10, 11, 14, 2, 3) \
    QUIRE_ROW_LINE(384, T + 128, 8, 9, 10, 11, 15, 0, 1) QUIRE_ROW_LINE(448, T + 192, 8, 9, 10, 11, 15, 2, 3) \
    QUIRE_ROW_ASK(512) QUIRE_ROW_ASK(576) \
    "sub v4.4s, v4.4s, v6.4s\n sub v5.4s, v5.4s, v7.4s\n sub v8.4s, v8.4s, v10.4s\n sub v9.4s, v9.4s, v11.4s\n"

// Six bits, signed: a slice of 16 columns.
#define QUIRE_ROW_SLICE(AT, D, X, A, B, C, E) \
    "ldr q" #A ", [%[c], #" #AT "]\n ldr q" #B ", [%[c], #" #AT " + 64]\n ldr q" #C ", [%[c], #" #AT " + 128]\n ldr q" #E ", [%[c], #" #AT " + 128]\n" \
    "sli v" #E ".16b, v" #B ".16b, #2\n and v" #B ".16b, v" #B ".16b, v30.16b\n shl v" #E ".16b, v" #E ".16b, #2\n and v" #C ".16b, v" #C ".16b, v30.16b\n" \
    "sli v" #E ".16b, v" #A ".16b, #6\n and v" #A ".16b, v" #A ".16b, v30.16b\n" \
    QUIRE_ROW_DOT(D, B, X, 1) QUIRE_ROW_DOT(D, C, X, 2) QUIRE_ROW_DOT(D, A, X, 0) QUIRE_ROW_DOT(D, E, X, 3)
#define QUIRE_ROW_SIX_SIGNED(T) \
    QUIRE_ROW_BEGIN_SAME "ldr q12, [%[x]]\n ldr q13, [%[x], #16]\n add %[x], %[x], #32\n" \
    QUIRE_ROW_SLICE(0, 4, 12, 16, 17, 18, 19) QUIRE_ROW_SLICE(16, 5, 12, 20, 21, 22, 23) QUIRE_ROW_ASK(0) QUIRE_ROW_ASK(64) \
    QUIRE_ROW_SLICE(32, 6, 12, 16, 17, 18, 19) QUIRE_ROW_SLICE(48, 7, 12, 20, 21, 22, 23) QUIRE_ROW_ASK(128) \
    QUIRE_ROW_SLICE(192, 8, 13, 16, 17, 18, 19) QUIRE_ROW_SLICE(208, 9, 13, 20, 21, 22, 23) QUIRE_ROW_ASK(192) QUIRE_ROW_ASK(256) \
    QUIRE_ROW_SLICE(224, 10, 13, 16, 17, 18, 19) QUIRE_ROW_SLICE(240, 11, 13, 20, 21, 22, 23) QUIRE_ROW_ASK(320) \
    QUIRE_ROW_ASK(384)

// Factors of 16 rows of group G (0 or 1). Halves are there at once, in D0-D3; bytes are placed in T0-T3, and later made into D0-D3
// with the supers at S: what takes two cycles, three or four in its pipe keeps together.
#define QUIRE_PLACE_HALVES(P, AT, T0, T1, T2, T3, D0, D1, D2, D3) \
    "ldr q26, [%[" #P "], #" #AT "]\n ldr q27, [%[" #P "], #" #AT " + 16]\n" \
    "fcvtl v" #D0 ".4s, v26.4h\n fcvtl2 v" #D1 ".4s, v26.8h\n fcvtl v" #D2 ".4s, v27.4h\n fcvtl2 v" #D3 ".4s, v27.8h\n"
#define QUIRE_MAKE_HALVES(S, T0, T1, T2, T3, D0, D1, D2, D3)
#define QUIRE_PLACE(N, T) "ldr q" #T ", [%[k], #32 + 16 * " #N "]\n tbl v" #T ".16b, {v24.16b, v25.16b}, v" #T ".16b\n"
#define QUIRE_PLACE_BYTES(P, AT, T0, T1, T2, T3, D0, D1, D2, D3) \
    "ldr q24, [%[" #P "], #" #AT "]\n eor v24.16b, v24.16b, v28.16b\n" QUIRE_PLACE(0, T0) QUIRE_PLACE(1, T1) QUIRE_PLACE(2, T2) QUIRE_PLACE(3, T3)
#define QUIRE_MAKE(N, S, T, D) \
    "ldr q" #D ", [%[supers], #" #S " + 64 + 16 * " #N "]\n ldr q26, [%[supers], #" #S " + 16 * " #N "]\n fmla v" #D ".4s, v26.4s, v" #T ".4s\n"
#define QUIRE_MAKE_BYTES(S, T0, T1, T2, T3, D0, D1, D2, D3) \
    QUIRE_MAKE(0, S, T0, D0) QUIRE_MAKE(1, S, T1, D1) QUIRE_MAKE(2, S, T2, D2) QUIRE_MAKE(3, S, T3, D3)

// Products of the sums with the groups' scales: group G's in P0-P3, whose excess is AT of own for the first eight rows and ON further for
// the others.
#define QUIRE_ROW_TIMES(P, SUM, G) "fmla v" #P ".4s, v" #SUM ".4s, v31.s[" #G "]\n"
#define QUIRE_ROW_PRODUCTS(G, AT, ON, P0, P1, P2, P3, S0, S1, S2, S3) \
    "ldr q" #P0 ", [%[own], #" #AT "]\n ldr q" #P1 ", [%[own], #" #AT "]\n" \
    QUIRE_ROW_TIMES(P0, S0, G) QUIRE_ROW_TIMES(P1, S1, G) \
    "ldr q" #P2 ", [%[own], #" #AT " + " #ON "]\n ldr q" #P3 ", [%[own], #" #AT " + " #ON "]\n" \
    QUIRE_ROW_TIMES(P2, S2, G) QUIRE_ROW_TIMES(P3, S3, G)
#define QUIRE_ROW_ADD(A, P, D) "fmla v" #A ".4s, v" #P ".4s, v" #D ".4s\n"
#define QUIRE_ROW_LANE(A, P, J) "fmla v" #A ".4s, v" #P ".4s, v31.s[" #J "]\n"
// acc += scale * (own * sum); with a bias, acc += bias * (own * sum of x), one group after the other.
#define QUIRE_ROW_FIRST(PLACE, MAKE, ON, AT) \
    PLACE(s, 0, 12, 13, 14, 15, 20, 21, 22, 23) PLACE(s, AT, 16, 17, 18, 19, 12, 13, 14, 15) \
    MAKE(0, 12, 13, 14, 15, 20, 21, 22, 23) MAKE(0, 16, 17, 18, 19, 12, 13, 14, 15) \
    QUIRE_ROW_PRODUCTS(0, 16, ON, 16, 17, 18, 19, 4, 5, 6, 7) QUIRE_ROW_PRODUCTS(1, 48, ON, 4, 5, 6, 7, 8, 9, 10, 11) \
    QUIRE_ROW_ADD(0, 20, 16) QUIRE_ROW_ADD(1, 21, 17) QUIRE_ROW_ADD(2, 22, 18) QUIRE_ROW_ADD(3, 23, 19)
#define QUIRE_ROW_SECOND QUIRE_ROW_ADD(0, 12, 4) QUIRE_ROW_ADD(1, 13, 5) QUIRE_ROW_ADD(2, 14, 6) QUIRE_ROW_ADD(3, 15, 7)
#define QUIRE_ROW_PLAIN(PLACE, MAKE, ON, AT) QUIRE_ROW_FIRST(PLACE, MAKE, ON, AT) QUIRE_ROW_SECOND
#define QUIRE_ROW_BIASED(PLACE, MAKE, ON, AT) \
    QUIRE_ROW_FIRST(PLACE, MAKE, ON, AT) \
    PLACE(b, 0, 8, 9, 10, 11, 16, 17, 18, 19) PLACE(b, AT, 20, 21, 22, 23, 8, 9, 10, 11) \
    MAKE(128, 8, 9, 10, 11, 16, 17, 18, 19) MAKE(128, 20, 21, 22, 23, 8, 9, 10, 11) \
    QUIRE_ROW_LANE(0, 16, 2) QUIRE_ROW_LANE(1, 17, 2) QUIRE_ROW_LANE(2, 18, 2) QUIRE_ROW_LANE(3, 19, 2) QUIRE_ROW_SECOND \
    QUIRE_ROW_LANE(0, 8, 3) QUIRE_ROW_LANE(1, 9, 3) QUIRE_ROW_LANE(2, 10, 3) QUIRE_ROW_LANE(3, 11, 3)
#define QUIRE_ROW_LOOP(CODES, SUMS, FORM, ON, T, AT, STEP)                                                                           \
    asm volatile("ldr q25, [%[k], #96]\n movi v28.16b, #128\n ldr q30, [%[k], #16]\n"                          \
                 "1:\n" CODES(T) SUMS(QUIRE_PLACE_##FORM, QUIRE_MAKE_##FORM, ON, AT) QUIRE_OWN_NEXT QUIRE_ROW_ON(STEP) \
                 "subs %[n], %[n], #1\n b.ne 1b\n"                                                                                    \
                 : "+w"(r0), "+w"(r1), "+w"(r2), "+w"(r3), [c] "+&r"(codes), [s] "+&r"(scale),       \
                   [b] "+&r"(bias), [x] "+&r"(x), [own] "+&r"(own), [n] "+&r"(count)                                                  \
                 : [k] "r"(&kRowConstants<BITS>), [supers] "r"(a.supers)                                           \
                 : "cc", "memory", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", \
                   "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v30", "v31")

// Adds to the results of 16 rows, which the compiler can only have in the four registers that are left.
template <int BITS, bool BIAS, bool BYTES> QUIRE_INLINE void row_loop(const RowArgs& a, F& acc) {
    register float32x4_t r0 asm("v0") = acc.v[0];
    register float32x4_t r1 asm("v1") = acc.v[1];
    register float32x4_t r2 asm("v2") = acc.v[2];
    register float32x4_t r3 asm("v3") = acc.v[3];
    const uint8_t *codes = a.codes, *scale = a.scale, *bias = a.bias;
    const int8_t* x = a.x;
    const TwoGroups* own = a.own;
    long count = a.count;
    if constexpr (BITS == 4 && !BIAS && !BYTES) QUIRE_ROW_LOOP(QUIRE_ROW_FOUR, QUIRE_ROW_PLAIN, HALVES, 16, 288, 288, 576);
    if constexpr (BITS == 4 && !BIAS && BYTES) QUIRE_ROW_LOOP(QUIRE_ROW_FOUR, QUIRE_ROW_PLAIN, BYTES, 16, 272, 272, 544);
    if constexpr (BITS == 4 && BIAS && !BYTES) QUIRE_ROW_LOOP(QUIRE_ROW_FOUR, QUIRE_ROW_BIASED, HALVES, 16, 320, 320, 640);
    if constexpr (BITS == 4 && BIAS && BYTES) QUIRE_ROW_LOOP(QUIRE_ROW_FOUR, QUIRE_ROW_BIASED, BYTES, 16, 288, 288, 576);
    if constexpr (BITS == 6 && !BIAS && BYTES) QUIRE_ROW_LOOP(QUIRE_ROW_SIX_SIGNED, QUIRE_ROW_PLAIN, BYTES, 0, 416, 16, 416);
    acc = {{r0, r1, r2, r3}};
}
// clang-format on

}  // namespace
