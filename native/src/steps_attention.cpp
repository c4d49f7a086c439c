// Attention in two steps: store this step's keys and values (rotating on the way), then let every query look at its past,
// in the items that the schedule made. Over a latent pool it is the same: there a KV head is a share of the heads, all of
// them with one key.
#include <algorithm>
#include <stdexcept>

#include "plan.h"
#include "rope_table.h"
#include "schedule.h"

namespace quire {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("plan: " + what); }

struct Store : Step {
    const char* name() const override { return "store"; }
    Slot k, v, q, q_out;
    const RopeTable* table = nullptr;
    bool rotate_q = false;
    int layer = 0, group = 0;
    std::shared_ptr<Schedule> schedule;  // of the attention that follows at once, if it does, which may do this step's work head by head
    bool divides = false;

    void prepare(const Run& run) override {
        if (divides) schedule->divide(run.batch, run.threads);
    }

    // Neighbours write to the same lines of a page: where there are many, one thread takes a page of them.
    static int together(const Run& run) { return run.batch.tokens >= kPage * run.threads ? kPage : 1; }

    int items(const Run& run) const override {
        if (schedule && schedule->alone()) return 0;
        return (run.batch.tokens + together(run) - 1) / together(run);
    }
    void work(const Run& run, int item, int thread) const override {
        const int n = together(run), end = (item + 1) * n < run.batch.tokens ? (item + 1) * n : run.batch.tokens;
        for (int t = item * n; t < end; t++) heads(run, t, 0, run.plan.kv(group).kv_heads, thread);
    }
    // KV heads [from, to) of a token, and the queries that look at them.
    void heads(const Run& run, int t, int from, int to, int thread) const {
        const Plan& plan = run.plan;
        const KvShape& kv = plan.kv(group);
        const int n = to - from, D = kv.head_dim, at = from * D;
        const float* key = plan.floats(k, t) + at;
        if (table) {
            float* rotated = (float*)plan.scratch(thread);
            plan.kernels().rope(key, table->args(t, n, D), rotated);
            key = rotated;
            const int each = q.width / D / kv.kv_heads;  // queries of a KV head
            if (rotate_q) plan.kernels().rope(plan.floats(q, t) + each * at, table->args(t, each * n, D), plan.floats(q_out, t) + each * at);
        }
        const int place = run.batch.at(group).write[t];
        uint8_t* cells = plan.cells(group, layer, place / kPage) + (size_t)from * kv.cell().bytes();
        if (!plan.kernels().store_kv(key, plan.floats(v, t) + at, n, kv.cell(), cells, place % kPage)) run.plan.endless(group);
    }
};

struct StoreLatent : Step {
    const char* name() const override { return "store"; }
    Slot k;
    int layer = 0, group = 0;

    int items(const Run& run) const override { return (run.batch.tokens + kPage - 1) / kPage; }
    void work(const Run& run, int item, int) const override {
        const int end = std::min(run.batch.tokens, (item + 1) * kPage);
        for (int t = item * kPage; t < end; t++) {
            const int place = run.batch.at(group).write[t];
            uint8_t* cells = run.plan.cells(group, layer, place / kPage);
            run.plan.kernels().store_latent(run.plan.floats(k, t), run.plan.kv(group).cell(), cells, place % kPage);
        }
    }
};

struct Attend : Step {
    const char* name() const override { return "attend"; }
    Slot q, out, quant;
    bool quantized = false, divides = false;
    int layer = 0, pool = 0;
    int width = 0;  // columns of a head's values
    float scale = 1, cap = 0;
    std::vector<float> sinks;  // [heads] of parts without values
    std::shared_ptr<Schedule> all, wanted;  // wanted: where nobody reads the other rows' results
    const Schedule* schedule = nullptr;     // of this run
    const Store* store = nullptr;  // that comes right before

