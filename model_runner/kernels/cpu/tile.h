// The inner loop of every matmul here: a few rows times a panel of columns, with all accumulators in registers.
//
// Each accumulator is one chain of additions in the order of k, for any number of rows: the result of a row does not
// depend on the other rows, to the last bit.

#pragma once

#include "simd.h"

namespace engine {

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;  // 24 accumulators, 4 columns, 1 splat: 29 of 32 registers
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 1;  // in register pairs: 12 accumulators, 2 columns, 1 splat, 1 mask
#elif defined(__aarch64__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 1;  // in four registers each: 24 accumulators, 4 columns, 1 splat
#else
constexpr int TILE_ROWS = 2, TILE_VECTORS = 1;
#endif

// Vectors that can be multiplied at once with this number of rows: fewer rows leave registers for more vectors.
constexpr int most_vectors(int rows) {
#if defined(__AVX512F__)
    return TILE_VECTORS;
#else
    return rows == 1 ? 4 * TILE_VECTORS : 2 * rows <= TILE_ROWS ? 2 * TILE_VECTORS : TILE_VECTORS;
#endif
}

// Element kinds: bfloat16 pairs (two inputs at once), float with such pairs (one after the other), or float.
struct Pairs {
    typedef bf16 Number;
    typedef uint32_t Step;  // one element of the panel per k-step
    static constexpr int NUMBERS = 2, PARTS = 1;
    typedef u32x16 Vector;

    static ALWAYS_INLINE Vector load_step(const Step* p, int /*part*/) { return load_pairs(p); }
    static ALWAYS_INLINE Vector splat_step(const Number* p, int /*part*/) { return splat_bits(load_pair(p)); }

    // The next 32 values; if only 16 are left, padded with zeros.
    static ALWAYS_INLINE Vector load_numbers(const Number* p, int64_t left) {
        if (left >= 2 * LANES) return load_pairs(p);
        Vector half = {};
        std::memcpy(&half, p, LANES * sizeof(Number));
        return half;
    }

    static ALWAYS_INLINE f32x16 multiply_add(f32x16 acc, Vector a, Vector b) { return dot_pairs(acc, a, b); }
};

struct WidePairs {
    typedef float Number;
    typedef uint32_t Step;
    static constexpr int NUMBERS = 2, PARTS = 2;
    typedef f32x16 Vector;

    static ALWAYS_INLINE Vector load_step(const Step* p, int part) {
        return (f32x16)(part == 0 ? load_pairs(p) << 16 : load_pairs(p) & 0xffff0000u);
    }
    static ALWAYS_INLINE Vector splat_step(const Number* p, int part) { return splat(p[part]); }
    static ALWAYS_INLINE f32x16 multiply_add(f32x16 acc, Vector a, Vector b) { return acc + a * b; }
};

struct Floats {
    typedef float Number;
    typedef float Step;
    static constexpr int NUMBERS = 1, PARTS = 1;
    typedef f32x16 Vector;

    static ALWAYS_INLINE Vector load_step(const Step* p, int /*part*/) { return load(p); }
    static ALWAYS_INLINE Vector splat_step(const Number* p, int /*part*/) { return splat(*p); }

    template <class T>
    static ALWAYS_INLINE Vector load_numbers(const T* p, int64_t /*left*/) {
        return load(p);
    }

    static ALWAYS_INLINE f32x16 multiply_add(f32x16 acc, Vector a, Vector b) { return acc + a * b; }
};

struct Nothing {
    void operator()(int64_t /*step*/) const {}
};

// One k-step, or a part of it: sums[r][v] += rows[r] * columns[v].
template <class Kind, int ROWS, int VECTORS>
inline __attribute__((always_inline)) void add_products(const typename Kind::Vector (&columns)[VECTORS],
                                                        const typename Kind::Number* rows, int64_t row_stride, int part,
                                                        f32x16 (&sums)[ROWS][VECTORS]) {
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
        typename Kind::Vector row = Kind::splat_step(rows + r * row_stride, part);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = Kind::multiply_add(sums[r][v], columns[v], row);
    }
}

// sums[r][v] = rows[r] . columns[v]
//
//   rows: `row_stride` elements apart; steps * NUMBERS elements of each are read.
//   panel: [steps][panel_width], of which 16 * VECTORS are read at each k-step.
//   at_step: called with each k-step, to prefetch.
template <class Kind, int ROWS, int VECTORS, class AtStep = Nothing>
inline __attribute__((always_inline)) void multiply_tile(
    const typename Kind::Number* rows, int64_t row_stride, const typename Kind::Step* panel, int64_t panel_width,
    int64_t steps, f32x16 (&sums)[ROWS][VECTORS], const AtStep& at_step = {}) {
    for (int64_t k = 0; k < steps; ++k) {
        at_step(k);
#pragma GCC unroll 2
        for (int part = 0; part < Kind::PARTS; ++part) {
            typename Kind::Vector columns[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) columns[v] = Kind::load_step(panel + k * panel_width + v * LANES, part);
            add_products<Kind>(columns, rows + k * Kind::NUMBERS, row_stride, part, sums);
        }
    }
}

// Before and after the loop: unrolled, so that accumulators do not go through memory.
template <int ROWS, int VECTORS>
inline __attribute__((always_inline)) void zero_tile(f32x16 (&sums)[ROWS][VECTORS]) {
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = f32x16{};
}

template <int ROWS, int VECTORS>
inline __attribute__((always_inline)) void load_tile(const float* from, int64_t stride,
                                                     f32x16 (&sums)[ROWS][VECTORS]) {
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = load(from + r * stride + v * LANES);
}

template <int ROWS, int VECTORS>
inline __attribute__((always_inline)) void add_to_tile(const float* row, f32x16 (&sums)[ROWS][VECTORS]) {
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sums[r][v] += load(row + v * LANES);
}

template <class T, int ROWS, int VECTORS>
inline __attribute__((always_inline)) void store_tile(T* to, int64_t stride, const f32x16 (&sums)[ROWS][VECTORS]) {
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) store(to + r * stride + v * LANES, sums[r][v]);
}

// Calls body<ROWS, VECTORS>() for a run-time number of vectors.
template <int ROWS, int VECTORS = most_vectors(ROWS), class Body>
inline void with_vectors(int vectors, const Body& body) {
    if (vectors == VECTORS)
        body.template operator()<ROWS, VECTORS>();
    else if constexpr (VECTORS > 1)
        with_vectors<ROWS, VECTORS - 1>(vectors, body);
}

template <int ROWS = TILE_ROWS, class Body>
inline void with_tile(int rows, int vectors, const Body& body) {
    if (rows == ROWS)
        with_vectors<ROWS>(vectors, body);
    else if constexpr (ROWS > 1)
        with_tile<ROWS - 1>(rows, vectors, body);
}

}  // namespace engine
