// Kernels of the sampler: passes over a row of logits. Peaks and masses are kept for each block of 64 tokens, so that what
// follows looks into few blocks. Masses are whole numbers (see ../sample.h): the order in which they are added cannot matter.
#pragma once

#include <math.h>
#include <string.h>

#include "rows.h"

namespace {

// (2^r - 1) / r for r between -1/2 and 1/2, to 2e-17: the highest power first; then the 1 that was taken off. As in
// quire/runner/masses.py.
constexpr double kPow2[] = {0x1.e9d3fe3952179p-32, 0x1.e6063f7217bc6p-28, 0x1.b524fae627834p-24, 0x1.62bfd47773353p-20,
                            0x1.ffcbfc670dcd4p-17, 0x1.430913096fd9fp-13, 0x1.5d87fe78a5276p-10, 0x1.3b2ab6fba1ddap-7,
                            0x1.c6b08d704a0c2p-5,  0x1.ebfbdff82c598p-3,  0x1.62e42fefa39efp-1,  0x1p0};

// 2^y for y of 0 and less, to about 1 ulp; what is below -1000 counts as that. `unit` is a power of two, and so exact.
inline D8 dpow2(D8 y, double unit) {
    const D8 round = dset(0x1.8p52);
    y = dmax(y, dset(-1000.0));
    const D8 t = dadd(y, round), r = dsub(y, dsub(t, round));
    D8 p = dset(kPow2[0] * unit);
    QUIRE_UNROLL16 for (int i = 1; i < 12; i++) p = dadd(dmul(p, r), dset(kPow2[i] * unit));
    return dscale2(p, t);
}

// Eight weights of distances, and their masses: nearest whole numbers of units. Returns the sum of the masses.
inline uint64_t weigh8(const double* y, double unit, double* weight, uint64_t* mass) {
    const D8 w = dpow2(dload(y), 1.0);
    dstore(weight, w);
    double whole[8];
    dstore(whole, dadd(dmul(w, dset(unit)), dset(0x1.8p52)));
    memcpy(mass, whole, sizeof whole);
    uint64_t total = 0;
    for (int i = 0; i < 8; i++) total += mass[i] -= kRoundBits;
    return total;
}

uint64_t weigh(const double* y, int n, double unit, double* weight, uint64_t* mass) {
    uint64_t total = 0;
    int at = 0;
    for (; at + 8 <= n; at += 8) total += weigh8(y + at, unit, weight + at, mass + at);
    if (at == n) return total;
    double from[8], to[8];
    uint64_t masses[8];
    for (int i = 0; i < 8; i++) from[i] = at + i < n ? y[at + i] : -INFINITY;
    total += weigh8(from, unit, to, masses);
    memcpy(weight + at, to, (size_t)(n - at) * sizeof *to);
    memcpy(mass + at, masses, (size_t)(n - at) * sizeof *masses);
    return total;
}

#ifdef QUIRE_NEON
// The best of a block, or one of it that is not a number.
inline float best_of(const float* x) {
    F best = fload(x);
    for (int at = 16; at < kSampleBlock; at += 16)
        for (int i = 0; i < 4; i++) best.v[i] = vmaxq_f32(best.v[i], vld1q_f32(x + at + 4 * i));
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(best.v[0], best.v[1]), vmaxq_f32(best.v[2], best.v[3])));
}
#endif

// The best of each block of a row, as whole numbers in the order of the logits (order_of). False: there is a NaN below all of them, and the
// best of its block may be anything.
bool peaks(const float* x, int n, int32_t* out) {
    int32_t lowest = INT32_MAX;
    for (int at = 0; at < n; at += kSampleBlock, x += kSampleBlock) {
        int32_t high = INT32_MIN;
        auto look = [&](int size) {
            for (int i = 0; i < size; i++) {
                const int32_t key = order_of(x[i]);
                high = key > high ? key : high;
                lowest = key < lowest ? key : lowest;
            }
        };
#ifdef QUIRE_NEON
        if (n - at >= kSampleBlock) high = order_of(best_of(x)), lowest = high < lowest ? high : lowest;
#else
        if (n - at >= kSampleBlock) look(kSampleBlock);
#endif
        else look(n - at);
        *out++ = high;
    }
    return lowest >= kOrderOfMinusInf;
}

inline uint64_t block_mass(const float* x, const Weighing& w) {
    const D8 peak = dset(w.peak), by = dset(w.by), round = dset(0x1.8p52);
    U8 sum = uzero();
    for (int i = 0; i < kSampleBlock; i += 8) sum = uadd_bits(sum, dadd(dpow2(dmul(dsub(dwiden(x + i), peak), by), w.unit), round));
    return usum(sum) - kSampleBlock * kRoundBits;
}

// The mass of each block whose peak is at least `floor`; 0 for the others.
void block_masses(const float* x, int n, const int32_t* peak, int32_t floor, const Weighing& w, uint64_t* out) {
    for (int at = 0; at < n; at += kSampleBlock, x += kSampleBlock, peak++, out++) {
        if (*peak < floor) {
            *out = 0;
        } else if (n - at >= kSampleBlock) {
            *out = block_mass(x, w);
        } else {
            float rest[kSampleBlock];
            for (int i = 0; i < kSampleBlock; i++) rest[i] = i < n - at ? x[i] : -INFINITY;
            *out = block_mass(rest, w);
        }
    }
}

int count_above(const float* x, int n, float own) {
    int count = 0;
    for (int i = 0; i < n; i++) count += x[i] > own;
    return count;
}

int count_equal(const float* x, int n, float own) {
    int count = 0;
    for (int i = 0; i < n; i++) count += x[i] == own;
    return count;
}

void rule_out(const float* __restrict x, const uint8_t* __restrict allowed, int n, float* __restrict out) {
    for (int i = 0; i < n; i++) out[i] = allowed[i] ? x[i] : -INFINITY;
}

}  // namespace