    static size_t own_scratch(const KvShape& kv) { return kv.latent ? latent_scratch() : attend_scratch(); }
    static size_t scratch(const KvShape& kv, int width) {
        return own_scratch(kv) + 2 * (size_t)most(kv) * PartShape(width).floats * sizeof(float);
    }
    static int most(const KvShape& kv) { return kv.latent ? kMaxLatent : kMaxAttend; }  // queries of a call

    void prepare(const Run& run) override {
        if (divides) all->divide(run.batch, run.threads);
        schedule = all.get();
        if (!wanted || run.batch.rows >= run.batch.tokens || all->alone()) return;
        wanted->divide(run.batch, run.threads, true);
        schedule = wanted.get();
    }
    int items(const Run&) const override { return schedule->items(); }

    void work(const Run& run, int i, int thread) const override {
        const Schedule::Item& item = schedule->item(i);
        const int head = schedule->head(i), then = i + 1;  // what this thread will most likely do next
        if (item.whole) return whole(run, item, head, then, thread);
        AttendArgs a = view(run, head, thread);
        a.count = 0;
        for (int c = item.chunk; c < item.chunk + item.chunks; c++) piece(run, a, item, head, c, then);
        for (int m = 0; m < item.members; m++) {
            const Schedule::Tile& tile = schedule->tile(item, m);
            if (!schedule->last(tile, head)) continue;
            for (int j = 0; j < tile.rows * schedule->group(); j++) {
                const int begin = first(run, tile, j) / kChunk;
                float* sum = schedule->part(tile, head, begin, j);
                for (int c = begin + 1; c <= position(run, tile, j) / kChunk; c++)
                    run.plan.kernels().merge(schedule->part(tile, head, c, j), width, sum);
                finish(run, tile, head, j, sum);
            }
            round(run, tile, head);
        }
    }

    // All chunks of a tile, merged as they come.
    void whole(const Run& run, const Schedule::Item& item, int head, int then, int thread) const {
        const Plan& plan = run.plan;
        const Schedule::Tile& tile = schedule->tile(item, 0);
        const int queries = tile.rows * schedule->group();
        const size_t stride = PartShape(width).floats;
        if (store && schedule->alone()) store->heads(run, tile.row, head, head + 1, thread);
        float* sums = (float*)(plan.scratch(thread) + own_scratch(plan.kv(pool)));
        const int together = most(plan.kv(pool));
        float* parts = sums + (size_t)together * stride;
        AttendArgs a = view(run, head, thread);
        for (int start = 0; start < queries; start += together) {
            const int end = std::min(start + together, queries);
            for (int c = tile.begin, before = 0; c < tile.chunks; c++, before = a.count) {
                look(run, a, tile, head, c, tile.chunks, then);
                for (int j = start; j < end; j++) {
                    float* sum = sums + (size_t)(j - start) * stride;
                    if (first(run, tile, j) / kChunk == c) put(run, a, tile, head, j, c, sum);
                    else put(run, a, tile, head, j, c, parts + (size_t)(j - start) * stride, sum);
                }
                a.again = before == end - start && a.count == before;  // all of them, and all of them before
                if (a.count) attend(run, a);
            }
            for (int j = start; j < end; j++) finish(run, tile, head, j, sums + (size_t)(j - start) * stride);
        }
        round(run, tile, head);
    }

    // One chunk for every tile of the item; the parts stay where the last one to come finds them.
    void piece(const Run& run, AttendArgs& a, const Schedule::Item& item, int head, int chunk, int then) const {
        const int before = a.count, together = most(run.plan.kv(pool));
        int queries = 0;
        look(run, a, schedule->tile(item, 0), head, chunk, item.chunk + item.chunks, then);
        for (int m = 0; m < item.members; m++) {
            const Schedule::Tile& tile = schedule->tile(item, m);
            for (int j = 0; j < tile.rows * schedule->group(); j++, queries++) {
                if (a.count == together) attend(run, a), a.count = 0;
                put(run, a, tile, head, j, chunk, schedule->part(tile, head, chunk, j));
            }
        }
        a.again = before == queries && a.count == queries;  // all of them, and all of them before
        if (a.count) attend(run, a);
    }

