// From logits to tokens and their logprobs, without sorting the vocabulary. Rows are independent: one thread computes
// each row, and its result does not depend on the others. A row of 49k logits is 200 KB and stays in L2; a pass over it
// takes a few us, so one row is not divided among threads.
//
//   greedy      one pass: the largest logit, and whether all are finite; then the first of its block that equals it
//   draw        the largest sum of logit and noise (model_runner/sampling/noise.py). Its logarithms are computed
//               only where a cheap bound does not exclude the token: for some dozens of 49k
//   filters     on a few hundred candidates (sampler_filters.h)
//
// The filters and their order are those of model_runner/sampling/torch_backend.py.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "parallel.h"
#include "sampler_filters.h"

namespace engine::sampling {
namespace {

// ---------------------------------------------------------------- drawing

// The bits of model_runner/sampling/noise.py: 31 per token.
inline u32x16 noise_bits(u32x16 tokens, const uint32_t* keys) {
    u32x16 x = tokens * 0x9e3779b1u ^ keys[0];
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = ((x ^ (x >> 15)) + keys[1]) * 0x846ca68bu;
    return (x ^ (x >> 16)) & 0x7fffffffu;
}

constexpr float UNIT = 0x1p-31f * (1 - 0x1p-23f);

inline f32x16 uniform(u32x16 bits) { return (to_float((i32x16)bits) + 0.5f) * UNIT; }

inline float gumbel(uint32_t bits) {
    float u = (float(int32_t(bits)) + 0.5f) * UNIT;
    return float(-std::log(-std::log1p(-double(u))));
}

// The id with the largest sum of value and noise among values >= `floor`, the first one among equals.
//
// ids: ids of the values; null if the n-th id is n. `values` is padded to a multiple of 16 with minus infinity.
int64_t draw(const float* values, const int32_t* ids, int64_t count, float floor, const uint32_t* keys) {
    float best = -INFINITE;
    int64_t best_id = ids == nullptr ? 0 : ids[0];
    // Noise is -log(-log1p(-u)), and -log1p(-u) is at least u: only where u is at most exp(value - best) can a sum
    // reach the best one. `reach` is -best plus a margin larger than the rounding error.
    float reach = INFINITE;
    for (int64_t n = 0; n < count; n += LANES) {
        f32x16 v = load(values + n);
        u32x16 tokens = lanes() + uint32_t(n);
        if (ids != nullptr) get(tokens, ids + n);
        u32x16 noise = noise_bits(tokens, keys);
        uint32_t bits = bits_at_least(exp2((v + reach) * LOG2_E), uniform(noise)) & bits_at_least(v, splat(floor));
        for (; bits; bits &= bits - 1) {
            int lane = __builtin_ctz(bits);
            float score = gumbel(noise[lane]) + v[lane];
            if (score > best) {
                best = score;
                best_id = tokens[lane];
                reach = 1e-4f + 1e-6f * std::fabs(best) - best;
            }
        }
    }
    return best_id;
}

// ---------------------------------------------------------------- a row

class Workspace {
  public:
    explicit Workspace(int64_t size) : room_(padded(size) + LANES), groups_(num_groups(size)) {
        static thread_local Scratch scratch;
        memory_ = reinterpret_cast<float*>(scratch.get(sizeof(float) * (6 * room_ + groups_)));
    }

    float* edited() const { return memory_; }
    float* scaled() const { return memory_ + room_; }
    Candidates candidates() const {
        float* from = memory_ + 2 * room_;
        return {0, from, reinterpret_cast<int32_t*>(from + room_), reinterpret_cast<int32_t*>(from + 2 * room_),
                from + 3 * room_};
    }
    float* groups() const { return memory_ + 6 * room_; }

