// What the parts of the Python module share.
#pragma once

#include <nanobind/nanobind.h>

#include "sample.h"

namespace quire {

// A handle of one sampler's wish; the vocabulary is that of the sampler.
struct Bound {
    Wish wish;
    int vocabulary;
};

// The first rows of a plan's output, as an array that lives as long as the plan.
nanobind::object output_of(nanobind::handle plan, size_t rows);

void bind_sampler(nanobind::module_& m);  // Wish, Sampler; who makes samplers is module.cpp
void bind_steady(nanobind::module_& m);   // Steady; after Plan and Sampler

}  // namespace quire
