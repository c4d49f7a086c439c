// Every kernel of every kernel set this CPU can run, against the scalar one, bit for bit, on random inputs of every layout.
// Needs no Python: it also runs cross-compiled under an emulator, and under the sanitizers. Each set prints a digest of all
// its results: it must be the same for every set on every machine.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../src/batch.h"
#include "../src/exp64.h"
#include "../src/half.h"
#include "../src/kernels.h"
#include "../src/pack.h"
#include "../src/plan.h"
#include "../src/sample.h"

using namespace quire;

namespace {

int failures = 0, checks = 0;
std::mt19937 random_bits(7);

// Roughly normal, from integers alone: the same on every machine, so that the digests can be compared between them.
float normal() {
    int sum = 0;
    for (int i = 0; i < 4; i++) sum += (int)(random_bits() & 0xffff) - 0x8000;
    return (float)sum / 37837.0f;
}
int below(int n) { return (int)(random_bits() % (unsigned)n); }

uint64_t digest = 14695981039346656037u;  // of everything that one kernel set computed

void same(const char* isa, const char* what, const void* a, const void* b, size_t bytes) {
    checks++;
    for (size_t i = 0; i < bytes; i++) digest = (digest ^ ((const uint8_t*)a)[i]) * 1099511628211u;
    if (!memcmp(a, b, bytes)) return;
    failures++;
    printf("FAILED %s %s\n", isa, what);
}

// Panels one after the other. What only some machines keep in them is compared, but not in the digest, which is the same everywhere.
void same_panels(const char* isa, const char* what, const std::vector<uint8_t>& a, const std::vector<uint8_t>& b, const QuantShape& shape) {
    for (size_t at = 0; at < a.size(); at += shape.bytes) {
        same(isa, what, a.data() + at, b.data() + at, shape.excess);
        if (memcmp(a.data() + at + shape.excess, b.data() + at + shape.excess, shape.bytes - shape.excess)) failures++, printf("FAILED %s %s\n", isa, what);
    }
}

std::vector<float> floats(size_t n, float scale = 1) {
    std::vector<float> v(n);
    for (float& x : v) x = normal() * scale;
    return v;
}

struct Form {
    const char* name;
    int bits, group, offset;
    Scales scales;
    bool bias;
    bool wide = false;
};

constexpr Form kForms[] = {
    {"4", 4, 32, 8, Scales::Half, false},     {"4 bias", 4, 32, 0, Scales::Half, true},
    {"5", 5, 32, 16, Scales::Half, false},    {"5 bias", 5, 32, 0, Scales::Half, true},
    {"8", 8, 32, 128, Scales::Half, false},   {"8 bias g16", 8, 16, 3, Scales::Half, true},
    {"2 nibble", 2, 16, 0, Scales::Nibble, true}, {"3 byte", 3, 16, 4, Scales::Byte, false},
    {"4 byte", 4, 32, 0, Scales::Byte, true}, {"5 byte", 5, 32, 0, Scales::Byte, true},
    {"6 byte", 6, 16, 32, Scales::Byte, false}, {"6 g32", 6, 32, 0, Scales::Half, true},
    {"2 g32", 2, 32, 1, Scales::Half, false}, {"3 bias", 3, 32, 0, Scales::Half, true},
    {"8 wide byte", 8, 16, 128, Scales::Byte, false, true}, {"5 wide byte", 5, 32, 9, Scales::Byte, false, true},
    {"4 wide", 4, 32, 0, Scales::Half, true, true}, {"14", 14, 32, 0, Scales::Half, false},
};

// A tile of six-bit codes that came as four bits of each and then the upper two, which is how the digest knows them.
void place_six(uint8_t* tile, uint8_t less) {
    for (int lane = 0; lane < 64; lane++) {
        int q[8];
        for (int i = 0; i < 8; i++) {
            const int low = tile[64 * (i % 4) + lane] >> (i < 4 ? 0 : 4) & 15, high = tile[256 + 64 * (i / 4) + lane] >> (2 * (i % 4)) & 3;
            q[i] = (low | high << 4) ^ less;
        }
        for (int j = 0; j < 6; j++) tile[64 * j + lane] = (uint8_t)(q[j + j / 3] << 2 | (q[j < 3 ? 3 : 7] >> (4 - 2 * (j % 3)) & 3));
    }
}

// A tile of four-bit codes, which the digest knows as quads j and j + 4 of the same row in a byte.
void place_four(uint8_t* tile) {
    uint8_t q[8][64];
    for (int lane = 0; lane < 64; lane++)
        for (int i = 0; i < 8; i++) q[i][lane] = tile[64 * (i % 4) + lane] >> (i < 4 ? 0 : 4) & 15;
    for (int i = 0; i < 8; i++)
        for (int lane = 0; lane < 32; lane++) tile[32 * i + lane] = (uint8_t)(q[i][lane] | (q[i][32 + lane] ^ 8) << 4);
}

// The same matrix as this machine lays it out, of one whose regions come one after the other, which is how the digest knows it.
Matrix place_tiles(const Matrix& from) {
    Matrix to = from;
    to.lay_out();
    for (int b = 0; b < to.blocks; b++) {
        const uint8_t* own = from.block(b);
        uint8_t* block = to.block(b);
        for (size_t t = 0; t < (size_t)to.tiles; t++) {
            memcpy(block + t * to.code_step, own + t * from.code_step, to.code_bytes);
            memcpy(block + to.scale_at + t * to.factor_step, own + from.scale_at + t * from.factor_step, to.scale_bytes);
            if (to.has_biases()) memcpy(block + to.bias_at + t * to.factor_step, own + from.bias_at + t * from.factor_step, to.scale_bytes);
        }
        memcpy(to.supers(b), from.supers(b), from.block_bytes - from.super_at);
    }
    return to;
}

// `extreme`: every second block has the largest codes, the others the smallest.
Matrix random_affine(const Form& f, int n, int k, bool extreme = false) {
    Matrix w;
    w.type = Type::Affine;
    w.n = n, w.k = k, w.bits = f.bits, w.group = f.group, w.offset = f.offset, w.scales = f.scales, w.bias = f.bias, w.wide = f.wide;
    w.lay_out(false);
    uint8_t* p = w.memory.data();
    for (size_t i = 0; i < w.memory.size(); i++) p[i] = (uint8_t)random_bits();
    for (int b = 0; extreme && b < w.blocks; b++) memset(w.block(b), b % 2 ? 0xff : 0, (size_t)w.tiles * w.code_bytes);
    for (int b = 0; b < w.blocks; b++) {  // the regions of floats must hold finite ones
        uint8_t* block = w.block(b);
        const uint8_t less = stored_less(f.bits, f.bias);
        for (int t = 0; f.bits == 6 && t < w.tiles; t++) place_six(block + (size_t)t * w.code_bytes, less);
        for (int t = 0; f.bits == 4 && kNibbleRows && t < w.tiles; t++) place_four(block + (size_t)t * w.code_bytes);
        for (int t = 0; f.bits == 14 && t < w.tiles; t++) place_six(block + (size_t)t * w.code_bytes + 512, stored_less(6, false));
        for (size_t i = 0; f.bits >= 8 && i < (size_t)w.tiles * w.code_bytes; i++)
            if (f.bits == 8 || i % w.code_bytes < 512) block[i] ^= less;
        auto factors = [&](size_t from, size_t to) {
            const size_t width = f.wide ? 4 : 2;
            for (size_t i = from; i + width <= to; i += width) {
                const float value = normal() * 0.05f;
                const uint16_t half = float_to_half(value);
                memcpy(block + i, f.wide ? (const void*)&value : (const void*)&half, width);
            }
        };
        if (f.scales == Scales::Half) factors(w.scale_at, w.block_bytes);
        else factors(w.super_at, w.block_bytes);
    }
    return place_tiles(w);
}

void test_affine(const Kernels& isa, const Kernels& scalar) {
    for (const Form& f : kForms) {
        const int n = 16 * (1 + below(4)), k = 256 * (1 + below(2));
        Matrix w = random_affine(f, n, k);
        QuantShape shape(k, true);
        const int most = 19;
        std::vector<float> x = floats((size_t)most * (size_t)k), bias = floats((size_t)n), residual = floats((size_t)(most * n));
        for (int i = 0; i < 32; i++) x[(size_t)i] = 0;
        for (int i = 32; i < 64; i++) x[(size_t)i] *= 1e-38f;
        const size_t panels = (size_t)(most + 15) / 16;
        std::vector<uint8_t> qa(shape.bytes * panels), qb(shape.bytes * panels), alone(shape.bytes);
        for (int m = 0; m < most; m++) {
            isa.quantize(&x[(size_t)(m * k)], 0, k / 32, qa.data() + shape.bytes * (size_t)(m / 16), m % 16, shape);
            scalar.quantize(&x[(size_t)(m * k)], 0, k / 32, qb.data() + shape.bytes * (size_t)(m / 16), m % 16, shape);
        }
        same_panels(isa.name, "quantize", qa, qb, shape);
        for (int m : {1, 2, 3, 5, 8, 19}) {
            std::vector<float> a((size_t)(m * n), 1), b((size_t)(m * n), 2);
            Epilogue e;
            e.out_stride = e.residual_stride = (size_t)n;
            if (m % 2) e.bias = bias.data(), e.residual = residual.data();
            e.out = a.data();
            isa.linear_affine(w, 0, w.blocks, qa.data(), shape, m, e);
            for (int r = 0; r < m; r++) {  // the oracle takes rows one by one: batching must not show
                e.out = b.data() + (size_t)(r * n);
                e.residual = m % 2 ? residual.data() + (size_t)(r * n) : nullptr;
                scalar.quantize(&x[(size_t)(r * k)], 0, k / 32, alone.data(), 0, shape);
                scalar.linear_affine(w, 0, w.blocks, alone.data(), shape, 1, e);
            }
            same(isa.name, f.name, a.data(), b.data(), a.size() * sizeof(float));
        }
        std::vector<float> a((size_t)k), b((size_t)k);
        for (int row : {0, n / 2, n - 1}) {
            isa.dequantize_row(w, row, a.data());
            scalar.dequantize_row(w, row, b.data());
            same(isa.name, "dequantize_row", a.data(), b.data(), a.size() * sizeof(float));
        }
    }
}

// More rows than fit a panel, or more columns than are taken at a time; from the second block on, with another one to ask for.
void test_large(const Kernels& isa, const Kernels& scalar, int n, int k, const std::vector<int>& rows) {
    const int most = *std::max_element(rows.begin(), rows.end());
    const QuantShape shape(k, true);
    const std::vector<float> x = floats((size_t)(most * k)), bias = floats((size_t)n), residual = floats((size_t)(most * n));
    std::vector<uint8_t> panels(shape.bytes * (size_t)((most + 15) / 16), 0xff);
    for (int m = 0; m < most; m++)
        scalar.quantize(&x[(size_t)(m * k)], 0, k / 32, panels.data() + shape.bytes * (size_t)(m / 16), m % 16, shape);
    for (const Form& f : kForms) {
        if (f.scales == Scales::Byte && k % 256) continue;  // whole super-blocks
        const Matrix w = random_affine(f, n, k);
        std::vector<float> a((size_t)(most * n)), b((size_t)(most * n));
        Epilogue e;
        e.out_stride = e.residual_stride = (size_t)n;
        e.bias = bias.data() + 16;
        for (int r = 0; r < most; r++) {
            e.out = b.data() + (size_t)(r * n) + 16, e.residual = residual.data() + (size_t)(r * n) + 16;
            scalar.linear_affine(w, 1, w.blocks, panels.data() + shape.bytes * (size_t)(r / 16) + QuantShape::at(0, r % 16), shape.from(0, r % 16), 1, e);
        }
        e.out = a.data() + 16, e.residual = residual.data() + 16, e.then = w.block(0);
        for (int m : rows) {
            isa.linear_affine(w, 1, w.blocks, panels.data(), shape, m, e);
            same(isa.name, f.name, a.data(), b.data(), (size_t)(m * n) * sizeof(float));
            std::fill(a.begin(), a.end(), 0.0f);
        }
    }
}

// The largest and smallest codes against numbers that are all as large as their group allows, of either sign: no sum may overflow.
void test_extremes(const Kernels& isa, const Kernels& scalar) {
    const int n = 64, k = 512, most = 32;
    const QuantShape shape(k, true);
    std::vector<float> x((size_t)(most * k));
    for (size_t i = 0; i < x.size(); i++) {
        const size_t row = i / (size_t)k;
        x[i] = row % 4 == 0 ? 1.0f : row % 4 == 1 ? -1.0f : row % 4 == 2 ? (i % 2 ? 1.0f : -1.0f) : random_bits() % 2 ? 1.0f : -1.0f;
    }
    std::vector<uint8_t> panels(shape.bytes * (most / 16));
    for (int m = 0; m < most; m++)
        scalar.quantize(&x[(size_t)(m * k)], 0, k / 32, panels.data() + shape.bytes * (size_t)(m / 16), m % 16, shape);
    for (const Form& f : kForms) {
        const Matrix w = random_affine(f, n, k, true);
        std::vector<float> a((size_t)(most * n)), b((size_t)(most * n));
        Epilogue e;
        e.out_stride = (size_t)n;
        e.out = b.data();
        scalar.linear_affine(w, 0, w.blocks, panels.data(), shape, most, e);
        e.out = a.data();
        for (int m : {1, 2, 4, 8, 16, most}) {
            isa.linear_affine(w, 0, w.blocks, panels.data(), shape, m, e);
            same(isa.name, f.name, a.data(), b.data(), (size_t)(m * n) * sizeof(float));
        }
    }
}

void test_dense(const Kernels& isa, const Kernels& scalar, ThreadPool& pool) {
    for (int type = 0; type < 3; type++) {
        const int n = 33, k = 70 + type, m = 7, wide = 48;
        std::vector<float> source = floats((size_t)(n * k)), x = floats((size_t)(m * k));
        std::vector<uint16_t> narrow((size_t)(n * k));
        for (size_t i = 0; i < narrow.size(); i++)
            narrow[i] = type == 1 ? float_to_half(source[i]) : (uint16_t)(float_to_bits(source[i]) >> 16);
        const void* data = type == 0 ? (const void*)source.data() : (const void*)narrow.data();
        Matrix w = pack_dense(pool, (Type)type, data, n, k);
        std::vector<float> a((size_t)(m * wide)), b((size_t)(m * wide));
        Epilogue e;
        e.out_stride = (size_t)wide;
        e.out = a.data();
        isa.linear_dense(w, 0, w.blocks, x.data(), (size_t)k, m, e);
        e.out = b.data();
        scalar.linear_dense(w, 0, w.blocks, x.data(), (size_t)k, m, e);
        same(isa.name, "dense", a.data(), b.data(), a.size() * sizeof(float));
    }
}

// Any number of groups, from any group on: kernels may take some together, and what lies beside them is not theirs.
void test_quantize(const Kernels& isa, const Kernels& scalar) {
    const int most = 21;
    const QuantShape shape(32 * most, true);
    for (int first : {0, 3})
        for (int groups = 0; first + groups <= most; groups++) {
            std::vector<float> x = floats((size_t)(32 * groups), 5);
            const float special[] = {0.0f, -0.0f, 1e-37f, 3e38f, -3e38f, 127.0f, 0.5f, 1.5f, -2.5f};
            for (int i = 0; i < groups; i++) x[(size_t)(32 * i + below(32))] = special[below(sizeof special / sizeof *special)];
            for (int i = 0; i < groups; i++)  // and some that are too small altogether, or as small as can be
                if (const int kind = below(6); kind < 3)
                    for (int j = 32 * i; j < 32 * i + 32; j++) x[(size_t)j] = kind ? fmodf(x[(size_t)j], 5.0f) * (kind == 1 ? 1e-37f : 1e-36f) : 0.0f;
            std::vector<uint8_t> a(shape.bytes, 0x55), b(shape.bytes, 0x55);
            const int lane = below(16);
            isa.quantize(x.data(), first, groups, a.data(), lane, shape);
            scalar.quantize(x.data(), first, groups, b.data(), lane, shape);
            same_panels(isa.name, "quantized groups", a, b, shape);
        }
}

// One row through an elementwise op of both sets; an op that reads one tensor does not look at y.
void elementwise(const Kernels& isa, const Kernels& scalar, Elementwise op, const float* x, const float* y, int n, float* a, float* b) {
    isa[op](x, y, row_of(op).number, n, a), scalar[op](x, y, row_of(op).number, n, b);
}

void test_rows(const Kernels& isa, const Kernels& scalar) {
    std::vector<float> x = floats(4096, 30), y = floats(4096), a(4096), b(4096);
    const float special[] = {0.0f, -0.0f, INFINITY, -INFINITY, 88.7f, 88.8f, -87.4f, -103.9f, -104.1f, 1e-30f};
    for (size_t i = 0; i < sizeof special / sizeof *special; i++) x[i] = special[i];
    for (int n : {1, 15, 16, 17, 576, 4096}) {
        isa.exp(x.data(), n, a.data()), scalar.exp(x.data(), n, b.data());
        same(isa.name, "exp", a.data(), b.data(), (size_t)n * 4);
        for (int i = 0; i < n; i++) {
            double want = exp((double)x[(size_t)i]), ulp = fmax(want * 0x1p-23, 0x1p-149);
            if (isfinite(want) && want < 3.4e38 && !(fabs(a[(size_t)i] - want) <= 2 * ulp)) failures++, printf("FAILED exp(%g)\n", x[(size_t)i]);
        }
        elementwise(isa, scalar, Elementwise::swiglu, x.data(), y.data(), n, a.data(), b.data());
        for (int i = 0; i < n; i++)  // infinity times zero: any NaN will do
            if (isnan(a[(size_t)i]) && isnan(b[(size_t)i])) a[(size_t)i] = b[(size_t)i] = 0;
        same(isa.name, "swiglu", a.data(), b.data(), (size_t)n * 4);
        isa.rms_norm(y.data(), x.data() + 16, 1e-5f, n < 4080 ? n : 4080, a.data());
        scalar.rms_norm(y.data(), x.data() + 16, 1e-5f, n < 4080 ? n : 4080, b.data());
        same(isa.name, "rms_norm", a.data(), b.data(), (size_t)n * 4);
        elementwise(isa, scalar, Elementwise::add, x.data() + 16, y.data(), n < 4080 ? n : 4080, a.data(), b.data());
        same(isa.name, "add", a.data(), b.data(), (size_t)n * 4);
    }
    for (bool pairs : {false, true})
        for (int dim : {8, 40, 64}) {
            std::vector<float> c = floats(32), s = floats(32);
            RopeArgs r{c.data(), s.data(), dim, 64, 5, pairs};
            isa.rope(y.data(), r, a.data()), scalar.rope(y.data(), r, b.data());
            same(isa.name, "rope", a.data(), b.data(), 5 * 64 * 4);
        }
}

// Layers that carry a state: columns off the vector size, a state updated in place and into another.
void test_states(const Kernels& isa, const Kernels& scalar) {
    for (int n : {1, 16, 40, 64, 72, 200}) {
        std::vector<float> x = floats((size_t)n * 5, 2), w = floats((size_t)n * 4), a((size_t)n), b((size_t)n);
        const float* rows[4] = {x.data(), x.data() + n, x.data() + 2 * n, x.data() + 3 * n};
        isa.conv(rows, w.data(), (size_t)n, 4, n, a.data()), scalar.conv(rows, w.data(), (size_t)n, 4, n, b.data());
        same(isa.name, "conv", a.data(), b.data(), (size_t)n * 4);
        elementwise(isa, scalar, Elementwise::sigmoid_gate, w.data(), x.data(), n, a.data(), b.data());
        same(isa.name, "sigmoid_gate", a.data(), b.data(), (size_t)n * 4);
        isa.unit(x.data(), 0.25f, n, a.data()), scalar.unit(x.data(), 0.25f, n, b.data());
        same(isa.name, "unit", a.data(), b.data(), (size_t)n * 4);
        const int k = 24;
        std::vector<float> s = floats((size_t)(k * n)), t = s, u(s.size()), q = floats(k), key = floats(k);
        DeltaArgs d{q.data(), key.data(), x.data(), s.data(), u.data(), a.data(), 0.9f, 0.4f, k, n};
        isa.delta(d);
        d.to = s.data();
        isa.delta(d);  // in place
        d.from = d.to = t.data(), d.out = b.data();
        scalar.delta(d);
        same(isa.name, "delta", a.data(), b.data(), (size_t)n * 4);
        same(isa.name, "delta's state", s.data(), t.data(), s.size() * 4);
        same(isa.name, "delta's state elsewhere", u.data(), t.data(), s.size() * 4);
    }
    for (double v = -60; v < 60; v += 0.173) {
        const double want = v > 0 ? v + log1p(exp(-v)) : log1p(exp(v)), got = softplus64(v);
        if (!(fabs(got - want) <= 1e-14 * want)) failures++, printf("FAILED softplus(%g): %g\n", v, (got - want) / want);
    }
}

// The functions between products, over both tails and what is no ordinary number.
void test_activations(const Kernels& isa, const Kernels& scalar) {
    std::vector<float> x = floats(1040, 6), y = floats(1040), w = floats(1040), a(1040), b(1040);
    const float special[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 3e38f, -3e38f, 1e-30f, 9.0f, -9.0f, 20.0f, -20.0f, 88.8f};
    for (size_t i = 0; i < sizeof special / sizeof *special; i++) x[i] = special[i];
    for (int n : {1, 15, 16, 17, 64, 1040}) {
        auto agree = [&](const char* what) {
            for (int i = 0; i < n; i++)  // any NaN will do
                if (isnan(a[(size_t)i]) && isnan(b[(size_t)i])) a[(size_t)i] = b[(size_t)i] = 0;
            same(isa.name, what, a.data(), b.data(), (size_t)n * 4);
        };
        for (int i = (int)Elementwise::sigmoid_gate + 1; i < kElementwiseCount; i++) {  // those before it have tests of their own
            const Elementwise op = (Elementwise)i;
            elementwise(isa, scalar, op, x.data(), y.data(), n, a.data(), b.data());
            for (int c = 0; c < n; c++) {
                const double v = (double)x[(size_t)c], got = (double)a[(size_t)c], gelu = 0.5 * v * erfc(-v / sqrt(2.0)), cap = 3.5 * tanh(v / 3.5);
                if (op == Elementwise::gelu && isfinite(gelu) && !(fabs(got - gelu) <= 4e-7 * fabs(v))) failures++, printf("FAILED gelu(%g)\n", v);
                if (op == Elementwise::softcap && !isnan(v) && !(fabs(got - cap) <= 5e-7 * fabs(cap))) failures++, printf("FAILED softcap(%g)\n", v);
            }
            agree(row_of(op).name);
        }
        a = b = w;
        isa.accumulate(y.data(), 0.7f, n, a.data()), scalar.accumulate(y.data(), 0.7f, n, b.data());
        agree("accumulate");
        for (const float* bias : {(const float*)nullptr, (const float*)x.data() + 16}) {
            const int m = n < 1024 ? n : 1024;
            isa.layer_norm(y.data(), w.data(), bias, 1e-5f, m, a.data()), scalar.layer_norm(y.data(), w.data(), bias, 1e-5f, m, b.data());
            agree("layer_norm");
        }
    }
}

// Queries with pasts of every length up to three chunks, all together, against the scalar kernels one query at a time.
void test_attention(const Kernels& isa, const Kernels& scalar, KvType type) {
    for (int head_dim : {8, 24, 64, 80, 128, 256}) {
        const KvCell cell{type, head_dim};
        const PartShape shape(head_dim);
        const int kv_heads = 2, pages = 40, tokens = 600;
        const size_t page = kv_heads * cell.bytes();
        std::vector<uint8_t> ca(page * pages), cb;
        for (size_t i = 0; i < ca.size(); i += 2) ca[i] = 0x00, ca[i + 1] = 0x7e;  // NaN where nothing was written
        if (type == KvType::Float) std::fill(ca.begin(), ca.end(), 0xff);
        if (cell.scaled())
            for (int p = 0; p < pages * kv_heads; p++)
                for (int i = 0; i < 2 * kPage; i++) ((float*)(&ca[(size_t)p * cell.bytes()] + cell.scales_at()))[i] = NAN;
        cb = ca;
        std::vector<int32_t> table(pages);
        for (int i = 0; i < pages; i++) table[(size_t)i] = (i * 7 + 3) % pages;
        for (int t = 0; t < tokens; t++) {
            std::vector<float> k = floats((size_t)(kv_heads * head_dim)), v = floats((size_t)(kv_heads * head_dim), 1000);
            if (t == 5) for (float& x : k) x *= 1e-38f;
            const size_t at = (size_t)table[(size_t)(t / 16)] * page;
            isa.store_kv(k.data(), v.data(), kv_heads, cell, &ca[at], t % 16);
            scalar.store_kv(k.data(), v.data(), kv_heads, cell, &cb[at], t % 16);
        }
        same(isa.name, "store_kv", ca.data(), cb.data(), ca.size());
        const int most = 101;
        std::vector<float> q = floats((size_t)(most * head_dim)), a((size_t)(most * head_dim)), b(a);
        std::vector<float> sums(shape.floats * most), parts(sums);
        std::vector<uint8_t> scratch(attend_scratch(), 0xff);
        int window = tokens;
        float cap = 0;
        bool finite = true;
        // `count` queries of which number i sees seen(i) tokens, the last `window` of them; in calls of `each`: of one, who merges parts is this
        // function, of more it is the call, which may find the queries as it left them.
        auto run = [&](const Kernels& k, const std::vector<uint8_t>& cells, float* out, int count, auto&& seen, int each) {
            AttendArgs args{};
            args.cells = cells.data() + cell.bytes(), args.page_stride = page, args.cell = cell, args.scale = 0.3f;
            args.scratch = scratch.data(), args.cap = cap, args.finite = finite;
            int oldest = tokens;  // whatever the table holds before it must not matter
            for (int i = 0; i < count; i++) oldest = seen(i) - window < oldest ? seen(i) - window : oldest;
            std::vector<int32_t> named = table;
            for (int p = 0; p < oldest / kPage; p++) named[(size_t)p] = 1 << 28;
            for (int c = 0, before = 0; c * kChunk < tokens; c++) {
                args.pages = named.data() + c * (kChunk / kPage), args.ahead = c == 0 ? 2 : 0;
                args.coming[0] = args.cells, args.coming[1] = cells.data() + cells.size();
                std::vector<int> there;
                for (int i = 0; i < count; i++) {
                    const int n = seen(i) - c * kChunk, from = n - window;
                    if (n > 0 && from < kChunk) {
                        args.query[args.count] = &q[(size_t)(i * head_dim)];
                        args.part[args.count] = (from >= 0 || !c ? sums : parts).data() + (size_t)i * shape.floats;
                        const bool later = from < 0 && c, fused = later && each > 1;
                        args.sum[args.count] = fused ? sums.data() + (size_t)i * shape.floats : nullptr;
                        if (later && !fused) there.push_back(i);
                        args.windowed |= from > 0;
                        args.from[args.count] = from > 0 ? from : 0;
                        args.seen[args.count++] = n < kChunk ? n : kChunk;
                    }
                    if (args.count == each || (args.count && i == count - 1)) {
                        args.again = before == count && args.count == count;
                        before = args.count;
                        k.attend(args), args.count = 0, args.windowed = false;
                    }
                }
                for (int i : there) k.merge(parts.data() + (size_t)i * shape.floats, head_dim, sums.data() + (size_t)i * shape.floats);
            }
            for (int i = 0; i < count; i++) k.finish(sums.data() + (size_t)i * shape.floats, head_dim, out + i * head_dim);
        };
        for (int count : {1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 31, 61, most}) {
            const int start = below(tokens), step = below(3);
            auto near = [&](int i) { return 1 + (start + i / 3) % tokens; };  // rows of three heads, one after the other
            auto far = [&](int i) { return 1 + (start + i * step * 11) % tokens; };
            for (int way = 0; way < (type == KvType::Float ? 2 : 7); way++) {
                auto seen = [&](int i) { return way % 2 ? far(i) : near(i); };
                const int windows[] = {tokens, tokens, 1, 1 + below(40), 200, 256, tokens};
                window = windows[way], cap = way == 3 || way == 6 ? 20.0f : 0.0f;
                run(isa, ca, a.data(), count, seen, kMaxAttend);
                run(scalar, cb, b.data(), count, seen, 1);
                same(isa.name, "attend", a.data(), b.data(), (size_t)(count * head_dim) * sizeof(float));
                for (int i = 0; i < count * head_dim; i++)
                    if (!isfinite(a[(size_t)i])) {
                        failures++, printf("FAILED attend read what was not written\n");
                        return;
                    }
            }
        }
        // Queries that no trick with powers of two survives.
        window = tokens, cap = 0;
        for (float& x : q) x *= 1e5f;
        auto all = [&](int i) { return tokens - i; };
        for (int count : {1, 3, 5}) {
            run(isa, ca, a.data(), count, all, kMaxAttend), run(scalar, cb, b.data(), count, all, 1);
            same(isa.name, "attend, large queries", a.data(), b.data(), (size_t)(count * head_dim) * sizeof(float));
        }
        for (float& x : q) x *= 1e-5f;
        // A number that is not finite, in whichever row: who looks at its token finds out, and nobody else.
        for (int bad : {tokens - 20, tokens - 13}) {
            for (int part = 0; part < 2; part++) {
                const std::vector<uint8_t> before = ca, others = cb;
                std::vector<float> k = floats((size_t)(kv_heads * head_dim)), v = floats((size_t)(kv_heads * head_dim));
                (part ? v : k)[(size_t)(head_dim + 1)] = bad % 2 ? 1e6f : NAN;  // 1e6: not of 16 bits
                const size_t at = (size_t)table[(size_t)(bad / 16)] * page;
                finite = isa.store_kv(k.data(), v.data(), kv_heads, cell, &ca[at], bad % 16);
                scalar.store_kv(k.data(), v.data(), kv_heads, cell, &cb[at], bad % 16);
                same(isa.name, "store_kv, no number", finite ? "all" : "not", type == KvType::Half ? "not" : "all", 3);
                for (int count : {1, 2, 3, 4, 5, 6, 9}) {
                    auto seen = [&](int i) { return i == 0 ? tokens : bad - i + 1; };
                    run(isa, ca, a.data(), count, seen, kMaxAttend), run(scalar, cb, b.data(), count, seen, 1);
                    same(isa.name, "attend beside", a.data() + head_dim, b.data() + head_dim, (size_t)((count - 1) * head_dim) * sizeof(float));
                    std::vector<uint8_t> there((size_t)head_dim), wanted(there);
                    for (size_t d = 0; d < there.size(); d++) there[d] = isfinite(a[d]), wanted[d] = isfinite(b[d]);
                    same(isa.name, "attend, no number", there.data(), wanted.data(), there.size());
                }
                ca = before, cb = others, finite = true;
            }
        }
    }
}

// The same over keys whose front is the value.
void test_latent(const Kernels& isa, const Kernels& scalar) {
    const int dims[][2] = {{8, 8}, {48, 32}, {40, 40}, {72, 24}, {576, 512}};
    for (const auto& dim : dims) {
        const int head_dim = dim[0], latent = dim[1];
        const KvCell cell{KvType::Half, head_dim, latent};
        const PartShape shape(latent);
        const int pages = 17, tokens = 264;
        std::vector<uint8_t> ca(cell.bytes() * pages), cb;
        for (size_t i = 0; i < ca.size(); i += 2) ca[i] = 0x00, ca[i + 1] = 0x7e;
        cb = ca;
        std::vector<int32_t> table(pages);
        for (int i = 0; i < pages; i++) table[(size_t)i] = (i * 7 + 3) % pages;
        for (int t = 0; t < tokens; t++) {
            const std::vector<float> k = floats((size_t)head_dim);
            const size_t at = (size_t)table[(size_t)(t / 16)] * cell.bytes();
            isa.store_latent(k.data(), cell, &ca[at], t % 16), scalar.store_latent(k.data(), cell, &cb[at], t % 16);
        }
        same(isa.name, "store_latent", ca.data(), cb.data(), ca.size());
        const int most = 61;
        const std::vector<float> q = floats((size_t)(most * head_dim));
        std::vector<float> a((size_t)(most * latent)), b(a), sums(shape.floats * most);
        std::vector<uint8_t> scratch(latent_scratch(), 0xff);
        auto run = [&](const Kernels& k, const std::vector<uint8_t>& cells, float* out, int chunk, int count, auto&& seen, int each) {
            AttendArgs args{};
            args.cells = cells.data(), args.page_stride = cell.bytes(), args.cell = cell, args.scale = 0.2f;
            args.scratch = scratch.data(), args.pages = table.data() + chunk * (kChunk / kPage);
            for (int i = 0; i < count; i++) {
                args.query[args.count] = &q[(size_t)(i * head_dim)];
                args.part[args.count] = sums.data() + (size_t)i * shape.floats;
                args.seen[args.count++] = seen(i);
                if (args.count == each || i == count - 1) k.attend_latent(args), args.count = 0;
            }
            for (int i = 0; i < count; i++) k.finish(sums.data() + (size_t)i * shape.floats, latent, out + i * latent);
        };
        for (int count : {1, 2, 3, 4, 5, 6, 7, 16, 20, most})
            for (int chunk : {0, 1}) {
                const int there = chunk ? tokens - kChunk : kChunk, start = below(there), step = below(3);
                auto seen = [&](int i) { return 1 + (start + i * step) % there; };
                run(isa, ca, a.data(), chunk, count, seen, kMaxAttend);
                run(scalar, cb, b.data(), chunk, count, seen, 1);
                same(isa.name, "attend_latent", a.data(), b.data(), (size_t)(count * latent) * sizeof(float));
                for (int i = 0; i < count * latent; i++)
                    if (!isfinite(a[(size_t)i])) {
                        failures++, printf("FAILED attend_latent read what was not written\n");
                        return;
                    }
            }
    }
}

// A program under batches with something wrong in them: each is refused, or runs inside its memory (which is for the
// sanitizers to say). Good batches give the same bits before and after.
void fuzz(const Kernels* kernels, Plan& plan, int tokens, int table) {
    std::vector<int32_t> ids((size_t)tokens), pos((size_t)tokens), write((size_t)tokens), pick((size_t)tokens);
    std::vector<int32_t> q_start{0, 20, tokens}, kv_len{20, 4}, map{3, 5, -1, -1, 0, 8, 1, -1};
    for (int t = 0; t < tokens; t++) {
        ids[(size_t)t] = t, pick[(size_t)t] = tokens - 1 - t;
        pos[(size_t)t] = t < 20 ? t : t - 20;  // every token that is read is written by the same run
        write[(size_t)t] = map[(size_t)((t < 20 ? 0 : table) + pos[(size_t)t] / 16)] * 16 + pos[(size_t)t] % 16;
    }
    auto run = [&] {
        BatchView b{ids.data(), pos.data(), q_start.data(), kv_len.data(), map.data(), write.data(), pick.data(), tokens, 2, table, tokens, {}};
        plan.run(b, {});
    };
    const size_t bytes = plan.output_slot().stride * (size_t)tokens;
    run();
    std::vector<uint8_t> good((const uint8_t*)plan.output_data(), (const uint8_t*)plan.output_data() + bytes);
    std::vector<int32_t>* arrays[] = {&ids, &pos, &write, &pick, &q_start, &kv_len, &map};
    int refused = 0, rounds = 3000;
    for (int i = 0; i < rounds; i++) {
        std::vector<int32_t>& array = *arrays[below(7)];
        int32_t& number = array[(size_t)below((int)array.size())];
        const int32_t was = number;
        const int32_t odd[] = {-1, 0, 1, 15, 16, 1 << 30, INT32_MAX, INT32_MIN, was + 1, was - 1, below(200) - 20};
        number = odd[below(11)];
        try {
            run();
        } catch (const std::invalid_argument&) {
            refused++;
        }
        number = was;
    }
    if (refused < rounds / 4 || refused == rounds) failures++, printf("FAILED %s: %d of %d batches refused\n", kernels->name, refused, rounds);
    run();
    same(kernels->name, "plan after bad batches", plan.output_data(), good.data(), bytes);
}

std::shared_ptr<Vector> ones(int n) {
    auto made = std::make_shared<Vector>();
    made->n = n;
    made->memory = Mapping((size_t)(n + 15) / 16 * 64);
    for (int i = 0; i < n; i++) ((float*)made->memory.data())[i] = 1;
    return made;
}

void test_latent_plan(const Kernels* kernels) {
    const int vocabulary = 40, tokens = 24, heads = 3, dim = 64, latent = 32;
    auto pool = std::make_shared<ThreadPool>(2);
    Plan plan(pool, kernels, {1, 9, 1, dim, KvType::Half, latent}, tokens, tokens, (size_t)1 << 20);
    size_t at = 0;
    auto slot = [&](int width, bool quant, bool per_token) {
        int made = plan.slot(at, width, quant, per_token);
        at += Slot::bytes_of(width, quant, tokens);
        return made;
    };
    auto rounded = [&](int n, int k) { return std::make_shared<Matrix>(random_affine(kForms[1], n, k)); };
    const int x = slot(dim, false, true), h = slot(dim, true, true), q = slot(heads * dim, false, true);
    const int a = slot(heads * latent, false, true), out = slot(heads * latent, false, false);
    plan.embed(rounded(vocabulary, dim), x);
    plan.quantize(x, h);
    plan.linear({{rounded(heads * dim, dim), nullptr, h, q, -1}});
    plan.store_latent(x, 0);
    plan.attend_latent(q, 0, heads, 0.2f, a);
    plan.take(a, out);
    plan.output(out);
    fuzz(kernels, plan, tokens, 4);
}

// With `options`, an encoder's attention joins in, too.
void test_plan(const Kernels* kernels, const AttendOptions& options) {
    const int d = 64, vocabulary = 40, tokens = 24, table = 4, pages = 9;
    auto pool = std::make_shared<ThreadPool>(2);
    auto plain = [&](int n, int k) {
        std::vector<float> w = floats((size_t)(n * k), 0.2f);
        return std::make_shared<Matrix>(pack_dense(*pool, Type::F32, w.data(), n, k));
    };
    auto rounded = [&](int n, int k) { return std::make_shared<Matrix>(random_affine(kForms[1], n, k)); };
    Plan plan(pool, kernels, {1, pages, 2, 16, KvType::Half}, tokens, tokens, (size_t)1 << 20);
    size_t at = 0;
    auto slot = [&](int width, bool quant, bool per_token) {
        int made = plan.slot(at, width, quant, per_token);
        at += Slot::bytes_of(width, quant, tokens);
        return made;
    };
    const int x = slot(d, false, true), h = slot(d, true, true), q = slot(d, false, true), q2 = slot(d, false, true);
    const int k = slot(32, false, true), v = slot(32, false, true), a = slot(d, false, true), aq = slot(d, true, true);
    const int f = slot(96, true, true), y = slot(d, false, true), last = slot(d, false, false), out = slot(vocabulary, false, false);
    plan.embed(rounded(vocabulary, d), x);
    plan.norm(x, ones(d), 1e-5f, 1, -1, h);
    plan.linear({{rounded(d, d), nullptr, h, q, -1}, {rounded(32, d), nullptr, h, k, -1}, {rounded(32, d), nullptr, h, v, -1}});
    const std::vector<float> frequencies = floats(8);
    const int rope = plan.rope_table(frequencies.data(), 16, true, 1.0);
    plan.store(k, v, rope, q, q2, 0);
    plan.attend(q2, 0, 4, 0.25f, a, aq, options);
    const auto gate = rounded(96, d), up = rounded(96, d);  // in this order on every machine
    plan.gated(Elementwise::swiglu, {gate, nullptr, aq, -1, -1}, {up, nullptr, aq, -1, -1}, -1, f);
    if (options.window) {
        const int e = slot(d, false, true);
        plan.encode(q2, k, v, 4, 0.25f, e);
        plan.linear({{rounded(d, 96), nullptr, f, y, e}});
    } else {
        plan.linear({{rounded(d, 96), nullptr, f, y, x}});
    }
    plan.take(y, last);
    plan.linear({{plain(vocabulary, d), nullptr, last, out, -1}});
    plan.output(out);

    fuzz(kernels, plan, tokens, table);
}

// Rows through a mixture and a product by head, together and one by one, with experts of both kinds.
void test_mixture(const Kernels* kernels) {
    const int d = 64, f = 96, count = 6, heads = 2, n = 40, rows = 50;
    auto pool = std::make_shared<ThreadPool>(2);
    Experts experts;
    auto put = [&](std::vector<std::shared_ptr<const Matrix>>& to, bool dense, int height, int width) {
        const std::vector<float> w = floats((size_t)(height * width), 0.2f);
        to.push_back(dense ? std::make_shared<Matrix>(pack_dense(*pool, Type::F32, w.data(), height, width))
                           : std::make_shared<Matrix>(random_affine(kForms[1], height, width)));
    };
    for (int e = 0; e < count; e++) put(experts.gate, e % 3 == 0, f, d), put(experts.up, e % 2 == 0, f, d), put(experts.down, e % 2, d, f);
    for (bool sigmoid : {false, true}) {
        experts.act = sigmoid ? Elementwise::clamped : Elementwise::swiglu, experts.limit = 2;
        Routing routing;
        routing.top = 3, routing.groups = 3, routing.top_groups = 2, routing.sigmoid = routing.pair = sigmoid, routing.renormalize = true;
        const size_t room = moe_bytes(rows, count, 3, d, f, {true, true}, {true, true});
        Plan plan(pool, kernels, {0, 4, 1, 16, KvType::Half}, rows, 0, room + ((size_t)1 << 20));
        size_t at = room;
        auto slot = [&](int width, bool quant) {
            const int made = plan.slot(at, width, quant, true);
            at += Slot::bytes_of(width, quant, rows);
            return made;
        };
        const int x = slot(d, false), q = slot(d, true), logits = slot(count, false), y = slot(d, false), yq = slot(d, true);
        const int out = slot(heads * n, false);
        plan.input(x), plan.input(logits);
        plan.quantize(x, q);
        plan.moe(x, q, logits, experts, routing, y, 0);
        plan.quantize(y, yq);
        plan.head_linear(yq, std::make_shared<Matrix>(random_affine(kForms[4], heads * n, d / heads)), heads, out);
        plan.output(out);
        const std::vector<float> given = floats((size_t)(rows * d)), scores = floats((size_t)(rows * count));
        std::vector<int32_t> zeros((size_t)rows), ends{0, rows}, one{1}, page{0};
        const size_t width = (size_t)(heads * n);
        auto run = [&](int first, int some) {
            ends[1] = some;
            BatchView b{zeros.data(), zeros.data(), ends.data(), one.data(), page.data(), zeros.data(), nullptr, some, 1, 1, 0, {}};
            plan.run(b, {given.data() + first * d, scores.data() + first * count});
            return std::vector<float>(plan.output_data(), plan.output_data() + (size_t)some * width);
        };
        const std::vector<float> all = run(0, rows);
        for (int r = 0; r < rows; r++) {
            const std::vector<float> alone = run(r, 1);
            same(kernels->name, "mixture", alone.data(), all.data() + (size_t)r * width, width * sizeof(float));
        }
        for (int first = 0; first + 7 <= rows; first += 7)
            same(kernels->name, "mixture of seven", run(first, 7).data(), all.data() + (size_t)first * width, 7 * width * sizeof(float));
    }
}

// The sampler's passes against the scalar ones, and whole rows against the scalar kernels' tokens, one by one and together.
void test_sampling(const Kernels* isa, const Kernels* scalar) {
    for (int n : {1, 7, 63, 64, 65, 1000, 20000}) {
        const size_t size = (size_t)n, blocks = (size_t)((n + kSampleBlock - 1) / kSampleBlock);
        std::vector<float> x = floats(size, 6), ruled[2] = {x, x};
        if (n > 8) x[2] = -INFINITY, x[3] = 0.0f, x[4] = -0.0f, x[5] = x[6];
        std::vector<int32_t> peaks[2] = {std::vector<int32_t>(blocks), std::vector<int32_t>(blocks)};
        std::vector<uint64_t> masses[2] = {std::vector<uint64_t>(blocks), std::vector<uint64_t>(blocks)};
        std::vector<double> y(size), weights[2] = {y, y};
        std::vector<uint64_t> each[2] = {std::vector<uint64_t>(size), std::vector<uint64_t>(size)};
        for (size_t i = 0; i < size; i++) y[i] = i == 1 ? -INFINITY : i == 2 ? 0.0 : -30.0 * fabs((double)normal());
        std::vector<uint8_t> allowed(size);
        for (uint8_t& a : allowed) a = (uint8_t)below(2);
        const Weighing how{20.0, 1.3, 0x1p46};
        const Kernels* both[2] = {isa, scalar};
        int32_t counts[2][3];
        uint64_t sums[2];
        for (int i = 0; i < 2; i++) {
            counts[i][0] = both[i]->peaks(x.data(), n, peaks[i].data());
            both[i]->block_masses(x.data(), n, peaks[i].data(), order_of(1.0f), how, masses[i].data());
            sums[i] = both[i]->weigh(y.data(), n, how.unit, weights[i].data(), each[i].data());
            both[i]->rule_out(x.data(), allowed.data(), n, ruled[i].data());
            counts[i][1] = both[i]->count_above(x.data(), n, x[0]), counts[i][2] = both[i]->count_equal(x.data(), n, 0.0f);
        }
        same(isa->name, "peaks", peaks[0].data(), peaks[1].data(), blocks * 4);
        for (float broken : {NAN, -NAN, INFINITY})
            for (int at : {0, n / 2, n - 1}) {
                std::vector<float> spoiled = x;
                spoiled[(size_t)at] = broken;
                std::vector<int32_t> seen(blocks);
                const bool fine = isa->peaks(spoiled.data(), n, seen.data());
                if (fine && *std::max_element(seen.begin(), seen.end()) < kOrderOfInf)
                    failures++, printf("FAILED %s sees %g at %d of %d\n", isa->name, broken, at, n);
            }
        same(isa->name, "masses", masses[0].data(), masses[1].data(), blocks * 8);
        same(isa->name, "weights", weights[0].data(), weights[1].data(), size * 8);
        same(isa->name, "masses of a list", each[0].data(), each[1].data(), size * 8);
        same(isa->name, "their sum", &sums[0], &sums[1], 8);
        same(isa->name, "rule_out", ruled[0].data(), ruled[1].data(), size * 4);
        same(isa->name, "counts", counts[0], counts[1], sizeof counts[0]);
        for (size_t i = 0; i < size; i++) {
            const double want = exp2(y[i]);
            if (want > 1e-300 && !(fabs(weights[0][i] - want) <= 4e-16 * want)) failures++, printf("FAILED weight of %g\n", y[i]);
            if (each[0][i] != (uint64_t)nearbyint(weights[0][i] * how.unit)) failures++, printf("FAILED mass of %g\n", y[i]);
        }
    }
    const int vocabulary = 20011, rows = 24;
    const std::vector<float> logits = floats((size_t)(rows * vocabulary), 4);
    std::vector<SampleParams> params((size_t)rows);
    std::vector<Ask> asks((size_t)rows);
    for (int i = 0; i < rows; i++) {
        SampleParams& w = params[(size_t)i];
        w.temperature = i % 5 ? 0.4 + i % 4 : 0.0, w.seed = (uint64_t)i * 77;
        w.top_k = i % 3 == 1 ? 1 << (i % 12) : 0, w.top_p = i % 4 == 1 ? 0.9 : 1.0, w.min_p = i % 7 == 2 ? 0.05 : 0.0;
        w.typical_p = i % 8 == 3 ? 0.8 : 1.0, w.logprobs = i % 6 - 1;
        if (i % 3 == 0) w.bias = {{below(vocabulary), 7.5}, {below(vocabulary), -3.0}};
        asks[(size_t)i].params = &w, asks[(size_t)i].logits = logits.data() + i * vocabulary, asks[(size_t)i].position = i;
    }
    std::vector<Answer> together, alone, plain;
    Sampler many(std::make_shared<ThreadPool>(3), isa, vocabulary), one(std::make_shared<ThreadPool>(1), scalar, vocabulary);
    many.choose(asks, together);
    for (int i = 0; i < rows; i++) {
        const Answer& a = together[(size_t)i];
        alone.clear(), plain.clear();
        many.choose({asks[(size_t)i]}, alone), one.choose({asks[(size_t)i]}, plain);
        for (const Answer* other : {&alone[0], &plain[0]}) {
            same(isa->name, "token", a.tokens.data(), other->tokens.data(), a.tokens.size() * 4);
            if (a.told.size() != other->told.size()) failures++, printf("FAILED %s told\n", isa->name);
            else if (!a.told.empty()) same(isa->name, "log probability", &a.told[0].logprob, &other->told[0].logprob, 8);
        }
        if (a.tokens[0] < 0 || a.tokens[0] >= vocabulary) failures++, printf("FAILED %s: token %d\n", isa->name, a.tokens[0]);
    }
}

void test_half() {
    for (uint32_t h = 0; h < 65536; h++) {
        float f = half_to_float((uint16_t)h);
        if (isnan(f)) continue;
        if (float_to_half(f) != h) failures++, printf("FAILED half %u\n", h);
    }
}

// Every item once, and none before the step ahead of it is complete; with workers awake, asleep and never scheduled.
void test_pool() {
    for (int threads : {1, 2, 5, 16}) {
        ThreadPool pool(threads);
        for (int round = 0; round < 300; round++) {
            int items[12], total = 0;
            for (int& n : items) n = below(4) ? below(9) : round % 7 ? 0 : 200, total += n;
            std::vector<std::atomic<int>> seen((size_t)total);
            std::atomic<int> done{0}, wrong{0};
            pool.run(12, items, [&](int step, int item, int thread) {
                int before = 0;
                for (int s = 0; s < step; s++) before += items[s];
                if (done.load() < before || thread < 0 || thread >= threads || item < 0 || item >= items[step]) wrong++;
                else if (seen[(size_t)(before + item)].fetch_add(1)) wrong++;
                done.fetch_add(1);
            });
            if (done != total || wrong) failures++, printf("FAILED pool: %d of %d, %d wrong\n", done.load(), total, wrong.load());
            if (round % 50 == 49) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // they fall asleep
        }
        // A job ends when its caller is the one that sleeps, and one caller's job is not another's.
        std::vector<std::thread> callers;
        std::atomic<int> sum{0};
        for (int c = 0; c < 3; c++)
            callers.emplace_back([&] {
                for (int i = 0; i < 20; i++)
                    pool.for_each(3, [&](int item) {
                        if (item == 2) std::this_thread::sleep_for(std::chrono::microseconds(200));
                        sum.fetch_add(1);
                    });
            });
        for (auto& c : callers) c.join();
        if (sum != 180) failures++, printf("FAILED pool: %d of 180 items\n", sum.load());
    }
}

}  // namespace

