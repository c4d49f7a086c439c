// What the parts of the Python module share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <tuple>
#include <vector>

#include "sample.h"

namespace quire {

struct Slot;

// A handle of one sampler's parameters; the vocabulary is that of the sampler.
struct Bound {
    SampleParams params;
    int vocabulary;
};

// Of sequence i: distinct tokens, and how often each was generated.
using Ids = nanobind::ndarray<const int64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Counts = nanobind::ndarray<const double, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using SeenTuple = std::tuple<size_t, Ids, Counts>;

// By sequence, of n; checked. The arrays must outlive it.
std::vector<Seen> seen_of(const Sampler& s, const std::vector<SeenTuple>& seen, size_t n);

// The first rows of a plan's output, or of another tensor, as an array that lives as long as the plan.
nanobind::object output_of(nanobind::handle plan, size_t rows);
nanobind::object rows_of(nanobind::handle plan, const Slot& slot, size_t rows);

void bind_sampler(nanobind::module_& m);  // SampleParams, Sampler; who makes samplers is module.cpp
void bind_decode_steps(nanobind::module_& m);   // DecodeSteps; after Plan and Sampler

}  // namespace quire
