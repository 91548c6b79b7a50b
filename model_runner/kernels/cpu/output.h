// The output of a matmul: adds the bias to the accumulators in registers (tile.h), rounds, and stores.
//
// The outputs of a gated matmul are gates, followed by as many ups; it writes silu(gate) * up. In the packed weight the
// gates of a vector and their ups are adjacent (pair_linear, pair_blocks), so they meet in registers. Both are rounded
// to bfloat16 first: the bits are those of a plain matmul followed by silu_and_mul.

#pragma once

#include <algorithm>

#include "activations.h"
#include "simd.h"
#include "tile.h"

namespace engine {

enum Form { BF16, FLOAT, GATED };  // GATED: [tokens][outputs / 2] bfloat16; outputs is a multiple of 32

struct Output {
    const bf16* bias;
    void* out;
    Form form;
    int64_t outputs;
    int64_t row_stride = 0;  // elements from one row of `out` to the next, not for GATED; 0: the rows are contiguous

    // Number of neighboring vectors that are finished together.
    int64_t unit() const { return form == GATED ? 2 : 1; }

    // Index, before packing, of the first of the 16 outputs of a vector of the packed weight.
    int64_t first_of(int64_t vector) const {
        return form == GATED ? vector / 2 * LANES + vector % 2 * (outputs / 2) : vector * LANES;
    }

    // The bias of some vectors, padded with zeros.
    void copy_bias(int64_t column, int64_t vectors, float* to) const {
        for (int64_t v = 0; v < vectors; ++v, to += LANES) {
            int64_t first = first_of(column / LANES + v);
            for (int64_t n = 0; n < LANES; ++n) to[n] = first + n < outputs ? to_float(bias[first + n]) : 0.0f;
        }
    }

    static ALWAYS_INLINE f32x16 gated(f32x16 gate, f32x16 up) { return Silu{}(rounded(gate)) * rounded(up); }

    // Inlined: accumulators passed by address would be stored at each k-step of the preceding loop.
    template <int ROWS, int VECTORS>
    inline __attribute__((always_inline)) void finish(int64_t row, int64_t column, f32x16 (&sums)[ROWS][VECTORS]) const {
        if (form == GATED) {  // a separate function with its own register allocation
            alignas(64) float all[ROWS * VECTORS * LANES];
            store_tile(all, VECTORS * LANES, sums);
            return finish_gated(row, ROWS, column, VECTORS, all, VECTORS * LANES);
        }
        if (bias != nullptr) {
            float added[VECTORS * LANES];
            copy_bias(column, VECTORS, added);
            add_to_tile(added, sums);
        }
        if (form == BF16)
            write(row, column, sums, static_cast<bf16*>(out));
        else
            write(row, column, sums, static_cast<float*>(out));
    }

    // `vectors` is even; rows of sums are `stride` floats apart.
    __attribute__((noinline)) void finish_gated(int64_t row, int64_t rows, int64_t column, int64_t vectors,
                                                const float* sums, int64_t stride) const {
        for (int64_t v = 0; v < vectors; v += 2, column += 2 * LANES, sums += 2 * LANES) {
            float added[2 * LANES] = {};
            if (bias != nullptr) copy_bias(column, 2, added);
            bf16* to = static_cast<bf16*>(out) + row * (outputs / 2) + column / 2;
            for (int64_t r = 0; r < rows; ++r)
                store(to + r * (outputs / 2), gated(load(sums + r * stride) + load(added),
                                                    load(sums + r * stride + LANES) + load(added + LANES)));
        }
    }

  private:
    template <int ROWS, int VECTORS, class Out>
    inline __attribute__((always_inline)) void write(int64_t row, int64_t column, const f32x16 (&sums)[ROWS][VECTORS], Out* to) const {
        constexpr int64_t WIDTH = VECTORS * LANES;
        int64_t width = std::min<int64_t>(WIDTH, outputs - column), stride = row_stride ? row_stride : outputs;
        to += row * stride + column;
        if (width == WIDTH) {
            store_tile(to, stride, sums);
            return;
        }
        Out all[ROWS * WIDTH];
        store_tile(all, WIDTH, sums);
        for (int r = 0; r < ROWS; ++r) std::memcpy(to + r * stride, all + r * WIDTH, width * sizeof(Out));
    }
};

}  // namespace engine
