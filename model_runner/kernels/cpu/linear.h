// The arguments of a matmul of linear.cpp or compressed.cpp, and the packed layout of its weight.
//
//   [panel][k-step][vector of the panel][k-pair of the k-step][output of the vector][2]
//
// A k-step is one k-pair (two neighboring inputs), and a panel has 64 outputs. With tiles (amx.h) a k-step has the 16
// k-pairs of a tile, and a panel has 32 outputs. The last panel may be narrower, in vectors of 16. Padding is zero.

#pragma once

#include <algorithm>

#include "amx.h"
#include "output.h"
#include "simd.h"

namespace engine {

constexpr int64_t PANEL = TILES ? 32 : 64;      // outputs
constexpr int64_t STEP_PAIRS = TILES ? 16 : 1;  // k-pairs
constexpr int64_t PER_PANEL = PANEL / LANES;
constexpr int64_t LINE = 64 / sizeof(uint32_t);

inline int64_t padded(int64_t outputs) { return (outputs + LANES - 1) / LANES * LANES; }

inline int64_t steps_of(int64_t inputs) { return (inputs / 2 + STEP_PAIRS - 1) / STEP_PAIRS; }

// Rows of a table per thread, at least: fewer do not pay for waking it.
inline int64_t min_rows(int64_t inputs) { return (1 << 16) / (inputs * 2) + 1; }

// Offset of a pair of one output in a panel of `width` outputs.
inline int64_t pair_at(int64_t output, int64_t pair, int64_t width) {
    return pair / STEP_PAIRS * STEP_PAIRS * width + output / LANES * STEP_PAIRS * LANES + pair % STEP_PAIRS * LANES +
           output % LANES;
}

// Neighboring vectors of one panel.
struct Columns {
    int64_t column, vectors;
    const uint32_t* weights;
    int64_t width;
};

struct LinearCall : Output {
    const bf16* x;
    int64_t x_stride;
    const uint32_t* packed;
    int64_t num_tokens, inputs;
    const int64_t* panel_starts = nullptr;  // compressed weights only (compressed.h)

    int64_t num_vectors() const { return padded(outputs) / LANES; }
    int64_t num_panels() const { return (outputs + PANEL - 1) / PANEL; }
    int64_t panel_width(int64_t panel) const { return std::min(PANEL, padded(outputs) - panel * PANEL); }

    // Address of the first k-step of the vector that begins at `column`; for a compressed weight, of its panel.
    const uint32_t* at(int64_t column) const {
        if (panel_starts != nullptr) return packed + panel_starts[column / PANEL];
        return packed + column / PANEL * PANEL * steps_of(inputs) * STEP_PAIRS + column % PANEL * STEP_PAIRS;
    }

    // Number of vectors, a multiple of `unit`, that have at least `bytes` bytes.
    int64_t vectors_of(int64_t bytes, int64_t vector_bytes, int64_t unit) const {
        unit = std::max(unit, this->unit());
        return (bytes + unit * vector_bytes - 1) / (unit * vector_bytes) * unit;
    }

    // Calls body(columns, data read after them or null) for the vectors [begin, end), cut at panels and at `most`.
    template <class Body>
    void for_columns(int64_t begin, int64_t end, int64_t most, const uint32_t* next, const Body& body) const {
        for (int64_t v = begin; v < end;) {
            int64_t vectors = std::min({end - v, PER_PANEL - v % PER_PANEL, most}), column = v * LANES;
            v += vectors;
            body(Columns{column, vectors, at(column), panel_width(column / PANEL)}, v < end ? at(v * LANES) : next);
        }
    }
};

}  // namespace engine
