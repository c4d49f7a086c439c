// See memory.h.
#include "memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace quire {

Mapping::Mapping(size_t bytes, bool huge) {
    if (!bytes) return;
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (huge && bytes >= (size_t)2 << 20) madvise(p, bytes, MADV_HUGEPAGE);  // refusal changes nothing
#else
    (void)huge;
#endif
    data_ = static_cast<uint8_t*>(p);
    size_ = bytes;
}

Mapping::~Mapping() {
    if (data_) munmap(data_, size_);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

}  // namespace quire
