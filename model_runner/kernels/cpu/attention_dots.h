// The inner loops of stream items: dot products of a query with keys, and sums of weighted values.
//
// Four variants, by the instructions of the CPU. All of them take chunks of 32 dimensions of a head; a head that ends
// with 16 is padded with zeros. On AVX2 a chunk takes two registers, and loops take one of them at a time where the sums
// of several heads and keys would not fit into the CPU's 16 registers.
//
//   PairDots    bfloat16 keys, values, queries and weights (AVX-512 BF16); float accumulators
//   WordDots    8-bit keys and values as 16-bit integers; queries and weights are quantized to 16 bits
//   WideDots    bfloat16, widened to float where the CPU has no fast bfloat16 dot product. It widens pairs, which takes
//               half the instructions, so even dimensions are stored before odd ones
//   FloatDots   all other types, converted to float

#pragma once

#include <type_traits>

#include "bytes.h"
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

// A register of a chunk, or of a vector of 16 lanes: on AVX2 one of two, elsewhere the whole of it.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int REGISTERS = 2;
typedef f32x8 f32r;
typedef i32x8 i32r;
typedef u32x8 u32r;

ALWAYS_INLINE f32r register_of(f32x16 v, int r) { return r == 0 ? v.low : v.high; }

template <class Register>
ALWAYS_INLINE void set_register(VectorPair<Register>& v, int r, Register part) {
    (r == 0 ? v.low : v.high) = part;
}

// Register `r` of a chunk of 16-bit numbers, of which `left` exist.
ALWAYS_INLINE u32r load_pairs(const bf16* p, int r, int64_t left) {
    u32r pairs = {};
    if (left > r * LANES) get(pairs, p + r * LANES);
    return pairs;
}
#else
constexpr int REGISTERS = 1;
typedef f32x16 f32r;
typedef i32x16 i32r;
typedef u32x16 u32r;

ALWAYS_INLINE f32r register_of(f32x16 v, int /*r*/) { return v; }

template <class Register>
ALWAYS_INLINE void set_register(Register& v, int /*r*/, Register part) {
    v = part;
}

ALWAYS_INLINE u32r load_pairs(const bf16* p, int /*r*/, int64_t left) { return Pairs::load_numbers(p, left); }
#endif
constexpr int REGISTER_LANES = LANES / REGISTERS, REGISTER_DIMS = CHUNK / REGISTERS;

ALWAYS_INLINE f32r load_floats(const float* p) {
    f32r floats;
    get(floats, p);
    return floats;
}

ALWAYS_INLINE f32r splat_float(float x) { return x - f32r{}; }

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
ALWAYS_INLINE f32r fused(f32r sum, f32r a, f32r b) {
#if defined(__aarch64__)
    return by_quarters([](f32x4 sum, f32x4 a, f32x4 b) __attribute__((always_inline)) {
        return (f32x4)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
    }, sum, a, b);
#elif HAS_FUSED && defined(__AVX512F__)
    return (f32r)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif HAS_FUSED
    return (f32r)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

// Interleaves two rows of 16-bit elements: pairs (a[i], b[i]) of the first four of each eight, or of the last four.
ALWAYS_INLINE u32r low_pairs(u32r a, u32r b) {
#if defined(__AVX512BW__)
    return (u32r)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
#elif HAS_WORD_DOT
    return (u32r)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b);
#elif defined(__aarch64__)
    return by_quarters([](u32x4 a, u32x4 b) __attribute__((always_inline)) {
        return (u32x4)vzip1q_u16((uint16x8_t)a, (uint16x8_t)b);
    }, a, b);
#else
    return a;  // not reached
#endif
}
ALWAYS_INLINE u32r high_pairs(u32r a, u32r b) {
#if defined(__AVX512BW__)
    return (u32r)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
#elif HAS_WORD_DOT
    return (u32r)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b);
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

#if HAS_BF16_DOT
struct PairDots {
    typedef bf16 Stored;
    typedef bf16 Query;
    typedef f32x16 Sum;
    typedef u32x16 Row;
    typedef bf16 Weight;
    static constexpr bool MIXES = true;  // a pass may mix the heads of tokens: results do not depend on the grouping

