// How fast this machine multiplies with each kind of weight: rates [rows [columns [megabytes [kernel set]]]].
// One matrix of so many megabytes, its blocks shared out among one thread and two; the best of several passes.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "../src/kernels.h"
#include "../src/pack.h"

using namespace quire;

namespace {

struct Form {
    const char* name;
    Type type;
    int bits, group, offset;
    Scales scales;
    bool bias;
};

constexpr Form kForms[] = {
    {"Q4_0", Type::Affine, 4, 32, 8, Scales::Half, false},   {"Q4_1", Type::Affine, 4, 32, 0, Scales::Half, true},
    {"Q4_K", Type::Affine, 4, 32, 0, Scales::Byte, true},    {"Q6_K", Type::Affine, 6, 16, 32, Scales::Byte, false},
    {"Q8_0", Type::Affine, 8, 32, 128, Scales::Half, false}, {"F16", Type::Affine, 14, 32, 0, Scales::Half, false},
    {"BF16", Type::BF16, 0, 0, 0, Scales::Half, false},
};
constexpr int kMost = 128;  // rows of one call

struct Product {
    const Kernels& kernels;
    Matrix w;
    int rows;
    QuantShape shape;
    std::vector<float> x, out;
    Mapping panels;

    Product(const Kernels& set, const Form& f, int m, int k, double megabytes)
        : kernels(set), rows(m), shape(k, f.bits == 14), x((size_t)m * (size_t)k, 0.5f), panels(shape.bytes * (size_t)((m + 15) / 16)) {
        w.type = f.type, w.k = k, w.n = 16;
        w.bits = f.bits, w.group = f.group, w.offset = f.offset, w.scales = f.scales, w.bias = f.bias;
        w.measure();
        w.n = 16 * std::max(1, (int)(megabytes * 1e6 / (double)w.block_bytes));
        w.lay_out();
        memset(w.memory.data(), 0x24, w.memory.size());  // any code will do, and halves of these bytes are normal numbers
        out.resize((size_t)m * (size_t)w.n);
        for (int r = 0; r < m; r++) kernels.quantize(x.data(), 0, k / 32, panels.data() + shape.bytes * (size_t)(r / 16), r % 16, shape);
    }

    void part(int b0, int b1) {
        const int step = std::max(1, (b1 - b0) / 8);
        for (int b = b0; b < b1; b += step) {
            Epilogue e;
            e.out = out.data() + 16 * b, e.out_stride = (size_t)w.n;
            const int end = std::min(b1, b + step);
            if (w.type == Type::Affine) kernels.linear_affine(w, b, end, panels.data(), shape, rows, e);
            else kernels.linear_dense(w, b, end, x.data(), (size_t)w.k, rows, e);
        }
    }

    double seconds(int threads) {
        double best = 1e9;
        for (int pass = 0; pass < 7; pass++) {
            const auto begun = std::chrono::steady_clock::now();
            std::vector<std::thread> others;
            for (int t = 1; t < threads; t++) others.emplace_back([=] { part(w.blocks * t / threads, w.blocks * (t + 1) / threads); });
            part(0, w.blocks / threads);
            for (std::thread& t : others) t.join();
            best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count());
        }
        return best;
    }
};

}  // namespace

int main(int argc, char** argv) {
    const int rows = argc > 1 ? atoi(argv[1]) : 1, columns = argc > 2 ? atoi(argv[2]) : 2048;
    const double megabytes = argc > 3 ? atof(argv[3]) : 100;
    const Kernels* sets[8];
    if (rows < 1 || rows > kMost || columns < 256 || columns % 256 || megabytes <= 0 || !available_kernels(sets, 8)) {
        fprintf(stderr, "rates [rows, at most %d [columns, a multiple of 256 [megabytes [kernel set]]]]\n", kMost);
        return 2;
    }
    const Kernels* set = argc > 4 ? find_kernels(argv[4]) : sets[0];
    if (!set) return fprintf(stderr, "this machine has no kernel set %s\n", argv[4]), 2;
    printf("%s, %d rows, %d columns\n", set->name, rows, columns);
    for (const Form& f : kForms) {
        Product p(*set, f, rows, columns, megabytes);
        printf("%s", f.name);
        for (const int threads : {1, 2}) {
            const double s = p.seconds(threads);
            printf("  %d thread%s: %6.1f GB/s %7.1f GOP/s", threads, threads > 1 ? "s" : "", (double)p.w.bytes() / s / 1e9,
                   2.0 * rows * (double)p.w.n * columns / s / 1e9);
        }
        printf("\n");
    }
    return 0;
}
