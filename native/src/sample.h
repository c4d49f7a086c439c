// The sampler: rows of logits become tokens and log probabilities. The definition, to the last bit, is that of
// quire/runner/rules.py and masses.py; tests compare the two. Nothing here changes a logit.
//
// A weight is 2^y in double, and a mass is a weight as a whole number of small units, so sums are exact: rows, blocks and
// threads can be taken in any order. Few tokens are ever weighed when a filter leaves few: each block of 64 tokens has a peak,
// the k-th best peak is a floor under the k best tokens, and only blocks that reach it are looked into.
#pragma once

#include <stdint.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace quire {

// In place of a token: the logits are not numbers; no token is left.
constexpr int32_t kBroken = -1, kRuledOut = -2;

// How a sequence chooses; made once a request.
struct SampleParams {
    double temperature = 0, typical_p = 1, top_p = 1, min_p = 0;
    double repetition = 1, frequency = 0, presence = 0;
    int64_t top_k = 0, min_tokens = 0;
    uint64_t seed = 0;
    int logprobs = -1;  // how many alternatives; -1: nothing is told
    std::vector<std::pair<int32_t, double>> bias;
    std::vector<int32_t> stops;

    bool penalizes() const { return repetition != 1.0 || frequency != 0.0 || presence != 0.0; }
};

// Distinct tokens of a sequence, and how often each was generated.
struct Seen {
    const int64_t* ids = nullptr;
    const double* counts = nullptr;
    int64_t size = 0;
};

// One sequence of a call: 1 + drafts rows of logits.
struct Ask {
    const SampleParams* params = nullptr;
    const float* logits = nullptr;
    size_t stride = 0;  // floats from one row to the next
    int64_t position = 0;  // tokens generated before the first row
    std::vector<int32_t> drafts;
    Seen seen;
    const int32_t* peaks = nullptr;  // of the first row, where they are known (see Plan::peaks)
    const uint8_t* allowed = nullptr;  // [vocabulary] of the first row, or none
    size_t allowed_stride = 0;
};

struct Told {
    double logprob = 0;
    int64_t rank = 0;  // 1 is best
    std::vector<std::pair<int32_t, double>> top;
};

// Tokens up to the first that is not its draft. A code ends them, as the last one, when a row has none.
struct Answer {
    std::vector<int32_t> tokens;
    std::vector<Told> told;
};

class Sampler {
public:
    Sampler(std::shared_ptr<ThreadPool> pool, const Kernels* kernels, int vocabulary);
    ~Sampler();

    int vocabulary() const { return vocabulary_; }

    // Answers in the order of the questions. Calls take turns.
    void choose(const std::vector<Ask>& asks, std::vector<Answer>& answers);

    // Of one token a row: log probability, rank, and the `top` best. False where the logits are not numbers.
    bool logprobs(const float* logits, size_t stride, const int32_t* tokens, int rows, int top, std::vector<Told>& told);

private:
    class Row;
    void answer(Row& row, const Ask& ask, Answer& answer) const;
    template <class Work> void for_each(int items, const Work& work);

    std::shared_ptr<ThreadPool> pool_;
    const Kernels* kernels_;
    int vocabulary_;
    std::mutex turn_;
    std::vector<std::unique_ptr<Row>> rows_;  // one a thread: scratch memory, nothing between calls
};

// The draw of `seed` at `position`, in [0, 2^53): Philox4x64-10, as in quire/runner/random.py.
uint64_t draw53(uint64_t seed, uint64_t position);

}  // namespace quire
