// The recorded program: slots in one arena, steps in order, the KV pool. Running it walks the steps on the thread pool:
// a step begins when the one before it is complete; within a step, threads take items as they come free. What an item computes never depends on
// which thread takes it, so results do not depend on the thread count.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "adapter.h"
#include "batch.h"
#include "kernels.h"
#include "operand.h"
#include "routing.h"
#include "thread_pool.h"
#include "weight.h"

namespace quire {

struct Vector {  // a float32 vector weight, padded to 16
    int n = 0;
    Mapping memory;
    const float* data() const { return (const float*)memory.data(); }
};

// The KV pool: [page][layer][kv_head] of cells, so that a page is one piece of memory.
struct KvShape {
    int layers = 0, pages = 0, kv_heads = 0, head_dim = 0;
    KvType type = KvType::Half;
    int latent = 0;  // not 0: one key per token, whose first columns are the value
    size_t state = 0;  // not 0: no keys and values, a page is one state of so many floats per layer

    KvCell cell() const { return {type, head_dim, latent}; }
    size_t layer_bytes() const { return state ? state * sizeof(float) : (size_t)kv_heads * cell().bytes(); }
    size_t page_bytes() const { return (size_t)layers * layer_bytes(); }
};

// The pool of a group of layers.
struct KvPool {
    KvShape shape;
    Mapping memory;
    uint8_t* cells = nullptr;
    size_t written = 0, touched = 0;  // bytes from the beginning: up to the last page that a step has written, and there for sure
    mutable uint8_t endless = 0;  // once something was written that is not finite; an atomic
};

// A tensor of the program: rows of float32 (padded to 16), or panels of rows in int8 (QuantShape). A row per token, or per
// logit row. `quant` is how many bytes a number of a panel has, two in a fine one; 0: no panels.
struct Slot {
    size_t offset = 0, stride = 0;  // bytes; from one row to the next, or from one panel to the next
    int width = 0;
    int quant = 0;
    bool per_token = true;
    QuantShape shape;

    static size_t stride_of(int width, int quant) { return quant ? QuantShape(width, quant == 2).bytes : ((size_t)width + 15) / 16 * 64; }
    static size_t bytes_of(int width, int quant, int rows) {
        return stride_of(width, quant) * (quant ? ((size_t)rows + 15) / 16 : (size_t)rows);
    }
};

class Plan;

struct Run {
    const Plan& plan;
    const BatchView& batch;
    int threads;
    const std::vector<Stretch>&by_token, &by_row;  // rows with an adapter: of tensors per token, and per logit row

    int rows(const Slot& s) const { return s.per_token ? batch.tokens : batch.rows; }
    const std::vector<Stretch>& adapted(const Slot& s) const { return s.per_token ? by_token : by_row; }
};

struct Step {
    virtual ~Step() = default;
    virtual const char* name() const = 0;  // for profiles
    virtual void prepare(const Run&) {}  // on one thread, before the run
    virtual int items(const Run&) const = 0;
    virtual void work(const Run&, int item, int thread) const = 0;
    // Steps that wait for their weights: what a thread will most likely read first.
    virtual bool streams() const { return false; }
    virtual const uint8_t* begins(int /*thread*/) const { return nullptr; }
    const Step* next = nullptr;  // the one of those that comes after this one, also in the run after this one
    // Whether it will leave the peaks of that slot's rows there (see Plan::peaks), as it makes them.
    virtual bool leaves_peaks(int /*slot*/, int32_t* /*to*/, size_t /*stride*/) { return false; }
};

// One weight of a linear step. Slots are -1 where there is none.
struct Segment {
    std::shared_ptr<const Matrix> weight;
    std::shared_ptr<const Vector> bias;
    int in = -1, out = -1, residual = -1;
    int site = -1, shrunk = -1;  // where adapters add to it, and the slot of what shrink makes for that
};

// What attention may have beside its scale.
struct AttendOptions {
    int window = 0;                       // tokens that a row sees, its own among them; 0: all
    float cap = 0;                        // 0: none
    std::shared_ptr<const Vector> sinks;  // a score per head that has no value
    int group = 0;                        // whose pool it reads; layers count inside it
    bool stores = false;                  // it may do what the step before it, which stores, does: that one's inputs are still there
    bool wanted = false;                  // of its results, those of logit rows alone are read
};

// The weights of a mixture: one matrix per expert; biases are empty, or one vector per expert.
struct Experts {
    std::vector<std::shared_ptr<const Matrix>> gate, up, down;
    std::vector<std::shared_ptr<const Vector>> gate_bias, up_bias, down_bias;
    Elementwise act = Elementwise::swiglu;
    float limit = 0;  // the number that the activation takes, if it is clamped
};

class Plan {
public:
    Plan(std::shared_ptr<ThreadPool> pool, const Kernels* kernels, KvShape kv, int max_tokens, int max_rows,
         size_t arena_bytes);
    ~Plan();

