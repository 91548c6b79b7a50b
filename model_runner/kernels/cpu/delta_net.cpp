// The gated delta net of state layers (Yang et al. 2024), over runs of tokens with states: a short convolution of
// queries, keys and values, a matrix for each value head that is read and corrected token by token, a gated norm.
//
// Columns of a head's matrix do not depend on each other. So a piece of work is some columns of one head, over the
// tokens of all runs in their order: 128 rows of 32 columns are 16 KiB, which stay in the first-level cache from token
// to token. A token costs four multiply-adds for each element of a matrix, few beside those of the matmuls around it:
// prompts need no other form of the computation, and the bits of a token do not depend on how tokens are divided.
//
// With S the state before a token, k and q normalized, d its decay and b its rate:
//
//   delta = b * (v - d * k S)        S' = d * S + k delta        out = q S' = d * q S + (q k) delta
//
// k S and q S are one pass over S. The factors of each token and head are computed before, so that q and k are read as
// they are.

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

constexpr float NORM_EPS = 1e-6f;  // of the lengths of q and k
#if defined(__AVX512F__)
constexpr int VECTORS = 4;  // of a piece: two sums for each stay in registers
#else
constexpr int VECTORS = 2;
#endif

// Of one token and value head; see the formula above.
struct Factors {
    float decay, of_read, rate, of_asked, of_delta;
};

inline float product(const float* a, const float* b, int64_t size) {
    f32x16 sums = {};
    int64_t n = 0;
    for (; n + LANES <= size; n += LANES) sums += load(a + n) * load(b + n);
    float total = sum(sums);
    for (; n < size; ++n) total += a[n] * b[n];
    return total;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

template <class T>
struct DeltaNet {
    const T *qkvz, *ba, *taps;
    const float *decay, *dt_bias, *norm;
    T* conv;
    float* states;
    const int64_t* plan;
    float* mixed;  // [tokens, conv_size]: q, k and v after the convolution; the result takes the place of v
    Factors* factors;  // [tokens, heads]
    T* out;
    int64_t num_tokens, num_key_heads, num_heads, key_dim, value_dim, num_taps;
    float eps;

    int64_t key_size() const { return num_key_heads * key_dim; }
    int64_t value_size() const { return num_heads * value_dim; }
    int64_t conv_size() const { return 2 * key_size() + value_size(); }

    void find_factors(int64_t token) const {
        const float scale = 1.0f / std::sqrt(float(key_dim));
        const int64_t shared = num_heads / num_key_heads;
        for (int64_t key_head = 0; key_head < num_key_heads; ++key_head) {
            const float* q = mixed + token * conv_size() + key_head * key_dim;
            const float* k = q + key_size();
            float of_q = scale / std::sqrt(product(q, q, key_dim) + NORM_EPS);
            float of_k = 1.0f / std::sqrt(product(k, k, key_dim) + NORM_EPS);
            float both = product(q, k, key_dim) * of_q;
            for (int64_t head = key_head * shared; head < (key_head + 1) * shared; ++head) {
                const T* gates = ba + token * 2 * num_heads + head;
                float d = std::exp(decay[head] * softplus(to_float(gates[num_heads]) + dt_bias[head]));
                factors[token * num_heads + head] = {d, d * of_k, sigmoid(to_float(gates[0])) * of_k, d * of_q, both};
            }
        }
    }

    // N vectors (or numbers) of a head's columns, from column `at` on. Between the tokens of a run they are side by side in
    // `local`: rows of a whole matrix are a power of two apart, and some columns of them would share a few cache sets.
    template <class V, int N>
    void correct(int64_t head, int64_t at, float* local) const {
        constexpr int WIDTH = sizeof(V) / sizeof(float);
        const int64_t slot_size = num_heads * key_dim * value_dim, start = head * key_dim * value_dim + at;
        const int64_t of_q = head / (num_heads / num_key_heads) * key_dim, of_v = 2 * key_size() + head * value_dim + at;
        for (int64_t n = 0; n < plan[0]; ++n) {
            const Run run = runs_of(plan)[n];
            const float* from = states + run.load * slot_size + start;
            float* slot = states + run.store * slot_size + start;
            int64_t step = value_dim;  // from a row to the next one
            for (int64_t token = run.first; token < run.last; ++token) {
                float* to = token + 1 < run.last ? local : slot;
                const int64_t to_step = token + 1 < run.last ? N * WIDTH : value_dim;
                float* row = mixed + token * conv_size();
                const float *q = row + of_q, *k = q + key_size();
                const Factors f = factors[token * num_heads + head];
                V read[N] = {}, asked[N] = {}, delta[N];
                for (int64_t i = 0; i < key_dim; ++i)
                    for (int c = 0; c < N; ++c) {
                        V s = get<V>(from + i * step + c * WIDTH);
                        read[c] += s * k[i];
                        asked[c] += s * q[i];
                    }
                for (int c = 0; c < N; ++c) {
                    V v = get<V>(row + of_v + c * WIDTH);
                    delta[c] = (v - read[c] * f.of_read) * f.rate;
                    set(row + of_v + c * WIDTH, asked[c] * f.of_asked + delta[c] * f.of_delta);
                }
                for (int64_t i = 0; i < key_dim; ++i)
                    for (int c = 0; c < N; ++c) {
                        V s = get<V>(from + i * step + c * WIDTH);
                        set(to + i * to_step + c * WIDTH, s * f.decay + delta[c] * k[i]);
                    }
                from = to;
                step = to_step;
            }
            if (run.first == run.last && from != slot)
                for (int64_t i = 0; i < key_dim; ++i)
                    std::memcpy(slot + i * value_dim, from + i * value_dim, N * sizeof(V));
        }
    }

    int64_t pieces_of_head() const { return (value_dim + VECTORS * LANES - 1) / (VECTORS * LANES); }

    void correct(int64_t piece) const {
        int64_t head = piece / pieces_of_head(), at = piece % pieces_of_head() * VECTORS * LANES;
        int64_t end = at + VECTORS * LANES < value_dim ? at + VECTORS * LANES : value_dim;
        thread_local Scratch scratch;
        float* local = reinterpret_cast<float*>(scratch.get(sizeof(float) * key_dim * VECTORS * LANES));
        if (end - at == VECTORS * LANES) return correct<f32x16, VECTORS>(head, at, local);
        for (; at + LANES <= end; at += LANES) correct<f32x16, 1>(head, at, local);
        for (; at < end; ++at) correct<float, 1>(head, at, local);
    }

    void finish(int64_t row) const {
        const int64_t token = row / num_heads, head = row % num_heads;
        const float* x = mixed + token * conv_size() + 2 * key_size() + head * value_dim;
        const T* z = qkvz + token * (conv_size() + value_size()) + conv_size() + head * value_dim;
        T* to = out + row * value_dim;
        float factor = 1.0f / std::sqrt(sum_of_squares(x, value_dim) / float(value_dim) + eps);
        int64_t n = 0;
        for (; n + LANES <= value_dim; n += LANES) store(to + n, load(x + n) * factor * load(norm + n) * Silu()(load(z + n)));
        for (; n < value_dim; ++n) from_float(x[n] * factor * norm[n] * Silu()(splat(to_float(z[n])))[0], to + n);
    }

    void run() const {
        const int64_t size = conv_size();
        StateConv<T>{qkvz, taps, nullptr, conv, plan, mixed, size, size + value_size(), num_taps}.run(num_tokens);
        parallel_for(num_tokens, rows_per_thread(8 * key_size()), [&](int64_t begin, int64_t end) {
            for (int64_t token = begin; token < end; ++token) find_factors(token);
        });
        parallel_for_dynamic(num_heads * pieces_of_head(), [&](int64_t piece) { correct(piece); });
        parallel_for(num_tokens * num_heads, rows_per_thread(4 * value_dim), [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) finish(row);
        });
    }
};

