// Queries and weights as 16-bit integers, with which stream items multiply 8-bit keys and values (WordDots).

#pragma once

#include "attention_dots.h"
#include "bytes.h"

namespace engine {

constexpr float MOST_WORD = 16383.0f;  // 127 * 16383 * 1024 dimensions fit into 32 bits

// Scale of quantization. Its inverse is 0 if all values are 0 or one is not finite. In the second case the scale is not
// finite either, and neither is anything multiplied by it.
struct WordScale {
    float scale, inverse;

    explicit WordScale(float most)
        : scale(most * (1.0f / MOST_WORD) + (most - most)),  // infinity - infinity is NaN
          inverse(scale > 0.0f ? MOST_WORD / most : 0.0f) {}
};

inline void store_words([[maybe_unused]] int16_t* out, [[maybe_unused]] f32x16 numbers) {
#if HAS_WORD_DOT && !defined(__AVX512F__)
    i32x16 whole = round_to_int(numbers);
    __m256i words = _mm256_packs_epi32((__m256i)whole.low, (__m256i)whole.high);  // alternates 4 of low, 4 of high
    _mm256_storeu_si256((__m256i*)out, _mm256_permute4x64_epi64(words, 0xd8));
#elif HAS_WORD_DOT
    _mm256_storeu_si256((__m256i*)out, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32((__m512)numbers)));
#endif
}

// Quantizes a query of `size` values, padded with zeros to `padded_size`; returns its scale.
template <class T>
float quantise_query(const T* q, int64_t size, int64_t padded_size, int16_t* out) {
    LargestMagnitude most;
    for (int64_t d = 0; d < size; d += LANES) most.see(load(q + d));
    WordScale words(most.get());
    for (int64_t d = 0; d < size; d += LANES) store_words(out + d, load(q + d) * words.inverse);
    std::memset(out + size, 0, sizeof(int16_t) * (padded_size - size));
    return words.scale;
}

}  // namespace engine
