// The elementwise ops that have a kernel: one list, from which the kernel tables, plan steps, the binding and the self-test follow.
//
// A row: the op's name, as in quire/backends/elementwise.py; how many tensors it reads; and for the self-test the number that it
// takes beside them, if it takes one. Kernels of these names are in kernels/elementwise.h. A new op goes at the end.
#pragma once

#define QUIRE_ELEMENTWISE(OP) \
    OP(add, 2, 0.0f)          \
    OP(swiglu, 2, 0.0f)       \
    OP(sigmoid_gate, 2, 0.0f) \
    OP(geglu, 2, 0.0f)        \
    OP(gelu, 1, 0.0f)         \
    OP(clamped, 2, 2.5f)      \
    OP(softcap, 1, 3.5f)      \
    OP(scale, 1, 0.3f)

namespace quire {

#define QUIRE_NAME(name, inputs, number) name,
enum class Elementwise { QUIRE_ELEMENTWISE(QUIRE_NAME) };
#undef QUIRE_NAME

// n numbers of one row, of a and (where the op reads two) b. Called through a table, once for each row.
using ElementwiseKernel = void (*)(const float* a, const float* b, float number, int n, float* out);

struct ElementwiseOp {
    const char* name;
    int inputs;
    float number;
};

#define QUIRE_ROW(name, inputs, number) {#name, inputs, number},
constexpr ElementwiseOp kElementwise[] = {QUIRE_ELEMENTWISE(QUIRE_ROW)};
#undef QUIRE_ROW
constexpr int kElementwiseCount = sizeof kElementwise / sizeof *kElementwise;

inline const ElementwiseOp& row_of(Elementwise op) { return kElementwise[(int)op]; }

}  // namespace quire
