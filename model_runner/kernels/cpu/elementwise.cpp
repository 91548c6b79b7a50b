// The operations between the matmuls: norms, gated activations, rotary with the store into the KV pool, table rows,
// additions, conversions.
//
// All of them compute in float32 and round once. One thread computes each row: results do not depend on the batch.

#include "activations.h"
#include "parallel.h"
#include "program.h"
#include "simd.h"

namespace engine {
namespace {

constexpr int64_t MIN_NUMBERS = 1 << 14;  // elements per thread, at least: fewer do not pay for waking it

int64_t rows_per_thread(int64_t numbers) { return (MIN_NUMBERS + numbers - 1) / (numbers > 0 ? numbers : 1); }

// ---------------------------------------------------------------- norms

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

template <class T>
void add_row(const T* x, T* residual, int64_t size) {
    int64_t n = 0;
    for (; n + LANES <= size; n += LANES) store(residual + n, load(residual + n) + load(x + n));
    for (; n < size; ++n) from_float(to_float(residual[n]) + to_float(x[n]), residual + n);
}

// `x` null: norm of `residual` alone.
template <class T, class W>
void norms(const void* x_, void* residual_, const void* weight_, void* out_, int64_t rows, int64_t size, float eps) {
    const T* x = static_cast<const T*>(x_);
    T* residual = static_cast<T*>(residual_);
    const W* weight = static_cast<const W*>(weight_);
    T* out = static_cast<T*>(out_);
    parallel_for(rows, rows_per_thread(size), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            T* mine = residual + row * size;
            if (x != nullptr) add_row(x + row * size, mine, size);
            norm_row(mine, weight, eps, out + row * size, size);
        }
    });
}

// The mean first, then the mean square of the differences from it: a single pass would cancel for a large mean.
template <class T>
void layer_norm_row(const T* x, const T* weight, const T* bias, float eps, T* out, int64_t size) {
    f32x16 sums = {};
    float total = 0.0f;
    int64_t whole = size / LANES * LANES;
    for (int64_t n = 0; n < whole; n += LANES) sums += load(x + n);
    for (int64_t n = whole; n < size; ++n) total += to_float(x[n]);
    float mean = (total + sum(sums)) / float(size);
    f32x16 squares = {};
    float rest = 0.0f;
    for (int64_t n = 0; n < whole; n += LANES) {
        f32x16 v = load(x + n) - mean;
        squares += v * v;
    }
    for (int64_t n = whole; n < size; ++n) rest += (to_float(x[n]) - mean) * (to_float(x[n]) - mean);
    float factor = 1.0f / __builtin_sqrtf((rest + sum(squares)) / float(size) + eps);
    for (int64_t n = 0; n < whole; n += LANES) {
        f32x16 v = (load(x + n) - mean) * factor * load(weight + n);
        store(out + n, bias == nullptr ? v : v + load(bias + n));
    }
    for (int64_t n = whole; n < size; ++n) {
        float v = (to_float(x[n]) - mean) * factor * to_float(weight[n]);
        from_float(bias == nullptr ? v : v + to_float(bias[n]), out + n);
    }
}

// `x` null: norm of `residual` alone. `bias` may be null.
template <class T>
void layer_norms(const void* x_, void* residual_, const void* weight, const void* bias, void* out_, int64_t rows,
                 int64_t size, float eps) {
    const T* x = static_cast<const T*>(x_);
    T* residual = static_cast<T*>(residual_);
    T* out = static_cast<T*>(out_);
    parallel_for(rows, rows_per_thread(size), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            T* mine = residual + row * size;
            if (x != nullptr) add_row(x + row * size, mine, size);
            layer_norm_row(mine, static_cast<const T*>(weight), static_cast<const T*>(bias), eps, out + row * size, size);
        }
    });
}

// ---------------------------------------------------------------- activations

template <class T, class Act>
void activate(T* x, int64_t size) {
    Act act;
    parallel_for(size, MIN_NUMBERS, [&](int64_t begin, int64_t end) {
        int64_t n = begin;
        for (; n + LANES <= end; n += LANES) store(x + n, act(load(x + n)));
        for (; n < end; ++n) from_float(act(splat(to_float(x[n])))[0], x + n);
    });
}

