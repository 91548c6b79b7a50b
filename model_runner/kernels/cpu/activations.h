// Activation functions, in float32.

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

struct GeluErf {
    // x Phi(x) = max(x, 0) - |x| q, where q = erfc(|x| / sqrt(2)) / 2 = (a1 t + ... + a5 t^5) e^(-x^2 / 2) and
    // t = 1 / (1 + p |x| / sqrt(2)). Absolute error of q below 1e-7 (Abramowitz and Stegun, 7.1.26).
    ALWAYS_INLINE f32x16 operator()(f32x16 x) const {
        f32x16 size = maximum(x, -x);
        f32x16 t = 1.0f / (1.0f + 0.23164190f * size);
        f32x16 q = splat(0.53070272f);
        q = q * t - 0.72657602f;
        q = q * t + 0.71070687f;
        q = q * t - 0.14224837f;
        q = q * t + 0.12741480f;
        return maximum(f32x16{}, x) - size * (q * t * exp2_small(x * x * -0.72134752f));
    }
};

struct Relu {
    ALWAYS_INLINE f32x16 operator()(f32x16 x) const { return maximum(f32x16{}, x); }
};

// cap * tanh(x / cap).
//
// tanh(x) = (1 - t) / (1 + t) with t = e^(-2x), for x >= 0: no overflow; the sign is that of x. NaN stays NaN.
class SoftCap {
  public:
    explicit SoftCap(float cap) : cap_(cap), rate_(-2.88539008f / cap) {}

    ALWAYS_INLINE f32x16 operator()(f32x16 x) const {
        const u32x16 sign = (u32x16)splat(-0.0f);
        f32x16 t = exp2_small((f32x16)((u32x16)x & ~sign) * rate_);
        f32x16 capped = cap_ * (1.0f - t) / (1.0f + t);
        return (f32x16)((u32x16)capped | ((u32x16)x & sign));
    }

  private:
    float cap_, rate_;
};

struct SquaredRelu {
    ALWAYS_INLINE f32x16 operator()(f32x16 x) const {
        f32x16 positive = maximum(f32x16{}, x);
        return positive * positive;
    }
};

// (up + offset) * gate * sigmoid(alpha * gate), gate at most `gate_limit`, up within +-`limit`.
struct ClampedSwiGLU {
    float alpha, limit, gate_limit, offset;

    ALWAYS_INLINE f32x16 operator()(f32x16 gate, f32x16 up) const {  // NaN stays NaN: it is the second operand
        gate = minimum(splat(gate_limit), gate);
        up = maximum(splat(-limit), minimum(splat(limit), up));
        return (up + offset) * gate / (1.0f + exp2(gate * (alpha * -1.44269504f)));
    }
};

enum Activation { GELU, GELU_TANH, RELU, SQUARED_RELU, SILU };

}  // namespace engine
