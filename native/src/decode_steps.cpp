// See decode_steps.h.
#include "decode_steps.h"

#include <algorithm>

namespace quire {

bool DecodeSteps::batch(const int64_t* slots, size_t count, BatchView& b) {
    now_.clear();
    if (!count || count > (size_t)most_) return false;
    int table = 0, adapter = -1;
    for (size_t i = 0; i < count; i++) {
        const int64_t s = slots[i];
        if (s < 0 || s >= slots_.count || !slots_.live[s]) return false;
        if (slots_.adapter[s] < adapter) return false;  // rows of one adapter are to follow one another
        adapter = slots_.adapter[s];
        const int32_t token = slots_.last[s], at = slots_.length[s];
        if (token < 0 || token >= vocabulary_ || at < 0 || at >= max_context_) return false;
        if (at / kPage >= slots_.table) return false;
        table = std::max(table, at / kPage + 1);
    }
    const size_t groups = slots_.tables.size(), pages = count * (size_t)table;
    memory_.resize(6 * count + 1 + groups * (pages + count));
    int32_t* free = memory_.data();
    auto take = [&](size_t n) { return free += n, free - n; };
    int32_t *ids = take(count), *pos = take(count), *kv_len = take(count), *rows = take(count), *q_start = take(count + 1);
    int32_t* adapters = take(count);
    for (size_t i = 0; i < count; i++) {
        ids[i] = slots_.last[slots[i]], pos[i] = slots_.length[slots[i]], kv_len[i] = pos[i] + 1;
        rows[i] = q_start[i] = (int32_t)i, adapters[i] = slots_.adapter[slots[i]];
    }
    q_start[count] = (int32_t)count;
    std::vector<TableView> views;
    for (const int32_t* all : slots_.tables) {
        int32_t *to = take(pages), *write = take(count);
        for (size_t i = 0; i < count; i++) {
            const int32_t* row = all + slots[i] * slots_.table;
            const int32_t page = row[pos[i] / kPage];
            if (page < 0) return false;
            std::copy(row, row + table, to + i * (size_t)table);
            write[i] = page * kPage + pos[i] % kPage;
        }
        views.push_back({to, write});
    }
    b = {};
    b.ids = ids, b.pos = pos, b.q_start = q_start, b.kv_len = kv_len, b.logit_rows = rows;
    b.pages = views[0].pages, b.write = views[0].write;
    if (adapter >= 0) b.adapters = adapters;  // the last one has the highest
    b.tokens = b.sequences = b.rows = (int)count, b.table = table;
    b.more.assign(views.begin() + 1, views.end());
    now_.assign(slots, slots + count);
    return true;
}

void DecodeSteps::computed() {
    for (int32_t s : now_) slots_.length[s]++;
}

bool DecodeSteps::choose(Sampler& sampler, const LogitRows& rows, const std::vector<const SampleParams*>& params, const std::vector<Seen>& seen,
                    std::vector<int32_t>& tokens) {
    if (params.size() != now_.size() || seen.size() != now_.size()) return false;
    std::vector<Ask> asks(now_.size());
    for (size_t i = 0; i < asks.size(); i++) {
        if ((params[i]->penalizes() && !seen[i].ids) || params[i]->logprobs >= 0) return false;
        asks[i].params = params[i], asks[i].seen = seen[i], asks[i].position = slots_.position[now_[i]];
        asks[i].logits = rows.logits + i * rows.stride, asks[i].stride = rows.stride;
        if (rows.peaks) asks[i].peaks = rows.peaks + i * rows.peaks_stride;
    }
    std::vector<Answer> answers;
    sampler.choose(asks, answers);
    for (const Answer& a : answers)
        if (a.tokens.back() < 0) return false;
    for (size_t i = 0; i < asks.size(); i++) {
        tokens.push_back(answers[i].tokens[0]);
        slots_.last[now_[i]] = tokens.back();
        slots_.position[now_[i]]++;
    }
    return true;
}

}  // namespace quire
