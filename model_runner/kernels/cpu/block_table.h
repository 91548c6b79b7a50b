// Weights of 4-bit codes whose values are in a table of 16 bytes, e.g. IQ4_NL or MXFP4: the codes of 64 weights become
// their bytes by one table look-up.

#pragma once

#include <algorithm>

#include "bytes.h"
#include "simd.h"

// Without byte dot products but with AVX2: dot products of signed bytes, exact in 16 bits before they are widened.
#if HAS_WORD_SUMS && !defined(__AVX512F__)
#define HAS_SIGNED_DOT 1
#else
#define HAS_SIGNED_DOT 0
#endif

namespace engine {

constexpr int64_t TABLE_SIZE = 16;
constexpr int MAX_SMALL_VALUE = 30;  // 4 * 2 * 30 * 127 fits into 16 bits: see dot_nibbles

inline bool has_small_values(const uint8_t* table) {
    return *std::max_element(table, table + TABLE_SIZE) <= MAX_SMALL_VALUE;
}

// The table in a register.
class Lookup {
  public:
    // `zero` is subtracted from all values, modulo 256.
    explicit Lookup(const uint8_t* table, int zero = 0) {
        uint8_t values[TABLE_SIZE];
        for (int64_t n = 0; n < TABLE_SIZE; ++n) values[n] = uint8_t(table[n] - zero);
#if defined(__AVX512F__)
        values_ = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
#elif defined(__AVX2__)
        values_ = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
#else
        std::memcpy(values_, values, sizeof values);
#endif
    }

    // The values of 64 codes, which are below 16.
    ALWAYS_INLINE u32x16 operator()(u32x16 codes) const {
#if defined(__AVX512F__)
        return (u32x16)_mm512_shuffle_epi8(values_, (__m512i)codes);
#elif defined(__AVX2__)
        return {(u32x8)_mm256_shuffle_epi8(values_, (__m256i)codes.low),
                (u32x8)_mm256_shuffle_epi8(values_, (__m256i)codes.high)};
#else
        uint8_t bytes[4 * LANES];
        put(bytes, codes);
        for (uint8_t& byte : bytes) byte = values_[byte];
        u32x16 values;
        get(values, bytes);
        return values;
#endif
    }

  private:
#if defined(__AVX512F__)
    __m512i values_;
#elif defined(__AVX2__)
    __m256i values_;
#else
    uint8_t values_[TABLE_SIZE];
#endif
};

#if HAS_SIGNED_DOT

ALWAYS_INLINE u32x16 magnitudes_of_bytes(u32x16 a) {
    return {(u32x8)_mm256_abs_epi8((__m256i)a.low), (u32x8)_mm256_abs_epi8((__m256i)a.high)};
}

// acc[i] += sum of a[4i + j] * b[4i + j] for j in 0..3; both are 64 signed bytes of magnitude at most 127, and
// `magnitudes` those of a.
ALWAYS_INLINE i32x16 dot_signed_bytes(i32x16 acc, u32x16 a, u32x16 magnitudes, u32x16 b) {
    const __m256i ones = _mm256_set1_epi16(1);
    auto part = [&](i32x8 acc, u32x8 a, u32x8 magnitudes, u32x8 b) {
        __m256i pairs = _mm256_maddubs_epi16((__m256i)magnitudes, _mm256_sign_epi8((__m256i)b, (__m256i)a));
        return acc + (i32x8)_mm256_madd_epi16(pairs, ones);
    };
    return {part(acc.low, a.low, magnitudes.low, b.low), part(acc.high, a.high, magnitudes.high, b.high)};
}

#endif

}  // namespace engine
