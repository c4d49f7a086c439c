// How a row of logits becomes a token: the sampler's work on one row. See sample.h for what it computes.
#pragma once

#include "sample.h"

namespace quire {

__extension__ typedef unsigned __int128 Wide;  // a product of two whole numbers of 64 bits

// One row on its way to a token, and the memory for it.
//
// The row is what its logits are, but for tokens that a bias or a penalty touched: these are ruled out in the row and have
// their scores, in double, in a list beside it.
class Sampler::Row {
public:
    Row(const Kernels* kernels, int vocabulary);

    // Who helps to weigh a row, or nobody.
    void share(ThreadPool* pool) { pool_ = pool; }

    // The logits of a row, looked at for the first time, where nobody did so before and left its peaks. False: they are not numbers.
    bool open(const float* logits, const int32_t* peaks = nullptr) {
        x_ = logits;
        touched_.clear();
        return look(peaks);
    }

    int32_t choose(const SampleParams& params, int64_t position, const Seen& seen, const uint8_t* allowed);
    Told tell(const float* logits, int32_t token, int top);

private:
    struct Touched {
        int32_t id;
        double score;
    };
    // Where a run of best tokens ends: those with a larger key, and of those with this one the first in the list, up to `last`.
    struct Edge {
        double key;
        size_t last;
        uint64_t held;  // the mass of the run
    };

    bool look(const int32_t* known = nullptr);
    double& touch(int32_t id);
    void adjust(const SampleParams& params, const Seen& seen, bool held_back, const uint8_t* allowed);
    int32_t best();
    uint64_t weigh_all();
    int32_t draw_from_all(uint64_t draw);
    int32_t filter_and_draw(const SampleParams& params, uint64_t draw);

    void gather(double floor);
    double floor_of_best(int64_t k, double floor);
    void gather_best(int64_t k, double floor);
    double reach_of(double share, uint64_t total) const;
    void weigh();
    template <class Mass> Edge cut(const double* key, const double* far, const Mass& mass, uint64_t goal);
    template <class Keep> void keep_if(const Keep& keep);
    void typical(double share);
    double score_at(double bits) const { return peak_ + bits / by_; }

    const Kernels* k_;
    ThreadPool* pool_ = nullptr;
    const int n_, blocks_;
    const double unit_;
    const float* x_ = nullptr;
    int32_t high_ = 0;  // the best of the row, without what was touched
    double peak_ = 0, by_ = 1;  // a distance is (score - peak) * by
    std::vector<int32_t> peaks_;
    std::vector<uint64_t> masses_;
    std::vector<float> scores_;  // a copy of the row, where tokens are ruled out
    std::vector<Touched> touched_;
    std::vector<int32_t> place_;  // [n]: 1 + its place in touched_; 0: it was not touched
    double weighed_ = 0;          // the `by` that masses_ were made with; 0: they were not
    uint64_t all_ = 0;            // their sum

    // Tokens still in play, in the order of their ids: what the filters work on.
    std::vector<int32_t> ids_;
    std::vector<double> score_, far_, weight_;
    std::vector<uint64_t> mass_;
    uint64_t total_ = 0;  // of mass_

    std::vector<double> key_;
    std::vector<int32_t> order_, some_;
    std::vector<uint16_t> bin_;
};

}  // namespace quire
