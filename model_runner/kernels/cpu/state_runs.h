// The runs of a step over the slots of a state layer, see `state_runs.py`, and the convolution of what a layer's tokens
// bring to its recurrent state.

#pragma once

#include <cmath>

#include "activations.h"
#include "parallel.h"
#include "rows.h"
#include "simd.h"

namespace engine {

constexpr int MAX_TAPS = 64;

struct Run {
    int64_t load, first, last, store;
};

inline const Run* runs_of(const int64_t* plan) { return reinterpret_cast<const Run*>(plan + 1); }

// silu of a causal convolution of each channel, which moves its states. A piece of work is some channels of all runs, in
// their order.
template <class T>
struct StateConv {
    const T *inputs, *taps, *bias;  // [tokens] of the first `size` of `row_size` numbers, [num_taps, size], [size] or null
    T* slots;                       // [.., num_taps - 1, size]
    const int64_t* plan;
    float* out;  // [tokens, size]
    int64_t size, row_size, num_taps;

    // 16 channels from `at` on. TAPS: the number of taps, or 0: any number.
    template <int TAPS>
    void vector(int64_t at) const {
        const int num = TAPS ? TAPS : int(num_taps), kept = num - 1;
        f32x16 weights[TAPS ? TAPS : MAX_TAPS], columns[TAPS ? TAPS : MAX_TAPS];
        for (int j = 0; j < num; ++j) weights[j] = load(taps + j * size + at);
        const f32x16 start = bias == nullptr ? f32x16{} : load(bias + at);
        for (int64_t n = 0; n < plan[0]; ++n) {
            const Run run = runs_of(plan)[n];
            const T* from = slots + run.load * kept * size + at;
            for (int j = 0; j < kept; ++j) columns[j] = load(from + j * size);
            for (int64_t token = run.first; token < run.last; ++token) {
                columns[kept] = load(inputs + token * row_size + at);
                f32x16 sum = start;
                for (int j = 0; j < num; ++j) sum += weights[j] * columns[j];
                store(out + token * size + at, Silu()(sum));
                for (int j = 0; j < kept; ++j) columns[j] = columns[j + 1];
            }
            T* to = slots + run.store * kept * size + at;
            for (int j = 0; j < kept; ++j) store(to + j * size, columns[j]);
        }
    }

    void channel(int64_t at) const {
        const int kept = int(num_taps) - 1;
        float columns[MAX_TAPS];
        for (int64_t n = 0; n < plan[0]; ++n) {
            const Run run = runs_of(plan)[n];
            const T* from = slots + run.load * kept * size + at;
            for (int j = 0; j < kept; ++j) columns[j] = to_float(from[j * size]);
            for (int64_t token = run.first; token < run.last; ++token) {
                columns[kept] = to_float(inputs[token * row_size + at]);
                float sum = bias == nullptr ? 0.0f : to_float(bias[at]);
                for (int j = 0; j < num_taps; ++j) sum += to_float(taps[j * size + at]) * columns[j];
                out[token * size + at] = Silu()(splat(sum))[0];
                for (int j = 0; j < kept; ++j) columns[j] = columns[j + 1];
            }
            T* to = slots + run.store * kept * size + at;
            for (int j = 0; j < kept; ++j) from_float(columns[j], to + j * size);
        }
    }

    void run(int64_t num_tokens) const {
        parallel_for((size + LANES - 1) / LANES, rows_per_thread(LANES * (num_tokens > 0 ? num_tokens : 1)),
                     [&](int64_t begin, int64_t end) {
                         int64_t at = begin * LANES;
                         const int64_t stop = end * LANES < size ? end * LANES : size;
                         for (; at + LANES <= stop; at += LANES) num_taps == 4 ? vector<4>(at) : vector<0>(at);
                         for (; at < stop; ++at) channel(at);
                     });
    }
};

// A vector of a matrix's columns, or one of them.
template <class V>
ALWAYS_INLINE V get(const float* p) {
    if constexpr (sizeof(V) == sizeof(float))
        return *p;
    else
        return load(p);
}

ALWAYS_INLINE void set(float* p, float x) { *p = x; }
ALWAYS_INLINE void set(float* p, f32x16 x) { store(p, x); }

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace engine