    int slot(size_t offset, int width, int quant, bool per_token);
    int pool(KvShape kv);  // a further group of layers; the first is 0

    // Each checks its shapes, and throws std::invalid_argument. See steps_*.cpp.
    void embed(std::shared_ptr<const Matrix> table, int out);
    // Over each of a row's `heads` parts; the weight is one part wide, or has one for each.
    void norm(int x, std::shared_ptr<const Vector> weight, float eps, int heads, int out, int quant_out);
    void layer_norm(int x, std::shared_ptr<const Vector> weight, std::shared_ptr<const Vector> bias, float eps, int heads, int out,
                    int quant_out);
    void quantize(int x, int out);
    void elementwise(Elementwise op, const std::vector<int>& inputs, float number, int out);
    void join(int a, int b, int heads, int out);
    void take(int x, int out);
    // `axes` says for each frequency along which axis of a token's positions it turns; empty: there is one position.
    int rope_table(const float* frequencies, int dim, bool pairs, double magnitude, std::vector<int> axes = {});
    void rope(int x, int table, int heads, int out);
    void linear(std::vector<Segment> segments);
    void gated(Elementwise act, Segment gate, Segment up, int out, int quant_out);  // an activation of two linears
    void head_linear(int x, std::shared_ptr<const Matrix> weight, int heads, int out);
    // Experts read x where they are dense, and quant where they are affine; -1 where none is. `room` is where in the arena
    // moe_bytes() lie that nobody else uses meanwhile.
    void moe(int x, int quant, int logits, Experts experts, Routing routing, int out, size_t room);
    // Stores k and v; with a table (not -1) rotates k, and q into q_out, on the way.
    void store(int k, int v, int table, int q, int q_out, int layer, int group = 0);
    void attend(int q, int layer, int heads, float scale, int out, int quant_out, const AttendOptions& options = {});
    void store_latent(int k, int layer, int group = 0);
    void attend_latent(int q, int layer, int heads, float scale, int out, int group = 0, bool wanted = false);
    // Over a group of states; `at`: floats of a layer's state before this step's. See steps_state.cpp.
    void conv(int x, std::shared_ptr<const Vector> weight, int layer, int group, size_t at, int out);
    void delta_rule(int qkv, int a, int b, std::shared_ptr<const Vector> decay, std::shared_ptr<const Vector> bias, int layer, int group,
                    int key_heads, int heads, int key_dim, size_t at, int out);
    // Every row of a sequence sees every row of it that is in the step.
    void encode(int q, int k, int v, int heads, float scale, int out);
    // Adapters: see adapter.h. shrink fills a slot of the site's rank for each of several sites; adapt adds to y.
    int site(int n, int k, int rank, int slots);
    void shrink(int x, const std::vector<std::pair<int, int>>& outs);
    void adapt(int y, int shrunk, int site, int out);
    void place(int site, int slot, Pair pair);  // between runs; an empty pair takes it away
    void output(int slot);
    void input(int slot);

    // Runs the batch. `inputs` has a pointer for each input() in order: rows of its width, contiguous.
    void run(const BatchView& batch, const std::vector<const float*>& inputs);
    // Makes the system give the next `piece` bytes of keys' and values' memory, up to `ahead` beyond what was written: it clears memory when
    // that is first touched, which a step would have to wait for. False: all of it is there.
    bool touch(size_t piece, size_t ahead);
    // Copies pages of a group's pool, layers [first, first + layers) of each, to or from rows that follow one another: of a page, what its
    // layers have, one after another. Takes no lock: nobody may write pages that are read, nor run a step over pages that are written.
    void read_pages(int group, const int64_t* pages, size_t count, int first, int layers, uint8_t* to) const;
    void write_pages(int group, const int64_t* pages, size_t count, int first, int layers, const uint8_t* from);
    int groups() const { return (int)pools_.size(); }
    const float* output_data() const { return floats(slots_[(size_t)output_], 0); }
    const Slot& output_slot() const { return slots_[(size_t)output_]; }
    // The best of each kSampleBlock columns of a row of the output, as the kernel of that name tells it, but kNoPeak where it found
    // something that is not a number. Nothing where the output comes from elsewhere than a product.
    const int32_t* peaks(int row) const { return peaks_ ? peaks_ + (size_t)row * peaks_stride() : nullptr; }
    size_t peaks_stride() const { return ((size_t)output_slot().width + kSampleBlock - 1) / kSampleBlock; }
    const std::vector<int>& inputs() const { return inputs_; }
    int ran(bool per_token) const { return per_token ? ran_tokens_ : ran_rows_; }  // rows of the last run
    const Slot& at(int slot) const { return slots_[(size_t)slot]; }
    const Slot& floats_of(int slot) const { return floats_slot(slot, "what is kept"); }

