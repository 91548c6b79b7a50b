// Quantized activations for the matmuls of blocks.cpp: 8-bit integers and their scales.

#pragma once

#include "blocks.h"
#include "bytes.h"
#include "simd.h"

namespace engine {

constexpr float TINY = 1e-30f;  // blocks of smaller values become zeros: the inverse of their scale might be infinite

// Scale data of one block of one token.
struct BlockScale {
    float scale;
    union {
        float sum;      // sum of the block's integers, times `scale`
        int32_t start;  // initial value of the dot product: -zero * sum of the block's integers (see start_of)
        int32_t total;  // sum of the block's integers
        int32_t starts[2];  // the same for each half of a block with two scales
    };
};

// Weights of 8 bits are multiplied as signed bytes: what is subtracted from them.
constexpr int SIGNED_ZERO = HAS_SIGNED_DOT ? 128 : 0;

// The initial value of the dot product of integers of a block, which are lanes, with integers that have a zero point.
// Where sums have 16 bits, those of the lower and the upper two of each four integers are in the halves of the result.
ALWAYS_INLINE int32_t start_of(i32x16 numbers, int32_t zero) {
#if HAS_WORD_SUMS
    const i32x16 lower = {-1, -1, 0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1, 0, 0};
    int32_t low = sum(numbers & lower) * -zero, high = sum(numbers & ~lower) * -zero;
    return int32_t((uint32_t(low) & 0xffffu) | uint32_t(high) << 16);
#else
    return sum(numbers) * -zero;
#endif
}

// Quantized tokens: [tokens][inputs] bytes, then [tokens][inputs / 32] `BlockScale`s.
struct Quantized {
    int8_t* numbers;
    BlockScale* scales;

    Quantized(void* memory, int64_t tokens, int64_t inputs)
        : numbers(static_cast<int8_t*>(memory)),
          scales(reinterpret_cast<BlockScale*>(numbers + tokens * inputs)) {}

    // The tokens from `token` on.
    Quantized from(int64_t token, int64_t inputs) const {
        Quantized rest = *this;
        rest.numbers += token * inputs;
        rest.scales += token * (inputs / BLOCK);
        return rest;
    }

    static int64_t bytes(int64_t tokens, int64_t inputs) {
        return tokens * (inputs + inputs / BLOCK * int64_t(sizeof(BlockScale)));
    }
};

// SPAN: number of blocks that share one scale, that of the first.
template <int SPAN>
void quantize(const BlockCall& call, int64_t token, const Quantized& to) {
    const int64_t inputs = call.inputs;
    const bf16* from = call.x + token * call.x_stride;
    int8_t* numbers = to.numbers + token * inputs;
    BlockScale* scales = to.scales + token * (inputs / BLOCK);
    const bool of_6_bits = call.is_super && call.bits == 6, has_starts = of_6_bits || call.has_half_scales();
    const bool in_words = HAS_WORD_SUMS && call.bits == 4 && call.table == nullptr;
    const int32_t zero = call.zero - (call.bits == 8 ? SIGNED_ZERO : 0);
    for (int64_t block = 0; block < inputs / BLOCK; block += SPAN, from += SPAN * BLOCK, numbers += SPAN * BLOCK) {
        f32x16 a[SPAN], b[SPAN];
        for (int n = 0; n < SPAN; ++n) {
            a[n] = load(from + n * BLOCK);
            b[n] = load(from + n * BLOCK + LANES);
        }
        LargestMagnitude largest;
        for (int n = 0; n < SPAN; ++n) {
            largest.see(a[n]);
            largest.see(b[n]);
        }
        float most = largest.get();
        f32x16 inverse = splat(most > TINY ? 127.0f / most : 0.0f);
        i32x16 total = {};
        int32_t starts[2] = {};
        for (int n = 0; n < SPAN; ++n) {
            i32x16 p = round_to_int(a[n] * inverse), q = round_to_int(b[n] * inverse);
            store_bytes(numbers + n * BLOCK, p);
            store_bytes(numbers + n * BLOCK + LANES, q);
            total += p + q;
            if (of_6_bits) starts[0] = start_of(p, 32), starts[1] = start_of(q, 32);
            else if (has_starts) starts[0] = -zero * engine::sum(p), starts[1] = -zero * engine::sum(q);
        }
        int32_t all = engine::sum(total);
        scales[block].scale = most / 127.0f * call.factor;  // not finite where x is not
        if (HAS_SIGNED_DOT && call.has_minima && call.bits == 8)
            scales[block].total = all;
        else if (call.has_minima)
            scales[block].sum = scales[block].scale * float(all);
        else if (has_starts)
            std::memcpy(scales[block].starts, starts, sizeof starts);
        else
            scales[block].start = in_words ? start_of(total, zero) : -zero * all;
    }
}

inline void quantize(const BlockCall& call, int64_t token, const Quantized& to) {
    call.has_paired_scales() ? quantize<2>(call, token, to) : quantize<1>(call, token, to);
}

}  // namespace engine
