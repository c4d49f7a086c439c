// Layers that carry a state from token to token: a short convolution and the gated delta rule. A group of states has one
// for each of some pages of a sequence: the state after the last token of that page that was computed. A sequence goes on
// from the one before its first row, and leaves those of the pages it fills and the one after its last row behind, wherever
// its page table has a place for them. An item is one sequence and some columns, or one head: its rows are taken in order,
// so that where a step ends cannot be seen in a result.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <stdexcept>

#include "exp64.h"
#include "plan.h"

namespace quire {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("plan: " + what); }

constexpr int kConvColumns = 256;  // of an item
constexpr int kMaxTaps = 64;

struct StateStep : Step {
    Slot out;
    int layer = 0, group = 0;
    size_t at = 0;  // floats of the layer's state before this step's

    struct Walk {
        int row, rows;          // in the batch
        int first;              // position of its first row
        const int32_t* pages;   // of the sequence
    };

    static Walk walk(const Run& run, int group, int sequence) {
        const BatchView& b = run.batch;
        const int row = b.q_start[sequence], rows = b.q_start[sequence + 1] - row;
        return {row, rows, rows ? b.pos[row] : 0, b.at(group).pages + (size_t)sequence * (size_t)b.table};
    }
    float* state(const Run& run, int page) const { return (float*)run.plan.cells(group, layer, page) + at; }
    const float* before(const Run& run, const Walk& w) const {  // nullptr: the sequence begins
        return w.first ? state(run, w.pages[(w.first - 1) / kPage]) : nullptr;
    }
    // Where the state after row r goes; nullptr: nowhere.
    float* after(const Run& run, const Walk& w, int r) const {
        const int position = w.first + r;
        if (r != w.rows - 1 && (position + 1) % kPage) return nullptr;
        const int page = w.pages[position / kPage];
        return page < 0 ? nullptr : state(run, page);
    }
};

struct Conv : StateStep {
    const char* name() const override { return "conv"; }
    Slot x;
    std::shared_ptr<const Vector> weight;
    int taps = 0;

    int blocks() const { return (x.width + kConvColumns - 1) / kConvColumns; }
    int items(const Run& run) const override { return run.batch.sequences * blocks(); }

    void work(const Run& run, int item, int thread) const override {
        const Walk w = walk(run, group, item / blocks());
        const int column = item % blocks() * kConvColumns, n = std::min(kConvColumns, x.width - column), past = taps - 1;
        if (!w.rows) return;
        // A copy of the rows before: their place may be written while rows still look at them.
        float* old = (float*)run.plan.scratch(thread);
        const float* from = before(run, w);
        for (int j = 0; j < past; j++) {
            float* to = old + j * kConvColumns;
            if (from) memcpy(to, from + (size_t)j * (size_t)x.width + column, (size_t)n * sizeof(float));
            else memset(to, 0, (size_t)n * sizeof(float));
        }
        auto seen = [&](int r) -> const float* { return r < 0 ? old + (r + past) * kConvColumns : run.plan.floats(x, w.row + r) + column; };
        const float* rows[kMaxTaps];
        for (int r = 0; r < w.rows; r++) {
            for (int j = 0; j < taps; j++) rows[j] = seen(r - past + j);
            run.plan.kernels().conv(rows, weight->data() + column, (size_t)x.width, taps, n, run.plan.floats(out, w.row + r) + column);
            if (float* to = after(run, w, r))
                for (int j = 0; j < past; j++) memcpy(to + (size_t)j * (size_t)x.width + column, rows[j + 1], (size_t)n * sizeof(float));
        }
    }
};

struct Delta : StateStep {
    const char* name() const override { return "delta_rule"; }
    Slot qkv, a, b;
    std::shared_ptr<const Vector> decay, bias;
    int key_heads = 1, heads = 1, key_dim = 0, value_dim = 0;

    size_t numbers() const { return (size_t)key_dim * (size_t)value_dim; }
    int items(const Run& run) const override { return run.batch.sequences * heads; }