    void attend(const Run& run, const AttendArgs& a) const {
        run.plan.kv(pool).latent ? run.plan.kernels().attend_latent(a) : run.plan.kernels().attend(a);
    }
    void finish(const Run& run, const Schedule::Tile& tile, int head, int j, float* sum) const {
        const int group = schedule->group();
        if (!sinks.empty())
            run.plan.kernels().merge(sinks.data() + (size_t)(head * group + j % group) * PartShape(width).floats, width, sum);
        run.plan.kernels().finish(sum, width, output(run, tile, head, j));
    }

    AttendArgs view(const Run& run, int head, int thread) const {
        const KvShape& kv = run.plan.kv(pool);
        AttendArgs a;
        a.cells = of_head(run, head);
        a.page_stride = kv.page_bytes();
        a.cell = kv.cell();
        a.scale = scale;
        a.cap = cap;
        a.finite = run.plan.finite(pool);
        a.scratch = run.plan.scratch(thread);
        return a;
    }

    // At a chunk of a tile's sequence, with no query yet. The chunks up to `end` follow, then item `then`, if there is one.
    void look(const Run& run, AttendArgs& a, const Schedule::Tile& tile, int head, int chunk, int end, int then) const {
        a.pages = table(run, tile, chunk);
        a.ahead = a.follow = 0;
        a.again = false;
        if (chunk + 1 < end) expect(run, a, tile, head, chunk + 1), follow(run, a, tile, chunk + 1);
        else if (then < schedule->items()) {
            const Schedule::Item& other = schedule->item(then);
            expect(run, a, schedule->tile(other, 0), schedule->head(then), other.chunk);
        }
        a.count = 0;
        a.windowed = false;
    }
    const int32_t* table(const Run& run, const Schedule::Tile& tile, int chunk) const {
        return run.batch.at(pool).pages + (int64_t)tile.sequence * run.batch.table + chunk * (kChunk / kPage);
    }
    void expect(const Run& run, AttendArgs& a, const Schedule::Tile& tile, int head, int chunk) const {
        const int known = (run.batch.kv_len[tile.sequence] + kPage - 1) / kPage - chunk * (kChunk / kPage);
        const int32_t* pages = table(run, tile, chunk);
        const uint8_t* cells = of_head(run, head);
        for (; a.ahead < kComing && a.ahead < known; a.ahead++) a.coming[a.ahead] = cells + (size_t)pages[a.ahead] * a.page_stride;
    }
    void follow(const Run& run, AttendArgs& a, const Schedule::Tile& tile, int chunk) const {
        a.following = table(run, tile, chunk);
        a.follow = std::min((run.batch.kv_len[tile.sequence] + kPage - 1) / kPage - chunk * (kChunk / kPage), kChunk / kPage);
    }
    const uint8_t* of_head(const Run& run, int head) const {
        const KvShape& kv = run.plan.kv(pool);
        return run.plan.cells(pool, layer, 0) + (kv.latent ? 0 : (size_t)head * kv.cell().bytes());
    }

    // Adds a query, if it sees something of the chunk.
    void put(const Run& run, AttendArgs& a, const Schedule::Tile& tile, int head, int j, int chunk, float* part, float* sum = nullptr) const {
        const int from = first(run, tile, j) - chunk * kChunk, seen = position(run, tile, j) + 1 - chunk * kChunk;
        if (seen <= 0 || from >= kChunk) return;
        a.windowed |= from > 0;
        a.from[a.count] = from > 0 ? from : 0;
        const int D = run.plan.kv(pool).head_dim;
        a.query[a.count] = run.plan.floats(q, tile.row + j / schedule->group()) + (head * schedule->group() + j % schedule->group()) * D;
        a.part[a.count] = part, a.sum[a.count] = sum;
        a.seen[a.count++] = seen < kChunk ? seen : kChunk;
    }

