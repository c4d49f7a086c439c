// Binds decode_steps.h: holds on to the slots' arrays, and checks their sizes once.
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>

#include "module.h"
#include "plan.h"
#include "decode_steps.h"

namespace nb = nanobind;

namespace quire {

namespace {

template <class T> using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

class Steps {
public:
    Steps(nb::object plan, nb::object sampler, Array<int32_t> last, Array<int32_t> length, Array<int64_t> position, Array<const int32_t> adapter, Array<const bool> live, std::vector<Table> tables, int page_size, int max_context, int most)
        : plan_(std::move(plan)), sampler_(std::move(sampler)), last_(std::move(last)), length_(std::move(length)), position_(std::move(position)),
          adapter_(std::move(adapter)), live_(std::move(live)), tables_(std::move(tables)) {
        const size_t count = last_.shape(0);
        if (count > 1 << 24 || length_.shape(0) != count || position_.shape(0) != count ||
            adapter_.shape(0) != count || live_.shape(0) != count || tables_.empty() || tables_[0].shape(1) > 1 << 24)
            throw std::invalid_argument("the slots' arrays differ in length");
        if (page_size != kPage) throw std::invalid_argument("a page of another size");
        SlotArrays slots;
        slots.count = (int)count, slots.last = last_.data(), slots.length = length_.data(), slots.position = position_.data();
        slots.adapter = adapter_.data(), slots.live = live_.data(), slots.table = (int)tables_[0].shape(1);
        for (const Table& t : tables_) {
            if (t.shape(0) != count || t.shape(1) != tables_[0].shape(1)) throw std::invalid_argument("the slots' tables differ in size");
            slots.tables.push_back(t.data());
        }
        const Plan& p = nb::cast<Plan&>(plan_);
        const int vocabulary = nb::cast<Sampler&>(sampler_).vocabulary();
        if (!p.inputs().empty() || p.output_slot().per_token || p.output_slot().width != vocabulary)
            throw std::invalid_argument("the program takes more than tokens, or gives something else than logits");
        steps_.emplace(std::move(slots), vocabulary, max_context, most);
    }

    nb::object run(const Array<const int64_t>& slot) {
        Plan& plan = nb::cast<Plan&>(plan_);
        {
            nb::gil_scoped_release free;
            BatchView batch;
            computed_ = false;
            if (steps_->batch(slot.data(), slot.shape(0), batch)) {
                plan.run(batch, {});
                steps_->computed();
                computed_ = true;
            }
        }
        return computed_ ? output_of(plan_, slot.shape(0)) : nb::none();
    }

    nb::object choose(const std::vector<const Bound*>& params, const std::vector<SeenTuple>& seen) {
        Sampler& sampler = nb::cast<Sampler&>(sampler_);
        const Plan& plan = nb::cast<Plan&>(plan_);
        std::vector<const SampleParams*> own;
        for (const Bound* b : params) {
            if (!b || b->vocabulary != sampler.vocabulary()) throw std::invalid_argument("parameters of another sampler");
            own.push_back(&b->params);
        }
        const std::vector<Seen> histories = seen_of(sampler, seen, params.size());
        std::vector<int32_t> tokens;
        const LogitRows rows{plan.output_data(), plan.output_slot().stride / sizeof(float), plan.peaks(0), plan.peaks_stride()};
        bool chosen;
        {
            nb::gil_scoped_release free;
            chosen = computed_ && steps_->choose(sampler, rows, own, histories, tokens);
        }
        if (!chosen) return nb::none();
        computed_ = false;
        return nb::cast(tokens);
    }

private:
    nb::object plan_, sampler_;
    Array<int32_t> last_, length_;
    Array<int64_t> position_;
    Array<const int32_t> adapter_;
    Array<const bool> live_;
    std::vector<Table> tables_;
    std::optional<DecodeSteps> steps_;
    bool computed_ = false;  // there are logits to choose from
};

}  // namespace

void bind_decode_steps(nb::module_& m) {
    nb::class_<Steps>(m, "DecodeSteps")
        .def(nb::init<nb::object, nb::object, Array<int32_t>, Array<int32_t>, Array<int64_t>, Array<const int32_t>,
                      Array<const bool>, std::vector<Table>, int, int, int>(),
             nb::arg(), nb::arg(), nb::arg().noconvert(), nb::arg().noconvert(), nb::arg().noconvert(), nb::arg().noconvert(),
             nb::arg().noconvert(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
        .def("run", &Steps::run, nb::arg().noconvert())
        .def("choose", &Steps::choose);
}

}  // namespace quire
