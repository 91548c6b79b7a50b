// Vectors of 16 floats for every CPU, by the compiler's vector extension: one register of AVX-512, two of AVX2, four of
// SSE2 or NEON (vector_pair.h). Only what the extension lacks (dot products, conversions) is written per CPU.

#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "vector_pair.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if (defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_BF16_DOT 1
#else
#define HAS_BF16_DOT 0
#endif

// GCC has the second form only since version 12; Clang never had the first.
#if !defined(__AVX512F__)
#define SHUFFLE(a, b, ...) engine::shuffle<__VA_ARGS__>(a, b)
#elif defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (engine::i32x16){__VA_ARGS__})
#endif

namespace engine {

constexpr int LANES = 16;

#if defined(__AVX512F__)
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
#else
typedef uint16_t u16x8 __attribute__((vector_size(16)));
#if defined(__AVX2__)
typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
#else
typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef VectorPair<f32x4> f32x8;
typedef VectorPair<i32x4> i32x8;
typedef VectorPair<u32x4> u32x8;
#endif
typedef VectorPair<f32x8> f32x16;
typedef VectorPair<i32x8> i32x16;
typedef VectorPair<u32x8> u32x16;
typedef VectorPair<u16x8> u16x16;
#endif

// Calls work(quarter, ...) for the four quarters of vectors of four registers: work on NEON's.
#if defined(__aarch64__)
template <class Work, class... Vectors>
ALWAYS_INLINE auto by_quarters(const Work& work, const Vectors&... v) {
    typedef VectorPair<decltype(work(v.low.low...))> Half;
    return VectorPair<Half>{Half{work(v.low.low...), work(v.low.high...)}, Half{work(v.high.low...), work(v.high.high...)}};
}
#endif

struct bf16 {
    uint16_t bits;
};

// ---------------------------------------------------------------- scalars

ALWAYS_INLINE float to_float(float x) { return x; }

ALWAYS_INLINE float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

ALWAYS_INLINE void from_float(float x, float* out) { *out = x; }

// Rounds to nearest, ties to even; NaN stays NaN.
ALWAYS_INLINE void from_float(float x, bf16* out) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        out->bits = uint16_t((bits >> 16) | 0x40);
        return;
    }
    out->bits = uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// ---------------------------------------------------------------- loads and stores of 16

ALWAYS_INLINE f32x16 splat(float x) { return x - f32x16{}; }

ALWAYS_INLINE u32x16 splat_bits(uint32_t x) { return x | u32x16{}; }

ALWAYS_INLINE f32x16 load(const float* p) {
    f32x16 v;
    get(v, p);
    return v;
}

#if !defined(__AVX512F__)
ALWAYS_INLINE f32x8 to_float(i32x8 v) {
#if defined(__AVX2__)
    return __builtin_convertvector(v, f32x8);
#else
    return {__builtin_convertvector(v.low, f32x4), __builtin_convertvector(v.high, f32x4)};
#endif
}
#endif

ALWAYS_INLINE f32x16 to_float(i32x16 v) {
#if defined(__AVX512F__)
    return __builtin_convertvector(v, f32x16);
#else
    return {to_float(v.low), to_float(v.high)};
#endif
}

// Zero-extends 16-bit elements to 32 bits.
ALWAYS_INLINE u32x16 widened(u16x16 v) {
#if defined(__AVX512F__)
    return (u32x16)_mm512_cvtepu16_epi32((__m256i)v);
#elif defined(__AVX2__)
    return {(u32x8)_mm256_cvtepu16_epi32((__m128i)v.low), (u32x8)_mm256_cvtepu16_epi32((__m128i)v.high)};
#else
    auto part = [](u16x8 x) {  // interleaved with zeros; on little-endian CPUs the element is the low half
        u16x8 zeros = {};
        return u32x8{(u32x4)shuffle<0, 8, 1, 9, 2, 10, 3, 11>(x, zeros), (u32x4)shuffle<4, 12, 5, 13, 6, 14, 7, 15>(x, zeros)};
    };
    return {part(v.low), part(v.high)};
#endif
}

