// Additions to simd.h for weights, keys and values of few bits: dot products of bytes, integers, half precision.

#pragma once

#include "simd.h"

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__)) || defined(__aarch64__)
#define HAS_BYTE_DOT 1
#else
#define HAS_BYTE_DOT 0
#endif

// Accumulate products of small bytes in 16 bits first.
#if defined(__AVX2__) && !HAS_BYTE_DOT
#define HAS_WORD_SUMS 1
#else
#define HAS_WORD_SUMS 0
#endif

// Multiply signed bytes: on AVX2 two products at a time in 16 bits; on ARM without i8mm there is no other way.
#if (HAS_WORD_SUMS && !defined(__AVX512F__)) || (defined(__aarch64__) && !defined(__ARM_FEATURE_MATMUL_INT8))
#define HAS_SIGNED_DOT 1
#else
#define HAS_SIGNED_DOT 0
#endif

namespace engine {

#if HAS_WORD_SUMS
// Products of bytes, added up in 16 bits. In assembly, with the sums in one register: compilers move additions away from
// their multiplications, run out of registers, and keep the sums on the stack.
template <class Vector>
ALWAYS_INLINE Vector add_word_products(Vector sums, Vector unsigned_bytes, Vector signed_bytes) {
    Vector products;
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
        : "+v"(sums), "=&v"(products)
        : "v"(unsigned_bytes), "v"(signed_bytes));
    return sums;
}

// Products of 16-bit integers, two by two, added up in 32 bits.
template <class Vector>
ALWAYS_INLINE Vector add_pair_products(Vector sums, Vector a, Vector b) {
    Vector products;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sums), "=&v"(products) : "v"(a), "v"(b));
    return sums;
}
#endif

#if defined(__aarch64__)
// acc[i] += sum of a[4i + j] * b[4i + j] for j in 0..3; signed bytes, those of b of magnitude at most 127.
ALWAYS_INLINE i32x16 dot_signed(i32x16 acc, u32x16 a, u32x16 b) {
    return by_quarters([](i32x4 acc, u32x4 a, u32x4 b) __attribute__((always_inline)) {
#if defined(__ARM_FEATURE_DOTPROD)
        return (i32x4)vdotq_s32((int32x4_t)acc, (int8x16_t)a, (int8x16_t)b);
#else
        int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)a), vget_low_s8((int8x16_t)b));
        return (i32x4)vpadalq_s16((int32x4_t)acc, vpaddq_s16(low, vmull_high_s8((int8x16_t)a, (int8x16_t)b)));
#endif
    }, acc, a, b);
}
#endif

// acc[i] += sum of a[4i + j] * b[4i + j] for j in 0..3; a is 64 unsigned, b 64 signed bytes. On ARM without i8mm, those
// of a are below 128.
ALWAYS_INLINE i32x16 dot_bytes(i32x16 acc, u32x16 a, u32x16 b) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return by_quarters([](i32x4 acc, u32x4 a, u32x4 b) __attribute__((always_inline)) {
        return (i32x4)vusdotq_s32((int32x4_t)acc, (uint8x16_t)a, (int8x16_t)b);
    }, acc, a, b);
#elif defined(__aarch64__)
    return dot_signed(acc, a, b);
#elif HAS_BYTE_DOT && !defined(__AVX512F__)
    return {(i32x8)_mm256_dpbusd_avx_epi32((__m256i)acc.low, (__m256i)a.low, (__m256i)b.low),
            (i32x8)_mm256_dpbusd_avx_epi32((__m256i)acc.high, (__m256i)a.high, (__m256i)b.high)};
#elif HAS_BYTE_DOT
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif HAS_WORD_SUMS && defined(__AVX512F__)
    // As 16-bit integers; the sum of two products fits into 32 bits.
    __m512i low = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)b, 8), 8), high = _mm512_srai_epi16((__m512i)b, 8);
    acc = add_pair_products(acc, (i32x16)_mm512_and_si512((__m512i)a, _mm512_set1_epi16(0xff)), (i32x16)low);
    return add_pair_products(acc, (i32x16)_mm512_srli_epi16((__m512i)a, 8), (i32x16)high);
#else
    for (int j = 0; j < 4; ++j) acc += (i32x16)((a >> (8 * j)) & 0xffu) * ((i32x16)(b << (24 - 8 * j)) >> 24);
    return acc;
#endif
}

