// A mixture of experts in four steps: route rows (and put them in order of their experts), gather the rows of each expert,
// gate and up with the activation, down. Experts are ordinary matrices, multiplied as any linear.
//
// Positions: the rows of expert 0, of expert 1, ..., each expert from a multiple of 16 on, so that it has panels of its own.
// A row that is alone with an expert is read where it lies. The last step shares out columns, not experts: an item adds up
// what all experts give to its columns, in order of their numbers, so nothing of a row depends on the rows beside it.
#include <string.h>

#include <algorithm>
#include <stdexcept>

#include "plan.h"

namespace quire {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("plan: moe: " + what); }

constexpr int kRows = 128;   // rows of an expert that are multiplied at once
constexpr int kBlocks = 8;   // of down, at most in an item
constexpr int kGroups = 4;   // of 32 columns of gate and up, at most in an item

struct Tile {
    int32_t expert, at, rows;  // at: the first position
};

// What lies where in the arena, for at most `rows` rows.
struct Room {
    int experts = 0, top = 0;
    size_t chosen = 0, share = 0;             // int32, float [rows][top]
    size_t source = 0, weight = 0;            // int32, float [positions]: the row there, and what the expert counts for it
    size_t waiting = 0;                       // int32 [panels]: rows to be gathered
    size_t next = 0, tiles = 0;               // int32 [experts], Tile
    size_t rounded = 0, whole = 0;            // x, gathered: panels, rows
    size_t inner_rounded = 0, inner_whole = 0;  // what down reads
    size_t bytes = 0;

    Room() = default;
    Room(int rows, int count, int best, int width, int inner, Forms x, Forms y) : experts(count), top(best) {
        if (rows < 0 || count < 1 || best < 1 || best > count || (int64_t)rows * best > (1 << 26)) refuse("more rows than can be");
        const size_t pairs = (size_t)rows * (size_t)best, most = (size_t)panels(rows);
        auto take = [&](size_t n) {
            const size_t at = bytes;
            bytes += align64(n);
            return at;
        };
        chosen = take(4 * pairs), share = take(4 * pairs);
        source = take(64 * most), weight = take(64 * most), waiting = take(4 * most);
        next = take(4 * (size_t)count);
        tiles = take(sizeof(Tile) * (std::min(pairs, (size_t)count) + pairs / kRows));
        if (x.rounded) rounded = take(most * QuantShape(width, x.rounded == 2).bytes);
        if (x.whole) whole = take(16 * most * Slot::stride_of(width, false));
        if (y.rounded) inner_rounded = take(most * QuantShape(inner, y.rounded == 2).bytes);
        if (y.whole) inner_whole = take(16 * most * Slot::stride_of(inner, false));
    }
    // That so many rows can fill, in part: every expert may leave one unfinished.
    int panels(int rows) const {
        const int pairs = rows * top;
        return (pairs + 15 * std::min(pairs, experts)) / 16;
    }
};

bool affine(const Matrix& w) { return w.type == Type::Affine; }

// What the four steps share.
struct Mixture {
    Slot x, quant, logits, out;
    Forms forms;             // of x
    QuantShape inner_shape;  // of what down reads
    Experts experts;
    Routing routing;
    Room room;
    size_t at = 0;  // of the room, in the arena
    int width = 0, inner = 0;

    // Of this run, from the routing on.
    int tiles = 0, size = 1, columns = 1;  // size: groups of 32 columns in a unit of gate and up; columns: units of a tile
    std::atomic<int> pending{0}, unit{0};

    template <class T> T* part(const Run& run, size_t offset) const { return (T*)run.plan.arena(at + offset); }

