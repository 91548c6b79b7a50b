// Inputs common to all parts of the attention kernels.

#pragma once

#include "activations.h"
#include "attention_plan.h"
#include "simd.h"

namespace engine {

constexpr float NOTHING = -__builtin_inff();  // the score of a masked key

// T: type of queries and output. KV: type of the pool, T or int8_t.
template <class T, class KV>
struct AttentionInputs {
    static constexpr bool IS_QUANTISED = sizeof(KV) == 1;

    const Step& step;
    const T* q;
    int64_t q_stride;
    const KV *k, *v;                // [slots, KV heads, head_dim]
    const float *k_scale, *v_scale; // [slots, KV heads] of quantized pools: value = stored integer * scale
    const float* sinks;             // per query head: a score without a value; null: there are none
    T* out;

    int64_t kv_stride() const { return step.num_kv_heads * step.head_dim; }
    float* result(int64_t partial, int64_t head) const {
        return step.results + (partial * step.num_heads() + head) * step.result_size();
    }
    // The sink of a head, as a base-2 exponent.
    float sink(int64_t head) const { return sinks != nullptr ? sinks[head] * 1.44269504f : NOTHING; }
};

// While it exists, denormal results of this thread are flushed to 0: each costs hundreds of cycles, and the weights of
// scores far below the maximum are denormal.
class FlushDenormals {
  public:
#if defined(__SSE2__)
    FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8000); }
    ~FlushDenormals() { _mm_setcsr(before_); }

  private:
    unsigned before_;
#else
    FlushDenormals() {}
#endif
};

// 2^x for x < 128, for weights rounded to bfloat16: relative error below 9e-5. 0 below -149, NaN stays NaN.
inline f32x16 exp2_rough(f32x16 x) {
#if defined(__AVX512DQ__)
    f32x16 f = (f32x16)_mm512_reduce_ps((__m512)x, 1);  // x - floor(x)
    f32x16 p = splat(7.7066410e-2f);
    p = p * f + 2.2764568e-1f;
    p = p * f + 6.9511663e-1f;
    p = p * f + 1.0f;
    return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    return exp2_small(x);
#endif
}

// A bfloat16 is the upper half of a float.
inline f32x16 upper_half(f32x16 x) { return (f32x16)((u32x16)x & 0xffff0000u); }

// Makes the upper half the nearest bfloat16; ties round away from zero.
inline f32x16 round_up(f32x16 x) { return (f32x16)((u32x16)x + 0x8000u); }

// Packs the upper halves of both into pairs.
inline u32x16 upper_halves(f32x16 first, f32x16 second) {
#if defined(__AVX512BW__)
    const __m512i upper = _mm512_set4_epi32(0x00000f0e, 0x00000b0a, 0x00000706, 0x00000302);
    return (u32x16)_mm512_mask_shuffle_epi8((__m512i)second, 0x3333333333333333, (__m512i)first, upper);
#else
    return ((u32x16)first >> 16) | ((u32x16)second & 0xffff0000u);
#endif
}

// Whether any element is larger than x, or NaN.
inline bool any_above(f32x16 v, float x) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(x), _CMP_NLE_UQ) != 0;
#else
    return !(largest(v) <= x);
#endif
}

// Keeps the scores of the keys [from, to) of these 16; masks the others.
inline f32x16 only_between(f32x16 scores, int64_t from, int64_t to) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    auto clamp = [](int64_t n) { return int32_t(n < 0 ? 0 : n > LANES ? LANES : n); };
    i32x16 inside = (lane >= clamp(from)) & (lane < clamp(to));
    i32x16 nothing = (i32x16)splat(NOTHING);
    return (f32x16)(((i32x16)scores & inside) | (nothing & ~inside));
}

}  // namespace engine
