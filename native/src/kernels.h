// The kernel table: one per instruction set, all with the same results, bit for bit. Plain pointers in, nothing allocated.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <algorithm>

#include "elementwise.h"
#include "weight.h"

namespace quire {

// Where a linear's results go: out[m * out_stride + column], with bias and residual added when they are there.
struct Epilogue {
    float* out = nullptr;
    size_t out_stride = 0;  // in floats
    const float* bias = nullptr;
    const float* residual = nullptr;  // same shape as out
    size_t residual_stride = 0;
    const uint8_t* then = nullptr;  // a block, of whatever matrix, that will most likely be read after these; or nothing
};

struct RopeArgs {
    const float* cos;  // [dim / 2] of this row
    const float* sin;
    int dim, head_dim, heads;
    bool pairs;
};

constexpr int kPage = 16;    // tokens in a KV page: the lane count
constexpr int kChunk = 256;  // tokens whose softmax is one sum; a query's past is cut at multiples of this, always
constexpr int kMaxHeadDim = 256;
constexpr int kMaxLatentDim = 576;  // of a key whose front is the value
constexpr int kMaxAttend = 192;     // queries in one call
constexpr int kMaxLatent = 64;      // over latent cells

enum class KvType { Half, Byte, Fixed, Float };  // floats are never cached: encoders lay out their keys like that for a step

constexpr float kFixedUnit = 16319.0f / 256;

// What one head keeps of a page: keys [head_dim][16], then values [16][head_dim]. Bytes have a float32 scale per token,
// 16 for the keys and 16 for the values, after both. So do fixed numbers (kernels/fixed.h), whose planes have columns or tokens
// by four: keys [head_dim / 4][2 planes][16][4], values [16 / 4][2 planes][head_dim][4]. A latent cell is halves [16][head_dim], and
// the first `latent` columns of a key are its value.
struct KvCell {
    KvType type = KvType::Half;
    int head_dim = 0;
    int latent = 0;

