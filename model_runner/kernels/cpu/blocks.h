// What a product of blocks.cpp is given, and how its weight is packed: in panels of 32 outputs (the last one filled up
// with zeros), and a panel's blocks one after the other:
//
//   numbers: [inputs / 4][output of the panel][4] bytes; of 4 bits, groups k and k + 4 share bytes, k in the low halves
//   scales: [32] half precision
//   minima: [32] half precision, where there are any
//
// All scales and minima of a weight are multiplied by a power of two that makes the best of half precision's range;
// `factor` takes that back.

#pragma once

#include "output.h"
#include "simd.h"

namespace engine {

constexpr int64_t BLOCK = 32;      // inputs
constexpr int GROUPS = BLOCK / 4;  // of four inputs: what one instruction adds up

struct BlockCall : Output {
    static constexpr int64_t PANEL = 32;  // outputs
    static constexpr int VECTORS = PANEL / LANES;
    static constexpr int64_t LINE = 64;

    const bf16* x;
    int64_t x_stride;
    const uint8_t* packed;
    int64_t num_tokens, inputs;
    int bits, zero;
    bool has_minima;
    bool has_paired_scales;  // of blocks 2k and 2k + 1; there are no minima then
    float factor;

    static constexpr int64_t block_bytes(int bits, bool has_minima) {
        return PANEL * (BLOCK * bits / 8 + (has_minima ? 4 : 2));
    }

    int64_t panels() const { return (outputs + PANEL - 1) / PANEL; }
    int64_t panel_bytes() const { return inputs / BLOCK * block_bytes(bits, has_minima); }
};

}  // namespace engine