    static ALWAYS_INLINE Row load_row(const bf16* p, int r, int64_t left) { return load_pairs(p, r, left); }
    static ALWAYS_INLINE Row load_query(const bf16* p, int r, int64_t left) { return load_pairs(p, r, left); }
    static ALWAYS_INLINE Sum multiply_add(Sum sum, Row a, Row b) { return dot_pairs(sum, a, b); }

    struct Values {
        u32x16 parts[2];
        Values(const bf16* first, const bf16* second, int r, int64_t left) {
            u32x16 a = load_row(first, r, left), b = load_row(second, r, left);
            parts[0] = low_pairs(a, b);
            parts[1] = high_pairs(a, b);
        }
    };
    typedef u32x16 WeightPair;
    static ALWAYS_INLINE WeightPair load_weights(const Weight* p) { return splat_bits(load_pair(p)); }
    static ALWAYS_INLINE void add(Sum (&sums)[2], const Values& values, WeightPair weights) {
#pragma GCC unroll 2
        for (int u = 0; u < 2; ++u) sums[u] = dot_pairs(sums[u], values.parts[u], weights);
    }
    static void put_in_order(float* values, int64_t head_dim) { put_parts_in_order(values, head_dim); }
};
#endif

struct WideDots {
    typedef bf16 Stored;
    typedef float Query;
    typedef f32r Sum;
    typedef float Weight;
    static constexpr bool MIXES = HAS_FUSED;

    struct Row {
        f32r parts[2];
    };
    static ALWAYS_INLINE Row load_row(const bf16* p, int r, int64_t left) {
        u32r pairs = load_pairs(p, r, left);
        return {{(f32r)(pairs << 16), (f32r)(pairs & 0xffff0000u)}};
    }
    static ALWAYS_INLINE Row load_query(const float* p, int r, int64_t /*left*/) {  // padded
        return {{load_floats(p + r * REGISTER_LANES), load_floats(p + LANES + r * REGISTER_LANES)}};
    }
    static ALWAYS_INLINE Sum multiply_add(Sum sum, const Row& a, const Row& b) {
        return fused(fused(sum, a.parts[0], b.parts[0]), a.parts[1], b.parts[1]);
    }

    struct Values {
        Row first, second;
        ALWAYS_INLINE Values(const bf16* first_, const bf16* second_, int r, int64_t left)
            : first(load_row(first_, r, left)), second(load_row(second_, r, left)) {}
    };
    struct WeightPair {
        f32r first, second;
    };
    static ALWAYS_INLINE WeightPair load_weights(const Weight* p) { return {splat_float(p[0]), splat_float(p[1])}; }
    static ALWAYS_INLINE void add(Sum (&sums)[2], const Values& values, const WeightPair& weights) {
#pragma GCC unroll 2
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

struct WordDots;  // only declared where nothing is stored in its order

#if HAS_WORD_DOT
struct WordDots {
    typedef int8_t Stored;
    typedef int16_t Query;
    typedef i32r Sum;
    typedef u32r Row;
    typedef int16_t Weight;
    static constexpr bool MIXES = true;

    static ALWAYS_INLINE Row load_row(const int8_t* p, int r, int64_t left) {
#if defined(__AVX512F__)
        if (left >= CHUNK) return (Row)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
        return (Row)_mm512_cvtepi8_epi16(_mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)p)));
#else
        if (left <= r * REGISTER_DIMS) return Row{};
        return (Row)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + r * REGISTER_DIMS)));
