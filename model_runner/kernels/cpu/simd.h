// Vectors of 16 floats for every CPU: the compiler's vector extension, which becomes one AVX-512 register, two of AVX2,
// four of SSE2 or NEON. Only what that extension cannot say (bfloat16 dot products, conversions) is written per CPU.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAS_BF16_DOT 1
#else
#define HAS_BF16_DOT 0
#endif

#if defined(__AVX512VNNI__)
#define HAS_BYTE_DOT 1
#else
#define HAS_BYTE_DOT 0
#endif

// GCC has the second form since version 12 only, Clang never had the first.
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (engine::i32x16){__VA_ARGS__})
#endif

namespace engine {

constexpr int LANES = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

// ---------------------------------------------------------------- numbers

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

inline void from_float(float x, float* out) { *out = x; }

// Rounds to the nearest, ties to even; NaN stays NaN.
inline void from_float(float x, bf16* out) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        out->bits = uint16_t((bits >> 16) | 0x40);
        return;
    }
    out->bits = uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// ---------------------------------------------------------------- loads and stores of 16

inline f32x16 splat(float x) { return x - f32x16{}; }

inline u32x16 splat_bits(uint32_t x) { return x | u32x16{}; }

inline f32x16 load(const float* p) {
    f32x16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline f32x16 load(const bf16* p) {
    u16x16 v;
    std::memcpy(&v, p, sizeof v);
#if defined(__AVX512F__)
    return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16);
#else
    return (f32x16)(__builtin_convertvector(v, u32x16) << 16);
#endif
}

inline void store(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }

inline u16x16 round_to_bf16(f32x16 v) {
#if HAS_BF16_DOT
    __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
    return (u16x16)rounded;
#else
    u32x16 bits = (u32x16)v;
    u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    u32x16 nan = (u32x16)((bits & 0x7fffffffu) > 0x7f800000u);
    return __builtin_convertvector((rounded & ~nan) | (((bits >> 16) | 0x40u) & nan), u16x16);
#endif
}

inline void store(bf16* p, f32x16 v) {
    u16x16 bits = round_to_bf16(v);
    std::memcpy(p, &bits, sizeof bits);
}

// ---------------------------------------------------------------- arithmetic

// Lane by lane a pair of bfloat16, (a, b), of finite numbers. Halves are rounded away from zero, which is cheaper.
inline void store_pairs(f32x16 a, f32x16 b, uint32_t* p) {
    u32x16 low = ((u32x16)a + 0x8000u) >> 16, high = ((u32x16)b + 0x8000u) & 0xffff0000u;
    u32x16 both = low | high;
    std::memcpy(p, &both, sizeof both);
}

