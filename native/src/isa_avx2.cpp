// The avx2 kernel set: this file is compiled with the flags of its instruction set, and nothing in it may run without them.
#include "kernels/simd_avx2.h"
#include "kernels/table.h"

namespace quire {

const Kernels* avx2_kernels() {
    static constexpr Kernels table = make_table("avx2");
    return &table;
}

}  // namespace quire