template <class T>
void activate(void* x_, int64_t size, Activation kind) {
    T* x = static_cast<T*>(x_);
    switch (kind) {
        case GELU: return activate<T, GeluErf>(x, size);
        case GELU_TANH: return activate<T, GeluTanh>(x, size);
        case RELU: return activate<T, Relu>(x, size);
        case SILU: return activate<T, Silu>(x, size);
    }
}

template <class T, class Act>
void gated(const void* gate_up_, void* out_, int64_t rows, int64_t size) {
    const T* gate_up = static_cast<const T*>(gate_up_);
    T* out = static_cast<T*>(out_);
    Act act;
    parallel_for(rows, rows_per_thread(size), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const T *gate = gate_up + row * 2 * size, *up = gate + size;
            T* to = out + row * size;
            int64_t n = 0;
            for (; n + LANES <= size; n += LANES) store(to + n, act(load(gate + n)) * load(up + n));
            for (; n < size; ++n) from_float(act(splat(to_float(gate[n])))[0] * to_float(up[n]), to + n);
        }
    });
}

// ---------------------------------------------------------------- rotary

// One head, in place; `row` is a buffer of head_dim floats.
template <class T, class A>
void rotate_head(T* head, const A* cos, const A* sin, int64_t rotary_dim, float* row) {
    int64_t half = rotary_dim / 2;
    int64_t n = 0;
    for (; n + LANES <= half; n += LANES) {
        f32x16 a = load(head + n), b = load(head + half + n);
        store(head + n, a * load(cos + n) + b * load(sin + n));
        store(head + half + n, b * load(cos + half + n) + a * load(sin + half + n));
    }
    if (n == half) return;
    for (int64_t i = n; i < half; ++i) {
        float a = to_float(head[i]), b = to_float(head[half + i]);
        row[i] = a * to_float(cos[i]) + b * to_float(sin[i]);
        row[half + i] = b * to_float(cos[half + i]) + a * to_float(sin[half + i]);
    }
    for (int64_t i = n; i < half; ++i) {
        from_float(row[i], head + i);
        from_float(row[half + i], head + half + i);
    }
}

constexpr float MOST_INT8 = 127.0f, LEAST_TOP = 1e-35f;  // smaller values are stored as 0

// Quantizes one head to int8; the scale is NaN if a value is not finite, so that NaN propagates.
template <class T>
float quantize_head(const T* head, int64_t head_dim, int8_t* out) {
    LargestMagnitude most;
    int64_t n = 0;
    for (; n + LANES <= head_dim; n += LANES) most.see(load(head + n));
    float top = most.get();
    for (int64_t i = n; i < head_dim; ++i) {
        float magnitude = __builtin_fabsf(to_float(head[i]));
        if (!(magnitude <= top) && top == top) top = magnitude;  // true for NaN, which then stays
    }
    float not_finite = top - top;  // NaN if top is not finite, else 0
    if (!(top >= LEAST_TOP && not_finite == 0.0f)) {
        std::memset(out, 0, head_dim);
        return not_finite;
    }
    float factor = MOST_INT8 / top;
    for (int64_t i = 0; i < head_dim; ++i) out[i] = int8_t(int32_t(__builtin_rintf(to_float(head[i]) * factor)));
    return top * (1.0f / MOST_INT8);
}

struct Rotation {
    void* qkv;
    const void *q_norm, *k_norm, *cos, *sin;
    void *k_pool, *v_pool;
    float *k_scale, *v_scale;  // null: the pool has the type of the activations
    const int64_t* loc;
    int64_t num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim;
    float eps;
};

template <class T>
void store_quantized(const Rotation& r, const T* heads, int64_t token, void* pool, float* scales) {
    for (int64_t h = 0; h < r.num_kv_heads; ++h) {
        int64_t at = r.loc[token] * r.num_kv_heads + h;
        scales[at] = quantize_head(heads + h * r.head_dim, r.head_dim, static_cast<int8_t*>(pool) + at * r.head_dim);
    }
}

