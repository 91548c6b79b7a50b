// Sums in registers (tile.h) on their way to the result of a product: the bias is added, and they are rounded.

#pragma once

#include <algorithm>

#include "linear.h"
#include "simd.h"
#include "tile.h"

namespace engine {

struct LinearOutput : LinearCall {
    template <int ROWS, int VECTORS>
    void finish(int64_t row, int64_t column, f32x16 (&sums)[ROWS][VECTORS]) const {
        float_out ? finish(row, column, sums, static_cast<float*>(out)) : finish(row, column, sums, static_cast<bf16*>(out));
    }

    template <int ROWS, int VECTORS, class Out>
    void finish(int64_t row, int64_t column, f32x16 (&sums)[ROWS][VECTORS], Out* to) const {
        constexpr int64_t WIDTH = VECTORS * LANES;
        int64_t width = std::min<int64_t>(WIDTH, outputs - column);
        to += row * outputs + column;
        if (bias != nullptr) {
            float added[WIDTH] = {};
            for (int64_t n = 0; n < width; ++n) added[n] = to_float(bias[column + n]);
            add_to_tile(added, sums);
        }
        if (width == WIDTH) {
            store_tile(to, outputs, sums);
            return;
        }
        Out all[ROWS * WIDTH];
        store_tile(all, WIDTH, sums);
        for (int r = 0; r < ROWS; ++r) std::memcpy(to + r * outputs, all + r * WIDTH, width * sizeof(Out));
    }
};

}  // namespace engine
