// cos and sin of every token of a step for one Rope: computed once a step, used by every layer.
#pragma once

#include <vector>

#include "plan.h"

namespace quire {

struct RopeTable : Step {
    const char* name() const override { return "rope table"; }
    std::vector<float> frequencies;  // [dim / 2]
    std::vector<int> axes;           // [dim / 2] the axis of the position that each turns by; empty: all by pos
    bool pairs = false;
    double magnitude = 1;
    mutable Mapping memory;  // [tokens][cos, sin][dim / 2]

    int dim() const { return 2 * (int)frequencies.size(); }
    int items(const Run& run) const override { return run.batch.tokens; }
    void work(const Run& run, int t, int) const override;
    RopeArgs args(int t, int heads, int head_dim) const {
        const float* row = (const float*)memory.data() + (size_t)t * 2 * frequencies.size();
        return {row, row + frequencies.size(), dim(), head_dim, heads, pairs};
    }
};

}  // namespace quire
