// The kernel table: one per instruction set, all with the same results, bit for bit. Plain pointers in, nothing allocated.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "weight.h"

namespace quire {

// Where a linear's results go: out[m * out_stride + column], with bias and residual added when they are there.
struct Epilogue {
    float* out = nullptr;
    size_t out_stride = 0;  // in floats
    const float* bias = nullptr;
    const float* residual = nullptr;  // same shape as out
    size_t residual_stride = 0;
};

struct RopeArgs {
    const float* cos;  // [dim / 2] of this row
    const float* sin;
    int dim, head_dim, heads;
    bool pairs;
};

constexpr int kPage = 16;  // tokens in a KV page: the lane count
constexpr int kMaxHeadDim = 256;
constexpr int kMaxAttend = 64;  // queries in one call

// One KV head's view of a sequence, and queries that share it.
struct AttendArgs {
    const uint16_t* keys;    // of this layer and head; page p at keys + p * page_stride, [head_dim][16]
    const uint16_t* values;  // the same, [16][head_dim]
    size_t page_stride;      // in numbers
    const int32_t* pages;    // the sequence's page table
    int head_dim;
    float scale;
    int count;                        // queries, at most kMaxAttend
    const float* query[kMaxAttend];   // [head_dim]
    float* out[kMaxAttend];           // [head_dim]
    int32_t seen[kMaxAttend];         // tokens query i may look at, from the first
};

struct Kernels {
    const char* name;
    // Groups of 32 columns of one row, into lane `lane` of a panel.
    void (*quantize)(const float* x, int first_group, int groups, uint8_t* panel, int lane, const QuantShape& shape);
    void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
    void (*add)(const float* a, const float* b, int n, float* out);
    void (*swiglu)(const float* gate, const float* up, int n, float* out);
    void (*rope)(const float* x, const RopeArgs& args, float* out);
    void (*dequantize_row)(const Matrix& w, int row, float* out);
    // Rows [0, m) of x (panels from the first) against blocks [b0, b1) of w, whose first row is column 0 of out.
    void (*linear_affine)(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& shape, int m, const Epilogue& e);
    void (*linear_dense)(const Matrix& w, int b0, int b1, const float* x, size_t stride, int m, const Epilogue& e);
    void (*store_kv)(const float* k, const float* v, int kv_heads, int head_dim, uint16_t* key_page, uint16_t* value_page,
                     int slot);
    void (*attend)(const AttendArgs& args);
    void (*exp)(const float* x, int n, float* out);  // for tests
};

const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avxvnni_kernels();
const Kernels* avx512_kernels();
const Kernels* amx_kernels();
const Kernels* neon_kernels();
const Kernels* neondot_kernels();

// isa.cpp: kernel sets that this CPU can run, best first; and one by name (nullptr: none of that name here).
int available_kernels(const Kernels** out, int capacity);
const Kernels* find_kernels(const char* name);

}  // namespace quire
