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
//   4 and 5 bits: scales of blocks 0-3; minima of blocks 0-3; the low halves of the scales (low) and minima (high) of
//                 blocks 4-7, whose upper two bits are in the first two lines
//   6 bits:       scales of the 16 inputs 4n to 4n + 3, n in 0..3
//   d: [32] half precision
//   dmin: [32] half precision, if there are minima
//   integers of a block: `BITS` lines, block by block, see `group_of_lines`

#pragma once

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
ALWAYS_INLINE auto group_of_lines(int group, const Line& line) {
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

// The lines of a block for 8 groups; the inverse of group_of_lines.
template <int BITS, class Word>
ALWAYS_INLINE void fold_groups(const Word* groups, Word* lines) {
    if constexpr (BITS == 4) {
        for (int n = 0; n < 4; ++n) lines[n] = groups[n] | groups[n + 4] << 4;
    } else if constexpr (BITS == 5) {
        auto low = [](Word group) { return (group & 0x07070707u) << 5; };
        auto high = [](Word group) { return (group & 0x18181818u) << 2; };
        lines[0] = groups[0] | low(groups[5]);
        lines[1] = groups[1] | high(groups[5]) | (groups[7] & 0x08080808u) << 4;
        lines[2] = groups[2] | low(groups[6]);
        lines[3] = groups[3] | high(groups[6]) | (groups[7] & 0x10101010u) << 3;
        lines[4] = groups[4] | low(groups[7]);
    } else {
        static_assert(BITS == 6);
        for (int half = 0; half < 2; ++half, groups += 4, lines += 3)
            for (int n = 0; n < 3; ++n)
                lines[n] = groups[n] | (groups[3] & (0x03030303u << 2 * n)) << (6 - 2 * n);
    }
}

// Offsets in the superblock of a panel, in bytes.
template <int BITS>
struct SuperLayout {
    static constexpr bool HAS_MINIMA = BITS != 6;
    static constexpr int64_t LINE_BYTES = BlockCall::VECTORS * BlockCall::LINE;
    static constexpr int64_t BLOCK_BYTES = BITS * LINE_BYTES;
    static constexpr int SCALE_LINES = HAS_MINIMA ? 3 : 4;
    static constexpr int64_t SCALES = 0;
    static constexpr int64_t FACTORS = SCALES + SCALE_LINES * LINE_BYTES;
    static constexpr int64_t INTEGERS = FACTORS + (HAS_MINIMA ? 2 : 1) * BlockCall::PANEL * 2;
    static constexpr int64_t BYTES = INTEGERS + SUPERBLOCK_BLOCKS * BLOCK_BYTES;
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

}  // namespace engine
