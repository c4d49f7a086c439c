// The sampler's part of the Python module.
#pragma once

#include <nanobind/nanobind.h>

#include "sample.h"

namespace quire {

void bind_sampler(nanobind::module_& m);  // Wish, Sampler; who makes samplers is module.cpp

}  // namespace quire
