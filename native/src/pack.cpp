// See pack.h.
#include "pack.h"

#include <string.h>

#include <algorithm>
#include <functional>
#include <stdexcept>

#include "half.h"
#include "planes.h"

namespace quire {

namespace {

// Sixteen rows of 32 codes, `row_stride` apart, each less `less`, as the vectors of weight.h: four rows at a time.
template <int bits> void store_tile(const uint8_t* codes, size_t row_stride, uint8_t less, uint8_t* tile) {
    auto two_bits = [](const Four* q, int half, int shift) {  // bits shift, shift + 1 of quads 4 half .. 4 half + 3
        Four word{};
        for (int j = 0; j < 4; j++) word |= ((q[4 * half + j] >> shift) & 0x03030303u) << (2 * j);
        return word;
    };
    auto one_bit = [](const Four* q, int shift) {
        Four word{};
        for (int j = 0; j < 8; j++) word |= ((q[j] >> shift) & 0x01010101u) << j;
        return word;
    };
    for (int r = 0; r < 16; r += 4) {
        Four q[8];
        for (int half = 0; half < 2; half++) {
            Four row[4], word[4];
            for (int i = 0; i < 4; i++) memcpy(&row[i], codes + (size_t)(r + i) * row_stride + 16 * half, 16);
            transpose(row, word);
            for (int j = 0; j < 4; j++) q[4 * half + j] = word[j] ^ 0x01010101u * less;
        }
        auto put = [&](int vector, Four word) { memcpy(tile + 64 * vector + 4 * r, &word, 16); };
        if constexpr (bits == 8) {
            for (int j = 0; j < 8; j++) put(j, q[j]);
        } else if constexpr (bits == 6) {
            for (int j = 0; j < 6; j++) put(j, q[j + j / 3] << 2 | (q[j < 3 ? 3 : 7] >> (4 - 2 * (j % 3)) & 0x03030303u));
        } else if constexpr (bits == 4 && kNibbleRows) {
            for (int j = 0; j < 8; j++) {
                uint8_t* to = tile + 32 * j + 4 * (r % 8);
                Four word = q[j];
                if (r >= 8) memcpy(&word, to, 16), word |= (q[j] ^ 0x08080808u) << 4;
                memcpy(to, &word, 16);
            }
        } else if constexpr (bits >= 4) {
            for (int j = 0; j < 4; j++) put(j, (q[j] & 0x0f0f0f0fu) | (q[j + 4] & 0x0f0f0f0fu) << 4);
            if constexpr (bits == 5) put(4, one_bit(q, 4));
        } else {
            put(0, two_bits(q, 0, 0)), put(1, two_bits(q, 1, 0));
            if constexpr (bits == 3) put(2, one_bit(q, 2));
        }
    }
}

using StoreTile = void (*)(const uint8_t* codes, size_t row_stride, uint8_t less, uint8_t* tile);

StoreTile tile_of(int bits) {
    switch (bits) {
        case 2: return store_tile<2>;
        case 3: return store_tile<3>;
        case 4: return store_tile<4>;
        case 5: return store_tile<5>;
        case 6: return store_tile<6>;
        default: return store_tile<8>;
    }
}

struct Packer {
    Matrix& w;
    const Codec& codec;
    Reader codes, scale, bias;
    const uint8_t* data;
    size_t row_bytes;

    static constexpr int kRows = 16;

