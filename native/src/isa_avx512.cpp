// The avx512 kernel set: avx512bw's, with VNNI's dot product of bytes.
#include "kernels/simd_avx512.h"
#include "kernels/attention_fixed.h"
#include "kernels/linear.h"

namespace {

void attend(const AttendArgs& a) {
    if (a.cell.type != KvType::Fixed) return avx512bw_kernels()->attend(a);
    attend_fixed(a);
}

}  // namespace

namespace quire {

const Kernels* avx512_kernels() {
    static const Kernels table = with_products(*avx512bw_kernels(), "avx512", linear_affine, attend);
    return &table;
}

}  // namespace quire
