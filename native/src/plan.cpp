// See plan.h.
#include "plan.h"

#include <string.h>

#include <algorithm>
#include <chrono>

#include <stdexcept>

namespace quire {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("plan: " + what); }

}  // namespace

Plan::Plan(std::shared_ptr<ThreadPool> pool, const Kernels* kernels, KvShape kv, int max_tokens, int max_rows,
           size_t arena_bytes)
    : pool_(std::move(pool)), kernels_(kernels), arena_memory_(arena_bytes) {
    if (max_tokens < 1 || max_rows < 0) refuse("a step must hold at least one token");
    limits_.max_tokens = max_tokens, limits_.max_rows = max_rows;
    arena_ = arena_memory_.data();
    this->pool(kv);
}

int Plan::pool(KvShape kv) {
    if (kv.layers < 0 || kv.pages < 0 || kv.pages > (1 << 26)) refuse("the KV pool has no sensible size");
    const int most = kv.latent ? kMaxLatentDim : kMaxHeadDim;
    if (kv.state && (kv.kv_heads || kv.head_dim || kv.latent || kv.state > (1u << 30))) 
        refuse("a pool of states keeps no keys, and no sensible state is that large");
    if (kv.layers && !kv.state && (kv.head_dim < 8 || kv.head_dim > most || kv.head_dim % 8 || kv.kv_heads < 1))
        refuse("head_dim must be a multiple of 8 up to " + std::to_string(most) + ", not " + std::to_string(kv.head_dim));
    if (kv.latent < 0 || kv.latent > kv.head_dim || (kv.latent && (kv.kv_heads != 1 || kv.type != KvType::Half)))
        refuse("a latent pool keeps one key per token, in halves, with the value inside it");
    pools_.push_back({kv, Mapping((size_t)kv.pages * kv.page_bytes())});
    pools_.back().cells = pools_.back().memory.data();
    limits_.pools.push_back({kv.pages, 0, false});
    return (int)pools_.size() - 1;
}

Plan::~Plan() = default;

int Plan::slot(size_t offset, int width, int quant, bool per_token) {
    if (width < 1 || width > (1 << 24) || quant < 0 || quant > 2 || (quant && width % 32)) refuse("a tensor of width " + std::to_string(width));
    Slot s;
    s.offset = offset;
    s.width = width;
    s.quant = quant;
    s.per_token = per_token;
    s.stride = Slot::stride_of(width, quant);
    if (quant) s.shape = QuantShape(width, quant == 2);
    const size_t bytes = Slot::bytes_of(width, quant, per_token ? limits_.max_tokens : limits_.max_rows);
    if (offset % 64 || offset > arena_memory_.size() || bytes > arena_memory_.size() - offset)
        refuse("a tensor lies outside the arena");
    slots_.push_back(s);
    return (int)slots_.size() - 1;
}

const Slot& Plan::floats_slot(int i, const char* what) const {
    if (i < 0 || i >= (int)slots_.size() || slots_[(size_t)i].quant) refuse(std::string(what) + " is not a float tensor");
    return slots_[(size_t)i];
}
const Slot& Plan::quant_slot(int i, const char* what) const {
    if (i < 0 || i >= (int)slots_.size() || !slots_[(size_t)i].quant) refuse(std::string(what) + " is not an int8 tensor");
    return slots_[(size_t)i];
}

void Plan::need_scratch(size_t bytes) {
    bytes = (bytes + 4095) & ~(size_t)4095;
    if (bytes > scratch_bytes_) scratch_bytes_ = bytes;
}

void Plan::output(int slot) {
    floats_slot(slot, "the output");
    output_ = slot;
    if (scratch_bytes_) scratch_memory_ = Mapping(scratch_bytes_ * (size_t)pool_->threads());
    scratch_ = scratch_memory_.data();
    items_.resize(steps_.size());
    if (!steps_.empty() && !output_slot().per_token) {
        Mapping memory((size_t)limits_.max_rows * peaks_stride() * sizeof(int32_t));
        auto* to = (int32_t*)memory.data();
        if (steps_.back()->leaves_peaks(slot, to, peaks_stride())) peaks_ = to, peaks_memory_ = std::move(memory);
    }
    const Step* next = nullptr;
    for (int round = 0; round < 2; round++)  // the last one is followed by the first
        for (size_t i = steps_.size(); i-- > 0;) {
            steps_[i]->next = next;
            if (steps_[i]->streams()) next = steps_[i].get();
        }
}

void Plan::input(int slot) {
    floats_slot(slot, "an input");
    inputs_.push_back(slot);
}

