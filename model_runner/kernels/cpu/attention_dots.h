// The inner loops of stream items: dot products of a query with keys, and sums of weighted values.
//
// Four variants, by the instructions of the CPU. All of them take 32 dimensions of a head at a time; a head that ends
// with 16 is padded with zeros.
//
//   PairDots    bfloat16 keys, values, queries and weights (AVX-512 BF16); float accumulators
//   WordDots    8-bit keys and values as 16-bit integers; queries and weights are quantized to 16 bits
//   WideDots    bfloat16, widened to float where the CPU has no fast bfloat16 dot product. It widens pairs, which takes
//               half the instructions, so even dimensions are stored before odd ones
//   FloatDots   all other types, converted to float

#pragma once

#include <type_traits>

#include "simd.h"
#include "tile.h"

#if (defined(__AVX512BW__) && defined(__AVX512VL__)) || (defined(__AVX2__) && !defined(__AVX512F__))
#define HAS_WORD_DOT 1
#else
#define HAS_WORD_DOT 0
#endif

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__)) || defined(__aarch64__)
#define HAS_FUSED 1
#else
#define HAS_FUSED 0
#endif

namespace engine {

constexpr int CHUNK = 2 * LANES;  // dimensions

ALWAYS_INLINE f32x16 load(const int8_t* p) {
#if defined(__AVX512F__)
    return to_float((i32x16)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return to_float(i32x16{(i32x8)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)),
                           (i32x8)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + LANES / 2)))});
#elif defined(__aarch64__)
    const int8x16_t bytes = vld1q_s8(p);
    auto half = [](int16x8_t v) __attribute__((always_inline)) {
        return i32x8{(i32x4)vmovl_s16(vget_low_s16(v)), (i32x4)vmovl_high_s16(v)};
    };
    return to_float(i32x16{half(vmovl_s8(vget_low_s8(bytes))), half(vmovl_high_s8(bytes))});
#else
    int32_t numbers[LANES];
    for (int n = 0; n < LANES; ++n) numbers[n] = p[n];
    i32x16 v;
    get(v, numbers);
    return to_float(v);
#endif
}

ALWAYS_INLINE f32x16 to_float(f32x16 v) { return v; }

// sum + a * b with a single rounding, if the CPU has FMA; the compiler cannot split or contract it differently.
ALWAYS_INLINE f32x16 fused(f32x16 sum, f32x16 a, f32x16 b) {
#if defined(__aarch64__)
    return by_quarters([](f32x4 sum, f32x4 a, f32x4 b) __attribute__((always_inline)) {
        return (f32x4)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
    }, sum, a, b);
#elif HAS_FUSED && defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif HAS_FUSED
    return {(f32x8)_mm256_fmadd_ps((__m256)a.low, (__m256)b.low, (__m256)sum.low),
            (f32x8)_mm256_fmadd_ps((__m256)a.high, (__m256)b.high, (__m256)sum.high)};
#else
    return sum + a * b;
#endif
}

// Interleaves two rows of 32 16-bit elements: pairs (a[i], b[i]) of the first four of each eight, or of the last four.
ALWAYS_INLINE u32x16 low_pairs(u32x16 a, u32x16 b) {
#if defined(__AVX512BW__)
    return (u32x16)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
#elif HAS_WORD_DOT
    return {(u32x8)_mm256_unpacklo_epi16((__m256i)a.low, (__m256i)b.low),
            (u32x8)_mm256_unpacklo_epi16((__m256i)a.high, (__m256i)b.high)};
#elif defined(__aarch64__)
    return by_quarters([](u32x4 a, u32x4 b) __attribute__((always_inline)) {
        return (u32x4)vzip1q_u16((uint16x8_t)a, (uint16x8_t)b);
    }, a, b);
#else
    return a;  // not reached
#endif
}
ALWAYS_INLINE u32x16 high_pairs(u32x16 a, u32x16 b) {
#if defined(__AVX512BW__)
    return (u32x16)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
#elif HAS_WORD_DOT
    return {(u32x8)_mm256_unpackhi_epi16((__m256i)a.low, (__m256i)b.low),
            (u32x8)_mm256_unpackhi_epi16((__m256i)a.high, (__m256i)b.high)};
#elif defined(__aarch64__)
    return by_quarters([](u32x4 a, u32x4 b) __attribute__((always_inline)) {
        return (u32x4)vzip2q_u16((uint16x8_t)a, (uint16x8_t)b);
    }, a, b);
#else
    return b;
#endif
}

