// Steps that treat each row on its own: embed, norms, quantize, elementwise ops, join, take, rope.
#include <math.h>
#include <string.h>

#include <stdexcept>

#include "plan.h"
#include "rope_table.h"

namespace quire {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("plan: " + what); }

constexpr int kNarrow = 1024;  // columns of a row that is done sooner than another thread has got the lines of a panel

// An item is one row, or 16 where there are many, or where they are short and make a panel: threads then write panels of their own.
struct RowStep : Step {
    Slot out;
    int size = 1;  // rows in an item, of this run
    void prepare(const Run& run) override {
        const Slot* panels = packs();
        size = run.rows(out) >= 16 * run.threads || (panels && panels->width <= kNarrow) ? 16 : 1;
    }
    virtual const Slot* packs() const { return nullptr; }  // what it writes panels of
    int items(const Run& run) const override { return (run.rows(out) + size - 1) / size; }
    void work(const Run& run, int item, int thread) const override {
        const int rows = run.rows(out), end = (item + 1) * size < rows ? (item + 1) * size : rows;
        for (int r = item * size; r < end; r++) row(run, r, thread);
    }
    virtual void row(const Run&, int r, int thread) const = 0;
};

struct Embed : RowStep {
    const char* name() const override { return "embed"; }
    std::shared_ptr<const Matrix> table;
    void row(const Run& run, int t, int) const override {
        const BatchView& b = run.batch;
        if (b.given && b.given[t] >= 0)
            memcpy(run.plan.floats(out, t), b.embedded + (size_t)b.given[t] * (size_t)out.width, (size_t)out.width * sizeof(float));
        else run.plan.kernels().dequantize_row(*table, b.ids[t], run.plan.floats(out, t));
    }
};

struct Norm : RowStep {
    const char* name() const override { return centred ? "layer_norm" : "norm"; }
    Slot x, quant;
    bool keep = false, quantized = false, centred = false;
    std::shared_ptr<const Vector> weight, bias;
    float eps = 0;
    int heads = 1, step = 0;  // step: from one head's weight to the next one's
    const Slot* packs() const override { return quantized ? &quant : nullptr; }
    void row(const Run& run, int t, int thread) const override {
        const Kernels& k = run.plan.kernels();
        const int n = x.width / heads;
        const float* from = run.plan.floats(x, t);
        float* to = keep ? run.plan.floats(out, t) : (float*)run.plan.scratch(thread);
        for (int h = 0; h < heads; h++) {
            const float* w = weight->data() + h * step;
            if (centred) k.layer_norm(from + h * n, w, bias ? bias->data() + h * step : nullptr, eps, n, to + h * n);
            else k.rms_norm(from + h * n, w, eps, n, to + h * n);
        }
        if (quantized) run.plan.quantize_row(quant, t, to, 0, x.width / 32);
    }
};

struct Quantize : RowStep {
    const char* name() const override { return "quantize"; }
    Slot x;
    const Slot* packs() const override { return &out; }
    void row(const Run& run, int t, int) const override {
        run.plan.quantize_row(out, t, run.plan.floats(x, t), 0, x.width / 32);
    }
};

struct ElementwiseStep : RowStep {
    const char* label = "";
    const char* name() const override { return label; }
    Slot inputs[2];  // both the same where the op reads one
    ElementwiseKernel kernel = nullptr;
    float number = 0;
    void row(const Run& run, int t, int) const override {
        kernel(run.plan.floats(inputs[0], t), run.plan.floats(inputs[1], t), number, out.width, run.plan.floats(out, t));
    }
};

struct Join : RowStep {
    const char* name() const override { return "join"; }
    Slot a, b;
    int heads = 1;
    void row(const Run& run, int t, int) const override {
        const size_t m = (size_t)(a.width / heads), n = (size_t)(b.width / heads);
        const float *first = run.plan.floats(a, t), *second = run.plan.floats(b, t);
        float* to = run.plan.floats(out, t);
        for (int h = 0; h < heads; h++, first += m, second += n, to += m + n) {
            memcpy(to, first, m * sizeof(float));
            memcpy(to + m, second, n * sizeof(float));
        }
    }
};

struct Take : RowStep {
    const char* name() const override { return "take"; }
    Slot x;
    void row(const Run& run, int i, int) const override {
        memcpy(run.plan.floats(out, i), run.plan.floats(x, run.batch.logit_rows[i]), (size_t)x.width * sizeof(float));
    }
};

struct Rotate : RowStep {
    const char* name() const override { return "rope"; }
    Slot x;
    const RopeTable* table = nullptr;
    int heads = 0;
    void row(const Run& run, int t, int) const override {
        run.plan.kernels().rope(run.plan.floats(x, t), table->args(t, heads, x.width / heads), run.plan.floats(out, t));
    }
};

}  // namespace

// cos and sin in double, as the reference takes them; the angle and the results are float32.
void RopeTable::work(const Run& run, int t, int) const {
    float* to = (float*)memory.data() + (size_t)t * 2 * frequencies.size();
    const BatchView& b = run.batch;
    const bool several = b.coords && !axes.empty();
    for (size_t i = 0; i < frequencies.size(); i++) {
        const int32_t at = several ? b.coords[(size_t)axes[i] * (size_t)b.tokens + (size_t)t] : b.pos[t];
        const float angle = (float)at * frequencies[i];
        to[i] = (float)(::cos((double)angle) * magnitude);
        to[frequencies.size() + i] = (float)(::sin((double)angle) * magnitude);
    }
}

void Plan::embed(std::shared_ptr<const Matrix> table, int out) {
    auto step = std::make_unique<Embed>();
    step->out = floats_slot(out, "embed's output");
    if (table->k != step->out.width || !step->out.per_token) refuse("embed: shapes differ");
    if (!limits_.vocabulary || table->n < limits_.vocabulary) limits_.vocabulary = table->n;
    limits_.width = limits_.width && limits_.width != table->k ? -1 : table->k;
    step->table = std::move(table);
    steps_.push_back(std::move(step));
}

