// The neondot kernel set: NEON with the dot product instructions (ARMv8.2 dotprod).
#define QUIRE_NEON_DOT 1
#include "kernels/simd_neon.h"
#include "kernels/table.h"

namespace quire {

const Kernels* neondot_kernels() {
    static constexpr Kernels table = make_table("neondot");
    return &table;
}

}  // namespace quire
