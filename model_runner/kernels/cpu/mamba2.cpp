// A layer of Mamba 2 (Dao and Gu 2024) over runs of tokens with states: a short convolution of x, B and C, a matrix for
// each head that decays and to which each token adds, and a norm of the gated answers over each group of heads.
//
// With S the state before a token, d its decay and t its time step:
//
//   S' = d * S + B (t * x)        y = C S' + skip * x
//
// Columns of a head's matrix do not depend on each other, and a token reads and writes each number once. So a piece of
// work is some columns of one head, over the tokens of all runs in their order: 128 rows of 64 columns are 32 KiB. A token
// costs two multiply-adds for each element of a matrix, few beside those of the matmuls around it: prompts need no other
// form of the computation, and the bits of a token do not depend on how tokens are divided.

#include <cmath>
#include <cstring>

#include "activations.h"
#include "parallel.h"
#include "program.h"
#include "rows.h"
#include "simd.h"
#include "state_runs.h"

namespace engine {
namespace {

#if defined(__AVX512F__)
constexpr int VECTORS = 4;  // of a piece: inputs and answers stay in registers
#else
constexpr int VECTORS = 2;
#endif

// Of one token and head.
struct Factors {
    float decay, step;
};

template <class T>
struct Mamba2 {
    const T *zxbcdt, *taps, *bias;
    const float *decay, *dt_bias, *skip, *norm;
    T* conv;
    float* states;
    const int64_t* plan;
    float* mixed;      // [tokens, conv_size]: x, B and C after the convolution; the answers take the place of x
    Factors* factors;  // [tokens, heads]
    void* out;
    int64_t num_tokens, num_heads, head_dim, num_groups, state_dim, num_taps;
    float eps, least_step, most_step;

    int64_t inner_size() const { return num_heads * head_dim; }
    int64_t conv_size() const { return inner_size() + 2 * num_groups * state_dim; }
    int64_t row_size() const { return inner_size() + conv_size() + num_heads; }

    void find_factors(int64_t token) const {
        const T* dt = zxbcdt + token * row_size() + inner_size() + conv_size();
        for (int64_t head = 0; head < num_heads; ++head) {
            float step = softplus(to_float(dt[head]) + dt_bias[head]);
            step = step < least_step ? least_step : step > most_step ? most_step : step;
            factors[token * num_heads + head] = {std::exp(decay[head] * step), step};
        }
    }

    // N vectors (or numbers) of a head's columns, from column `at` on. Between the tokens of a run they are side by side in
    // `local`, as in delta_net.cpp.
    template <class V, int N>
    void scan(int64_t head, int64_t at, float* local) const {
        constexpr int WIDTH = sizeof(V) / sizeof(float);
        const int64_t slot_size = num_heads * state_dim * head_dim, start = head * state_dim * head_dim + at;
        const int64_t group = head / (num_heads / num_groups);
        const int64_t of_x = head * head_dim + at, of_b = inner_size() + group * state_dim;
        for (int64_t n = 0; n < plan[0]; ++n) {
            const Run run = runs_of(plan)[n];
            const float* from = states + run.load * slot_size + start;
            float* slot = states + run.store * slot_size + start;
            int64_t step = head_dim;  // from a row to the next one
            for (int64_t token = run.first; token < run.last; ++token) {
                float* to = token + 1 < run.last ? local : slot;
                const int64_t to_step = token + 1 < run.last ? N * WIDTH : head_dim;
                float* row = mixed + token * conv_size();
                const float *b = row + of_b, *c = b + num_groups * state_dim;
                const Factors f = factors[token * num_heads + head];
                V x[N], y[N];
                for (int u = 0; u < N; ++u) {
                    V value = get<V>(row + of_x + u * WIDTH);
                    x[u] = value * f.step;
                    y[u] = value * skip[head];
                }
                for (int64_t i = 0; i < state_dim; ++i)
                    for (int u = 0; u < N; ++u) {
                        V s = get<V>(from + i * step + u * WIDTH) * f.decay + x[u] * b[i];
                        set(to + i * to_step + u * WIDTH, s);
                        y[u] += s * c[i];
                    }
                for (int u = 0; u < N; ++u) set(row + of_x + u * WIDTH, y[u]);
                from = to;
                step = to_step;
            }
            if (run.first == run.last && from != slot)
                for (int64_t i = 0; i < state_dim; ++i)
                    std::memcpy(slot + i * head_dim, from + i * head_dim, N * sizeof(V));
        }
    }

    int64_t pieces_of_head() const { return (head_dim + VECTORS * LANES - 1) / (VECTORS * LANES); }

