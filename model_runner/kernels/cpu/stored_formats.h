// The block formats of GGUF files that pack_rows.cpp reads: where a row has its numbers, scales and minima.
//
// A file's block has UNITS blocks of 32 inputs. A format gives, for the same block of 32 rows at a time:
//
//   BITS, MINIMA   the form of the weight (blocks.h)
//   scales()       scales and minima of each unit and row, exact in float
//   numbers()      numbers of one row: [UNITS][16] bytes with inputs 16 apart in the halves of a byte, as in a packed
//                  block, or [UNITS][32] bytes
//   values()       instead of both, for a format that is rounded to 8 bits: one row, [UNITS][32] floats, multiplied
//                  by `factor`, a power of two
//
// To find the largest scale of a tensor without unpacking all of them:
//
//   SCALE_AT, MINIMUM_AT   bytes of the halves that scale a block; -1: there is none
//   MOST, MOST_OF_MINIMA   scales, or values, are at most the half times this
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

// 16 numbers.
ALWAYS_INLINE i32x16 load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (i32x16)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
    __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {(i32x8)_mm256_cvtepu8_epi32(all), (i32x8)_mm256_cvtepu8_epi32(_mm_srli_si128(all, 8))};
#elif defined(__aarch64__)
    const uint8x16_t bytes = vld1q_u8(p);
    u16x16 words = {(u16x8)vmovl_u8(vget_low_u8(bytes)), (u16x8)vmovl_high_u8(bytes)};
    return (i32x16)widened(words);
#else
    int32_t numbers[LANES];
    for (int n = 0; n < LANES; ++n) numbers[n] = p[n];
    i32x16 v;
    get(v, numbers);
    return v;
#endif
}

// 32 numbers of 16 bytes: first the low halves.
ALWAYS_INLINE void spread_nibbles(const uint8_t* __restrict from, uint8_t* __restrict to) {
    for (int i = 0; i < 16; ++i) {
        to[i] = from[i] & 15;
        to[16 + i] = from[i] >> 4;
    }
}

// The 8 bits of a byte as bytes of 0 or 16.
struct FifthBits {
    uint64_t of[256];

    constexpr FifthBits() : of() {
        for (int byte = 0; byte < 256; ++byte)
            for (int n = 0; n < 8; ++n) of[byte] |= uint64_t(byte >> n & 1) << (8 * n + 4);
    }
};
constexpr FifthBits FIFTH_BITS;

