// The Python module: thin. It checks what crosses the border, lets go of the interpreter lock, and calls the plan.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <string.h>

#include "module.h"
#include "pack.h"
#include "plan.h"

namespace nb = nanobind;
using namespace quire;

namespace {

using Ints1 = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints2 = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats1 = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Array2 = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// (byte, shift, mask, lift, flip) and so on, as backend.py writes them down.
using PlaneTuple = std::tuple<std::vector<uint16_t>, std::vector<uint8_t>, int, int, int>;
using IntsTuple = std::tuple<std::vector<PlaneTuple>, int>;
using FactorTuple = std::tuple<int, bool, bool, IntsTuple>;

Ints to_ints(const IntsTuple& t) {
    Ints ints;
    for (const auto& [byte, shift, mask, lift, flip] : std::get<0>(t)) ints.planes.push_back({byte, shift, mask, lift, flip});
    ints.offset = std::get<1>(t);
    return ints;
}
Factor to_factor(const FactorTuple& t) { return {std::get<0>(t), std::get<1>(t), std::get<2>(t), to_ints(std::get<3>(t))}; }

// Threads and kernels: what weights are packed with and plans run on.
struct Machine {
    std::shared_ptr<ThreadPool> pool;
    const Kernels* kernels;

    Machine(int threads, const std::string& isa, const std::vector<int>& cores) {
        if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be between 1 and 1024");
        kernels = find_kernels(isa.c_str());
        if (!kernels) throw std::invalid_argument("no kernel set named '" + isa + "' runs on this CPU");
        pool = std::make_shared<ThreadPool>(threads, cores);
    }
};

std::vector<std::string> available() {
    const Kernels* sets[8];
    std::vector<std::string> names;
    for (int i = 0, n = available_kernels(sets, 8); i < n; i++) names.emplace_back(sets[i]->name);
    return names;
}

Codec py_codec(int block, int nbytes, int group, int bits, const IntsTuple& codes, const FactorTuple& scale,
               const std::vector<FactorTuple>& bias) {
    Codec c;
    c.block = block, c.nbytes = nbytes, c.group = group, c.bits = bits;
    c.codes = to_ints(codes);
    c.scale = to_factor(scale);
    if ((c.has_bias = !bias.empty())) c.bias = to_factor(bias[0]);
    return c;
}

std::vector<std::shared_ptr<Matrix>> py_pack(Machine& m, const std::vector<std::tuple<Array2, nb::object>>& given) {
    std::vector<Weight> weights;
    for (const auto& [data, how] : given) {
        Weight w;
        w.data = data.data(), w.n = (int64_t)data.shape(0), w.width = (int64_t)data.shape(1);
        const bool coded = nb::isinstance<Codec>(how);
        const int type = coded ? (int)Type::Affine : nb::cast<int>(how);
        if (type < 0 || type > 3) throw std::invalid_argument("there is no such type");
        if (data.itemsize() != (coded ? 1u : type == (int)Type::F32 ? 4u : 2u))
            throw std::invalid_argument("the array is not of that type");
        if (coded) w.codec = nb::cast<const Codec*>(how);
        w.type = (Type)type;
        weights.push_back(w);
    }
    std::vector<std::shared_ptr<Matrix>> packed;
    nb::gil_scoped_release free;
    for (Matrix& w : pack(*m.pool, weights)) packed.push_back(std::make_shared<Matrix>(std::move(w)));
    return packed;
}

size_t py_affine_bytes(int64_t n, int64_t row_bytes, int block, int nbytes, int group, int bits, const IntsTuple& codes,
                       const FactorTuple& scale, const std::vector<FactorTuple>& bias) {
    return affine_bytes(py_codec(block, nbytes, group, bits, codes, scale, bias), n, row_bytes);
}

size_t py_dense_bytes(int64_t n, int64_t k, int type) {
    if (type < 0 || type > 3) throw std::invalid_argument("there is no such type");
    return dense_bytes((Type)type, n, k);
}

std::shared_ptr<Matrix> py_pattern(Machine& m, int64_t n, int64_t k) {
    nb::gil_scoped_release free;
    return std::make_shared<Matrix>(pattern(*m.pool, n, k));
}

std::shared_ptr<Vector> py_vector(const Floats1& data) {
    auto v = std::make_shared<Vector>();
    v->n = (int)data.shape(0);
    v->memory = Mapping((data.shape(0) + 15) / 16 * 64);
    if (v->n) memcpy(v->memory.data(), data.data(), data.shape(0) * sizeof(float));
    return v;
}

using SegmentTuple = std::tuple<std::shared_ptr<Matrix>, nb::object, int, int, int, int, int>;

Segment to_segment(const SegmentTuple& t) {
    Segment s;
    s.weight = std::get<0>(t);
    if (!std::get<1>(t).is_none()) s.bias = nb::cast<std::shared_ptr<Vector>>(std::get<1>(t));
    s.in = std::get<2>(t), s.out = std::get<3>(t), s.residual = std::get<4>(t);
    s.site = std::get<5>(t), s.shrunk = std::get<6>(t);
    return s;
}

using PoolTuple = std::tuple<int, int, int, int, int, int, size_t>;

KvShape to_shape(const PoolTuple& t) {
    auto [layers, pages, kv_heads, head_dim, type, latent, state] = t;
    if (type < 0 || type > 2) throw nb::value_error("no cell keeps keys and values like that");
    constexpr KvType types[] = {KvType::Half, KvType::Byte, KvType::Fixed};
    return {layers, pages, kv_heads, head_dim, types[type], latent, state};
}

Elementwise to_elementwise(const std::string& name) {
    for (int i = 0; i < kElementwiseCount; i++)
        if (name == kElementwise[i].name) return (Elementwise)i;
    throw std::invalid_argument("no elementwise op is named '" + name + "'");
}

std::vector<std::string> elementwise_names() {
    std::vector<std::string> names;
    for (const ElementwiseOp& op : kElementwise) names.emplace_back(op.name);
    return names;
}

using Matrices = std::vector<std::shared_ptr<Matrix>>;
using Vectors = std::vector<std::shared_ptr<Vector>>;

// (gate, up, down), their biases (each empty, or one per expert), and the limit of the clamped activation, if it is that.
using ExpertsTuple = std::tuple<Matrices, Matrices, Matrices, Vectors, Vectors, Vectors, std::vector<float>>;
// top, sigmoid, renormalize, scale, groups, top_groups, pair
using RoutingTuple = std::tuple<int, bool, bool, double, int, int, bool>;

Experts to_experts(const ExpertsTuple& t) {
    Experts x;
    auto fill = [](auto& to, const auto& from) { to.assign(from.begin(), from.end()); };
    fill(x.gate, std::get<0>(t)), fill(x.up, std::get<1>(t)), fill(x.down, std::get<2>(t));
    fill(x.gate_bias, std::get<3>(t)), fill(x.up_bias, std::get<4>(t)), fill(x.down_bias, std::get<5>(t));
    if (!std::get<6>(t).empty()) x.act = Elementwise::clamped, x.limit = std::get<6>(t)[0];
    return x;
}

Routing to_routing(const RoutingTuple& t, const nb::object& bias) {
    Routing r;
    std::tie(r.top, r.sigmoid, r.renormalize, r.scale, r.groups, r.top_groups, r.pair) = t;
    if (!bias.is_none()) r.bias = nb::cast<std::shared_ptr<Vector>>(bias);
    return r;
}

nb::object py_run(nb::handle self, const Ints1& ids, const Ints1& pos, const Ints1& q_start, const Ints1& kv_len,
                  const Ints2& pages, const Ints1& write, const Ints1& logit_rows, const std::vector<Floats2>& inputs,
                  const std::vector<std::tuple<Ints2, Ints1>>& more, const std::optional<Ints1>& adapters,
                  const std::optional<std::tuple<Ints1, Floats2>>& given, const std::optional<Ints2>& coords) {
    Plan& plan = nb::cast<Plan&>(self);
    BatchView b;
    b.ids = ids.data(), b.pos = pos.data(), b.q_start = q_start.data(), b.kv_len = kv_len.data();
    b.pages = pages.data(), b.write = write.data(), b.logit_rows = logit_rows.data();
    auto size = [](size_t n) {
        if (n > (1u << 30)) throw std::invalid_argument("batch: an array is too long");
        return (int)n;
    };
    b.tokens = size(ids.shape(0)), b.sequences = size(kv_len.shape(0)), b.table = size(pages.shape(1));
    b.rows = size(logit_rows.shape(0));
    if (pos.shape(0) != ids.shape(0) || write.shape(0) != ids.shape(0))
        throw std::invalid_argument("batch: ids, pos and write differ in length");
    if (q_start.shape(0) != kv_len.shape(0) + 1 || pages.shape(0) != kv_len.shape(0))
        throw std::invalid_argument("batch: q_start, kv_len and pages differ in length");
    for (const auto& [table, places] : more) {
        if (table.shape(0) != pages.shape(0) || table.shape(1) != pages.shape(1) || places.shape(0) != ids.shape(0))
            throw std::invalid_argument("batch: the page tables of its groups differ in size");
        b.more.push_back({table.data(), places.data()});
    }
    if (adapters) {
        if (adapters->shape(0) != ids.shape(0)) throw std::invalid_argument("batch: ids and adapters differ in length");
        b.adapters = adapters->data();
    }
    if (given) {
        const auto& [which, rows] = *given;
        if (which.shape(0) != ids.shape(0)) throw std::invalid_argument("batch: ids and given differ in length");
        b.given = which.data(), b.embedded = rows.data(), b.rows_given = size(rows.shape(0)), b.width = size(rows.shape(1));
    }
    if (coords) {
        if (coords->shape(1) != ids.shape(0) || coords->shape(0) > 8) throw std::invalid_argument("batch: ids and coords differ in length");
        b.coords = coords->data(), b.axes = size(coords->shape(0));
    }
    if (inputs.size() != plan.inputs().size()) throw std::invalid_argument("inputs are missing");
    std::vector<const float*> pointers;
    for (size_t i = 0; i < inputs.size(); i++) {
        const Slot& s = plan.at(plan.inputs()[i]);
        if (inputs[i].shape(0) != ids.shape(0) || (int)inputs[i].shape(1) != s.width)
            throw std::invalid_argument("an input does not have the batch's rows and its own width");
        pointers.push_back(inputs[i].data());
    }
    {
        nb::gil_scoped_release free;
        plan.run(b, pointers);
    }
    return output_of(self, (size_t)(plan.output_slot().per_token ? b.tokens : b.rows));
}

using Pages = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ReadOnlyBytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Whether a buffer has a row for each page, of so many layers.
template <class Buffer> void check_rows(const Plan& p, int group, const Pages& pages, int layers, const Buffer& buffer) {
    if (group < 0 || group >= p.groups() || layers < 0 || layers > p.kv(group).layers)
        throw std::invalid_argument("pages: there is no such group, or it has fewer layers");
    if (buffer.shape(0) != pages.shape(0) || buffer.shape(1) != (size_t)layers * p.kv(group).layer_bytes())
        throw std::invalid_argument("pages: the buffer has rows of another size, or not one for each page");
}

void bind_plan(nb::module_& m) {
    nb::class_<Plan>(m, "Plan")
        .def("__init__",
             [](Plan* self, Machine& machine, const PoolTuple& kv, int max_tokens, int max_rows, size_t arena) {
                 new (self) Plan(machine.pool, machine.kernels, to_shape(kv), max_tokens, max_rows, arena);
             })
        .def("pool", [](Plan& p, const PoolTuple& kv) { return p.pool(to_shape(kv)); })
        .def("slot", &Plan::slot)
        .def("embed", [](Plan& p, std::shared_ptr<Matrix> table, int out) { p.embed(std::move(table), out); })
        .def("norm", [](Plan& p, int x, std::shared_ptr<Vector> w, float eps, int heads, int out,
                        int quant) { p.norm(x, std::move(w), eps, heads, out, quant); })
        .def("layer_norm", [](Plan& p, int x, std::shared_ptr<Vector> w, nb::object bias, float eps, int heads, int out, int quant) {
            std::shared_ptr<Vector> b = bias.is_none() ? nullptr : nb::cast<std::shared_ptr<Vector>>(bias);
            p.layer_norm(x, std::move(w), std::move(b), eps, heads, out, quant);
        }, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
        .def("quantize", &Plan::quantize)
        .def("elementwise", [](Plan& p, const std::string& op, const std::vector<int>& inputs, float number, int out) {
            p.elementwise(to_elementwise(op), inputs, number, out);
        })
        .def("join", &Plan::join)
        .def("take", &Plan::take)
        .def("rope_table", [](Plan& p, const Floats1& f, int dim, bool pairs, double magnitude, std::vector<int> axes) {
            if (dim < 0 || f.shape(0) != (size_t)dim / 2) throw std::invalid_argument("rope: frequencies must have dim / 2 entries");
            return p.rope_table(f.data(), dim, pairs, magnitude, std::move(axes));
        })
        .def("rope", &Plan::rope)
        .def("linear", [](Plan& p, const std::vector<SegmentTuple>& segments) {
            std::vector<Segment> list;
            for (const auto& s : segments) list.push_back(to_segment(s));
            p.linear(std::move(list));
        })
        .def("gated", [](Plan& p, const std::string& act, const SegmentTuple& gate, const SegmentTuple& up, int out, int quant) {
            p.gated(to_elementwise(act), to_segment(gate), to_segment(up), out, quant);
        })
        .def("head_linear", [](Plan& p, int x, std::shared_ptr<Matrix> w, int heads, int out) { p.head_linear(x, std::move(w), heads, out); })
        .def("moe", [](Plan& p, int x, int quant, int logits, const ExpertsTuple& experts, const RoutingTuple& routing, nb::object bias,
                       int out, size_t room) { p.moe(x, quant, logits, to_experts(experts), to_routing(routing, bias), out, room); },
             nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg())
        .def("store", &Plan::store)
        .def("attend", [](Plan& p, int q, int layer, int heads, float scale, int window, float cap, const nb::object& sinks, int out,
                          int quant, int group, bool stores, bool wanted) {
            AttendOptions options{window, cap, nullptr, group, stores, wanted};
            if (!sinks.is_none()) options.sinks = nb::cast<std::shared_ptr<Vector>>(sinks);
            p.attend(q, layer, heads, scale, out, quant, options);
        }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
        .def("store_latent", &Plan::store_latent)
        .def("attend_latent", &Plan::attend_latent)
        .def("encode", &Plan::encode)
        .def("site", nb::overload_cast<int, int, int, int>(&Plan::site))
        .def("shrink", &Plan::shrink)
        .def("adapt", &Plan::adapt)
        .def("place", [](Plan& p, int site, int slot, std::shared_ptr<Matrix> a, std::shared_ptr<Matrix> b, float scale) {
            nb::gil_scoped_release free;  // a run may hold the lock, and may want the interpreter
            p.place(site, slot, {std::move(a), std::move(b), scale});
        }, nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg())
        .def("conv", [](Plan& p, int x, std::shared_ptr<Vector> w, int layer, int group, size_t at,
                        int out) { p.conv(x, std::move(w), layer, group, at, out); })
        .def("delta_rule", [](Plan& p, int qkv, int a, int b, std::shared_ptr<Vector> decay, std::shared_ptr<Vector> bias, int layer,
                              int group, int key_heads, int heads, int key_dim, size_t at, int out) {
            p.delta_rule(qkv, a, b, std::move(decay), std::move(bias), layer, group, key_heads, heads, key_dim, at, out);
        })
        .def("input", &Plan::input)
        .def("output", &Plan::output)
        .def("describe", &Plan::describe)
        .def("touch", [](Plan& p, size_t piece, size_t ahead) {
            nb::gil_scoped_release free;
            return p.touch(piece, ahead);
        })
        .def("profile", &Plan::profile)
        .def("profiled", &Plan::profiled)
        .def_prop_ro("page_bytes", [](const Plan& p) { return p.kv(0).page_bytes(); })
        .def("rows", [](nb::handle self, int slot) {  // of the last run, of a tensor that its last step left in the arena
            const Plan& p = nb::cast<const Plan&>(self);
            const Slot& s = p.floats_of(slot);
            return rows_of(self, s, (size_t)p.ran(s.per_token));
        })
        .def("layer_bytes", [](const Plan& p, int group) {
            if (group < 0 || group >= p.groups()) throw std::invalid_argument("there is no such group");
            return p.kv(group).layer_bytes();
        })
        .def("finite", [](const Plan& p, int group) {  // for tests: kernels that look at it are on one architecture alone
            if (group < 0 || group >= p.groups()) throw std::invalid_argument("there is no such group");
            return p.finite(group);
        })
        .def("read_pages", [](const Plan& p, int group, const Pages& pages, int first, int layers, const Bytes& to) {
            check_rows(p, group, pages, layers, to);
            nb::gil_scoped_release free;
            p.read_pages(group, pages.data(), pages.shape(0), first, layers, to.data());
        }, nb::arg(), nb::arg().noconvert(), nb::arg(), nb::arg(), nb::arg().noconvert())
        .def("write_pages", [](Plan& p, int group, const Pages& pages, int first, int layers, const ReadOnlyBytes& from) {
            check_rows(p, group, pages, layers, from);
            nb::gil_scoped_release free;
            p.write_pages(group, pages.data(), pages.shape(0), first, layers, from.data());
        }, nb::arg(), nb::arg().noconvert(), nb::arg(), nb::arg(), nb::arg().noconvert())
        .def("run", &py_run, nb::arg().noconvert(), nb::arg().noconvert(), nb::arg().noconvert(), nb::arg().noconvert(),
             nb::arg().noconvert(), nb::arg().noconvert(), nb::arg().noconvert(), nb::arg(), nb::arg(), nb::arg().noconvert().none(),
             nb::arg().none(), nb::arg().noconvert().none());
}

}  // namespace

nb::object quire::rows_of(nb::handle plan, const Slot& slot, size_t rows) {
    const Plan& p = nb::cast<const Plan&>(plan);
    const size_t shape[2] = {rows, (size_t)slot.width};
    const int64_t strides[2] = {(int64_t)(slot.stride / sizeof(float)), 1};
    return nb::cast(nb::ndarray<nb::numpy, float>(p.floats(slot, 0), 2, shape, plan, strides));
}

nb::object quire::output_of(nb::handle plan, size_t rows) {
    return rows_of(plan, nb::cast<const Plan&>(plan).output_slot(), rows);
}

NB_MODULE(_native, m) {
    // A process that ends with an error still holds objects in its traceback: no reason to print pages after the message.
    nb::set_leak_warnings(false);
    m.def("available", &available);
    m.def("elementwise", &elementwise_names);
    m.def("tensor_bytes", &Slot::bytes_of);
    m.def("moe_bytes", [](int rows, int experts, int top, int width, int inner, std::pair<int, bool> x, std::pair<int, bool> y) {
        return moe_bytes(rows, experts, top, width, inner, {x.first, x.second}, {y.first, y.second});
    });
    nb::class_<Machine>(m, "Machine")
        .def(nb::init<int, const std::string&, const std::vector<int>&>(), nb::arg(), nb::arg(), nb::arg() = std::vector<int>{})
        .def_prop_ro("threads", [](const Machine& x) { return x.pool->threads(); });
    nb::class_<Matrix>(m, "Matrix")
        .def_prop_ro("shape", [](const Matrix& w) { return std::make_tuple(w.n, w.k); })
        .def_prop_ro("nbytes", [](const Matrix& w) { return w.memory.size(); });
    nb::class_<Vector>(m, "Vector").def_prop_ro("nbytes", [](const Vector& v) { return v.memory.size(); });
    nb::class_<Codec>(m, "Codec").def(nb::new_(&py_codec));
    m.def("pack", &py_pack);
    m.def("affine_bytes", &py_affine_bytes);
    m.def("dense_bytes", &py_dense_bytes);
    m.def("pattern", &py_pattern);
    m.def("vector", &py_vector);
    bind_plan(m);
    bind_sampler(m);
    bind_decode_steps(m);
    m.def("sampler", [](const Machine& x, int vocabulary) {
        if (vocabulary < 1 || vocabulary > 1 << 28) throw std::invalid_argument("a vocabulary has between 1 and 2^28 tokens");
        return std::make_unique<Sampler>(x.pool, x.kernels, vocabulary);
    });
    m.def("exp", [](const std::string& isa, const Floats1& x, nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
        const Kernels* k = find_kernels(isa.c_str());
        if (!k || out.shape(0) != x.shape(0)) throw std::invalid_argument("exp");
        k->exp(x.data(), (int)x.shape(0), out.data());
    });
}
