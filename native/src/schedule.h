// How attention over one batch is cut into items for the threads. Every layer uses the same cut, so it is made once a run.
//
// A tile is a few rows of one sequence. Most tiles are one item per KV head. A tile whose past is long beside what the
// other threads have to do is cut at chunks, and tiles whose page tables name the same pages for a chunk meet in one item
// there, so that the pages are read once for all of them. Items of such tiles leave parts behind, one per chunk and query;
// who comes last merges them, in order. None of this can be seen in a result: see kernels/attention.h.
//
// With a window a tile begins at the first chunk that one of its rows sees; what lies before costs nothing and is not named.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "batch.h"
#include "kernels.h"
#include "memory.h"

namespace quire {

struct Schedule {
    struct Tile {
        int sequence, row, rows;
        int begin;     // the first chunk that a row of it sees
        int chunks;    // of its longest row, those before `begin` among them
        int pieces;    // items of one head that it takes part in; 0: it is one item, whole
        size_t parts;  // floats before its parts: [kv_head][chunk from begin on][query]
    };
    struct Item {           // for each KV head
        int first, members;  // tiles, in `members`
        int chunk, chunks;
        bool whole;
        int64_t cost;
    };

    // head_dim: of the values; window: 0 for none; pool: the group of layers whose page tables it looks at; queries: about so many of a tile
    Schedule(int heads, int kv_heads, int head_dim, int window, int pool = 0, int queries = kAttendTile);

    // wanted: only rows whose logits are
    void divide(const BatchView& batch, int threads, bool wanted = false);

    // Whether every sequence has one row and is one item for each head, and none looks at a page that another one writes: then who
    // attends can store, too.
    bool alone() const { return alone_; }

    int items() const { return (int)places_.size(); }
    const Item& item(int i) const { return items_[(size_t)places_[(size_t)i].item]; }
    int head(int i) const { return places_[(size_t)i].head; }
    const Tile& tile(const Item& item, int i) const { return tiles_[(size_t)members_[(size_t)(item.first + i)]]; }
    int group() const { return group_; }
    int heads() const { return group_ * kv_heads_; }
    int window() const { return window_; }
    int pool() const { return pool_; }
    int first(int position) const { return window_ && position >= window_ ? position - window_ + 1 : 0; }  // that it sees
    float* part(const Tile& tile, int head, int chunk, int query) const {
        const size_t at = (size_t)((head * (tile.chunks - tile.begin) + chunk - tile.begin) * tile.rows * group_ + query);
        return (float*)parts_.data() + tile.parts + at * shape_.floats;
    }
    // One item of this tile and head is done. True for the last of them, who finds all the others' parts in place.
    bool last(const Tile& tile, int head) const;

private:
    bool room(Tile& tile);
    void share(const BatchView& batch);
    void meet(std::vector<int> tiles, int chunk, std::vector<int>& next);
    void cut(int tile, int from, int64_t target);
    void add(const std::vector<int>& tiles, int chunk, int chunks, bool whole);
    int64_t tokens(const Tile& tile, int chunk, int chunks) const;
    bool past(const Tile& tile) const;
    bool apart();
    void place(int threads);

    int group_, kv_heads_, window_, pool_, rows_;
    PartShape shape_;
    const BatchView* batch_ = nullptr;
    std::vector<Tile> tiles_;
    std::vector<Item> items_;
    std::vector<int> members_;
    std::vector<int> shared_;  // per tile: its first chunks that are read together with others
    mutable Mapping parts_;
    size_t used_ = 0;
    bool alone_ = false;
    struct Place {
        int item, head;
    };
    std::vector<Place> places_;  // in the order of the threads' shares
    std::vector<uint8_t> written_;  // per page of the pool; only during `apart` not 0
    std::vector<uint8_t> wanted_;   // per row, where not all are
    mutable std::vector<std::atomic<int>> pending_;  // [tile][kv_head]
};

}  // namespace quire