// From the order of low_pairs and high_pairs to the natural order.
ALWAYS_INLINE void put_parts_in_order(float* values, int64_t head_dim) {
    for (int64_t d = 0; d < head_dim; d += CHUNK) {
        f32x16 low = load(values + d), high = load(values + d + LANES);
        store(values + d, SHUFFLE(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
        store(values + d + LANES, SHUFFLE(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
    }
}

struct PairDots {
    typedef bf16 Stored;
    typedef bf16 Query;
    typedef f32x16 Sum;
    typedef u32x16 Row;
    typedef bf16 Weight;
    static constexpr bool MIXES = true;  // a pass may mix the heads of tokens: results do not depend on the grouping

    static ALWAYS_INLINE Row load_row(const bf16* p, int64_t left) { return Pairs::load_numbers(p, left); }
    static ALWAYS_INLINE Row load_query(const bf16* p, int64_t left) { return Pairs::load_numbers(p, left); }
    static ALWAYS_INLINE Sum multiply_add(Sum sum, Row a, Row b) { return dot_pairs(sum, a, b); }

    struct Values {
        u32x16 parts[2];
        Values(const bf16* first, const bf16* second, int64_t left) {
            u32x16 a = load_row(first, left), b = load_row(second, left);
            parts[0] = low_pairs(a, b);
            parts[1] = high_pairs(a, b);
        }
    };
    typedef u32x16 WeightPair;
    static ALWAYS_INLINE WeightPair load_weights(const Weight* p) { return splat_bits(load_pair(p)); }
    static ALWAYS_INLINE void add(Sum (&sums)[2], const Values& values, WeightPair weights) {
        for (int u = 0; u < 2; ++u) sums[u] = dot_pairs(sums[u], values.parts[u], weights);
    }
    static void put_in_order(float* values, int64_t head_dim) { put_parts_in_order(values, head_dim); }
};

struct WideDots {
    typedef bf16 Stored;
    typedef float Query;
    typedef f32x16 Sum;
    typedef float Weight;
    static constexpr bool MIXES = HAS_FUSED;

    struct Row {
        f32x16 parts[2];
    };
    static ALWAYS_INLINE Row load_row(const bf16* p, int64_t left) {
        u32x16 pairs = Pairs::load_numbers(p, left);
        return {{(f32x16)(pairs << 16), (f32x16)(pairs & 0xffff0000u)}};
    }
    static ALWAYS_INLINE Row load_query(const float* p, int64_t /*left*/) { return {{load(p), load(p + LANES)}}; }  // padded
    static ALWAYS_INLINE Sum multiply_add(Sum sum, const Row& a, const Row& b) {
        return fused(fused(sum, a.parts[0], b.parts[0]), a.parts[1], b.parts[1]);
    }

    struct Values {
        Row first, second;
        Values(const bf16* first_, const bf16* second_, int64_t left)
            : first(load_row(first_, left)), second(load_row(second_, left)) {}
    };
    struct WeightPair {
        f32x16 first, second;
    };
    static ALWAYS_INLINE WeightPair load_weights(const Weight* p) { return {splat(p[0]), splat(p[1])}; }
    static ALWAYS_INLINE void add(Sum (&sums)[2], const Values& values, const WeightPair& weights) {
        for (int u = 0; u < 2; ++u) {
            sums[u] = fused(sums[u], values.first.parts[u], weights.first);
            sums[u] = fused(sums[u], values.second.parts[u], weights.second);
        }
    }
    static void put_in_order(float* values, int64_t head_dim) {
        for (int64_t d = 0; d < head_dim; d += CHUNK) {
            f32x16 even = load(values + d), odd = load(values + d + LANES);
            store(values + d, SHUFFLE(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
            store(values + d + LANES, SHUFFLE(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
        }
    }
};

struct WordDots {
    typedef int8_t Stored;
    typedef int16_t Query;
    typedef i32x16 Sum;
    typedef u32x16 Row;
    typedef int16_t Weight;
    static constexpr bool MIXES = true;

#if HAS_WORD_DOT && !defined(__AVX512F__)
    static ALWAYS_INLINE Row load_row(const int8_t* p, int64_t left) {
        auto part = [](const int8_t* p) { return (u32x8)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); };
        return {part(p), left >= CHUNK ? part(p + LANES) : u32x8{}};
    }
    static ALWAYS_INLINE Row load_query(const int16_t* p, int64_t /*left*/) { return load_pairs(p); }  // padded
    static ALWAYS_INLINE Sum multiply_add(Sum sum, Row a, Row b) {
        return sum + Sum{(i32x8)_mm256_madd_epi16((__m256i)a.low, (__m256i)b.low),
                         (i32x8)_mm256_madd_epi16((__m256i)a.high, (__m256i)b.high)};
    }
#elif HAS_WORD_DOT
    static ALWAYS_INLINE Row load_row(const int8_t* p, int64_t left) {
        if (left >= CHUNK) return (Row)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
        return (Row)_mm512_cvtepi8_epi16(_mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)p)));
    }
    static ALWAYS_INLINE Row load_query(const int16_t* p, int64_t /*left*/) { return load_pairs(p); }  // padded
    static ALWAYS_INLINE Sum multiply_add(Sum sum, Row a, Row b) {
#if defined(__AVX512VNNI__)
        return (Sum)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
        return sum + (Sum)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#endif
    }
#else
    static ALWAYS_INLINE Row load_row(const int8_t*, int64_t) { return Row{}; }
    static ALWAYS_INLINE Row load_query(const int16_t*, int64_t) { return Row{}; }
    static ALWAYS_INLINE Sum multiply_add(Sum sum, Row, Row) { return sum; }
#endif

    struct Values {
        u32x16 parts[2];
        Values(const int8_t* first, const int8_t* second, int64_t left) {
            u32x16 a = load_row(first, left), b = load_row(second, left);
            parts[0] = low_pairs(a, b);
            parts[1] = high_pairs(a, b);
        }
    };
    typedef u32x16 WeightPair;
    static ALWAYS_INLINE WeightPair load_weights(const Weight* p) { return splat_bits(load_pair(p)); }
    static ALWAYS_INLINE void add(Sum (&sums)[2], const Values& values, WeightPair weights) {
        for (int u = 0; u < 2; ++u) sums[u] = multiply_add(sums[u], values.parts[u], weights);
    }
    static void put_in_order(float* values, int64_t head_dim) { put_parts_in_order(values, head_dim); }
};

template <class T, class KV>
struct FloatDots {
    typedef KV Stored;
    typedef T Query;
    typedef f32x16 Sum;
    typedef float Weight;
    static constexpr bool MIXES = false;

    struct Row {
        f32x16 parts[2];
    };
    template <class X>
    static ALWAYS_INLINE Row load_row(const X* p, int64_t left) {
        return {{load(p), left >= CHUNK ? load(p + LANES) : f32x16{}}};
    }
    static ALWAYS_INLINE Row load_query(const T* p, int64_t left) { return load_row(p, left); }
    static ALWAYS_INLINE Sum multiply_add(Sum sum, const Row& a, const Row& b) {
        for (int u = 0; u < 2; ++u) sum += a.parts[u] * b.parts[u];
        return sum;
    }

    struct Values {
        Row first, second;
        Values(const KV* first_, const KV* second_, int64_t left)
            : first(load_row(first_, left)), second(load_row(second_, left)) {}
    };
    struct WeightPair {
        float first, second;
    };
    static ALWAYS_INLINE WeightPair load_weights(const Weight* p) { return {p[0], p[1]}; }
    static ALWAYS_INLINE void add(Sum (&sums)[2], const Values& values, WeightPair weights) {
        for (int u = 0; u < 2; ++u) {
            sums[u] += values.first.parts[u] * weights.first;
            sums[u] += values.second.parts[u] * weights.second;
        }
    }
    static void put_in_order(float*, int64_t) {}
};

template <class T, class KV>
struct DotsOf {
    typedef FloatDots<T, KV> type;
};
template <>
struct DotsOf<bf16, bf16> {
#if HAS_BF16_DOT
    typedef PairDots type;
#else
    typedef WideDots type;
#endif
};
#if HAS_WORD_DOT
template <class T>
struct DotsOf<T, int8_t> {
    typedef WordDots type;
};
#endif

// ---------------------------------------------------------------- 4 sums, and 4 times 4, at once

// In each of the four 128-bit parts of the vector: its sums of a, b, c, and d.
template <class Vector>
ALWAYS_INLINE Vector sums_of_parts(Vector a, Vector b, Vector c, Vector d) {
    auto neighbors = [](Vector x, Vector y) -> Vector {  // x0 + x2, y0 + y2, x1 + x3, y1 + y3
        return (Vector)SHUFFLE((f32x16)x, (f32x16)y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
               (Vector)SHUFFLE((f32x16)x, (f32x16)y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    };
    Vector ab = neighbors(a, b), cd = neighbors(c, d);
    return (Vector)SHUFFLE((f32x16)ab, (f32x16)cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           (Vector)SHUFFLE((f32x16)ab, (f32x16)cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}

// Adds up the four parts of each vector: the sums of 16 vectors, in their order.
template <class Vector>
ALWAYS_INLINE Vector add_parts(const Vector (&v)[4]) {
    auto halves = [](Vector x, Vector y) -> Vector {
        return (Vector)SHUFFLE((f32x16)x, (f32x16)y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               (Vector)SHUFFLE((f32x16)x, (f32x16)y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    };
    return halves(halves(v[0], v[1]), halves(v[2], v[3]));
}

}  // namespace engine
