// Fills a kernel table. The last include of an isa_*.cpp that has kernels of every kind.
#pragma once

#include "activations.h"
#include "attention.h"
#include "kv_store.h"
#include "latent.h"
#include "linear.h"
#include "rows.h"
#include "sampling.h"
#include "state.h"

namespace {

constexpr quire::Kernels make_table(const char* name) {
    return {name, quantize, rms_norm, add,      swiglu, rope,    dequantize_row, linear_affine,
            linear_dense, store_kv, attend, merge, finish, store_latent, attend_latent, exp_rows,
            layer_norm, geglu, gelu, scale, softcap, clamped, accumulate, conv, unit, delta, sigmoid_gate,
            peaks, block_masses, weigh, count_above, count_equal, rule_out};
}

}  // namespace