int main() {
    const Kernels* sets[8];
    const int n = available_kernels(sets, 8);
    ThreadPool pool(2);
    test_half();
    test_pool();
    for (int i = 0; i < n; i++) {
        random_bits.seed(7);
        digest = 14695981039346656037u;
        for (int round = 0; round < 3; round++) {
            test_rows(*sets[i], *scalar_kernels());
            test_activations(*sets[i], *scalar_kernels());
            test_states(*sets[i], *scalar_kernels());
            test_affine(*sets[i], *scalar_kernels());
            test_quantize(*sets[i], *scalar_kernels());
            test_dense(*sets[i], *scalar_kernels(), pool);
        }
        test_attention(*sets[i], *scalar_kernels(), KvType::Half);
        test_attention(*sets[i], *scalar_kernels(), KvType::Byte);
        test_attention(*sets[i], *scalar_kernels(), KvType::Fixed);
        test_attention(*sets[i], *scalar_kernels(), KvType::Float);
        test_latent(*sets[i], *scalar_kernels());
        test_plan(sets[i], {});
        test_plan(sets[i], {5, 10.0f, ones(4)});
        test_latent_plan(sets[i]);
        test_mixture(sets[i]);
        test_sampling(sets[i], scalar_kernels());
        const std::vector<int> tall = {6, 12, 16, 24, 31, 33, 38, 44, 63, 128}, few = {2, 4, 7, 11, 16};
        test_large(*sets[i], *scalar_kernels(), 64, 1280, tall);
        test_large(*sets[i], *scalar_kernels(), 64, 928, tall);  // cannot be cut into parts of one size
        test_large(*sets[i], *scalar_kernels(), 160, 4352, few);  // in passes, over eight blocks and one
        test_extremes(*sets[i], *scalar_kernels());
        printf("%-8s %016llx\n", sets[i]->name, (unsigned long long)digest);
    }
    printf("%d checks, %d failures\n", checks, failures);
    return failures ? 1 : 0;
}