inline f32x16 maximum(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

inline f32x16 minimum(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return a < b ? a : b;
#endif
}

inline float sum(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float parts[LANES];
    std::memcpy(parts, &v, sizeof parts);
    for (int width = LANES / 2; width; width /= 2)
        for (int n = 0; n < width; ++n) parts[n] += parts[n + width];
    return parts[0];
#endif
}

inline float largest(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float parts[LANES];
    std::memcpy(parts, &v, sizeof parts);
    for (int width = LANES / 2; width; width /= 2)
        for (int n = 0; n < width; ++n) parts[n] = parts[n] > parts[n + width] ? parts[n] : parts[n + width];
    return parts[0];
#endif
}

// 2^x for x < 128; 0 below -126, and for minus infinity. NaN stays NaN. Relative error below 3e-7.
//
// x = n + f with n whole and |f| <= 1/2; 2^f by its Taylor series in f ln 2, 2^n by adding n to the exponent.
inline f32x16 exp2_small(f32x16 x) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
    f32x16 clamped = maximum(splat(-127.0f), x);  // the second argument wins where one is NaN
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
inline f32x16 exp2(f32x16 x) { return exp2_small(minimum(splat(128.0f), x)); }

inline float exp2_small(float x) { return exp2_small(splat(x))[0]; }

// ---------------------------------------------------------------- bfloat16 pairs

// acc[i] += a[2i] * b[2i] + a[2i + 1] * b[2i + 1]; a and b are 32 numbers of bfloat16.
inline f32x16 dot_pairs(f32x16 acc, u32x16 a, u32x16 b) {
#if HAS_BF16_DOT
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc += (f32x16)(a << 16) * (f32x16)(b << 16);
    acc += (f32x16)(a & 0xffff0000u) * (f32x16)(b & 0xffff0000u);
    return acc;
#endif
}

inline u32x16 load_pairs(const void* p) {
    u32x16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline uint32_t load_pair(const void* p) {
    uint32_t v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// ---------------------------------------------------------------- bytes and whole numbers

// acc[i] += sum of a[4i + j] * b[4i + j] for j in 0..3; a is 64 unsigned, b 64 signed bytes.
inline i32x16 dot_bytes(i32x16 acc, u32x16 a, u32x16 b) {
#if HAS_BYTE_DOT
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#else
    for (int j = 0; j < 4; ++j) acc += (i32x16)((a >> (8 * j)) & 0xffu) * ((i32x16)(b << (24 - 8 * j)) >> 24);
    return acc;
#endif
}

inline f32x16 to_float(i32x16 v) { return __builtin_convertvector(v, f32x16); }

// To the nearest whole number, ties to even; |v| < 2^22.
inline i32x16 round_to_int(f32x16 v) {
#if defined(__AVX512F__)
    return (i32x16)_mm512_cvtps_epi32((__m512)v);
#else
    // Not by adding 1.5 * 2^23: a product before it would become part of a fused addition, and not be rounded itself.
    i32x16 whole = {};
    for (int n = 0; n < LANES; ++n) whole[n] = int32_t(__builtin_rintf(v[n]));
    return whole;
#endif
}

// The low byte of each.
inline void store_bytes(int8_t* p, i32x16 v) {
#if defined(__AVX512F__)
    __m128i bytes = _mm512_cvtepi32_epi8((__m512i)v);
    std::memcpy(p, &bytes, sizeof bytes);
#else
    for (int n = 0; n < LANES; ++n) p[n] = int8_t(v[n]);
#endif
}

inline int32_t sum(i32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t all = 0;
    for (int n = 0; n < LANES; ++n) all += v[n];
    return all;
#endif
}

// The largest magnitude of 32 numbers; NaN where one of them is NaN.
inline float largest_magnitude(f32x16 a, f32x16 b) {
    // As whole numbers: NaN is larger than infinity then.
    i32x16 p = (i32x16)a & 0x7fffffff, q = (i32x16)b & 0x7fffffff;
#if defined(__AVX512F__)
    int32_t bits = _mm512_reduce_max_epi32(_mm512_max_epi32((__m512i)p, (__m512i)q));
#else
    int32_t bits = 0;
    for (int n = 0; n < LANES; ++n) {
        bits = p[n] > bits ? p[n] : bits;
        bits = q[n] > bits ? q[n] : bits;
    }
#endif
    float most;
    std::memcpy(&most, &bits, sizeof most);
    return most;
}

// 16 finite numbers of half precision.
inline f32x16 load_halves(const uint16_t* p) {
    u16x16 v;
    std::memcpy(&v, p, sizeof v);
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps((__m256i)v);
#else
    u32x16 bits = __builtin_convertvector(v, u32x16);
    f32x16 magnitude = (f32x16)((bits & 0x7fffu) << 13) * 0x1p112f;  // the exponent's other bias
    return (f32x16)((u32x16)magnitude | ((bits & 0x8000u) << 16));
#endif
}

inline float half_to_float(const void* p) {
    uint16_t bits[LANES] = {};
    std::memcpy(bits, p, sizeof *bits);
    return load_halves(bits)[0];
}

// ---------------------------------------------------------------- 16 sums at once

// One level of the tree below: adds neighbours of a into the first half of each block, those of b into the second.
inline f32x16 add_neighbours_1(f32x16 a, f32x16 b) {
    return SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}
inline f32x16 add_neighbours_2(f32x16 a, f32x16 b) {
    return SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
inline f32x16 add_neighbours_4(f32x16 a, f32x16 b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
}
inline f32x16 add_neighbours_8(f32x16 a, f32x16 b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

// The sum of each of 16 vectors, in their order.
inline f32x16 sums(const f32x16* v) {
    f32x16 w[8];
    for (int n = 0; n < 8; ++n) w[n] = add_neighbours_1(v[2 * n], v[2 * n + 1]);
    for (int n = 0; n < 4; ++n) w[n] = add_neighbours_2(w[2 * n], w[2 * n + 1]);
    for (int n = 0; n < 2; ++n) w[n] = add_neighbours_4(w[2 * n], w[2 * n + 1]);
    return add_neighbours_8(w[0], w[1]);
}

}  // namespace engine
