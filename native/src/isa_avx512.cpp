// The avx512 kernel set: this file is compiled with the flags of its instruction set, and nothing in it may run without them.
#include "kernels/simd_avx512.h"
#include "kernels/table.h"

namespace quire {

const Kernels* avx512_kernels() {
    static constexpr Kernels table = make_table("avx512");
    return &table;
}

}  // namespace quire
