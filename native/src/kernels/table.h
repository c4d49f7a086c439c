// Fills a kernel table. The last include of an isa_*.cpp that has kernels of every kind.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "kv_store.h"
#include "latent.h"
#include "linear.h"
#include "rows.h"
#include "sampling.h"
#include "state.h"

namespace {

#define QUIRE_KERNEL(name, inputs, number) name,
constexpr quire::Kernels make_table(const char* name) {
    return {name, quantize, rms_norm, {QUIRE_ELEMENTWISE(QUIRE_KERNEL)}, rope, dequantize_row, linear_affine,
            linear_dense, store_kv, attend, merge, finish, store_latent, attend_latent, exp_rows,
            layer_norm, accumulate, conv, unit, delta,
            peaks, block_masses, weigh, count_above, count_equal, rule_out};
}
#undef QUIRE_KERNEL

}  // namespace
