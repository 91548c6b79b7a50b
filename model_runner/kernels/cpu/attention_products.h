// The matmuls of tile items: scores of some query rows with a block of keys, and their weighted values.
//
// Two kinds, with different numbers of rows. The accumulators of a row do not depend on the other rows.
//
//   VectorProducts   accumulators in vector registers (tile.h): bfloat16 pairs, or float
//   TileProducts     bfloat16 on AMX tiles

#pragma once

#include <algorithm>

#include "amx.h"
#include "attention_pack.h"

namespace engine {

// Row strides: queries `padded_dim`, scores and weights TILE_KEYS, values head_dim. `num_keys` keys of a block, a
// multiple of KEYS, are multiplied; all rows mask the remaining keys.
template <class Kind>
class VectorProducts {
  public:
    typedef typename Kind::Number Number;
    typedef typename Kind::Step Packed;
    static constexpr int64_t ROWS = TILE_ROWS, KEYS = LANES * Kind::NUMBERS;

    VectorProducts(int64_t head_dim, int64_t padded_dim, int64_t /*num_rows*/) : dim_(head_dim), padded_dim_(padded_dim) {}

    void score(const Number* queries, const Packed* keys, int64_t num_keys, float* scores) const {
        if (padded_dim_ == USUAL_DIM && num_keys == TILE_KEYS) {
            for (int64_t key = 0; key < TILE_KEYS; key += TILE_VECTORS * LANES)
                score_columns<TILE_VECTORS>(queries, USUAL_DIM, keys + key, scores + key);
            return;
        }
        for (int64_t key = 0; key < num_keys;) {
            int vectors = int(std::min<int64_t>(TILE_VECTORS, (num_keys - key) / LANES));
            with_vectors<TILE_ROWS>(vectors, [&]<int, int VECTORS>() {
                score_columns<VECTORS>(queries, padded_dim_, keys + key, scores + key);
            });
            key += vectors * LANES;
        }
    }

    void add_values(const Number* weights, const Packed* values, int64_t num_keys, float* sums) const {
        if (dim_ == USUAL_DIM && num_keys == TILE_KEYS) {
            for (int64_t d = 0; d < USUAL_DIM; d += TILE_VECTORS * LANES)
                add_columns<TILE_VECTORS>(weights, TILE_KEYS, values + d, sums + d, USUAL_DIM);
            return;
        }
        for (int64_t d = 0; d < dim_;) {
            int vectors = int(std::min<int64_t>(TILE_VECTORS, (dim_ - d) / LANES));
            with_vectors<TILE_ROWS>(vectors, [&]<int, int VECTORS>() {
                add_columns<VECTORS>(weights, num_keys, values + d, sums + d, dim_);
            });
            d += vectors * LANES;
        }
    }

  private:
    static constexpr int64_t USUAL_DIM = 64;  // matmuls with this size known at compile time take 4 % less time

    template <int VECTORS>
    static inline __attribute__((always_inline)) void score_columns(const Number* queries, int64_t padded_dim,
                                                                    const Packed* keys, float* scores) {
        f32x16 sums_of[TILE_ROWS][VECTORS];
        zero_tile(sums_of);
        multiply_tile<Kind, TILE_ROWS, VECTORS>(queries, padded_dim, keys, TILE_KEYS, padded_dim / Kind::NUMBERS, sums_of);
        store_tile(scores, TILE_KEYS, sums_of);
    }

    template <int VECTORS>
    static inline __attribute__((always_inline)) void add_columns(const Number* weights, int64_t num_keys,
                                                                  const Packed* values, float* sums, int64_t dim) {
        f32x16 sums_of[TILE_ROWS][VECTORS];
        load_tile(sums, dim, sums_of);
        multiply_tile<Kind, TILE_ROWS, VECTORS>(weights, TILE_KEYS, values, dim, num_keys / Kind::NUMBERS, sums_of);
        store_tile(sums, dim, sums_of);
    }

    int64_t dim_, padded_dim_;
};

#if TILES

// Two row tiles times two column tiles: tiles 0 to 3 are accumulators, 4 and 5 rows, 6 and 7 columns.
class TileProducts {
  public:
    typedef bf16 Number;
    typedef uint32_t Packed;
    static constexpr int64_t ROWS = 2 * amx::MAX_ROWS, KEYS = 2 * LANES;

    TileProducts(int64_t head_dim, int64_t padded_dim, int64_t num_rows)
        : dim_(head_dim), padded_dim_(padded_dim), has_two_(num_rows > amx::MAX_ROWS), tiles_(shapes(num_rows)) {}

    void score(const Number* queries, const Packed* keys, int64_t num_keys, float* scores) const {
        has_two_ ? score<2>(queries, keys, num_keys, scores) : score<1>(queries, keys, num_keys, scores);
    }

    void add_values(const Number* weights, const Packed* values, int64_t num_keys, float* sums) const {
        has_two_ ? add_values<2>(weights, values, num_keys, sums) : add_values<1>(weights, values, num_keys, sums);
    }

  private:
    static constexpr int64_t PAIRS = 16;  // k-pairs in a row of a tile

