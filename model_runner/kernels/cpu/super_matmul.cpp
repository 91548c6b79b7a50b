// x @ weight.T + bias with a weight in superblocks (super_blocks.h). x is quantized as in blocks.cpp, and a block's sums
// are exact.
//
// Without byte dot products, sums of 16 bits are multiplied by the integer scales in the instruction that widens them, and
// a superblock costs one multiplication by d. With byte dot products, sums are in 32 bits and scales become floats.
//
// One row tile unpacks integers in registers, as it reads them. Several row tiles share a superblock that is unpacked into
// memory, with its scales: 8 to 12 KB of L1. Both have the same order of additions, superblock by superblock.

#include <algorithm>

#include "block_panels.h"
#include "block_tokens.h"
#include "blocks.h"
#include "bytes.h"
#include "fetch.h"
#include "matmul_parts.h"
#include "parallel.h"
#include "simd.h"
#include "super_blocks.h"
#include "tile.h"

namespace engine {
namespace {

// The scales of 16 outputs for a superblock, as the kernel multiplies with them: words by which it multiplies sums of
// 16 bits, or floats.
template <int BITS>
struct SuperScales {
    typedef SuperLayout<BITS> Layout;
    static constexpr int PER_BLOCK = Layout::HAS_MINIMA ? 1 : 2;
    static constexpr int COUNT = SUPERBLOCK_BLOCKS * PER_BLOCK;

#if HAS_WORD_SUMS
    i32x16 scales[COUNT];
    f32x16 factor;
#else
    f32x16 scales[COUNT];
#endif
    f32x16 minima[Layout::HAS_MINIMA ? SUPERBLOCK_BLOCKS : 0];

    // superblock: that of the panel.
    ALWAYS_INLINE void load(const uint8_t* superblock, int vector) {
        auto line = [=](int n) __attribute__((always_inline)) {
            return load_pairs(superblock + Layout::SCALES + n * Layout::LINE_BYTES + vector * BlockCall::LINE);
        };
        const uint16_t* factors = reinterpret_cast<const uint16_t*>(superblock + Layout::FACTORS) + vector * LANES;
        f32x16 d = load_halves(factors);
#if HAS_WORD_SUMS
        factor = d;
#endif
#pragma GCC unroll 4
        for (int four = 0; four < COUNT / 4; ++four) {
            u32x16 packed;
            if constexpr (Layout::HAS_MINIMA)
                packed = six_bit_scales(four, line);
            else
                packed = line(four);
#pragma GCC unroll 4
            for (int n = 0; n < 4; ++n)
#if HAS_WORD_SUMS
                scales[4 * four + n] = words_of_byte<!Layout::HAS_MINIMA>(packed, n);
#else
                scales[4 * four + n] = (Layout::HAS_MINIMA ? unsigned_byte(packed, n) : signed_byte(packed, n)) * d;
#endif
        }
        if constexpr (Layout::HAS_MINIMA) {
            f32x16 dmin = -load_halves(factors + BlockCall::PANEL);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                u32x16 packed = six_bit_minima(half, line);
#pragma GCC unroll 4
                for (int n = 0; n < 4; ++n) minima[4 * half + n] = unsigned_byte(packed, n) * dmin;
            }
        }
    }
};

// Rows times a superblock of a vector of a panel.
template <int BITS>
struct SuperProduct {
    typedef SuperLayout<BITS> Layout;
    static constexpr bool HAS_MINIMA = Layout::HAS_MINIMA;
    // Groups whose products are added up in integers before a scale. In 16 bits (dot_nibbles): 8 groups of 4 bits, or 4
    // of 5 bits (4 * 2 * 31 * 127 = 31496); with 6 bits the sums start at -32 times those of x, so that 4 groups are
    // within 4 * 2 * 32 * 127 = 32512, though sums between may wrap around.
    static constexpr int RUN = BITS == 6 || (HAS_WORD_SUMS && BITS == 5) ? 4 : 8;
    static constexpr int RUNS = GROUPS / RUN;

