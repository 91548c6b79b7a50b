// What every part of the attention kernels is given.

#pragma once

#include "attention_plan.h"
#include "simd.h"

namespace engine {

constexpr float NOTHING = -__builtin_inff();  // the score of a key that is not seen

// T: of queries and output. KV: of the pool, T or int8_t.
template <class T, class KV>
struct AttentionInputs {
    static constexpr bool IS_QUANTISED = sizeof(KV) == 1;

    const Step& step;
    const T* q;
    int64_t q_stride;
    const KV *k, *v;                // [slots, KV heads, head_dim]
    const float *k_scale, *v_scale; // [slots, KV heads] of quantised pools: a number is the stored one times its scale
    T* out;

    int64_t kv_stride() const { return step.num_kv_heads * step.head_dim; }
    float* result(int64_t partial, int64_t head) const {
        return step.results + (partial * step.num_heads() + head) * step.result_size();
    }
    // Scores are exponents of 2.
    float score_scale() const { return 1.44269504f / __builtin_sqrtf(float(step.head_dim)); }
};

// 2^x for x < 128, for weights that are rounded to bfloat16: relative error below 5e-5. 0 below -150, NaN stays NaN.
inline f32x16 exp2_rough(f32x16 x) {
#if HAS_BF16_DOT
    __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);  // the second wins where one is NaN
    f32x16 f = (f32x16)_mm512_reduce_ps(clamped, 0);                     // from the nearest whole number
    f32x16 p = splat(9.6181291e-3f);
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)((f32x16)clamped - f));
#else
    return exp2_small(x);
#endif
}

// Whether any of these is larger than x, or no number.
inline bool any_above(f32x16 v, float x) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(x), _CMP_NLE_UQ) != 0;
#else
    return !(largest(v) <= x);
#endif
}

// Scores of the keys [from, to) of these 16; the others become nothing.
inline f32x16 only_between(f32x16 scores, int64_t from, int64_t to) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    auto clamp = [](int64_t n) { return int32_t(n < 0 ? 0 : n > LANES ? LANES : n); };
    i32x16 inside = (lane >= clamp(from)) & (lane < clamp(to));
    i32x16 nothing = (i32x16)splat(NOTHING);
    return (f32x16)(((i32x16)scores & inside) | (nothing & ~inside));
}

}  // namespace engine