// The low half of each lane.
ALWAYS_INLINE u16x16 narrowed(u32x16 v) {
#if defined(__AVX512F__)
    return __builtin_convertvector(v, u16x16);
#elif defined(__AVX2__)
    auto part = [](u32x8 x) {
        const __m256i first = _mm256_set_epi64x(-1, 0x0d0c090805040100, -1, 0x0d0c090805040100);
        __m256i both = _mm256_permute4x64_epi64(_mm256_shuffle_epi8((__m256i)x, first), 0x08);
        return (u16x8)_mm256_castsi256_si128(both);
    };
    return {part(v.low), part(v.high)};
#else
    auto part = [](u32x8 x) { return shuffle<0, 2, 4, 6, 8, 10, 12, 14>((u16x8)x.low, (u16x8)x.high); };
    return {part(v.low), part(v.high)};
#endif
}

ALWAYS_INLINE f32x16 load(const bf16* p) {
    u16x16 v;
    get(v, p);
    return (f32x16)(widened(v) << 16);
}

ALWAYS_INLINE void store(float* p, f32x16 v) { put(p, v); }

ALWAYS_INLINE u16x16 round_to_bf16(f32x16 v) {
#if HAS_BF16_DOT && defined(__aarch64__)
    auto half = [](f32x8 v) __attribute__((always_inline)) {
        return (u16x8)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)v.low), (float32x4_t)v.high);
    };
    return {half(v.low), half(v.high)};
#elif HAS_BF16_DOT
    __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
    return (u16x16)rounded;
#else
    u32x16 bits = (u32x16)v;
    u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    u32x16 nan = (u32x16)((i32x16)(bits & 0x7fffffffu) > 0x7f800000);
    return narrowed((rounded & ~nan) | (((bits >> 16) | 0x40u) & nan));
#endif
}

ALWAYS_INLINE void store(bf16* p, f32x16 v) {
    put(p, round_to_bf16(v));
}

// Rounded to bfloat16 and widened again.
ALWAYS_INLINE f32x16 rounded(f32x16 v) { return (f32x16)(widened(round_to_bf16(v)) << 16); }

// ---------------------------------------------------------------- arithmetic

// Stores lane by lane the bfloat16 pair (a, b), finite values. Ties round away from zero, which is cheaper.
ALWAYS_INLINE void store_pairs(f32x16 a, f32x16 b, uint32_t* p) {
    u32x16 low = ((u32x16)a + 0x8000u) >> 16, high = ((u32x16)b + 0x8000u) & 0xffff0000u;
    put(p, low | high);
}

ALWAYS_INLINE f32x16 maximum(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select(a > b, a, b);
#endif
}

ALWAYS_INLINE f32x16 minimum(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return select(a < b, a, b);
#endif
}

#if !defined(__AVX512F__)
// Reduces all lanes with `combine`: both halves, then the halves of the result.
template <class Vector, class Combine>
ALWAYS_INLINE auto reduce(const Vector& v, const Combine& combine) {
    auto half = combine(v.low, v.high);
#if defined(__AVX2__)
    typedef std::remove_cvref_t<decltype(half[0])> Number;
    typedef Number Quarter __attribute__((vector_size(16)));
    Quarter parts[2];
    std::memcpy(parts, &half, sizeof parts);
    Quarter four = combine(parts[0], parts[1]);
#else
    auto four = combine(half.low, half.high);
#endif
    four = combine(four, shuffle<2, 3, 2, 3>(four, four));
    return combine(four, shuffle<1, 1, 1, 1>(four, four))[0];
}
#endif

ALWAYS_INLINE float sum(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    return reduce(v, [](auto a, auto b) { return a + b; });
#endif
}

ALWAYS_INLINE float largest(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    return reduce(v, [](auto a, auto b) { return select(a > b, a, b); });
#endif
}

// The largest magnitude of some values; NaN if any of them is NaN.
class LargestMagnitude {
  public:
    ALWAYS_INLINE void see(f32x16 numbers) {
        i32x16 magnitudes = (i32x16)numbers & 0x7fffffff;
#if defined(__AVX512F__)
        bits_ = (i32x16)_mm512_max_epi32((__m512i)bits_, (__m512i)magnitudes);
#else
        bits_ = select(magnitudes > bits_, magnitudes, bits_);
#endif
    }

