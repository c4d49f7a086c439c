// Binds words.h: a small module of its own, so that the process that reads text does not load the kernels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "words.h"

namespace nb = nanobind;
using quire::ScoredWords;

namespace {

template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::vector<T> copied(const Array<T>& array) {
    return std::vector<T>(array.data(), array.data() + array.shape(0));
}

void make(ScoredWords* self, nb::bytes blob, const Array<uint32_t>& offsets, const Array<float>& scores, const Array<uint8_t>& uses,
          const Array<int32_t>& byte_ids, int32_t unknown) {
    new (self) ScoredWords({blob.c_str(), blob.size()}, copied(offsets), copied(scores), copied(uses), copied(byte_ids), unknown);
}

}  // namespace

NB_MODULE(_words, m) {
    nb::set_leak_warnings(false);
    nb::class_<ScoredWords>(m, "ScoredWords")
        .def("__init__", &make)
        .def(
            "encode",
            [](const ScoredWords& self, nb::bytes text) {
                const std::string_view view(text.c_str(), text.size());
                nb::gil_scoped_release release;
                return self.encode(view);
            },
            nb::arg());
}
