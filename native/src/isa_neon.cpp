// The neon kernel set: this file is compiled with the flags of its instruction set, and nothing in it may run without them.
#include "kernels/simd_neon.h"
#include "kernels/table.h"

namespace quire {

const Kernels* neon_kernels() {
    static constexpr Kernels table = make_table("neon");
    return &table;
}

}  // namespace quire
