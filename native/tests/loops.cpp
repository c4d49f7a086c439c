// One call of one kernel of the neondot set on a small shape, for benchmarks/neon_model.py, which runs it under an emulator,
// writes down every instruction of the kernel, and gives them to a model of a CPU. Without arguments: the names of the cases.
// Prints what the call does: multiply-adds of int8 products, bytes of weights or of keys and values, and float32 fmas.
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "../src/kernels.h"
#include "../src/pack.h"

using namespace quire;

namespace {

const Kernels& kernels() { return *neondot_kernels(); }

struct Work {
    double macs = 0, bytes = 0, fmas = 0;
};

struct Form {
    const char* name;
    Type type;
    int bits, group, offset;
    Scales scales;
    bool bias;
};

constexpr Form kForms[] = {
    {"Q4_0", Type::Affine, 4, 32, 8, Scales::Half, false},  {"Q4_1", Type::Affine, 4, 32, 0, Scales::Half, true},
    {"Q4_K", Type::Affine, 4, 32, 0, Scales::Byte, true},   {"Q6_K", Type::Affine, 6, 16, 32, Scales::Byte, false},
    {"Q8_0", Type::Affine, 8, 32, 128, Scales::Half, false}, {"F16", Type::F16, 0, 0, 0, Scales::Half, false},
};

std::vector<float> numbers(size_t n) {
    std::vector<float> v(n);
    uint32_t state = 1;
    for (float& x : v) state = state * 1664525u + 1013904223u, x = (float)(int32_t)state * 0x1p-31f;
    return v;
}

// m rows against an n x k matrix. Its bytes are all 0x24: any code will do, and halves of them are normal numbers.
Work product(const Form& f, int m, int n, int k) {
    Matrix w;
    w.type = f.type;
    w.n = n, w.k = k, w.bits = f.bits, w.group = f.group, w.offset = f.offset, w.scales = f.scales, w.bias = f.bias;
    w.lay_out();
    memset(w.memory.data(), 0x24, w.memory.size());
    const std::vector<float> x = numbers((size_t)(m * k));
    std::vector<float> out((size_t)(m * n));
    Epilogue e;
    e.out = out.data();
    e.out_stride = (size_t)n;
    const double macs = (double)m * n * k;
    if (f.type != Type::Affine) {
        kernels().linear_dense(w, 0, w.blocks, x.data(), (size_t)k, m, e);
        return {0, (double)w.bytes(), macs};
    }
    const QuantShape shape(k);
    Mapping panels(shape.bytes * (size_t)((m + 15) / 16));
    kernels().linear_affine(w, 0, w.blocks, panels.data(), shape, m, e);
    return {macs, (double)w.bytes(), 0};
}

// `queries` queries over a chunk of 256 tokens of 16-bit keys and values.
Work attention(int queries, int head_dim) {
    const KvCell cell{KvType::Half, head_dim, 0};
    const int pages = kChunk / kPage;
    Mapping cells(cell.bytes() * (size_t)pages), scratch(attend_scratch());
    const PartShape shape(head_dim);
    std::vector<float> x = numbers((size_t)(queries * head_dim)), parts((size_t)queries * shape.floats);
    std::vector<int32_t> table((size_t)pages);
    for (int p = 0; p < pages; p++) table[(size_t)p] = p;
    AttendArgs a{};
    a.cells = cells.data(), a.page_stride = cell.bytes(), a.pages = table.data(), a.ahead = 0, a.cell = cell, a.scale = 0.1f;
    a.scratch = scratch.data(), a.count = queries;
    for (int q = 0; q < queries; q++) {
        a.query[q] = &x[(size_t)(q * head_dim)], a.part[q] = &parts[(size_t)q * shape.floats];
        a.from[q] = 0, a.seen[q] = kChunk;
    }
    kernels().attend(a);
    return {0, (double)(cell.bytes() * (size_t)pages), 2.0 * queries * kChunk * head_dim};
}

Work quantizing(int k) {
    const std::vector<float> x = numbers((size_t)k);
    const QuantShape shape(k);
    Mapping panel(shape.bytes);
    kernels().quantize(x.data(), 0, k / 32, panel.data(), 3, shape);
    return {0, 4.0 * k, 0};
}

Work norm(int k) {
    const std::vector<float> x = numbers((size_t)k);
    std::vector<float> out((size_t)k);
    kernels().rms_norm(x.data(), x.data(), 1e-5f, k, out.data());
    return {0, 4.0 * k, 0};
}

Work gate(int k) {
    const std::vector<float> x = numbers((size_t)k);
    std::vector<float> out((size_t)k);
    kernels().swiglu(x.data(), x.data(), k, out.data());
    return {0, 4.0 * k, 0};
}

struct Case {
    std::string name;
    std::function<Work()> run;
};

std::vector<Case> cases() {
    std::vector<Case> all;
    for (const Form& f : kForms)
        for (const int rows : {1, 2, 4, 8, 16, 32, 128}) {
            const int n = rows == 1 ? 64 : 32, k = rows == 128 ? 512 : 1024;
            all.push_back({std::string(f.name) + " x" + std::to_string(rows), [=] { return product(f, rows, n, k); }});
        }
    for (const int queries : {1, 3, 4, 9, 12, 64})
        all.push_back({"attend x" + std::to_string(queries), [=] { return attention(queries, 64); }});
    all.push_back({"quantize", [] { return quantizing(2048); }});
    all.push_back({"rms_norm", [] { return norm(2048); }});
    all.push_back({"swiglu", [] { return gate(2048); }});
    return all;
}

}  // namespace

int main(int argc, char** argv) {
    for (const Case& c : cases()) {
        if (argc < 2) printf("%s\n", c.name.c_str());
        else if (c.name == argv[1]) {
            const Work w = c.run();
            printf("%.0f %.0f %.0f\n", w.macs, w.bytes, w.fmas);
            return 0;
        }
    }
    return argc < 2 ? 0 : 2;
}
