// Weights of 12 bits per value (compressed.h): compresses packed weights, decompresses them, multiplies with them.

#include "compressed.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "linear.h"
#include "linear_floats.h"
#include "linear_vectors.h"
#include "parallel.h"
#include "matmul_parts.h"
#include "program.h"

#if COMPRESSES

namespace engine {
namespace {

constexpr int64_t VALUES = 256;  // possible exponents
constexpr uint8_t NO_CODE = 255;
static_assert(PER_PANEL * 4 == 16, "a 16-bit word holds the four bits of each vector");

uint32_t exponent_of(uint32_t number) { return number >> 7 & 0xff; }

// Places the signs and mantissas of one vector beside those of the previous vector; self-inverse.
uint32_t placed(uint32_t rest, int64_t vector) {
    return vector % 2 == 0 ? rest : (rest & 0x00ff00ff) << 8 | (rest >> 8 & 0x00ff00ff);
}

// Access to a packed weight (linear.h), panel by panel.
struct PackedWeight {
    const uint32_t* packed;
    int64_t outputs, inputs;

    int64_t steps() const { return inputs / 2; }
    int64_t panels() const { return (outputs + PANEL - 1) / PANEL; }
    int64_t width(int64_t panel) const { return std::min(PANEL, padded(outputs) - panel * PANEL); }
    int64_t start(int64_t panel) const { return panel * PANEL * steps(); }

    // Copies the pairs of one k-step, padded with zeros.
    void copy_step(int64_t panel, int64_t step, uint32_t* to) const {
        int64_t words = width(panel);
        std::memcpy(to, packed + start(panel) + step * words, words * sizeof(uint32_t));
        std::memset(to + words, 0, (PANEL - words) * sizeof(uint32_t));
    }
};

// The encoding of a panel.
class PanelPlan {
  public:
    PanelPlan() = default;
    PanelPlan(const PackedWeight& weight, int64_t panel) {
        int64_t counts[VALUES];
        count(weight, panel, counts);
        int values[VALUES];
        std::iota(values, values + VALUES, 0);
        std::partial_sort(values, values + EXPONENTS, values + VALUES, [&](int a, int b) {
            return counts[a] != counts[b] ? counts[a] > counts[b] : a > b;
        });
        std::memset(codes_, NO_CODE, sizeof codes_);
        for (int64_t n = 0; n < EXPONENTS; ++n) {
            codes_[values[n]] = uint8_t(n);
            exponents_[n] = exponents_[EXPONENTS + n] = uint16_t(values[n] << 7);
            counts[values[n]] = 0;
        }
        if (std::accumulate(counts, counts + VALUES, int64_t(0)) > 0) find_whole_steps(weight, panel);
    }

    int64_t words(int64_t steps) const {
        int64_t whole = int64_t(whole_.size());
        return head_words(whole) + (steps - whole) * SHORT_STEP + whole * WHOLE_STEP;
    }

    void write(const PackedWeight& weight, int64_t panel, uint32_t* to) const {
        std::memcpy(to, exponents_, sizeof exponents_);
        int64_t head = head_words(int64_t(whole_.size()));
        std::memset(to + EXPONENT_WORDS, 0, (head - EXPONENT_WORDS) * sizeof *to);
        to[EXPONENT_WORDS] = uint32_t(head);
        std::copy(whole_.begin(), whole_.end(), to + EXPONENT_WORDS + 1);
        to[EXPONENT_WORDS + 1 + whole_.size()] = uint32_t(weight.steps());
        to += head;
        auto whole = whole_.begin();
        for (int64_t step = 0; step < weight.steps(); ++step) {
            uint32_t pairs[PANEL];
            weight.copy_step(panel, step, pairs);
            if (whole != whole_.end() && *whole == step) {
                std::memcpy(to, pairs, sizeof pairs);
                to += WHOLE_STEP;
                ++whole;
            } else {
                write_step(pairs, to);
                to += SHORT_STEP;
            }
        }
    }

