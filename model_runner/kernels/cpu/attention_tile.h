// Tile items: tokens and keys that they have in common, one KV head, by matrix products.
//
// Block by block of keys, and of each strip by strip of rows: scores, weights, weighted values. A row's weights are
// relative to one of its scores, the largest until it is passed by far: what the row has so far is rarely scaled anew.
//
// In bfloat16 weights are cut, not rounded, and it is cut weights that are added up, too: what a cut takes from a
// weighted value it takes from the sum by which that is divided. (Weights of quantised values are rounded: their sums
// know nothing of the scales.)

#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "attention_products.h"
#include "parallel.h"

namespace engine {

template <class T, class KV>
class Tile {
  public:
    explicit Tile(const AttentionInputs<T, KV>& inputs)
        : in_(inputs), step_(inputs.step), packer_(inputs), scale_(IS_QUANTISED ? 1.0f : inputs.score_scale()) {}

    void run(const Item& item) const {
        Products products(step_.head_dim, packer_.padded_dim(), (item.last - item.first) * step_.group);
        Room room = make_room(item.last - item.first);
        gather_queries(item, room);
        int64_t first = std::max(*std::min_element(room.from, room.from + room.num_rows), item.start);
        int64_t last = *std::max_element(room.to, room.to + room.num_rows);
        for (int64_t key = first / TILE_KEYS * TILE_KEYS; key < last; key += TILE_KEYS) {
            Block block = find_block(item, key, first, last, room);
            for (int64_t row = 0; row < room.num_rows; row += ROWS) strip(products, row, key, block, room);
        }
        write_results(item, room);
    }

  private:
    static constexpr bool IS_QUANTISED = AttentionInputs<T, KV>::IS_QUANTISED;
    static constexpr float HEADROOM = 8.0f;  // a power of 2: how much larger than 1 a weight may become
    static constexpr int64_t STEP = 2 * LANES;  // keys of a strip come in so many
    typedef typename Packer<T, KV>::Kind Kind;
    typedef typename Kind::Number Number;
    typedef engine::Block<typename Kind::Step> Block;
    static constexpr bool IS_PAIRS = Kind::NUMBERS == 2;
#if TILES
    typedef typename std::conditional<IS_PAIRS, TileProducts, VectorProducts<Kind>>::type Products;
#else
    typedef VectorProducts<Kind> Products;
#endif
    static constexpr int64_t ROWS = Products::ROWS;

    // What a thread works with; rows are the query heads of all tokens, a token's heads side by side.
    struct Room {
        int64_t num_rows, padded_rows;
        Number* queries;     // [padded_rows][padded_dim]
        float* values;       // [padded_rows][head_dim]
        float* relative_to;  // [padded_rows]: the score whose weight is 1
        float* sums_of;      // [padded_rows][LANES]: added up in the end
        int64_t *from, *to;  // [padded_rows], keys that a row sees
        float* scores;       // [ROWS][TILE_KEYS]
        Number* weights;     // [ROWS][TILE_KEYS]
        char* packed;        // a block
    };

    Room make_room(int64_t num_tokens) const {
        static thread_local Scratch scratch;
        Room room;
        int64_t dim = step_.head_dim;
        room.num_rows = num_tokens * step_.group;
        room.padded_rows = (room.num_rows + ROWS - 1) / ROWS * ROWS;
        size_t rows = size_t(room.padded_rows), all = 0;
        auto place = [&](size_t bytes) {
            size_t at = all;
            all += (bytes + 63) / 64 * 64;
            return at;
        };
        size_t queries = place(sizeof(Number) * rows * packer_.padded_dim()), values = place(sizeof(float) * rows * dim),
               relative_to = place(sizeof(float) * rows), sums_of = place(sizeof(float) * rows * LANES),
               from = place(sizeof(int64_t) * rows), to = place(sizeof(int64_t) * rows),
               scores = place(sizeof(float) * ROWS * TILE_KEYS), weights = place(sizeof(Number) * ROWS * TILE_KEYS),
               packed = place(size_t(packer_.block_bytes()));
        char* memory = scratch.get(all);
        room.queries = reinterpret_cast<Number*>(memory + queries);
        room.values = reinterpret_cast<float*>(memory + values);
        room.relative_to = reinterpret_cast<float*>(memory + relative_to);
        room.sums_of = reinterpret_cast<float*>(memory + sums_of);
        room.from = reinterpret_cast<int64_t*>(memory + from);
        room.to = reinterpret_cast<int64_t*>(memory + to);
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
            for (int64_t d = 0; d < dim; d += LANES) convert(from + d, room.queries + row * padded_dim + d);
        }
    }