    // The factors of rows' blocks number `index`, the first row's at `block`: floats as Bits.
    template <class Bits>
    void put_factors(uint8_t* out, const Factor& f, const Reader& reader, const uint8_t* block, int rows, int index, size_t region,
                     uint8_t* supers) const {
        const int tiles = codec.block / 32, per_tile = 32 / codec.group;
        const Bits sign = f.negate ? (Bits)((Bits)1 << (8 * sizeof(Bits) - 1)) : (Bits)0;
        Bits factors[kRows] = {};  // those of rows past n stay zeros
        for (int r = 0; r < rows; r++) {
            memcpy(&factors[r], block + f.at + (size_t)r * row_bytes, sizeof(Bits));
            factors[r] ^= sign;
        }
        uint8_t* to = out + region + (size_t)(index * tiles) * w.factor_step;
        if (w.scales == Scales::Half) {
            for (int t = 0; t < tiles; t++, to += w.factor_step)
                for (int g = 0; g < per_tile; g++) memcpy(to + sizeof factors * (size_t)g, factors, sizeof factors);
            return;
        }
        memcpy(supers + sizeof factors * (size_t)index, factors, sizeof factors);
        uint8_t values[kRows][32];
        if (f.codes.planes.empty()) memset(values, 1, sizeof values);  // a factor without codes beside one with them
        else reader.read(block, row_bytes, rows, values[0], sizeof values[0]);
        const bool high = w.scales == Scales::Nibble && &f == &codec.bias;
        for (int t = 0, v = 0; t < tiles; t++, to += w.factor_step)
            for (int g = 0; g < per_tile; g++, v++) {
                uint8_t* lanes = to + kRows * g;
                for (int r = 0; r < rows; r++) {
                    const uint8_t value = (uint8_t)(values[r][v] - reader.offset);
                    lanes[r] = high ? (uint8_t)(lanes[r] | value << 4) : value;
                }
            }
    }

