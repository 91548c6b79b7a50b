// x[:, h] @ weight[h].T for each head h, in bfloat16: a small matmul per head, as latent attention needs between its
// projections and attention. Each weight is packed by pack_linear.

#include <algorithm>

#include "linear.h"
#include "matmul_parts.h"
#include "parallel.h"
#include "program.h"

namespace engine {
namespace {

constexpr int64_t MIN_BYTES = 1 << 16;  // weight per thread, at least: less does not pay for waking it

}  // namespace
}  // namespace engine

// x: [num_tokens][num_heads][inputs] bfloat16, out: [num_tokens][num_heads][outputs]; tokens and heads are `..._stride`
// and `..._head_stride` elements apart. packed: the weights of the heads, one after the other, `packed_bytes` each.
EXPORT void head_matmul(const void* x, int64_t x_stride, int64_t x_head_stride, const void* packed, int64_t packed_bytes,
                        void* out, int64_t out_stride, int64_t out_head_stride, int64_t num_tokens, int64_t num_heads,
                        int64_t inputs, int64_t outputs) {
    using namespace engine;
    int64_t vectors = padded(outputs) / LANES, parts = (vectors + PART_VECTORS - 1) / PART_VECTORS;
    int64_t grain = MIN_BYTES / (PART_VECTORS * LANES * inputs * 2) + 1;
    if (num_tokens == 0) return;
    parallel_for(num_heads * parts, grain, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end;) {
            int64_t head = n / parts, stop = std::min(end, (head + 1) * parts);
            LinearCall call = {{nullptr, static_cast<bf16*>(out) + head * out_head_stride, BF16, outputs, out_stride},
                               static_cast<const bf16*>(x) + head * x_head_stride,
                               x_stride,
                               reinterpret_cast<const uint32_t*>(static_cast<const char*>(packed) + head * packed_bytes),
                               num_tokens,
                               inputs};
            multiply_part(call, n % parts * PART_VECTORS, std::min((stop - head * parts) * PART_VECTORS, vectors));
            n = stop;
        }
    });
}

RECORDABLE(head_matmul)
