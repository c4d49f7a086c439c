// Pages of the KV pools as bytes: one gather or scatter for all layers. A page is one piece of memory, [layer][kv_head] of cells or
// [layer] of states, so a row is one memcpy.
#include <string.h>

#include <stdexcept>

#include "plan.h"

namespace quire {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("pages: " + what); }

bool finite_halves(const uint8_t* bytes, size_t count) {
    uint16_t most = 0;
    for (size_t i = 0; i < count; i++) {
        uint16_t half;
        memcpy(&half, bytes + 2 * i, sizeof half);
        half &= 0x7fff;
        most = half > most ? half : most;
    }
    return most < 0x7c00;
}

}  // namespace

size_t Plan::page_part(int group, const int64_t* pages, size_t count, int first, int layers) const {
    if (group < 0 || group >= groups()) refuse("there is no group " + std::to_string(group));
    const KvShape& kv = pools_[(size_t)group].shape;
    if (first < 0 || layers < 0 || first > kv.layers || layers > kv.layers - first) refuse("there are no such layers");
    for (size_t i = 0; i < count; i++)
        if (pages[i] < 0 || pages[i] >= kv.pages)
            refuse(std::to_string(pages[i]) + " is not a page of the pool (" + std::to_string(kv.pages) + ")");
    return (size_t)layers * kv.layer_bytes();
}

void Plan::read_pages(int group, const int64_t* pages, size_t count, int first, int layers, uint8_t* to) const {
    const size_t part = page_part(group, pages, count, first, layers);
    for (size_t i = 0; part && i < count; i++, to += part) memcpy(to, cells(group, first, (int)pages[i]), part);
}

void Plan::write_pages(int group, const int64_t* pages, size_t count, int first, int layers, const uint8_t* from) {
    const size_t part = page_part(group, pages, count, first, layers);
    const KvShape& kv = pools_[(size_t)group].shape;
    // Attention over halves looks for what is not finite only in a pool that may have it, as store_kv says where steps write.
    const bool halves = kv.type == KvType::Half && !kv.latent && !kv.state;
    for (size_t i = 0; part && i < count; i++, from += part) {
        memcpy(cells(group, first, (int)pages[i]), from, part);
        if (halves && finite(group) && !finite_halves(from, part / 2)) endless(group);
    }
}

}  // namespace quire