// T: type of activations and pool, A: of the angles, W: of the norm weights.
template <class T, class A, class W>
void rotate_and_store(const Rotation& r) {
    int64_t kv_size = r.num_kv_heads * r.head_dim;
    int64_t size = (r.num_heads + 2 * r.num_kv_heads) * r.head_dim;
    parallel_for(r.num_tokens, rows_per_thread(size), [&](int64_t begin, int64_t end) {
        static thread_local Scratch scratch;
        float* row = reinterpret_cast<float*>(scratch.get(sizeof(float) * r.head_dim));
        for (int64_t token = begin; token < end; ++token) {
            T* heads = static_cast<T*>(r.qkv) + token * size;
            const A* cos = static_cast<const A*>(r.cos) + token * r.rotary_dim;
            const A* sin = static_cast<const A*>(r.sin) + token * r.rotary_dim;
            for (int64_t h = 0; h < r.num_heads + r.num_kv_heads; ++h) {
                T* head = heads + h * r.head_dim;
                const void* norm = h < r.num_heads ? r.q_norm : r.k_norm;
                if (norm != nullptr) norm_row(head, static_cast<const W*>(norm), r.eps, head, r.head_dim);
                rotate_head(head, cos, sin, r.rotary_dim, row);
            }
            const T* k = heads + r.num_heads * r.head_dim;
            if (r.k_scale != nullptr) {
                store_quantized(r, k, token, r.k_pool, r.k_scale);
                store_quantized(r, k + kv_size, token, r.v_pool, r.v_scale);
                continue;
            }
            std::memcpy(static_cast<T*>(r.k_pool) + r.loc[token] * kv_size, k, sizeof(T) * kv_size);
            std::memcpy(static_cast<T*>(r.v_pool) + r.loc[token] * kv_size, k + kv_size, sizeof(T) * kv_size);
        }
    });
}

// ---------------------------------------------------------------- table rows, additions, conversions

// `to` may equal `from`.
template <class T>
void scale_row(const T* from, T* to, int64_t size, float factor) {
    int64_t n = 0;
    for (; n + LANES <= size; n += LANES) store(to + n, load(from + n) * factor);
    for (; n < size; ++n) from_float(to_float(from[n]) * factor, to + n);
}

template <class T>
void take_rows(const T* table, const int64_t* indices, T* out, int64_t rows, int64_t size, float scale) {
    parallel_for(rows, rows_per_thread(size), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const T* from = table + indices[row] * size;
            T* to = out + row * size;
            if (scale == 1.0f) {
                std::memcpy(to, from, sizeof(T) * size);
                continue;
            }
            scale_row(from, to, size, scale);
        }
    });
}

template <class T>
void add(const T* x, T* sum, int64_t size) {
    parallel_for(size, MIN_NUMBERS, [&](int64_t begin, int64_t end) { add_row(x + begin, sum + begin, end - begin); });
}

}  // namespace
}  // namespace engine

// Types of the functions below: bfloat16 if `is_bf16`, else float32; weights and angles may be float32 with bfloat16
// activations. All arrays are contiguous; no alignment beyond that of the type is required.

EXPORT void add_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t size,
                         float eps, int is_bf16, int weight_is_bf16) {
    using namespace engine;
    if (!is_bf16)
        norms<float, float>(x, residual, weight, out, rows, size, eps);
    else if (weight_is_bf16)
        norms<bf16, bf16>(x, residual, weight, out, rows, size, eps);
    else
        norms<bf16, float>(x, residual, weight, out, rows, size, eps);
}

EXPORT void silu_and_mul(const void* gate_up, void* out, int64_t rows, int64_t size, int is_bf16) {
    using namespace engine;
    is_bf16 ? gated<bf16, Silu>(gate_up, out, rows, size) : gated<float, Silu>(gate_up, out, rows, size);
}

EXPORT void gelu_and_mul(const void* gate_up, void* out, int64_t rows, int64_t size, int is_bf16) {
    using namespace engine;
    is_bf16 ? gated<bf16, GeluTanh>(gate_up, out, rows, size) : gated<float, GeluTanh>(gate_up, out, rows, size);
}

EXPORT void gelu_erf_and_mul(const void* gate_up, void* out, int64_t rows, int64_t size, int is_bf16) {
    using namespace engine;
    is_bf16 ? gated<bf16, GeluErf>(gate_up, out, rows, size) : gated<float, GeluErf>(gate_up, out, rows, size);
}