    // Rows in order of their experts. On one thread.
    void order(const Run& run) {
        const int rows = run.rows(logits);
        const int32_t* chosen = part<int32_t>(run, room.chosen);
        const float* share = part<float>(run, room.share);
        int32_t *next = part<int32_t>(run, room.next), *waiting = part<int32_t>(run, room.waiting);
        Tile* tile = part<Tile>(run, room.tiles);
        memset(next, 0, sizeof(int32_t) * (size_t)routing.experts);
        memset(waiting, 0, sizeof(int32_t) * (size_t)room.panels(rows));
        for (int i = 0; i < rows * routing.top; i++) next[chosen[i]]++;
        tiles = 0;
        for (int e = 0, position = 0; e < routing.experts; e++) {
            const int count = next[e];
            for (int r = 0; r < count; r += kRows) tile[tiles++] = {e, position + r, std::min(kRows, count - r)};
            for (int r = 0; count > 1 && r < count; r += 16) waiting[(position + r) / 16] = std::min(16, count - r);
            next[e] = position;
            position += (count + 15) / 16 * 16;
        }
        int32_t* source = part<int32_t>(run, room.source);
        float* weight = part<float>(run, room.weight);
        for (int r = 0; r < rows; r++)
            for (int i = r * routing.top; i < (r + 1) * routing.top; i++) {
                const int position = next[chosen[i]]++;
                source[position] = r, weight[position] = share[i];
            }
        const int groups = (inner + 31) / 32;
        size = std::clamp(tiles * groups / (8 * run.threads), 1, kGroups);
        columns = (groups + size - 1) / size;
        unit.store(0, std::memory_order_relaxed);
    }

    // The rows that a tile reads: gathered, or where the one lies.
    Operand input(const Run& run, const Tile& t) const {
        Operand o;
        const int r = part<int32_t>(run, room.source)[t.at];
        if (forms.rounded) {
            const bool alone = t.rows == 1;
            o.shape = alone ? quant.shape.from(0, r % 16) : quant.shape;
            o.panel = alone ? run.plan.panel(quant, r) + QuantShape::at(0, r % 16)
                            : part<uint8_t>(run, room.rounded) + (size_t)(t.at / 16) * quant.shape.bytes;
        }
        if (forms.whole) {
            o.stride = x.stride / sizeof(float);
            o.rows = t.rows == 1 ? run.plan.floats(x, r) : part<float>(run, room.whole) + (size_t)t.at * o.stride;
        }
        return o;
    }
    uint8_t* inner_panel(const Run& run, int position) const {
        return part<uint8_t>(run, room.inner_rounded) + (size_t)(position / 16) * inner_shape.bytes;
    }
    size_t inner_stride() const { return Slot::stride_of(inner, false) / sizeof(float); }
    float* inner_row(const Run& run, int position) const { return part<float>(run, room.inner_whole) + (size_t)position * inner_stride(); }
};

struct MoeStep : Step {
    std::shared_ptr<Mixture> moe;
    int rows(const Run& run) const { return run.rows(moe->logits); }
};

struct Route : MoeStep {
    const char* name() const override { return "route"; }
    int size = 1;  // rows in an item, of this run

    void prepare(const Run& run) override {
        size = rows(run) >= 16 * run.threads ? 16 : 1;
        moe->pending.store(items(run), std::memory_order_relaxed);
    }
    int items(const Run& run) const override { return (rows(run) + size - 1) / size; }
    void work(const Run& run, int item, int thread) const override {
        const Routing& how = moe->routing;
        for (int r = item * size; r < std::min((item + 1) * size, rows(run)); r++)
            how.route(run.plan.floats(moe->logits, r), run.plan.scratch(thread),
                      moe->part<int32_t>(run, moe->room.chosen) + r * how.top, moe->part<float>(run, moe->room.share) + r * how.top);
        if (moe->pending.fetch_sub(1, std::memory_order_acq_rel) == 1) moe->order(run);
    }
};

struct Gather : MoeStep {
    const char* name() const override { return "gather"; }
    int items(const Run& run) const override { return rows(run) > 1 ? moe->room.panels(rows(run)) : 0; }
    void work(const Run& run, int panel, int) const override {
        const int count = moe->part<int32_t>(run, moe->room.waiting)[panel];
        const int32_t* source = moe->part<int32_t>(run, moe->room.source) + 16 * panel;
        const QuantShape& shape = moe->quant.shape;
        for (int i = 0; i < count; i++) {
            if (moe->forms.rounded)
                copy_lane(shape, run.plan.panel(moe->quant, source[i]), source[i] % 16,
                          moe->part<uint8_t>(run, moe->room.rounded) + (size_t)panel * shape.bytes, i);
            if (moe->forms.whole)
                memcpy(moe->part<uint8_t>(run, moe->room.whole) + (size_t)(16 * panel + i) * moe->x.stride,
                       run.plan.floats(moe->x, source[i]), moe->x.stride);
        }
    }
};

