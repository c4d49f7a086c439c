// The avxvnni kernel set: avx2's, with a dot product of bytes (client CPUs without AVX-512).
#define QUIRE_AVX_VNNI 1
#include "kernels/simd_avx2.h"
#include "kernels/attention_fixed.h"
#include "kernels/linear.h"

namespace {

void attend(const AttendArgs& a) {
    if (a.cell.type != KvType::Fixed) return avx2_kernels()->attend(a);
    attend_fixed(a);
}

}  // namespace

namespace quire {

const Kernels* avxvnni_kernels() {
    static const Kernels table = with_products(*avx2_kernels(), "avxvnni", linear_affine, attend);
    return &table;
}

}  // namespace quire