    template <class Bits> void pack_block(int b) const {
        uint8_t* out = w.block(b);
        uint8_t numbers[kRows * 256] = {};  // rows past n stay zero
        const StoreTile store = tile_of(w.bits);
        const int count = w.k / codec.block, rows = std::min(kRows, w.n - kRows * b);
        const uint8_t* block = data + (size_t)(kRows * b) * row_bytes;
        for (int i = 0; i < count; i++, block += codec.nbytes) {
            codes.read(block, row_bytes, rows, numbers, (size_t)codec.block);
            for (int t = 0; t < codec.block / 32; t++)
                store(numbers + 32 * t, (size_t)codec.block, stored_less(w.bits, w.bias), out + (size_t)(i * codec.block / 32 + t) * w.code_step);
            put_factors<Bits>(out, codec.scale, scale, block, rows, i, w.scale_at, w.supers(b));
            if (w.bias)
                put_factors<Bits>(out, codec.bias, bias, block, rows, i, w.scales == Scales::Nibble ? w.scale_at : w.bias_at, w.supers(b) + w.bias_super_at);
        }
    }
};

bool fits_int8(const Reader& r) { return r.parts.empty() || (r.most - r.offset <= 127 && -r.offset >= -128); }
bool fits_nibble(const Reader& r) { return !r.parts.empty() && r.offset == 0 && r.most <= 15; }

}  // namespace

void Matrix::measure(bool together) {
    blocks = (n + 15) / 16;
    if (type != Type::Affine) {
        block_bytes = align64((size_t)k * 16 * (type == Type::F32 ? 4 : 2));
    } else {
        tiles = k / 32;
        const size_t t = (size_t)tiles, parts = 32 / (size_t)group, floats = wide ? 64 : 32;  // bytes of 16 factors
        code_bytes = 64 * (size_t)bits;
        scale_bytes = parts * (scales == Scales::Half ? floats : 16);
        const size_t supers = scales == Scales::Half ? 0 : align64(t / 8 * floats);
        if (together) {
            code_step = factor_step = code_bytes + scale_bytes + (has_biases() ? scale_bytes : 0);
            scale_at = code_bytes;
            bias_at = scale_at + scale_bytes;
            block_bytes = align64(t * code_step);
        } else {
            code_step = code_bytes, factor_step = scale_bytes;
            scale_at = align64(t * code_bytes);
            bias_at = scale_at + align64(t * scale_bytes);
            super_at = bias_at + (has_biases() ? align64(t * scale_bytes) : 0);
        }
        bias_super_at = supers;
        const size_t all = bias ? 2 * supers : supers;
        if (together) super_at = (size_t)blocks * block_bytes, super_step = all;
        else super_step = block_bytes = super_at + all;
    }
    bytes_ = (size_t)blocks * (block_bytes + (together ? super_step : 0));
}

void Matrix::lay_out(bool together) {
    measure(together);
    memory = Piece(bytes());
}

namespace {

// The codec, checked, and the matrix it makes, without memory.
Matrix shape_affine(const Codec& c, int64_t n, int64_t row_bytes, Reader& codes, Reader& scale, Reader& bias) {
    if (c.block != 32 && c.block != 256) refuse_codec("a block must hold 32 or 256 numbers");
    if (c.group != 16 && c.group != 32) refuse_codec("a group must hold 16 or 32 numbers");
    if (c.bits < 2 || c.bits > 8 || c.bits == 7) refuse_codec("codes must have 2, 3, 4, 5, 6 or 8 bits");
    if (c.nbytes < 1 || c.nbytes > 65535 || row_bytes % c.nbytes) refuse_codec("a row is not a whole number of blocks");
    const int64_t k = row_bytes / c.nbytes * c.block;
    if (n < 1 || k < 1 || n > (1 << 30) || k > (1 << 24)) refuse_codec("the matrix is empty or too large");
    auto inside = [&](const Factor& f) { return f.at >= 0 && f.at + (f.wide ? 4 : 2) <= c.nbytes; };
    if (!inside(c.scale) || (c.has_bias && !inside(c.bias))) refuse_codec("a scale lies outside its block");
    if (c.has_bias && c.bias.wide != c.scale.wide) refuse_codec("its factors are not of one width");

    codes = Reader(c.codes, c.block, c.nbytes);
    if (codes.parts.empty() || codes.most >= 1 << c.bits) refuse_codec("the codes do not fit their bits");
    const int groups = c.block / c.group;
    const bool two_level = !c.scale.codes.planes.empty() || (c.has_bias && !c.bias.codes.planes.empty());
    if (!c.scale.codes.planes.empty()) scale = Reader(c.scale.codes, groups, c.nbytes);
    if (c.has_bias && !c.bias.codes.planes.empty()) bias = Reader(c.bias.codes, groups, c.nbytes);
    if (!fits_int8(scale) || !fits_int8(bias)) refuse_codec("scale codes do not fit a signed byte");
    if (two_level && c.block != 256) refuse_codec("two-level scales need blocks of 256");

    Matrix w;
    w.type = Type::Affine;
    w.n = (int)n;
    w.k = (int)k;
    w.bits = c.bits;
    w.group = c.group;
    w.offset = c.codes.offset;
    w.bias = c.has_bias;
    w.wide = c.scale.wide;
    w.scales = !two_level                                                          ? Scales::Half
               : c.has_bias && fits_nibble(scale) && fits_nibble(bias) ? Scales::Nibble
                                                                                   : Scales::Byte;
    w.measure();
    return w;
}

Matrix shape_dense(Type type, int64_t n, int64_t k) {
    if (n < 1 || k < 1 || n > (1 << 30) || k > (1 << 24)) throw std::invalid_argument("the matrix is empty or too large");
    Matrix w;
    w.type = type;
    w.n = (int)n;
    w.k = (int)k;
    w.measure();
    return w;
}

}  // namespace

size_t affine_bytes(const Codec& codec, int64_t n, int64_t row_bytes) {
    Reader codes, scale, bias;
    return shape_affine(codec, n, row_bytes, codes, scale, bias).bytes();
}

namespace {

using PackBlock = std::function<void(int block)>;

// Measures w and gives what packs one of its blocks of rows, once it has memory. `c` and `data` must outlive it.
PackBlock affine(Matrix& w, const Codec& c, const uint8_t* data, int64_t n, int64_t row_bytes) {
    Reader codes, scale, bias;
    w = shape_affine(c, n, row_bytes, codes, scale, bias);
    Packer packer{w, c, std::move(codes), std::move(scale), std::move(bias), data, (size_t)row_bytes};
    return [packer = std::move(packer)](int b) { packer.w.wide ? packer.pack_block<uint32_t>(b) : packer.pack_block<uint16_t>(b); };
}

// 16 rows of 32 float16 numbers as codes of 14 bits, and each row's scale: the power of two that leaves the largest of them a whole byte. Code
// and scale hold every float16 that is not below half of that largest one, and the others to 2^-13 of it. Where one is not finite,
// the scale is not a number.
struct FourteenCodes {
    uint8_t upper[16][32], lower[16][32];
    uint16_t scale[16];

