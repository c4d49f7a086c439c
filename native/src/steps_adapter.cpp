// Adapter steps: a x of every site that reads one tensor, and y + b (a x) where no product makes y. See adapter.h.
#include <string.h>

#include <algorithm>
#include <stdexcept>

#include "plan.h"

namespace quire {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("plan: " + what); }

constexpr int kRows = 32;  // rows of x in an item

struct Shrink : Step {
    const char* name() const override { return "shrink"; }
    struct Out {
        const Site* site;
        Slot to;
    };
    struct Item {
        const Pair* pair;
        const Slot* to;
        int row, rows;
    };
    Slot in;
    std::vector<Out> outs;
    std::vector<Item> list;  // of this run

    void prepare(const Run& run) override {
        list.clear();
        for (const Stretch& s : run.adapted(in))
            for (const Out& o : outs)
                if (const Pair& p = o.site->pairs[(size_t)s.slot]; p.a)
                    for (int r = 0; r < s.rows; r += kRows) list.push_back({&p, &o.to, s.row + r, std::min(kRows, s.rows - r)});
    }
    int items(const Run&) const override { return (int)list.size(); }
    void work(const Run& run, int item, int) const override {
        const Item& i = list[(size_t)item];
        const Matrix& a = *i.pair->a;
        const Kernels& k = run.plan.kernels();
        Epilogue e;
        e.out = run.plan.floats(*i.to, i.row);
        e.out_stride = i.to->stride / sizeof(float);
        k.linear_dense(a, 0, a.blocks, run.plan.floats(in, i.row), in.stride / sizeof(float), i.rows, e);
        for (int r = 0; i.pair->scale != 1.0f && r < i.rows; r++) k[Elementwise::scale](run.plan.floats(*i.to, i.row + r), nullptr, i.pair->scale, a.n, run.plan.floats(*i.to, i.row + r));
    }
};

struct Adapt : Step {
    const char* name() const override { return "adapt"; }
    Slot y, shrunk, out;
    int site = 0;
    int items(const Run& run) const override { return (run.rows(out) + kRows - 1) / kRows; }
    void work(const Run& run, int item, int) const override {
        const int m0 = item * kRows, m = std::min(kRows, run.rows(out) - m0);
        for (int r = m0; r < m0 + m; r++) memcpy(run.plan.floats(out, r), run.plan.floats(y, r), (size_t)out.width * sizeof(float));
        run.plan.expand(run, site, shrunk, 0, (out.width + 15) / 16, m0, m, run.plan.floats(out, m0), out.stride / sizeof(float));
    }
};

void gather(const int32_t* slots, const int32_t* rows, int count, std::vector<Stretch>& out) {
    out.clear();
    for (int i = 0; i < count; i++) {
        const int slot = slots[rows ? rows[i] : i];
        if (slot < 0) continue;
        if (!out.empty() && out.back().slot == slot && out.back().row + out.back().rows == i) out.back().rows++;
        else out.push_back({i, 1, slot});
    }
}

}  // namespace

void Plan::stretches(const BatchView& batch) {
    by_token_.clear();
    by_row_.clear();
    if (!batch.adapters) return;
    gather(batch.adapters, nullptr, batch.tokens, by_token_);
    gather(batch.adapters, batch.logit_rows, batch.rows, by_row_);
}

void Plan::expand(const Run& run, int site, const Slot& shrunk, int b0, int b1, int m0, int m, float* out, size_t stride) const {
    for (const Stretch& s : run.adapted(shrunk)) {
        const int from = std::max(s.row, m0), to = std::min(s.row + s.rows, m0 + m);
        const Pair& p = sites_[(size_t)site]->pairs[(size_t)s.slot];
        if (from >= to || !p.b) continue;
        Epilogue e;
        e.out = out + (size_t)(from - m0) * stride;
        e.out_stride = stride;
        e.residual = e.out;
        e.residual_stride = stride;
        kernels_->linear_dense(*p.b, b0, b1, floats(shrunk, from), shrunk.stride / sizeof(float), to - from, e);
    }
}

int Plan::site(int n, int k, int rank, int slots) {
    if (n < 1 || k < 1 || rank < 1 || rank > 4096 || slots < 1 || slots > 65536) refuse("site: no sensible size");
    if (limits_.adapters && limits_.adapters != slots) refuse("site: every site has as many slots");
    limits_.adapters = slots;
    auto made = std::make_unique<Site>();
    made->n = n, made->k = k, made->rank = rank;
    made->pairs.resize((size_t)slots);
    sites_.push_back(std::move(made));
    return (int)sites_.size() - 1;
}

void Plan::check_site(int site, int shrunk, int n, bool per_token) const {
    if (site < 0 || site >= (int)sites_.size()) refuse("adapt: no such site");
    const Slot& s = floats_slot(shrunk, "what shrink made");
    if (sites_[(size_t)site]->n != n || s.width != sites_[(size_t)site]->rank || s.per_token != per_token) refuse("adapt: shapes differ");
}

void Plan::shrink(int x, const std::vector<std::pair<int, int>>& outs) {
    auto step = std::make_unique<Shrink>();
    step->in = floats_slot(x, "shrink's input");
    for (const auto& [site, out] : outs) {
        if (site < 0 || site >= (int)sites_.size() || sites_[(size_t)site]->k != step->in.width) refuse("shrink: no such site of that width");
        check_site(site, out, sites_[(size_t)site]->n, step->in.per_token);
        step->outs.push_back({sites_[(size_t)site].get(), at(out)});
    }
    steps_.push_back(std::move(step));
}

void Plan::adapt(int y, int shrunk, int site, int out) {
    auto step = std::make_unique<Adapt>();
    step->y = floats_slot(y, "adapt's input");
    step->out = floats_slot(out, "adapt's output");
    if (step->y.width != step->out.width || step->y.per_token != step->out.per_token) refuse("adapt: shapes differ");
    check_site(site, shrunk, step->out.width, step->out.per_token);
    step->shrunk = at(shrunk);
    step->site = site;
    steps_.push_back(std::move(step));
}

void Plan::place(int site, int slot, Pair pair) {
    if (site < 0 || site >= (int)sites_.size() || slot < 0 || slot >= limits_.adapters) refuse("place: no such site or slot");
    Site& s = *sites_[(size_t)site];
    if (pair.a) {
        if (!pair.b || pair.a->type == Type::Affine || pair.b->type == Type::Affine) refuse("place: two dense matrices are needed");
        if (pair.a->k != s.k || pair.b->n != s.n || pair.a->n != pair.b->k || pair.a->n > s.rank) refuse("place: shapes differ");
    }
    std::lock_guard<std::mutex> lock(running_);
    s.pairs[(size_t)slot] = std::move(pair);
}

}  // namespace quire
