// Binds sample.h: checks everything that crosses the border, so that no index leads outside a row.
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "module.h"

namespace nb = nanobind;

namespace quire {

namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Allowed = nb::ndarray<const bool, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check_id(int64_t id, int vocabulary) {
    if (id < 0 || id >= vocabulary) throw std::invalid_argument("a token is outside the vocabulary");
}

Bound make_params(const Sampler& s, double temperature, int64_t top_k, double typical_p, double top_p, double min_p, double repetition,
                double frequency, double presence, int64_t min_tokens, uint64_t seed, int logprobs,
                std::vector<std::pair<int32_t, double>> bias, std::vector<int32_t> stops) {
    if (!(temperature >= 0.0) || !(repetition > 0.0)) throw std::invalid_argument("temperature or repetition_penalty is out of range");
    for (const auto& entry : bias) check_id(entry.first, s.vocabulary());
    for (int32_t id : stops) check_id(id, s.vocabulary());
    SampleParams w;
    w.temperature = temperature, w.top_k = top_k, w.typical_p = typical_p, w.top_p = top_p, w.min_p = min_p;
    w.repetition = repetition, w.frequency = frequency, w.presence = presence;
    w.min_tokens = min_tokens, w.seed = seed, w.logprobs = logprobs;
    w.bias = std::move(bias), w.stops = std::move(stops);
    return {std::move(w), s.vocabulary()};
}

void check_logits(const Sampler& s, const Logits& logits, size_t rows) {
    if (logits.shape(0) != rows || logits.shape(1) != (size_t)s.vocabulary() || (rows && logits.stride(1) != 1))
        throw std::invalid_argument("logits are not [rows, vocabulary] with rows that are contiguous");
}

nb::tuple told_tuple(const Told& t) { return nb::make_tuple(t.logprob, t.rank, t.top); }

nb::list choose(Sampler& s, const Logits& logits, const std::vector<const Bound*>& params, const std::vector<int64_t>& positions,
                const std::vector<std::vector<int32_t>>& drafts, const std::vector<SeenTuple>& seen,
                const std::vector<std::pair<size_t, Allowed>>& masks) {
    const size_t n = params.size();
    if (positions.size() != n || (!drafts.empty() && drafts.size() != n)) throw std::invalid_argument("sequences differ in number");
    std::vector<Ask> asks(n);
    size_t row = 0;
    for (size_t i = 0; i < n; i++) {
        if (!params[i] || params[i]->vocabulary != s.vocabulary()) throw std::invalid_argument("parameters of another sampler");
        asks[i].params = &params[i]->params, asks[i].position = positions[i];
        if (!drafts.empty()) asks[i].drafts = drafts[i];
        asks[i].logits = logits.data() + (int64_t)row * logits.stride(0), asks[i].stride = (size_t)logits.stride(0);
        row += 1 + asks[i].drafts.size();
    }
    check_logits(s, logits, row);
    const std::vector<Seen> histories = seen_of(s, seen, n);
    for (size_t i = 0; i < n; i++) asks[i].seen = histories[i];
    for (const auto& [i, mask] : masks) {
        if (i >= n || mask.shape(0) < 1 + asks[i].drafts.size() || mask.shape(1) != (size_t)s.vocabulary())
            throw std::invalid_argument("a mask that is nobody's, or not [rows, vocabulary]");
        asks[i].allowed = (const uint8_t*)mask.data(), asks[i].allowed_stride = mask.shape(1);
    }
    std::vector<Answer> answers;
    {
        nb::gil_scoped_release free;
        s.choose(asks, answers);
    }
    nb::list out;
    for (const Answer& a : answers) {
        nb::list told;
        for (const Told& t : a.told) told.append(told_tuple(t));
        out.append(nb::make_tuple(a.tokens, told));
    }
    return out;
}

nb::object logprobs(Sampler& s, const Logits& logits, const std::vector<int32_t>& tokens, int top) {
    check_logits(s, logits, tokens.size());
    if (top < 0) throw std::invalid_argument("so many alternatives cannot be told");
    for (int32_t id : tokens) check_id(id, s.vocabulary());
    std::vector<Told> told;
    {
        nb::gil_scoped_release free;
        if (!tokens.empty() &&
            !s.logprobs(logits.data(), (size_t)logits.stride(0), tokens.data(), (int)tokens.size(), top, told))
            told.clear();
    }
    if (told.size() != tokens.size()) return nb::none();
    nb::list out;
    for (const Told& t : told) out.append(told_tuple(t));
    return out;
}

}  // namespace

std::vector<Seen> seen_of(const Sampler& s, const std::vector<SeenTuple>& seen, size_t n) {
    std::vector<Seen> found(n);
    for (const auto& [i, ids, counts] : seen) {
        if (i >= n || ids.shape(0) != counts.shape(0)) throw std::invalid_argument("a history that is nobody's, or without its counts");
        for (size_t j = 0; j < ids.shape(0); j++) check_id(ids.data()[j], s.vocabulary());
        found[i] = {ids.data(), counts.data(), (int64_t)ids.shape(0)};
    }
    return found;
}

void bind_sampler(nb::module_& m) {
    nb::class_<Bound>(m, "SampleParams");
    nb::class_<Sampler>(m, "Sampler")
        .def("params", &make_params)
        .def("choose", &choose, nb::arg().noconvert(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
        .def("logprobs", &logprobs, nb::arg().noconvert(), nb::arg(), nb::arg());
}

}  // namespace quire