    void take(int row, const uint8_t* halves) {  // loops that compilers make vectors of
        uint16_t half[32];
        memcpy(half, halves, sizeof half);
        int16_t most = 0;
        for (int i = 0; i < 32; i++) most = std::max(most, (int16_t)(half[i] & 0x7fff));
        if (most >= 0x7c00) {
            scale[row] = 0x7e00;
            memset(upper[row], 128, 32), memset(lower[row], 32, 32);
            return;
        }
        // A scale of 2^(exponent - 21). No float16 has anything below 2^-24, which is one in a code with the scale of exponent 3.
        const int exponent = std::max(3, (most >> 10) + ((most & 1023) > 1015));
        scale[row] = exponent > 6 ? (uint16_t)((exponent - 6) << 10) : (uint16_t)(0x40 << (exponent - 3));
        const float times = bits_to_float((uint32_t)(127 + 27 - exponent) << 23);
        uint16_t code[32];  // and 32 more
        for (int i = 0; i < 32; i++) code[i] = (uint16_t)(float_to_bits(widen(half[i]) * times + kSumPoint) - float_to_bits(kSumPoint) + 32);
        for (int i = 0; i < 32; i++) lower[row][i] = (uint8_t)(code[i] & 63), upper[row][i] = (uint8_t)((code[i] >> 6) + 128);
    }

