// A mixture of experts: a router sends each token to a few of a layer's many small MLPs ("experts").
//
//   route             the experts of a token and their weights ("shares")
//   group_tokens      one row per token and expert; the rows of an expert are contiguous
//   take_tokens       x, row by row, or times the shares
//   multiply_experts  each row times a weight of its expert
//   activate_experts  between two of them: biases and the activation, where the matmul does not apply it
//   add_shares        each token's rows, weighted and added up; without the weights if they were in take_tokens
//
// The work of all experts is divided as that of one matmul: few tokens go to few experts each, and each thread reads
// one contiguous range of their weights, once. Every row is multiplied as in a matmul of its own, so the bits of a
// token do not depend on the routing of others. (Exception, with tiles: rows of 4- and 8-bit weights depend on whether
// their expert has `tiles_from` rows.)

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "block_tokens.h"
#include "blocks.h"
#include "linear.h"
#include "parallel.h"
#include "matmul_parts.h"
#include "program.h"
#include "rows.h"
#include "simd.h"

namespace engine {
namespace {

constexpr int64_t MIN_LOGITS = 1 << 11;   // logits per thread that routes, at least
constexpr int64_t MIN_BYTES = 1 << 16;    // weight per thread, at least: less does not pay for waking it
constexpr int64_t ROW_TILE_ROWS = 6;         // rows that take about as long as one
constexpr int64_t PART_OUTPUTS = PART_VECTORS * LANES;

int64_t divided_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

// One expert's weight; Python fills it in (native_experts.py).
struct ExpertWeight {
    enum Kind : int32_t { PACKED, COMPRESSED, BLOCKS, SUPERBLOCKS };

    const void* packed;
    Kind kind;
    int32_t bits, zero, has_minima, scale_inputs;  // BLOCKS and SUPERBLOCKS only
    float factor;
    const uint8_t* table;  // null: the integers are the values

    bool is_in_blocks() const { return kind == BLOCKS || kind == SUPERBLOCKS; }
};
static_assert(sizeof(ExpertWeight) == 40 && offsetof(ExpertWeight, bits) == 12 && offsetof(ExpertWeight, factor) == 28);

// The rows, one per token and expert, sorted by expert, then by token.
struct Groups {
    int32_t* starts;  // [experts + 1]: first row of each expert
    int32_t* costs;   // [experts + 1]: row tiles of the experts before
    int32_t* slots;   // [rows]: the token and its n-th expert, token * active + n
    int32_t* rows;    // [slots]: the row of a slot

    Groups(void* memory, int64_t num_experts, int64_t num_rows)
        : starts(static_cast<int32_t*>(memory)),
          costs(starts + num_experts + 1),
          slots(costs + num_experts + 1),
          rows(slots + num_rows) {}

    static int64_t bytes(int64_t num_experts, int64_t num_rows) {
        return (2 * (num_experts + 1) + 2 * num_rows) * int64_t(sizeof(int32_t));
    }

    int64_t num_rows_of(int64_t expert) const { return starts[expert + 1] - starts[expert]; }
    int64_t expert_of(int64_t row, int64_t num_experts) const {
        return std::upper_bound(starts, starts + num_experts, int32_t(row)) - starts - 1;
    }
};

// ---------------------------------------------------------------- routing

enum Scores : int { SOFTMAX, SIGMOID, MIXER };

// What `Routing` in Python says about the choice of a token's experts.
struct Router {
    int64_t num_experts, num_active;
    Scores scores;
    const float* bias;  // null: none
    int64_t num_groups, num_active_groups, group_best;
    bool normalize;
    float scale, tolerance;

    // Floats of `memory`: the scores, the numbers to choose by, and the groups.
    int64_t memory_floats() const { return 2 * padded(num_experts) + 2 * num_groups; }

