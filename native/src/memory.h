// Zeroed memory straight from the system: huge pages where it grants them, untouched pages cost nothing.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace quire {

class Mapping {
public:
    Mapping() = default;
    explicit Mapping(size_t bytes, bool huge = true);  // huge: wish for huge pages; not for what is touched here and there
    ~Mapping();
    Mapping(Mapping&& other) noexcept;
    Mapping& operator=(Mapping&& other) noexcept;
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    uint8_t* data() { return data_; }
    const uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace quire
