// Adapters: low-rank pairs that some rows of a step add to a product, y += b (scale * (a x)).
//
// A site is a weight that adapters may add to; a slot holds one adapter, which has a pair at some of the sites. Which slot a row uses comes with
// the batch. a x is a step of its own (shrink), for all products that read one x; b is added by the steps that make y, to their own columns while these are
// in the cache. Rows that follow one another and use the same slot are one product; what a row gets does not depend on it.
#pragma once

#include <memory>
#include <vector>

#include "weight.h"

namespace quire {

struct Pair {
    std::shared_ptr<const Matrix> a, b;  // [r, k] and [n, r], dense; none: the adapter adds nothing here
    float scale = 1;
};

struct Site {
    int n = 0, k = 0, rank = 0;  // rank: of the largest pair that fits
    std::vector<Pair> pairs;     // by slot
};

struct Stretch {  // rows that use one slot
    int row, rows, slot;
};

}  // namespace quire