  private:
    // Four histograms: neighboring exponents are often equal, and an increment would wait for the previous one.
    static void count(const PackedWeight& weight, int64_t panel, int64_t* counts) {
        uint32_t some[4][VALUES] = {};
        const uint32_t* from = weight.packed + weight.start(panel);
        int64_t words = weight.width(panel) * weight.steps();  // is a multiple of 16
        for (int64_t n = 0; n < words; n += 2)
            for (int half = 0; half < 2; ++half) {
                ++some[half][exponent_of(from[n + half])];
                ++some[2 + half][exponent_of(from[n + half] >> 16)];
            }
        for (int64_t n = 0; n < VALUES; ++n) counts[n] = int64_t(some[0][n]) + some[1][n] + some[2][n] + some[3][n];
        counts[0] += (PANEL - weight.width(panel)) * weight.inputs;  // padding
    }

    void find_whole_steps(const PackedWeight& weight, int64_t panel) {
        for (int64_t step = 0; step < weight.steps(); ++step) {
            uint32_t pairs[PANEL];
            weight.copy_step(panel, step, pairs);
            uint8_t worst = 0;
            for (uint32_t pair : pairs)
                worst = std::max({worst, codes_[exponent_of(pair)], codes_[exponent_of(pair >> 16)]});
            if (worst == NO_CODE) whole_.push_back(uint32_t(step));
        }
    }

    void write_step(const uint32_t* pairs, uint32_t* to) const {
        uint32_t* codes = to + REST_WORDS;
        std::memset(to, 0, SHORT_STEP * sizeof *to);
        for (int64_t v = 0; v < PER_PANEL; ++v)
            for (int64_t n = 0; n < LANES; ++n) {
                uint32_t pair = pairs[v * LANES + n];
                to[v / 2 * LANES + n] |= placed(pair & REST, v);
                codes[n] |= uint32_t(codes_[exponent_of(pair)] | codes_[exponent_of(pair >> 16)] << 16) << 4 * v;
            }
    }

    uint8_t codes_[VALUES];  // per exponent
    uint16_t exponents_[2 * EXPONENTS];
    std::vector<uint32_t> whole_;
};

// The pair of one output in a compressed k-step.
uint32_t pair_of(const uint32_t* step, int64_t output, const uint16_t* exponents) {
    int64_t vector = output / LANES, lane = output % LANES;
    uint32_t rest = placed(step[vector / 2 * LANES + lane], vector) & REST;
    uint32_t codes = step[REST_WORDS + lane] >> 4 * vector;
    return rest | exponents[codes & 0xf] | uint32_t(exponents[codes >> 16 & 0xf]) << 16;
}

// Size of the table of panel starts, in words, rounded up to cache lines.
int64_t start_words(int64_t panels) { return (2 * panels + LINE - 1) / LINE * LINE; }

const uint32_t* panel_at(const void* compressed, int64_t panel) {
    return static_cast<const uint32_t*>(compressed) + static_cast<const int64_t*>(compressed)[panel];
}

// body(step, pair) for all pairs of an output.
template <class Body>
void for_pairs(const void* compressed, int64_t output, int64_t inputs, const Body& body) {
    PanelReader from(panel_at(compressed, output / PANEL));
    const uint16_t* exponents = from.exponents();
    for (int64_t step = 0; step < inputs / 2; ++step) {
        const uint32_t* at = from.at();
        body(step, from.advance() ? at[output % PANEL] : pair_of(at, output % PANEL, exponents));
    }
}

std::vector<PanelPlan> plan_panels(const PackedWeight& weight) {
    std::vector<PanelPlan> plans(weight.panels());
    parallel_for(weight.panels(), 1, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) plans[panel] = PanelPlan(weight, panel);
    });
    return plans;
}

}  // namespace
}  // namespace engine

// Bytes of the compressed form of a packed weight; 0 if the ISA target has no kernel for it.
EXPORT int64_t compressed_linear_bytes(const void* packed, int64_t outputs, int64_t inputs) {
    using namespace engine;
    PackedWeight weight = {static_cast<const uint32_t*>(packed), outputs, inputs};
    int64_t words = start_words(weight.panels());
    for (const PanelPlan& plan : plan_panels(weight)) words += plan.words(weight.steps());
    return words * int64_t(sizeof(uint32_t));
}

