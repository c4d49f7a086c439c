// Which experts a row goes through, and what each counts (Routing of quire/layouts.py). In double, with an exponential of its
// own, so that every machine chooses alike.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <memory>

namespace quire {

struct Vector;

struct Routing {
    int experts = 0, top = 0, groups = 1, top_groups = 1;
    bool sigmoid = false, renormalize = false, pair = false;
    double scale = 1;
    std::shared_ptr<const Vector> bias;  // [experts], or none

    size_t scratch() const { return (size_t)experts * (2 * sizeof(double) + 1) + (size_t)groups * (sizeof(double) + 1); }

    // logits [experts] -> `top` experts in increasing order, and their shares. Whatever the logits are, NaN among them,
    // the experts are different ones.
    void route(const float* logits, uint8_t* scratch, int32_t* chosen, float* share) const;
};

}  // namespace quire
