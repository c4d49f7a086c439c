// Linear steps: several weights over one input in one step, the gated pair with its activation (and int8) in its tail, and
// one matrix whose heads each read columns of their own.
#include <string.h>

#include <stdexcept>

#include "operand.h"
#include "plan.h"
#include "spread.h"

namespace quire {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("plan: " + what); }

constexpr int kRows = 128;      // rows of x in an item: they stay in the second cache while the weights pass
constexpr int kStreaming = 32;  // rows up to which a product waits for its weights
constexpr int kWide = 4;        // groups of 32 columns that many rows of a gated pair take at a time
constexpr int kPeakBlocks = kSampleBlock / 16;  // blocks of a weight whose results have one peak
constexpr size_t kNear = 64 << 10;  // bytes of results that are looked at again while a cache has them

struct Part {
    Segment segment;
    Slot in, out, residual, shrunk;
};

// Blocks [b0, b1) of a weight, rows [m0, m0 + m) of x, into `e` (whose pointers are at row m0, column 0 of the run).
void multiply(const Run& run, const Part& p, int b0, int b1, int m0, int m, Epilogue e) {
    if (p.segment.bias) e.bias = p.segment.bias->data() + 16 * b0;
    multiply(run.plan.kernels(), *p.segment.weight, b0, b1, run.plan.operand(p.in, m0), m, e);
}

// What adapters add to it. Costs nothing where no row has one.
void adapt(const Run& run, const Part& p, int b0, int b1, int m0, int m, const Epilogue& e) {
    if (p.segment.site >= 0 && run.batch.adapters) run.plan.expand(run, p.segment.site, p.shrunk, b0, b1, m0, m, e.out, e.out_stride);
}

// A step over units of weights (blocks, or pairs of them) that are shared out anew in every run.
struct Shared : Step {
    Spread spread;

    void share(int units, int rows, int threads, int most) {
        spread = rows > kStreaming ? Spread::even(units, threads, most) : Spread::streaming(units, threads);
    }
    int times(int rows) const { return (rows + kRows - 1) / kRows * spread.items; }  // items for so many rows

    virtual const uint8_t* first_of(int index) const = 0;  // weights that an item of this index begins with
    bool streams() const override { return true; }
    const uint8_t* begins(int thread) const override {
        return spread.runs ? first_of(ThreadPool::share_begins(thread, spread.items, spread.runs)) : nullptr;
    }
    // After an item of this index: another one, or the next step.
    const uint8_t* after(int index, int thread) const {
        if (!spread.runs) return nullptr;
        if (spread.goes_on(index)) return first_of(index + 1);
        return next ? next->begins(thread) : nullptr;
    }
};

struct Linear : Shared {
    const char* name() const override { return "linear"; }
    std::vector<Part> parts;
    int blocks = 0;
    int grain = 1;  // blocks that stay together
    int32_t* peaks = nullptr;
    size_t peaks_stride = 0;

    bool leaves_peaks(int slot, int32_t* to, size_t stride) override {
        if (parts.size() != 1 || parts[0].segment.out != slot) return false;
        grain = kPeakBlocks, peaks = to, peaks_stride = stride;
        return true;
    }
    void prepare(const Run& run) override { share((blocks + grain - 1) / grain, run.rows(parts[0].out), run.threads, 8 / grain); }
    int items(const Run& run) const override { return times(run.rows(parts[0].out)); }
    void work(const Run& run, int item, int thread) const override {
        const int m0 = item / spread.items * kRows, index = item % spread.items;
        const int rows = run.rows(parts[0].out), m = rows - m0 < kRows ? rows - m0 : kRows;
        const uint8_t* then = after(index, thread);
        int b0 = grain * spread.from(index), b1 = grain * spread.to(index);
        if (peaks) return some(run, b0, b1 < blocks ? b1 : blocks, m0, m, then);
        for (const Part& p : parts) {
            const int most = p.segment.weight->blocks;
            if (b0 < most && b0 < b1) part(run, p, b0, b1 < most ? b1 : most, m0, m, b1 <= most ? then : (&p + 1)->segment.weight->block(0));
            b0 = b0 < most ? 0 : b0 - most, b1 -= most;
            if (b1 <= 0) return;
        }
    }
    void part(const Run& run, const Part& p, int b0, int b1, int m0, int m, const uint8_t* then) const {
        Epilogue e;
        e.then = then;
        e.out = run.plan.floats(p.out, m0) + 16 * b0;
        e.out_stride = p.out.stride / sizeof(float);
        if (p.segment.residual >= 0) {
            e.residual = run.plan.floats(p.residual, m0) + 16 * b0;
            e.residual_stride = p.residual.stride / sizeof(float);
        }
        multiply(run, p, b0, b1, m0, m, e);
        adapt(run, p, b0, b1, m0, m, e);
    }