    // The products with minima of all blocks: on their own, so that the sums stay in registers.
    template <int ROWS>
    static inline __attribute__((always_inline)) void add_minima(const SuperScales<BITS>* scales_of, const BlockScale* tokens,
                                                                 int64_t blocks, int first,
                                                                 f32x16 (&sums)[ROWS][BlockCall::VECTORS]) {
#pragma GCC unroll 8
        for (int block = 0; block < SUPERBLOCK_BLOCKS; ++block)
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
                for (int v = 0; v < AT_ONCE; ++v)
                    sums[r][first + v] += scales_of[v].minima[block] * splat(tokens[r * blocks + block].sum);
    }

    // sums[r][first + v] += rows[r] . columns of vector v. rows: `numbers` and `scales` of the first row at the superblock; the
    // others are `stride` bytes and `blocks` scales apart. line(block, n, v): a line of a block.
    template <int ROWS, class Weights, class AtBlock>
    static inline __attribute__((always_inline)) void multiply(const SuperScales<BITS>* scales_of, const Weights& weights,
                                                               const int8_t* numbers, int64_t stride,
                                                               const BlockScale* tokens, int64_t blocks,
                                                               int first, f32x16 (&sums)[ROWS][BlockCall::VECTORS],
                                                               const AtBlock& at_block) {
#if HAS_WORD_SUMS
        if constexpr (HAS_MINIMA) add_minima(scales_of, tokens, blocks, first, sums);
        f32x16 parts[ROWS][AT_ONCE] = {};
#endif
#pragma GCC unroll 1
        for (int block = 0; block < SUPERBLOCK_BLOCKS; ++block, numbers += BLOCK, ++tokens) {
            at_block(block);
#if HAS_WORD_SUMS
            i32x16 total[ROWS][AT_ONCE];
#endif
#pragma GCC unroll 2
            for (int run = 0; run < RUNS; ++run) {
                i32x16 dots[ROWS][AT_ONCE];
#pragma GCC unroll 6
                for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
                    for (int v = 0; v < AT_ONCE; ++v)
                        dots[r][v] = HAS_MINIMA ? i32x16{} : (i32x16)splat_bits(uint32_t(tokens[r * blocks].starts[run]));
#pragma GCC unroll 8
                for (int group = run * RUN; group < (run + 1) * RUN; ++group) {
                    u32x16 w[AT_ONCE];
#pragma GCC unroll 2
                    for (int v = 0; v < AT_ONCE; ++v) w[v] = weights(block, group, v);
#pragma GCC unroll 6
                    for (int r = 0; r < ROWS; ++r) {
                        u32x16 four = splat_bits(load_pair(numbers + r * stride + group * 4));
#pragma GCC unroll 2
                        for (int v = 0; v < AT_ONCE; ++v) dots[r][v] = dot_nibbles(dots[r][v], w[v], four);
                    }
                }
                const int n = HAS_MINIMA ? block : 2 * block + run;
#pragma GCC unroll 6
                for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
                    for (int v = 0; v < AT_ONCE; ++v) {
#if HAS_WORD_SUMS
                        i32x16 scaled = scale_words(dots[r][v], scales_of[v].scales[n]);
                        total[r][v] = run == 0 ? scaled : total[r][v] + scaled;
#else
                        sums[r][first + v] += to_float(dots[r][v]) * scales_of[v].scales[n] * splat(tokens[r * blocks].scale);
#endif
                    }
            }
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
                for (int v = 0; v < AT_ONCE; ++v) {
#if HAS_WORD_SUMS
                    parts[r][v] += to_float(total[r][v]) * splat(tokens[r * blocks].scale);
#else
                    if constexpr (HAS_MINIMA) sums[r][first + v] += scales_of[v].minima[block] * splat(tokens[r * blocks].sum);
#endif
                }
        }
#if HAS_WORD_SUMS
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < AT_ONCE; ++v) sums[r][first + v] += parts[r][v] * scales_of[v].factor;
#endif
    }
};

