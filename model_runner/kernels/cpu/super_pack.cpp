// Weights in superblocks (super_blocks.h): packing rows of a GGUF file, and reading rows of the packed weight. The matmul
// is super_matmul.cpp.

#include "super_blocks.h"

#include <algorithm>
#include <atomic>

#include "parallel.h"
#include "program.h"

namespace engine {
namespace {

constexpr int64_t MIN_NUMBERS = 1 << 13;  // inputs of rows per thread, at least
constexpr int64_t SUPERBLOCK_GROUPS = SUPERBLOCK / 4;

inline uint32_t word_at(const uint8_t* from, int64_t n) { return load_pair(from + 4 * n); }

// A superblock of one output, in the order of the file or of the packed layout.
template <int BITS>
struct Superblock {
    typedef SuperLayout<BITS> Layout;
    static constexpr int64_t FILE_BYTES = BlockCall::superblock_bytes(BITS) / BlockCall::PANEL;

    uint32_t groups[SUPERBLOCK_GROUPS];  // 4 integers each
    uint32_t scales[Layout::SCALE_LINES];
    uint16_t factors[2];  // d and dmin

    // The layouts of a file (ggml_types.py).
    ALWAYS_INLINE void read(const uint8_t* from) {
        if constexpr (BITS == 6) {
            const uint8_t *low = from, *high = from + 128;
            for (int half = 0; half < 2; ++half, low += 64, high += 32)
                for (int quarter = 0; quarter < 4; ++quarter)
                    for (int n = 0; n < 8; ++n) {
                        uint32_t lower = word_at(low, quarter % 2 * 8 + n) >> (quarter / 2 * 4);
                        uint32_t upper = word_at(high, n) >> (2 * quarter);
                        groups[half * 32 + quarter * 8 + n] = (lower & 0x0f0f0f0fu) | (upper & 0x03030303u) << 4;
                    }
            std::memcpy(scales, from + 192, sizeof scales);
            std::memcpy(factors, from + 208, 2);
        } else {
            std::memcpy(factors, from, sizeof factors);
            std::memcpy(scales, from + 4, sizeof scales);
            const uint8_t *high = from + 16, *low = from + (BITS == 5 ? 48 : 16);
            for (int pair = 0; pair < 4; ++pair)
                for (int half = 0; half < 2; ++half)
                    for (int n = 0; n < 8; ++n) {
                        uint32_t group = (word_at(low, pair * 8 + n) >> (4 * half)) & 0x0f0f0f0fu;
                        if (BITS == 5) group |= ((word_at(high, n) >> (2 * pair + half)) & 0x01010101u) << 4;
                        groups[pair * 16 + half * 8 + n] = group;
                    }
        }
    }

    // Into the superblock of a panel.
    ALWAYS_INLINE void pack(uint8_t* panel, int64_t column) const {
        auto put = [=](uint8_t* line, uint32_t word) { std::memcpy(line + 4 * column, &word, sizeof word); };
        uint32_t lines[BITS];
        for (int block = 0; block < SUPERBLOCK_BLOCKS; ++block) {
            fold_groups<BITS>(groups + block * GROUPS, lines);
            for (int n = 0; n < BITS; ++n) put(panel + Layout::INTEGERS + (block * BITS + n) * Layout::LINE_BYTES, lines[n]);
        }
        for (int n = 0; n < Layout::SCALE_LINES; ++n) put(panel + Layout::SCALES + n * Layout::LINE_BYTES, scales[n]);
        for (int n = 0; n < (Layout::HAS_MINIMA ? 2 : 1); ++n)
            std::memcpy(panel + Layout::FACTORS + (n * BlockCall::PANEL + column) * 2, factors + n, 2);
    }

    // The 256 weights of an output of a panel.
    static void unpack(const uint8_t* panel, int64_t column, bf16* out) {
        auto line = [=](int n) { return load_pair(panel + Layout::SCALES + n * Layout::LINE_BYTES + 4 * column); };
        auto factor = [=](int n) { return half_to_float(panel + Layout::FACTORS + (n * BlockCall::PANEL + column) * 2); };
        auto byte_of = [](uint32_t word, int n) { return uint8_t(word >> (8 * n)); };
        const float d = factor(0), dmin = Layout::HAS_MINIMA ? factor(1) : 0.0f;
        for (int group = 0; group < SUPERBLOCK_GROUPS; ++group) {
            int block = group / GROUPS;
            uint32_t four = group_of_lines<BITS>(group % GROUPS, [=](int n) {
                return load_pair(panel + Layout::INTEGERS + block * Layout::BLOCK_BYTES + n * Layout::LINE_BYTES + 4 * column);
            });
            float scale, minimum;
            if constexpr (Layout::HAS_MINIMA) {
                scale = d * float(byte_of(six_bit_scales(block / 4, line), block % 4));
                minimum = -dmin * float(byte_of(six_bit_minima(block / 4, line), block % 4));
            } else {
                int half = group / 4;
                scale = d * float(int8_t(byte_of(line(half / 4), half % 4)));
                minimum = -32.0f * scale;
            }
            for (int n = 0; n < 4; ++n) from_float(float(byte_of(four, n)) * scale + minimum, out + 4 * group + n);
        }
    }
};

struct RowsOfFile {
    const uint8_t* raw;
    int64_t row_bytes;
    const int64_t *rows, *superblocks;  // null: in order

