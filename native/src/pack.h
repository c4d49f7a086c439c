// Turns a weight as it lies in its file into a packed Matrix. It reads the codec's tables (quire/layouts.py), so it knows
// no format by name. The tables are checked here: a wrong one is an error, never a read outside the block.
#pragma once

#include <stdint.h>

#include <utility>
#include <vector>

#include "thread_pool.h"
#include "weight.h"

namespace quire {

struct Plane {
    std::vector<uint16_t> byte;
    std::vector<uint8_t> shift;
    int mask = 0, lift = 0, flip = 0;
};

struct Ints {  // `count` numbers of a block; empty planes: none
    std::vector<Plane> planes;
    int offset = 0;
};

struct Factor {
    int at = 0;
    bool negate = false;
    bool wide = false;  // a float32, not a float16
    Ints codes;
};

struct Codec {
    int block = 0, nbytes = 0, group = 0, bits = 0;
    Ints codes;
    Factor scale;
    bool has_bias = false;
    Factor bias;
};

// A matrix as it lies in a file: n rows of `width` bytes in the codec's blocks, or without a codec [n][width] of the type. Affine without a
// codec: of float16 numbers, to be packed as codes of 14 bits.
struct Weight {
    const Codec* codec = nullptr;
    Type type = Type::F32;
    const void* data = nullptr;
    int64_t n = 0, width = 0;
};

// All of them in one turn of the pool: threads that share their cores with others should not wait for each other often.
// Throws std::invalid_argument.
std::vector<Matrix> pack(ThreadPool& pool, const std::vector<Weight>& weights);

inline Matrix pack_dense(ThreadPool& pool, Type type, const void* data, int64_t n, int64_t k) {
    return std::move(pack(pool, {{nullptr, type, data, n, k}})[0]);
}

// The memory that those would take; the type as a Weight's.
size_t affine_bytes(const Codec& codec, int64_t n, int64_t row_bytes);
size_t dense_bytes(Type type, int64_t n, int64_t k);

// A matrix of 4 bits whose numbers mean nothing and are all there, for measuring the machine.
Matrix pattern(ThreadPool& pool, int64_t n, int64_t k);

}  // namespace quire