    // The experts of one token, largest number first; among equals the first expert.
    // NaN and plus infinity give shares that are NaN, but always valid experts.
    template <class T>
    void route(const T* logits, float* memory, int64_t* ids, float* shares) const {
        for (int64_t n = 0; n < num_experts; ++n) memory[n] = to_float(logits[n]);
        if (scores == MIXER) return mix(memory, ids, shares);
        float *choice = memory + padded(num_experts), *groups = choice + padded(num_experts);
        std::copy(memory, memory + num_experts, choice);  // the order of the logits is that of the scores
        float total = make_scores(memory);
        bool by_score = bias != nullptr || group_best > 1;
        if (by_score)
            for (int64_t n = 0; n < num_experts; ++n) choice[n] = memory[n] / total + (bias == nullptr ? 0.0f : bias[n]);
        if (num_active_groups < num_groups) drop_groups(choice, groups);
        choose(choice, num_experts, num_active, ids, shares);
        for (int64_t n = 0; n < num_active; ++n) shares[n] = memory[ids[n]] / total;
        float taken = 0.0f;
        for (int64_t n = 0; n < num_active; ++n) taken += shares[n];
        float factor = normalize ? scale / (taken + LEAST_SUM) : scale;
        if (normalize || scale != 1.0f)
            for (int64_t n = 0; n < num_active; ++n) shares[n] *= factor;
    }

  private:
    static constexpr int64_t MOST_GROUP_BEST = 2;
    static constexpr float LEAST_SUM = 1e-20f;  // the sum of sigmoids may be zero

    // Turns logits into scores, times the result.
    float make_scores(float* memory) const {
        int64_t all = padded(num_experts);
        float most = -__builtin_inff();
        for (int64_t n = 0; n < num_experts; ++n) most = memory[n] > most ? memory[n] : most;
        std::fill(memory + num_experts, memory + all, -__builtin_inff());
        if (scores == SIGMOID) {
            for (int64_t n = 0; n < all; n += LANES) store(memory + n, 1.0f / (1.0f + exp2(load(memory + n) * -1.44269504f)));
            return 1.0f;
        }
        f32x16 sums = {};
        for (int64_t n = 0; n < all; n += LANES) {
            f32x16 power = exp2((load(memory + n) - most) * 1.44269504f);
            sums += power;
            store(memory + n, power);
        }
        return sum(sums);
    }

    // Sets the numbers of groups that are not chosen to minus infinity; `groups`: [2][num_groups].
    void drop_groups(float* choice, float* groups) const {
        int64_t each = num_experts / num_groups, ids[MOST_GROUP_BEST];
        float best[MOST_GROUP_BEST];
        for (int64_t g = 0; g < num_groups; ++g) {
            choose(choice + g * each, each, group_best, ids, best);
            groups[g] = 0.0f;
            for (int64_t n = 0; n < group_best; ++n) groups[g] += best[n];
        }
        float* is_active = groups + num_groups;
        std::fill(is_active, is_active + num_groups, 0.0f);
        for (int64_t n = 0; n < num_active_groups; ++n) {
            int64_t most = -1;
            for (int64_t g = 0; g < num_groups; ++g)
                if (is_active[g] == 0.0f && (most < 0 || groups[g] > groups[most])) most = g;
            is_active[most] = 1.0f;
        }
        for (int64_t g = 0; g < num_groups; ++g)
            if (is_active[g] == 0.0f) std::fill(choice + g * each, choice + (g + 1) * each, -__builtin_inff());
    }

    // The `wanted` largest of `count` numbers, the largest first, with their indices.
    static void choose(const float* numbers, int64_t count, int64_t wanted, int64_t* ids, float* largest) {
        for (int64_t n = 0; n < count; ++n) insert(numbers[n], n, std::min(n, wanted), wanted, ids, largest);
    }

    // Inserts into the sorted list of `count` numbers.
    static void insert(float number, int64_t index, int64_t count, int64_t wanted, int64_t* ids, float* numbers) {
        int64_t at = count;
        while (at > 0 && number > numbers[at - 1]) --at;
        if (at == wanted) return;
        for (int64_t n = std::min(count, wanted - 1); n > at; --n) ids[n] = ids[n - 1], numbers[n] = numbers[n - 1];
        ids[at] = index;
        numbers[at] = number;
    }

    // Two experts, each with its share of those near it; the second one without the first.
    void mix(const float* logits, int64_t* ids, float* shares) const {
        for (int64_t turn = 0; turn < 2; ++turn) {
            int64_t best = turn == 0 || ids[0] != 0 ? 0 : 1;
            for (int64_t n = 0; n < num_experts; ++n)
                if ((turn == 0 || n != ids[0]) && logits[n] > logits[best]) best = n;
            float most = logits[best], total = 0.0f;
            for (int64_t n = 0; n < num_experts; ++n) {
                float size = std::max(__builtin_fabsf(logits[n]), most);
                bool is_left = turn == 0 || n != ids[0], is_far = (most - logits[n]) / size > tolerance;
                if (is_left && !is_far) total += exp2(splat((logits[n] - most) * 1.44269504f))[0];
            }
            ids[turn] = best;
            shares[turn] = 1.0f / total;
        }
    }
};

// ---------------------------------------------------------------- matmuls

// Multiplies rows with the weights of their experts.
struct ExpertProducts {
    const ExpertWeight* weights;
    Groups groups;
    const bf16* x;  // [rows][inputs]
    char* out;
    void* workspace;  // null: no weight is in blocks
    int64_t num_rows, num_experts, inputs, outputs;
    Form form;
    int64_t tiles_from;

