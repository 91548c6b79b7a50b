// The matmul of blocks.cpp for many tokens, on tiles: a panel of the weight is dequantized to bfloat16, once per block
// of tokens, into the tile layout of the loop in linear_tiles.h. x keeps its dtype.
//
// Dequantization keeps the vector units busy and the matmul the tile unit: a panel is therefore dequantized a few
// k-steps ahead while its first row tile is multiplied. It is in L2 for the other row tiles.

#pragma once

#include <algorithm>

#include "block_table.h"
#include "blocks.h"
#include "bytes.h"
#include "linear_tiles.h"
#include "parallel.h"
#include "matmul_parts.h"
#include "simd.h"
#include "super_blocks.h"

#if TILES

namespace engine {

struct BlockTiles : BlockCall {
    static constexpr int64_t AHEAD = 4096;         // prefetch distance in bytes of the packed weight
    static constexpr int64_t MIN_BYTES = 1 << 15;  // weight per thread, at least: less does not pay for waking it
    static constexpr int64_t LEAD = 2;             // k-steps between dequantizing a block and loading its tiles
    static constexpr int64_t STEP_WORDS = STEP_PAIRS * PANEL;  // size of a dequantized block
    static_assert(PANEL == engine::PANEL && BLOCK == TileLinear::INPUTS, "a block is a step of a panel");

    // [4 inputs][4 bytes per lane] to two bfloat16 pairs per lane. An integer is placed in the mantissa of the float
    // 2^BITS, which gives integer + 2^BITS without a conversion; `start` is the minimum with that offset removed.
    template <int BITS>
    static inline __attribute__((always_inline)) void unpack_group(u32x16 numbers, bool high, f32x16 scale, f32x16 start, uint32_t* to) {
        constexpr uint32_t ONES = uint32_t(127 + BITS) << 23, MASK = ((1u << BITS) - 1) << (23 - BITS);
        auto number = [&](int byte) __attribute__((always_inline)) {
            int left = 23 - BITS - 8 * byte - (high ? 4 : 0);
            u32x16 placed = left >= 0 ? numbers << left : numbers >> -left;
            return (f32x16)((placed & MASK) | ONES) * scale + start;
        };
        for (int pair = 0; pair < 2; ++pair)
            store_pairs(number(2 * pair), number(2 * pair + 1), to + pair * LANES);
    }

    template <int BITS, bool MINIMA, bool HAS_TABLE, bool HALVES>
    inline __attribute__((always_inline)) void unpack_block(const uint8_t* from, const uint16_t* halves, uint32_t* to) const {
        constexpr int VALUE_BITS = HAS_TABLE ? 8 : BITS;
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v, to += STEP_PAIRS * LANES) {
            f32x16 scale = (HALVES ? load_e4m3(halves + v * LANES, false) : load_halves(halves + v * LANES)) * splat(factor);
            f32x16 upper = HALVES ? load_e4m3(halves + v * LANES, true) * splat(factor) : scale;
            f32x16 start = scale * splat(-float((1 << VALUE_BITS) + (MINIMA ? 0 : zero)));
            if (MINIMA) start += load_halves(halves + PANEL + v * LANES) * splat(factor);
#pragma GCC unroll 8
            for (int group = 0; group < GROUPS * BITS / 8; ++group) {
                u32x16 numbers = load_pairs(from + (group * VECTORS + v) * LINE);
                uint32_t *low = to + group * 2 * LANES, *high = to + (group + GROUPS / 2) * 2 * LANES;
                if constexpr (HAS_TABLE) {
                    const Lookup values(table);
                    unpack_group<8>(values(numbers & 0x0f0f0f0fu), false, scale, start, low);
                    f32x16 upper_start = HALVES ? upper * splat(-float((1 << VALUE_BITS) + zero)) : start;
                    unpack_group<8>(values((numbers >> 4) & 0x0f0f0f0fu), false, upper, upper_start, high);
                } else {
                    unpack_group<BITS>(numbers, false, scale, start, low);
                    if (BITS == 4) unpack_group<BITS>(numbers, true, scale, start, high);
                }
            }
        }
    }

    // The blocks of a panel.
    template <int BITS, bool MINIMA, bool HAS_TABLE, bool HALVES>
    struct PanelOfBlocks {
        static constexpr int64_t NUMBERS = number_bytes(BITS), BYTES = block_bytes(BITS, MINIMA);

        const BlockTiles& call;
        const uint8_t* from;
        const int64_t per_scale = call.blocks_per_scale(), group_bytes = call.group_bytes();

        inline __attribute__((always_inline)) void unpack(int64_t block, uint32_t* to) const {
            const uint8_t* group = from + block / per_scale * group_bytes;
            const uint8_t* at = group + block % per_scale * NUMBERS;
            for (int64_t n = 0; n < BYTES; n += LINE) __builtin_prefetch(at + AHEAD + n);
            const uint16_t* halves = reinterpret_cast<const uint16_t*>(group + per_scale * NUMBERS);
            call.unpack_block<BITS, MINIMA, HAS_TABLE, HALVES>(at, halves, to);
        }
    };

    // The same of a panel in superblocks.
    template <int BITS>
    struct PanelOfSuperblocks {
        typedef SuperLayout<BITS> Layout;
        static constexpr int64_t BYTES_AHEAD = Layout::BYTES / SUPERBLOCK_BLOCKS;

        const uint8_t* from;