  private:
#if defined(__aarch64__)
    static float widen(uint16_t h) {
        __fp16 number;
        memcpy(&number, &h, 2);
        return (float)number;
    }
#else
    static float widen(uint16_t h) {  // of a finite one, without a branch
        const uint32_t size = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
        const uint32_t normal = size + (112u << 23), below = float_to_bits(bits_to_float(size + (113u << 23)) - 0x1p-14f);
        const uint32_t is_below = (uint32_t)((int32_t)(size - (1u << 23)) >> 31);
        return bits_to_float(sign | (normal & ~is_below) | (below & is_below));
    }
#endif
};

Matrix shape_fourteen(int64_t n, int64_t k) {
    if (k % 32) throw std::invalid_argument("codes of 14 bits come in groups of 32");
    Matrix w = shape_dense(Type::F16, n, k);
    w.type = Type::Affine;
    w.bits = 14, w.group = 32;
    w.measure();
    return w;
}

PackBlock fourteen(Matrix& w, const void* data, int64_t n, int64_t k) {
    w = shape_fourteen(n, k);
    return [&w, data](int b) {
        static const uint8_t none[64] = {};
        const uint8_t* rows = (const uint8_t*)data + (size_t)(16 * b) * (size_t)w.k * 2;
        FourteenCodes codes;
        for (int t = 0; t < w.tiles; t++) {
            for (int r = 0; r < 16; r++) codes.take(r, 16 * b + r < w.n ? rows + ((size_t)r * (size_t)w.k + 32 * (size_t)t) * 2 : none);
            uint8_t* tile = w.block(b) + (size_t)t * w.code_step;
            store_tile<8>(codes.upper[0], 32, stored_less(8, false), tile);
            store_tile<6>(codes.lower[0], 32, stored_less(6, false), tile + 512);
            memcpy(w.block(b) + w.scale_at + (size_t)t * w.factor_step, codes.scale, sizeof codes.scale);
        }
    };
}

// Sixteen rows of a few numbers, as many as sixteen bytes hold, column after column.
inline void interleave(const uint8_t* rows, size_t row_bytes, uint32_t* to) {
    for (int r = 0; r < 16; r += 4) {
        Four row[4], column[4];
        for (int i = 0; i < 4; i++) memcpy(&row[i], rows + (size_t)(r + i) * row_bytes, sizeof row[i]);
        transpose(row, column);
        for (int i = 0; i < 4; i++) memcpy(to + 16 * i + r, &column[i], sizeof column[i]);
    }
}
inline void interleave(const uint8_t* rows, size_t row_bytes, uint16_t* to) {
    for (int r = 0; r < 16; r += 8) {
        Four low[4], high[4], column[4];  // two rows' numbers in each word, of the first four columns and the others
        for (int i = 0; i < 4; i++) {
            Eight a, b;
            memcpy(&a, rows + (size_t)(r + 2 * i) * row_bytes, sizeof a), memcpy(&b, rows + (size_t)(r + 2 * i + 1) * row_bytes, sizeof b);
            low[i] = in_pairs<0>(a, b), high[i] = in_pairs<4>(a, b);
        }
        transpose(low, column);
        for (int i = 0; i < 4; i++) memcpy(to + 16 * i + r, &column[i], sizeof column[i]);
        transpose(high, column);
        for (int i = 0; i < 4; i++) memcpy(to + 16 * (4 + i) + r, &column[i], sizeof column[i]);
    }
}

PackBlock dense(Matrix& w, Type type, const void* data, int64_t n, int64_t k) {
    w = shape_dense(type, n, k);
    auto pack_as = [&w, data, k](auto number) -> PackBlock {
        using T = decltype(number);
        return [&w, data, k](int b) {
            T* out = (T*)w.block(b);
            const size_t row_bytes = (size_t)k * sizeof(T);
            const uint8_t* rows = (const uint8_t*)data + (size_t)(16 * b) * row_bytes;
            constexpr int64_t kStep = 16 / sizeof(T);
            int64_t done = 0;
            if (16 * b + 16 <= w.n)
                for (; done + kStep <= k; done += kStep) interleave(rows + (size_t)done * sizeof(T), row_bytes, out + 16 * done);
            for (int r = 0; r < 16 && 16 * b + r < w.n; r++)
                for (int64_t i = done; i < k; i++) memcpy(out + i * 16 + r, rows + (size_t)r * row_bytes + (size_t)i * sizeof(T), sizeof(T));
        };
    };
    return type == Type::F32 ? pack_as(uint32_t{}) : pack_as(uint16_t{});
}

// Side by side: a small matrix by itself would get no huge page.
void give_memory(std::vector<Matrix>& matrices) {
    size_t total = 0;
    for (const Matrix& w : matrices) total += w.bytes();  // whole lines
    const auto memory = std::make_shared<Mapping>(total);
    size_t at = 0;
    for (Matrix& w : matrices) w.memory = Piece(memory, at, w.bytes()), at += w.bytes();
}

}  // namespace

size_t dense_bytes(Type type, int64_t n, int64_t k) { return (type == Type::Affine ? shape_fourteen(n, k) : shape_dense(type, n, k)).bytes(); }

std::vector<Matrix> pack(ThreadPool& pool, const std::vector<Weight>& weights) {
    std::vector<Matrix> packed(weights.size());
    std::vector<PackBlock> work;
    std::vector<int> ends;  // work items up to and with each weight
    for (size_t i = 0; i < weights.size(); i++) {
        const Weight& from = weights[i];
        Matrix& w = packed[i];
        work.push_back(from.codec ? affine(w, *from.codec, (const uint8_t*)from.data, from.n, from.width)
                            : from.type == Type::Affine ? fourteen(w, from.data, from.n, from.width)
                                                        : dense(w, from.type, from.data, from.n, from.width));
        ends.push_back((ends.empty() ? 0 : ends.back()) + w.blocks);
    }
    give_memory(packed);
    pool.for_each(ends.empty() ? 0 : ends.back(), [&](int item) {
        const size_t i = (size_t)(std::upper_bound(ends.begin(), ends.end(), item) - ends.begin());
        work[i](item - (i ? ends[i - 1] : 0));
    });
    return packed;
}

Matrix pattern(ThreadPool& pool, int64_t n, int64_t k) {
    if (n < 1 || k < 32 || n > (1 << 30) || k > (1 << 24) || k % 32) throw std::invalid_argument("the matrix is empty or too large");
    Matrix w;
    w.type = Type::Affine;
    w.n = (int)n;
    w.k = (int)k;
    w.bits = 4;
    w.group = 32;
    w.offset = 8;
    w.lay_out();
    pool.for_each(w.blocks, [&](int b) { memset(w.block(b), 0x2c, w.block_bytes); });  // also a float16: 0.065
    return w;
}

}  // namespace quire