// act(x @ gate, x @ up) of every tile. How many units there are is known only when rows are routed, so each thread has one
// item, and takes units until there are none.
struct GateUp : MoeStep {
    const char* name() const override { return "moe gated"; }
    int items(const Run& run) const override { return rows(run) ? run.threads : 0; }
    void work(const Run& run, int, int thread) const override {
        const Tile* tiles = moe->part<Tile>(run, moe->room.tiles);
        const int columns = moe->columns, size = moe->size, units = moe->tiles * columns;
        for (int u; (u = moe->unit.fetch_add(1, std::memory_order_relaxed)) < units;) {
            const Tile& t = tiles[u / columns];
            const int g0 = u % columns * size, g1 = std::min(g0 + size, (moe->inner + 31) / 32);
            some(run, t, moe->input(run, t), g0, g1, thread);
        }
    }
    void some(const Run& run, const Tile& t, const Operand& x, int g0, int g1, int thread) const {
        const Experts& w = moe->experts;
        const size_t e = (size_t)t.expert;
        const int b0 = 2 * g0, b1 = std::min(2 * g1, w.gate[e]->blocks), width = 32 * (g1 - g0), count = std::min(width, moe->inner - 32 * g0);
        float* g = (float*)run.plan.scratch(thread);
        float* u = g + kGroups * 32 * kRows;
        const Kernels& k = run.plan.kernels();
        Epilogue to;
        to.out_stride = (size_t)width;
        to.out = g;
        if (!w.gate_bias.empty()) to.bias = w.gate_bias[e]->data() + 16 * b0;
        multiply(k, *w.gate[e], b0, b1, x, t.rows, to);
        to.out = u;
        to.bias = w.up_bias.empty() ? nullptr : w.up_bias[e]->data() + 16 * b0;
        multiply(k, *w.up[e], b0, b1, x, t.rows, to);
        const bool rounded = affine(*w.down[e]);
        for (int r = 0; r < t.rows; r++, g += width, u += width) {
            const int position = t.at + r;
            float* out = rounded ? g : moe->inner_row(run, position) + 32 * g0;
            k[w.act](g, u, w.limit, count, out);
            if (rounded) k.quantize(out, g0, g1 - g0, moe->inner_panel(run, position), position % 16, moe->inner_shape);
        }
    }
};

// Some columns of every row: zero, and what each expert in turn adds to them.
struct Down : MoeStep {
    const char* name() const override { return "moe down"; }
    int size = 1;  // blocks of columns in an item, of this run

    int blocks() const { return (moe->width + 15) / 16; }
    void prepare(const Run& run) override { size = std::clamp(blocks() / (8 * run.threads), 1, kBlocks); }
    int items(const Run& run) const override { return rows(run) ? (blocks() + size - 1) / size : 0; }
    void work(const Run& run, int item, int thread) const override {
        const Experts& w = moe->experts;
        const int b0 = item * size, b1 = std::min(b0 + size, blocks()), columns = 16 * (b1 - b0);
        for (int r = 0; r < rows(run); r++) memset(run.plan.floats(moe->out, r) + 16 * b0, 0, (size_t)columns * sizeof(float));
        const Tile* tiles = moe->part<Tile>(run, moe->room.tiles);
        const int32_t* source = moe->part<int32_t>(run, moe->room.source);
        const float* weight = moe->part<float>(run, moe->room.weight);
        Epilogue e;
        e.out = (float*)run.plan.scratch(thread);
        e.out_stride = (size_t)columns;
        for (int i = 0; i < moe->tiles; i++) {
            const Tile& t = tiles[i];
            const Matrix& m = *w.down[(size_t)t.expert];
            Operand x;
            if (affine(m)) x.panel = moe->inner_panel(run, t.at), x.shape = moe->inner_shape;
            else x.rows = moe->inner_row(run, t.at), x.stride = moe->inner_stride();
            if (!w.down_bias.empty()) e.bias = w.down_bias[(size_t)t.expert]->data() + 16 * b0;
            multiply(run.plan.kernels(), m, b0, b1, x, t.rows, e);
            for (int r = 0; r < t.rows; r++)
                run.plan.kernels().accumulate(e.out + r * columns, weight[t.at + r], columns, run.plan.floats(moe->out, source[t.at + r]) + 16 * b0);
        }
    }
};