    void scan(int64_t piece) const {
        int64_t head = piece / pieces_of_head(), at = piece % pieces_of_head() * VECTORS * LANES;
        int64_t end = at + VECTORS * LANES < head_dim ? at + VECTORS * LANES : head_dim;
        thread_local Scratch scratch;
        float* local = reinterpret_cast<float*>(scratch.get(sizeof(float) * state_dim * VECTORS * LANES));
        if (end - at == VECTORS * LANES) return scan<f32x16, VECTORS>(head, at, local);
        for (; at + LANES <= end; at += LANES) scan<f32x16, 1>(head, at, local);
        for (; at < end; ++at) scan<float, 1>(head, at, local);
    }

    // The answers of one token and group, gated and, if there is a norm, normalized.
    void finish(int64_t row) const {
        const int64_t size = inner_size() / num_groups, token = row / num_groups, start = row % num_groups * size;
        float* y = mixed + token * conv_size() + start;
        const T* z = zxbcdt + token * row_size() + start;
        const int64_t place = token * inner_size() + start;
        float* gated = norm == nullptr ? static_cast<float*>(out) + place : y;
        int64_t n = 0;
        for (; n + LANES <= size; n += LANES) store(gated + n, load(y + n) * Silu()(load(z + n)));
        for (; n < size; ++n) gated[n] = y[n] * Silu()(splat(to_float(z[n])))[0];
        if (norm == nullptr) return;
        const float factor = 1.0f / std::sqrt(sum_of_squares(y, size) / float(size) + eps), *weight = norm + start;
        T* to = static_cast<T*>(out) + place;
        for (n = 0; n + LANES <= size; n += LANES) store(to + n, load(y + n) * factor * load(weight + n));
        for (; n < size; ++n) from_float(y[n] * factor * weight[n], to + n);
    }

    void run() const {
        StateConv<T>{zxbcdt + inner_size(), taps, bias, conv, plan, mixed, conv_size(), row_size(), num_taps}.run(num_tokens);
        parallel_for(num_tokens, rows_per_thread(8 * num_heads), [&](int64_t begin, int64_t end) {
            for (int64_t token = begin; token < end; ++token) find_factors(token);
        });
        parallel_for_dynamic(num_heads * pieces_of_head(), [&](int64_t piece) { scan(piece); });
        parallel_for(num_tokens * num_groups, rows_per_thread(4 * inner_size() / num_groups), [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) finish(row);
        });
    }
};

template <class T>
void mamba2(const void* zxbcdt, const void* taps, const void* bias, const float* decay, const float* dt_bias,
            const float* skip, const float* norm, void* conv, float* states, const int64_t* plan, float* workspace, void* out,
            int64_t num_tokens, int64_t num_heads, int64_t head_dim, int64_t num_groups, int64_t state_dim, int64_t num_taps,
            float eps, float least_step, float most_step) {
    Mamba2<T> layer{static_cast<const T*>(zxbcdt), static_cast<const T*>(taps), static_cast<const T*>(bias), decay, dt_bias,
                    skip, norm, static_cast<T*>(conv), states, plan, workspace, nullptr, out, num_tokens, num_heads, head_dim,
                    num_groups, state_dim, num_taps, eps, least_step, most_step};
    layer.factors = reinterpret_cast<Factors*>(workspace + num_tokens * layer.conv_size());
    layer.run();
}

}  // namespace
}  // namespace engine

// H heads of P elements, K = H * P + 2 * num_groups * state_dim channels.
//
// zxbcdt: [tokens, H * P + K + H]; taps: [num_taps, K], 2 to 64; bias: [K] or null; conv: [.., num_taps - 1, K]; these are
// bfloat16 if `is_bf16`, else float32. decay (-exp(A_log)), dt_bias, skip: [H]; norm: [H * P] or null; states:
// [.., H, state_dim, P]; workspace: [tokens, K + 2 * H]. out: [tokens, H * P], as zxbcdt; without a norm float32. plan: see
// `state_runs.py`.
EXPORT void mamba2(const void* zxbcdt, const void* taps, const void* bias, const float* decay, const float* dt_bias,
                   const float* skip, const float* norm, void* conv, float* states, const int64_t* plan, float* workspace,
                   void* out, int64_t num_tokens, int64_t num_heads, int64_t head_dim, int64_t num_groups, int64_t state_dim,
                   int64_t num_taps, float eps, float least_step, float most_step, int is_bf16) {
    auto run = is_bf16 ? engine::mamba2<engine::bf16> : engine::mamba2<float>;
    run(zxbcdt, taps, bias, decay, dt_bias, skip, norm, conv, states, plan, workspace, out, num_tokens, num_heads, head_dim,
        num_groups, state_dim, num_taps, eps, least_step, most_step);
}

RECORDABLE(mamba2)
