// top-k, top-p and min-p without sorting: the tokens that may be drawn, and the lowest logit among them (the floor).
//
// A lower bound of the floor leaves a few hundred candidates; the floor among them is found by bisection over the
// integers that order as floats do. It is exact, and equal logits are on the same side of it.

#pragma once

#include <algorithm>
#include <functional>

#include "sampler_rows.h"

namespace engine::sampling {

// ---------------------------------------------------------------- one pass over the row

struct Survey {
    float largest;
    bool finite;
};

// Writes x / temperature, padded with minus infinity, unless `scaled` is null; and the maximum of each group.
inline Survey survey(const float* x, int64_t size, float temperature, float* scaled, float* groups) {
    LargestMagnitude magnitude;
    f32x16 top = splat(-INFINITE);
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        int64_t end = std::min(begin + BLOCK, size);
        f32x16 group = splat(-INFINITE);
        for (int64_t n = begin; n < end; n += LANES) {
            f32x16 v = load_part(x + n, end - n, x[n]);
            magnitude.see(v);
            if (end - n < LANES) v = load_part(x + n, end - n, -INFINITE);
            if (scaled != nullptr) {
                v = v / temperature;
                store(scaled + n, v);
            }
            group = maximum(group, v);
        }
        store(groups + begin / BLOCK * LANES, group);
        top = maximum(top, group);
    }
    return Survey{largest(top), magnitude.is_finite()};
}

// If the maxima of k groups reach a value, at least k tokens do. Reorders the groups.
inline float bound_of_top_k(float* groups, int64_t size, int64_t k) {
    int64_t count = num_groups(size);
    if (count < k) return -INFINITE;
    std::nth_element(groups, groups + k - 1, groups + count, std::greater<float>());
    return groups[k - 1];
}

inline f32x16 mass(f32x16 x, float largest) { return exp2_small((x - largest) * LOG2_E); }

inline double sum_in_double(f32x16 v) {
    double total = 0;
    float numbers[LANES];
    put(numbers, v);
    for (float number : numbers) total += number;
    return total;
}

constexpr int NUM_LEVELS = 4;
constexpr float LEVELS[NUM_LEVELS] = {3.0f, 6.0f, 9.0f, 13.0f};  // nats below the maximum

struct Mass {
    double total = 0;              // sum of exp(x - largest)
    double above[NUM_LEVELS] = {};  // the same for tokens above each threshold
};

template <bool BY_LEVEL>
inline Mass weigh(const float* x, int64_t size, float largest) {
    Mass found;
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        int64_t end = std::min(begin + BLOCK, size);
        f32x16 total = {}, above[NUM_LEVELS] = {};
        for (int64_t n = begin; n < end; n += LANES) {
            f32x16 v = load_part(x + n, end - n, -INFINITE);
            f32x16 m = mass(v, largest);
            total += m;
            if (BY_LEVEL)
                for (int level = 0; level < NUM_LEVELS; ++level)
                    above[level] += select(v >= splat(largest - LEVELS[level]), m, f32x16{});
        }
        found.total += sum_in_double(total);
        if (BY_LEVEL)
            for (int level = 0; level < NUM_LEVELS; ++level) found.above[level] += sum_in_double(above[level]);
    }
    return found;
}

// A lower bound of the floor of top_p. The margins cover rounding, which must not exclude a token.
inline float bound_of_top_p(const Mass& mass, float largest, float top_p, int64_t size) {
    for (int level = 0; level < NUM_LEVELS; ++level)
        if (mass.above[level] >= 1.0001 * top_p * mass.total) return largest - LEVELS[level];
    // All tokens below the bound together have less than the mass that top_p may drop.
    return largest + float(std::log(mass.total * (1.0 - top_p) / double(size))) - 0.01f;
}

// ---------------------------------------------------------------- candidates

