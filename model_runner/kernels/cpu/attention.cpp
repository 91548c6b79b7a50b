// Attention over the KV pool, read in place through the slot table, following the plan of `attention_plan.h`.

#include "attention_inputs.h"
#include "attention_stream.h"
#include "attention_tile.h"
#include "parallel.h"
#include "program.h"

namespace engine {
namespace {

constexpr int64_t STREAM_SHARES = 32;  // batches of stream items per step, at least, before batches get larger than one
constexpr int64_t MAX_STREAMS = 8;     // items per batch, at most

// Merges the partial results of one token, in order.
template <class T, class KV>
void merge(const AttentionInputs<T, KV>& in, int64_t token, int64_t first, int64_t count) {
    int64_t dim = in.step.head_dim;
    for (int64_t head = 0; head < in.step.num_heads(); ++head) {
        float sink = in.sink(head), most = sink;
        for (int64_t n = 0; n < count; ++n) most = std::max(most, in.result(first + n, head)[0]);
        float total = sink == NOTHING ? 0.0f : exp2_small(sink - most);
        for (int64_t n = 0; n < count; ++n) {
            float* part = in.result(first + n, head);
            part[0] = part[0] == most ? 1.0f : exp2_small(part[0] - most);  // from here on its factor
            total += part[0] * part[1];
        }
        T* to = in.out + (token * in.step.num_heads() + head) * dim;
        for (int64_t d = 0; d < dim; d += LANES) {
            f32x16 values = {};
            for (int64_t n = 0; n < count; ++n) {
                const float* part = in.result(first + n, head);
                values += load(part + LANES + d) * part[0];
            }
            store(to + d, values * (1.0f / total));
        }
    }
}

// Blocks that several tile items read are packed first. Stream items follow the tile items and are dispatched several
// at a time, so that a thread can prefetch the first rows of the next item while it computes the current one.
template <class T, class KV>
void attend(const AttentionInputs<T, KV>& in) {
    const Step& step = in.step;
    parallel_for_dynamic(step.num_blocks, [&](int64_t n) { Packer<T, KV>(in).pack_for_all(n); });
    int64_t num_tiles = step.num_tiles, num_streams = step.num_items - num_tiles;
    int64_t together = std::clamp<int64_t>(num_streams / STREAM_SHARES, 1, MAX_STREAMS);
    parallel_for_dynamic(num_tiles + (num_streams + together - 1) / together, [&](int64_t n) {
        FlushDenormals flush;
        if (n < num_tiles) {
            Tile<T, KV>(in).run(step.items[n]);
            return;
        }
        const Item* first = step.items + num_tiles + (n - num_tiles) * together;
        const Item* last = std::min(first + together, step.items + step.num_items);
        Stream<T, KV> stream(in);
        for (const Item* item = first; item < last; ++item) stream.run(*item, item + 1 < last ? item + 1 : nullptr);
    });
    parallel_for(step.num_merges, 16, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) {
            const int64_t* mine = step.merges + 3 * n;
            merge(in, mine[0], mine[1], mine[2]);
        }
    });
}

}  // namespace
}  // namespace engine

// plan: from new_attention_plan. q: [tokens][heads][head_dim], rows `q_stride` elements apart; out:
// [tokens][heads][head_dim], contiguous; both bfloat16 if `is_bf16`, else float. k, v: [slots][KV heads][head_dim], of
// the same type, or int8 if k_scale and v_scale ([slots][KV heads] float) are not null. sinks: [heads], or null.
EXPORT void attend(const void* plan, const void* q, int64_t q_stride, const void* k, const void* v,
                   const float* k_scale, const float* v_scale, const float* sinks, void* out, int is_bf16) {
    using namespace engine;
    const Step& step = *static_cast<const Step*>(plan);
    auto run = [&]<class T, class KV>(T, KV) {
        attend(AttentionInputs<T, KV>{step, static_cast<const T*>(q), q_stride, static_cast<const KV*>(k),
                                      static_cast<const KV*>(v), k_scale, v_scale, sinks, static_cast<T*>(out)});
    };
    if (k_scale != nullptr)
        is_bf16 ? run(bf16{}, int8_t{}) : run(float{}, int8_t{});
    else
        is_bf16 ? run(bf16{}, bf16{}) : run(float{}, float{});
}

RECORDABLE(attend)
