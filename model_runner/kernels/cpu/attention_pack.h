// Keys and values of one KV head, packed for the matmuls of tile items in blocks of 64 positions.
//
// A block is the right operand of AMX, tile by tile, and a panel of tile.h:
//
//   keys     [head_dim / 2][64][2]   pairs of dimensions of all keys. bfloat16; float: [head_dim][64]
//   values   [64 / 2][head_dim][2]   pairs of keys, of all dimensions. bfloat16; float: [64][head_dim]
//   scales   [64] of keys, [64] of values, if the pool is quantized; packed floats are already multiplied by theirs
//   norm     the norm of the longest key
//
// A pair of values belongs to positions n and n + 16 of 32: weights are computed 16 at a time and form pairs without a
// shuffle. Dimensions of keys are padded with zeros to whole k-steps of the matmul.

#pragma once

#include <type_traits>

#include "attention_inputs.h"
#include "tile.h"

namespace engine {

// Addresses of the parts of a packed block.
template <class Packed>
struct Block {
    const Packed* keys;
    const Packed* values;
    const float* key_scales;  // already multiplied by the softmax scale
    const float* value_scales;
    const float* norm;  // includes the key's scale
};

template <class T, class KV>
class Packer {
  public:
#if HAS_BF16_DOT
    typedef typename std::conditional<sizeof(T) == 2, Pairs, Floats>::type Kind;
#else
    typedef Floats Kind;
#endif
    typedef typename Kind::Step Packed;

    // Whether scores and weights are multiplied by the scales: bfloat16 values would be rounded if multiplied by
    // theirs.
    static constexpr bool IS_SCALED_LATER = AttentionInputs<T, KV>::IS_QUANTISED && Kind::NUMBERS == 2;

    explicit Packer(const AttentionInputs<T, KV>& inputs) : in_(inputs), dim_(inputs.step.head_dim) {
        int64_t unit = LANES * Kind::NUMBERS;
        padded_dim_ = (dim_ + unit - 1) / unit * unit;
    }

    int64_t padded_dim() const { return padded_dim_; }

    int64_t block_bytes() const {
        int64_t numbers = (padded_dim_ + dim_) / Kind::NUMBERS * TILE_KEYS;
        int64_t floats = (IS_QUANTISED ? 2 * TILE_KEYS : 0) + LANES;
        return int64_t(sizeof(Packed)) * numbers + int64_t(sizeof(float)) * floats;
    }

    Block<Packed> at(const char* memory) const {
        auto keys = reinterpret_cast<const Packed*>(memory);
        auto values = keys + padded_dim_ / Kind::NUMBERS * TILE_KEYS;
        auto scales = reinterpret_cast<const float*>(values + dim_ / Kind::NUMBERS * TILE_KEYS);
        return {keys, values, scales, scales + TILE_KEYS, scales + (IS_QUANTISED ? 2 * TILE_KEYS : 0)};
    }

    // A block that is packed for all items: in the plan's memory the KV heads of a block are contiguous.
    Block<Packed> packed(int64_t block, int64_t kv_head) const { return at(place(block, kv_head)); }

    void pack_for_all(int64_t n) const {
        const PackedBlock& block = in_.step.blocks[n];
        for (int64_t kv_head = 0; kv_head < in_.step.num_kv_heads; ++kv_head)
            pack(in_.step.slots + block.table, block.begin, block.end, kv_head, place(n, kv_head));
    }

    // Packs positions [begin, end) of the block with these slots; the others become zeros: they are masked, and their
    // memory may hold anything.
    void pack(const int32_t* slots, int64_t begin, int64_t end, int64_t kv_head, char* memory) const {
        Block<Packed> block = at(memory);
        const KV* rows[TILE_KEYS];
        for (int64_t n = 0; n < TILE_KEYS; ++n)
            rows[n] = n >= begin && n < end ? in_.k + slots[n] * in_.kv_stride() + kv_head * dim_ : nullptr;
        if constexpr (IS_QUANTISED) {
            for (int64_t n = 0; n < TILE_KEYS; ++n) {
                bool is_seen = n >= begin && n < end;
                int64_t from = is_seen ? slots[n] * in_.step.num_kv_heads + kv_head : 0;
                const_cast<float*>(block.key_scales)[n] = is_seen ? in_.k_scale[from] * in_.step.score_scale : 0.0f;
                const_cast<float*>(block.value_scales)[n] = is_seen ? in_.v_scale[from] : 0.0f;
            }
        }
        pack_keys(rows, block);
        for (const KV*& row : rows)
            if (row != nullptr) row = in_.v + (row - in_.k);
        pack_values(rows, block);
    }