// Integers in the order of the floats; both zeros map to one key.
inline i32x16 order_key(f32x16 x) {
    i32x16 bits = (i32x16)x & ~(i32x16)(x == 0.0f);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline int64_t order_key(float x) { return order_key(splat(x))[0]; }

inline float from_order_key(int64_t key) {
    int32_t bits = int32_t(key) ^ ((int32_t(key) >> 31) & 0x7fffffff);
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Writes the lanes with their bit set, contiguously; may write up to 16 elements. Returns their number.
template <class Vector, class Number>
inline int64_t compress(Vector v, uint32_t bits, Number* to) {
    static_assert(sizeof(Vector) == 64 && sizeof(Number) == 4);
#if defined(__AVX512F__)
    __m512i packed = _mm512_maskz_compress_epi32(bits, (__m512i)v);  // compressing to memory takes 10 times as long
    std::memcpy(to, &packed, sizeof packed);
    return __builtin_popcount(bits);
#else
    Number numbers[LANES];
    put(numbers, v);
    int64_t count = 0;
    for (; bits; bits &= bits - 1) to[count++] = numbers[__builtin_ctz(bits)];
    return count;
#endif
}

// The arrays are padded to a multiple of 16: values with minus infinity, weights with 0.
struct Candidates {
    int64_t count;
    float* values;
    int32_t* ids;
    int32_t* keys;   // keys of the candidates that `find_floor` still searches
    float* weights;  // their weights
};

inline void collect(const float* x, int64_t size, float bound, Candidates& c) {
    constexpr int UNROLL = 4;  // most tokens are below the bound: one branch for 64 tokens
    f32x16 bounds = splat(bound);
    int64_t count = 0, n = 0;
    const auto take = [&](f32x16 v, int64_t first, uint32_t bits) {
        compress(v, bits, c.values + count);
        count += compress(lanes() + uint32_t(first), bits, c.ids + count);
    };
    for (; n + UNROLL * LANES <= size; n += UNROLL * LANES) {
        uint32_t bits[UNROLL], any = 0;
        for (int u = 0; u < UNROLL; ++u) any |= bits[u] = bits_at_least(load(x + n + u * LANES), bounds);
        if (any)
            for (int u = 0; u < UNROLL; ++u) take(load(x + n + u * LANES), n + u * LANES, bits[u]);
    }
    for (; n < size; n += LANES) {
        f32x16 v = load_part(x + n, size - n, -INFINITE);
        uint32_t exist = size - n < LANES ? (1u << (size - n)) - 1 : 0xffffu;
        take(v, n, bits_at_least(v, bounds) & exist);
    }
    c.count = count;
    for (; count < padded(c.count); ++count) {
        c.values[count] = -INFINITE;
        c.ids[count] = 0;
    }
}

// ---------------------------------------------------------------- the floor

// Total weight of the candidates under search with this key or a higher one. Monotonic in the key: rounding a sum keeps
// the order of its terms.
inline double weight_from(const int32_t* keys, const float* weights, int64_t count, int64_t key) {
    double total = 0;
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        int64_t end = std::min(begin + BLOCK, count);
        f32x16 found = {};
        for (int64_t n = begin; n < end; n += LANES)
            found += select(load_keys(keys + n) >= int32_t(key), load(weights + n), f32x16{});
        total += sum_in_double(found);
    }
    return total;
}

// Drops those whose key is not in [low, high); returns how many are left.
inline int64_t narrow(int32_t* keys, float* weights, int64_t count, int64_t low, int64_t high) {
    int64_t left = 0;
    for (int64_t n = 0; n < count; n += LANES) {
        i32x16 key = load_keys(keys + n);
        f32x16 weight = load(weights + n);
        uint32_t bits = bits_of((key >= int32_t(low)) & (key < int32_t(high)));
        if (count - n < LANES) bits &= (1u << (count - n)) - 1;
        compress(weight, bits, weights + left);  // never past what was read
        left += compress(key, bits, keys + left);
    }
    for (int64_t n = left; n < padded(left); ++n) weights[n] = 0.0f;
    return left;
}

// The highest key such that the candidates at or above it reach the target weight; `low` if all of them do not.
//
// low: candidates below it are ignored. high: no candidate is at or above it.
template <class Weigh>
inline int64_t find_floor(Candidates& c, int64_t low, int64_t high, double target, const Weigh& weigh) {
    constexpr int NARROW_EVERY = 3;  // steps; each halves the candidates, roughly
    for (int64_t n = 0; n < c.count; n += LANES) {
        f32x16 v = load(c.values + n);
        i32x16 keys = order_key(v);
        put(c.keys + n, keys);
        store(c.weights + n, weigh(v));
    }
    for (int64_t n = c.count; n < padded(c.count); ++n) c.weights[n] = 0.0f;
    int64_t count = c.count;
    double above = 0;  // weight of the candidates at or above `high`
    for (int step = 1; high - low > 1; ++step) {
        int64_t middle = low + (high - low) / 2;
        (above + weight_from(c.keys, c.weights, count, middle) >= target ? low : high) = middle;
        if (step % NARROW_EVERY == 0 && count > LANES) {
            above += weight_from(c.keys, c.weights, count, high);
            count = narrow(c.keys, c.weights, count, low, high);
        }
    }
    return low;
}

// Collects the tokens that may be drawn, possibly with others; returns the lowest logit that may be. `x` is padded.
inline float filter(const Row& row, const float* x, int64_t size, float largest, float* groups, Candidates& c) {
    float min_p_floor = largest + row.log_min_p, bound = -INFINITE;
    double total = 0;
    if (row.top_k > 0) {
        bound = bound_of_top_k(groups, size, row.top_k);
    } else if (row.top_p < 1.0f) {
        Mass mass = weigh<true>(x, size, largest);
        total = mass.total;
        bound = bound_of_top_p(mass, largest, row.top_p, size);
    }
    // With both filters, top_p needs the mass of all tokens that top_k keeps.
    if (!(row.top_k > 0 && row.top_p < 1.0f)) bound = std::max(bound, min_p_floor);
    collect(x, size, bound, c);
    int64_t floor = order_key(bound), ceiling = order_key(largest) + 1;
    if (row.top_k > 0 && row.top_k < c.count)
        floor = find_floor(c, floor, ceiling, row.top_k, [](f32x16) { return splat(1.0f); });
    if (row.top_p < 1.0f) {
        if (row.top_k > 0) {
            collect(x, size, from_order_key(floor), c);
            total = weigh<false>(c.values, c.count, largest).total;
        }
        floor = find_floor(c, floor, ceiling, row.top_p * total, [&](f32x16 v) { return mass(v, largest); });
    }
    return std::max(from_order_key(floor), min_p_floor);
}

}  // namespace engine::sampling
