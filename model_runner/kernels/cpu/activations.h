// Activation functions of gated layers, in float32.

#pragma once

#include "simd.h"

namespace engine {

struct Silu {
    ALWAYS_INLINE f32x16 operator()(f32x16 x) const { return x / (1.0f + exp2(x * -1.44269504f)); }
};

struct GeluTanh {
    // 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
    ALWAYS_INLINE f32x16 operator()(f32x16 x) const {
        f32x16 u = 0.79788456f * x * (1.0f + 0.044715f * x * x);
        return x / (1.0f + exp2(u * -2.88539008f));
    }
};

}  // namespace engine
