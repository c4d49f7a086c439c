// Attention in two steps: store this step's keys and values (rotating on the way), then let every query look at its past.
#include <stdexcept>

#include "plan.h"
#include "rope_table.h"

namespace quire {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("plan: " + what); }

constexpr int kTile = 24;  // queries that an item tries to hold: three register tiles of 8

struct Store : Step {
    Slot k, v, q, q_out;
    const RopeTable* table = nullptr;
    bool rotate_q = false;
    int layer = 0;

    int items(const Run& run) const override { return run.batch.tokens; }
    void work(const Run& run, int t, int thread) const override {
        const Plan& plan = run.plan;
        const KvShape& kv = plan.kv();
        const float* key = plan.floats(k, t);
        if (table) {
            float* rotated = (float*)plan.scratch(thread);
            plan.kernels().rope(key, table->args(t, kv.kv_heads, kv.head_dim), rotated);
            key = rotated;
            if (rotate_q)
                plan.kernels().rope(plan.floats(q, t), table->args(t, q.width / kv.head_dim, kv.head_dim), plan.floats(q_out, t));
        }
        const int page = run.batch.write[t] / kPage, slot = run.batch.write[t] % kPage;
        plan.kernels().store_kv(key, plan.floats(v, t), kv.kv_heads, kv.head_dim, plan.keys(layer, page),
                                plan.values(layer, page), slot);
    }
};

struct Attend : Step {
    Slot q, out, quant;
    bool quantized = false;
    int layer = 0, group = 1;
    float scale = 1;
    struct Tile {
        int sequence, row, rows;
    };
    std::vector<Tile> tiles;

    void prepare(const Run& run) override {
        tiles.clear();
        const int most = group >= kTile ? 1 : kTile / group;
        for (int s = 0; s < run.batch.sequences; s++)
            for (int t = run.batch.q_start[s]; t < run.batch.q_start[s + 1]; t += most) {
                int rows = run.batch.q_start[s + 1] - t;
                tiles.push_back({s, t, rows < most ? rows : most});
            }
    }
    int items(const Run& run) const override { return (int)tiles.size() * run.plan.kv().kv_heads; }
    void work(const Run& run, int item, int) const override {
        const Plan& plan = run.plan;
        const KvShape& kv = plan.kv();
        const int last = (int)tiles.size() - 1;
        const Tile& tile = tiles[(size_t)(last - item / kv.kv_heads)];  // the longest pasts come last: take them first
        const int head = item % kv.kv_heads, D = kv.head_dim;
        AttendArgs a;
        a.keys = plan.keys(layer, 0) + (size_t)(head * D * kPage);
        a.values = plan.values(layer, 0) + (size_t)(head * D * kPage);
        a.page_stride = plan.page_numbers();
        a.pages = run.batch.pages + (int64_t)tile.sequence * run.batch.table;
        a.head_dim = D;
        a.scale = scale;
        a.count = 0;
        for (int r = tile.row; r < tile.row + tile.rows; r++)
            for (int h = head * group; h < (head + 1) * group; h++) {
                a.query[a.count] = plan.floats(q, r) + h * D;
                a.out[a.count] = plan.floats(out, r) + h * D;
                a.seen[a.count] = run.batch.pos[r] + 1;
                if (++a.count == kMaxAttend) plan.kernels().attend(a), a.count = 0;
            }
        if (a.count) plan.kernels().attend(a);
        if (quantized)
            for (int r = tile.row; r < tile.row + tile.rows; r++)
                plan.quantize_row(quant, r, plan.floats(out, r) + head * group * D, head * group * D / 32, group * D / 32);
    }
};

}  // namespace

void Plan::store(int k, int v, int table, int q, int q_out, int layer) {
    auto step = std::make_unique<Store>();
    step->k = floats_slot(k, "attention's keys");
    step->v = floats_slot(v, "attention's values");
    const int width = kv_.kv_heads * kv_.head_dim;
    if (layer < 0 || layer >= kv_.layers) refuse("attention: the pool has no layer " + std::to_string(layer));
    if (step->k.width != width || step->v.width != width || !step->k.per_token || !step->v.per_token)
        refuse("attention: keys and values must have kv_heads * head_dim columns");
    step->layer = layer;
    if (table >= 0) {
        if (table >= (int)tables_.size()) refuse("attention: no such rope table");
        step->table = tables_[(size_t)table];
        if (step->table->dim() > kv_.head_dim) refuse("attention: rope is wider than a head");
        need_scratch(step->k.stride);
        if ((step->rotate_q = q >= 0)) {
            step->q = floats_slot(q, "attention's queries");
            step->q_out = floats_slot(q_out, "attention's queries");
            if (step->q.width % kv_.head_dim || step->q.width != step->q_out.width || !step->q.per_token || !step->q_out.per_token)
                refuse("attention: shapes differ");
        }
    }
    steps_.push_back(std::move(step));
}

void Plan::attend(int q, int layer, int heads, float scale, int out, int quant_out) {
    auto step = std::make_unique<Attend>();
    step->q = floats_slot(q, "attention's queries");
    step->out = floats_slot(out, "attention's output");
    if (layer < 0 || layer >= kv_.layers) refuse("attention: the pool has no layer " + std::to_string(layer));
    if (heads < 1 || heads % kv_.kv_heads || step->q.width != heads * kv_.head_dim || step->out.width != step->q.width ||
        !step->q.per_token || !step->out.per_token)
        refuse("attention: shapes differ");
    if ((step->quantized = quant_out >= 0)) {
        step->quant = quant_slot(quant_out, "attention's int8 output");
        if (step->quant.width != step->q.width || !step->quant.per_token || heads / kv_.kv_heads * kv_.head_dim % 32)
            refuse("attention: shapes differ");
    }
    step->layer = layer;
    step->group = heads / kv_.kv_heads;
    step->scale = scale;
    steps_.push_back(std::move(step));
}

}  // namespace quire