    // For steps.
    float* floats(const Slot& s, int r) const { return (float*)(arena_ + s.offset + (size_t)r * s.stride); }
    Operand operand(const Slot& s, int r) const {  // from row r on; r a multiple of 16
        Operand o;
        if (s.quant) o.panel = panel(s, r), o.shape = s.shape;
        else o.rows = floats(s, r), o.stride = s.stride / sizeof(float);
        return o;
    }
    uint8_t* arena(size_t offset) const { return arena_ + offset; }
    uint8_t* panel(const Slot& s, int r) const { return arena_ + s.offset + (size_t)(r / 16) * s.stride; }  // that holds row r
    void quantize_row(const Slot& s, int r, const float* x, int first_group, int groups) const {
        kernels_->quantize(x, first_group, groups, panel(s, r), r % 16, s.shape);
    }
    uint8_t* scratch(int thread) const { return scratch_ + (size_t)thread * scratch_bytes_; }
    const Kernels& kernels() const { return *kernels_; }
    const Site& site(int i) const { return *sites_[(size_t)i]; }
    // Adds what adapters add to columns [16 * b0, 16 * b1) of rows [m0, m0 + m): out is the first of these.
    void expand(const Run& run, int site, const Slot& shrunk, int b0, int b1, int m0, int m, float* out, size_t stride) const;
    const KvShape& kv(int group) const { return pools_[(size_t)group].shape; }
    uint8_t* cells(int group, int layer, int page) const {  // of every head
        const KvPool& p = pools_[(size_t)group];
        return p.cells + (size_t)page * p.shape.page_bytes() + (size_t)layer * p.shape.layer_bytes();
    }
    bool finite(int group) const { return !__atomic_load_n(&pools_[(size_t)group].endless, __ATOMIC_RELAXED); }
    void endless(int group) const { __atomic_store_n(&pools_[(size_t)group].endless, (uint8_t)1, __ATOMIC_RELAXED); }
    std::string describe() const;

    // Where the time goes: from now on, seconds that threads spend in the items of each kind of step, all threads together.
    void profile(bool on);
    std::vector<std::pair<std::string, double>> profiled() const;  // by kind, in order of appearance

private:
    friend struct RopeTable;
    std::shared_ptr<struct Schedule> schedule(int heads, int kv_heads, int width, int window, int group, bool& first);
    size_t page_part(int group, const int64_t* pages, size_t count, int first, int layers) const;  // bytes of a row; checked
    const KvShape& layer_of(int group, int layer, bool latent);  // checked; from now on that pool's tables are, too
    const KvShape& states_of(int group, int layer, size_t end);  // the same for a pool of states, up to that float of a layer's
    const Slot& floats_slot(int slot, const char* what) const;
    const Slot& quant_slot(int slot, const char* what) const;
    void check_segment(const Segment& s) const;
    void check_site(int site, int shrunk, int n, bool per_token) const;
    void add_norm(int x, std::shared_ptr<const Vector> weight, std::shared_ptr<const Vector> bias, bool centred, float eps, int heads,
                  int out, int quant_out);
    void need_scratch(size_t bytes);
    BatchView own(const BatchView& given);
    void stretches(const BatchView& batch);  // which rows use adapters

    std::shared_ptr<ThreadPool> pool_;
    const Kernels* kernels_;
    std::vector<KvPool> pools_;
    BatchLimits limits_;
    std::vector<Slot> slots_;
    std::vector<std::unique_ptr<Step>> steps_;
    std::vector<struct RopeTable*> tables_;  // owned by steps_
    std::vector<std::shared_ptr<struct Schedule>> schedules_;  // of attention, one per number of heads, window and group
    std::shared_ptr<struct EncodePages> encode_pages_;
    std::vector<std::unique_ptr<Site>> sites_;  // steps hold pointers
    std::vector<Stretch> by_token_, by_row_;  // of this run
    std::vector<int> inputs_;
    int output_ = -1, ran_tokens_ = 0, ran_rows_ = 0;
    Mapping arena_memory_, scratch_memory_, peaks_memory_;
    int32_t* peaks_ = nullptr;
    uint8_t *arena_ = nullptr, *scratch_ = nullptr;
    size_t scratch_bytes_ = 0;
    std::vector<int> items_;  // per step, of this run
    std::unique_ptr<std::atomic<int64_t>[]> spent_;  // per step, nanoseconds; none: not profiling
    std::vector<int32_t> staging_;  // this run's batch
    std::mutex running_;
};

// What moe needs between its steps, for so many rows. gathered, inner: the forms (panels or not) that gate and up, and down, read.
struct Forms {
    int rounded = 0;  // as Slot::quant
    bool whole = false;
};
size_t moe_bytes(int rows, int experts, int top, int width, int inner_width, Forms gathered, Forms inner);

}  // namespace quire
