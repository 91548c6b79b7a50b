// The work before latent attention besides matmuls: the norm of each token's latent, rotary of the queries' ends and of
// the row's end, and the store of the row into the KV pool. In float32, rounded once; one thread computes each token.

#include "parallel.h"
#include "program.h"
#include "rows.h"
#include "simd.h"

namespace engine {
namespace {

struct Latents {
    const void* q;
    int64_t q_stride, q_head_stride;  // elements from a token, and from a head, to the next
    void* q_out;
    int64_t q_out_stride, q_out_head_stride;
    const void *rows, *norm, *cos, *sin;
    void* pool;
    const int64_t* loc;
    int64_t num_tokens, num_heads, latent_size, rotary_dim;
    float eps;
    bool interleaved;
};

// Pairs are neighbors if `interleaved`, else elements of the two halves.
template <class T, class A>
void rotate_into(const T* from, const A* cos, const A* sin, int64_t rotary_dim, bool interleaved, T* to) {
    int64_t half = rotary_dim / 2, step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
    for (int64_t n = 0; n < half; ++n) {
        float a = to_float(from[n * step]), b = to_float(from[n * step + apart]);
        from_float(a * to_float(cos[n]) + b * to_float(sin[n]), to + n * step);
        from_float(b * to_float(cos[half + n]) + a * to_float(sin[half + n]), to + n * step + apart);
    }
}

// T: type of activations and pool, A: of the angles, W: of the norm's weight.
template <class T, class A, class W>
void store_latents(const Latents& in) {
    int64_t row_size = in.latent_size + in.rotary_dim, numbers = row_size + in.num_heads * in.rotary_dim;
    parallel_for(in.num_tokens, rows_per_thread(numbers), [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            const A* cos = static_cast<const A*>(in.cos) + token * in.rotary_dim;
            const A* sin = static_cast<const A*>(in.sin) + token * in.rotary_dim;
            const T* q = static_cast<const T*>(in.q) + token * in.q_stride;
            T* q_out = static_cast<T*>(in.q_out) + token * in.q_out_stride;
            for (int64_t h = 0; h < in.num_heads; ++h)
                rotate_into(q + h * in.q_head_stride, cos, sin, in.rotary_dim, in.interleaved,
                            q_out + h * in.q_out_head_stride);
            const T* row = static_cast<const T*>(in.rows) + token * row_size;
            T* to = static_cast<T*>(in.pool) + in.loc[token] * row_size;
            norm_row(row, static_cast<const W*>(in.norm), in.eps, to, in.latent_size);
            rotate_into(row + in.latent_size, cos, sin, in.rotary_dim, in.interleaved, to + in.latent_size);
        }
    });
}

}  // namespace
}  // namespace engine

// q, q_out: [num_tokens][num_heads][rotary_dim] with these strides. rows: [num_tokens][latent_size + rotary_dim], pool:
// [slots][latent_size + rotary_dim], cos, sin: [num_tokens][rotary_dim], all contiguous. Types as in elementwise.cpp.
EXPORT void store_latent(const void* q, int64_t q_stride, int64_t q_head_stride, void* q_out, int64_t q_out_stride,
                         int64_t q_out_head_stride, const void* rows, const void* norm, const void* cos, const void* sin,
                         void* pool, const int64_t* loc, int64_t num_tokens, int64_t num_heads, int64_t latent_size,
                         int64_t rotary_dim, float eps, int interleaved, int is_bf16, int angles_are_bf16,
                         int norm_is_bf16) {
    using namespace engine;
    Latents in{q,   q_stride,   q_head_stride, q_out,       q_out_stride, q_out_head_stride, rows, norm, cos, sin, pool,
               loc, num_tokens, num_heads,     latent_size, rotary_dim,   eps,               interleaved != 0};
    if (!is_bf16)
        store_latents<float, float, float>(in);
    else if (angles_are_bf16)
        norm_is_bf16 ? store_latents<bf16, bf16, bf16>(in) : store_latents<bf16, bf16, float>(in);
    else
        norm_is_bf16 ? store_latents<bf16, float, bf16>(in) : store_latents<bf16, float, float>(in);
}

RECORDABLE(store_latent)