    // A few blocks after others, with the peaks of what they made.
    void some(const Run& run, int b0, int b1, int m0, int m, const uint8_t* then) const {
        const Part& p = parts[0];
        const int fit = (int)(kNear / (16 * sizeof(float) * (size_t)m)), each = fit < kPeakBlocks ? kPeakBlocks : fit / kPeakBlocks * kPeakBlocks;
        for (int b = b0; b < b1; b += each) {
            const int end = b + each < b1 ? b + each : b1, from = 16 * b, n = p.segment.weight->n;
            part(run, p, b, end, m0, m, end < b1 ? p.segment.weight->block(end) : then);
            const int count = 16 * end < n ? 16 * end - from : n - from;
            for (int r = m0; r < m0 + m; r++) {
                int32_t* to = peaks + (size_t)r * peaks_stride + from / kSampleBlock;
                if (!run.plan.kernels().peaks(run.plan.floats(p.out, r) + from, count, to)) *to = kNoPeak;
            }
        }
    }

    const uint8_t* first_of(int index) const override {
        int b = grain * spread.from(index);
        for (const Part& p : parts) {
            if (b < p.segment.weight->blocks) return p.segment.weight->block(b);
            b -= p.segment.weight->blocks;
        }
        return nullptr;
    }
};

// act(x @ gate, x @ up), 32 columns at a time, so that an int8 group is whole within an item.
struct Gated : Shared {
    const char* name() const override { return "gated"; }
    Part gate, up;
    Slot out, quant;
    bool keep = false, quantized = false;
    ElementwiseKernel act = nullptr;

    void prepare(const Run& run) override { share((gate.segment.weight->blocks + 1) / 2, run.rows(gate.in), run.threads, kWide); }
    int items(const Run& run) const override { return times(run.rows(gate.in)); }
    void work(const Run& run, int item, int thread) const override {
        const int m0 = item / spread.items * kRows, index = item % spread.items;
        const int rows = run.rows(gate.in), m = rows - m0 < kRows ? rows - m0 : kRows;
        const int most = (m > kStreaming ? kWide : 1) * kRows / m;  // groups at a time: a few rows' results stay in the first cache
        const uint8_t* then = after(index, thread);
        for (int g = spread.from(index), end = spread.to(index); g < end; g += most) {
            const bool last = g + most >= end;
            some(run, g, last ? end : g + most, m0, m, thread, last ? then : gate.segment.weight->block(2 * (g + most)));
        }
    }
    const uint8_t* first_of(int index) const override { return gate.segment.weight->block(2 * spread.from(index)); }
    void some(const Run& run, int g0, int g1, int m0, int m, int thread, const uint8_t* then) const {
        const int n = gate.segment.weight->n, most = gate.segment.weight->blocks;
        const int b0 = 2 * g0, b1 = 2 * g1 < most ? 2 * g1 : most, width = 32 * (g1 - g0);
        float* g = (float*)run.plan.scratch(thread);
        float* u = g + kWide * 32 * kRows;
        Epilogue e;
        e.out_stride = (size_t)width;
        e.out = g;
        e.then = up.segment.weight->block(b0);
        multiply(run, gate, b0, b1, m0, m, e);
        adapt(run, gate, b0, b1, m0, m, e);
        e.out = u;
        e.then = then;
        multiply(run, up, b0, b1, m0, m, e);
        adapt(run, up, b0, b1, m0, m, e);
        const int count = n - 32 * g0 < width ? n - 32 * g0 : width;
        for (int r = 0; r < m; r++, g += width, u += width) {
            float* to = keep ? run.plan.floats(out, m0 + r) + 32 * g0 : g;
            act(g, u, 0.0f, count, to);
            if (quantized) run.plan.quantize_row(quant, m0 + r, to, g0, g1 - g0);
        }
    }
};

// Head h: columns [h * k, h * k + k) of x against rows [h * n, h * n + n) of the weight, which are also its columns of the
// result. A block that holds rows of two heads is computed for each of them, and each keeps its own.
struct HeadLinear : Step {
    const char* name() const override { return "head_linear"; }
    std::shared_ptr<const Matrix> weight;
    Slot in, out;
    int heads = 1, n = 0, k = 0;  // n, k: of a head

    int size = 1, chunks = 1;  // of this run: blocks in an item, items of a head