    // A tile with fewer than 16 rows takes less time.
    static amx::Shapes shapes(int64_t num_rows) {
        amx::Shapes shapes;
        int rows = int(std::min<int64_t>(num_rows, amx::MAX_ROWS));
        for (int tile = 0; tile < amx::NUM_TILES; ++tile)
            shapes.set(tile, tile < 6 ? rows : amx::MAX_ROWS, amx::ROW_BYTES);
        return shapes;
    }

    template <int ROW_TILES>
    void score(const Number* queries, const Packed* keys, int64_t num_keys, float* scores) const {
        constexpr int64_t COLUMN_BYTES = TILE_KEYS * sizeof(Packed), SUM_BYTES = TILE_KEYS * sizeof(float);
        int64_t row_bytes = padded_dim_ * int64_t(sizeof(Number));
        for (int64_t key = 0; key < num_keys; key += 2 * LANES) {
            zero<ROW_TILES, 2>();
            for (int64_t d = 0; d < padded_dim_; d += 2 * PAIRS) {
                const Packed* columns = keys + d / 2 * TILE_KEYS + key;
                multiply<ROW_TILES, 2>(queries + d, row_bytes, columns, COLUMN_BYTES);
            }
            store<ROW_TILES, 2>(scores + key, SUM_BYTES);
        }
    }

    template <int ROW_TILES>
    void add_values(const Number* weights, const Packed* values, int64_t num_keys, float* sums) const {
        int64_t d = 0;
        for (; d + LANES < dim_; d += 2 * LANES) add_columns<ROW_TILES, 2>(weights, values + d, num_keys, sums + d);
        if (d < dim_) add_columns<ROW_TILES, 1>(weights, values + d, num_keys, sums + d);
    }

    template <int ROW_TILES, int COLUMN_TILES>
    void add_columns(const Number* weights, const Packed* values, int64_t num_keys, float* sums) const {
        constexpr int64_t ROW_BYTES = TILE_KEYS * sizeof(Number);
        int64_t column_bytes = dim_ * int64_t(sizeof(Packed)), sum_bytes = dim_ * int64_t(sizeof(float));
        load<ROW_TILES, COLUMN_TILES>(sums, sum_bytes);
        for (int64_t key = 0; key < num_keys; key += 2 * PAIRS)
            multiply<ROW_TILES, COLUMN_TILES>(weights + key, ROW_BYTES, values + key / 2 * dim_, column_bytes);
        store<ROW_TILES, COLUMN_TILES>(sums, sum_bytes);
    }

    // One k-step of all tiles.
    template <int ROW_TILES, int COLUMN_TILES>
    static inline __attribute__((always_inline)) void multiply(const Number* rows, int64_t row_bytes,
                                                               const Packed* columns, int64_t column_bytes) {
        amx::load<6>(columns, column_bytes);
        amx::load<4>(rows, row_bytes);
        amx::dot_pairs<0, 4, 6>();
        if constexpr (COLUMN_TILES == 2) {
            amx::load<7>(columns + LANES, column_bytes);
            amx::dot_pairs<1, 4, 7>();
        }
        if constexpr (ROW_TILES == 2) {
            amx::load<5>(below(rows, row_bytes), row_bytes);
            amx::dot_pairs<2, 5, 6>();
            if constexpr (COLUMN_TILES == 2) amx::dot_pairs<3, 5, 7>();
        }
    }

    template <int ROW_TILES, int COLUMN_TILES>
    static inline __attribute__((always_inline)) void zero() {
        amx::zero<0>();
        if constexpr (COLUMN_TILES == 2) amx::zero<1>();
        if constexpr (ROW_TILES == 2) amx::zero<2>();
        if constexpr (ROW_TILES == 2 && COLUMN_TILES == 2) amx::zero<3>();
    }

    template <int ROW_TILES, int COLUMN_TILES>
    static inline __attribute__((always_inline)) void load(const float* from, int64_t stride) {
        amx::load<0>(from, stride);
        if constexpr (COLUMN_TILES == 2) amx::load<1>(from + LANES, stride);
        if constexpr (ROW_TILES == 2) amx::load<2>(below(from, stride), stride);
        if constexpr (ROW_TILES == 2 && COLUMN_TILES == 2) amx::load<3>(below(from, stride) + LANES, stride);
    }

    template <int ROW_TILES, int COLUMN_TILES>
    static inline __attribute__((always_inline)) void store(float* to, int64_t stride) {
        amx::store<0>(to, stride);
        if constexpr (COLUMN_TILES == 2) amx::store<1>(to + LANES, stride);
        if constexpr (ROW_TILES == 2) amx::store<2>(below(to, stride), stride);
        if constexpr (ROW_TILES == 2 && COLUMN_TILES == 2) amx::store<3>(below(to, stride) + LANES, stride);
    }

    // The second row tile.
    template <class Number_>
    static Number_* below(Number_* first, int64_t stride) {
        return first + amx::MAX_ROWS * (stride / int64_t(sizeof(Number_)));
    }

    int64_t dim_, padded_dim_;
    bool has_two_;
    amx::Tiles tiles_;
};

#endif

}  // namespace engine