    static void convert(const T* from, T* to) { std::memcpy(to, from, sizeof(T) * LANES); }
    template <class Other>
    static void convert(const T* from, Other* to) {
        store(to, load(from));
    }

    // The one that begins at `key`: packed for all items, or here; of it [first, last) is seen.
    Block find_block(const Item& item, int64_t key, int64_t first, int64_t last, Room& room) const {
        if (key < item.packed_to) return packer_.packed(item.packed + key / TILE_KEYS, item.kv_head);
        packer_.pack(step_.slots + item.table + key, std::max(first - key, int64_t(0)), std::min(last - key, TILE_KEYS),
                     item.kv_head, room.packed);
        return packer_.at(room.packed);
    }

    // One strip of rows with the block of keys that begins at `key`.
    void strip(const Products& products, int64_t row, int64_t key, const Block& block, Room& room) const {
        int64_t end = std::min(row + ROWS, room.num_rows);
        int64_t least = std::numeric_limits<int64_t>::max(), most = 0, least_to = least, most_from = 0;
        for (int64_t r = row; r < end; ++r) {
            least = std::min(least, room.from[r]);
            most_from = std::max(most_from, room.from[r]);
            least_to = std::min(least_to, room.to[r]);
            most = std::max(most, room.to[r]);
        }
        if (most <= key || least >= key + TILE_KEYS) return;
        int64_t num_keys = std::min((most - key + STEP - 1) / STEP * STEP, TILE_KEYS);
        bool all_seen = most_from <= key && least_to >= key + num_keys;
        products.score(room.queries + row * packer_.padded_dim(), block.keys, num_keys, room.scores);
        for (int64_t r = row; r < end; ++r) {
            float* scores = room.scores + (r - row) * TILE_KEYS;
            if constexpr (IS_QUANTISED)
                for (int64_t n = 0; n < num_keys; n += LANES)
                    store(scores + n, load(scores + n) * load(block.key_scales + n));
            if (!all_seen)
                for (int64_t n = 0; n < num_keys; n += LANES)
                    store(scores + n, only_between(load(scores + n), room.from[r] - key - n, room.to[r] - key - n));
            Number* weights = room.weights + (r - row) * TILE_KEYS;
            num_keys == TILE_KEYS ? weigh(scores, r, TILE_KEYS, block, weights, room)
                                  : weigh(scores, r, num_keys, block, weights, room);
        }
        products.add_values(room.weights, block.values, num_keys, room.values + row * step_.head_dim);
    }

    // Scores of one row to weights.
    inline __attribute__((always_inline)) void weigh(const float* scores, int64_t row, int64_t num_keys,
                                                     const Block& block, Number* weights, Room& room) const {
        f32x16 tops = load(scores), other_tops = load(scores + LANES);
        for (int64_t n = STEP; n < num_keys; n += STEP) {
            tops = maximum(tops, load(scores + n));
            other_tops = maximum(other_tops, load(scores + n + LANES));
        }
        tops = maximum(tops, other_tops) * scale_;
        if (any_above(tops, room.relative_to[row] + HEADROOM)) raise(row, largest(tops), room);
        float shift = room.relative_to[row] == NOTHING ? 0.0f : room.relative_to[row];
        f32x16 total = load(room.sums_of + row * LANES), other_total = {};
        for (int64_t n = 0; n < num_keys; n += STEP) {
            f32x16 first = load(scores + n) * scale_ - shift, second = load(scores + n + LANES) * scale_ - shift;
            if constexpr (IS_PAIRS) {
                first = exp2_rough(first);
                second = exp2_rough(second);
                if constexpr (IS_QUANTISED) {
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
                first = exp2_small(first);
                second = exp2_small(second);
                total += first;
                other_total += second;
                if constexpr (IS_QUANTISED) {
                    first *= load(block.value_scales + n);
                    second *= load(block.value_scales + n + LANES);
                }
                store(weights + n, first);
                store(weights + n + LANES, second);
            }
        }
        store(room.sums_of + row * LANES, total + other_total);
    }

    // A score of the row is larger by far than the one whose weight is 1, or no number.
    __attribute__((noinline)) void raise(int64_t row, float top, Room& room) const {
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
                float scale = 1.0f / sum(load(room.sums_of + row * LANES));
                for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(values + d) * scale);
                continue;
            }
            float* to = in_.result(step_.partials[entry], head);
            to[0] = room.relative_to[row];
            to[1] = sum(load(room.sums_of + row * LANES));
            std::memcpy(to + LANES, values, sizeof(float) * dim);
        }
    }

    const AttentionInputs<T, KV>& in_;
    const Step& step_;
    Packer<T, KV> packer_;
    float scale_;  // of the products
};

}  // namespace engine
