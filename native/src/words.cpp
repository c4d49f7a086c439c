#include "words.h"

#include <algorithm>
#include <queue>
#include <random>
#include <stdexcept>
#include <string>

namespace quire {
namespace {

uint64_t hash_of(std::string_view text, uint64_t seed) {
    uint64_t h = seed;
    for (unsigned char c : text) h = (h ^ c) * 0x100000001b3ull;
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9ull;
    return h ^ (h >> 27);
}

// Bytes of the character that begins with this byte. Bytes that begin none count as one.
size_t width(unsigned char lead) { return lead < 0xc0 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4; }

struct Symbol {
    uint32_t begin, size;  // in the text; size 0 is joined into its left neighbour
    int32_t left, right;
};

struct Pair {
    float score;
    int32_t left, right;
    uint32_t size;  // of both, when it was proposed
};

struct Worse {
    bool operator()(const Pair& a, const Pair& b) const {
        return a.score < b.score || (a.score == b.score && a.left > b.left);
    }
};

}  // namespace

ScoredWords::ScoredWords(std::string_view blob, std::vector<uint32_t> offsets, std::vector<float> scores, std::vector<uint8_t> uses,
                         std::vector<int32_t> byte_ids, int32_t unknown)
    : blob_(blob.begin(), blob.end()),
      offsets_(std::move(offsets)),
      scores_(std::move(scores)),
      uses_(std::move(uses)),
      byte_ids_(std::move(byte_ids)),
      unknown_(unknown) {
    const size_t count = uses_.size();
    if (offsets_.size() != count + 1 || scores_.size() != count || byte_ids_.size() != 256 || offsets_.back() > blob_.size())
        throw std::invalid_argument("sizes");
    std::random_device random;  // a vocabulary made to collide would have to know it
    seed_ = (uint64_t)random() << 32 | random();
    uint64_t places = 16;
    while (places < 2 * count) places *= 2;
    table_.assign(places, -1);
    mask_ = places - 1;
    for (size_t i = 0; i < count; i++) {
        if (offsets_[i] > offsets_[i + 1]) throw std::invalid_argument("offsets");
        if (uses_[i] == kNever || offsets_[i] == offsets_[i + 1]) continue;
        const std::string_view piece(blob_.data() + offsets_[i], offsets_[i + 1] - offsets_[i]);
        longest_ = std::max(longest_, piece.size());
        uint64_t at = hash_of(piece, seed_) & mask_;
        for (; table_[at] >= 0; at = (at + 1) & mask_) {
            const size_t other = (size_t)table_[at];
            if (std::string_view(blob_.data() + offsets_[other], offsets_[other + 1] - offsets_[other]) == piece)
                throw std::invalid_argument(std::to_string(i) + " " + std::to_string(other));
        }
        table_[at] = (int32_t)i;
    }
}

int32_t ScoredWords::find(std::string_view piece) const {
    if (piece.size() > longest_) return -1;
    for (uint64_t at = hash_of(piece, seed_) & mask_; table_[at] >= 0; at = (at + 1) & mask_) {
        const size_t i = (size_t)table_[at];
        if (std::string_view(blob_.data() + offsets_[i], offsets_[i + 1] - offsets_[i]) == piece) return (int32_t)i;
    }
    return -1;
}

std::vector<int32_t> ScoredWords::encode(std::string_view text) const {
    std::vector<Symbol> symbols;
    symbols.reserve(text.size());
    for (size_t at = 0; at < text.size();) {
        const size_t size = std::min(width((unsigned char)text[at]), text.size() - at);
        const auto i = (int32_t)symbols.size();
        symbols.push_back({(uint32_t)at, (uint32_t)size, i - 1, i + 1});
        at += size;
    }
    if (symbols.empty()) return {};
    symbols.back().right = -1;

    std::priority_queue<Pair, std::vector<Pair>, Worse> queue;
    auto propose = [&](int32_t left, int32_t right) {
        if (left < 0 || right < 0) return;
        const uint32_t size = symbols[left].size + symbols[right].size;
        const int32_t id = find(text.substr(symbols[left].begin, size));
        if (id >= 0 && uses_[id] == kJoins) queue.push({scores_[id], left, right, size});
    };
    for (int32_t i = 1; i < (int32_t)symbols.size(); i++) propose(i - 1, i);
    while (!queue.empty()) {
        const Pair pair = queue.top();
        queue.pop();
        Symbol& left = symbols[pair.left];
        Symbol& right = symbols[pair.right];
        if (left.size == 0 || right.size == 0 || left.size + right.size != pair.size) continue;  // joined otherwise since
        left.size = pair.size;
        right.size = 0;
        left.right = right.right;
        if (right.right >= 0) symbols[right.right].left = pair.left;
        propose(left.left, pair.left);
        propose(pair.left, left.right);
    }

    std::vector<int32_t> ids;
    bool was_unknown = false;
    for (int32_t i = 0; i >= 0; i = symbols[i].right) {
        const std::string_view piece = text.substr(symbols[i].begin, symbols[i].size);
        const int32_t id = find(piece);
        bool is_unknown = false;
        if (id >= 0) {
            ids.push_back(id);
        } else if (std::all_of(piece.begin(), piece.end(), [&](char c) { return byte_ids_[(unsigned char)c] >= 0; })) {
            for (char c : piece) ids.push_back(byte_ids_[(unsigned char)c]);
        } else {
            is_unknown = true;
            if (!was_unknown) ids.push_back(unknown_);
        }
        was_unknown = is_unknown;
    }
    return ids;
}

}  // namespace quire