#endif
    }
    static ALWAYS_INLINE Row load_query(const int16_t* p, int r, int64_t /*left*/) {  // padded
        Row words;
        get(words, p + r * REGISTER_DIMS);
        return words;
    }
    static ALWAYS_INLINE Sum multiply_add(Sum sum, Row a, Row b) {
#if HAS_WORD_SUMS
        return add_pair_products(sum, (Sum)a, (Sum)b);
#elif defined(__AVX512F__)
        return (Sum)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
        return (Sum)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#endif
    }

    struct Values {
        u32r parts[2];
        ALWAYS_INLINE Values(const int8_t* first, const int8_t* second, int r, int64_t left) {
            u32r a = load_row(first, r, left), b = load_row(second, r, left);
            parts[0] = low_pairs(a, b);
            parts[1] = high_pairs(a, b);
        }
    };
    typedef u32r WeightPair;
    static ALWAYS_INLINE WeightPair load_weights(const Weight* p) { return load_pair(p) | u32r{}; }
    static ALWAYS_INLINE void add(Sum (&sums)[2], const Values& values, WeightPair weights) {
#pragma GCC unroll 2
        for (int u = 0; u < 2; ++u) sums[u] = multiply_add(sums[u], values.parts[u], weights);
    }
    static void put_in_order(float* values, int64_t head_dim) { put_parts_in_order(values, head_dim); }
};
#endif

template <class T, class KV>
struct FloatDots {
    typedef KV Stored;
    typedef T Query;
    typedef f32r Sum;
    typedef float Weight;
    static constexpr bool MIXES = false;

    struct Row {
        f32r parts[2];
    };
    template <class X>
    static ALWAYS_INLINE Row load_row(const X* p, int r, int64_t left) {
        return {{register_of(load(p), r), left >= CHUNK ? register_of(load(p + LANES), r) : f32r{}}};
    }
    static ALWAYS_INLINE Row load_query(const T* p, int r, int64_t left) { return load_row(p, r, left); }
    static ALWAYS_INLINE Sum multiply_add(Sum sum, const Row& a, const Row& b) {
#pragma GCC unroll 2
        for (int u = 0; u < 2; ++u) sum += a.parts[u] * b.parts[u];
        return sum;
    }

    struct Values {
        Row first, second;
        ALWAYS_INLINE Values(const KV* first_, const KV* second_, int r, int64_t left)
            : first(load_row(first_, r, left)), second(load_row(second_, r, left)) {}
    };
    struct WeightPair {
        float first, second;
    };
    static ALWAYS_INLINE WeightPair load_weights(const Weight* p) { return {p[0], p[1]}; }
    static ALWAYS_INLINE void add(Sum (&sums)[2], const Values& values, const WeightPair& weights) {
#pragma GCC unroll 2
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

// A shuffle of each 128-bit part of two registers.
#if defined(__AVX2__) && !defined(__AVX512F__)
#define SHUFFLE_PARTS(x, y, a, b, c, d) SHUFFLE(x, y, a, b, c, d, a + 4, b + 4, c + 4, d + 4)
#else
#define SHUFFLE_PARTS(x, y, a, b, c, d) \
    SHUFFLE(x, y, a, b, c, d, a + 4, b + 4, c + 4, d + 4, a + 8, b + 8, c + 8, d + 8, a + 12, b + 12, c + 12, d + 12)
#endif

// In each 128-bit part: x0 + x2, y0 + y2, x1 + x3, y1 + y3.
template <class Vector>
ALWAYS_INLINE Vector add_neighbors(Vector x, Vector y) {
    constexpr int Y = REGISTER_LANES;
    return (Vector)SHUFFLE_PARTS((f32r)x, (f32r)y, 0, Y, 1, Y + 1) +
           (Vector)SHUFFLE_PARTS((f32r)x, (f32r)y, 2, Y + 2, 3, Y + 3);
}

// From add_neighbors(a, b) and add_neighbors(c, d): in each 128-bit part, its sums of a, b, c, and d.
template <class Vector>
ALWAYS_INLINE Vector sums_of_parts(Vector ab, Vector cd) {
    constexpr int Y = REGISTER_LANES;
    return (Vector)SHUFFLE_PARTS((f32r)ab, (f32r)cd, 0, 1, Y, Y + 1) +
           (Vector)SHUFFLE_PARTS((f32r)ab, (f32r)cd, 2, 3, Y + 2, Y + 3);
}

#undef SHUFFLE_PARTS

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