template <class T>
void delta_net(const void* qkvz, const void* ba, const void* taps, const float* decay, const float* dt_bias,
               const float* norm, void* conv, float* states, const int64_t* plan, float* workspace, void* out,
               int64_t num_tokens, int64_t num_key_heads, int64_t num_heads, int64_t key_dim, int64_t value_dim,
               int64_t num_taps, float eps) {
    DeltaNet<T> net{static_cast<const T*>(qkvz), static_cast<const T*>(ba), static_cast<const T*>(taps), decay, dt_bias,
                    norm, static_cast<T*>(conv), states, plan, workspace, nullptr, static_cast<T*>(out), num_tokens,
                    num_key_heads, num_heads, key_dim, value_dim, num_taps, eps};
    net.factors = reinterpret_cast<Factors*>(workspace + num_tokens * net.conv_size());
    net.run();
}

}  // namespace
}  // namespace engine

// H value heads, Hk key heads, K = 2 * Hk * key_dim + H * value_dim channels.
//
// qkvz: [tokens, K + H * value_dim]; ba: [tokens, 2, H]: rates and decays before their functions; taps: [num_taps, K], 2
// to 64; conv: [.., num_taps - 1, K]; out: [tokens, H * value_dim]; these are bfloat16 if `is_bf16`, else float32. decay
// (-exp(A_log)), dt_bias: [H]; norm: [value_dim]; states: [.., H, key_dim, value_dim]; workspace: [tokens, K + 5 * H].
// plan: see `state_runs.py`.
EXPORT void gated_delta(const void* qkvz, const void* ba, const void* taps, const float* decay, const float* dt_bias,
                        const float* norm, void* conv, float* states, const int64_t* plan, float* workspace, void* out,
                        int64_t num_tokens, int64_t num_key_heads, int64_t num_heads, int64_t key_dim, int64_t value_dim,
                        int64_t num_taps, float eps, int is_bf16) {
    auto run = is_bf16 ? engine::delta_net<engine::bf16> : engine::delta_net<float>;
    run(qkvz, ba, taps, decay, dt_bias, norm, conv, states, plan, workspace, out, num_tokens, num_key_heads, num_heads,
        key_dim, value_dim, num_taps, eps);
}

RECORDABLE(gated_delta)
