// SentencePiece's BPE: text to token ids, for vocabularies in which every piece has a score.
//
// Neighbours are joined while their union is a piece, the best score first and of equal scores the leftmost. Pieces lie in one
// buffer and are found by hash of their bytes, so building a vocabulary costs one pass over it. Knows no file format; the
// caller says which pieces text may become. Input is hostile: a text may be any bytes, and lengths are checked by the caller.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace quire {

class ScoredWords {
public:
    // What a piece may be: nothing that text becomes, a character of its own alone, or anything that joins.
    enum Use : uint8_t { kNever = 0, kAlone = 1, kJoins = 2 };

    // `offsets` has one more entry than there are pieces. `byte_ids` has 256 ids or -1; `unknown` is an id or -1.
    // Throws std::invalid_argument with the two ids when a text is there twice.
    ScoredWords(std::string_view blob, std::vector<uint32_t> offsets, std::vector<float> scores, std::vector<uint8_t> uses,
                std::vector<int32_t> byte_ids, int32_t unknown);

    // Ids of a text (UTF-8). A character without a piece becomes its bytes where all of them have ids, or the unknown token, one
    // for a run of them.
    std::vector<int32_t> encode(std::string_view text) const;

private:
    int32_t find(std::string_view piece) const;  // an id, or -1

    std::vector<char> blob_;
    std::vector<uint32_t> offsets_;
    std::vector<float> scores_;
    std::vector<uint8_t> uses_;
    std::vector<int32_t> byte_ids_;
    std::vector<int32_t> table_;  // open addressing; -1 is free
    uint64_t mask_ = 0, seed_ = 0;
    size_t longest_ = 0;
    int32_t unknown_;
};

}  // namespace quire
