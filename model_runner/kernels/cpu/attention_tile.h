// Tile items: tokens and keys that they have in common, one KV head, computed by matmuls.
//
// The loop goes block by block of keys and, for each block, by row tiles: scores, weights, weighted values. The weights
// of a row are relative to one of its scores (the reference) until a much larger score appears, so accumulators are
// rarely rescaled. Usually the norms of queries and keys alone prove that no such score exists.
//
// bfloat16 weights are truncated, not rounded, and the truncated weights are summed: numerator and denominator lose the
// same. (Weights of quantized values are rounded, because the denominator does not include the value scales.)

#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "attention_products.h"
#include "parallel.h"

namespace engine {

// Caps the scores of some rows; cap: in the unit of these scores. A cold function, because a part of the callers'
// inlining depends on their size: the loops of models without a cap stay as they are.
__attribute__((noinline, cold)) inline void cap_scores(float* scores, int64_t rows, int64_t num_keys, float cap) {
    SoftCap capped(cap);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t n = 0; n < num_keys; n += LANES) {
            float* at = scores + row * TILE_KEYS + n;
            store(at, capped(load(at)));
        }
}

template <class T, class KV>
class Tile {
  public:
    explicit Tile(const AttentionInputs<T, KV>& inputs)
        : in_(inputs), step_(inputs.step), packer_(inputs), scale_(IS_QUANTISED ? 1.0f : inputs.step.score_scale) {}

    void run(const Item& item) const {
        Products products(step_.head_dim, packer_.padded_dim(), (item.last - item.first) * step_.group);
        Room room = make_room(item.last - item.first);
        gather_queries(item, room);
        int64_t first = std::max(*std::min_element(room.from, room.from + room.num_rows), item.start);
        int64_t last = *std::max_element(room.to, room.to + room.num_rows);
        for (int64_t key = first / TILE_KEYS * TILE_KEYS; key < last; key += TILE_KEYS) {
            Block block = find_block(item, key, first, last, room);
            for (int64_t n = 0; n < room.num_row_tiles; ++n) add(products, room.row_tiles[n], key, block, room);
        }
        write_results(item, room);
    }

  private:
    static constexpr bool IS_QUANTISED = AttentionInputs<T, KV>::IS_QUANTISED;
    static constexpr float HEADROOM = 64.0f;  // log2 of the largest weight: scores exceed the reference by at most this
    typedef typename Packer<T, KV>::Kind Kind;
    typedef typename Kind::Number Number;
    typedef engine::Block<typename Kind::Step> Block;
    static constexpr bool IS_PAIRS = Kind::NUMBERS == 2, IS_SCALED_LATER = Packer<T, KV>::IS_SCALED_LATER;
#if TILES
    typedef typename std::conditional<IS_PAIRS, TileProducts, VectorProducts<Kind>>::type Products;
#else
    typedef VectorProducts<Kind> Products;
#endif
    static constexpr int64_t ROWS = Products::ROWS, KEYS = Products::KEYS;

    // Rows that are multiplied together: a row tile.
    struct RowTile {
        int64_t first, end;
        int64_t least_from, most_from, least_to, most_to;  // keys that its rows see
        float norm;            // the norm of the longest query
        float least_relative;  // the smallest reference of its rows
    };

    // Workspace of one thread; rows are the query heads of all tokens, those of a token contiguous.
    struct Room {
        int64_t num_rows, padded_rows;
        Number* queries;     // [padded_rows][padded_dim]
        float* values;       // [padded_rows][head_dim]
        float* relative_to;  // [padded_rows]: the reference, the score with weight 1
        float* sums_of;      // [padded_rows][LANES]: sums of weights, reduced at the end
        int64_t *from, *to;  // [padded_rows], keys that a row sees
        RowTile* row_tiles;  // [num_row_tiles]
        int64_t num_row_tiles;
        float* scores;       // [ROWS][TILE_KEYS]
        Number* weights;     // [ROWS][TILE_KEYS]
        char* packed;        // one block
    };

    Room make_room(int64_t num_tokens) const {
        static thread_local Scratch scratch;
        Room room;
        int64_t dim = step_.head_dim;
        room.num_rows = num_tokens * step_.group;
        room.num_row_tiles = (room.num_rows + ROWS - 1) / ROWS;
        room.padded_rows = room.num_row_tiles * ROWS;
        size_t rows = size_t(room.padded_rows), all = 0;
        auto place = [&](size_t bytes) {
            size_t at = all;
            all += (bytes + 63) / 64 * 64;
            return at;
        };
        size_t queries = place(sizeof(Number) * rows * packer_.padded_dim()), values = place(sizeof(float) * rows * dim),
               relative_to = place(sizeof(float) * rows), sums_of = place(sizeof(float) * rows * LANES),
               from = place(sizeof(int64_t) * rows), to = place(sizeof(int64_t) * rows),
               row_tiles = place(sizeof(RowTile) * room.num_row_tiles), scores = place(sizeof(float) * ROWS * TILE_KEYS), weights = place(sizeof(Number) * ROWS * TILE_KEYS),
               packed = place(size_t(packer_.block_bytes()));
        char* memory = scratch.get(all);
        room.queries = reinterpret_cast<Number*>(memory + queries);
        room.values = reinterpret_cast<float*>(memory + values);
        room.relative_to = reinterpret_cast<float*>(memory + relative_to);
        room.sums_of = reinterpret_cast<float*>(memory + sums_of);
        room.from = reinterpret_cast<int64_t*>(memory + from);
        room.to = reinterpret_cast<int64_t*>(memory + to);
        room.row_tiles = reinterpret_cast<RowTile*>(memory + row_tiles);
        room.scores = reinterpret_cast<float*>(memory + scores);
        room.weights = reinterpret_cast<Number*>(memory + weights);
        room.packed = memory + packed;
        return room;
    }