EXPORT void compress_linear(const void* packed, int64_t outputs, int64_t inputs, void* compressed) {
    using namespace engine;
    PackedWeight weight = {static_cast<const uint32_t*>(packed), outputs, inputs};
    std::vector<PanelPlan> plans = plan_panels(weight);
    int64_t* starts = static_cast<int64_t*>(compressed);
    int64_t start = start_words(weight.panels());
    for (int64_t panel = 0; panel < weight.panels(); ++panel) {
        starts[panel] = start;
        start += plans[panel].words(weight.steps());
    }
    parallel_for(weight.panels(), 1, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel)
            plans[panel].write(weight, panel, static_cast<uint32_t*>(compressed) + starts[panel]);
    });
}

// Restores the packed weight (linear.h) from its compressed form.
EXPORT void decompress_linear(const void* compressed, int64_t outputs, int64_t inputs, void* packed_) {
    using namespace engine;
    uint32_t* packed = static_cast<uint32_t*>(packed_);
    PackedWeight weight = {packed, outputs, inputs};
    parallel_for(weight.panels(), 1, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel)
            for (int64_t n = 0, width = weight.width(panel); n < width; ++n)
                for_pairs(compressed, panel * PANEL + n, inputs, [&](int64_t step, uint32_t pair) {
                    packed[weight.start(panel) + step * width + n] = pair;
                });
    });
}

// As linear_to, with the same bits.
EXPORT void compressed_linear_to(const void* x, int64_t x_stride, const void* compressed, const void* bias, void* out,
                                 int64_t num_tokens, int64_t inputs, int64_t outputs, int form) {
    using namespace engine;
    LinearCall call = {{static_cast<const bf16*>(bias), out, Form(form), outputs},
                       static_cast<const bf16*>(x),
                       x_stride,
                       static_cast<const uint32_t*>(compressed),
                       num_tokens,
                       inputs,
                       static_cast<const int64_t*>(compressed)};
#if FLOAT_PRODUCTS
    if (num_tokens > TILE_ROWS) return FloatLinear<true>{{call}}.run();
#endif
    VectorLinear<true>{{call}}.run();
}

void engine::multiply_compressed_part(const LinearCall& call, int64_t begin, int64_t end) {
#if FLOAT_PRODUCTS
    if (call.num_tokens > TILE_ROWS) return FloatLinear<true>{{call}}.multiply_part(begin, end);
#endif
    VectorLinear<true>{{call}}.multiply_part(begin, end);
}

// As linear_rows.
EXPORT void compressed_linear_rows(const void* compressed, const int64_t* ids, void* out_, int64_t num_rows,
                                   int64_t inputs, int64_t /*outputs*/) {
    using namespace engine;
    uint32_t* out = static_cast<uint32_t*>(out_);
    parallel_for(num_rows, min_rows(inputs), [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n)
            for_pairs(compressed, ids[n], inputs, [&](int64_t step, uint32_t pair) { out[n * (inputs / 2) + step] = pair; });
    });
}

#else

EXPORT int64_t compressed_linear_bytes(const void*, int64_t, int64_t) { return 0; }
EXPORT void compress_linear(const void*, int64_t, int64_t, void*) { __builtin_trap(); }
EXPORT void decompress_linear(const void*, int64_t, int64_t, void*) { __builtin_trap(); }
EXPORT void compressed_linear_to(const void*, int64_t, const void*, const void*, void*, int64_t, int64_t, int64_t, int) {
    __builtin_trap();
}
void engine::multiply_compressed_part(const LinearCall&, int64_t, int64_t) { __builtin_trap(); }
EXPORT void compressed_linear_rows(const void*, const int64_t*, void*, int64_t, int64_t, int64_t) { __builtin_trap(); }

#endif

RECORDABLE(compressed_linear_to)
RECORDABLE(compressed_linear_rows)