    void prepare(const Run& run) override {
        const int blocks = n % 16 ? n / 16 + 2 : n / 16;  // that a head may touch
        size = heads * blocks / (8 * run.threads);
        size = size < 1 ? 1 : size > 8 ? 8 : size;
        if (size > blocks) size = blocks;
        chunks = (blocks + size - 1) / size;
    }
    int items(const Run& run) const override { return (run.rows(out) + kRows - 1) / kRows * heads * chunks; }
    void work(const Run& run, int item, int thread) const override {
        const int m0 = item / (heads * chunks) * kRows, index = item % (heads * chunks), h = index / chunks;
        const int rows = run.rows(out), m = rows - m0 < kRows ? rows - m0 : kRows;
        const int low = h * n, high = low + n, end = (high + 15) / 16;
        int b0 = low / 16 + index % chunks * size, b1 = b0 + size < end ? b0 + size : end;
        const Operand x = run.plan.operand(in, m0).columns(h * k);
        if (b0 < b1 && 16 * b0 < low) shared(run, x, b0++, m0, m, low, high, thread);
        if (b0 < b1 && 16 * b1 > high && high < weight->n) shared(run, x, --b1, m0, m, low, high, thread);
        if (b0 >= b1) return;
        Epilogue e;
        e.out = run.plan.floats(out, m0) + 16 * b0;
        e.out_stride = out.stride / sizeof(float);
        multiply(run.plan.kernels(), *weight, b0, b1, x, m, e);
    }
    void shared(const Run& run, const Operand& x, int b, int m0, int m, int low, int high, int thread) const {
        Epilogue e;
        e.out = (float*)run.plan.scratch(thread);
        e.out_stride = 16;
        multiply(run.plan.kernels(), *weight, b, b + 1, x, m, e);
        const int from = 16 * b < low ? low : 16 * b, to = 16 * b + 16 < high ? 16 * b + 16 : high;
        for (int r = 0; r < m; r++)
            memcpy(run.plan.floats(out, m0 + r) + from, e.out + 16 * r + from % 16, (size_t)(to - from) * sizeof(float));
    }
};

Slot shrunk_of(const Plan& plan, const Segment& s) { return s.site >= 0 ? plan.at(s.shrunk) : Slot{}; }

}  // namespace

void Plan::check_segment(const Segment& s) const {
    const Slot& in = bytes_of_x(*s.weight) ? quant_slot(s.in, "linear's input") : floats_slot(s.in, "linear's input");
    if (in.width != s.weight->k) refuse("linear: the weight has another width");
    if (in.quant < bytes_of_x(*s.weight)) refuse("linear: a weight of 14 bits needs a fine input");
    if (s.bias && s.bias->n != s.weight->n) refuse("linear: the bias has another width");
    if (s.site >= 0) check_site(s.site, s.shrunk, s.weight->n, in.per_token);
}

void Plan::linear(std::vector<Segment> segments) {
    if (segments.empty()) refuse("linear: no weight");
    auto step = std::make_unique<Linear>();
    for (Segment& s : segments) {
        check_segment(s);
        Part p{s, at(s.in), floats_slot(s.out, "linear's output"), {}, shrunk_of(*this, s)};
        p.residual = s.residual >= 0 ? floats_slot(s.residual, "linear's residual") : p.out;
        for (const Slot* o : {&p.out, &p.residual})
            if (o->width != s.weight->n || o->per_token != p.in.per_token) refuse("linear: shapes differ");
        if (!step->parts.empty() && step->parts[0].in.per_token != p.in.per_token) refuse("linear: shapes differ");
        step->blocks += s.weight->blocks;
        step->parts.push_back(std::move(p));
    }
    steps_.push_back(std::move(step));
}

void Plan::gated(Elementwise act, Segment gate, Segment up, int out, int quant_out) {
    if (row_of(act).inputs != 2) refuse("gated: the activation does not read two tensors");
    check_segment(gate);
    check_segment(up);
    auto step = std::make_unique<Gated>();
    step->gate = {gate, at(gate.in), {}, {}, shrunk_of(*this, gate)};
    step->up = {up, at(up.in), {}, {}, shrunk_of(*this, up)};
    const int n = gate.weight->n;
    if (up.weight->n != n || step->gate.in.per_token != step->up.in.per_token) refuse("gated: shapes differ");
    if ((step->keep = out >= 0)) step->out = floats_slot(out, "gated's output");
    if ((step->quantized = quant_out >= 0)) step->quant = quant_slot(quant_out, "gated's int8 output");
    if (!step->keep && !step->quantized) refuse("gated: no output");
    for (const Slot* s : {step->keep ? &step->out : &step->quant, step->quantized ? &step->quant : &step->out})
        if (s->width != n || s->per_token != step->gate.in.per_token) refuse("gated: shapes differ");
    step->act = (*kernels_)[act];
    need_scratch(2 * kWide * 32 * kRows * sizeof(float));
    steps_.push_back(std::move(step));
}

void Plan::head_linear(int x, std::shared_ptr<const Matrix> weight, int heads, int out) {
    auto step = std::make_unique<HeadLinear>();
    step->in = bytes_of_x(*weight) ? quant_slot(x, "head_linear's input") : floats_slot(x, "head_linear's input");
    step->out = floats_slot(out, "head_linear's output");
    if (heads < 1 || weight->n % heads || step->in.width != heads * (int64_t)weight->k || step->out.width != weight->n ||
        step->in.per_token != step->out.per_token || step->in.quant < bytes_of_x(*weight))
        refuse("head_linear: shapes differ");
    step->heads = heads, step->n = weight->n / heads, step->k = weight->k;
    step->weight = std::move(weight);
    need_scratch(16 * kRows * sizeof(float));
    steps_.push_back(std::move(step));
}

}  // namespace quire