    size_t numbers() const { return (size_t)head_dim * kPage; }
    size_t width() const { return type == KvType::Float ? 4 : type == KvType::Byte ? 1 : 2; }
    bool scaled() const { return type == KvType::Byte || type == KvType::Fixed; }
    size_t values_at() const { return numbers() * width(); }
    size_t scales_at() const { return 2 * values_at(); }
    // What a part's total weighs: the weights of fixed numbers are whole ones, 16319 for 1 and so much less in sums of upper bytes.
    float unit() const { return type == KvType::Fixed ? kFixedUnit : 1.0f; }
    size_t bytes() const {
        return latent ? values_at() : scales_at() + (scaled() ? 2 * kPage * sizeof(float) : 0);
    }
};

// What a query has of a chunk, or of several: its weighted values [head_dim, padded to 16], their largest score, and the
// sum of the weights. Scores are in powers of two.
struct PartShape {
    size_t high, total, floats;
    explicit PartShape(int head_dim) : high(((size_t)head_dim + 15) / 16 * 16), total(high + 1), floats(high + 16) {}
};

constexpr int kComing = 4;  // pages ahead of which cells are asked for

// One KV head's view of one chunk, and queries that look at it.
struct AttendArgs {
    const uint8_t* cells;  // of this layer and head: page p at cells + p * page_stride
    size_t page_stride;
    const int32_t* pages;  // of the chunk, the first one first; those before every query's `from` are not looked at
    const uint8_t* coming[kComing];  // cells that will be wanted after these
    int ahead;                       // how many of them there are
    const int32_t* following = nullptr;  // pages of the chunk that the same queries look at next
    int follow = 0;                      // how many of them there are
    KvCell cell;
    float scale;
    float cap = 0;         // a score s becomes cap * tanh(s / cap); 0: it stays
    bool windowed = false;  // some query's `from` is not 0
    bool finite = false;    // all halves of the cells that are looked at are
    uint8_t* scratch;                // attend_scratch() bytes
    int count;                       // queries, at most kMaxAttend
    bool again = false;              // the same queries as in the last call with this scratch
    const float* query[kMaxAttend];  // [head_dim]
    float* part[kMaxAttend];         // PartShape
    float* sum[kMaxAttend];          // if there is one, the part is merged into it, and may be left unmade
    int32_t from[kMaxAttend];        // tokens [from, seen) of the chunk are what query i looks at, never none
    int32_t seen[kMaxAttend];        // 1 to kChunk
};

constexpr int kAttendTile = 48;                     // queries that go well together where they are multiplied as floats
constexpr int kFixedTogether = 48;                  // and as whole numbers, without matrix tiles
constexpr int kAttendBlock = 64;                    // tokens widened to float32 at a time
constexpr int kAttendStride = kMaxHeadDim + 16;     // floats from one query to the next in the scratch, and scores
static_assert(kChunk <= kMaxHeadDim, "scores and queries use one stride");
constexpr size_t attend_scratch() {
    return sizeof(float) * (size_t)(2 * kMaxAttend * kAttendStride + std::max((2 * kAttendBlock + 8) * kMaxHeadDim, kFixedTogether * kAttendStride));
}
constexpr int kLatentBlock = 32;
constexpr size_t latent_scratch() {
    return sizeof(float) * (size_t)(kMaxLatent * (kMaxLatentDim + kAttendStride) + kLatentBlock * kMaxLatentDim);
}

// One row of the delta rule over one head's state [rows][columns]; `to` may be `from`.
struct DeltaArgs {
    const float *q, *k;  // [rows], normalized
    const float* v;      // [columns]
    const float* from;
    float* to;
    float* out;  // [columns]
    float slow, beta;
    int rows, columns;
};

constexpr int32_t kOrderOfInf = 0x7f800000, kOrderOfMinusInf = ~0x7f800000;
constexpr int kSampleBlock = 64;                        // tokens of a row whose peak and mass are kept
constexpr uint64_t kRoundBits = 0x4338000000000000ull;  // 1.5 * 2^52: added to a number below 2^51, it leaves a whole one in the bits

// Bits of a float32 as a whole number in the order of the numbers; both zeros are one. NaNs are above +inf or below -inf.
static inline int32_t order_of(float x) {
    x += 0.0f;
    int32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

constexpr int32_t kNoPeak = INT32_MIN;  // in place of a peak: something in its block is not a number. (No number has this order.)

// A token of score s weighs 2^((s - peak) * by); its mass is that many times `unit`, as the nearest whole number.
struct Weighing {
    double peak, by, unit;
};

struct Kernels {
    const char* name;
    // Groups of 32 columns of one row, into lane `lane` of a panel.
    void (*quantize)(const float* x, int first_group, int groups, uint8_t* panel, int lane, const QuantShape& shape);
    void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
    ElementwiseKernel elementwise[kElementwiseCount];
    void (*rope)(const float* x, const RopeArgs& args, float* out);
    void (*dequantize_row)(const Matrix& w, int row, float* out);
    // Rows [0, m) of x (panels from the first) against blocks [b0, b1) of w, whose first row is column 0 of out.
    void (*linear_affine)(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& shape, int m, const Epilogue& e);
    void (*linear_dense)(const Matrix& w, int b0, int b1, const float* x, size_t stride, int m, const Epilogue& e);
    // Whether all of it is finite in the cell; told of halves alone.
    bool (*store_kv)(const float* k, const float* v, int kv_heads, const KvCell& cell, uint8_t* page, int slot);
    void (*attend)(const AttendArgs& args);  // fills every part
    void (*merge)(const float* part, int head_dim, float* sum);  // a later chunk's part into those before it
    void (*finish)(const float* sum, int head_dim, float* out);  // the answer: values over weights
    void (*store_latent)(const float* k, const KvCell& cell, uint8_t* to, int slot);
    void (*attend_latent)(const AttendArgs& args);  // as attend, over latent cells, with latent_scratch() bytes; no window, no cap
    void (*exp)(const float* x, int n, float* out);  // for tests
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int n, float* out);  // bias or nullptr
    void (*accumulate)(const float* x, float factor, int n, float* sum);  // sum += factor * x
    // silu of the sum over taps of weight[j * stride + i] * rows[j][i], for n columns i
    void (*conv)(const float* const* rows, const float* weight, size_t stride, int taps, int n, float* out);
    void (*unit)(const float* x, float factor, int n, float* out);  // x * factor / sqrt(|x|^2 + 1e-6)
    void (*delta)(const DeltaArgs& args);
    // The sampler's passes over a row; see kernels/sampling.h.
    bool (*peaks)(const float* x, int n, int32_t* out);
    void (*block_masses)(const float* x, int n, const int32_t* peak, int32_t floor, const Weighing& w, uint64_t* out);
    uint64_t (*weigh)(const double* y, int n, double unit, double* weight, uint64_t* mass);
    int (*count_above)(const float* x, int n, float own);
    int (*count_equal)(const float* x, int n, float own);
    void (*rule_out)(const float* x, const uint8_t* allowed, int n, float* out);

    ElementwiseKernel operator[](Elementwise op) const { return elementwise[(int)op]; }
};

// A kernel set that differs from another one in products of whole numbers alone: the rest is compiled once.
static inline Kernels with_products(const Kernels& base, const char* name, decltype(Kernels::linear_affine) linear, decltype(Kernels::attend) attend) {
    Kernels set = base;
    set.name = name, set.linear_affine = linear, set.attend = attend;
    return set;
}

const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avxvnni_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512bw_kernels();
const Kernels* amx_kernels();
const Kernels* neon_kernels();
const Kernels* neondot_kernels();

// isa.cpp: kernel sets that this CPU can run, best first; and one by name (nullptr: none of that name here).
int available_kernels(const Kernels** out, int capacity);
const Kernels* find_kernels(const char* name);

}  // namespace quire