// The integers of a superblock of a panel, from the packed layout.
template <int BITS>
struct PackedGroups {
    const uint8_t* superblock;  // at the first of the vectors

    ALWAYS_INLINE u32x16 operator()(int block, int group, int vector) const {
        typedef SuperLayout<BITS> Layout;
        const uint8_t* lines = superblock + Layout::INTEGERS + block * Layout::BLOCK_BYTES + vector * BlockCall::LINE;
        return group_of_lines<BITS>(group, [=](int n) __attribute__((always_inline)) {
            return load_pairs(lines + n * Layout::LINE_BYTES);
        });
    }
};

// An unpacked superblock of a panel.
template <int BITS>
struct Unpacked {
    SuperScales<BITS> scales[BlockCall::VECTORS];
    u32x16 groups[SUPERBLOCK_BLOCKS * GROUPS][BlockCall::VECTORS];

    void unpack(const uint8_t* superblock) {
        const PackedGroups<BITS> packed = {superblock};
#pragma GCC unroll 2
        for (int v = 0; v < BlockCall::VECTORS; ++v) {
            scales[v].load(superblock, v);
            for (int block = 0; block < SUPERBLOCK_BLOCKS; ++block)
#pragma GCC unroll 8
                for (int group = 0; group < GROUPS; ++group) groups[block * GROUPS + group][v] = packed(block, group, v);
        }
    }
};

template <int BITS>
struct UnpackedGroups {
    const Unpacked<BITS>& from;
    int first;  // vector

    ALWAYS_INLINE u32x16 operator()(int block, int group, int vector) const {
        return from.groups[block * GROUPS + group][first + vector];
    }
};

template <int BITS>
struct SuperBlocks : BlockPanels<SuperBlocks<BITS>> {
    typedef BlockPanels<SuperBlocks<BITS>> Base;
    typedef SuperLayout<BITS> Layout;
    using Base::inputs, Base::LINE, Base::packed, Base::PANEL, Base::VECTORS;

    // Prefetches a superblock in equal parts, while an earlier one is multiplied: block by block, some vectors at a time.
    struct FetchSuperblock {
        static constexpr int64_t LINES = Layout::BYTES / LINE, PARTS = SUPERBLOCK_BLOCKS * VECTORS / AT_ONCE;
        // Scales are read before the integers, so that a part of a superblock ahead would be late for them.
        static constexpr int64_t AHEAD = Layout::BYTES + 4096;

        const uint8_t* from;
        int64_t first;  // part

        ALWAYS_INLINE void operator()(int64_t block) const {
            int64_t begin = (first + block) * LINES / PARTS, end = (first + block + 1) * LINES / PARTS;
            for (int64_t n = begin; n < end; ++n) fetch<3>(from + n * LINE);
        }
    };

    // Tokens [row, row + ROWS) times a panel.
    template <int ROWS>
    void multiply_row_tile(int64_t row, int64_t panel, const Quantized& from) const {
        const int64_t blocks = inputs / BLOCK, ahead = READS_AHEAD ? FetchSuperblock::AHEAD : 256;
        const int8_t* numbers = from.numbers + row * inputs;
        const BlockScale* tokens = from.scales + row * blocks;
        const uint8_t* superblock = packed + panel * this->panel_bytes();
        f32x16 sums[ROWS][VECTORS];
        zero_tile(sums);
        for (int64_t block = 0; block < blocks; block += SUPERBLOCK_BLOCKS, superblock += Layout::BYTES,
                     numbers += SUPERBLOCK, tokens += SUPERBLOCK_BLOCKS) {
#pragma GCC unroll 2
            for (int first = 0; first < VECTORS; first += AT_ONCE) {
                SuperScales<BITS> scales[AT_ONCE];
                for (int v = 0; v < AT_ONCE; ++v) scales[v].load(superblock, first + v);
                SuperProduct<BITS>::multiply(scales, PackedGroups<BITS>{superblock + first * LINE}, numbers, inputs, tokens,
                                             blocks, first, sums,
                                             FetchSuperblock{superblock + ahead, first / AT_ONCE * SUPERBLOCK_BLOCKS});
            }
        }
        this->finish(row, panel * PANEL, sums);
    }