    void gather_queries(const Item& item, Room& room) const {
        int64_t dim = step_.head_dim, padded_dim = packer_.padded_dim();
        std::memset(room.queries, 0, sizeof(Number) * room.padded_rows * padded_dim);
        std::memset(room.values, 0, sizeof(float) * room.padded_rows * dim);
        std::memset(room.sums_of, 0, sizeof(float) * room.padded_rows * LANES);
        for (int64_t row = 0; row < room.padded_rows; ++row) {
            room.relative_to[row] = NOTHING;
            room.from[row] = std::numeric_limits<int64_t>::max();
            room.to[row] = 0;
            if (row >= room.num_rows) continue;
            int64_t token = step_.tokens[item.first + row / step_.group];
            int64_t head = item.kv_head * step_.group + row % step_.group;
            room.from[row] = std::max(item.start, step_.seen_from[token]);
            room.to[row] = std::min(item.stop, step_.seen_to[token]);
            const T* from = in_.q + token * in_.q_stride + head * dim;
            f32x16 squares = {};
            for (int64_t d = 0; d < dim; d += LANES) {
                convert(from + d, room.queries + row * padded_dim + d);
                squares += load(from + d) * load(from + d);
            }
            room.sums_of[row * LANES] = sum(squares);  // used by make_row_tile, then cleared
        }
        for (int64_t n = 0; n < room.num_row_tiles; ++n) room.row_tiles[n] = make_row_tile(n * ROWS, room);
    }

    RowTile make_row_tile(int64_t first, Room& room) const {
        RowTile row_tile{first, std::min(first + ROWS, room.num_rows), room.from[first], 0, room.to[first], 0, 0.0f, NOTHING};
        float longest = 0.0f;
        for (int64_t row = first; row < row_tile.end; ++row) {
            row_tile.least_from = std::min(row_tile.least_from, room.from[row]);
            row_tile.most_from = std::max(row_tile.most_from, room.from[row]);
            row_tile.least_to = std::min(row_tile.least_to, room.to[row]);
            row_tile.most_to = std::max(row_tile.most_to, room.to[row]);
            longest = std::max(longest, room.sums_of[row * LANES]);
            room.sums_of[row * LANES] = 0.0f;
        }
        row_tile.norm = __builtin_sqrtf(longest);
        return row_tile;
    }

    static void convert(const T* from, T* to) { std::memcpy(to, from, sizeof(T) * LANES); }
    template <class Other>
    static void convert(const T* from, Other* to) {
        store(to, load(from));
    }

    // The block that begins at `key`: packed for all items, or packed here; its positions [first, last) are seen.
    Block find_block(const Item& item, int64_t key, int64_t first, int64_t last, Room& room) const {
        if (key < item.packed_to) return packer_.packed(item.packed + key / TILE_KEYS, item.kv_head);
        packer_.pack(step_.slots + item.table + key, std::max(first - key, int64_t(0)), std::min(last - key, TILE_KEYS),
                     item.kv_head, room.packed);
        return packer_.at(room.packed);
    }

    // Multiplies one row tile with the block of keys that begins at `key`.
    void add(const Products& products, RowTile& row_tile, int64_t key, const Block& block, Room& room) const {
        if (row_tile.most_to <= key || row_tile.least_from >= key + TILE_KEYS) return;
        int64_t num_keys = std::min((row_tile.most_to - key + KEYS - 1) / KEYS * KEYS, TILE_KEYS);
        bool all_seen = row_tile.most_from <= key && row_tile.least_to >= key + num_keys;
        products.score(room.queries + row_tile.first * packer_.padded_dim(), block.keys, num_keys, room.scores);
        for (int64_t row = row_tile.first; IS_SCALED_LATER && row < row_tile.end; ++row)
            for (int64_t n = 0; n < num_keys; n += LANES) {
                float* at = room.scores + (row - row_tile.first) * TILE_KEYS + n;
                store(at, load(at) * load(block.key_scales + n));
            }
        if (step_.score_cap > 0.0f) [[unlikely]]
            cap_scores(room.scores, row_tile.end - row_tile.first, num_keys, step_.score_cap / scale_);
        for (int64_t row = row_tile.first; !all_seen && row < row_tile.end; ++row)
            hide(room.from[row] - key, room.to[row] - key, num_keys, room.scores + (row - row_tile.first) * TILE_KEYS);
        // Cauchy-Schwarz: no score exceeds the product of the norms; caps only make scores smaller.
        bool fits = row_tile.norm * *block.norm * scale_ * 1.01f <= row_tile.least_relative + HEADROOM;
        if (!fits) raise(row_tile, num_keys, room);
        num_keys == TILE_KEYS ? weigh(row_tile, TILE_KEYS, block, room) : weigh(row_tile, num_keys, block, room);
        products.add_values(room.weights, block.values, num_keys, room.values + row_tile.first * step_.head_dim);
    }