    int64_t parts() const { return divided_up(outputs, PART_OUTPUTS); }
    Quantized quantized() const { return Quantized(workspace, num_rows, inputs); }

    Output output_of(int64_t expert) const {
        int64_t row_bytes = form == GATED ? outputs / 2 * int64_t(sizeof(bf16)) : outputs * int64_t(sizeof(bf16));
        return {nullptr, out + groups.starts[expert] * row_bytes, form, outputs};
    }

    LinearCall linear_call(int64_t expert) const {
        const ExpertWeight& weight = weights[expert];
        LinearCall call = {output_of(expert), x + groups.starts[expert] * inputs, inputs,
                           static_cast<const uint32_t*>(weight.packed), groups.num_rows_of(expert), inputs};
        if (weight.kind == ExpertWeight::COMPRESSED) call.panel_starts = static_cast<const int64_t*>(weight.packed);
        return call;
    }

    BlockCall block_call(int64_t expert) const {
        const ExpertWeight& weight = weights[expert];
        return {output_of(expert), x + groups.starts[expert] * inputs, inputs,
                static_cast<const uint8_t*>(weight.packed), groups.num_rows_of(expert), inputs,
                weight.bits, weight.zero, weight.has_minima != 0, weight.scale_inputs, weight.factor,
                weight.table, weight.kind == ExpertWeight::SUPERBLOCKS};
    }

    void quantize_rows(int64_t begin, int64_t end) const {
        Quantized to = quantized();
        int64_t expert = groups.expert_of(begin, num_experts);
        for (int64_t row = begin; row < end; ++expert) {
            int64_t first = groups.starts[expert], last = std::min<int64_t>(groups.starts[expert + 1], end);
            if (weights[expert].is_in_blocks() && !part_takes_tiles(groups.num_rows_of(expert), tiles_from))
                for (BlockCall call = block_call(expert); row < last; ++row)
                    quantize(call, row - first, to.from(first, inputs));
            row = std::max(row, last);
        }
    }

    // The parts [begin, end) of one expert's outputs.
    void multiply(int64_t expert, int64_t begin, int64_t end) const {
        begin *= PART_VECTORS;
        end = std::min(end * PART_VECTORS, padded(outputs) / LANES);
        switch (weights[expert].kind) {
            case ExpertWeight::PACKED: return multiply_part(linear_call(expert), begin, end);
            case ExpertWeight::COMPRESSED: return multiply_compressed_part(linear_call(expert), begin, end);
            case ExpertWeight::BLOCKS:
            case ExpertWeight::SUPERBLOCKS:
                return multiply_blocks_part(block_call(expert), quantized().from(groups.starts[expert], inputs), begin, end,
                                            tiles_from);
        }
    }

    // Pieces [begin, end) of the parts of all experts with rows, cut into about equal amounts of work.
    void multiply_pieces(int64_t begin, int64_t end, int64_t pieces) const {
        int64_t all = groups.costs[num_experts] * parts(), from = all * begin / pieces, to = all * end / pieces;
        const int32_t* found = std::upper_bound(groups.costs, groups.costs + num_experts, int32_t(from / parts()));
        for (int64_t expert = found - groups.costs - 1; expert < num_experts; ++expert) {
            int64_t base = groups.costs[expert] * parts(), cost = groups.costs[expert + 1] - groups.costs[expert];
            if (base >= to) return;
            int64_t first = from <= base ? 0 : divided_up(from - base, std::max<int64_t>(cost, 1));
            int64_t last = std::min(parts(), divided_up(to - base, std::max<int64_t>(cost, 1)));
            if (cost > 0 && first < last) multiply(expert, first, last);
        }
    }

    void run() const {
        if (num_rows == 0) return;
        if (workspace != nullptr)
            parallel_for(num_rows, divided_up(MIN_NUMBERS, inputs), [&](int64_t begin, int64_t end) { quantize_rows(begin, end); });
        int64_t pieces = std::min(num_rows, num_experts) * parts(), least_bytes = PART_OUTPUTS * inputs / 2;
        parallel_for(pieces, divided_up(MIN_BYTES, least_bytes),
                  [&](int64_t begin, int64_t end) { multiply_pieces(begin, end, pieces); });
    }
};

}  // namespace
}  // namespace engine

