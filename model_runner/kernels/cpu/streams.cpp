// What layers add beside attention and MLPs: inputs of layers, sparse gates, and the residual streams of AltUp.
//
// All of them compute in float32 and round once. One thread computes each row: results do not depend on the batch.

#include "activations.h"
#include "parallel.h"
#include "program.h"
#include "rows.h"
#include "simd.h"

namespace engine {
namespace {

constexpr int64_t MOST_STREAMS = 16;
constexpr float LEAST_MEAN_SQUARE = 1e-5f;  // of a projected stream that is scaled to the size of another

// ---------------------------------------------------------------- gates

// x = gelu(x) * y, where rows of y are `stride` apart.
template <class T>
void gelu_times(T* x, const T* y, int64_t stride, int64_t rows, int64_t size) {
    GeluTanh act;
    parallel_for(rows, rows_per_thread(size), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            T* to = x + row * size;
            const T* by = y + row * stride;
            int64_t n = 0;
            for (; n + LANES <= size; n += LANES) store(to + n, act(load(to + n)) * load(by + n));
            for (; n < size; ++n) from_float(act(splat(to_float(to[n])))[0] * to_float(by[n]), to + n);
        }
    });
}

// The mean of a row plus `multiplier` standard deviations. The mean first: a single pass would cancel.
template <class T>
float cutoff_of(const T* x, int64_t size, float multiplier) {
    f32x16 sums = {}, squares = {};
    float total = 0.0f, rest = 0.0f;
    int64_t whole = size / LANES * LANES;
    for (int64_t n = 0; n < whole; n += LANES) sums += load(x + n);
    for (int64_t n = whole; n < size; ++n) total += to_float(x[n]);
    float mean = (total + sum(sums)) / float(size);
    for (int64_t n = 0; n < whole; n += LANES) {
        f32x16 v = load(x + n) - mean;
        squares += v * v;
    }
    for (int64_t n = whole; n < size; ++n) rest += (to_float(x[n]) - mean) * (to_float(x[n]) - mean);
    return mean + multiplier * __builtin_sqrtf((rest + sum(squares)) / float(size));
}

// out = gelu(max(gate - cutoff, 0)) * up
template <class T>
void sparse_gelu(const T* gate_up, T* out, int64_t rows, int64_t size, float multiplier) {
    GeluTanh act;
    Relu positive;
    parallel_for(rows, rows_per_thread(size), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const T *gate = gate_up + row * 2 * size, *up = gate + size;
            T* to = out + row * size;
            float cutoff = cutoff_of(gate, size, multiplier);
            int64_t n = 0;
            for (; n + LANES <= size; n += LANES) store(to + n, act(positive(load(gate + n) - cutoff)) * load(up + n));
            for (; n < size; ++n)
                from_float(act(positive(splat(to_float(gate[n]) - cutoff)))[0] * to_float(up[n]), to + n);
        }
    });
}

// ---------------------------------------------------------------- streams: [tokens, S, size]

template <class T>
float dot(const T* x, const float* weight, int64_t size) {
    f32x16 sums = {};
    int64_t n = 0;
    for (; n + LANES <= size; n += LANES) sums += load(x + n) * load(weight + n);
    float total = sum(sums);
    for (; n < size; ++n) total += to_float(x[n]) * weight[n];
    return total;
}

float tanh_of(float x) { return SoftCap(1.0f)(splat(x))[0]; }

// What a token's streams are mixed by: tanh of the normalized stream times the router, whose rows have the norm's
// weight in them. router: [S, size].
template <class T>
void modalities(const T* x, const float* router, int64_t streams, int64_t size, float eps, float* out) {
    float factor = 1.0f / __builtin_sqrtf(sum_of_squares(x, size) / float(size) + eps);
    for (int64_t s = 0; s < streams; ++s) out[s] = tanh_of(factor * dot(x, router + s * size, size));
}

// sum_i x[i * size] * coefs[i]
template <class T>
ALWAYS_INLINE f32x16 mixed(const T* x, const float* coefs, int64_t streams, int64_t size) {
    f32x16 sums = {};
    for (int64_t i = 0; i < streams; ++i) sums += load(x + i * size) * coefs[i];
    return sums;
}

