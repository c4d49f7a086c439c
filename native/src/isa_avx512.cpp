// The avx512 kernel set: avx512bw's, with VNNI's dot product of bytes.
#include "kernels/simd_avx512.h"
#include "kernels/linear.h"

namespace quire {

const Kernels* avx512_kernels() {
    static const Kernels table = with_linear(*avx512bw_kernels(), "avx512", linear_affine);
    return &table;
}

}  // namespace quire
