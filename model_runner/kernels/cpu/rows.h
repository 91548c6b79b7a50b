// Work on rows of activations: how many of them a thread takes, the product of one and a factor, and its
// root-mean-square norm.

#pragma once

#include "simd.h"

namespace engine {

constexpr int64_t MIN_NUMBERS = 1 << 14;  // elements per thread, at least: fewer do not pay for waking it

inline int64_t rows_per_thread(int64_t numbers) { return (MIN_NUMBERS + numbers - 1) / (numbers > 0 ? numbers : 1); }

template <class T>
float sum_of_squares(const T* x, int64_t size) {
    f32x16 squares[2] = {};
    int64_t n = 0;
    for (; n + 2 * LANES <= size; n += 2 * LANES)
        for (int u = 0; u < 2; ++u) {
            f32x16 v = load(x + n + u * LANES);
            squares[u] += v * v;
        }
    float total = sum(squares[0] + squares[1]);
    for (; n < size; ++n) total += to_float(x[n]) * to_float(x[n]);
    return total;
}

// `to` may equal `from`.
template <class T>
void scale_row(const T* from, T* to, int64_t size, float factor) {
    int64_t n = 0;
    for (; n + LANES <= size; n += LANES) store(to + n, load(from + n) * factor);
    for (; n < size; ++n) from_float(to_float(from[n]) * factor, to + n);
}

template <class T, class W>
void scale_row(const T* x, const W* weight, float factor, T* out, int64_t size) {
    int64_t n = 0;
    for (; n + LANES <= size; n += LANES) store(out + n, load(x + n) * factor * load(weight + n));
    for (; n < size; ++n) from_float(to_float(x[n]) * factor * to_float(weight[n]), out + n);
}

template <class T, class W>
void norm_row(const T* x, const W* weight, float eps, T* out, int64_t size) {
    scale_row(x, weight, 1.0f / __builtin_sqrtf(sum_of_squares(x, size) / float(size) + eps), out, size);
}

}  // namespace engine
