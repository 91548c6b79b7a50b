// The rows of the sampler: the sampling parameters of a request, its processed logits, and their maximum.

#pragma once

#include <algorithm>
#include <limits>

#include "simd.h"

namespace engine::sampling {

constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504f;
constexpr int64_t BLOCK = 1024;  // tokens; each lane of a block is a group, of which only the maximum is kept
constexpr int64_t WORD_BITS = 32;

// Sampling parameters of one row; written by model_runner/sampling/native_backend.py.
struct Row {
    int32_t draws;      // 0: argmax
    float temperature;
    uint32_t keys[2];   // keys of the noise
    int32_t top_k;      // 0: no filter
    float top_p;        // 1: no filter
    float log_min_p;    // minus infinity: no filter
    int32_t edited;     // whether any field below is used
    int32_t slot;       // row of the token counts; -1 without penalties
    float repetition, frequency, presence;
    int32_t edits_start, edits_stop;
    int32_t grammar;    // row of the masks; -1: none
    int32_t unused;
};
static_assert(sizeof(Row) == 64);

struct Batch {
    const float* logits;
    int64_t stride;
    const Row* rows;  // null: all rows take the argmax of the model's logits
    const uint8_t* in_prompt;
    int32_t* in_output;
    const int32_t* edit_ids;
    const float* edit_values;
    const uint32_t* masks;
    int64_t mask_stride;
    int64_t* token_ids;
    uint8_t* finite;
    int64_t size;  // size of the vocabulary
};

inline int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

inline int64_t num_groups(int64_t size) { return (size + BLOCK - 1) / BLOCK * LANES; }

// 16 values, of which only the first `count` exist; the others are `fill`.
inline f32x16 load_part(const float* p, int64_t count, float fill) {
    if (count >= LANES) return load(p);
    float part[LANES];
    for (int n = 0; n < LANES; ++n) part[n] = n < count ? p[n] : fill;
    return load(part);
}

inline u32x16 lanes() { return u32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// One bit per lane that is true.
inline uint32_t bits_of(i32x16 lanes) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
#elif defined(__AVX2__)
    auto half = [](i32x8 v) { return uint32_t(_mm256_movemask_ps((__m256)v)); };
    return half(lanes.low) | half(lanes.high) << 8;
#else
    int32_t numbers[LANES];
    put(numbers, lanes);
    uint32_t bits = 0;
    for (int n = 0; n < LANES; ++n) bits |= uint32_t(numbers[n] & 1) << n;
    return bits;
#endif
}

// One bit per lane where a >= b; 0 where either is NaN.
inline uint32_t bits_at_least(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#else
    return bits_of(a >= b);
#endif
}

inline i32x16 load_keys(const int32_t* p) {
    i32x16 v;
    get(v, p);
    return v;
}

// ---------------------------------------------------------------- finiteness and the maximum

struct Peak {
    int64_t token;  // the first maximum; unspecified unless all values are finite
    bool finite;
};

inline Peak find_peak(const float* x, int64_t size) {
    float best = -INFINITE;
    int64_t block = 0;
    LargestMagnitude magnitudes[2];
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        int64_t end = std::min(begin + BLOCK, size), n = begin;
        f32x16 tops[2] = {splat(-INFINITE), splat(-INFINITE)};
        for (; n + 2 * LANES <= end; n += 2 * LANES)
            for (int u = 0; u < 2; ++u) {
                f32x16 v = load(x + n + u * LANES);
                tops[u] = maximum(tops[u], v);
                magnitudes[u].see(v);
            }
        for (; n < end; n += LANES) {
            f32x16 v = load_part(x + n, end - n, x[n]);
            tops[0] = maximum(tops[0], v);
            magnitudes[0].see(v);
        }
        float top = largest(maximum(tops[0], tops[1]));
        if (top > best) {
            best = top;
            block = begin;
        }
    }
    Peak peak{block, magnitudes[0].is_finite() && magnitudes[1].is_finite()};
    for (int64_t n = block; n < std::min(block + BLOCK, size); n += LANES)
        if (uint32_t bits = bits_at_least(load_part(x + n, size - n, -INFINITE), splat(best))) {
            peak.token = std::min(n + __builtin_ctz(bits), size - 1);
            break;
        }
    return peak;
}

// ---------------------------------------------------------------- processed logits

// A multiplication that is rounded before a following addition, as in torch.
inline float rounded_product(float a, float b) {
    volatile float product = a * b;
    return product;
}

inline void penalise(const Row& row, const Batch& batch, float* x) {
    const uint8_t* in_prompt = batch.in_prompt + row.slot * batch.size;
    const int32_t* in_output = batch.in_output + row.slot * batch.size;
    for (int64_t begin = 0; begin < batch.size; begin += LANES) {
        int64_t end = std::min(begin + LANES, batch.size);
        uint32_t seen = 0;
        for (int64_t n = begin; n < end; ++n) seen |= uint32_t(in_prompt[n]) | uint32_t(in_output[n]);
        if (!seen) continue;
        for (int64_t n = begin; n < end; ++n) {
            if (in_prompt[n] || in_output[n] > 0) x[n] = x[n] > 0 ? x[n] / row.repetition : x[n] * row.repetition;
            x[n] -= rounded_product(row.frequency, float(in_output[n]));
            if (in_output[n] > 0) x[n] -= row.presence;
        }
    }
}

inline void forbid(const uint32_t* allowed, float* x, int64_t size) {
    for (int64_t n = 0; n < size; n += WORD_BITS) {
        uint32_t word = allowed[n / WORD_BITS];
        if (word == ~0u) continue;
        int64_t count = std::min(WORD_BITS, size - n);
        for (int64_t bit = 0; bit < count; ++bit)
            if (!(word >> bit & 1)) x[n + bit] = -INFINITE;
    }
}

// Writes the processed row; returns whether all logits of the model are finite.
inline bool edit(const Row& row, const Batch& batch, const float* logits, float* x) {
    LargestMagnitude magnitude;
    int64_t n = 0;
    for (; n < batch.size; n += LANES) {
        f32x16 v = load_part(logits + n, batch.size - n, logits[n]);
        magnitude.see(v);
        store(x + n, v);  // x has padding for a whole vector
    }
    if (row.slot >= 0) penalise(row, batch, x);
    for (int32_t e = row.edits_start; e < row.edits_stop; ++e)
        if (int64_t token = batch.edit_ids[e]; token >= 0 && token < batch.size) x[token] += batch.edit_values[e];
    if (row.grammar >= 0) forbid(batch.masks + row.grammar * batch.mask_stride, x, batch.size);
    return magnitude.is_finite();
}

}  // namespace engine::sampling
