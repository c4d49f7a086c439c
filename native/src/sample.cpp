// See sample.h.
#include "sample.h"

#include <algorithm>
#include <atomic>
#include <new>

#include "sample_row.h"

namespace quire {

uint64_t draw53(uint64_t seed, uint64_t position) {
    uint64_t c0 = position, c1 = 0, c2 = 0, c3 = 0, k0 = seed, k1 = 0;
    for (int round = 0; round < 10; round++) {
        const Wide p0 = (Wide)c0 * 0xD2E7470EE14C6C93u, p1 = (Wide)c2 * 0xCA5A826395121157u;
        const uint64_t n0 = (uint64_t)(p1 >> 64) ^ c1 ^ k0, n2 = (uint64_t)(p0 >> 64) ^ c3 ^ k1;
        c0 = n0, c1 = (uint64_t)p1, c2 = n2, c3 = (uint64_t)p0;
        k0 += 0x9E3779B97F4A7C15u, k1 += 0xBB67AE8584CAA73Bu;
    }
    return c0 >> 11;
}

Sampler::Sampler(std::shared_ptr<ThreadPool> pool, const Kernels* kernels, int vocabulary)
    : pool_(std::move(pool)), kernels_(kernels), vocabulary_(vocabulary) {
    for (int i = 0; i < pool_->threads(); i++) rows_.push_back(std::make_unique<Row>(kernels, vocabulary));
}

Sampler::~Sampler() = default;

void Sampler::answer(Row& row, const Ask& ask, Answer& out) const {
    std::vector<int64_t> ids;
    std::vector<double> counts;
    Seen seen = ask.seen;
    const bool grows = ask.params->penalizes() && !ask.drafts.empty();
    if (grows) {  // tokens of this call count for those after them
        ids.assign(seen.ids, seen.ids + seen.size);
        counts.assign(seen.counts, seen.counts + seen.size);
    }
    for (size_t j = 0; j <= ask.drafts.size(); j++) {
        const float* logits = ask.logits + j * ask.stride;
        const uint8_t* allowed = ask.allowed ? ask.allowed + j * ask.allowed_stride : nullptr;
        if (!ids.empty()) seen = {ids.data(), counts.data(), (int64_t)ids.size()};
        const int32_t token = row.open(logits, j ? nullptr : ask.peaks) ? row.choose(*ask.params, ask.position + (int64_t)j, seen, allowed) : kBroken;
        out.tokens.push_back(token);
        if (token < 0) return;
        if (ask.params->logprobs >= 0) out.told.push_back(row.tell(logits, token, ask.params->logprobs));
        if (j == ask.drafts.size() || ask.drafts[j] != token) return;
        if (grows) {
            const size_t at = (size_t)(std::find(ids.begin(), ids.end(), (int64_t)token) - ids.begin());
            if (at == ids.size()) ids.push_back(token), counts.push_back(0.0);
            counts[at] += 1.0;
        }
    }
}

// One row has all threads to itself; of several, each has one. Work may not throw among the pool's threads: what it could
// throw is told afterwards.
template <class Work> void Sampler::for_each(int items, const Work& work) {
    std::lock_guard<std::mutex> turn(turn_);
    rows_[0]->share(items == 1 && pool_->threads() > 1 ? pool_.get() : nullptr);
    if (items == 1) return work(*rows_[0], 0);
    std::atomic<bool> failed{false};
    pool_->run(1, &items, [&](int, int item, int thread) {
        try {
            work(*rows_[(size_t)thread], item);
        } catch (...) {
            failed = true;
        }
    });
    if (failed) throw std::bad_alloc();
}

void Sampler::choose(const std::vector<Ask>& asks, std::vector<Answer>& answers) {
    answers.resize(asks.size());
    for_each((int)asks.size(), [&](Row& row, int i) { answer(row, asks[(size_t)i], answers[(size_t)i]); });
}

bool Sampler::logprobs(const float* logits, size_t stride, const int32_t* tokens, int rows, int top, std::vector<Told>& told) {
    told.resize((size_t)rows);
    std::vector<uint8_t> fine((size_t)rows);
    for_each(rows, [&](Row& row, int i) {
        const float* own = logits + (size_t)i * stride;
        if ((fine[(size_t)i] = row.open(own))) told[(size_t)i] = row.tell(own, tokens[i], top);
    });
    return std::find(fine.begin(), fine.end(), 0) == fine.end();
}

}  // namespace quire
