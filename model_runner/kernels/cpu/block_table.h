// Weights of 4-bit codes whose values are in a table of 16 bytes, e.g. IQ4_NL or MXFP4: the codes of 64 weights become
// their bytes by one table look-up.

#pragma once

#include <algorithm>

#include "bytes.h"
#include "simd.h"

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
#elif defined(__aarch64__)
    const uint8x16_t values = vld1q_u8(values_);
    return by_quarters([=](u32x4 codes) __attribute__((always_inline)) { return (u32x4)vqtbl1q_u8(values, (uint8x16_t)codes); },
                       codes);
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

}  // namespace engine