  private:
    static constexpr bool IS_QUANTISED = AttentionInputs<T, KV>::IS_QUANTISED;
    typedef typename Kind::Vector Vector;

    char* place(int64_t block, int64_t kv_head) const {
        return in_.step.packed + (block * in_.step.num_kv_heads + kv_head) * block_bytes();
    }

    // One vector of matmul elements; quantized ones are not multiplied by their scale.
    static Vector load_numbers(const KV* p, int64_t left) {
        if constexpr (!IS_QUANTISED) return Kind::load_numbers(p, left);
#if HAS_BF16_DOT
        if constexpr (Kind::NUMBERS == 2) {  // exact: bfloat16 has 8 significant bits
            f32x16 second = left >= 2 * LANES ? load(p + LANES) : f32x16{};
#if defined(__aarch64__)
            u16x16 low = round_to_bf16(load(p)), high = round_to_bf16(second);
            return {u32x8{(u32x4)low.low, (u32x4)low.high}, u32x8{(u32x4)high.low, (u32x4)high.high}};
#else
            return (u32x16)_mm512_cvtne2ps_pbh((__m512)second, (__m512)load(p));
#endif
        }
#endif
        if constexpr (Kind::NUMBERS == 1) return load(p);
    }

    void pack_keys(const KV* const* keys, const Block<Packed>& block) const {
        f32x16 longest = {};
        for (int64_t first = 0; first < TILE_KEYS; first += LANES) {
            f32x16 squares = {};
            for (int64_t d = 0; d < dim_; d += LANES * Kind::NUMBERS) {
                Vector rows[LANES];
                for (int64_t n = 0; n < LANES; ++n) {
                    const KV* key = keys[first + n];
                    rows[n] = key != nullptr ? load_numbers(key + d, dim_ - d) : Vector{};
                }
                transpose(rows);
                Packed* at = const_cast<Packed*>(block.keys) + d / Kind::NUMBERS * TILE_KEYS + first;
                for (int64_t n = 0; n < LANES; ++n) {
                    if constexpr (IS_QUANTISED && !IS_SCALED_LATER) rows[n] *= load(block.key_scales + first);
                    std::memcpy(at + n * TILE_KEYS, &rows[n], sizeof(Vector));
                    squares = Kind::multiply_add(squares, rows[n], rows[n]);
                }
            }
            if constexpr (IS_SCALED_LATER) squares *= load(block.key_scales + first) * load(block.key_scales + first);
            longest = maximum(longest, squares);
        }
        *const_cast<float*>(block.norm) = __builtin_sqrtf(largest(longest));
    }

    void pack_values(const KV* const* values, const Block<Packed>& block) const {
        Packed* to = const_cast<Packed*>(block.values);
        if constexpr (Kind::NUMBERS == 1) {
            for (int64_t n = 0; n < TILE_KEYS; ++n)
                for (int64_t d = 0; d < dim_; d += LANES) {
                    f32x16 numbers = values[n] != nullptr ? load(values[n] + d) : f32x16{};
                    if constexpr (IS_QUANTISED) numbers *= splat(block.value_scales[n]);
                    store(to + n * dim_ + d, numbers);
                }
        } else {
            for (int64_t n = 0; n < TILE_KEYS / 2; ++n) {
                const KV* first = values[n / LANES * 2 * LANES + n % LANES];
                const KV* second = values[n / LANES * 2 * LANES + n % LANES + LANES];
                for (int64_t d = 0; d < dim_; d += LANES) {
                    u32x16 low = first != nullptr ? (u32x16)load(first + d) : u32x16{};
                    u32x16 high = second != nullptr ? (u32x16)load(second + d) : u32x16{};
                    u32x16 both = (low >> 16) | high;
                    std::memcpy(to + n * dim_ + d, &both, sizeof both);
                }
            }
        }
    }

    // Four rounds of a perfect shuffle transpose 16 x 16.
    static void transpose(Vector (&rows)[LANES]) {
        Vector other[LANES];
        shuffle(rows, other);
        shuffle(other, rows);
        shuffle(rows, other);
        shuffle(other, rows);
    }

    static inline __attribute__((always_inline)) void shuffle(const Vector (&from)[LANES], Vector (&to)[LANES]) {
#pragma GCC unroll 8
        for (int n = 0; n < 8; ++n) {
            to[2 * n] = SHUFFLE(from[n], from[n + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            to[2 * n + 1] = SHUFFLE(from[n], from[n + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
    }

    const AttentionInputs<T, KV>& in_;
    int64_t dim_, padded_dim_;
};

}  // namespace engine
