// Two groups of eight rows between floats, for neon_loops.h, which has the loop around them. Pipes change from dot products to floats and back half as
// often as with one.
//
//   v0-7, v16-23  sums    v8-15  results    v24-27  codes    v28-31  quads of four rows of x
//   floats have v24-31, and the registers of sums that they have used
#pragma once

// clang-format off
#define QUIRE_FOUR_OF(A, B, C, D) "ldr q24, [c_, #" #A "]\n ldr q25, [c_, #" #B "]\n ldr q26, [c_, #" #C "]\n ldr q27, [c_, #" #D "]\n"
#define QUIRE_BYTES4(AT) QUIRE_FOUR_OF(AT, AT + 16, AT + 32, AT + 48)
// Six signed bits lie 64 bytes apart. The fourth register is what the lower bits of the three before it make.
#define QUIRE_SIX_BITS(R) "and v" #R ".16b, v" #R ".16b, v28.16b\n"
#define QUIRE_SIX4(AT) \
    QUIRE_FOUR_OF(AT, AT + 64, AT + 128, AT + 128) "ldr q28, [%[k]]\n sli v27.16b, v25.16b, #2\n" QUIRE_SIX_BITS(25) \
    "shl v27.16b, v27.16b, #2\n sli v27.16b, v24.16b, #6\n" QUIRE_SIX_BITS(24) QUIRE_SIX_BITS(26)
#define QUIRE_START4(A, B, C, D, AT) \
    "ldr q" #A ", [st_, #" #AT "]\n ldr q" #B ", [st_, #" #AT " + 16]\n ldr q" #C ", [st_, #" #AT " + 32]\n ldr q" #D ", [st_, #" #AT " + 48]\n"
#define QUIRE_QUADS4(X, AT) \
    "ldr q28, [x_, #" #X " + " #AT "]\n ldr q29, [x_, #" #X " + " #AT " + 32]\n" \
    "ldr q30, [x_, #" #X " + " #AT " + 64]\n ldr q31, [x_, #" #X " + " #AT " + 96]\n"
#define QUIRE_DOT4(A, B, C, D, CODES, J) \
    "sdot v" #A ".4s, v" #CODES ".16b, v28.4b[" #J "]\n sdot v" #B ".4s, v" #CODES ".16b, v29.4b[" #J "]\n" \
    "sdot v" #C ".4s, v" #CODES ".16b, v30.4b[" #J "]\n sdot v" #D ".4s, v" #CODES ".16b, v31.4b[" #J "]\n"
#define QUIRE_DOT16(A, B, C, D, P0, P1, P2, P3) \
    QUIRE_DOT4(A, B, C, D, 24, 0) P0 QUIRE_DOT4(A, B, C, D, 25, 1) P1 QUIRE_DOT4(A, B, C, D, 26, 2) P2 QUIRE_DOT4(A, B, C, D, 27, 3) P3
// Sixteen columns of eight rows: the first of a group, with what comes in between, or its others.
#define QUIRE_BEGIN16_OF(A, B, C, D, E, F, G, H, CODES, X, P0, P1, P2, P3) \
    CODES QUIRE_START4(A, B, C, D, 0) QUIRE_QUADS4(X, 0) QUIRE_DOT16(A, B, C, D, "", "", "", "") \
    QUIRE_START4(E, F, G, H, 64) "add st_, st_, step_\n" QUIRE_QUADS4(X, 128) QUIRE_DOT16(E, F, G, H, P0, P1, P2, P3)
#define QUIRE_BEGIN16(...) QUIRE_BEGIN16_OF(__VA_ARGS__)
#define QUIRE_END16_OF(A, B, C, D, E, F, G, H, CODES, X) \
    CODES QUIRE_QUADS4(X, 0) QUIRE_DOT16(A, B, C, D, "", "", "", "") QUIRE_QUADS4(X, 128) QUIRE_DOT16(E, F, G, H, "", "", "", "")
#define QUIRE_END16(...) QUIRE_END16_OF(__VA_ARGS__)
// acc += scale * (sx * sum) of eight sums, whose factors are S bytes on, and sx and excess X and 4 X.
#define QUIRE_EXCESS4(A, B, C, D, X, AT) \
    "ldr q" #A ", [ex_, #4 * " #X " + " #AT "]\n ldr q" #B ", [ex_, #4 * " #X " + " #AT " + 16]\n" \
    "ldr q" #C ", [ex_, #4 * " #X " + " #AT " + 32]\n ldr q" #D ", [ex_, #4 * " #X " + " #AT " + 48]\n"
