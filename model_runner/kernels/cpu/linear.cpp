// x @ weight.T + bias in bfloat16, for any number of tokens, from a weight that is packed once (linear.h).

#include <algorithm>

#include "linear.h"
#include "linear_floats.h"
#include "linear_tiles.h"
#include "linear_vectors.h"
#include "parallel.h"
#include "matmul_parts.h"
#include "program.h"
#include "simd.h"

void engine::multiply_part(const LinearCall& call, int64_t begin, int64_t end) {
#if TILES
    TileLinear{call}.multiply_part(begin, end);
#else
#if FLOAT_PRODUCTS
    if (call.num_tokens > TILE_ROWS) return FloatLinear<false>{{call}}.multiply_part(begin, end);
#endif
    VectorLinear<false>{{call}}.multiply_part(begin, end);
#endif
}

// Bytes of the packed form of [outputs, inputs] bfloat16; inputs must be even.
EXPORT int64_t packed_linear_bytes(int64_t outputs, int64_t inputs) {
    return engine::padded(outputs) * engine::steps_of(inputs) * engine::STEP_PAIRS * 4;
}

EXPORT void pack_linear(const void* weight_, int64_t outputs, int64_t inputs, void* packed_) {
    using namespace engine;
    const uint16_t* weight = static_cast<const uint16_t*>(weight_);
    uint32_t* packed = static_cast<uint32_t*>(packed_);
    int64_t all = padded(outputs), panels = (all + PANEL - 1) / PANEL, pairs = steps_of(inputs) * STEP_PAIRS;
    parallel_for(panels, 1, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) {
            int64_t width = std::min(PANEL, all - panel * PANEL);
            uint32_t* to = packed + panel * PANEL * pairs;
            for (int64_t n = 0; n < width; ++n) {
                const uint16_t* from = weight + (panel * PANEL + n) * inputs;
                int64_t filled = panel * PANEL + n < outputs ? inputs / 2 : 0;
                for (int64_t k = 0; k < pairs; ++k) to[pair_at(n, k, width)] = k < filled ? load_pair(from + 2 * k) : 0;
            }
        }
    });
}

// Rearranges a packed weight for a gated matmul (output.h), in place.
EXPORT void pair_linear(void* packed_, int64_t outputs, int64_t inputs) {
    using namespace engine;
    constexpr int64_t UNIT = STEP_PAIRS * LANES, MIN_STEPS = 16;  // k-steps per thread: neighbors in memory
    uint32_t* packed = static_cast<uint32_t*>(packed_);
    LinearCall call = {{nullptr, nullptr, GATED, outputs}, nullptr, 0, packed, 0, inputs};
    int64_t vectors = call.num_vectors();
    auto place_of = [&](int64_t vector, int64_t step) {
        return packed + (call.at(vector * LANES) - packed) + step * STEP_PAIRS * call.panel_width(vector / PER_PANEL);
    };
    parallel_for(steps_of(inputs), MIN_STEPS, [&](int64_t begin, int64_t end) {
        thread_local Scratch scratch;
        uint32_t* before = reinterpret_cast<uint32_t*>(scratch.get(vectors * UNIT * sizeof(uint32_t)));
        for (int64_t step = begin; step < end; ++step) {
            for (int64_t v = 0; v < vectors; ++v) std::memcpy(before + v * UNIT, place_of(v, step), UNIT * sizeof(uint32_t));
            for (int64_t v = 0; v < vectors; ++v)
                std::memcpy(place_of(v, step), before + call.first_of(v) / LANES * UNIT, UNIT * sizeof(uint32_t));
        }
    });
}

// x: [num_tokens][inputs] bfloat16, rows `x_stride` elements apart; packed: by pack_linear; bias: [outputs] bfloat16 or
// null; out: contiguous, see output.h for `form`.
EXPORT void linear_to(const void* x, int64_t x_stride, const void* packed, const void* bias, void* out,
                      int64_t num_tokens, int64_t inputs, int64_t outputs, int form) {
    using namespace engine;
    LinearCall call = {{static_cast<const bf16*>(bias), out, Form(form), outputs},
                       static_cast<const bf16*>(x),
                       x_stride,
                       static_cast<const uint32_t*>(packed),
                       num_tokens,
                       inputs};
#if TILES
    TileLinear{call}.run();
#else
#if FLOAT_PRODUCTS
    if (num_tokens > TILE_ROWS) return FloatLinear<false>{{call}}.run();
#endif
    VectorLinear<false>{{call}}.run();
#endif
}

// Rows of the weight, unpacked: out[n] = weight[ids[n]]; ids: [num_rows] in [0, outputs); out: [num_rows][inputs]
// bfloat16.
EXPORT void linear_rows(const void* packed_, const int64_t* ids, void* out_, int64_t num_rows, int64_t inputs,
                        int64_t outputs) {
    using namespace engine;
    const uint32_t* packed = static_cast<const uint32_t*>(packed_);
    uint32_t* out = static_cast<uint32_t*>(out_);
    parallel_for(num_rows, min_rows(inputs), [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) {
            int64_t panel = ids[n] / PANEL, width = std::min(PANEL, padded(outputs) - panel * PANEL);
            const uint32_t* from = packed + panel * PANEL * steps_of(inputs) * STEP_PAIRS;
            for (int64_t k = 0; k < inputs / 2; ++k)
                std::memcpy(out + n * (inputs / 2) + k, from + pair_at(ids[n] % PANEL, k, width), sizeof *out);
        }
    });
}

RECORDABLE(linear_to)
RECORDABLE(linear_rows)