void Plan::add_norm(int x, std::shared_ptr<const Vector> weight, std::shared_ptr<const Vector> bias, bool centred, float eps, int heads,
                    int out, int quant_out) {
    auto step = std::make_unique<Norm>();
    step->x = floats_slot(x, "norm's input");
    step->out = step->x;
    if (heads < 1 || step->x.width % heads) refuse("norm: the heads do not fit the width");
    if (weight->n != step->x.width && weight->n != step->x.width / heads) refuse("norm: the weight has another width");
    if (bias && bias->n != weight->n) refuse("norm: the bias has another width");
    if ((step->keep = out >= 0)) step->out = floats_slot(out, "norm's output");
    if ((step->quantized = quant_out >= 0)) step->quant = quant_slot(quant_out, "norm's int8 output");
    for (const Slot* s : {&step->out, step->quantized ? &step->quant : &step->x})
        if (s->width != step->x.width || s->per_token != step->x.per_token) refuse("norm: shapes differ");
    step->step = weight->n == step->x.width ? step->x.width / heads : 0;
    step->heads = heads;
    step->weight = std::move(weight);
    step->bias = std::move(bias);
    step->centred = centred;
    step->eps = eps;
    need_scratch(step->x.stride);
    steps_.push_back(std::move(step));
}

void Plan::norm(int x, std::shared_ptr<const Vector> weight, float eps, int heads, int out, int quant_out) {
    add_norm(x, std::move(weight), nullptr, false, eps, heads, out, quant_out);
}

void Plan::layer_norm(int x, std::shared_ptr<const Vector> weight, std::shared_ptr<const Vector> bias, float eps, int heads, int out,
                      int quant_out) {
    add_norm(x, std::move(weight), std::move(bias), true, eps, heads, out, quant_out);
}

void Plan::quantize(int x, int out) {
    auto step = std::make_unique<Quantize>();
    step->x = floats_slot(x, "quantize's input");
    step->out = quant_slot(out, "quantize's output");
    if (step->x.width != step->out.width || step->x.per_token != step->out.per_token) refuse("quantize: shapes differ");
    steps_.push_back(std::move(step));
}

void Plan::elementwise(Elementwise op, const std::vector<int>& inputs, float number, int out) {
    const ElementwiseOp& own = row_of(op);
    const std::string name = own.name;
    if ((int)inputs.size() != own.inputs) refuse(name + ": it reads " + std::to_string(own.inputs) + " tensors");
    auto step = std::make_unique<ElementwiseStep>();
    step->label = own.name;
    step->kernel = (*kernels_)[op];
    step->number = number;
    step->out = floats_slot(out, "an elementwise op's output");
    for (int i = 0; i < 2; i++) {
        const Slot& s = step->inputs[i] = floats_slot(inputs[inputs.size() > 1 ? (size_t)i : 0], "an elementwise op's input");
        if (s.width != step->out.width || s.per_token != step->out.per_token) refuse(name + ": shapes differ");
    }
    steps_.push_back(std::move(step));
}

void Plan::join(int a, int b, int heads, int out) {
    auto step = std::make_unique<Join>();
    step->a = floats_slot(a, "join's input");
    step->b = floats_slot(b, "join's input");
    step->out = floats_slot(out, "join's output");
    if (heads < 1 || step->a.width % heads || step->b.width % heads || step->a.width + step->b.width != step->out.width ||
        step->a.per_token != step->out.per_token || step->b.per_token != step->out.per_token)
        refuse("join: shapes differ");
    step->heads = heads;
    steps_.push_back(std::move(step));
}

void Plan::take(int x, int out) {
    auto step = std::make_unique<Take>();
    step->x = floats_slot(x, "take's input");
    step->out = floats_slot(out, "take's output");
    if (step->x.width != step->out.width || !step->x.per_token || step->out.per_token) refuse("take: shapes differ");
    steps_.push_back(std::move(step));
}

int Plan::rope_table(const float* frequencies, int dim, bool pairs, double magnitude, std::vector<int> axes) {
    if (dim < 2 || dim % 2 || dim > 1 << 16) refuse("rope: dim must be even, and no more than a head has");
    if (!axes.empty() && axes.size() != (size_t)dim / 2) refuse("rope: axes must have dim / 2 entries");
    auto step = std::make_unique<RopeTable>();
    for (const int axis : axes) {
        if (axis < 0 || axis > 7) refuse("rope: no such axis of positions");
        if (axis >= limits_.axes) limits_.axes = axis + 1;
    }
    step->axes = std::move(axes);
    step->frequencies.assign(frequencies, frequencies + dim / 2);
    step->pairs = pairs;
    step->magnitude = magnitude;
    step->memory = Mapping((size_t)limits_.max_tokens * (size_t)dim * sizeof(float));
    tables_.push_back(step.get());
    steps_.push_back(std::move(step));
    return (int)tables_.size() - 1;
}

void Plan::rope(int x, int table, int heads, int out) {
    auto step = std::make_unique<Rotate>();
    step->x = floats_slot(x, "rope's input");
    step->out = floats_slot(out, "rope's output");
    if (table < 0 || table >= (int)tables_.size()) refuse("rope: no such table");
    step->table = tables_[(size_t)table];
    step->heads = heads;
    if (heads < 1 || step->x.width % heads || step->x.width / heads < step->table->dim() || step->x.width != step->out.width ||
        !step->x.per_token || !step->out.per_token)
        refuse("rope: shapes differ");
    steps_.push_back(std::move(step));
}

}  // namespace quire