// The arrays belong to the caller, who may change them while we run: what was checked must be what is used.
BatchView Plan::own(const BatchView& given) {
    const size_t tokens = (size_t)given.tokens, sequences = (size_t)given.sequences;
    const size_t tables = sequences * (size_t)given.table, groups = 1 + given.more.size();
    staging_.resize(2 * tokens + 2 * sequences + 1 + groups * (tables + tokens) + (size_t)given.rows + (given.adapters ? tokens : 0) +
                    (given.given ? tokens : 0) + (given.coords ? (size_t)given.axes * tokens : 0));
    BatchView mine = given;
    int32_t* to = staging_.data();
    auto copy = [&](const int32_t*& from, size_t n) {
        if (n) memcpy(to, from, n * sizeof(int32_t));
        from = to;
        to += n;
    };
    copy(mine.ids, tokens), copy(mine.pos, tokens), copy(mine.write, tokens), copy(mine.q_start, sequences + 1);
    copy(mine.kv_len, sequences), copy(mine.pages, tables), copy(mine.logit_rows, (size_t)given.rows);
    for (TableView& t : mine.more) copy(t.pages, tables), copy(t.write, tokens);
    if (mine.adapters) copy(mine.adapters, tokens);
    if (mine.given) copy(mine.given, tokens);
    if (mine.coords) copy(mine.coords, (size_t)given.axes * tokens);
    return mine;
}

void Plan::run(const BatchView& given, const std::vector<const float*>& inputs) {
    if (output_ < 0 || inputs.size() != inputs_.size()) refuse("inputs are missing");
    std::lock_guard<std::mutex> lock(running_);
    const BatchView batch = own(given);
    check(batch, limits_);
    ran_tokens_ = batch.tokens, ran_rows_ = batch.rows;
    for (size_t g = 0; g < pools_.size(); g++) {
        const int32_t* write = batch.at((int)g).write;
        for (int t = 0; t < batch.tokens && limits_.pools[g].reach && !pools_[g].shape.state; t++)
            pools_[g].written = std::max(pools_[g].written, (size_t)(write[t] / kPage + 1) * pools_[g].shape.page_bytes());
    }
    for (size_t i = 0; i < inputs.size(); i++) {
        const Slot& s = slots_[(size_t)inputs_[i]];
        for (int r = 0; r < batch.tokens; r++)
            memcpy(floats(s, r), inputs[i] + (size_t)r * (size_t)s.width, (size_t)s.width * sizeof(float));
    }
    stretches(batch);
    Run now{*this, batch, pool_->threads(), by_token_, by_row_};
    for (size_t i = 0; i < steps_.size(); i++) {
        steps_[i]->prepare(now);
        items_[i] = steps_[i]->items(now);
    }
    if (!spent_) {
        pool_->run((int)steps_.size(), items_.data(), [&](int step, int item, int thread) { steps_[(size_t)step]->work(now, item, thread); });
        return;
    }
    pool_->run((int)steps_.size(), items_.data(), [&](int step, int item, int thread) {
        const auto start = std::chrono::steady_clock::now();
        steps_[(size_t)step]->work(now, item, thread);
        spent_[(size_t)step] += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
    });
}

bool Plan::touch(size_t piece, size_t ahead) {
    std::lock_guard<std::mutex> lock(running_);
    for (KvPool& p : pools_) {
        const size_t from = std::max(p.touched, p.written), to = std::min({p.memory.size(), p.written + ahead, from + piece});
        if (p.shape.state || from >= to) continue;
        constexpr size_t kPiece = (size_t)2 << 20, kSystemPage = 4096;
        pool_->for_each((int)((to - from + kPiece - 1) / kPiece), [&](int i) {
            const size_t begin = from + (size_t)i * kPiece, end = std::min(to, begin + kPiece);
            for (size_t at = begin; at < end; at += kSystemPage) __atomic_fetch_or(p.memory.data() + at, (uint8_t)0, __ATOMIC_RELAXED);
        });
        p.touched = to;
        return true;
    }
    return false;
}

void Plan::profile(bool on) {
    std::lock_guard<std::mutex> lock(running_);
    spent_.reset(on ? new std::atomic<int64_t>[steps_.size()]() : nullptr);
}

std::vector<std::pair<std::string, double>> Plan::profiled() const {
    std::vector<std::pair<std::string, double>> found;
    for (size_t i = 0; spent_ && i < steps_.size(); i++) {
        auto at = std::find_if(found.begin(), found.end(), [&](const auto& f) { return f.first == steps_[i]->name(); });
        if (at == found.end()) at = found.insert(found.end(), {steps_[i]->name(), 0.0});
        at->second += 1e-9 * (double)spent_[i].load();
    }
    return found;
}

std::string Plan::describe() const {
    return std::to_string(steps_.size()) + " steps, arena " + std::to_string(arena_memory_.size()) + " bytes, peaks " +
           std::to_string(peaks_memory_.size()) + " bytes";
}

}  // namespace quire