// 32 numbers of 16 bytes, and of 32 bits that are worth 16.
ALWAYS_INLINE void spread_with_fifth_bits(const uint8_t* from, const uint8_t* high, uint8_t* to) {
    constexpr uint64_t LOW = 0x0f0f0f0f0f0f0f0f;
    for (int half = 0; half < 2; ++half) {
        uint64_t eight;
        std::memcpy(&eight, from + 8 * half, 8);
        uint64_t low = (eight & LOW) | FIFTH_BITS.of[high[half]];
        uint64_t upper = (eight >> 4 & LOW) | FIFTH_BITS.of[high[2 + half]];
        std::memcpy(to + 8 * half, &low, 8);
        std::memcpy(to + 16 + 8 * half, &upper, 8);
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
    static constexpr int UNITS = 1, SCALE_AT = 0, MINIMUM_AT = -1;
    static constexpr float MOST = 1.0f, MOST_OF_MINIMA = 1.0f;
    static constexpr bool MINIMA = false, ROUNDED = false;
};

struct Q4_0 : InBlocksOf32 {
    static constexpr int BYTES = 18, BITS = 4;
    static void scales(const Rows& rows, Scales& to) { to.load(rows, 0, to.scales[0]); }
    static void numbers(const uint8_t* __restrict from, uint8_t* __restrict to) { std::memcpy(to, from + 2, 16); }
};

struct Q4_1 : InBlocksOf32 {
    static constexpr int BYTES = 20, BITS = 4, MINIMUM_AT = 2;
    static constexpr bool MINIMA = true;
    static void scales(const Rows& rows, Scales& to) {
        to.load(rows, 0, to.scales[0]);
        to.load(rows, 2, to.minima[0]);
    }
    static void numbers(const uint8_t* __restrict from, uint8_t* __restrict to) { std::memcpy(to, from + 4, 16); }
};

typedef Q4_0 IQ4_NL;  // the numbers are codes of a table

struct MXFP4 : InBlocksOf32 {
    static constexpr int BYTES = 17, BITS = 4, SCALE_AT = -1;  // a byte: the exponent

    static float scale(int exponent) {  // 2^(exponent - 128)
        uint32_t bits = exponent > 1 ? uint32_t(exponent - 1) << 23 : 0x200000u << exponent;
        float out;
        std::memcpy(&out, &bits, sizeof out);
        return out;
    }

    static void scales(const Rows& rows, Scales& to) {
        for (int r = 0; r < ROWS; ++r) to.scales[0][r] = scale(rows[r][0]);
    }
    static void numbers(const uint8_t* __restrict from, uint8_t* __restrict to) { std::memcpy(to, from + 1, 16); }
};

// ---------------------------------------------------------------- 5 and 8 bits

struct Q5_0 : InBlocksOf32 {
    static constexpr int BYTES = 22, BITS = 8;
    static void scales(const Rows& rows, Scales& to) { to.load(rows, 0, to.scales[0]); }
    static void numbers(const uint8_t* __restrict from, uint8_t* __restrict to) {
        spread_with_fifth_bits(from + 6, from + 2, to);
    }
};

struct Q5_1 : InBlocksOf32 {
    static constexpr int BYTES = 24, BITS = 8, MINIMUM_AT = 2;
    static constexpr bool MINIMA = true;
    static void scales(const Rows& rows, Scales& to) { Q4_1::scales(rows, to); }
    static void numbers(const uint8_t* __restrict from, uint8_t* __restrict to) {
        spread_with_fifth_bits(from + 8, from + 4, to);
    }
};

struct Q8_0 : InBlocksOf32 {
    static constexpr int BYTES = 34, BITS = 8;
    static void scales(const Rows& rows, Scales& to) { to.load(rows, 0, to.scales[0]); }
    static void numbers(const uint8_t* __restrict from, uint8_t* __restrict to) {
        for (int i = 0; i < 32; ++i) to[i] = from[2 + i] ^ 0x80;
    }
};

// ---------------------------------------------------------------- 256 numbers

struct InBlocksOf256 : InBlocksOf32 {
    static constexpr int UNITS = 8;
};

struct Q4_K : InBlocksOf256 {
    static constexpr int BYTES = 144, BITS = 4, MINIMUM_AT = 2;
    static constexpr float MOST = 63.0f, MOST_OF_MINIMA = 63.0f;
    static constexpr bool MINIMA = true;
    static void scales(const Rows& rows, Scales& to) { scales_of_6_bits(rows, to); }
    // 32 bytes hold two units: the low halves, then the high ones.
    static void numbers(const uint8_t* __restrict from, uint8_t* __restrict to) {
        from += 16;
        for (int pair = 0; pair < 4; ++pair, from += 32, to += 32)
            for (int i = 0; i < 16; ++i) {
                to[i] = (from[i] & 15) | from[16 + i] << 4;
                to[16 + i] = from[i] >> 4 | (from[16 + i] & 0xf0);
            }
    }
};

struct Q5_K : InBlocksOf256 {
    static constexpr int BYTES = 176, BITS = 8, MINIMUM_AT = 2;
    static constexpr float MOST = 63.0f, MOST_OF_MINIMA = 63.0f;
    static constexpr bool MINIMA = true;
    static void scales(const Rows& rows, Scales& to) { scales_of_6_bits(rows, to); }
    // As in Q4_K; bit g of high byte i belongs to number i of unit g.
    static void numbers(const uint8_t* __restrict from, uint8_t* __restrict to) {
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
    static constexpr float MOST = 32.0f;
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
    static void numbers(const uint8_t* __restrict from, uint8_t* __restrict to) { std::memcpy(to, from + 8, 128); }
};

// ---------------------------------------------------------------- rounded to 8 bits: one scale for 16 numbers

struct Rounded : InBlocksOf256 {
    static constexpr int BITS = 8;
    static constexpr bool ROUNDED = true;
};

struct Q6_K : Rounded {
    static constexpr int BYTES = 210, SCALE_AT = 208;
    static constexpr float MOST = 128 * 32;

    // Two halves of 128 numbers; in each, four units share 64 bytes of low bits and 32 bytes of high bit pairs.
    static void values(const uint8_t* from, float factor, float* to) {
        const uint8_t *low = from, *high = from + 128;
        const int8_t* factors = reinterpret_cast<const int8_t*>(from + 192);
        uint8_t numbers[256];
        for (int half = 0; half < 2; ++half, low += 64, high += 32) {
            uint8_t* four = numbers + 128 * half;
            for (int i = 0; i < 32; ++i) {
                four[i] = (low[i] & 15) | (high[i] & 3) << 4;
                four[32 + i] = (low[32 + i] & 15) | (high[i] & 12) << 2;
                four[64 + i] = low[i] >> 4 | (high[i] & 48);
                four[96 + i] = low[32 + i] >> 4 | (high[i] & 192) >> 2;
            }
        }
        float scale = half_to_float(from + 208) * factor;
        for (int n = 0; n < 16; ++n)
            store(to + 16 * n, to_float(load_bytes(numbers + 16 * n) - 32) * (scale * float(factors[n])));
    }
};

struct Q3_K : Rounded {
    static constexpr int BYTES = 110, SCALE_AT = 108;
    static constexpr float MOST = 32 * 4;

    static void factors(const uint8_t* from, int (&to)[16]) {
        const uint8_t *low = from + 96, *high = from + 104;
        for (int i = 0; i < 16; ++i)
            to[i] = int((low[i % 8] >> 4 * (i / 8) & 15) | (high[i % 4] >> 2 * (i / 4) & 3) << 4) - 32;
    }

    // Low two bits as in Q2_K; the third, inverted, is bit 4 * half + unit of high byte i.
    static void values(const uint8_t* from, float factor, float* to) {
        const uint8_t *high = from, *low = from + 32;
        int all[16];
        factors(from, all);
        float scale = half_to_float(from + 108) * factor;
        for (int n = 0; n < 16; ++n) {
            int half = n / 8, unit = n / 2 % 4, at = n % 2 * 16;
            i32x16 bits = load_bytes(low + 32 * half + at) >> 2 * unit & 3;
            i32x16 upper = (load_bytes(high + at) >> (4 * half + unit) & 1) << 2;
            store(to + 16 * n, to_float((bits | upper) - 4) * (scale * float(all[n])));
        }
    }
};

struct Q2_K : Rounded {
    static constexpr int BYTES = 84, SCALE_AT = 80, MINIMUM_AT = 82;
    static constexpr float MOST = 15 * 3, MOST_OF_MINIMA = 15;  // of values: their sum

    // Two halves of 128 numbers, 32 bytes each: bits 2g and 2g + 1 of byte i are number i of unit g. A byte has the
    // scale and the minimum of 16 numbers.
    static void values(const uint8_t* from, float factor, float* to) {
        float scale = half_to_float(from + 80) * factor, minimum = half_to_float(from + 82) * factor;
        for (int n = 0; n < 16; ++n) {
            int half = n / 8, unit = n / 2 % 4;
            float by = scale * float(from[n] & 15), less = minimum * float(from[n] >> 4);
            i32x16 bits = load_bytes(from + 16 + 32 * half + n % 2 * 16) >> 2 * unit & 3;
            store(to + 16 * n, to_float(bits) * by - less);
        }
    }
};

}  // namespace engine