// coefs: [S * S, S]. out[j] = x[j] + sum_i c[j, i] x[i], and the active one again.
template <class T>
void predict(const T* x, const float* router, const float* coefs, T* out, T* active_out, int64_t tokens,
             int64_t streams, int64_t size, int64_t active, float eps) {
    parallel_for(tokens, rows_per_thread(streams * streams * size), [&](int64_t begin, int64_t end) {
        float by[MOST_STREAMS], c[MOST_STREAMS];
        for (int64_t token = begin; token < end; ++token) {
            const T* from = x + token * streams * size;
            modalities(from + active * size, router, streams, size, eps, by);
            for (int64_t j = 0; j < streams; ++j) {
                for (int64_t i = 0; i < streams; ++i) {
                    c[i] = i == j ? 1.0f : 0.0f;
                    for (int64_t s = 0; s < streams; ++s) c[i] += coefs[(j * streams + i) * streams + s] * by[s];
                }
                T* to = out + (token * streams + j) * size;
                int64_t n = 0;
                for (; n + LANES <= size; n += LANES) store(to + n, mixed(from + n, c, streams, size));
                for (; n < size; ++n) {
                    float total = 0.0f;
                    for (int64_t i = 0; i < streams; ++i) total += to_float(from[i * size + n]) * c[i];
                    from_float(total, to + n);
                }
                if (j == active) std::memcpy(active_out + token * size, to, sizeof(T) * size);
            }
        }
    });
}

// predictions[j] += (1 + coefs[j] . m) (activated - predictions[active]), and activated = the new active one * scale.
template <class T>
void correct(T* predictions, T* activated, const float* router, const float* coefs, const float* output_scale,
             int64_t tokens, int64_t streams, int64_t size, int64_t active, float eps) {
    parallel_for(tokens, rows_per_thread(2 * streams * size), [&](int64_t begin, int64_t end) {
        static thread_local Scratch scratch;
        float* innovation = reinterpret_cast<float*>(scratch.get(sizeof(float) * size));
        float by[MOST_STREAMS];
        for (int64_t token = begin; token < end; ++token) {
            T *all = predictions + token * streams * size, *mine = activated + token * size;
            modalities(mine, router, streams, size, eps, by);
            const T* predicted = all + active * size;
            for (int64_t n = 0; n < size; ++n) innovation[n] = to_float(mine[n]) - to_float(predicted[n]);
            for (int64_t j = 0; j < streams; ++j) {
                float c = 1.0f;
                for (int64_t s = 0; s < streams; ++s) c += coefs[j * streams + s] * by[s];
                T* to = all + j * size;
                int64_t n = 0;
                for (; n + LANES <= size; n += LANES) store(to + n, load(to + n) + load(innovation + n) * c);
                for (; n < size; ++n) from_float(to_float(to[n]) + innovation[n] * c, to + n);
            }
            int64_t n = 0;
            for (; n + LANES <= size; n += LANES) store(mine + n, load(predicted + n) * load(output_scale + n));
            for (; n < size; ++n) from_float(to_float(predicted[n]) * output_scale[n], mine + n);
        }
    });
}

template <class T>
void add_to(const T* x, float factor, T* sum, int64_t size) {
    int64_t n = 0;
    for (; n + LANES <= size; n += LANES) store(sum + n, load(sum + n) + load(x + n) * factor);
    for (; n < size; ++n) from_float(to_float(sum[n]) + to_float(x[n]) * factor, sum + n);
}

template <class T>
void spread(const T* x, T* all, int64_t tokens, int64_t streams, int64_t size) {
    parallel_for(tokens, rows_per_thread(streams * size), [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token)
            for (int64_t s = 1; s < streams; ++s) add_to(x + token * size, 1.0f, all + (token * streams + s) * size, size);
    });
}

// rms(like) / rms(x)
template <class T>
float matching(const T* x, const T* like, int64_t size) {
    float mean = std::max(sum_of_squares(x, size) / float(size), LEAST_MEAN_SQUARE);
    return __builtin_sqrtf(sum_of_squares(like, size) / float(size)) / __builtin_sqrtf(mean);
}

