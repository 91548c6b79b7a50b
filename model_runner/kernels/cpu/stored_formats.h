// The block formats of GGUF files that pack_rows.cpp reads: where a row has its numbers, scales and minima.
//
// A file's block has UNITS blocks of 32 inputs. A format gives, for the same block of 32 rows at a time:
//
//   BITS, MINIMA   the form of the weight (blocks.h)
//   scales()       scales and minima of each unit and row, exact in float
//   numbers()      numbers of one row: [UNITS][16] bytes with inputs 16 apart in the halves of a byte, as in a packed
//                  block, or [UNITS][32] bytes
//   values()       instead of both, for a format that is rounded to 8 bits: one row, [UNITS][32] floats
//
// The layouts are those of ggml (llama.cpp:ggml/src/ggml-common.h).

#pragma once

#include <algorithm>
#include <cmath>

#include "blocks.h"
#include "bytes.h"
#include "simd.h"

namespace engine {

constexpr int ROWS = BlockCall::PANEL;  // read together
constexpr int MAX_UNITS = 8;

// Pointers to the same block of each row.
typedef const uint8_t* Rows[ROWS];

// Of a block of all rows; not finite: one of the file's halves is not, and the others are undefined.
struct Scales {
    alignas(64) float scales[MAX_UNITS][ROWS];
    alignas(64) float minima[MAX_UNITS][ROWS];
    bool finite = true;

