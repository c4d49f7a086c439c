// How fast this machine attends to each kind of cell: attends [queries [head_dim [megabytes [kernel set [kind]]]]].
// Keys and values of so many megabytes, a chunk after the other, in pages that lie in no order; one thread. Prints what a token costs all
// the queries together, the best of several passes.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <vector>

#include "../src/kernels.h"
#include "../src/memory.h"

using namespace quire;

namespace {

struct Form {
    const char* name;
    KvType type;
};
constexpr Form kForms[] = {{"f16", KvType::Half}, {"int8", KvType::Byte}, {"int16", KvType::Fixed}};

double nanoseconds(const Kernels& kernels, KvType type, int queries, int head_dim, double megabytes) {
    const KvCell cell{type, head_dim};
    const PartShape shape(head_dim);
    const int per_chunk = kChunk / kPage;
    const int chunks = std::max(1, (int)(megabytes * 1e6 / (double)(cell.bytes() * per_chunk))), pages = chunks * per_chunk;
    std::minstd_rand random(1);
    auto numbers = [&](size_t n) {
        std::vector<float> x(n);
        for (float& v : x) v = (float)random() / (float)random.max() - 0.5f;
        return x;
    };
    Mapping cells(cell.bytes() * (size_t)pages), scratch(attend_scratch());
    std::vector<int32_t> table((size_t)pages);
    for (int p = 0; p < pages; p++) table[(size_t)p] = p;
    std::shuffle(table.begin(), table.end(), random);
    const std::vector<float> k = numbers((size_t)head_dim), v = numbers((size_t)head_dim), q = numbers((size_t)(queries * head_dim));
    for (int t = 0; t < pages * kPage; t++) kernels.store_kv(k.data(), v.data(), 1, cell, cells.data() + cell.bytes() * (size_t)(t / kPage), t % kPage);
    std::vector<float> parts(shape.floats * (size_t)queries), sums(parts);
    AttendArgs args{};
    args.cells = cells.data(), args.page_stride = cell.bytes(), args.cell = cell, args.scale = 0.125f, args.finite = true;
    args.scratch = scratch.data(), args.count = queries;
    for (int i = 0; i < queries; i++)
        args.query[i] = &q[(size_t)(i * head_dim)], args.part[i] = &parts[shape.floats * (size_t)i], args.sum[i] = &sums[shape.floats * (size_t)i], args.seen[i] = kChunk;
    double best = 1e9;
    const int passes = std::max(5, 4000 / chunks);
    for (int pass = 0; pass < passes; pass++) {
        const auto begun = std::chrono::steady_clock::now();
        for (int c = 0; c < chunks; c++) {
            args.pages = &table[(size_t)(c * per_chunk)], args.ahead = c + 1 < chunks ? kComing : 0;
            for (int i = 0; i < args.ahead; i++) args.coming[i] = cells.data() + cell.bytes() * (size_t)args.pages[per_chunk + i];
            args.following = args.pages + per_chunk, args.follow = c + 1 < chunks ? per_chunk : 0;
            kernels.attend(args);
            args.again = true;
        }
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count());
    }
    return best / ((double)chunks * kChunk) * 1e9;
}

}  // namespace

int main(int argc, char** argv) {
    const int queries = argc > 1 ? atoi(argv[1]) : 3, head_dim = argc > 2 ? atoi(argv[2]) : 64;
    const double megabytes = argc > 3 ? atof(argv[3]) : 0;
    const Kernels* sets[8];
    if (queries < 1 || queries > kMaxAttend || head_dim < 8 || head_dim > kMaxHeadDim || head_dim % 8 || megabytes < 0 || !available_kernels(sets, 8)) {
        fprintf(stderr, "attends [queries, at most %d [head_dim, a multiple of 8 up to %d [megabytes; 0: a chunk [kernel set [kind]]]]]\n", kMaxAttend, kMaxHeadDim);
        return 2;
    }
    const Kernels* set = argc > 4 ? find_kernels(argv[4]) : sets[0];
    if (!set) return fprintf(stderr, "this machine has no kernel set %s\n", argv[4]), 2;
    printf("%s, %d queries, heads of %d, ns a token:", set->name, queries, head_dim);
    for (const Form& f : kForms)
        if (argc <= 5 || !strcmp(argv[5], f.name)) printf("  %s %.2f", f.name, nanoseconds(*set, f.type, queries, head_dim, megabytes));
    printf("\n");
    return 0;
}