    int position(const Run& run, const Schedule::Tile& tile, int j) const { return run.batch.pos[tile.row + j / schedule->group()]; }
    int first(const Run& run, const Schedule::Tile& tile, int j) const { return schedule->first(position(run, tile, j)); }
    float* output(const Run& run, const Schedule::Tile& tile, int head, int j) const {
        const int group = schedule->group();
        return run.plan.floats(out, tile.row + j / group) + (head * group + j % group) * width;
    }
    void round(const Run& run, const Schedule::Tile& tile, int head) const {
        if (!quantized) return;
        const int columns = schedule->group() * width;
        for (int r = tile.row; r < tile.row + tile.rows; r++)
            run.plan.quantize_row(quant, r, run.plan.floats(out, r) + head * columns, head * columns / 32, columns / 32);
    }
};

// About how many queries go together: as whole numbers, so many that what is laid out for a chunk is of use to all.
int queries_of(const KvShape& kv) { return kv.cell().type == KvType::Fixed && !kv.latent ? kMaxAttend : kAttendTile; }

// How many shares the heads of latent attention are dealt out in. Heads of a share load a key together; shares give the
// threads something to do where there is one sequence. Invisible in a result.
int latent_shares(int heads, int threads) {
    for (int shares = 1;; shares++)
        if (heads % shares == 0 && heads / shares <= 16 && (shares >= threads || heads / shares <= 4)) return shares;
}

}  // namespace

const KvShape& Plan::layer_of(int group, int layer, bool latent) {
    if (group < 0 || group >= (int)pools_.size()) refuse("attention: there is no group " + std::to_string(group));
    const KvShape& kv = pools_[(size_t)group].shape;
    if (layer < 0 || layer >= kv.layers || !kv.latent == latent || kv.state)
        refuse((latent ? "latent attention" : "attention") + std::string(": the pool has no layer ") + std::to_string(layer));
    int& reach = limits_.pools[(size_t)group].reach;
    reach = std::max(reach, 1);
    return kv;
}

void Plan::store(int k, int v, int table, int q, int q_out, int layer, int group) {
    const KvShape& kv = layer_of(group, layer, false);
    auto step = std::make_unique<Store>();
    step->k = floats_slot(k, "attention's keys");
    step->v = floats_slot(v, "attention's values");
    const int width = kv.kv_heads * kv.head_dim;
    if (step->k.width != width || step->v.width != width || !step->k.per_token || !step->v.per_token)
        refuse("attention: keys and values must have kv_heads * head_dim columns");
    step->layer = layer;
    step->group = group;
    if (table >= 0) {
        if (table >= (int)tables_.size()) refuse("attention: no such rope table");
        step->table = tables_[(size_t)table];
        if (step->table->dim() > kv.head_dim) refuse("attention: rope is wider than a head");
        need_scratch(step->k.stride);
        if ((step->rotate_q = q >= 0)) {
            step->q = floats_slot(q, "attention's queries");
            step->q_out = floats_slot(q_out, "attention's queries");
            if (step->q.width % kv.head_dim || step->q.width != step->q_out.width || !step->q.per_token || !step->q_out.per_token)
                refuse("attention: shapes differ");
        }
    }
    steps_.push_back(std::move(step));
}

std::shared_ptr<Schedule> Plan::schedule(int heads, int kv_heads, int width, int window, int group, bool& first) {
    int& reach = limits_.pools[(size_t)group].reach;
    reach = std::max(reach, window ? window : INT32_MAX);
    for (const auto& s : schedules_)
        if (s->heads() == heads && s->window() == window && s->pool() == group) return s;
    first = true;  // the first step of its kind comes first in a run, too: it divides for the others
    const int queries = queries_of(pools_[(size_t)group].shape);
    schedules_.push_back(std::make_shared<Schedule>(heads, kv_heads, width, window, group, queries));
    return schedules_.back();
}