#define QUIRE_ADD8(A, P) "fmla v" #A ".4s, v24.4s, v" #P ".4s\n"
#define QUIRE_SUMS8_OF(A, B, C, D, E, F, G, H, S, X) \
    "ldr q25, [sx_, #" #X "]\n ldr q24, [s_, #" #S "]\n" QUIRE_EXCESS4(26, 27, 28, 29, X, 0) \
    QUIRE_TIMES(26, A, 25, 0) QUIRE_TIMES(27, B, 25, 1) QUIRE_TIMES(28, C, 25, 2) QUIRE_TIMES(29, D, 25, 3) \
    "ldr q30, [sx_, #" #X " + 16]\n" QUIRE_EXCESS4(A, B, C, D, X, 64) \
    QUIRE_TIMES(A, E, 30, 0) QUIRE_TIMES(B, F, 30, 1) QUIRE_TIMES(C, G, 30, 2) QUIRE_TIMES(D, H, 30, 3) \
    QUIRE_ADD8(8, 26) QUIRE_ADD8(9, 27) QUIRE_ADD8(10, 28) QUIRE_ADD8(11, 29) QUIRE_ADD8(12, A) QUIRE_ADD8(13, B) QUIRE_ADD8(14, C) QUIRE_ADD8(15, D)
#define QUIRE_SUMS8(...) QUIRE_SUMS8_OF(__VA_ARGS__)
// acc += bias * sxs, if there is one
#define QUIRE_WITHOUT(S, T)
#define QUIRE_WITH(S, T) "ldr q31, [b_, #" #S "]\n" QUIRE_SXS(25, 30, T) QUIRE_BIASES(31, 25, 30)
#define QUIRE_EARLIER 0, 1, 2, 3, 4, 5, 6, 7
#define QUIRE_LATER 16, 17, 18, 19, 20, 21, 22, 23
// Two tiles of bytes.
#define QUIRE_TWO_TILES(BIAS, ...) \
    QUIRE_BEGIN16(QUIRE_EARLIER, QUIRE_BYTES4(0), 0, __VA_ARGS__) QUIRE_END16(QUIRE_EARLIER, QUIRE_BYTES4(64), 16) \
    QUIRE_BEGIN16(QUIRE_LATER, QUIRE_BYTES4(512), 512, __VA_ARGS__) QUIRE_END16(QUIRE_LATER, QUIRE_BYTES4(576), 528) \
    QUIRE_SUMS8(QUIRE_EARLIER, 0, 0) BIAS(0, 0) QUIRE_SUMS8(QUIRE_LATER, 128, 64) BIAS(128, 64) \
    QUIRE_ON(c, 1024) QUIRE_ON(s, 256) QUIRE_ON(b, 256) QUIRE_ON(sx, 128) QUIRE_ON(x, 1024) QUIRE_ON(ex, 512) QUIRE_ON(sxs, 128) "subs n_, n_, #2\n b.ne 1b\n"
// Two groups of a tile.
#define QUIRE_TWO_GROUPS(CODES, C, BIAS, NEXT, ...) \
    QUIRE_BEGIN16(QUIRE_EARLIER, CODES(0), 0, __VA_ARGS__) QUIRE_BEGIN16(QUIRE_LATER, CODES(C), 16, "", "", "", "") \
    QUIRE_SUMS8(QUIRE_EARLIER, 0, 0) BIAS(0, 0) QUIRE_SUMS8(QUIRE_LATER, 64, 0) BIAS(64, 64) \
    NEXT QUIRE_ON(s, 128) QUIRE_ON(b, 128) QUIRE_ON(sx, 64) QUIRE_ON(x, 512) QUIRE_ON(ex, 256) QUIRE_ON(sxs, 128) "subs n_, n_, #1\n b.ne 1b\n"
// What comes in between.
#define QUIRE_ASKING "", QUIRE_ASK_BOTH, "", ""
#define QUIRE_ASKING_SIX "", QUIRE_ASK(0), QUIRE_ASK(56) "add ahead_, ahead_, as_\n", ""
// A quad of packed codes becomes bytes. Only what has nothing to do works on them: a store from a vector register would take a pipe of the dot products.
// They stay in the upper bits of their bytes, signed.
#define QUIRE_UNPACKING \
    "ldp x20, x21, [x17]\n add x17, x17, x25\n", QUIRE_ASK_BOTH "eor x20, x20, #0x0808080808080808\n eor x21, x21, #0x0808080808080808\n", \
    "and x22, x24, x20, lsl #4\n and x23, x24, x21, lsl #4\n stp x22, x23, [x19]\n", \
    "and x20, x20, x24\n and x21, x21, x24\n stp x20, x21, [x19, #256]\n add x19, x19, #512\n"
// clang-format on
