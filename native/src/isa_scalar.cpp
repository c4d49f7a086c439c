// The scalar kernel set: this file is compiled with the flags of its instruction set, and nothing in it may run without them.
#include "kernels/simd_scalar.h"
#include "kernels/table.h"

namespace quire {

const Kernels* scalar_kernels() {
    static constexpr Kernels table = make_table("scalar");
    return &table;
}

}  // namespace quire
