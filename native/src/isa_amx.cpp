// The amx kernel set: AVX-512 with matrix tiles for products of many rows.
#define QUIRE_AMX 1
#include "kernels/simd_avx512.h"
#include "kernels/table.h"

namespace quire {

const Kernels* amx_kernels() {
    static constexpr Kernels table = make_table("amx");
    return &table;
}

}  // namespace quire
