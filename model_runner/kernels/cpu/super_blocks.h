// The packed layout of K-quants (GGUF's Q4_K, Q5_K, Q6_K): the numbers of the file, in as many bytes as the file has.
//
// 256 inputs of an output are a superblock. Its 8 blocks of 32 inputs have small integers as scales, and one or two
// floats scale those:
//
//   4 and 5 bits: weight = d * scale * integer - dmin * minimum, with a scale and a minimum of 6 bits per block
//   6 bits:       weight = d * scale * (integer - 32), with a signed scale of 8 bits per 16 inputs
//
// A superblock of a panel is a list of lines of 64 bytes, [line][vector of the panel][16 outputs][4 bytes]:
//
//   integers of a block: `BITS` lines, see `unpack_group`
//   4 and 5 bits: scales of blocks 0-3; minima of blocks 0-3; the low halves of the scales (low) and minima (high) of
//                 blocks 4-7, whose upper two bits are in the first two lines
//   6 bits:       scales of the 16 inputs 4n to 4n + 3, n in 0..3
//   d: [32] half precision
//   dmin: [32] half precision, if there are minima

#pragma once

#include "block_tokens.h"
#include "blocks.h"
#include "bytes.h"
#include "simd.h"

namespace engine {

constexpr int64_t SUPERBLOCK_BLOCKS = SUPERBLOCK / BLOCK;

// Group `group` (0..7) of a block, one byte per integer; `line(n)` gives the bytes of its line n.
//
//   4 bits: groups n and n + 4 are the halves of line n
//   5 bits: groups 0 to 4 are in the lower bits of their lines; the others are in the upper three bits: 5 in lines 0 and
//           1, 6 in lines 2 and 3, 7 in line 4 and the highest bits of 1 and 3
//   6 bits: groups 0 to 2 are in the lower bits of lines 0 to 2, and group 3 in the upper two bits of the three; groups 4
//           to 7 the same in lines 3 to 5
template <int BITS, class Line>
ALWAYS_INLINE auto unpack_group(int group, const Line& line) {
    if constexpr (BITS == 4) {
        auto both = line(group % 4);
        return (group < 4 ? both : both >> 4) & 0x0f0f0f0fu;
    } else if constexpr (BITS == 5) {
        if (group < 5) return line(group) & 0x1f1f1f1fu;
        if (group < 7) {
            int first = (group - 5) * 2;
            return ((line(first) >> 5) & 0x07070707u) | ((line(first + 1) >> 2) & 0x18181818u);
        }
        return ((line(4) >> 5) & 0x07070707u) | ((line(1) >> 4) & 0x08080808u) | ((line(3) >> 3) & 0x10101010u);
    } else {
        static_assert(BITS == 6);
        int first = group / 4 * 3;
        if (group % 4 < 3) return line(first + group % 4) & 0x3f3f3f3fu;
        auto upper = ((line(first) & 0xc0c0c0c0u) >> 2) | (line(first + 1) & 0xc0c0c0c0u);
        return ((upper >> 2) | (line(first + 2) & 0xc0c0c0c0u)) >> 2;
    }
}

// The lines of a block for 8 groups; the inverse of unpack_group.
template <int BITS>
inline void fold_groups(const uint32_t* groups, uint32_t* lines) {
    if constexpr (BITS == 4) {
        for (int n = 0; n < 4; ++n) lines[n] = groups[n] | groups[n + 4] << 4;
    } else if constexpr (BITS == 5) {
        auto low = [](uint32_t group) { return (group & 0x07070707u) << 5; };
        auto high = [](uint32_t group) { return (group & 0x18181818u) << 2; };
        lines[0] = groups[0] | low(groups[5]);
        lines[1] = groups[1] | high(groups[5]) | (groups[7] & 0x08080808u) << 4;
        lines[2] = groups[2] | low(groups[6]);
        lines[3] = groups[3] | high(groups[6]) | (groups[7] & 0x10101010u) << 3;
        lines[4] = groups[4] | low(groups[7]);
    } else {
        static_assert(BITS == 6);
        for (int half = 0; half < 2; ++half, groups += 4, lines += 3)
            for (int n = 0; n < 3; ++n)
                lines[n] = groups[n] | (groups[3] & 0x03030303u << 2 * n) << (6 - 2 * n);
    }
}

// Offsets in the superblock of a panel, in bytes.
template <int BITS>
struct SuperLayout {
    static constexpr bool HAS_MINIMA = BITS != 6;
    static constexpr int64_t LINE_BYTES = BlockCall::VECTORS * BlockCall::LINE;
    static constexpr int64_t BLOCK_BYTES = BITS * LINE_BYTES;
    static constexpr int SCALE_LINES = HAS_MINIMA ? 3 : 4;
    static constexpr int64_t SCALES = SUPERBLOCK_BLOCKS * BLOCK_BYTES;
    static constexpr int64_t FACTORS = SCALES + SCALE_LINES * LINE_BYTES;
    static constexpr int64_t BYTES = FACTORS + (HAS_MINIMA ? 2 : 1) * BlockCall::PANEL * 2;
    static_assert(BYTES == BlockCall::superblock_bytes(BITS));
};

// The 4 bytes of each lane that are the scales of blocks 0-3 or 4-7, and those that are their minima; 4 and 5 bits.
template <class Line>
ALWAYS_INLINE auto six_bit_scales(int half, const Line& line) {
    if (half == 0) return line(0) & 0x3f3f3f3fu;
    return (line(2) & 0x0f0f0f0fu) | ((line(0) >> 2) & 0x30303030u);
}
template <class Line>
ALWAYS_INLINE auto six_bit_minima(int half, const Line& line) {
    if (half == 0) return line(1) & 0x3f3f3f3fu;
    return ((line(2) >> 4) & 0x0f0f0f0fu) | ((line(1) >> 2) & 0x30303030u);
}

// Byte `byte` of each lane, as a float.
ALWAYS_INLINE f32x16 signed_byte(u32x16 v, int byte) { return to_float((i32x16)(v << (24 - 8 * byte)) >> 24); }
ALWAYS_INLINE f32x16 unsigned_byte(u32x16 v, int byte) { return to_float((i32x16)((v >> (8 * byte)) & 0xffu)); }

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

    // sums[r][first + v] += rows[r] . columns of vector v. rows: `numbers` and `scales` of the first row at the superblock; the
    // others are `stride` bytes and `blocks` scales apart. line(block, n, v): a line of a block.
    template <int ROWS, int AT_ONCE, class Weights, class AtBlock>
    static inline __attribute__((always_inline)) void multiply(const SuperScales<BITS>* scales_of, const Weights& weights,
                                                               const int8_t* numbers, int64_t stride,
                                                               const BlockScale* tokens, int64_t blocks,
                                                               int first, f32x16 (&sums)[ROWS][BlockCall::VECTORS],
                                                               const AtBlock& at_block) {
#if HAS_WORD_SUMS
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
#endif
                    if constexpr (HAS_MINIMA) sums[r][first + v] += scales_of[v].minima[block] * splat(tokens[r * blocks].sum);
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

}  // namespace engine