  private:
    int64_t room_, groups_;
    float* memory_;
};

Peak choose_row(const Batch& batch, int64_t index) {
    const float* x = batch.logits + index * batch.stride;
    if (batch.rows == nullptr) return find_peak(x, batch.size);
    const Row& row = batch.rows[index];
    Workspace work(batch.size);
    bool finite = true;
    if (row.edited) {
        finite = edit(row, batch, x, work.edited());
        x = work.edited();
    }
    Peak peak;
    if (!row.draws) {
        peak = find_peak(x, batch.size);
    } else {
        Survey seen = survey(x, batch.size, row.temperature, work.scaled(), work.groups());
        peak.finite = seen.finite;
        bool numbers = row.edited ? finite : seen.finite;  // a mask's minus infinities do not count as model errors
        if (!numbers || !std::isfinite(seen.largest)) {  // NaN or infinite logits, or all tokens forbidden
            peak.token = find_peak(work.scaled(), batch.size).token;
        } else if (row.top_k > 0 || row.top_p < 1.0f || row.log_min_p > -INFINITE) {
            Candidates c = work.candidates();
            float floor = filter(row, work.scaled(), batch.size, seen.largest, work.groups(), c);
            peak.token = draw(c.values, c.ids, c.count, floor, row.keys);
        } else {
            peak.token = draw(work.scaled(), nullptr, batch.size, -INFINITE, row.keys);
        }
    }
    if (row.edited) peak.finite = finite;
    if (row.slot >= 0) ++batch.in_output[row.slot * batch.size + peak.token];
    return peak;
}

// ---------------------------------------------------------------- logprobs

// An integer that orders candidates by value, then by descending id.
inline uint64_t rank(float value, int32_t id) {
    return uint64_t(uint32_t(order_key(value)) ^ 0x80000000u) << 32 | uint32_t(~id);
}

// In float64: float32 would lose precision where the likeliest token has nearly all of the mass.
double normaliser(const float* x, int64_t size, float largest) {
    return largest + std::log(weigh<false>(x, size, largest).total);
}

void top_tokens(const float* x, int64_t size, double normaliser, int64_t k, float* groups, Candidates& c, int32_t* ids,
                float* logprobs) {
    if (!std::isnan(normaliser)) collect(x, size, bound_of_top_k(groups, size, k), c);  // NaN has no order
    uint64_t* ranks = reinterpret_cast<uint64_t*>(c.keys);  // overlays the keys and the weights after them
    for (int64_t n = 0; n < c.count; ++n) ranks[n] = rank(c.values[n], c.ids[n]);
    int64_t found = std::min(k, c.count);
    std::partial_sort(ranks, ranks + found, ranks + c.count, std::greater<uint64_t>());
    for (int64_t n = 0; n < found; ++n) {
        ids[n] = int32_t(~uint32_t(ranks[n]));
        logprobs[n] = float(x[ids[n]] - normaliser);
    }
    for (int64_t n = found; n < k; ++n) {  // the row contains NaN
        ids[n] = 0;
        logprobs[n] = std::numeric_limits<float>::quiet_NaN();
    }
}

}  // namespace
}  // namespace engine::sampling

// Samples one token per row. logits: [num_rows][size] float32, rows `stride` elements apart; token_ids: [num_rows]
// int64; finite: [num_rows], whether all logits of the model are finite. rows: [num_rows] Row, or null if all rows take
// the argmax of the model's logits; in_prompt to mask_stride are then not read.
EXPORT void sample_tokens(const float* logits, int64_t stride, const void* rows, const uint8_t* in_prompt,
                          int32_t* in_output, const int32_t* edit_ids, const float* edit_values, const void* masks,
                          int64_t mask_stride, int64_t* token_ids, uint8_t* finite, int64_t num_rows, int64_t size) {
    using namespace engine;
    using namespace engine::sampling;
    Batch batch{logits, stride, static_cast<const Row*>(rows), in_prompt, in_output, edit_ids, edit_values,
                static_cast<const uint32_t*>(masks), mask_stride, token_ids, finite, size};
    parallel_for_dynamic(num_rows, [&](int64_t index) {
        Peak peak = choose_row(batch, index);
        batch.token_ids[index] = peak.token;
        batch.finite[index] = peak.finite;
    });
}

// Logprobs of row indices[n] of the logits, and of its token token_ids[indices[n]], for each n in [0, count).
EXPORT void token_logprobs(const float* logits, int64_t stride, const int64_t* indices, const int64_t* token_ids,
                           float* token, int32_t* top_ids, float* top, int64_t count, int64_t size, int64_t top_k) {
    using namespace engine;
    using namespace engine::sampling;
    parallel_for_dynamic(count, [&](int64_t n) {
        const float* x = logits + indices[n] * stride;
        Workspace work(size);
        Survey seen = survey(x, size, 1.0f, nullptr, work.groups());
        double log_total = normaliser(x, size, seen.largest);
        token[n] = float(x[token_ids[indices[n]]] - log_total);
        if (top_k == 0) return;
        Candidates c = work.candidates();
        top_tokens(x, size, log_total, top_k, work.groups(), c, top_ids + n * top_k, top + n * top_k);
    });
}
