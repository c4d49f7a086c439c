// What slice_loop (neon_loops.h) is given.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace {

// What is asked for while a slice is added up, and unpacked meanwhile.
struct SliceAsks {
    const uint8_t* ahead;  // what will be wanted, + ahead_step per tile
    size_t ahead_step;
    const uint8_t* beside;            // the same, but not with codes of four or six bits
    const uint8_t* packed = nullptr;  // a quad of two slices that will be wanted, + code_step per tile, four bits: they become bytes meanwhile
    uint8_t* unpacked = nullptr;      // + 512 per tile
};

// What is added up over some tiles of slices: four rows of a block each. One loop takes them one after the other, because pipes stand still
// while a loop begins.
struct SliceArgs {
    const uint8_t* codes;         // of the first slice: packed, or bytes [tile][slice][quad]
    const uint8_t *scale, *bias;  // float [tile][2 groups][16 rows], or float16 as they are packed
    size_t code_step;             // from one packed tile to the next
    const int8_t* x;              // of the first of eight lanes
    const float *sx, *sxs;
    const float* excess;    // + 64 per tile
    const uint32_t* start;  // what sums begin with, [lane][4]; `step` bytes on for each group
    size_t step;
    long tiles, slices;
    const SliceAsks* asks;  // for each slice
    size_t beside_step;
    long codes_back, factors_back;  // bytes, from where a slice ends to where the next one begins
    const float* take;              // what results begin with, [lane][4]
    size_t take_slice;              // bytes
    float* leave;                   // where they go
    size_t leave_lane, leave_slice;
    const float* residual;  // is added then, if any: its lanes, and 16 bytes on for each slice
    size_t residual_lane;

    // To the slices after these, whose codes are others of the same bytes.
    void pass(size_t factors, const uint32_t* sums, size_t sum_step) {
        const size_t n = (size_t)slices;
        scale += factors * n, bias += factors * n, start = sums, step = sum_step, asks += n;
        take += take_slice / 4 * n, leave += leave_slice / 4 * n;
        if (residual) residual += 4 * n;
    }

    // Past n tiles of bytes that have no bias.
    void move(int n) {
        codes += 512 * n, scale += 128 * n, x += 512 * n, sx += 16 * n, excess += 64 * n;
        start += (int)(step / 4) * n, tiles -= n;
    }
};
// The loop loads them by their places.
static_assert(offsetof(SliceArgs, x) == 32 && offsetof(SliceArgs, tiles) == 80 && offsetof(SliceArgs, asks) == 96);
static_assert(offsetof(SliceArgs, codes_back) == 112 && offsetof(SliceArgs, take) == 128 && offsetof(SliceArgs, leave) == 144);
static_assert(offsetof(SliceArgs, residual) == 168 && sizeof(SliceArgs) == 184 && sizeof(SliceAsks) == 40);

}  // namespace