    void work(const Run& run, int item, int thread) const override {
        const int h = item % heads, share = h / (heads / key_heads);
        const Walk w = walk(run, group, item / heads);
        if (!w.rows) return;
        const Kernels& kernels = run.plan.kernels();
        float* own = (float*)run.plan.scratch(thread);
        float *q = own + numbers(), *k = q + kMaxHeadDim;
        const float* from = before(run, w);
        if (from) from += (size_t)h * numbers();
        else memset(own, 0, numbers() * sizeof(float)), from = own;
        DeltaArgs args;
        args.rows = key_dim, args.columns = value_dim, args.q = q, args.k = k;
        for (int r = 0; r < w.rows; r++) {
            const float* row = run.plan.floats(qkv, w.row + r);
            kernels.unit(row + share * key_dim, 1.0f / sqrtf((float)key_dim), key_dim, q);
            kernels.unit(row + (key_heads + share) * key_dim, 1.0f, key_dim, k);
            const double x = (double)run.plan.floats(a, w.row + r)[h] + (double)bias->data()[h];
            args.slow = (float)exp64((double)decay->data()[h] * softplus64(x));
            args.beta = (float)(1.0 / (1.0 + exp64(-(double)run.plan.floats(b, w.row + r)[h])));
            args.v = row + 2 * key_heads * key_dim + h * value_dim;
            args.out = run.plan.floats(out, w.row + r) + h * value_dim;
            args.from = from;
            float* kept = after(run, w, r);
            if (kept) kept += (size_t)h * numbers();
            args.to = kept && r == w.rows - 1 ? kept : own;
            kernels.delta(args);
            if (kept && kept != args.to) memcpy(kept, own, numbers() * sizeof(float));
            from = own;
        }
    }
};

}  // namespace

const KvShape& Plan::states_of(int group, int layer, size_t end) {
    if (group < 0 || group >= (int)pools_.size()) refuse("there is no group " + std::to_string(group));
    const KvShape& kv = pools_[(size_t)group].shape;
    if (layer < 0 || layer >= kv.layers || end > kv.state) refuse("the pool has no such state in layer " + std::to_string(layer));
    limits_.pools[(size_t)group].state = true;
    return kv;
}

void Plan::conv(int x, std::shared_ptr<const Vector> weight, int layer, int group, size_t at, int out) {
    auto step = std::make_unique<Conv>();
    step->x = floats_slot(x, "conv's input");
    step->out = floats_slot(out, "conv's output");
    step->taps = weight->n / step->x.width;
    if (step->taps < 2 || step->taps > kMaxTaps || weight->n != step->taps * step->x.width || step->out.width != step->x.width ||
        !step->x.per_token || !step->out.per_token)
        refuse("conv: shapes differ");
    states_of(group, layer, at + (size_t)(step->taps - 1) * (size_t)step->x.width);
    step->weight = std::move(weight);
    step->layer = layer, step->group = group, step->at = at;
    need_scratch((size_t)(step->taps - 1) * kConvColumns * sizeof(float));
    steps_.push_back(std::move(step));
}

void Plan::delta_rule(int qkv, int a, int b, std::shared_ptr<const Vector> decay, std::shared_ptr<const Vector> bias, int layer, int group,
                      int key_heads, int heads, int key_dim, size_t at, int out) {
    auto step = std::make_unique<Delta>();
    step->qkv = floats_slot(qkv, "delta_rule's input");
    step->a = floats_slot(a, "delta_rule's a");
    step->b = floats_slot(b, "delta_rule's b");
    step->out = floats_slot(out, "delta_rule's output");
    const bool sizes = key_heads > 0 && heads > 0 && heads % key_heads == 0 && key_dim > 0 && key_dim <= kMaxHeadDim;
    if (!sizes || step->out.width % heads || step->out.width / heads > kMaxHeadDim ||
        step->qkv.width != 2 * key_heads * key_dim + step->out.width || step->a.width != heads || step->b.width != heads ||
        decay->n != heads || bias->n != heads)
        refuse("delta_rule: shapes differ");
    for (const Slot* s : {&step->qkv, &step->a, &step->b, &step->out})
        if (!s->per_token) refuse("delta_rule: a row per token is needed");
    step->key_heads = key_heads, step->heads = heads, step->key_dim = key_dim, step->value_dim = step->out.width / heads;
    states_of(group, layer, at + (size_t)heads * step->numbers());
    step->decay = std::move(decay), step->bias = std::move(bias);
    step->layer = layer, step->group = group, step->at = at;
    need_scratch((step->numbers() + 2 * kMaxHeadDim) * sizeof(float));
    steps_.push_back(std::move(step));
}

}  // namespace quire
