// See sample_row.h.
#include "sample_row.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include <algorithm>

#include "exp64.h"

namespace quire {

namespace {

constexpr double kLog2E = 0x1.71547652b82fep0;
constexpr double kFar = 60.0;      // bits below the best: less than half a unit, whatever the vocabulary
constexpr int kFew = 64;           // how many of the best are tried first when a mass has to be filled
constexpr int kShort = 512;        // a list that is sorted as it is
constexpr int kBins = 960;         // of a longer one
constexpr double kBinsABit = 16;
constexpr int kPiece = 128;        // blocks that a thread weighs at a time

double value_of(int32_t order) {
    const int32_t bits = order ^ ((order >> 31) & 0x7fffffff);
    float x;
    memcpy(&x, &bits, 4);
    return (double)x;
}

// The order of the largest float32 that is not above x: what is at least x has at least that.
int32_t order_below(double x) {
    float f = (float)x;  // to nearest: perhaps above x
    if ((double)f > x) f = nextafterf(f, -INFINITY);
    return order_of(f);
}

uint64_t whole(double x) {  // to nearest, of two the even one; below 2^51
    x += 0x1.8p52;
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return bits - kRoundBits;
}

uint64_t goal_of(double share, uint64_t total) {
    const double goal = ceil(share * (double)total);
    return goal < (double)total ? (uint64_t)goal : total;
}

int bits_of(unsigned n) {
    int bits = 0;
    for (; n; n >>= 1) bits++;
    return bits;
}

}  // namespace

Sampler::Row::Row(const Kernels* kernels, int vocabulary)
    : k_(kernels), n_(vocabulary), blocks_((vocabulary + kSampleBlock - 1) / kSampleBlock),
      unit_(ldexp(1.0, std::min(50, 62 - bits_of((unsigned)vocabulary - 1)))), peaks_((size_t)blocks_), masses_((size_t)blocks_),
      place_((size_t)vocabulary, 0) {}

// ---- scores

bool Sampler::Row::look(const int32_t* known) {
    weighed_ = 0;
    if (known) std::copy(known, known + blocks_, peaks_.begin());
    const bool fine = known ? *std::min_element(known, known + blocks_) >= kOrderOfMinusInf : k_->peaks(x_, n_, peaks_.data());
    high_ = *std::max_element(peaks_.begin(), peaks_.end());
    return fine && high_ < kOrderOfInf && high_ > kOrderOfMinusInf;
}

double& Sampler::Row::touch(int32_t id) {
    int32_t& place = place_[(size_t)id];
    if (!place) touched_.push_back({id, (double)x_[id]}), place = (int32_t)touched_.size();
    return touched_[(size_t)place - 1].score;
}

// logit_bias, the penalties, the stop ids that min_tokens holds back, and the mask: in this order.
void Sampler::Row::adjust(const SampleParams& params, const Seen& seen, bool held_back, const uint8_t* allowed) {
    scores_.resize((size_t)n_);
    for (const auto& [id, value] : params.bias) touch(id) += value;
    if (params.penalizes())
        for (int64_t i = 0; i < seen.size; i++) {
            double& score = touch((int32_t)seen.ids[i]);
            if (params.repetition != 1.0) score = score > 0.0 ? score / params.repetition : score * params.repetition;
            const double count = seen.counts[i];
            score -= params.frequency * count + params.presence * (count > 0.0 ? 1.0 : 0.0);
        }
    if (allowed) k_->rule_out(x_, allowed, n_, scores_.data());
    else memcpy(scores_.data(), x_, (size_t)n_ * sizeof(float));
    for (Touched& t : touched_) {
        scores_[(size_t)t.id] = -INFINITY;
        if (allowed && !allowed[t.id]) t.score = -INFINITY;
    }
    if (held_back)
        for (int32_t id : params.stops) {
            scores_[(size_t)id] = -INFINITY;
            if (place_[(size_t)id]) touched_[(size_t)place_[(size_t)id] - 1].score = -INFINITY;
        }
    for (const Touched& t : touched_) place_[(size_t)t.id] = 0;
    x_ = scores_.data();
    if (allowed || 4 * (touched_.size() + params.stops.size()) > (size_t)blocks_) {
        look();
        return;
    }
    auto again = [&](int32_t id) {  // the others' peaks are what they were
        const int block = id / kSampleBlock, from = block * kSampleBlock;
        k_->peaks(x_ + from, std::min(kSampleBlock, n_ - from), peaks_.data() + block);
    };
    for (const Touched& t : touched_) again(t.id);
    if (held_back)
        for (int32_t id : params.stops) again(id);
    high_ = *std::max_element(peaks_.begin(), peaks_.end());
}

// The best token, of equals the smaller id; kRuledOut when there is none. Sets the peak.
int32_t Sampler::Row::best() {
    int32_t id = kRuledOut;
    peak_ = -INFINITY;
    if (high_ > kOrderOfMinusInf) {
        int block = 0;
        while (peaks_[(size_t)block] != high_) block++;
        for (id = block * kSampleBlock; order_of(x_[id]) != high_;) id++;
        peak_ = value_of(high_);
    }
    for (const Touched& t : touched_)
        if (t.score > peak_ || (t.score == peak_ && id != kRuledOut && t.id < id)) peak_ = t.score, id = t.id;
    return id;
}

// ---- no filter

// The mass of the whole row, and of each block, with what was touched in its place.
uint64_t Sampler::Row::weigh_all() {
    if (weighed_ == by_) return all_;  // a log probability after a draw at temperature 1
    const Weighing how{peak_, by_, unit_};
    const int32_t floor = order_below(score_at(-kFar));
    const auto piece = [&](int i) {
        const int block = i * kPiece, from = block * kSampleBlock, size = std::min(kPiece * kSampleBlock, n_ - from);
        k_->block_masses(x_ + from, size, peaks_.data() + block, floor, how, masses_.data() + block);
    };
    const int pieces = (blocks_ + kPiece - 1) / kPiece;
    if (pool_ && pieces > 1) pool_->for_each(pieces, piece);
    else
        for (int i = 0; i < pieces; i++) piece(i);
    if (!touched_.empty()) {
        const size_t n = touched_.size();
        far_.resize(n), weight_.resize(n), mass_.resize(n);
        for (size_t i = 0; i < n; i++) far_[i] = (touched_[i].score - peak_) * by_;
        k_->weigh(far_.data(), (int)n, unit_, weight_.data(), mass_.data());
        for (size_t i = 0; i < n; i++) masses_[(size_t)(touched_[i].id / kSampleBlock)] += mass_[i];
    }
    all_ = 0;
    for (uint64_t mass : masses_) all_ += mass;
    weighed_ = by_;
    return all_;
}

// Which block, then which token of it.
int32_t Sampler::Row::draw_from_all(uint64_t draw) {
    uint64_t left = (uint64_t)(((Wide)draw * weigh_all()) >> 53);
    int block = 0;
    while (left >= masses_[(size_t)block]) left -= masses_[(size_t)block++];
    const int from = block * kSampleBlock, size = std::min(kSampleBlock, n_ - from);
    double score[kSampleBlock], weight[kSampleBlock];
    uint64_t mass[kSampleBlock];
    for (int i = 0; i < size; i++) score[i] = (double)x_[from + i];
    for (const Touched& t : touched_)
        if (t.id >= from && t.id < from + size) score[t.id - from] = t.score;
    for (int i = 0; i < size; i++) score[i] = (score[i] - peak_) * by_;
    k_->weigh(score, size, unit_, weight, mass);
    for (int i = 0; i < size; i++) {
        if (left < mass[i]) return from + i;
        left -= mass[i];
    }
    return kRuledOut;  // not reached: what is left is below the block's mass
}

// ---- lists of tokens

// Every token whose score is at least `floor`, or the float32 below it; never one that is ruled out.
void Sampler::Row::gather(double floor) {
    const int32_t least = std::max(order_below(floor), kOrderOfMinusInf + 1);
    const float low = (float)value_of(least);
    floor = std::min(floor, (double)low);
    some_.clear();
    for (size_t i = 0; i < touched_.size(); i++)
        if (touched_[i].score >= floor && touched_[i].score > -INFINITY) some_.push_back((int32_t)i);
    const auto by_id = [&](int32_t a, int32_t b) { return touched_[(size_t)a].id < touched_[(size_t)b].id; };
    std::sort(some_.begin(), some_.end(), by_id);
    size_t most = some_.size();
    for (int32_t peak : peaks_) most += peak >= least ? kSampleBlock : 0;
    ids_.resize(most), score_.resize(most);
    const float* x = x_;
    int32_t* ids = ids_.data();
    double* score = score_.data();
    size_t n = 0, next = 0;
    auto take_touched = [&](int32_t before) {
        for (; next < some_.size(); next++) {
            const Touched& t = touched_[(size_t)some_[next]];
            if (t.id >= before) return;
            ids[n] = t.id, score[n++] = t.score;
        }
    };
    for (int block = 0; block < blocks_; block++) {
        if (peaks_[(size_t)block] < least) continue;
        const int from = block * kSampleBlock, to = std::min(n_, from + kSampleBlock);
        if (next < some_.size()) take_touched(from);
        if (next < some_.size() && touched_[(size_t)some_[next]].id < to) {  // among those of this block
            for (int id = from; id < to; id++) {
                take_touched(id);
                if (x[id] >= low) ids[n] = id, score[n++] = (double)x[id];
            }
        } else {
            for (int id = from; id < to; id++) {
                ids[n] = id, score[n] = (double)x[id];
                n += x[id] >= low;
            }
        }
    }
    take_touched(n_);
    ids_.resize(n), score_.resize(n);
}

// A floor under the k best, or this one if it is higher: the k-th best peak, which k blocks reach, and so do k tokens.
double Sampler::Row::floor_of_best(int64_t k, double floor) {
    if (2 * k > blocks_) return floor;  // hardly fewer than all
    order_.assign(peaks_.begin(), peaks_.end());
    const auto kth = order_.begin() + (ptrdiff_t)(k - 1);
    std::nth_element(order_.begin(), kth, order_.end(), [](int32_t a, int32_t b) { return a > b; });
    return *kth > kOrderOfMinusInf ? std::max(floor, value_of(*kth)) : floor;
}

// The k best of those at or above `floor`.
void Sampler::Row::gather_best(int64_t k, double floor) {
    gather(floor_of_best(k, floor));
    if ((int64_t)ids_.size() <= k) return;
    const size_t n = ids_.size();
    far_.resize(n), weight_.resize(n), mass_.resize(n);
    for (size_t i = 0; i < n; i++) far_[i] = (score_[i] - peak_) * by_;
    const Edge edge = cut(score_.data(), far_.data(), [](size_t) { return (uint64_t)1; }, (uint64_t)k);
    keep_if([&](size_t i) { return score_[i] > edge.key || (score_[i] == edge.key && i <= edge.last); });
}

// Distances, weights and masses of the list, which must hold the best token.
void Sampler::Row::weigh() {
    const size_t n = ids_.size();
    far_.resize(n), weight_.resize(n), mass_.resize(n);
    for (size_t i = 0; i < n; i++) far_[i] = (score_[i] - peak_) * by_;
    total_ = k_->weigh(far_.data(), (int)n, unit_, weight_.data(), mass_.data());
}

// The shortest run, largest key first, whose masses reach the goal; of equal keys the smaller id is first. All of the list
// when it does not. `far` is a distance (0 or less) that keys follow: a larger key is never farther.
template <class Mass> Sampler::Row::Edge Sampler::Row::cut(const double* key, const double* far, const Mass& mass, uint64_t goal) {
    const size_t n = ids_.size();
    const auto before = [&](int32_t a, int32_t b) { return key[a] > key[b] || (key[a] == key[b] && a < b); };
    order_.clear();
    uint64_t held = 0;
    if (n <= (size_t)kShort) {
        for (size_t i = 0; i < n; i++) order_.push_back((int32_t)i);
    } else {  // bins by distance: all before one of them is inside, and only that one is sorted
        bin_.resize(n);
        uint64_t bins[kBins] = {};
        for (size_t i = 0; i < n; i++) {
            const int bin = (int)std::min(-far[i] * kBinsABit, kBins - 1.0);
            bin_[i] = (uint16_t)bin;
            bins[bin] += mass(i);
        }
        int bin = 0;
        while (bin < kBins - 1 && held + bins[bin] < goal) held += bins[bin++];
        for (size_t i = 0; i < n; i++)
            if (bin_[i] == bin) order_.push_back((int32_t)i);
    }
    if (!std::is_sorted(order_.begin(), order_.end(), before)) std::sort(order_.begin(), order_.end(), before);
    for (int32_t i : order_)
        if ((held += mass((size_t)i)) >= goal) return {key[i], (size_t)i, held};
    return {-INFINITY, n, held};
}

template <class Keep> void Sampler::Row::keep_if(const Keep& keep) {
    size_t to = 0;
    for (size_t i = 0; i < ids_.size(); i++) {
        const bool kept = keep(i);
        ids_[to] = ids_[i], score_[to] = score_[i], far_[to] = far_[i], weight_[to] = weight_[i], mass_[to] = mass_[i];
        to += kept;
    }
    ids_.resize(to), score_.resize(to), far_.resize(to), weight_.resize(to), mass_.resize(to);
}

// ---- filters

// Nearest to the mean distance first. The best token may go, so what is left is weighed anew.
void Sampler::Row::typical(double share) {
    keep_if([&](size_t i) { return mass_[i] > 0; });
    uint64_t sum = 0;
    for (size_t i = 0; i < ids_.size(); i++) sum += whole((weight_[i] * -far_[i]) * unit_);
    const double mean = (double)sum / (double)total_;
    key_.resize(ids_.size());
    for (size_t i = 0; i < ids_.size(); i++) key_[i] = -fabs(-far_[i] - mean);
    const Edge edge = cut(key_.data(), key_.data(), [&](size_t i) { return mass_[i]; }, goal_of(share, total_));
    keep_if([&](size_t i) { return key_[i] > edge.key || (key_[i] == edge.key && i <= edge.last); });
    peak_ = *std::max_element(score_.begin(), score_.end());
    weigh();
}

// How far top_p can reach, in bits: a whole vocabulary of tokens beyond that weighs less than it may leave out. A thousandth
// is for what rounding adds, half a unit a token at most.
double Sampler::Row::reach_of(double share, uint64_t total) const {
    const double spare = (1.0 - share) * (double)total * 0.999;
    return spare >= 1000.0 * n_ ? std::min(kFar, log64(unit_ / spare * (double)n_) * kLog2E + 0.001) : kFar;
}

// top_k, typical_p, top_p and min_p, each on what the one before it left; then the token that was drawn.
int32_t Sampler::Row::filter_and_draw(const SampleParams& params, uint64_t draw) {
    const bool by_k = params.top_k > 0 && params.top_k < n_, by_typical = params.typical_p < 1.0, by_p = params.top_p < 1.0;
    uint64_t goal = 0;
    if (by_k) {
        gather_best(params.top_k, score_at(-kFar));
    } else if (by_p && !by_typical) {  // the whole is weighed block by block, and the list is one that can fill the share
        goal = goal_of(params.top_p, weigh_all());
        const double reach = score_at(-reach_of(params.top_p, all_));
        gather(floor_of_best(std::min(kFew, blocks_ / 2 + 1), reach));
        weigh();
        if (total_ < goal) gather(reach);
    } else {
        const double far = params.min_p > 0.0 && !by_typical ? std::min(kFar, 0.001 - log64(params.min_p) * kLog2E) : kFar;
        gather(score_at(-far));
    }
    weigh();
    if (by_typical) typical(params.typical_p);
    Edge edge{-INFINITY, 0, total_};
    if (by_p) edge = cut(score_.data(), far_.data(), [&](size_t i) { return mass_[i]; }, goal ? goal : goal_of(params.top_p, total_));
    const auto inside = [&](size_t i) {
        return (score_[i] > edge.key || (score_[i] == edge.key && i <= edge.last)) && weight_[i] >= params.min_p;
    };
    if (params.min_p > 0.0) {
        edge.held = 0;
        for (size_t i = 0; i < ids_.size(); i++) edge.held += inside(i) ? mass_[i] : 0;
    }
    uint64_t left = (uint64_t)(((Wide)draw * edge.held) >> 53);
    for (size_t i = 0; i < ids_.size(); i++) {
        if (!inside(i)) continue;
        if (left < mass_[i]) return ids_[i];
        left -= mass_[i];
    }
    return kRuledOut;  // not reached: what is left is below what is inside
}

int32_t Sampler::Row::choose(const SampleParams& params, int64_t position, const Seen& seen, const uint8_t* allowed) {
    const bool held_back = position < params.min_tokens && !params.stops.empty();
    if (allowed || held_back || !params.bias.empty() || (params.penalizes() && seen.size)) adjust(params, seen, held_back, allowed);
    const int32_t greedy = best();
    if (greedy < 0 || params.temperature == 0.0 || params.top_k == 1) return greedy;
    by_ = std::min(1.0 / params.temperature * kLog2E, DBL_MAX);
    const uint64_t draw = draw53(params.seed, (uint64_t)position);
    const bool by_k = params.top_k > 0 && params.top_k < n_;
    if (!by_k && params.typical_p >= 1.0 && params.top_p >= 1.0 && params.min_p <= 0.0) return draw_from_all(draw);
    return filter_and_draw(params, draw);
}

// Of the logits as they are: log-softmax, how many come before, and the best.
Told Sampler::Row::tell(const float* logits, int32_t token, int top) {
    if (x_ != logits || !touched_.empty()) open(logits);
    peak_ = value_of(high_), by_ = kLog2E;
    const double total = peak_ + log64((double)weigh_all() / unit_);
    const float own = logits[token];
    Told told;
    told.logprob = (double)own - total;
    told.rank = 1 + k_->count_above(logits, n_, own) + k_->count_equal(logits, token, own);
    if (!top) return told;
    gather_best(std::min(top, n_), -INFINITY);
    order_.resize(ids_.size());
    for (size_t i = 0; i < order_.size(); i++) order_[i] = (int32_t)i;
    std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) { return score_[(size_t)a] > score_[(size_t)b]; });
    for (int32_t i : order_) told.top.emplace_back(ids_[(size_t)i], score_[(size_t)i] - total);
    return told;
}

}  // namespace quire
