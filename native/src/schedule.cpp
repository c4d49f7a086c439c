// See schedule.h.
#include "schedule.h"

#include <string.h>

#include <algorithm>

#include "thread_pool.h"

namespace quire {

namespace {

constexpr int kTile = kAttendTile;               // queries that an item of several tiles tries to hold
constexpr int kSmall = 24;                      // tiles of fewer queries gain from company
constexpr size_t kPartBytes = (size_t)64 << 20;  // address space; memory only where parts are written
constexpr int kTilesPerThread = 4;              // at least, before tiles become larger than kTile
constexpr int kItemsPerThread = 8;              // of the largest size that an item of a cut tile may have

// Rows of a full tile of about so many queries: whole register tiles if that comes out near.
int rows_of(int group, int queries) {
    const int most = std::max(1, queries / group);
    for (int rows = most; 2 * rows > most; rows--)
        if (rows * group % 6 == 0) return rows;
    return most;
}

}  // namespace

Schedule::Schedule(int heads, int kv_heads, int head_dim, int window, int pool, int queries)
    : group_(heads / kv_heads), kv_heads_(kv_heads), window_(window), pool_(pool), rows_(rows_of(group_, queries)), shape_(head_dim), parts_(kPartBytes, false) {}

bool Schedule::last(const Tile& tile, int head) const {
    std::atomic<int>& pending = pending_[(size_t)((&tile - tiles_.data()) * kv_heads_ + head)];
    if (pending.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
    pending.store(tile.pieces, std::memory_order_relaxed);  // for the next layer, which opens when this one has ended
    return true;
}

bool Schedule::room(Tile& tile) {
    const size_t floats = (size_t)kv_heads_ * (size_t)(tile.chunks - tile.begin) * (size_t)(tile.rows * group_) * shape_.floats;
    if ((used_ + floats) * sizeof(float) > parts_.size()) return false;
    tile.parts = used_;
    used_ += floats;
    return true;
}

// Tokens that the tile's queries look at in those chunks, all together.
int64_t Schedule::tokens(const Tile& tile, int chunk, int chunks) const {
    int64_t sum = 0;
    for (int r = tile.row; r < tile.row + tile.rows; r++) {
        const int64_t start = (int64_t)chunk * kChunk, to = std::min<int64_t>(batch_->pos[r] + 1, start + (int64_t)chunks * kChunk);
        const int64_t from = std::max<int64_t>(start, first(batch_->pos[r]));
        if (to > from) sum += to - from;
    }
    return sum * group_;
}

// Whether a row of it no longer sees the first token.
bool Schedule::past(const Tile& tile) const {
    for (int r = tile.row; window_ && r < tile.row + tile.rows; r++)
        if (first(batch_->pos[r])) return true;
    return false;
}

void Schedule::add(const std::vector<int>& tiles, int chunk, int chunks, bool whole) {
    Item item{(int)members_.size(), (int)tiles.size(), chunk, chunks, whole, 0};
    for (int t : tiles) {
        Tile& tile = tiles_[(size_t)t];
        item.cost += tokens(tile, chunk, chunks);
        tile.pieces += !whole;
        members_.push_back(t);
    }
    items_.push_back(item);
}

// Chunks from `from` on, in runs that cost no more than `target` (or one chunk).
void Schedule::cut(int t, int from, int64_t target) {
    const Tile& tile = tiles_[(size_t)t];
    const int64_t one = (int64_t)kChunk * tile.rows * group_;
    const int run = (int)std::max<int64_t>(1, std::min<int64_t>(tile.chunks, target / one));
    for (int c = from; c < tile.chunks; c += run) add({t}, c, std::min(run, tile.chunks - c), false);
}

// Items for tiles that agree on a chunk, of about kTile queries and the same size. Those taken go on to `next`.
void Schedule::meet(std::vector<int> tiles, int chunk, std::vector<int>& next) {
    if (!chunk) tiles.erase(std::remove_if(tiles.begin(), tiles.end(), [&](int t) { return !room(tiles_[(size_t)t]); }), tiles.end());
    size_t queries = 0;
    for (int t : tiles) queries += (size_t)(tiles_[(size_t)t].rows * group_);
    const size_t pieces = (queries + kTile - 1) / kTile, each = pieces ? (tiles.size() + pieces - 1) / pieces : 1;
    for (size_t i = 0; i < tiles.size(); i += each)
        add({tiles.begin() + (long)i, tiles.begin() + (long)std::min(tiles.size(), i + each)}, chunk, 1, false);
    for (int t : tiles) shared_[(size_t)t] = chunk + 1, next.push_back(t);
}

// Small tiles whose tables agree on the first chunk are read together there; those that still agree on the second, too; and
// so on. A chunk that two sequences hold in different pages is not looked at further on. Rows whose window has left their
// first token behind share nothing: what they see is short, and seldom the front of anything.
void Schedule::share(const BatchView& b) {
    auto table = [&](int t, int chunk) {
        return b.at(pool_).pages + (int64_t)tiles_[(size_t)t].sequence * b.table + (int64_t)chunk * (kChunk / kPage);
    };
    constexpr size_t kRow = kChunk / kPage * sizeof(int32_t);
    std::vector<int> left;
    for (int t = 0; t < (int)tiles_.size(); t++)
        if (tiles_[(size_t)t].rows * group_ < kSmall && !past(tiles_[(size_t)t])) left.push_back(t);
    for (int chunk = 0; left.size() > 1; chunk++) {
        left.erase(std::remove_if(left.begin(), left.end(), [&](int t) {
            const Tile& tile = tiles_[(size_t)t];
            return tile.chunks <= chunk || b.kv_len[tile.sequence] < (chunk + 1) * kChunk;
        }), left.end());
        std::stable_sort(left.begin(), left.end(), [&](int x, int y) { return memcmp(table(x, chunk), table(y, chunk), kRow) < 0; });
        std::vector<int> next;
        for (size_t i = 0, end; i < left.size(); i = end) {
            for (end = i + 1; end < left.size() && !memcmp(table(left[i], chunk), table(left[end], chunk), kRow);) end++;
            if (end - i > 1) meet({left.begin() + (long)i, left.begin() + (long)end}, chunk, next);
        }
        left = std::move(next);
    }
}

void Schedule::divide(const BatchView& b, int threads, bool wanted) {
    batch_ = &b;
    tiles_.clear(), items_.clear(), members_.clear();
    used_ = 0;
    const int most = std::clamp((int)((int64_t)b.tokens * kv_heads_ / ((int64_t)threads * kTilesPerThread)), std::min(rows_, rows_of(group_, kTile)), rows_);
    int64_t all = 0;
    wanted_.assign((size_t)b.tokens, !wanted);
    for (int i = 0; i < b.rows && wanted; i++) wanted_[(size_t)b.logit_rows[i]] = 1;
    for (int s = 0; s < b.sequences; s++)
        for (int t = b.q_start[s], rows; t < b.q_start[s + 1]; t += std::max(rows, 1)) {
            for (rows = 0; rows < most && t + rows < b.q_start[s + 1] && wanted_[(size_t)(t + rows)];) rows++;
            if (!rows) continue;
            Tile tile{s, t, rows, INT32_MAX, 0, 0, 0};
            for (int r = t; r < t + tile.rows; r++) {
                tile.begin = std::min(tile.begin, first(b.pos[r]) / kChunk);
                tile.chunks = std::max(tile.chunks, b.pos[r] / kChunk + 1);
            }
            all += tokens(tile, 0, tile.chunks);
            tiles_.push_back(tile);
        }
    shared_.assign(tiles_.size(), 0);
    share(b);
    const int64_t target = std::max<int64_t>(1, all * kv_heads_ / ((int64_t)threads * kItemsPerThread));
    for (int t = 0; t < (int)tiles_.size(); t++) {
        Tile& tile = tiles_[(size_t)t];
        if (shared_[(size_t)t]) {
            cut(t, shared_[(size_t)t], threads > 1 ? target : INT64_MAX);
        } else if (threads > 1 && tile.chunks - tile.begin > 1 && tokens(tile, 0, tile.chunks) > target && room(tile)) {
            cut(t, tile.begin, target);
        } else {
            add({t}, tile.begin, tile.chunks - tile.begin, true);
        }
    }
    place(threads);
    if (pending_.size() < tiles_.size() * (size_t)kv_heads_) pending_ = std::vector<std::atomic<int>>(tiles_.size() * (size_t)kv_heads_);
    for (size_t t = 0; t < tiles_.size(); t++)
        for (int h = 0; h < kv_heads_; h++) pending_[t * (size_t)kv_heads_ + (size_t)h].store(tiles_[t].pieces, std::memory_order_relaxed);
    alone_ = !wanted && b.tokens == b.sequences && tiles_.size() == (size_t)b.sequences &&
             std::all_of(items_.begin(), items_.end(), [](const Item& i) { return i.whole; }) && apart();
}

// In every thread's share the longest come first, and one head after the other, whose pages stay in the cache. Tiles that are one item stay
// with the thread that has their rows, and threads begin with different heads: rows of 16 have their scales in the same lines.
void Schedule::place(int threads) {
    auto longest_first = [this](int from, int to) {
        std::stable_sort(items_.begin() + from, items_.begin() + to, [](const Item& x, const Item& y) { return x.cost > y.cost; });
    };
    const int count = (int)items_.size();
    places_.clear();
    if (std::all_of(items_.begin(), items_.end(), [](const Item& i) { return i.whole; })) {
        std::sort(items_.begin(), items_.end(), [this](const Item& x, const Item& y) { return tile(x, 0).row < tile(y, 0).row; });
        for (int share = 0; share < threads; share++) {
            const int from = ThreadPool::share_begins(share, count, threads), to = ThreadPool::share_begins(share + 1, count, threads);
            longest_first(from, to);
            for (int head = 0; head < kv_heads_; head++)
                for (int i = from; i < to; i++) places_.push_back({i, (head + share) % kv_heads_});
        }
        return;
    }
    longest_first(0, count);
    for (int share = 0; share < threads; share++)
        for (int i = share; i < count * kv_heads_; i += threads) places_.push_back({i % count, i / count});
}

// Whether each page that this step writes is in the table of its own sequence alone.
bool Schedule::apart() {
    const TableView& own = batch_->at(pool_);
    bool found = true;
    for (const Tile& tile : tiles_) {
        const size_t page = (size_t)(own.write[tile.row] / kPage);
        if (written_.size() <= page) written_.resize(page + 1);
        found = found && !written_[page];
        written_[page] = 1;
    }
    for (const Tile& tile : tiles_) {
        const int32_t* table = own.pages + (int64_t)tile.sequence * batch_->table;
        for (int p = first(batch_->pos[tile.row]) / kPage, last = batch_->pos[tile.row] / kPage; p <= last; p++) {
            const size_t page = (size_t)table[p];
            const bool mine = (int)page == own.write[tile.row] / kPage;
            found = found && (mine || page >= written_.size() || !written_[page]);
        }
    }
    for (const Tile& tile : tiles_) written_[(size_t)(own.write[tile.row] / kPage)] = 0;
    return found;
}

}  // namespace quire