void Plan::attend(int q, int layer, int heads, float scale, int out, int quant_out, const AttendOptions& options) {
    const KvShape& kv = layer_of(options.group, layer, false);
    auto step = std::make_unique<Attend>();
    step->q = floats_slot(q, "attention's queries");
    step->out = floats_slot(out, "attention's output");
    if (options.window < 0 || !(options.cap >= 0)) refuse("attention: a window and a cap must be positive");
    if (options.sinks && options.sinks->n != heads) refuse("attention: there must be a sink for each head");
    if (heads < 1 || heads % kv.kv_heads || step->q.width != heads * kv.head_dim || step->out.width != step->q.width ||
        !step->q.per_token || !step->out.per_token)
        refuse("attention: shapes differ");
    if ((step->quantized = quant_out >= 0)) {
        step->quant = quant_slot(quant_out, "attention's int8 output");
        if (step->quant.width != step->q.width || !step->quant.per_token || heads / kv.kv_heads * kv.head_dim % 32)
            refuse("attention: shapes differ");
    }
    step->layer = layer;
    step->pool = options.group;
    step->width = kv.head_dim;
    step->scale = scale;
    step->cap = options.cap;
    if (options.sinks) {  // a part that has a total of 1 and values of 0, merged after the last chunk
        const PartShape part(step->width);
        step->sinks.assign((size_t)heads * part.floats, 0);
        for (int h = 0; h < heads; h++) {
            step->sinks[(size_t)h * part.floats + part.high] = options.sinks->data()[h] * 1.44269504f;
            step->sinks[(size_t)h * part.floats + part.total] = kv.cell().unit();
        }
    }
    step->all = schedule(heads, kv.kv_heads, step->width, options.window, options.group, step->divides);
    if (options.wanted) step->wanted = std::make_shared<Schedule>(heads, kv.kv_heads, step->width, options.window, options.group, queries_of(kv));
    if (options.stores) {
        auto* before = steps_.empty() ? nullptr : dynamic_cast<Store*>(steps_.back().get());
        if (!before || before->layer != layer || before->group != options.group || (before->rotate_q && before->q_out.offset != step->q.offset))
            refuse("attention: what comes before it does not store for it");
        step->store = before;
        before->schedule = step->all;
        std::swap(before->divides, step->divides);  // who comes first
    }
    need_scratch(Attend::scratch(kv, step->width));
    steps_.push_back(std::move(step));
}

void Plan::store_latent(int k, int layer, int group) {
    const KvShape& kv = layer_of(group, layer, true);
    auto step = std::make_unique<StoreLatent>();
    step->k = floats_slot(k, "latent attention's keys");
    if (step->k.width != kv.head_dim || !step->k.per_token) refuse("latent attention: a key must have head_dim columns");
    step->layer = layer;
    step->group = group;
    steps_.push_back(std::move(step));
}

void Plan::attend_latent(int q, int layer, int heads, float scale, int out, int group, bool wanted) {
    const KvShape& kv = layer_of(group, layer, true);
    auto step = std::make_unique<Attend>();
    step->q = floats_slot(q, "latent attention's queries");
    step->out = floats_slot(out, "latent attention's output");
    if (heads < 1 || step->q.width != heads * kv.head_dim || step->out.width != heads * kv.latent || !step->q.per_token ||
        !step->out.per_token)
        refuse("latent attention: shapes differ");
    step->layer = layer;
    step->pool = group;
    step->width = kv.latent;
    step->scale = scale;
    const int shares = latent_shares(heads, pool_->threads());
    step->all = schedule(heads, shares, step->width, 0, group, step->divides);
    if (wanted) step->wanted = std::make_shared<Schedule>(heads, shares, step->width, 0, group);
    need_scratch(Attend::scratch(kv, step->width));
    steps_.push_back(std::move(step));
}

}  // namespace quire