    // Masks the block's keys outside [from, to) for one row.
    static void hide(int64_t from, int64_t to, int64_t num_keys, float* scores) {
        for (int64_t n = 0; n < num_keys; n += LANES)
            if (n < from || n + LANES > to) store(scores + n, only_between(load(scores + n), from - n, to - n));
    }

    // Turns scores into weights.
    inline __attribute__((always_inline)) void weigh(const RowTile& row_tile, int64_t num_keys, const Block& block,
                                                     Room& room) const {
        const float* scores = room.scores;
        Number* weights = room.weights;
        for (int64_t row = row_tile.first; row < row_tile.end; ++row, scores += TILE_KEYS, weights += TILE_KEYS) {
            float shift = room.relative_to[row] == NOTHING ? 0.0f : room.relative_to[row];
            f32x16 total = load(room.sums_of + row * LANES), other_total = {};
            auto weight = [&](int64_t n) { return power(load(scores + n) * scale_ - shift); };
#pragma GCC unroll 4
            for (int64_t n = 0; n < num_keys; n += KEYS) {
                f32x16 first = weight(n);
                if constexpr (IS_PAIRS) {
                    f32x16 second = weight(n + LANES);
                    if constexpr (IS_SCALED_LATER) {
                        total += first;
                        other_total += second;
                        first = round_up(first * load(block.value_scales + n));
                        second = round_up(second * load(block.value_scales + n + LANES));
                    } else {
                        total += upper_half(first);
                        other_total += upper_half(second);
                    }
                    u32x16 pairs = upper_halves(first, second);
                    std::memcpy(weights + n, &pairs, sizeof pairs);
                } else {
                    total += first;
                    store(weights + n, first);
                }
            }
            store(room.sums_of + row * LANES, total + other_total);
        }
    }

    static f32x16 power(f32x16 x) { return sizeof(T) == 2 ? exp2_rough(x) : exp2_small(x); }

    // Checks the rows for scores that are too large for their reference.
    __attribute__((noinline)) void raise(RowTile& row_tile, int64_t num_keys, Room& room) const {
        row_tile.least_relative = -NOTHING;
        for (int64_t row = row_tile.first; row < row_tile.end; ++row) {
            const float* scores = room.scores + (row - row_tile.first) * TILE_KEYS;
            f32x16 tops = splat(NOTHING);
            for (int64_t n = 0; n < num_keys; n += LANES) tops = maximum(tops, load(scores + n));
            tops *= scale_;
            if (any_above(tops, room.relative_to[row] + HEADROOM)) raise(row, largest(tops), room);
            row_tile.least_relative = std::min(row_tile.least_relative, room.relative_to[row]);
        }
    }

    // A score of the row exceeds the reference by far, or is NaN.
    void raise(int64_t row, float top, Room& room) const {
        float before = room.relative_to[row];
        if (!(top > before)) return;
        room.relative_to[row] = top;
        float kept = exp2_small(before - top);
        float *sums = room.sums_of + row * LANES, *values = room.values + row * step_.head_dim;
        store(sums, load(sums) * kept);
        for (int64_t d = 0; d < step_.head_dim; d += LANES) store(values + d, load(values + d) * kept);
    }

    void write_results(const Item& item, const Room& room) const {
        int64_t dim = step_.head_dim;
        for (int64_t row = 0; row < room.num_rows; ++row) {
            int64_t entry = item.first + row / step_.group, head = item.kv_head * step_.group + row % step_.group;
            const float* values = room.values + row * dim;
            if (step_.partials[entry] < 0) {
                T* to = in_.out + (step_.tokens[entry] * step_.num_heads() + head) * dim;
                float scale = final_scale(sum(load(room.sums_of + row * LANES)), room.relative_to[row], in_.sink(head));
                for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(values + d) * scale);
                continue;
            }
            float* to = in_.result(step_.partials[entry], head);
            to[0] = room.relative_to[row];
            to[1] = sum(load(room.sums_of + row * LANES));
            std::memcpy(to + LANES, values, sizeof(float) * dim);
        }
    }

    // The factor of a row's values: 1 / the sum of its weights, to which the sink adds one.
    static float final_scale(float total, float relative_to, float sink) {
        if (sink == NOTHING) return 1.0f / total;
        float most = std::max(relative_to, sink), kept = exp2_small(relative_to - most);
        return kept / (total * kept + exp2_small(sink - most));
    }

    const AttentionInputs<T, KV>& in_;
    const Step& step_;
    Packer<T, KV> packer_;
    float scale_;  // softmax scale of the scores
};

}  // namespace engine
