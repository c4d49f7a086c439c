// The avx512bw kernel set: AVX-512 without its int8 dot product (the first server CPUs that had it).
#define QUIRE_NO_VNNI 1
#include "kernels/simd_avx512.h"
#include "kernels/table.h"

namespace quire {

const Kernels* avx512bw_kernels() {
    static constexpr Kernels table = make_table("avx512bw");
    return &table;
}

}  // namespace quire
