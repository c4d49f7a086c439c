// The avxvnni kernel set: avx2's, with a dot product of bytes (client CPUs without AVX-512).
#define QUIRE_AVX_VNNI 1
#include "kernels/simd_avx2.h"
#include "kernels/linear.h"

namespace quire {

const Kernels* avxvnni_kernels() {
    static const Kernels table = with_linear(*avx2_kernels(), "avxvnni", linear_affine);
    return &table;
}

}  // namespace quire
