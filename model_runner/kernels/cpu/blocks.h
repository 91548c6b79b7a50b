// The arguments of a matmul of blocks.cpp, and the packed layout of its weight: panels of 32 outputs (the last one
// padded with zeros), and in a panel its blocks one after the other:
//
//   integers: [inputs / 4][output of the panel][4] bytes; 4 bits: groups k and k + 4 share bytes, k in the low half
//   scales: [32] half precision; or [32][2] bytes, e4m3: of the first and of the last 16 inputs, which 4-bit integers
//           have in the low and in the high halves of bytes
//   minima: [32] half precision, if there are any
//
// Where neighboring blocks of 4-bit integers share scales and minima, the integers of 2 or 4 blocks come first, then the
// scales and minima of all.
//
// 4-bit integers may be codes of values in a table (block_table.h); there are no minima then.
//
// All scales and minima of a weight are multiplied by a power of two that makes best use of half precision's range;
// `factor` is its inverse.
//
// Weights of K-quants are in superblocks instead: super_blocks.h.

#pragma once

#include "output.h"
#include "simd.h"

namespace engine {

constexpr int64_t BLOCK = 32;      // inputs
constexpr int64_t SUPERBLOCK = 256;  // inputs
constexpr int GROUPS = BLOCK / 4;  // groups of four inputs, which one instruction reduces

struct BlockCall : Output {
    static constexpr int64_t PANEL = 32;  // outputs
    static constexpr int VECTORS = PANEL / LANES;
    static constexpr int64_t LINE = 64;

    const bf16* x;
    int64_t x_stride;
    const uint8_t* packed;
    int64_t num_tokens, inputs;
    int bits, zero;
    bool has_minima;
    int scale_inputs;  // that share a scale: 32; 64, with 8 bits and without minima; 64 or 128, with 4 bits; or 16, with a table
    float factor;
    const uint8_t* table;  // [16]; null: the integers are the values
    bool is_super;         // in superblocks; factor is 1 then, and there is no table

    static constexpr int64_t number_bytes(int bits) { return PANEL * BLOCK * bits / 8; }
    static constexpr int64_t scale_bytes(bool has_minima) { return PANEL * (has_minima ? 4 : 2); }
    static constexpr int64_t block_bytes(int bits, bool has_minima) { return number_bytes(bits) + scale_bytes(has_minima); }

    // Blocks whose scales are one after the last of them.
    static constexpr int64_t blocks_per_scale(int bits, int scale_inputs) {
        return bits == 4 && scale_inputs > BLOCK ? scale_inputs / BLOCK : 1;
    }

    // Of the blocks that share scales.
    static constexpr int64_t group_bytes(int bits, bool has_minima, int scale_inputs) {
        return blocks_per_scale(bits, scale_inputs) * number_bytes(bits) + scale_bytes(has_minima);
    }

    // Of 256 inputs in super_blocks.h: as many as in the file.
    static constexpr int64_t superblock_bytes(int bits) { return PANEL * (32 * bits + (bits == 6 ? 16 + 2 : 12 + 4)); }

    bool has_paired_scales() const { return bits == 8 && scale_inputs == 2 * BLOCK; }
    bool has_shared_scales() const { return blocks_per_scale() > 1; }
    int64_t blocks_per_scale() const { return blocks_per_scale(bits, scale_inputs); }
    int64_t group_bytes() const { return group_bytes(bits, has_minima, scale_inputs); }
    bool has_half_scales() const { return scale_inputs == BLOCK / 2; }
    int64_t panels() const { return (outputs + PANEL - 1) / PANEL; }
    int64_t panel_bytes() const {
        if (is_super) return inputs / SUPERBLOCK * superblock_bytes(bits);
        return inputs / BLOCK / blocks_per_scale() * group_bytes();
    }
    // Cache lines of 8 blocks of a panel.
    int64_t lines_of_8() const {
        return (is_super ? superblock_bytes(bits) : 8 / blocks_per_scale() * group_bytes()) / LINE;
    }
};

typedef uint32_t Quad __attribute__((vector_size(16)));

// Stores four words each of four rows of a file to [word][row of the panel].
ALWAYS_INLINE void store_transposed(const uint8_t* const (&rows)[4], uint8_t* to) {
    Quad v[4];
    for (int r = 0; r < 4; ++r) get(v[r], rows[r]);
    Quad a = shuffle<0, 4, 1, 5>(v[0], v[1]), b = shuffle<2, 6, 3, 7>(v[0], v[1]);
    Quad c = shuffle<0, 4, 1, 5>(v[2], v[3]), d = shuffle<2, 6, 3, 7>(v[2], v[3]);
    constexpr int64_t WORD = BlockCall::PANEL * 4;
    put(to, shuffle<0, 1, 4, 5>(a, c));
    put(to + WORD, shuffle<2, 3, 6, 7>(a, c));
    put(to + 2 * WORD, shuffle<0, 1, 4, 5>(b, d));
    put(to + 3 * WORD, shuffle<2, 3, 6, 7>(b, d));
}

}  // namespace engine
