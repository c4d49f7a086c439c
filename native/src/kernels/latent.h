// Attention over latent cells: halves [16][head_dim], one key of a token for every head, and the front of a key is its value.
//
// Parts, chunks and merging are those of attention.h, and so are weights and values. Only a score is another sum: keys lie
// along their columns here, so it is 16 fma chains (column d in lane d % 16), added up by the fixed tree. Heads are the rows of
// a register tile: a key is loaded once for several of them, and with more queries than one tile holds it is widened once
// for all.
#pragma once

#include "attention.h"

namespace {

constexpr int kLatentQueries = kMaxChains >= 24 ? 6 : kMaxQueries < 3 ? kMaxQueries : 3;  // of a register tile

void store_latent(const float* k, const KvCell& cell, uint8_t* to, int slot) {
    const int D = cell.head_dim;
    uint16_t* row = (uint16_t*)to + slot * D;
    for (int d = 0; d < D; d += 16) fstore_half_n(row + d, fload_n(k + d, D - d), D - d);
}

// Scores of Q queries against T keys, one after the other from `keys` on. wide: columns, whole vectors of them.
template <int Q, int T, class K>
QUIRE_NOINLINE void latent_tile(const K* keys, int stride, int wide, const float* query, float* scores) {
    F acc[Q][T];
    QUIRE_UNROLL
    for (int q = 0; q < Q; q++)
        QUIRE_UNROLL
        for (int t = 0; t < T; t++) acc[q][t] = fzero();
    for (int d = 0; d < wide; d += 16) {
        F k[T];
        QUIRE_UNROLL
        for (int t = 0; t < T; t++) k[t] = widen(keys + t * stride + d);
        QUIRE_UNROLL
        for (int q = 0; q < Q; q++) {
            const F x = fload(query + q * kMaxLatentDim + d);
            QUIRE_UNROLL
            for (int t = 0; t < T; t++) acc[q][t] = ffma(x, k[t], acc[q][t]);
        }
    }
    QUIRE_UNROLL
    for (int q = 0; q < Q; q++)
        QUIRE_UNROLL
        for (int t = 0; t < T; t++) scores[q * kAttendStride + t] = hsum(acc[q][t]);
}

template <int Q, class K> inline void latent_page(const K* keys, int stride, int wide, const float* query, float* scores) {
    constexpr int T = vectors_for(Q);
    for (int t = 0; t < kPage; t += T) latent_tile<Q, T>(keys + t * stride, stride, wide, query, scores + t);
}

// Queries in register tiles of about the same size.
template <class Body> inline void for_latent_tiles(int count, Body&& body) {
    const int tiles = (count + kLatentQueries - 1) / kLatentQueries, each = count / tiles, more = count % tiles;
    for (int t = 0, first = 0; t < tiles; t++) {
        const int n = each + (t < more);
        with_count(n, [&](auto count_) {
            if constexpr (decltype(count_)::value <= kLatentQueries) body(count_, first);
        });
        first += n;
    }
}

void attend_latent_parts(const AttendArgs& a) {
    const int D = a.cell.head_dim, L = a.cell.latent, wide = (D + 15) / 16 * 16, wide_value = (L + 15) / 16 * 16;
    const PartShape shape(L);
    float* queries = (float*)a.scratch;
    float* scores = queries + kMaxLatent * kMaxLatentDim;
    float* block = scores + kMaxLatent * kAttendStride;
    int longest = 0;
    const F scale = fset(a.scale * 1.44269504f);
    for (int q = 0; q < a.count; q++) {
        for (int d = 0; d < D; d += 16) fstore(queries + q * kMaxLatentDim + d, fmul(fload_n(a.query[q] + d, D - d), scale));
        for (int d = 0; d < wide_value; d += 16) fstore(a.part[q] + d, fzero());
        if (a.seen[q] > longest) longest = a.seen[q];
    }
    const int pages = (longest + kPage - 1) / kPage;
    const uint16_t* keys[kChunk / kPage];
    for (int p = 0; p < pages; p++) keys[p] = (const uint16_t*)(a.cells + (size_t)a.pages[p] * a.page_stride);
    auto weigh_all = [&] {
        for (int q = 0; q < a.count; q++) weigh<Owed::Nothing>(scores + q * kAttendStride, a.seen[q], nullptr, shape, a.part[q]);
    };

    if (a.count <= kLatentQueries && D % 16 == 0 && L % 16 == 0) {
        for_latent_tiles(a.count, [&](auto n, int) {
            constexpr int Q = decltype(n)::value;
            for (int p = 0; p < pages; p++) latent_page<Q>(keys[p], D, D, queries, scores + p * kPage);
            weigh_all();
            add_values<Q, kPage>(keys, keys, D, L, 0, longest, a.seen, 0, scores, a.part);
        });
        return;
    }

    constexpr int kBlockPages = kLatentBlock / kPage;
    auto widen_rows = [&](int start, int tokens, int columns) {  // of keys, to a block that is padded with zeros
        for (int t = 0; t < tokens; t++) {
            const uint16_t* row = keys[(start + t) / kPage] + (start + t) % kPage * D;
            float* to = block + t * ((columns + 15) / 16 * 16);
            for (int d = 0; d < columns; d += 16) fstore(to + d, widen_n(row + d, columns - d));
        }
    };
    for (int page = 0; page < pages; page += kBlockPages) {
        const int count = pages - page < kBlockPages ? pages - page : kBlockPages;
        widen_rows(page * kPage, count * kPage, D);
        for_latent_tiles(a.count, [&](auto n, int first) {
            constexpr int Q = decltype(n)::value;
            int here = 0;
            for (int q = 0; q < Q; q++) here = a.seen[first + q] > here ? a.seen[first + q] : here;
            for (int p = 0; p < count && (page + p) * kPage < here; p++)
                latent_page<Q>(block + p * kPage * wide, wide, wide, queries + first * kMaxLatentDim,
                               scores + first * kAttendStride + (page + p) * kPage);
        });
    }
    weigh_all();
    for (int start = 0; start < longest; start += kLatentBlock) {
        const int tokens = longest - start < kLatentBlock ? longest - start : kLatentBlock;
        widen_rows(start, tokens, L);
        const float* segment = block;
        for_latent_tiles(a.count, [&](auto n, int first) {
            add_values<decltype(n)::value, kLatentBlock>(&segment, &segment, wide_value, wide_value, 0, tokens, a.seen + first, start,
                                                         scores + first * kAttendStride + start, a.part + first);
        });
    }
}

void attend_latent(const AttendArgs& a) {
    attend_latent_parts(a);
    merge_parts(a, a.cell.latent);
}

}  // namespace

#undef QUIRE_NOINLINE
