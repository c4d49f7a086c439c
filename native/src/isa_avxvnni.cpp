// The avxvnni kernel set: AVX2 with its own int8 dot product (client CPUs without AVX-512).
#define QUIRE_AVX_VNNI 1
#include "kernels/simd_avx2.h"
#include "kernels/table.h"

namespace quire {

const Kernels* avxvnni_kernels() {
    static constexpr Kernels table = make_table("avxvnni");
    return &table;
}

}  // namespace quire