// logits: [tokens][experts] bfloat16 if `is_bf16`, else float32; bias: [experts] or null; ids (int64), shares (float32):
// [tokens][active]; scores: `Scores`. The others are those of `Router`.
EXPORT void route(const void* logits, const float* bias, int64_t* ids, float* shares, int64_t num_tokens,
                  int64_t num_experts, int64_t num_active, int64_t num_groups, int64_t num_active_groups,
                  int64_t group_best, int scores, int normalize, float scale, float tolerance, int is_bf16) {
    using namespace engine;
    Router router = {num_experts, num_active, Scores(scores), bias, num_groups, num_active_groups, group_best,
                     normalize != 0, scale, tolerance};
    parallel_for(num_tokens, divided_up(MIN_LOGITS, num_experts), [&](int64_t begin, int64_t end) {
        thread_local Scratch scratch;
        float* memory = reinterpret_cast<float*>(scratch.get(router.memory_floats() * sizeof(float)));
        for (int64_t token = begin; token < end; ++token) {
            int64_t* to = ids + token * num_active;
            float* parts = shares + token * num_active;
            if (is_bf16)
                router.route(static_cast<const bf16*>(logits) + token * num_experts, memory, to, parts);
            else
                router.route(static_cast<const float*>(logits) + token * num_experts, memory, to, parts);
        }
    });
}

// Bytes of the result of group_tokens; num_rows = tokens * active experts.
EXPORT int64_t token_groups_bytes(int64_t num_rows, int64_t num_experts) {
    return engine::Groups::bytes(num_experts, num_rows);
}

EXPORT void group_tokens(const int64_t* ids, void* groups_, int64_t num_rows, int64_t num_experts) {
    using namespace engine;
    parallel_for_dynamic(1, [&](int64_t) {
        Groups groups(groups_, num_experts, num_rows);
        std::memset(groups.starts, 0, (num_experts + 1) * sizeof(int32_t));
        for (int64_t slot = 0; slot < num_rows; ++slot) ++groups.starts[ids[slot] + 1];
        groups.costs[0] = 0;
        for (int64_t expert = 0; expert < num_experts; ++expert) {
            groups.costs[expert + 1] = groups.costs[expert] + int32_t(divided_up(groups.starts[expert + 1], ROW_TILE_ROWS));
            groups.starts[expert + 1] += groups.starts[expert];
        }
        for (int64_t slot = num_rows - 1; slot >= 0; --slot) {  // turns the ends of the groups into their starts
            int32_t row = --groups.starts[ids[slot] + 1];
            groups.slots[row] = int32_t(slot);
            groups.rows[slot] = row;
        }
        std::memmove(groups.starts, groups.starts + 1, num_experts * sizeof(int32_t));
        groups.starts[num_experts] = int32_t(num_rows);
    });
}

// x: [tokens][inputs] bfloat16, rows `x_stride` elements apart; shares: [tokens][active], factors of the rows, or null;
// out: [rows][inputs] bfloat16, contiguous.
EXPORT void take_tokens(const void* x_, int64_t x_stride, const float* shares, void* groups_, void* out_,
                        int64_t num_rows, int64_t num_experts, int64_t num_active, int64_t inputs) {
    using namespace engine;
    Groups groups(groups_, num_experts, num_rows);
    const bf16* x = static_cast<const bf16*>(x_);
    bf16* out = static_cast<bf16*>(out_);
    parallel_for(num_rows, divided_up(MIN_NUMBERS, inputs), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const bf16* from = x + groups.slots[row] / num_active * x_stride;
            if (shares == nullptr)
                std::memcpy(out + row * inputs, from, inputs * sizeof(bf16));
            else
                scale_row(from, out + row * inputs, inputs, shares[groups.slots[row]]);
        }
    });
}

