// The operations between the matmuls: norms, gated activations, rotary with the store into the KV pool, table rows,
// additions, conversions.
//
// All of them compute in float32 and round once. One thread computes each row: results do not depend on the batch.

#include "activations.h"
#include "parallel.h"
#include "program.h"
#include "rows.h"
#include "simd.h"

namespace engine {
namespace {

// ---------------------------------------------------------------- norms

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
        case SQUARED_RELU: return activate<T, SquaredRelu>(x, size);
        case SILU: return activate<T, Silu>(x, size);
    }
}

// `act`: gates and ups to results.
template <class T, class Act>
void gated_by(const Act& act, const void* gate_up_, void* out_, int64_t rows, int64_t size) {
    const T* gate_up = static_cast<const T*>(gate_up_);
    T* out = static_cast<T*>(out_);
    parallel_for(rows, rows_per_thread(size), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const T *gate = gate_up + row * 2 * size, *up = gate + size;
            T* to = out + row * size;
            int64_t n = 0;
            for (; n + LANES <= size; n += LANES) store(to + n, act(load(gate + n), load(up + n)));
            for (; n < size; ++n) from_float(act(splat(to_float(gate[n])), splat(to_float(up[n])))[0], to + n);
        }
    });
}

template <class T, class Act>
void gated(const void* gate_up, void* out, int64_t rows, int64_t size) {
    Act act;
    gated_by<T>([&](f32x16 gate, f32x16 up) { return act(gate) * up; }, gate_up, out, rows, size);
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

// The same with neighboring elements paired.
template <class T, class A>
void rotate_neighbors(T* head, const A* cos, const A* sin, int64_t rotary_dim) {
    int64_t half = rotary_dim / 2;
    const A *c = cos + half, *s = sin + half;  // the second half of sin has the right sign
    int64_t n = 0;
    for (; n + LANES <= half; n += LANES) {
        T* pairs = head + 2 * n;
        f32x16 low = load(pairs), high = load(pairs + LANES), angle_cos = load(c + n), angle_sin = load(s + n);
        f32x16 even = SHUFFLE(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        f32x16 odd = SHUFFLE(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        f32x16 first = even * angle_cos - odd * angle_sin, second = odd * angle_cos + even * angle_sin;
        store(pairs, SHUFFLE(first, second, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
        store(pairs + LANES, SHUFFLE(first, second, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
    }
    for (; n < half; ++n) {
        float a = to_float(head[2 * n]), b = to_float(head[2 * n + 1]);
        from_float(a * to_float(c[n]) - b * to_float(s[n]), head + 2 * n);
        from_float(b * to_float(c[n]) + a * to_float(s[n]), head + 2 * n + 1);
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
    bool norms_over_heads, interleaved;
    const float* query_factors;  // null: 1
    bool values_are_normed, values_are_keys;

    int64_t num_value_heads() const { return values_are_keys ? 0 : num_kv_heads; }  // of `qkv`
};

template <class T>
void store_quantized(const Rotation& r, const T* heads, int64_t token, void* pool, float* scales) {
    for (int64_t h = 0; h < r.num_kv_heads; ++h) {
        int64_t at = r.loc[token] * r.num_kv_heads + h;
        scales[at] = quantize_head(heads + h * r.head_dim, r.head_dim, static_cast<int8_t*>(pool) + at * r.head_dim);
    }
}

// The values of a token, from the projected keys where the layer has no others; `row` is a buffer for them.
template <class T>
void store_values(const Rotation& r, const T* heads, int64_t token, T* row) {
    int64_t kv_size = r.num_kv_heads * r.head_dim;
    if (r.values_are_normed) {
        for (int64_t at = 0; at < kv_size; at += r.head_dim) {
            float mean = sum_of_squares(heads + at, r.head_dim) / float(r.head_dim);
            scale_row(heads + at, row + at, r.head_dim, 1.0f / __builtin_sqrtf(mean + r.eps));
        }
        heads = row;
    }
    if (r.v_scale != nullptr)
        store_quantized(r, heads, token, r.v_pool, r.v_scale);
    else
        std::memcpy(static_cast<T*>(r.v_pool) + r.loc[token] * kv_size, heads, sizeof(T) * kv_size);
}

// T: type of activations and pool, A: of the angles, W: of the norm weights.
template <class T, class A, class W>
void rotate_and_store(const Rotation& r) {
    int64_t kv_size = r.num_kv_heads * r.head_dim;
    int64_t size = (r.num_heads + r.num_kv_heads + r.num_value_heads()) * r.head_dim;
    parallel_for(r.num_tokens, rows_per_thread(size), [&](int64_t begin, int64_t end) {
        static thread_local Scratch scratch;
        float* row = reinterpret_cast<float*>(scratch.get(sizeof(float) * (r.head_dim + kv_size)));
        for (int64_t token = begin; token < end; ++token) {
            T* heads = static_cast<T*>(r.qkv) + token * size;
            const A* cos = static_cast<const A*>(r.cos) + token * r.rotary_dim;
            const A* sin = static_cast<const A*>(r.sin) + token * r.rotary_dim;
            T* k = heads + r.num_heads * r.head_dim;
            if (kv_size > 0)
                store_values(r, r.values_are_keys ? k : k + kv_size, token, reinterpret_cast<T*>(row + r.head_dim));
            if (r.norms_over_heads) {
                norm_row(heads, static_cast<const W*>(r.q_norm), r.eps, heads, r.num_heads * r.head_dim);
                norm_row(k, static_cast<const W*>(r.k_norm), r.eps, k, kv_size);
            }
            for (int64_t h = 0; h < r.num_heads + r.num_kv_heads; ++h) {
                T* head = heads + h * r.head_dim;
                const void* norm = h < r.num_heads ? r.q_norm : r.k_norm;
                if (norm != nullptr && !r.norms_over_heads)
                    norm_row(head, static_cast<const W*>(norm), r.eps, head, r.head_dim);
                if (r.interleaved)
                    rotate_neighbors(head, cos, sin, r.rotary_dim);
                else
                    rotate_head(head, cos, sin, r.rotary_dim, row);
            }
            if (r.query_factors != nullptr)
                scale_row(heads, heads, r.num_heads * r.head_dim, r.query_factors[token]);
            if (kv_size == 0) continue;
            if (r.k_scale != nullptr)
                store_quantized(r, k, token, r.k_pool, r.k_scale);
            else
                std::memcpy(static_cast<T*>(r.k_pool) + r.loc[token] * kv_size, k, sizeof(T) * kv_size);
        }
    });
}

// ---------------------------------------------------------------- table rows, additions, conversions

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
void scale(T* x, int64_t size, float factor) {
    parallel_for(size, MIN_NUMBERS, [&](int64_t begin, int64_t end) { scale_row(x + begin, x + begin, end - begin, factor); });
}

template <class T>
void add(const T* x, T* sum, int64_t size) {
    parallel_for(size, MIN_NUMBERS, [&](int64_t begin, int64_t end) { add_row(x + begin, sum + begin, end - begin); });
}

// sum += sigmoid(gate of the row) * y
template <class T>
void add_gated(const T* y, const float* gates, T* sum, int64_t rows, int64_t size) {
    parallel_for(rows, rows_per_thread(size), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            float gate = 1.0f / (1.0f + exp2(splat(gates[row] * -1.44269504f))[0]);
            const T* from = y + row * size;
            T* to = sum + row * size;
            int64_t n = 0;
            for (; n + LANES <= size; n += LANES) store(to + n, load(to + n) + load(from + n) * gate);
            for (; n < size; ++n) from_float(to_float(to[n]) + to_float(from[n]) * gate, to + n);
        }
    });
}

// x *= sigmoid(gate); each gate is that of `each` numbers.
template <class T>
void mul_sigmoid(const T* gates, T* x, int64_t size, int64_t each) {
    auto gated = [](f32x16 value, f32x16 gate) { return value / (1.0f + exp2(gate * -1.44269504f)); };
    if (each > 1) {
        parallel_for(size / each, rows_per_thread(each), [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) {
                const f32x16 gate = splat(to_float(gates[row]));
                T* to = x + row * each;
                int64_t n = 0;
                for (; n + LANES <= each; n += LANES) store(to + n, gated(load(to + n), gate));
                for (; n < each; ++n) from_float(gated(splat(to_float(to[n])), gate)[0], to + n);
            }
        });
        return;
    }
    parallel_for(size, MIN_NUMBERS, [&](int64_t begin, int64_t end) {
        int64_t n = begin;
        for (; n + LANES <= end; n += LANES) store(x + n, gated(load(x + n), load(gates + n)));
        for (; n < end; ++n) from_float(gated(splat(to_float(x[n])), splat(to_float(gates[n])))[0], x + n);
    });
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

EXPORT void clamped_swiglu(const void* gate_up, void* out, int64_t rows, int64_t size, float alpha, float limit,
                           float gate_limit, float offset, int is_bf16) {
    using namespace engine;
    const ClampedSwiGLU act{alpha, limit, gate_limit, offset};
    is_bf16 ? gated_by<bf16>(act, gate_up, out, rows, size) : gated_by<float>(act, gate_up, out, rows, size);
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
                             int angles_are_bf16, int norms_are_bf16, int norms_over_heads, int interleaved,
                             const float* query_factors, int values_are_normed, int values_are_keys) {
    using namespace engine;
    Rotation r{qkv, q_norm, k_norm, cos, sin, k_pool, v_pool, k_scale, v_scale, loc, num_tokens, num_heads,
               num_kv_heads, head_dim, rotary_dim, eps, norms_over_heads != 0, interleaved != 0, query_factors,
               values_are_normed != 0, values_are_keys != 0};
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

// x: [size], multiplied in place as by `take_rows`.
EXPORT void scale(void* x, int64_t size, float factor, int is_bf16) {
    using namespace engine;
    is_bf16 ? scale(static_cast<bf16*>(x), size, factor) : scale(static_cast<float*>(x), size, factor);
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

// gates: [rows] float32.
EXPORT void add_gated(const void* y, const float* gates, void* sum, int64_t rows, int64_t size, int is_bf16) {
    using namespace engine;
    if (is_bf16)
        add_gated(static_cast<const bf16*>(y), gates, static_cast<bf16*>(sum), rows, size);
    else
        add_gated(static_cast<const float*>(y), gates, static_cast<float*>(sum), rows, size);
}

// gates: [size / each]
EXPORT void mul_sigmoid(const void* gates, void* x, int64_t size, int64_t each, int is_bf16) {
    using namespace engine;
    if (is_bf16)
        mul_sigmoid(static_cast<const bf16*>(gates), static_cast<bf16*>(x), size, each);
    else
        mul_sigmoid(static_cast<const float*>(gates), static_cast<float*>(x), size, each);
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
RECORDABLE(clamped_swiglu)
RECORDABLE(gelu_and_mul)
RECORDABLE(gelu_erf_and_mul)
RECORDABLE(add_layer_norm)
RECORDABLE(activate)
RECORDABLE(rotate_and_store)
RECORDABLE(take_rows)
RECORDABLE(scale)
RECORDABLE(soft_cap)
RECORDABLE(add)
RECORDABLE(add_gated)
RECORDABLE(mul_sigmoid)
RECORDABLE(widen)

// Current number of threads that run this library's kernels.
EXPORT int num_threads() { return engine::max_threads(); }
