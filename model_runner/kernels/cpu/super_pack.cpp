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

// A superblock of the 32 outputs of a panel, in the layout of a file (ggml_types.py), or of one output of a packed panel.
template <int BITS>
struct Superblock {
    typedef SuperLayout<BITS> Layout;
    static constexpr int64_t PANEL = BlockCall::PANEL, FILE_BYTES = BlockCall::superblock_bytes(BITS) / PANEL;
    static constexpr int FILE_WORDS = FILE_BYTES / 4;  // with 6 bits, d follows

    // rows: the superblock of each output.
    static ALWAYS_INLINE void pack(const uint8_t* const (&rows)[PANEL], uint8_t* panel) {
        alignas(64) uint32_t words[FILE_WORDS][PANEL];
        for (int r = 0; r < PANEL; r += 4)
            for (int n = 0; n < FILE_WORDS; n += 4) {
                const uint8_t* const four[4] = {rows[r] + 4 * n, rows[r + 1] + 4 * n, rows[r + 2] + 4 * n, rows[r + 3] + 4 * n};
                store_transposed(four, reinterpret_cast<uint8_t*>(words[n] + r));
            }
        for (int first = 0; first < PANEL; first += LANES) {
            auto word = [&](int n) { return (u32x16)load_pairs(words[n] + first); };
            u32x16 groups[GROUPS], lines[BITS];
            for (int block = 0; block < SUPERBLOCK_BLOCKS; ++block) {
                for (int n = 0; n < GROUPS; ++n) groups[n] = group_of_file(block, n, word);
                fold_groups<BITS>(groups, lines);
                for (int n = 0; n < BITS; ++n)
                    put(panel + Layout::INTEGERS + (block * BITS + n) * Layout::LINE_BYTES + 4 * first, lines[n]);
            }
        }
        constexpr int SCALES = BITS == 6 ? 48 : 1;
        std::memcpy(panel + Layout::SCALES, words[SCALES], Layout::SCALE_LINES * sizeof words[0]);
        uint16_t* factors = reinterpret_cast<uint16_t*>(panel + Layout::FACTORS);
        for (int r = 0; r < PANEL; ++r)
            if (Layout::HAS_MINIMA) {
                factors[r] = uint16_t(words[0][r]);
                factors[PANEL + r] = uint16_t(words[0][r] >> 16);
            } else {
                std::memcpy(factors + r, rows[r] + 4 * FILE_WORDS, 2);
            }
    }

    // The columns [begin, end) of another panel's superblock.
    static void copy_columns(const uint8_t* from, uint8_t* to, int64_t begin, int64_t end) {
        for (int64_t at = 0; at < Layout::BYTES;) {
            const bool is_factors = at >= Layout::FACTORS && at < Layout::INTEGERS;
            const int64_t bytes = is_factors ? 2 : 4;
            std::memcpy(to + at + begin * bytes, from + at + begin * bytes, (end - begin) * bytes);
            at += PANEL * bytes;
        }
    }

    // Whether all d and dmin of a panel are finite.
    static ALWAYS_INLINE bool is_finite(const uint8_t* panel) {
        const uint16_t* factors = reinterpret_cast<const uint16_t*>(panel + Layout::FACTORS);
        bool finite = true;
        for (int n = 0; n < (Layout::HAS_MINIMA ? 2 : 1) * PANEL; ++n) finite &= (factors[n] & 0x7c00) != 0x7c00;
        return finite;
    }

    // Group `n` of a block, 4 integers of each output; `word(n)` gives word n of a file's superblock.
    template <class Word>
    static ALWAYS_INLINE auto group_of_file(int block, int n, const Word& word) {
        if constexpr (BITS == 6) {
            const int half = block / 4, quarter = block % 4;
            auto lower = word(half * 16 + quarter % 2 * 8 + n) >> (quarter / 2 * 4);
            auto upper = word(32 + half * 8 + n) >> (2 * quarter);
            return (lower & 0x0f0f0f0fu) | (upper & 0x03030303u) << 4;
        } else {
            auto group = (word((BITS == 5 ? 12 : 4) + block / 2 * 8 + n) >> (block % 2 * 4)) & 0x0f0f0f0fu;
            if constexpr (BITS == 5) group = group | ((word(4 + n) >> block) & 0x01010101u) << 4;
            return group;
        }
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

// Returns whether all scales and minima are finite.
template <int BITS>
bool pack_rows(const RowsOfFile& from, int64_t first, int64_t num_rows, int64_t inputs, uint8_t* packed) {
    typedef Superblock<BITS> Block;
    constexpr int64_t PANEL = BlockCall::PANEL, BYTES = SuperLayout<BITS>::BYTES;
    const int64_t superblocks = inputs / SUPERBLOCK, last = first + num_rows, begin_panel = first / PANEL;
    std::atomic<bool> all_finite{true};
    parallel_for((last + PANEL - 1) / PANEL - begin_panel, 1, [&](int64_t begin, int64_t end) {
        bool finite = true;
        alignas(64) uint8_t part[BYTES];
        for (int64_t panel = begin_panel + begin; panel < begin_panel + end; ++panel) {
            uint8_t* to = packed + panel * superblocks * BYTES;
            const int64_t start = std::max(first, panel * PANEL), stop = std::min(last, (panel + 1) * PANEL);
            const bool is_whole = stop - start == PANEL;
            if (start == panel * PANEL && !is_whole) std::memset(to, 0, superblocks * BYTES);
            const uint8_t *starts[PANEL], *rows[PANEL], *next[PANEL];
            for (int64_t r = 0; r < PANEL; ++r) {
                int64_t output = std::min(std::max(panel * PANEL + r, start), stop - 1);  // other columns repeat a row
                starts[r] = from.row(output - first);
                next[r] = from.row(std::min(output + PANEL, last - 1) - first);
            }
            for (int64_t n = 0; n < superblocks; ++n, to += BYTES) {
                const int64_t offset = from.superblock(n) * Block::FILE_BYTES;
                for (int64_t r = 0; r < PANEL; ++r) {
                    rows[r] = starts[r] + offset;
                    for (int64_t at = 0; at < Block::FILE_BYTES; at += 64) __builtin_prefetch(next[r] + offset + at, 0, 2);
                }
                Block::pack(rows, is_whole ? to : part);
                finite &= Block::is_finite(is_whole ? to : part);
                if (!is_whole) Block::copy_columns(part, to, start % PANEL, start % PANEL + (stop - start));
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
