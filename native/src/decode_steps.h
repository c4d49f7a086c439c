// Steps in which each of some sequences goes on by the token that its slot knows, as nearly all do: what a runner keeps of its slots
// (quire/runner/slots.py) becomes a batch, and the tokens that are chosen go back there. In Python that is dozens of calls, whose
// code the weights have pushed out of every cache by then.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <utility>
#include <vector>

#include "batch.h"
#include "sample.h"

namespace quire {

// Arrays over `count` slots. They are the caller's, who changes them between calls.
struct SlotArrays {
    int count = 0;
    int32_t *last = nullptr, *length = nullptr;
    int64_t* position = nullptr;
    const int32_t* adapter = nullptr;
    const bool* live = nullptr;
    std::vector<const int32_t*> tables;  // of each group, [count][table]; -1: no page yet
    int table = 0;
};

// Rows of logits, and their peaks where they are known; the strides are in numbers.
struct LogitRows {
    const float* logits = nullptr;
    size_t stride = 0;
    const int32_t* peaks = nullptr;
    size_t peaks_stride = 0;
};

class DecodeSteps {
public:
    // `most`: sequences of one row that a step has room for.
    DecodeSteps(SlotArrays slots, int vocabulary, int max_context, int most)
        : slots_(std::move(slots)), vocabulary_(vocabulary), max_context_(max_context), most_(most) {}

    // The next token of each of these slots, which are different. False: there is something to be said about one of them.
    bool batch(const int64_t* slots, size_t count, BatchView& batch);

    // That batch was computed.
    void computed();

    // The tokens that follow it, chosen from its rows of logits. `seen`: what each sequence holds, where its parameters look back. False, with
    // nothing done: one is to be told more than its token, or has none, or what it looks back at is missing.
    bool choose(Sampler& sampler, const LogitRows& rows, const std::vector<const SampleParams*>& params, const std::vector<Seen>& seen,
                std::vector<int32_t>& tokens);

private:
    SlotArrays slots_;
    int vocabulary_, max_context_, most_;
    std::vector<int32_t> now_;     // the slots of the last batch
    std::vector<int32_t> memory_;  // that it lies in
};

}  // namespace quire