// acc is 32 16-bit accumulators: acc[2i + j] += a[4i + 2j] * b[4i + 2j] + a[4i + 2j + 1] * b[4i + 2j + 1]; a is 64
// bytes below 16, b 64 signed bytes of magnitude at most 127. 8 calls cannot overflow: 8 * 2 * 15 * 127 = 30480.
ALWAYS_INLINE i32x16 dot_nibbles(i32x16 acc, u32x16 a, u32x16 b) {
#if HAS_WORD_SUMS && defined(__AVX512F__)
    return add_word_products(acc, (i32x16)a, (i32x16)b);
#elif HAS_WORD_SUMS
    return {add_word_products(acc.low, (i32x8)a.low, (i32x8)b.low), add_word_products(acc.high, (i32x8)a.high, (i32x8)b.high)};
#else
    return dot_bytes(acc, a, b);
#endif
}

#if HAS_SIGNED_DOT && defined(__aarch64__)

ALWAYS_INLINE u32x16 magnitudes_of_bytes(u32x16 a) { return a; }  // not needed
ALWAYS_INLINE i32x16 dot_signed_bytes(i32x16 acc, u32x16 a, u32x16, u32x16 b) { return dot_signed(acc, a, b); }

#elif HAS_SIGNED_DOT

ALWAYS_INLINE u32x16 magnitudes_of_bytes(u32x16 a) {
    return {(u32x8)_mm256_abs_epi8((__m256i)a.low), (u32x8)_mm256_abs_epi8((__m256i)a.high)};
}

// acc[i] += sum of a[4i + j] * b[4i + j] for j in 0..3; both are 64 signed bytes, those of b of magnitude at most 127:
// 2 * 128 * 127 = 32512 fits into 16 bits. `magnitudes`: those of a. In assembly: see add_word_products.
ALWAYS_INLINE i32x16 dot_signed_bytes(i32x16 acc, u32x16 a, u32x16 magnitudes, u32x16 b) {
    const __m256i ones = _mm256_set1_epi16(1);
    auto part = [&](i32x8 acc, u32x8 a, u32x8 magnitudes, u32x8 b) __attribute__((always_inline)) {
        i32x8 products;
        asm("vpsignb %2, %4, %1\n\tvpmaddubsw %1, %3, %1\n\tvpmaddwd %5, %1, %1\n\tvpaddd %1, %0, %0"
            : "+x"(acc), "=&x"(products)
            : "x"(a), "x"(magnitudes), "x"(b), "x"(ones));
        return acc;
    };
    return {part(acc.low, a.low, magnitudes.low, b.low), part(acc.high, a.high, magnitudes.high, b.high)};
}

#endif

// Reduces the accumulators of dot_nibbles to one sum per four bytes.
ALWAYS_INLINE i32x16 sum_words(i32x16 words) {
#if HAS_WORD_SUMS && defined(__AVX512F__)
    return (i32x16)_mm512_madd_epi16((__m512i)words, _mm512_set1_epi16(1));
#elif HAS_WORD_SUMS
    const __m256i ones = _mm256_set1_epi16(1);
    return {(i32x8)_mm256_madd_epi16((__m256i)words.low, ones), (i32x8)_mm256_madd_epi16((__m256i)words.high, ones)};
#else
    return words;
#endif
}

#if HAS_WORD_SUMS

// sums[i] = words[2i] * scales[2i] + words[2i + 1] * scales[2i + 1], in 16 bits and 32 bits.
ALWAYS_INLINE i32x16 scale_words(i32x16 words, i32x16 scales) {
#if defined(__AVX512F__)
    return (i32x16)_mm512_madd_epi16((__m512i)words, (__m512i)scales);
#else
    return {(i32x8)_mm256_madd_epi16((__m256i)words.low, (__m256i)scales.low),
            (i32x8)_mm256_madd_epi16((__m256i)words.high, (__m256i)scales.high)};
#endif
}