// table: [experts] ExpertWeight, of weights [outputs, inputs]; x: [rows][inputs] bfloat16, contiguous; workspace:
// blocks_workspace_bytes for this number of rows without tiles, or null if no weight is in blocks; form: see output.h,
// not FLOAT.
EXPORT void multiply_experts(const void* table, void* groups, const void* x, void* out, void* workspace,
                             int64_t num_rows, int64_t num_experts, int64_t inputs, int64_t outputs, int form,
                             int64_t tiles_from) {
    using namespace engine;
    ExpertProducts{static_cast<const ExpertWeight*>(table), Groups(groups, num_experts, num_rows),
                   static_cast<const bf16*>(x), static_cast<char*>(out), workspace, num_rows, num_experts, inputs, outputs,
                   Form(form), tiles_from}
        .run();
}

// `ClampedSwiGLU`. hidden: [rows][2 * inner], the gates first; bias: [experts][2 * inner] or null; out: [rows][inner];
// all bfloat16.
EXPORT void activate_experts(const void* hidden_, const void* bias_, void* groups_, void* out_, int64_t num_rows,
                             int64_t num_experts, int64_t inner, float alpha, float limit, float gate_limit,
                             float offset) {
    using namespace engine;
    Groups groups(groups_, num_experts, num_rows);
    const bf16 *hidden = static_cast<const bf16*>(hidden_), *bias = static_cast<const bf16*>(bias_);
    bf16* out = static_cast<bf16*>(out_);
    const ClampedSwiGLU activate{alpha, limit, gate_limit, offset};
    parallel_for(num_rows, divided_up(MIN_NUMBERS, inner), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const bf16 *gate = hidden + row * 2 * inner, *up = gate + inner;
            const bf16* gate_bias = bias == nullptr ? nullptr : bias + groups.expert_of(row, num_experts) * 2 * inner;
            bf16* to = out + row * inner;
            int64_t n = 0;
            for (; n + LANES <= inner; n += LANES) {
                f32x16 g = load(gate + n), u = load(up + n);
                if (gate_bias != nullptr) g += load(gate_bias + n), u += load(gate_bias + inner + n);
                store(to + n, activate(g, u));
            }
            for (; n < inner; ++n) {
                float g = to_float(gate[n]), u = to_float(up[n]);
                if (gate_bias != nullptr) g += to_float(gate_bias[n]), u += to_float(gate_bias[inner + n]);
                from_float(activate(splat(g), splat(u))[0], to + n);
            }
        }
    });
}

// out[token] = sum of its rows times their shares (null: 1), in float32; rows: [rows][size], out: [tokens][size]; bias:
// [experts][size], added to each row, or null; all bfloat16.
EXPORT void add_shares(const void* rows_, const float* shares, const void* bias_, void* groups_, void* out_,
                       int64_t num_tokens, int64_t num_experts, int64_t num_active, int64_t size) {
    using namespace engine;
    const bf16* bias = static_cast<const bf16*>(bias_);
    Groups groups(groups_, num_experts, num_tokens * num_active);
    const bf16* rows = static_cast<const bf16*>(rows_);
    bf16* out = static_cast<bf16*>(out_);
    parallel_for(num_tokens, divided_up(MIN_NUMBERS, size * num_active), [&](int64_t begin, int64_t end) {
        thread_local Scratch scratch;
        const bf16** biases = reinterpret_cast<const bf16**>(scratch.get(num_active * sizeof(bf16*)));
        for (int64_t token = begin; token < end; ++token) {
            const int32_t* mine = groups.rows + token * num_active;
            auto share_of = [=](int64_t n) { return shares == nullptr ? 1.0f : shares[token * num_active + n]; };
            if (bias != nullptr)
                for (int64_t n = 0; n < num_active; ++n) biases[n] = bias + groups.expert_of(mine[n], num_experts) * size;
            auto sum_at = [&](auto zero, auto number_at) {
                auto sum = zero;
                if (bias == nullptr)
                    for (int64_t n = 0; n < num_active; ++n) sum += number_at(rows + mine[n] * size) * share_of(n);
                else
                    for (int64_t n = 0; n < num_active; ++n)
                        sum += (number_at(rows + mine[n] * size) + number_at(biases[n])) * share_of(n);
                return sum;
            };
            int64_t at = 0;
            for (; at + LANES <= size; at += LANES)
                store(out + token * size + at, sum_at(f32x16{}, [&](const bf16* row) { return load(row + at); }));
            for (; at < size; ++at)
                from_float(sum_at(0.0f, [&](const bf16* row) { return to_float(row[at]); }), out + token * size + at);
        }
    });
}

RECORDABLE(route)
RECORDABLE(group_tokens)
RECORDABLE(take_tokens)
RECORDABLE(multiply_experts)
RECORDABLE(activate_experts)
RECORDABLE(add_shares)