    const uint8_t* row(int64_t n) const { return raw + (rows == nullptr ? n : rows[n]) * row_bytes; }
    int64_t superblock(int64_t n) const { return superblocks == nullptr ? n : superblocks[n]; }
};

inline bool is_finite_half(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

// Returns whether all scales and minima are finite.
template <int BITS>
bool pack_rows(const RowsOfFile& from, int64_t first, int64_t num_rows, int64_t inputs, uint8_t* packed) {
    constexpr int64_t PANEL = BlockCall::PANEL, BYTES = SuperLayout<BITS>::BYTES;
    const int64_t superblocks = inputs / SUPERBLOCK, last = first + num_rows, begin_panel = first / PANEL;
    std::atomic<bool> all_finite{true};
    parallel_for((last + PANEL - 1) / PANEL - begin_panel, 1, [&](int64_t begin, int64_t end) {
        bool finite = true;
        for (int64_t panel = begin_panel + begin; panel < begin_panel + end; ++panel) {
            uint8_t* to = packed + panel * superblocks * BYTES;
            int64_t start = std::max(first, panel * PANEL), stop = std::min(last, (panel + 1) * PANEL);
            if (start == panel * PANEL && stop < start + PANEL) std::memset(to, 0, superblocks * BYTES);
            for (int64_t n = 0; n < superblocks; ++n, to += BYTES)
                for (int64_t output = start; output < stop; ++output) {
                    Superblock<BITS> superblock;
                    superblock.read(from.row(output - first) + from.superblock(n) * Superblock<BITS>::FILE_BYTES);
                    superblock.pack(to, output % PANEL);
                    for (int factor = 0; factor < (SuperLayout<BITS>::HAS_MINIMA ? 2 : 1); ++factor)
                        finite &= is_finite_half(superblock.factors[factor]);
                }
        }
        if (!finite) all_finite.store(false, std::memory_order_relaxed);
    });
    return all_finite.load();
}

template <class Body>
void with_bits(int bits, const Body& body) {
    if (bits == 4)
        body.template operator()<4>();
    else if (bits == 5)
        body.template operator()<5>();
    else
        body.template operator()<6>();
}

}  // namespace
}  // namespace engine

// Bytes of the packed form of [outputs, inputs]; inputs is a multiple of 256, bits 4, 5 or 6.
EXPORT int64_t packed_superblocks_bytes(int64_t outputs, int64_t inputs, int bits) {
    using namespace engine;
    return (outputs + BlockCall::PANEL - 1) / BlockCall::PANEL * (inputs / SUPERBLOCK) * BlockCall::superblock_bytes(bits);
}

// Packs outputs [first, first + num_rows). Panels are filled in order: an output's panel holds no later output yet.
// raw: rows of Q4_K, Q5_K or Q6_K, for 4, 5 or 6 bits, `row_bytes` apart; rows: [num_rows], the row of each output, and
// superblocks: [inputs / 256], the superblock of a row for each 256 inputs, or null: in order. Returns whether all scales
// and minima are finite.
EXPORT int pack_superblocks(const uint8_t* raw, int64_t row_bytes, const int64_t* rows, const int64_t* superblocks,
                             int64_t first, int64_t num_rows, int64_t inputs, int bits, uint8_t* packed) {
    using namespace engine;
    bool all_finite = true;
    with_bits(bits, [&]<int BITS>() {
        all_finite = pack_rows<BITS>(RowsOfFile{raw, row_bytes, rows, superblocks}, first, num_rows, inputs, packed);
    });
    return all_finite;
}

// out[n] = weight[ids[n]], rounded to bfloat16; ids: [num_rows] in [0, outputs); out: [num_rows][inputs] bfloat16.
EXPORT void superblocks_rows(const uint8_t* packed, const int64_t* ids, void* out_, int64_t num_rows, int64_t inputs,
                             int bits) {
    using namespace engine;
    bf16* out = static_cast<bf16*>(out_);
    const int64_t superblocks = inputs / SUPERBLOCK, bytes = BlockCall::superblock_bytes(bits);
    parallel_for(num_rows, MIN_NUMBERS / inputs + 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const uint8_t* panel = packed + ids[row] / BlockCall::PANEL * superblocks * bytes;
            for (int64_t n = 0; n < superblocks; ++n, panel += bytes)
                with_bits(bits, [&]<int BITS>() {
                    Superblock<BITS>::unpack(panel, ids[row] % BlockCall::PANEL, out + row * inputs + n * SUPERBLOCK);
                });
        }
    });
}

RECORDABLE(superblocks_rows)