    ALWAYS_INLINE float get() const {
#if defined(__AVX512F__)
        int32_t bits = _mm512_reduce_max_epi32((__m512i)bits_);
#else
        int32_t bits = reduce(bits_, [](auto a, auto b) { return select(a > b, a, b); });
#endif
        float most;
        std::memcpy(&most, &bits, sizeof most);
        return most;
    }

    ALWAYS_INLINE bool is_finite() const { return get() <= std::numeric_limits<float>::max(); }

  private:
    i32x16 bits_ = {};  // as integers: NaN is then larger than infinity
};

// 2^x for x < 128; 0 below -126 and for minus infinity. NaN stays NaN. Relative error below 3e-7.
//
// x = n + f with n an integer and |f| <= 1/2; 2^f by its Taylor series in f ln 2, 2^n by adding n to the exponent.
ALWAYS_INLINE f32x16 exp2_small(f32x16 x) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    f32x16 clamped = maximum(splat(-127.0f), x);  // NaN in either argument returns the second one
    f32x16 shifted = clamped + ROUND;
    f32x16 f = clamped - (shifted - ROUND);
    f32x16 p = splat(1.5403530e-4f);
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    f32x16 scaled = (f32x16)((i32x16)p + ((i32x16)shifted << 23));
    i32x16 tiny = x < splat(-126.0f);
    return (f32x16)((i32x16)scaled & ~tiny);
}

// The same for all x: infinity from 128 on.
ALWAYS_INLINE f32x16 exp2(f32x16 x) { return exp2_small(minimum(splat(128.0f), x)); }

ALWAYS_INLINE float exp2_small(float x) { return exp2_small(splat(x))[0]; }

// ---------------------------------------------------------------- bfloat16 pairs

// acc[i] += a[2i] * b[2i] + a[2i + 1] * b[2i + 1]; a and b are 32 bfloat16 values.
ALWAYS_INLINE f32x16 dot_pairs(f32x16 acc, u32x16 a, u32x16 b) {
#if HAS_BF16_DOT && defined(__aarch64__)
    return by_quarters([](f32x4 acc, u32x4 a, u32x4 b) __attribute__((always_inline)) {
        return (f32x4)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)a, (bfloat16x8_t)b);
    }, acc, a, b);
#elif HAS_BF16_DOT
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc += (f32x16)(a << 16) * (f32x16)(b << 16);
    acc += (f32x16)(a & 0xffff0000u) * (f32x16)(b & 0xffff0000u);
    return acc;
#endif
}

ALWAYS_INLINE u32x16 load_pairs(const void* p) {
    u32x16 v;
    get(v, p);
    return v;
}

ALWAYS_INLINE uint32_t load_pair(const void* p) {
    uint32_t v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// ---------------------------------------------------------------- 16 sums at once

// One level of the reduction tree: adds neighbors of a into the first half of each block, those of b into the second.
ALWAYS_INLINE f32x16 add_neighbors_1(f32x16 a, f32x16 b) {
    return SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}
ALWAYS_INLINE f32x16 add_neighbors_2(f32x16 a, f32x16 b) {
    return SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
ALWAYS_INLINE f32x16 add_neighbors_4(f32x16 a, f32x16 b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
}
ALWAYS_INLINE f32x16 add_neighbors_8(f32x16 a, f32x16 b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

// The sum of each of 16 vectors, in their order.
ALWAYS_INLINE f32x16 sums(const f32x16* v) {
    f32x16 w[8];
    for (int n = 0; n < 8; ++n) w[n] = add_neighbors_1(v[2 * n], v[2 * n + 1]);
    for (int n = 0; n < 4; ++n) w[n] = add_neighbors_2(w[2 * n], w[2 * n + 1]);
    for (int n = 0; n < 2; ++n) w[n] = add_neighbors_4(w[2 * n], w[2 * n + 1]);
    return add_neighbors_8(w[0], w[1]);
}

}  // namespace engine
