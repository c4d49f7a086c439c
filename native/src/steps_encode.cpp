// Attention of encoders: every row of a sequence sees every row of it that is in the step, and nothing is cached. One step
// lays keys and values out as pages of float32 (kernels/attention.h), which every head's queries then read; the next one
// attends. Pages and chunks are counted from a sequence's first row, so a result does not depend on what lies beside it.
#include <algorithm>
#include <stdexcept>

#include "plan.h"

namespace quire {

// Keys and values of one step: [kv_head][page] of cells. All encode steps of a plan use the same memory, one after the other.
struct EncodePages {
    struct Tile {
        int sequence, row, rows;
    };
    KvCell cell;
    int kv_heads = 0, rows_per_tile = 1;
    std::vector<int> first;  // page of each sequence, and the end
    std::vector<int32_t> numbers;  // 0, 1, 2, …: a page table for everybody
    std::vector<Tile> tiles;
    Mapping memory;

    void divide(const BatchView& b) {
        first.assign(1, 0);
        tiles.clear();
        for (int s = 0; s < b.sequences; s++) {
            const int begin = b.q_start[s], rows = b.q_start[s + 1] - begin;
            first.push_back(first.back() + (rows + kPage - 1) / kPage);
            for (int r = 0; r < rows; r += rows_per_tile) tiles.push_back({s, begin + r, std::min(rows_per_tile, rows - r)});
        }
        // The longest first, so that no thread is left alone with one at the end.
        std::stable_sort(tiles.begin(), tiles.end(), [&](const Tile& x, const Tile& y) { return pages(x.sequence) > pages(y.sequence); });
        while ((int)numbers.size() < first.back()) numbers.push_back((int32_t)numbers.size());
        const size_t bytes = (size_t)first.back() * (size_t)kv_heads * cell.bytes();
        if (bytes > memory.size()) memory = Mapping(bytes, false);
    }
    int pages(int sequence) const { return first[(size_t)sequence + 1] - first[(size_t)sequence]; }
    uint8_t* at(int head, int page) { return memory.data() + ((size_t)head * (size_t)first.back() + (size_t)page) * cell.bytes(); }
};

namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("plan: " + what); }

struct LayOut : Step {
    const char* name() const override { return "encode"; }
    Slot k, v;
    std::shared_ptr<EncodePages> pages;
    bool divides = false;

    void prepare(const Run& run) override {
        if (divides) pages->divide(run.batch);
    }
    int items(const Run&) const override { return pages->first.back(); }
    void work(const Run& run, int page, int) const override {
        const auto after = std::upper_bound(pages->first.begin(), pages->first.end(), page);
        const int s = (int)(after - pages->first.begin()) - 1;
        const int row = run.batch.q_start[s] + (page - pages->first[(size_t)s]) * kPage;
        const int rows = std::min(kPage, run.batch.q_start[s + 1] - row), D = pages->cell.head_dim;
        for (int h = 0; h < pages->kv_heads; h++)
            for (int r = 0; r < rows; r++)
                run.plan.kernels().store_kv(run.plan.floats(k, row + r) + h * D, run.plan.floats(v, row + r) + h * D, 1, pages->cell,
                                            pages->at(h, page), r);
    }
};

struct Encode : Step {
    const char* name() const override { return "encode"; }
    Slot q, out;
    std::shared_ptr<EncodePages> pages;
    int group = 1;
    float scale = 1;

    static size_t scratch(int head_dim) { return attend_scratch() + 2 * kMaxAttend * PartShape(head_dim).floats * sizeof(float); }

    int items(const Run&) const override { return (int)pages->tiles.size() * pages->kv_heads; }

    void work(const Run& run, int i, int thread) const override {
        const EncodePages::Tile& tile = pages->tiles[(size_t)i % pages->tiles.size()];
        const int head = i / (int)pages->tiles.size(), D = pages->cell.head_dim, queries = tile.rows * group;
        const int length = run.batch.q_start[tile.sequence + 1] - run.batch.q_start[tile.sequence];
        const size_t stride = PartShape(D).floats;
        float* sums = (float*)(run.plan.scratch(thread) + attend_scratch());
        float* parts = sums + kMaxAttend * stride;
        AttendArgs a;
        a.cells = pages->at(head, pages->first[(size_t)tile.sequence]);
        a.page_stride = pages->cell.bytes();
        a.cell = pages->cell;
        a.ahead = 0;
        a.scale = scale;
        a.scratch = run.plan.scratch(thread);
        auto column = [&](int j) { return (head * group + j % group) * D; };
        for (int first = 0; first < queries; first += kMaxAttend) {
            a.count = std::min(kMaxAttend, queries - first);
            for (int c = 0; c * kChunk < length; c++) {
                a.pages = pages->numbers.data() + c * (kChunk / kPage);
                for (int j = 0; j < a.count; j++) {
                    a.query[j] = run.plan.floats(q, tile.row + (first + j) / group) + column(first + j);
                    a.part[j] = (c ? parts : sums) + (size_t)j * stride, a.sum[j] = c ? sums + (size_t)j * stride : nullptr;
                    a.from[j] = 0;
                    a.seen[j] = std::min(kChunk, length - c * kChunk);
                }
                run.plan.kernels().attend(a);
            }
            for (int j = 0; j < a.count; j++)
                run.plan.kernels().finish(sums + (size_t)j * stride, D,
                                          run.plan.floats(out, tile.row + (first + j) / group) + column(first + j));
        }
    }
};

}  // namespace

void Plan::encode(int q, int k, int v, int heads, float scale, int out) {
    auto lay = std::make_unique<LayOut>();
    auto step = std::make_unique<Encode>();
    step->q = floats_slot(q, "encode's queries");
    step->out = floats_slot(out, "encode's output");
    lay->k = floats_slot(k, "encode's keys");
    lay->v = floats_slot(v, "encode's values");
    if (heads < 1 || step->q.width % heads || step->out.width != step->q.width || lay->v.width != lay->k.width ||
        !step->q.per_token || !step->out.per_token || !lay->k.per_token || !lay->v.per_token)
        refuse("encode: shapes differ");
    const int D = step->q.width / heads, kv_heads = lay->k.width / D;
    if (D % 8 || D > kMaxHeadDim || lay->k.width % D || heads % kv_heads)
        refuse("encode: heads must have a multiple of 8 columns up to " + std::to_string(kMaxHeadDim) + ", and share keys evenly");
    // Another shape of heads gets pages of its own; all of one shape are divided once, by the first of them.
    if ((lay->divides = !encode_pages_ || encode_pages_->cell.head_dim != D || encode_pages_->kv_heads != kv_heads ||
                        encode_pages_->rows_per_tile != std::max(1, kAttendTile / (heads / kv_heads)))) {
        encode_pages_ = std::make_shared<EncodePages>();
        encode_pages_->cell = {KvType::Float, D, 0};
        encode_pages_->kv_heads = kv_heads;
        encode_pages_->rows_per_tile = std::max(1, kAttendTile / (heads / kv_heads));
    }
    lay->pages = step->pages = encode_pages_;
    step->group = heads / kv_heads;
    step->scale = scale;
    need_scratch(Encode::scratch(D));
    steps_.push_back(std::move(lay));
    steps_.push_back(std::move(step));
}

}  // namespace quire
