// See batch.h.
#include "batch.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace quire {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("batch: " + what); }

constexpr int kMostCoord = 1 << 24;  // float32 has every whole number up to here

std::string at(const char* name, int i, int value) { return std::string(name) + "[" + std::to_string(i) + "] = " + std::to_string(value); }

// The rows of a sequence must follow one another up to its end; a page may be missing where no state has to be.
void check_states(const BatchView& b, int s, int group, int pages) {
    const int begin = b.q_start[s], end = b.q_start[s + 1], length = b.kv_len[s];
    if (begin == end) return;
    const int first = b.pos[begin];
    for (int t = begin; t < end; t++)
        if (b.pos[t] != first + (t - begin)) refuse(at("pos", t, b.pos[t]) + " does not follow the row before it");
    if (first + (end - begin) != length) refuse(at("kv_len", s, length) + ", but its last row is not the last token");
    if (length > (int64_t)b.table * kPage) refuse(at("kv_len", s, length) + ", but its page table is shorter");
    const int32_t* row = b.at(group).pages + (int64_t)s * b.table;
    const int from = first ? (first - 1) / kPage : 0, to = (length - 1) / kPage;
    for (int i = from; i <= to; i++)
        if (row[i] >= pages || row[i] < (i == to || (first && i == from) ? 0 : -1))
            refuse("pages[" + std::to_string(s) + ", " + std::to_string(i) + "] = " + std::to_string(row[i]) +
                   " is not a state of the pool (" + std::to_string(pages) + ")");
}

}  // namespace

void check(const BatchView& b, const BatchLimits& l) {
    if (b.tokens > l.max_tokens)
        refuse(std::to_string(b.tokens) + " tokens, but the program was compiled for " + std::to_string(l.max_tokens));
    if (b.rows > l.max_rows)
        refuse(std::to_string(b.rows) + " logit rows, but the program was compiled for " + std::to_string(l.max_rows));
    if (b.more.size() + 1 != l.pools.size())
        refuse("page tables of " + std::to_string(b.more.size() + 1) + " groups, but the program has " + std::to_string(l.pools.size()));
    const bool cached = std::any_of(l.pools.begin(), l.pools.end(), [](const PoolLimits& p) { return p.reach || p.state; });
    if (b.q_start[0] != 0) refuse(at("q_start", 0, b.q_start[0]) + ", not 0");
    if (b.q_start[b.sequences] != b.tokens)
        refuse(at("q_start", b.sequences, b.q_start[b.sequences]) + ", not the token count " + std::to_string(b.tokens));
    for (int s = 0; s < b.sequences; s++)  // the ends are right; with this no row lies outside
        if (b.q_start[s + 1] < b.q_start[s]) refuse(at("q_start", s + 1, b.q_start[s + 1]) + " goes back");
    for (int s = 0; s < b.sequences; s++) {
        const int length = b.kv_len[s];
        if (length < 0 || (cached && length > (int64_t)b.table * kPage))
            refuse(at("kv_len", s, length) + ", but its page table holds " + std::to_string((int64_t)b.table * kPage) + " tokens");
        int first = length;  // position of the first row
        for (int t = b.q_start[s]; t < b.q_start[s + 1]; t++) {
            if (b.pos[t] < 0 || b.pos[t] >= length)
                refuse(at("pos", t, b.pos[t]) + " lies outside its sequence of " + std::to_string(length) + " tokens");
            first = std::min(first, b.pos[t]);
        }
        for (size_t g = 0; g < l.pools.size(); g++) {
            const PoolLimits& pool = l.pools[g];
            if (pool.state) check_states(b, s, (int)g, pool.pages);
            if (!pool.reach) continue;
            const int32_t* pages = b.at((int)g).pages + (int64_t)s * b.table;
            for (int i = first >= pool.reach ? (first - pool.reach + 1) / kPage : 0; i < (length + kPage - 1) / kPage; i++)
                if (pages[i] < 0 || pages[i] >= pool.pages)
                    refuse("pages[" + std::to_string(s) + ", " + std::to_string(i) + "] = " + std::to_string(pages[i]) +
                           " is not a page of the pool (" + std::to_string(pool.pages) + ")");
        }
    }
    for (int t = 0; t < b.tokens; t++) {
        if (l.vocabulary && (b.ids[t] < 0 || b.ids[t] >= l.vocabulary))
            refuse(at("ids", t, b.ids[t]) + " is not in the vocabulary of " + std::to_string(l.vocabulary));
        for (size_t g = 0; g < l.pools.size(); g++) {
            const int place = l.pools[g].reach ? b.at((int)g).write[t] : 0;
            const int64_t most = (int64_t)l.pools[g].pages * kPage;
            if (place < 0 || (l.pools[g].reach && place >= most))
                refuse(at("write", t, place) + " is not a slot of the pool (" + std::to_string(most) + ")");
        }
    }
    for (int t = 0; b.adapters && t < b.tokens; t++)
        if (b.adapters[t] < -1 || b.adapters[t] >= l.adapters)
            refuse(at("adapters", t, b.adapters[t]) + " is not a slot for adapters (" + std::to_string(l.adapters) + ")");
    if (b.given && b.width != l.width)
        refuse("given rows have " + std::to_string(b.width) + " columns, and the embedding's have " + std::to_string(l.width));
    for (int t = 0; b.given && t < b.tokens; t++)
        if (b.given[t] < -1 || b.given[t] >= b.rows_given)
            refuse(at("given", t, b.given[t]) + " is not one of " + std::to_string(b.rows_given) + " given rows");
    if (b.coords && b.axes < l.axes)
        refuse("positions along " + std::to_string(b.axes) + " axes, and the program looks at " + std::to_string(l.axes));
    for (int64_t i = 0; b.coords && i < (int64_t)b.axes * b.tokens; i++)
        if (b.coords[i] < 0 || b.coords[i] >= kMostCoord)
            refuse("a position of " + std::to_string(b.coords[i]) + " along an axis");
    for (int i = 0; i < b.rows; i++)
        if (b.logit_rows[i] < 0 || b.logit_rows[i] >= b.tokens)
            refuse(at("logit_rows", i, b.logit_rows[i]) + " is not a row of this batch (" + std::to_string(b.tokens) + ")");
}

}  // namespace quire