        inline __attribute__((always_inline)) void unpack(int64_t index, uint32_t* to) const {
            const uint8_t* superblock = from + index / SUPERBLOCK_BLOCKS * Layout::BYTES;
            const int block = int(index % SUPERBLOCK_BLOCKS);
            for (int64_t n = 0; n < BYTES_AHEAD; n += LINE)
                __builtin_prefetch(superblock + AHEAD + block * BYTES_AHEAD + n);
            const uint16_t* factors = reinterpret_cast<const uint16_t*>(superblock + Layout::FACTORS);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v, to += STEP_PAIRS * LANES) {
                auto line = [=](int n) __attribute__((always_inline)) {
                    return load_pairs(superblock + Layout::SCALES + n * Layout::LINE_BYTES + v * LINE);
                };
                auto integers = [=](int n) __attribute__((always_inline)) {
                    return load_pairs(superblock + Layout::INTEGERS + block * Layout::BLOCK_BYTES + n * Layout::LINE_BYTES + v * LINE);
                };
                constexpr float OFFSET = 256.0f + (Layout::HAS_MINIMA ? 0.0f : 32.0f);  // see unpack_group
                f32x16 d = load_halves(factors + v * LANES), scales[2], starts[2];
                if constexpr (Layout::HAS_MINIMA) {
                    scales[0] = unsigned_byte(six_bit_scales(block / 4, line), block % 4) * d;
                    starts[0] = scales[0] * splat(-OFFSET);
                    starts[0] -= unsigned_byte(six_bit_minima(block / 4, line), block % 4) * load_halves(factors + PANEL + v * LANES);
                    scales[1] = scales[0], starts[1] = starts[0];
                } else {
                    for (int half = 0; half < 2; ++half) {
                        scales[half] = signed_byte(line(block / 2), block % 2 * 2 + half) * d;
                        starts[half] = scales[half] * splat(-OFFSET);
                    }
                }
#pragma GCC unroll 8
                for (int group = 0; group < GROUPS; ++group)
                    unpack_group<8>(group_of_lines<BITS>(group, integers), false, scales[group / 4], starts[group / 4],
                                    to + group * 2 * LANES);
            }
        }
    };

    // Dequantizes block by block, LEAD k-steps before the tiles are loaded: a load right after the stores would stall.
    template <class Panel>
    struct Unpack {
        Panel panel;
        uint32_t* to;
        int64_t blocks;

        inline __attribute__((always_inline)) void operator()(int64_t step) const {
            int64_t block = step + LEAD;
            if (block < blocks) panel.unpack(block, to + block * STEP_WORDS);
        }

        // Call before the first k-step.
        void begin() const {
            for (int64_t block = 0; block < std::min(LEAD, blocks); ++block) panel.unpack(block, to + block * STEP_WORDS);
        }
    };

    template <class Panel>
    void multiply(int64_t first, int64_t last, int64_t panel, const Panel& from) const {
        uint32_t* unpacked = panel_memory();
        Unpack<Panel> unpack = {from, unpacked, inputs / BLOCK};
        unpack.begin();
        product().multiply(first, last, {panel * PANEL, VECTORS, unpacked, PANEL}, nullptr, unpack);
    }

    template <int BITS, bool MINIMA, bool HAS_TABLE = false, bool HALVES = false>
    void multiply_blocks(int64_t first, int64_t last, int64_t panel) const {
        multiply(first, last, panel, PanelOfBlocks<BITS, MINIMA, HAS_TABLE, HALVES>{*this, packed + panel * panel_bytes()});
    }

    template <int BITS>
    void multiply_superblocks(int64_t first, int64_t last, int64_t panel) const {
        multiply(first, last, panel, PanelOfSuperblocks<BITS>{packed + panel * panel_bytes()});
    }

    uint32_t* panel_memory() const {
        thread_local Scratch scratch;
        return reinterpret_cast<uint32_t*>(scratch.get(inputs * PANEL * sizeof(bf16)));
    }

    TileLinear product() const {
        return {{*this, x, x_stride, nullptr, num_tokens, inputs}};
    }

    // Tokens [first, last) times one panel.
    void multiply(int64_t first, int64_t last, int64_t panel) const {
        if (is_super)
            bits == 4   ? multiply_superblocks<4>(first, last, panel)
            : bits == 5 ? multiply_superblocks<5>(first, last, panel)
                        : multiply_superblocks<6>(first, last, panel);
        else if (table != nullptr)
            has_half_scales() ? multiply_blocks<4, false, true, true>(first, last, panel)
                              : multiply_blocks<4, false, true>(first, last, panel);
        else if (bits == 4)
            has_minima ? multiply_blocks<4, true>(first, last, panel) : multiply_blocks<4, false>(first, last, panel);
        else
            has_minima ? multiply_blocks<8, true>(first, last, panel) : multiply_blocks<8, false>(first, last, panel);
    }

    void multiply_part(int64_t begin, int64_t end) const {
        int64_t most = product().row_tiles_of_block();
        for_token_blocks(num_tokens, TileLinear::ROW_TILE_ROWS, most, [&](int64_t first, int64_t last) {
            for (int64_t panel = begin / VECTORS; panel * VECTORS < end; ++panel) multiply(first, last, panel);
        });
    }

    void run() const {
        if (num_tokens <= TileLinear::SHARED_TOKENS) {
            parallel_for(panels(), (MIN_BYTES + panel_bytes() - 1) / panel_bytes(), [&](int64_t begin, int64_t end) {
                for (int64_t panel = begin; panel < end; ++panel) multiply(0, num_tokens, panel);
            });
            return;
        }
        product().parallel_for_panels([&](int64_t first, int64_t last, int64_t panel, int64_t) {
            multiply(first, last, panel);
        });
    }
};

}  // namespace engine

#endif  // TILES