    // Half precision at byte `at` of each row.
    ALWAYS_INLINE void load(const Rows& rows, int at, float (&to)[ROWS]) {
        alignas(64) uint16_t halves[ROWS];
        uint16_t largest = 0;
        for (int r = 0; r < ROWS; ++r) {
            std::memcpy(halves + r, rows[r] + at, 2);
            largest = std::max<uint16_t>(largest, halves[r] & 0x7fff);
        }
        finite = finite && largest < 0x7c00;
        for (int r = 0; r < ROWS; r += LANES) store(to + r, load_halves(halves + r));
    }
};

// ---------------------------------------------------------------- parts of formats

// 32 numbers of 16 bytes: first the low halves.
ALWAYS_INLINE void spread_nibbles(const uint8_t* from, uint8_t* to) {
    for (int i = 0; i < 16; ++i) {
        to[i] = from[i] & 15;
        to[16 + i] = from[i] >> 4;
    }
}

// Adds 16 to numbers whose bit is set.
ALWAYS_INLINE void add_fifth_bits(const uint8_t* bits, uint8_t* to) {
    for (int byte = 0; byte < 4; ++byte) {
        uint64_t eight = bits[byte] * 0x0101010101010101u & 0x8040201008040201u, numbers;
        eight = (eight + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;  // without carries between bytes
        std::memcpy(&numbers, to + 8 * byte, 8);
        numbers |= eight;
        std::memcpy(to + 8 * byte, &numbers, 8);
    }
}

// The 8 scales and 8 minima of 6 bits each of Q4_K and Q5_K.
ALWAYS_INLINE void scales_of_6_bits(const Rows& rows, Scales& to) {
    uint32_t parts[ROWS][4];
    for (int r = 0; r < ROWS; ++r) {
        uint32_t low = load_pair(rows[r] + 4), mid = load_pair(rows[r] + 8), high = load_pair(rows[r] + 12);
        parts[r][0] = low & 0x3f3f3f3f;
        parts[r][1] = (high & 0x0f0f0f0f) | (low >> 2 & 0x30303030);
        parts[r][2] = mid & 0x3f3f3f3f;
        parts[r][3] = (high >> 4 & 0x0f0f0f0f) | (mid >> 2 & 0x30303030);
    }
    float scale[ROWS], minimum[ROWS];
    to.load(rows, 0, scale);
    to.load(rows, 2, minimum);
    for (int unit = 0; unit < 8; ++unit)
        for (int r = 0; r < ROWS; ++r) {
            int shift = unit % 4 * 8;
            to.scales[unit][r] = scale[r] * float(int(parts[r][unit / 4] >> shift & 63));
            to.minima[unit][r] = -(minimum[r] * float(int(parts[r][2 + unit / 4] >> shift & 63)));
        }
}

// ---------------------------------------------------------------- one scale for 32 numbers, 4 bits

struct InBlocksOf32 {
    static constexpr int UNITS = 1;
    static constexpr bool MINIMA = false, ROUNDED = false;
};

struct Q4_0 : InBlocksOf32 {
    static constexpr int BYTES = 18, BITS = 4;
    static void scales(const Rows& rows, Scales& to) { to.load(rows, 0, to.scales[0]); }
    static void numbers(const uint8_t* from, uint8_t* to) { std::memcpy(to, from + 2, 16); }
};

struct Q4_1 : InBlocksOf32 {
    static constexpr int BYTES = 20, BITS = 4;
    static constexpr bool MINIMA = true;
    static void scales(const Rows& rows, Scales& to) {
        to.load(rows, 0, to.scales[0]);
        to.load(rows, 2, to.minima[0]);
    }
    static void numbers(const uint8_t* from, uint8_t* to) { std::memcpy(to, from + 4, 16); }
};

typedef Q4_0 IQ4_NL;  // the numbers are codes of a table

struct MXFP4 : InBlocksOf32 {
    static constexpr int BYTES = 17, BITS = 4;
    static void scales(const Rows& rows, Scales& to) {
        for (int r = 0; r < ROWS; ++r) to.scales[0][r] = std::ldexp(1.0f, rows[r][0] - 128);
    }
    static void numbers(const uint8_t* from, uint8_t* to) { std::memcpy(to, from + 1, 16); }
};

// ---------------------------------------------------------------- 5 and 8 bits

struct Q5_0 : InBlocksOf32 {
    static constexpr int BYTES = 22, BITS = 8;
    static void scales(const Rows& rows, Scales& to) { to.load(rows, 0, to.scales[0]); }
    static void numbers(const uint8_t* from, uint8_t* to) {
        spread_nibbles(from + 6, to);
        add_fifth_bits(from + 2, to);
    }
};

struct Q5_1 : InBlocksOf32 {
    static constexpr int BYTES = 24, BITS = 8;
    static constexpr bool MINIMA = true;
    static void scales(const Rows& rows, Scales& to) { Q4_1::scales(rows, to); }
    static void numbers(const uint8_t* from, uint8_t* to) {
        spread_nibbles(from + 8, to);
        add_fifth_bits(from + 4, to);
    }
};

struct Q8_0 : InBlocksOf32 {
    static constexpr int BYTES = 34, BITS = 8;
    static void scales(const Rows& rows, Scales& to) { to.load(rows, 0, to.scales[0]); }
    static void numbers(const uint8_t* from, uint8_t* to) {
        for (int i = 0; i < 32; ++i) to[i] = from[2 + i] ^ 0x80;
    }
};

// ---------------------------------------------------------------- 256 numbers

struct InBlocksOf256 : InBlocksOf32 {
    static constexpr int UNITS = 8;
};

struct Q4_K : InBlocksOf256 {
    static constexpr int BYTES = 144, BITS = 4;
    static constexpr bool MINIMA = true;
    static void scales(const Rows& rows, Scales& to) { scales_of_6_bits(rows, to); }
    // 32 bytes hold two units: the low halves, then the high ones.
    static void numbers(const uint8_t* from, uint8_t* to) {
        from += 16;
        for (int pair = 0; pair < 4; ++pair, from += 32, to += 32)
            for (int i = 0; i < 16; ++i) {
                to[i] = (from[i] & 15) | from[16 + i] << 4;
                to[16 + i] = from[i] >> 4 | (from[16 + i] & 0xf0);
            }
    }
};

struct Q5_K : InBlocksOf256 {
    static constexpr int BYTES = 176, BITS = 8;
    static constexpr bool MINIMA = true;
    static void scales(const Rows& rows, Scales& to) { scales_of_6_bits(rows, to); }
    // As in Q4_K; bit g of high byte i belongs to number i of unit g.
    static void numbers(const uint8_t* from, uint8_t* to) {
        const uint8_t *high = from + 16, *low = from + 48;
        for (int pair = 0; pair < 4; ++pair, low += 32, to += 64)
            for (int i = 0; i < 32; ++i) {
                uint8_t bits = high[i] >> 2 * pair;
                to[i] = (low[i] & 15) | (bits & 1) << 4;
                to[32 + i] = low[i] >> 4 | (bits & 2) << 3;
            }
    }
};

struct IQ4_XS : InBlocksOf256 {
    static constexpr int BYTES = 136, BITS = 4;
    // Scales of 6 bits: 8 pairs of upper bits in 2 bytes, then 8 halves of bytes.
    static void scales(const Rows& rows, Scales& to) {
        float scale[ROWS];
        to.load(rows, 0, scale);
        for (int r = 0; r < ROWS; ++r) {
            const uint8_t* b = rows[r];
            int high = b[2] | b[3] << 8;
            for (int unit = 0; unit < 8; ++unit) {
                int factor = (b[4 + unit / 2] >> 4 * (unit % 2) & 15) | (high >> 2 * unit & 3) << 4;
                to.scales[unit][r] = scale[r] * float(factor - 32);
            }
        }
    }
    static void numbers(const uint8_t* from, uint8_t* to) { std::memcpy(to, from + 8, 128); }
};

// ---------------------------------------------------------------- rounded to 8 bits: one scale for 16 numbers

struct Rounded : InBlocksOf256 {
    static constexpr int BITS = 8;
    static constexpr bool ROUNDED = true;

    static bool is_finite(const uint8_t* half) { return (half[1] & 0x7c) != 0x7c; }
};

struct Q6_K : Rounded {
    static constexpr int BYTES = 210;

    static bool is_finite(const uint8_t* from) { return Rounded::is_finite(from + 208); }

    // All values are at most this: `values` is needed only for a few blocks to find the largest.
    static float bound(const uint8_t* from) {
        int largest = 0;
        for (int i = 0; i < 16; ++i) largest = std::max(largest, std::abs(int(int8_t(from[192 + i]))));
        return std::abs(half_to_float(from + 208)) * float(largest * 32);
    }

    // Two halves of 128 numbers; in each, four units share 64 bytes of low bits and 32 bytes of high bit pairs.
    static void values(const uint8_t* from, float* to) {
        const uint8_t *low = from, *high = from + 128;
        const int8_t* factors = reinterpret_cast<const int8_t*>(from + 192);
        float scale = half_to_float(from + 208);
        for (int half = 0; half < 2; ++half, low += 64, high += 32)
            for (int unit = 0; unit < 4; ++unit)
                for (int part = 0; part < 2; ++part, ++factors, to += 16) {
                    float by = scale * float(*factors);
                    for (int i = 0; i < 16; ++i) {
                        int at = 16 * part + i;
                        int number = (low[32 * (unit & 1) + at] >> 4 * (unit >> 1) & 15) | (high[at] >> 2 * unit & 3) << 4;
                        to[i] = float(number - 32) * by;
                    }
                }
    }
};

struct Q3_K : Rounded {
    static constexpr int BYTES = 110;

    static bool is_finite(const uint8_t* from) { return Rounded::is_finite(from + 108); }

    static void factors(const uint8_t* from, int (&to)[16]) {
        const uint8_t *low = from + 96, *high = from + 104;
        for (int i = 0; i < 16; ++i)
            to[i] = int((low[i % 8] >> 4 * (i / 8) & 15) | (high[i % 4] >> 2 * (i / 4) & 3) << 4) - 32;
    }

    static float bound(const uint8_t* from) {
        int all[16], largest = 0;
        factors(from, all);
        for (int factor : all) largest = std::max(largest, std::abs(factor));
        return std::abs(half_to_float(from + 108)) * float(largest * 4);
    }

    // Low two bits as in Q2_K; the third, inverted, is bit 4 * half + unit of high byte i.
    static void values(const uint8_t* from, float* to) {
        const uint8_t *high = from, *low = from + 32;
        int all[16];
        factors(from, all);
        float scale = half_to_float(from + 108);
        for (int n = 0; n < 16; ++n, to += 16) {
            int half = n / 8, unit = n / 2 % 4;
            float by = scale * float(all[n]);
            for (int i = 0; i < 16; ++i) {
                int at = n % 2 * 16 + i;
                int number = (low[32 * half + at] >> 2 * unit & 3) | (high[at] >> (4 * half + unit) & 1) << 2;
                to[i] = float(number - 4) * by;
            }
        }
    }
};

struct Q2_K : Rounded {
    static constexpr int BYTES = 84;

    static bool is_finite(const uint8_t* from) {
        return Rounded::is_finite(from + 80) && Rounded::is_finite(from + 82);
    }

    static float bound(const uint8_t* from) {
        return std::abs(half_to_float(from + 80)) * 45.0f + std::abs(half_to_float(from + 82)) * 15.0f;
    }

    // Two halves of 128 numbers, 32 bytes each: bits 2g and 2g + 1 of byte i are number i of unit g. A byte has the
    // scale and the minimum of 16 numbers.
    static void values(const uint8_t* from, float* to) {
        float scale = half_to_float(from + 80), minimum = half_to_float(from + 82);
        for (int n = 0; n < 16; ++n, to += 16) {
            int half = n / 8, unit = n / 2 % 4;
            float by = scale * float(from[n] & 15), less = minimum * float(from[n] >> 4);
            for (int i = 0; i < 16; ++i) {
                int number = from[16 + 32 * half + n % 2 * 16 + i] >> 2 * unit & 3;
                to[i] = float(number) * by - less;
            }
        }
    }
};

}  // namespace engine