EXPORT void add_layer_norm(const void* x, void* residual, const void* weight, const void* bias, void* out, int64_t rows,
                           int64_t size, float eps, int is_bf16) {
    using namespace engine;
    is_bf16 ? layer_norms<bf16>(x, residual, weight, bias, out, rows, size, eps)
            : layer_norms<float>(x, residual, weight, bias, out, rows, size, eps);
}

// In place.
EXPORT void activate(void* x, int64_t size, int kind, int is_bf16) {
    using namespace engine;
    is_bf16 ? activate<bf16>(x, size, Activation(kind)) : activate<float>(x, size, Activation(kind));
}

EXPORT void rotate_and_store(void* qkv, const void* q_norm, const void* k_norm, const void* cos, const void* sin,
                             void* k_pool, void* v_pool, float* k_scale, float* v_scale, const int64_t* loc, int64_t num_tokens, int64_t num_heads,
                             int64_t num_kv_heads, int64_t head_dim, int64_t rotary_dim, float eps, int is_bf16,
                             int angles_are_bf16, int norms_are_bf16) {
    using namespace engine;
    Rotation r{qkv, q_norm, k_norm, cos, sin, k_pool, v_pool, k_scale, v_scale, loc, num_tokens, num_heads,
               num_kv_heads, head_dim, rotary_dim, eps};
    if (!is_bf16)
        rotate_and_store<float, float, float>(r);
    else if (angles_are_bf16)
        norms_are_bf16 ? rotate_and_store<bf16, bf16, bf16>(r) : rotate_and_store<bf16, bf16, float>(r);
    else
        norms_are_bf16 ? rotate_and_store<bf16, float, bf16>(r) : rotate_and_store<bf16, float, float>(r);
}

EXPORT void take_rows(const void* table_, const int64_t* indices, void* out_, int64_t rows, int64_t size, float scale,
                      int is_bf16) {
    using namespace engine;
    if (is_bf16)
        take_rows(static_cast<const bf16*>(table_), indices, static_cast<bf16*>(out_), rows, size, scale);
    else
        take_rows(static_cast<const float*>(table_), indices, static_cast<float*>(out_), rows, size, scale);
}

// x: [size] bfloat16, multiplied in place as by `take_rows`.
EXPORT void scale(void* x_, int64_t size, float factor) {
    using namespace engine;
    bf16* x = static_cast<bf16*>(x_);
    parallel_for(size, MIN_NUMBERS, [&](int64_t begin, int64_t end) { scale_row(x + begin, x + begin, end - begin, factor); });
}

// x: [size], each becomes cap * tanh(x / cap).
EXPORT void soft_cap(float* x, int64_t size, float cap) {
    using namespace engine;
    SoftCap capped(cap);
    parallel_for(size, MIN_NUMBERS, [&](int64_t begin, int64_t end) {
        int64_t n = begin;
        for (; n + LANES <= end; n += LANES) store(x + n, capped(load(x + n)));
        for (; n < end; ++n) x[n] = capped(splat(x[n]))[0];
    });
}

EXPORT void add(const void* x, void* sum, int64_t size, int is_bf16) {
    using namespace engine;
    if (is_bf16)
        add(static_cast<const bf16*>(x), static_cast<bf16*>(sum), size);
    else
        add(static_cast<const float*>(x), static_cast<float*>(sum), size);
}

EXPORT void widen(const void* x_, float* out, int64_t size) {
    using namespace engine;
    const bf16* x = static_cast<const bf16*>(x_);
    parallel_for(size, MIN_NUMBERS, [&](int64_t begin, int64_t end) {
        int64_t n = begin;
        for (; n + LANES <= end; n += LANES) store(out + n, load(x + n));
        for (; n < end; ++n) out[n] = to_float(x[n]);
    });
}

RECORDABLE(add_rms_norm)
RECORDABLE(silu_and_mul)
RECORDABLE(gelu_and_mul)
RECORDABLE(gelu_erf_and_mul)
RECORDABLE(add_layer_norm)
RECORDABLE(activate)
RECORDABLE(rotate_and_store)
RECORDABLE(take_rows)
RECORDABLE(scale)
RECORDABLE(soft_cap)
RECORDABLE(add)
RECORDABLE(widen)

// Current number of threads that run this library's kernels.
EXPORT int num_threads() { return engine::max_threads(); }
