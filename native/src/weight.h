// Packed weights: what the kernels read. One form for every instruction set.
//
// A matrix is cut into blocks of 16 output rows. An affine block holds, region after region (each 64-byte aligned):
//   codes   per 32 columns: 64-byte vectors of 16 rows x 4 consecutive columns ("quads"), as bit planes:
//             8 bits  8 vectors, quad q in vector q
//             4       4 vectors, quad j in the low nibbles of vector j, quad j + 4 in the high ones; with kNibbleRows, 8 vectors of
//                     32 bytes, quad q in vector q: rows 0 to 7 in the low nibbles, rows 8 to 15 in the high ones, their top bit flipped
//             2       2 vectors, quad 4h + j in bits 2j, 2j + 1 of vector h
//             5       the first 4-bit plane, then bit 4 (1 vector, quad q in bit q)
//             6       6 vectors: quads 0, 1, 2, 4, 5, 6 in their upper bits; in the lower two, quad 3 in the first three vectors and quad 7
//                     in the others, its highest bits first
//             3       the 2-bit plane, then bit 2 (1 vector)
//             14      8 vectors of the upper bytes as for 8 bits, then the lower six bits as for 6: a code is 64 * (upper - 128) + lower - 32,
//                     and a weight four times that (fourteen.h)
//           and of each code its top bit flipped where stored_less says so
//   scales  per 32 columns and group: 16 float16 (Half), 16 int8 (Byte), or 16 bytes of scale | bias << 4 (Nibble)
//   biases  as the scales, where there are any (and not in Nibble)
//   supers  for Byte and Nibble, per 256 columns: 16 float16 that multiply the scales, then (with a bias) 16 for the biases
// With kTogether the scales and biases of a tile follow its codes, and all supers come after the last block: the blocks of a matrix are one
// stream, which is what an ARM CPU reads fastest. (A 64-byte load of codes would cross lines there.)
// In a wide block every float16 above is a float32.
// A dense block is [columns][16 rows] in its own type. Rows past n are zeros.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "memory.h"

namespace quire {

enum class Scales : int { Half = 0, Byte = 1, Nibble = 2 };
enum class Type : int { F32 = 0, F16 = 1, BF16 = 2, Affine = 3 };

// What codes are stored less, which flips their top bit: a dot product on ARM takes signed bytes, elsewhere unsigned ones. With a
// bias, short codes stay as they are: it has their offset.
#if defined(__aarch64__)
constexpr uint8_t stored_less(int bits, bool bias) { return bits >= 8 ? (uint8_t)128 : !bias && bits == 6 ? (uint8_t)32 : (uint8_t)0; }
constexpr bool kNibbleRows = true;
constexpr bool kTogether = true;
#else
constexpr uint8_t stored_less(int, bool) { return 0; }
constexpr bool kNibbleRows = false;
constexpr bool kTogether = false;
#endif

static inline size_t align64(size_t n) { return (n + 63) & ~(size_t)63; }

struct Matrix {
    Type type = Type::F32;
    int n = 0, k = 0;  // rows, columns
    int blocks = 0;    // of 16 rows
    size_t block_bytes = 0;
    Piece memory;

    // affine only
    int bits = 0, group = 0, offset = 0;
    Scales scales = Scales::Half;
    bool bias = false;
    bool wide = false;       // factors are float32, not float16
    int tiles = 0;           // k / 32
    size_t code_bytes = 0, scale_bytes = 0;  // of a tile
    size_t code_step = 0, factor_step = 0;   // from one tile to the next
    size_t scale_at = 0, bias_at = 0;        // of a block
    size_t super_at = 0, super_step = 0;     // of the first block's supers, and from one block's to the next
    size_t bias_super_at = 0;                // after a block's supers of the scales

    const uint8_t* block(int b) const { return memory.data() + (size_t)b * block_bytes; }
    uint8_t* block(int b) { return memory.data() + (size_t)b * block_bytes; }
    const uint8_t* supers(int b) const { return memory.data() + super_at + (size_t)b * super_step; }
    uint8_t* supers(int b) { return memory.data() + super_at + (size_t)b * super_step; }
    void measure(bool together = kTogether);  // sets the sizes from type, n, k, bits, group, scales, bias and wide
    void lay_out(bool together = kTogether);  // that, and maps the memory
    bool has_biases() const { return bias && scales != Scales::Nibble; }  // beside the scales
    size_t bytes() const { return bytes_; }

  private:
    size_t bytes_ = 0;
};

constexpr float kSumPoint = 0x1.8p23f;   // see sum_bits
constexpr float kScaleLimit = 0x1p110f;  // see group_scale

// Activations rounded to int8, in panels of 16 rows, so that what a matrix product reads is one stream:
//   codes  per 32 columns: 16 rows x 32 int8
//   then the scales, and the sums that offsets of weights are multiplied by; on ARM also what a sum that is made among the bits of a
//   float32 (sum_bits) has too much when it is multiplied by the scale, four times over
//   the products of scales and sums, which biases of weights are multiplied by
//   in fine panels, which weights of 14 bits read, what the codes lost: in 256ths of a step, as the codes are, and its sums
// Lanes past the last row hold anything.
struct QuantShape {
    static constexpr int kLanes = 16;
    int k = 0;
    size_t sx = 0;      // float [k/32][16]  scale
    size_t sum = 0;     // int32 [k/16][16]  sum of each half group's int8
    size_t excess = 0;  // float [k/32][16][4]  -kSumPoint * scale, where kHasExcess
    size_t sxs = 0;     // float [k/32][16]  scale * sum
    size_t low = 0;     // int8 [k/32][16][32]  of fine panels, else 0
    size_t low_sum = 0;  // int32 [k/32][16]
    size_t bytes = 0;   // of a panel
#if defined(__aarch64__)
    static constexpr bool kHasExcess = true;
#else
    static constexpr bool kHasExcess = false;
#endif

    QuantShape() = default;
    explicit QuantShape(int columns, bool fine = false) : k(columns) {
        size_t g = (size_t)columns / 32;
        sx = 512 * g;
        sum = sx + 64 * g;
        excess = sum + 128 * g;
        sxs = excess + (kHasExcess ? 256 * g : 0);
        bytes = sxs + 64 * g;
        if (fine) low = bytes, low_sum = low + 512 * g, bytes = low_sum + 64 * g;
    }
    bool fine() const { return low != 0; }

    // The same panels, seen from column 32 * g on, or with lane `lane` as the first: where such a view begins, and its shape.
    static size_t at(int g, int lane) { return 512 * (size_t)g + 32 * (size_t)lane; }
    QuantShape from(int g, int lane) const {
        QuantShape s = *this;
        s.k -= 32 * g;
        s.sx += 64 * (size_t)g + 4 * (size_t)lane - at(g, lane);
        s.sum += 128 * (size_t)g + 4 * (size_t)lane - at(g, lane);
        s.excess += 256 * (size_t)g + 16 * (size_t)lane - at(g, lane);
        s.sxs += 64 * (size_t)g + 4 * (size_t)lane - at(g, lane);
        if (fine()) s.low_sum += 64 * (size_t)g + 4 * (size_t)lane - at(g, lane);  // `low` lies as the codes do
        return s;
    }
};

}  // namespace quire