    // Tokens [row, row + ROWS) times one superblock; sums: [ROWS][PANEL].
    template <int ROWS, class AtBlock>
    void add_superblock(const Unpacked<BITS>& unpacked, int64_t superblock, int64_t row, const Quantized& from, float* sums_of,
                        const AtBlock& at_block) const {
        const int64_t blocks = inputs / BLOCK;
        const int8_t* numbers = from.numbers + row * inputs + superblock * SUPERBLOCK;
        const BlockScale* tokens = from.scales + row * blocks + superblock * SUPERBLOCK_BLOCKS;
        f32x16 sums[ROWS][VECTORS];
        superblock == 0 ? zero_tile(sums) : load_tile(sums_of, PANEL, sums);
#pragma GCC unroll 2
        for (int first = 0; first < VECTORS; first += AT_ONCE)
            SuperProduct<BITS>::multiply(unpacked.scales + first, UnpackedGroups<BITS>{unpacked, first}, numbers, inputs, tokens,
                                         blocks, first, sums, [&](int n) { if (first == 0) at_block(n); });
        store_tile(sums_of, PANEL, sums);
    }

    // See BlockPanels.
    void multiply(int64_t first, int64_t last, int64_t panel, int64_t /*next*/, const Quantized& from) const {
        const int64_t row_tiles = this->row_tiles_of(last - first);
        if (row_tiles == 1)
            return with_rows(int(last - first), [&]<int ROWS>() { multiply_row_tile<ROWS>(first, panel, from); });
        thread_local Scratch scratch;
        Unpacked<BITS>& unpacked = *reinterpret_cast<Unpacked<BITS>*>(
            scratch.get(sizeof(Unpacked<BITS>) + (last - first) * PANEL * sizeof(float)));
        float* sums = reinterpret_cast<float*>(&unpacked + 1);
        const uint8_t* superblock = packed + panel * this->panel_bytes();
        const int64_t share = (Layout::BYTES / LINE + row_tiles - 1) / row_tiles;
        for (int64_t n = 0; n < inputs / SUPERBLOCK; ++n, superblock += Layout::BYTES) {
            unpacked.unpack(superblock);
            this->for_row_tiles(first, last, [&](int64_t row_tile, int64_t row, int rows) {
                typename Base::template Fetch<3> fetch = {superblock + Layout::BYTES + row_tile * share * LINE, share};
                with_rows(rows, [&]<int ROWS>() {
                    add_superblock<ROWS>(unpacked, n, row, from, sums + (row - first) * PANEL, fetch);
                });
            });
        }
        this->for_row_tiles(first, last, [&](int64_t, int64_t row, int rows) {
            with_rows(rows, [&]<int ROWS>() {
                f32x16 tile[ROWS][VECTORS];
                load_tile(sums + (row - first) * PANEL, PANEL, tile);
                this->finish(row, panel * PANEL, tile);
            });
        });
    }
};

template <class Body>
void with_bits(const BlockCall& call, const Body& body) {
    if (call.bits == 4)
        body(SuperBlocks<4>{{call}});
    else if (call.bits == 5)
        body(SuperBlocks<5>{{call}});
    else
        body(SuperBlocks<6>{{call}});
}

}  // namespace

void multiply_superblocks(const BlockCall& call, void* workspace) {
    with_bits(call, [&](const auto& product) { product.run(workspace); });
}

void multiply_superblocks_part(const BlockCall& call, const Quantized& tokens, int64_t begin, int64_t end) {
    with_bits(call, [&](const auto& product) { product.multiply_part(tokens, begin, end); });
}

}  // namespace engine
