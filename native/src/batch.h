// The ragged batch of one step as the plan sees it (quire/backends/batch.py), and its validation: after check() every
// index in it may be followed without looking.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace quire {

struct TableView {  // where the keys and values of a group of layers lie
    const int32_t* pages = nullptr;  // [sequences][table]
    const int32_t* write = nullptr;  // [tokens]
};

struct BatchView {
    const int32_t* ids = nullptr;         // [tokens]
    const int32_t* pos = nullptr;         // [tokens]
    const int32_t* q_start = nullptr;     // [sequences + 1]
    const int32_t* kv_len = nullptr;      // [sequences]
    const int32_t* pages = nullptr;       // [sequences][table]
    const int32_t* write = nullptr;       // [tokens]
    const int32_t* logit_rows = nullptr;  // [rows]
    int tokens = 0, sequences = 0, table = 0, rows = 0;
    std::vector<TableView> more;  // of further groups: as wide, each over its own pool
    const int32_t* adapters = nullptr;  // [tokens] the slot of each row's adapter, -1: none; nullptr: no row has one
    // Rows that take the place of the token's row in the embedding: given[t] says which of `rows_given` tokens' it is, -1: none; nullptr:
    // every row is its token's.
    const int32_t* given = nullptr;    // [tokens]
    const float* embedded = nullptr;   // [rows_given][width]
    int rows_given = 0, width = 0;
    // Where each token is along each axis of its positions; nullptr: at pos along all of them.
    const int32_t* coords = nullptr;  // [axes][tokens]
    int axes = 0;

    TableView at(int group) const { return group ? more[(size_t)group - 1] : TableView{pages, write}; }
};

struct PoolLimits {
    int pages = 0;
    // How far back a row looks, its own token counted: page tables are not followed before that. 0: nobody looks, and
    // neither page tables nor write are looked at.
    int reach = 0;
    bool state = false;  // its pages are states: the one before a sequence's first row must be there, and the one after its last
};

struct BatchLimits {
    int max_tokens = 0, max_rows = 0;
    int vocabulary = 0;  // 0: ids are not looked up
    std::vector<PoolLimits> pools;  // of each group
    int adapters = 0;  // slots for adapters
    int width = 0;     // of the embedding's rows; 0: there is none, -1: several that differ
    int axes = 1;      // of positions, that a rope table looks at
};

// Throws std::invalid_argument that names the first thing wrong.
void check(const BatchView& batch, const BatchLimits& limits);

}  // namespace quire