// x, then each of the S - 1 projections at the size of x.
template <class T>
void stack(const T* x, const T* projected, T* out, int64_t tokens, int64_t streams, int64_t size) {
    parallel_for(tokens, rows_per_thread(streams * size), [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            const T* mine = x + token * size;
            T* to = out + token * streams * size;
            std::memcpy(to, mine, sizeof(T) * size);
            for (int64_t s = 1; s < streams; ++s) {
                const T* from = projected + (token * (streams - 1) + s - 1) * size;
                float factor = matching(from, mine, size);
                T* row = to + s * size;
                int64_t n = 0;
                for (; n + LANES <= size; n += LANES) store(row + n, load(from + n) * factor);
                for (; n < size; ++n) from_float(to_float(from[n]) * factor, row + n);
            }
        }
    });
}

// sum += x at the size of the first stream; `is_first`: the sum starts with that stream.
template <class T>
void add_matched(const T* all, const T* x, T* sum, int64_t tokens, int64_t streams, int64_t size, bool is_first) {
    parallel_for(tokens, rows_per_thread(2 * size), [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            const T *like = all + token * streams * size, *from = x + token * size;
            T* to = sum + token * size;
            if (is_first) std::memcpy(to, like, sizeof(T) * size);
            add_to(from, matching(from, like, size), to, size);
        }
    });
}

}  // namespace
}  // namespace engine

// bfloat16 if `is_bf16`, else float32; weights of AltUp are float32. All arrays are contiguous except y.

// Ids of table rows, with 0 for those that are not below `bound`.
EXPORT void ids_below(const int64_t* ids, int64_t* out, int64_t bound, int64_t size) {
    engine::parallel_for(size, engine::MIN_NUMBERS, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) out[n] = ids[n] < bound ? ids[n] : 0;
    });
}

#define BY_TYPE(call)             \
    using namespace engine;       \
    if (is_bf16) {                \
        typedef bf16 T;           \
        call;                     \
    } else {                      \
        typedef float T;          \
        call;                     \
    }

EXPORT void gelu_times(void* x, const void* y, int64_t stride, int64_t rows, int64_t size, int is_bf16) {
    BY_TYPE(gelu_times(static_cast<T*>(x), static_cast<const T*>(y), stride, rows, size))
}

EXPORT void sparse_gelu_and_mul(const void* gate_up, void* out, int64_t rows, int64_t size, float multiplier,
                                int is_bf16) {
    BY_TYPE(sparse_gelu(static_cast<const T*>(gate_up), static_cast<T*>(out), rows, size, multiplier))
}

EXPORT void altup_stack(const void* x, const void* projected, void* out, int64_t tokens, int64_t streams, int64_t size,
                        int is_bf16) {
    BY_TYPE(stack(static_cast<const T*>(x), static_cast<const T*>(projected), static_cast<T*>(out), tokens, streams, size))
}

EXPORT void altup_predict(const void* x, const float* router, const float* coefs, void* out, void* active_out,
                          int64_t tokens, int64_t streams, int64_t size, int64_t active, float eps, int is_bf16) {
    BY_TYPE(predict(static_cast<const T*>(x), router, coefs, static_cast<T*>(out), static_cast<T*>(active_out), tokens,
                    streams, size, active, eps))
}

EXPORT void altup_correct(void* predictions, void* activated, const float* router, const float* coefs,
                          const float* output_scale, int64_t tokens, int64_t streams, int64_t size,
                          int64_t active, float eps, int is_bf16) {
    BY_TYPE(correct(static_cast<T*>(predictions), static_cast<T*>(activated), router, coefs, output_scale, tokens,
                    streams, size, active, eps))
}

EXPORT void altup_spread(const void* x, void* all, int64_t tokens, int64_t streams, int64_t size, int is_bf16) {
    BY_TYPE(spread(static_cast<const T*>(x), static_cast<T*>(all), tokens, streams, size))
}

EXPORT void altup_add(const void* all, const void* x, void* sum, int64_t tokens, int64_t streams, int64_t size,
                      int is_first, int is_bf16) {
    BY_TYPE(add_matched(static_cast<const T*>(all), static_cast<const T*>(x), static_cast<T*>(sum), tokens, streams,
                        size, is_first != 0))
}

RECORDABLE(ids_below)
RECORDABLE(gelu_times)
RECORDABLE(sparse_gelu_and_mul)
RECORDABLE(altup_stack)
RECORDABLE(altup_predict)
RECORDABLE(altup_correct)
RECORDABLE(altup_spread)
RECORDABLE(altup_add)
