// Zeroed memory straight from the system: huge pages where it grants them, untouched pages cost nothing.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <memory>
#include <utility>

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

// A part of a mapping, which lives as long as any part of it.
class Piece {
public:
    Piece() = default;
    explicit Piece(size_t bytes) : Piece(std::make_shared<Mapping>(bytes), 0, bytes) {}
    Piece(std::shared_ptr<Mapping> of, size_t at, size_t bytes) : of_(std::move(of)), data_(of_->data() + at), size_(bytes) {}

    uint8_t* data() { return data_; }
    const uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

private:
    std::shared_ptr<Mapping> of_;
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace quire