using Matrices = std::vector<std::shared_ptr<const Matrix>>;
using Vectors = std::vector<std::shared_ptr<const Vector>>;

// Checks their shapes, and says which forms of x they read.
Forms check_experts(const Matrices& all, const Vectors& biases, size_t count, int n, int k) {
    Forms forms;
    if (all.size() != count || (!biases.empty() && biases.size() != count)) refuse("an expert's weight is missing");
    for (const auto& w : all) {
        if (w->n != n || w->k != k) refuse("an expert has another shape");
        if (affine(*w)) forms.rounded = std::max(forms.rounded, bytes_of_x(*w));
        else forms.whole = true;
    }
    for (const auto& b : biases)
        if (b->n != n) refuse("an expert's bias has another width");
    return forms;
}

Forms both(Forms a, Forms b) { return {std::max(a.rounded, b.rounded), a.whole || b.whole}; }

}  // namespace

size_t moe_bytes(int rows, int experts, int top, int width, int inner_width, Forms gathered, Forms inner) {
    return Room(rows, experts, top, width, inner_width, gathered, inner).bytes;
}

void Plan::moe(int x, int quant, int logits, Experts experts, Routing routing, int out, size_t room) {
    auto moe = std::make_shared<Mixture>();
    moe->logits = floats_slot(logits, "the router's logits");
    moe->out = floats_slot(out, "moe's output");
    const int width = moe->width = moe->out.width, count = (int)experts.gate.size();
    if (!count || count != moe->logits.width) refuse("the router has another number of experts");
    const int inner = moe->inner = experts.gate[0]->n;
    moe->forms = both(check_experts(experts.gate, experts.gate_bias, (size_t)count, inner, width),
                      check_experts(experts.up, experts.up_bias, (size_t)count, inner, width));
    const Forms down = check_experts(experts.down, experts.down_bias, (size_t)count, width, inner);
    if (moe->forms.rounded) moe->quant = quant_slot(quant, "moe's int8 input");
    if (moe->quant.quant < moe->forms.rounded) refuse("weights of 14 bits need a fine input");
    if (down.rounded) moe->inner_shape = QuantShape(inner, down.rounded == 2);
    if (moe->forms.whole) moe->x = floats_slot(x, "moe's input");
    for (const Slot* s : {moe->forms.rounded ? &moe->quant : &moe->x, moe->forms.whole ? &moe->x : &moe->quant})
        if (s->width != width || s->per_token != moe->out.per_token) refuse("shapes differ");
    if (moe->logits.per_token != moe->out.per_token) refuse("shapes differ");
    const int per_group = routing.groups > 0 && count % routing.groups == 0 ? count / routing.groups : 0;
    if (routing.top < 1 || routing.top > count || !per_group || routing.top_groups < 1 || routing.top_groups > routing.groups ||
        routing.top > routing.top_groups * per_group || (routing.bias && routing.bias->n != count))
        refuse("the routing does not fit the experts");
    routing.experts = count;
    moe->room = Room(moe->out.per_token ? limits_.max_tokens : limits_.max_rows, count, routing.top, width, inner, moe->forms, down);
    if (room % 64 || room > arena_memory_.size() || moe->room.bytes > arena_memory_.size() - room) refuse("its room lies outside the arena");
    moe->at = room;
    need_scratch(std::max({routing.scratch(), 2 * kGroups * 32 * kRows * sizeof(float), 16 * kBlocks * kRows * sizeof(float)}));
    moe->experts = std::move(experts);
    moe->routing = std::move(routing);
    auto add = [&](auto step) {
        step->moe = moe;
        steps_.push_back(std::move(step));
    };
    add(std::make_unique<Route>()), add(std::make_unique<Gather>()), add(std::make_unique<GateUp>()), add(std::make_unique<Down>());
}

}  // namespace quire
