// The inner loop of every matrix product here: a few rows times a panel of columns, all sums in registers.
//
// Each sum is one chain of additions in the order of k, whatever the number of rows: a row's result does not depend on
// which rows stand beside it, to the last bit.

#pragma once

#include "simd.h"

namespace engine {

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;  // 24 sums, 4 columns, 1 splat: 29 of 32 registers
#else
constexpr int TILE_ROWS = 2, TILE_VECTORS = 2;  // of AVX2's 16 registers, two to a vector
#endif

// What is multiplied: pairs of bfloat16 (two steps of k at once), or float.
struct Pairs {
    typedef bf16 Number;
    typedef uint32_t Step;  // of k: one element of the panel
    static constexpr int NUMBERS = 2;
    typedef u32x16 Vector;

    static Vector load_step(const Step* p) { return load_pairs(p); }
    static Vector splat_step(const Number* p) { return splat_bits(load_pair(p)); }

    // The next 32 numbers; where only 16 are left, zeros behind them.
    static Vector load_numbers(const Number* p, int64_t left) {
        if (left >= 2 * LANES) return load_pairs(p);
        Vector half = {};
        std::memcpy(&half, p, LANES * sizeof(Number));
        return half;
    }

    static f32x16 multiply_add(f32x16 acc, Vector a, Vector b) { return dot_pairs(acc, a, b); }
};

struct Floats {
    typedef float Number;
    typedef float Step;
    static constexpr int NUMBERS = 1;
    typedef f32x16 Vector;

    static Vector load_step(const Step* p) { return load(p); }
    static Vector splat_step(const Number* p) { return splat(*p); }

    template <class T>
    static Vector load_numbers(const T* p, int64_t /*left*/) {
        return load(p);
    }

    static f32x16 multiply_add(f32x16 acc, Vector a, Vector b) { return acc + a * b; }
};

struct Nothing {
    void operator()(int64_t /*step*/) const {}
};

// sums[r][v] = rows[r] . columns[v]
//
//   rows: `row_stride` numbers apart; steps * NUMBERS numbers are read of each.
//   panel: [steps][panel_width], of which 16 * VECTORS are read at each step.
//   at_step: called with each step, to fetch memory that will be read later.
template <class Kind, int ROWS, int VECTORS, class AtStep = Nothing>
inline __attribute__((always_inline)) void multiply_tile(
    const typename Kind::Number* rows, int64_t row_stride, const typename Kind::Step* panel, int64_t panel_width,
    int64_t steps, f32x16 (&sums)[ROWS][VECTORS], const AtStep& at_step = {}) {
    for (int64_t k = 0; k < steps; ++k) {
        at_step(k);
        typename Kind::Vector columns[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) columns[v] = Kind::load_step(panel + k * panel_width + v * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            typename Kind::Vector row = Kind::splat_step(rows + r * row_stride + k * Kind::NUMBERS);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = Kind::multiply_add(sums[r][v], columns[v], row);
        }
    }
}

// What comes before and after: unrolled, or the sums would go through memory.
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

// Calls body<ROWS, VECTORS>() with numbers that are known only now.
template <int ROWS, class Body>
inline void with_vectors(int vectors, const Body& body) {
    switch (vectors) {
        case 1: body.template operator()<ROWS, 1>(); break;
        case 2: body.template operator()<ROWS, 2>(); break;
#if defined(__AVX512F__)
        case 3: body.template operator()<ROWS, 3>(); break;
        case 4: body.template operator()<ROWS, 4>(); break;
#endif
    }
}

template <class Body>
inline void with_tile(int rows, int vectors, const Body& body) {
    switch (rows) {
        case 1: with_vectors<1>(vectors, body); break;
        case 2: with_vectors<2>(vectors, body); break;
#if defined(__AVX512F__)
        case 3: with_vectors<3>(vectors, body); break;
        case 4: with_vectors<4>(vectors, body); break;
        case 5: with_vectors<5>(vectors, body); break;
        case 6: with_vectors<6>(vectors, body); break;
#endif
    }
}

}  // namespace engine