// Byte `byte` of each lane as both words of the lane.
template <bool IS_SIGNED>
ALWAYS_INLINE i32x16 words_of_byte(u32x16 v, int byte) {
    // Bytes 4n to 4n + 3 of a control are for lane n; 0x80 gives zero. Signed bytes are shifted down from the upper half.
    const uint32_t low = IS_SIGNED ? 0x80 : byte, high = IS_SIGNED ? byte : 0x80, both = (low | high << 8) * 0x10001u;
    const __m128i control = _mm_setr_epi32(int(both), int(both + 0x04040404u), int(both + 0x08080808u), int(both + 0x0c0c0c0cu));
#if defined(__AVX512F__)
    __m512i words = _mm512_shuffle_epi8((__m512i)v, _mm512_broadcast_i32x4(control));
    return (i32x16)(IS_SIGNED ? _mm512_srai_epi16(words, 8) : words);
#else
    auto part = [&](u32x8 v) __attribute__((always_inline)) {
        __m256i words = _mm256_shuffle_epi8((__m256i)v, _mm256_broadcastsi128_si256(control));
        return (i32x8)(IS_SIGNED ? _mm256_srai_epi16(words, 8) : words);
    };
    return {part(v.low), part(v.high)};
#endif
}

#endif

// To the nearest integer, ties to even; |v| < 2^22.
ALWAYS_INLINE i32x16 round_to_int(f32x16 v) {
#if defined(__AVX512F__)
    return (i32x16)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
    return {(i32x8)_mm256_cvtps_epi32((__m256)v.low), (i32x8)_mm256_cvtps_epi32((__m256)v.high)};
#elif defined(__aarch64__)
    return by_quarters([](f32x4 v) __attribute__((always_inline)) { return (i32x4)vcvtnq_s32_f32((float32x4_t)v); }, v);
#else
    // Not by adding 1.5 * 2^23: the compiler would fuse that addition with a preceding multiplication.
    float numbers[LANES];
    int32_t whole[LANES];
    put(numbers, v);
    for (int n = 0; n < LANES; ++n) whole[n] = int32_t(__builtin_rintf(numbers[n]));
    i32x16 result;
    get(result, whole);
    return result;
#endif
}

// Stores the low byte of each lane.
ALWAYS_INLINE void store_bytes(int8_t* p, i32x16 v) {
#if defined(__AVX512F__)
    __m128i bytes = _mm512_cvtepi32_epi8((__m512i)v);
    std::memcpy(p, &bytes, sizeof bytes);
#elif defined(__aarch64__)
    u16x16 words = narrowed((u32x16)v);
    vst1q_s8(p, vuzp1q_s8((int8x16_t)words.low, (int8x16_t)words.high));
#else
    int32_t numbers[LANES];
    put(numbers, v);
    for (int n = 0; n < LANES; ++n) p[n] = int8_t(numbers[n]);
#endif
}

ALWAYS_INLINE int32_t sum(i32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    return reduce(v, [](auto a, auto b) { return a + b; });
#endif
}

// Finite half-precision values.
ALWAYS_INLINE f32x16 halves_to_float(u16x16 v) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps((__m256i)v);
#elif defined(__aarch64__)
    auto half = [](u16x8 v) __attribute__((always_inline)) {
        return f32x8{(f32x4)vcvt_f32_f16(vget_low_f16((float16x8_t)v)), (f32x4)vcvt_high_f32_f16((float16x8_t)v)};
    };
    return {half(v.low), half(v.high)};
#else
    u32x16 bits = widened(v);
    f32x16 magnitude = (f32x16)((bits & 0x7fffu) << 13) * 0x1p112f;  // corrects the exponent bias
    return (f32x16)((u32x16)magnitude | ((bits & 0x8000u) << 16));
#endif
}

ALWAYS_INLINE f32x16 load_halves(const uint16_t* p) {
    u16x16 v;
    get(v, p);
    return halves_to_float(v);
}

constexpr float E4M3_FACTOR = 256.0f;  // the difference of the exponents' biases of half precision and e4m3

// 16 finite values of e4m3, over E4M3_FACTOR: the low bytes of words, or (`high`) the high ones.
ALWAYS_INLINE f32x16 load_e4m3(const uint16_t* p, bool high) {
    constexpr uint16_t SIGN = 0x8000, OTHERS = 0x3f80, BYTE = 8, ONE = 1;  // scalars of vectors have their type
    u16x16 v;
    get(v, p);
    if (!high) v = v << BYTE;
    return halves_to_float((v >> ONE & OTHERS) | (v & SIGN));
}

ALWAYS_INLINE float half_to_float(const void* p) {
    uint16_t bits[LANES] = {};
    std::memcpy(bits, p, sizeof *bits);
    return load_halves(bits)[0];
}

}  // namespace engine
