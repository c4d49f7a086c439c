// Numbers of a codec's blocks, out of the planes of bits that they lie in (pack.h). The planes are checked when a Reader is made: a
// wrong one is an error, never a read outside the block.
#pragma once

#include <stdint.h>
#include <string.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lanes.h"
#include "pack.h"

namespace quire {

[[noreturn]] inline void refuse_codec(const std::string& what) { throw std::invalid_argument("codec: " + what); }

// A word that has this byte everywhere.
inline Two all_bytes(Two, uint8_t byte) { return Two{} + byte * 0x0101010101010101u; }
template <class Word> inline Word all_bytes(Word, uint8_t byte) { return (Word)(byte * (Word)0x0101010101010101u); }

// A plane cut into runs of consecutive bytes with one shift. Many bytes are moved at a time, in words of 64 bits or fewer: what
// a shift carries over from a neighbouring byte is masked away, and sums stay below 256, so bytes never mix.
struct Run {
    int first, length, byte, shift;
    uint8_t mask;  // of the bits that a shifted byte still has
    bool spread = false;  // eight numbers are one byte's bits, the lowest first
};

struct Reader {
    struct Part {
        std::vector<Run> runs;
        uint8_t lift, flip;
    };
    std::vector<Part> parts;
    int count = 0, offset = 0, most = 0;  // most: the largest sum before the offset is taken off

    Reader() = default;
    Reader(const Ints& ints, int numbers, int nbytes) : count(numbers), offset(ints.offset) {
        for (const Plane& p : ints.planes) {
            if ((int)p.byte.size() != count || (int)p.shift.size() != count) refuse_codec("a plane has the wrong length");
            if (p.mask < 0 || p.mask > 255 || p.flip < 0 || p.flip > 255 || p.lift < 0 || p.lift > 7)
                refuse_codec("a plane's mask, flip or lift is out of range");
            Part part{{}, (uint8_t)p.lift, (uint8_t)p.flip};
            for (int i = 0; i < count; i++) {
                if (p.byte[(size_t)i] >= nbytes || p.shift[(size_t)i] > 7) refuse_codec("a plane points outside its block");
                int byte = p.byte[(size_t)i], shift = p.shift[(size_t)i];
                if (spreads(p, i, nbytes)) {
                    part.runs.push_back({i, 8, byte, 0, 1, true});
                    i += 7;
                    continue;
                }
                Run* last = part.runs.empty() ? nullptr : &part.runs.back();
                if (last && !last->spread && last->shift == shift && last->byte + last->length == byte) last->length++;
                else part.runs.push_back({i, 1, byte, shift, (uint8_t)(p.mask & 0xff >> shift)});
            }
            most += p.mask << p.lift;
            parts.push_back(std::move(part));
        }
        if (most > 255) refuse_codec("a number needs more than 8 bits");
    }

    // The numbers of a block of each row, before the offset is taken off. Rows are `row_bytes` apart, and their numbers `stride`.
    void read(const uint8_t* block, size_t row_bytes, int rows, uint8_t* out, size_t stride) const {
        const Rows all{block, row_bytes, rows, out, stride};
        for (size_t p = 0; p < parts.size(); p++) {
            if (p == 0) add<true>(parts[p], all);
            else add<false>(parts[p], all);
        }
    }

private:
    static bool spreads(const Plane& p, int first, int nbytes) {
        if (p.mask != 1 || first + 8 > (int)p.byte.size() || p.byte[(size_t)first] >= nbytes) return false;
        for (int i = 0; i < 8; i++)
            if (p.byte[(size_t)(first + i)] != p.byte[(size_t)first] || p.shift[(size_t)(first + i)] != i) return false;
        return true;
    }

    struct Rows {
        const uint8_t* block;
        size_t row_bytes;
        int count;
        uint8_t* out;
        size_t stride;
    };

    template <bool first> static void add(const Part& p, const Rows& rows) {
        for (const Run& r : p.runs) {
            if (r.spread) {
                add_bits<first>(p, r, rows);
                continue;
            }
            int done = add<first, Two>(p, r, rows, 0);
            done = add<first, uint64_t>(p, r, rows, done);
            done = add<first, uint32_t>(p, r, rows, done);
            add<first, uint8_t>(p, r, rows, done);
        }
    }

    // Every bit where it is in a byte of its own, then moved to the lowest place: a sum with 0x7f carries into the highest one.
    template <bool first> static void add_bits(const Part& p, const Run& r, const Rows& rows) {
        const int lift = p.lift;
        const uint8_t* in = rows.block + r.byte;
        uint8_t* out = rows.out + r.first;
        for (int row = 0; row < rows.count; row++, in += rows.row_bytes, out += rows.stride) {
            const uint64_t bits = all_bytes(uint64_t{}, (uint8_t)(*in ^ p.flip)) & 0x8040201008040201u;
            uint64_t sum = 0;
            if (!first) memcpy(&sum, out, 8);
            sum += ((bits + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u) << lift;
            memcpy(out, &sum, 8);
        }
    }

    // A run from `from` on in every row, as many whole words as it has. Returns how far it got.
    template <bool first, class Word> static int add(const Part& p, const Run& r, const Rows& rows, int from) {
        constexpr int kBytes = (int)sizeof(Word);
        const int end = from + (r.length - from) / kBytes * kBytes;
        if (from == end) return end;
        const Word flip = all_bytes(Word{}, p.flip), mask = all_bytes(Word{}, r.mask);
        const int shift = r.shift, lift = p.lift;
        const uint8_t* in = rows.block + r.byte;
        uint8_t* out = rows.out + r.first;
        for (int row = 0; row < rows.count; row++, in += rows.row_bytes, out += rows.stride)
            for (int i = from; i < end; i += kBytes) {
                Word bits, sum{};
                memcpy(&bits, in + i, sizeof(Word));
                if (!first) memcpy(&sum, out + i, sizeof(Word));
                sum = (Word)(sum + (Word)((Word)((Word)(bits ^ flip) >> shift & mask) << lift));
                memcpy(out + i, &sum, sizeof(Word));
            }
        return end;
    }
};

}  // namespace quire
