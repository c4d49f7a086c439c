// The amx kernel set: avx512's, with matrix tiles where they pay.
#define QUIRE_AMX 1
#include "kernels/simd_avx512.h"
#include "kernels/attention_tiles.h"
#include "kernels/gemm.h"

namespace {

template <int BITS>
void tiled(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, int m, const Epilogue& e) {
    if (w.bias) return affine_gemm<BITS, 32, true>(w, b0, b1, x, s, m, e);
    affine_gemm<BITS, 32, false>(w, b0, b1, x, s, m, e);
}

// Groups of 16 would use half of a tile, and codes of 14 bits have kernels of their own.
void linear_tiled(const Matrix& w, int b0, int b1, const uint8_t* x, const QuantShape& s, int m, const Epilogue& e) {
    if (m < kTilesFrom || w.group != 32 || w.bits == 14) return avx512_kernels()->linear_affine(w, b0, b1, x, s, m, e);
    switch (w.bits) {
        case 2: return tiled<2>(w, b0, b1, x, s, m, e);
        case 3: return tiled<3>(w, b0, b1, x, s, m, e);
        case 4: return tiled<4>(w, b0, b1, x, s, m, e);
        case 5: return tiled<5>(w, b0, b1, x, s, m, e);
        case 6: return tiled<6>(w, b0, b1, x, s, m, e);
        default: return tiled<8>(w, b0, b1, x, s, m, e);
    }
}

void attend(const AttendArgs& a) {
    if (a.cell.type != KvType::Fixed || !can_tile(a)) return avx512_kernels()->attend(a);
    attend_tiled(a);
}

}  // namespace

namespace quire {

const Kernels* amx_kernels() {
    static const Kernels table = with_products(*avx512_kernels(), "amx", linear_tiled, attend);
    return &table;
}

}  // namespace quire
