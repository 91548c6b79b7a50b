// Tile items: tokens and keys that they have in common, one KV head, by matrix products.

#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "attention_inputs.h"
#include "parallel.h"
#include "tile.h"

namespace engine {

template <class T, class KV>
class Tile {
  public:
    explicit Tile(const AttentionInputs<T, KV>& inputs) : in_(inputs), step_(inputs.step) {}

    void run(const Item& item) const {
        Room room = make_room(item.last - item.first);
        gather_queries(item, room);
        int64_t first = *std::min_element(room.from, room.from + room.num_rows);
        int64_t last = *std::max_element(room.to, room.to + room.num_rows);
        for (int64_t key = std::max(first, item.start) / KEY_BLOCK * KEY_BLOCK; key < last; key += KEY_BLOCK) {
            int64_t begin = std::max({key, first, item.start}) - key;  // keys of the block that somebody sees
            int64_t end = std::min(last - key, KEY_BLOCK);
            const int32_t* slots = step_.slots + item.table + key;
            pack_keys(slots, begin, end, item.kv_head, room);
            pack_values(slots, begin, end, item.kv_head, room);
            if constexpr (IS_QUANTISED) find_scales(slots, begin, end, item.kv_head, room);
            for (int64_t row = 0; row < room.padded_rows; row += TILE_ROWS) strip(row, key, room);
        }
        write_results(item, room);
    }

  private:
    static constexpr int64_t KEY_VECTORS = KEY_BLOCK / LANES;
    static constexpr bool IS_QUANTISED = AttentionInputs<T, KV>::IS_QUANTISED;
#if HAS_BF16_DOT
    typedef typename std::conditional<sizeof(T) == 2, Pairs, Floats>::type Kind;
#else
    typedef Floats Kind;
#endif
    typedef typename Kind::Number Number;
    typedef typename Kind::Step Packed;

    // What a thread works with; rows are the query heads of all tokens, a token's heads side by side.
    struct Room {
        int64_t num_rows, padded_rows, padded_dim;
        Number* queries;   // [padded_rows][padded_dim]
        float* values;     // [padded_rows][head_dim]
        float* largest_of; // [padded_rows]
        float* sums_of;    // [padded_rows][LANES]: added up in the end
        int64_t *from, *to;  // [padded_rows], keys that a row sees
        Packed* keys;      // [padded_dim / NUMBERS][KEY_BLOCK]
        Packed* packed_values;  // [KEY_BLOCK / NUMBERS][head_dim]
        alignas(64) float key_scales[KEY_BLOCK];  // of quantised pools, with the scale of all scores
        alignas(64) float value_scales[KEY_BLOCK];
    };

    Room make_room(int64_t num_tokens) const {
        static thread_local Scratch scratch;
        Room room;
        int64_t dim = step_.head_dim;
        room.num_rows = num_tokens * step_.group;
        room.padded_rows = (room.num_rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
        int64_t unit = LANES * Kind::NUMBERS;
        room.padded_dim = (dim + unit - 1) / unit * unit;
        size_t sizes[] = {sizeof(Number) * room.padded_rows * room.padded_dim,
                          sizeof(float) * room.padded_rows * dim,
                          sizeof(float) * room.padded_rows,
                          sizeof(float) * room.padded_rows * LANES,
                          sizeof(int64_t) * room.padded_rows,
                          sizeof(int64_t) * room.padded_rows,
                          sizeof(Packed) * room.padded_dim / Kind::NUMBERS * KEY_BLOCK,
                          sizeof(Packed) * KEY_BLOCK / Kind::NUMBERS * dim};
        size_t all = 0;
        for (size_t& size : sizes) {
            size = (size + 63) / 64 * 64;
            all += size;
        }
        char* at = scratch.get(all);
        char* parts[8];
        for (int n = 0; n < 8; ++n) {
            parts[n] = at;
            at += sizes[n];
        }
        room.queries = reinterpret_cast<Number*>(parts[0]);
        room.values = reinterpret_cast<float*>(parts[1]);
        room.largest_of = reinterpret_cast<float*>(parts[2]);
        room.sums_of = reinterpret_cast<float*>(parts[3]);
        room.from = reinterpret_cast<int64_t*>(parts[4]);
        room.to = reinterpret_cast<int64_t*>(parts[5]);
        room.keys = reinterpret_cast<Packed*>(parts[6]);
        room.packed_values = reinterpret_cast<Packed*>(parts[7]);
        return room;
    }

    void gather_queries(const Item& item, Room& room) const {
        int64_t dim = step_.head_dim;
        std::memset(room.queries, 0, sizeof(Number) * room.padded_rows * room.padded_dim);
        std::memset(room.values, 0, sizeof(float) * room.padded_rows * dim);
        std::memset(room.sums_of, 0, sizeof(float) * room.padded_rows * LANES);
        for (int64_t row = 0; row < room.padded_rows; ++row) {
            room.largest_of[row] = NOTHING;
            room.from[row] = std::numeric_limits<int64_t>::max();
            room.to[row] = 0;
            if (row >= room.num_rows) continue;
            int64_t token = step_.tokens[item.first + row / step_.group];
            int64_t head = item.kv_head * step_.group + row % step_.group;
            room.from[row] = std::max(item.start, step_.seen_from[token]);
            room.to[row] = std::min(item.stop, step_.seen_to[token]);
            const T* from = in_.q + token * in_.q_stride + head * dim;
            for (int64_t d = 0; d < dim; ++d) convert(from[d], room.queries + row * room.padded_dim + d);
        }
    }

    static void convert(T x, T* out) { *out = x; }
    template <class Other>
    static void convert(T x, Other* out) {
        from_float(to_float(x), out);
    }

    // A step of the products' numbers of a key; of quantised ones without their scale.
    static typename Kind::Vector load_numbers(const KV* p, int64_t left) {
        if constexpr (!IS_QUANTISED) return Kind::load_numbers(p, left);
#if HAS_BF16_DOT
        if constexpr (Kind::NUMBERS == 2) {  // exact: 8 bits are what bfloat16 has
            f32x16 second = left >= 2 * LANES ? load(p + LANES) : f32x16{};
            return (u32x16)_mm512_cvtne2ps_pbh((__m512)second, (__m512)load(p));
        }
#endif
        if constexpr (Kind::NUMBERS == 1) return load(p);
    }

    // Keys that nobody sees become zeros: their memory may hold anything.
    void pack_keys(const int32_t* slots, int64_t begin, int64_t end, int64_t kv_head, Room& room) const {
        typedef typename Kind::Vector Vector;
        int64_t dim = step_.head_dim;
        for (int64_t group = 0; group < KEY_BLOCK; group += LANES)
            for (int64_t d = 0; d < dim; d += LANES * Kind::NUMBERS) {
                Vector rows[LANES];
                for (int64_t n = 0; n < LANES; ++n) {
                    bool is_seen = group + n >= begin && group + n < end;
                    rows[n] = is_seen ? load_numbers(in_.k + slots[group + n] * in_.kv_stride() + kv_head * dim + d, dim - d)
                                      : Vector{};
                }
                transpose(rows);
                Packed* to = room.keys + d / Kind::NUMBERS * KEY_BLOCK + group;
                for (int64_t n = 0; n < LANES; ++n) std::memcpy(to + n * KEY_BLOCK, &rows[n], sizeof(Vector));
            }
    }

    void pack_values(const int32_t* slots, int64_t begin, int64_t end, int64_t kv_head, Room& room) const {
        int64_t dim = step_.head_dim;
        auto row = [&](int64_t n) { return in_.v + slots[n] * in_.kv_stride() + kv_head * dim; };
        for (int64_t n = 0; n < KEY_BLOCK; n += Kind::NUMBERS) {
            Packed* to = room.packed_values + n / Kind::NUMBERS * dim;
            bool has_first = n >= begin && n < end, has_second = n + 1 >= begin && n + 1 < end;
            if constexpr (Kind::NUMBERS == 2) {
                for (int64_t d = 0; d < dim; d += LANES) {
                    u32x16 first = has_first ? (u32x16)load(row(n) + d) : u32x16{};
                    u32x16 second = has_second ? (u32x16)load(row(n + 1) + d) : u32x16{};
                    u32x16 both = (first >> 16) | second;
                    std::memcpy(to + d, &both, sizeof both);
                }
            } else {
                for (int64_t d = 0; d < dim; d += LANES) store(to + d, has_first ? load(row(n) + d) : f32x16{});
            }
        }
    }

    void find_scales(const int32_t* slots, int64_t begin, int64_t end, int64_t kv_head, Room& room) const {
        for (int64_t n = 0; n < KEY_BLOCK; ++n) {
            bool is_seen = n >= begin && n < end;
            int64_t at = is_seen ? slots[n] * step_.num_kv_heads + kv_head : 0;
            room.key_scales[n] = is_seen ? in_.k_scale[at] * in_.score_scale() : 0.0f;
            room.value_scales[n] = is_seen ? in_.v_scale[at] : 0.0f;
        }
    }

    // One tile's rows with the block of keys that begins at `key`.
    void strip(int64_t row, int64_t key, Room& room) const {
        int64_t least = std::numeric_limits<int64_t>::max(), most = 0;
        bool all_seen = true;
        for (int64_t r = row; r < row + TILE_ROWS; ++r) {
            least = std::min(least, room.from[r]);
            most = std::max(most, room.to[r]);
            all_seen &= room.from[r] <= key && room.to[r] >= key + KEY_BLOCK;
        }
        if (most <= key || least >= key + KEY_BLOCK) return;
        alignas(64) float scores[TILE_ROWS][KEY_BLOCK];
        const Number* queries = room.queries + row * room.padded_dim;
        for (int v = 0; v < KEY_VECTORS; v += TILE_VECTORS) {
            f32x16 products[TILE_ROWS][TILE_VECTORS] = {};
            multiply_tile<Kind, TILE_ROWS, TILE_VECTORS>(queries, room.padded_dim, room.keys + v * LANES, KEY_BLOCK,
                                                         room.padded_dim / Kind::NUMBERS, products);
            for (int r = 0; r < TILE_ROWS; ++r)
                for (int n = 0; n < TILE_VECTORS; ++n) store(&scores[r][(v + n) * LANES], products[r][n]);
        }
        alignas(64) Number weights[TILE_ROWS][KEY_BLOCK];
        for (int r = 0; r < TILE_ROWS; ++r) weigh(scores[r], row + r, key, all_seen, weights[r], room);
        add_weighted(weights[0], row, room);
    }

    // Scores of one row to weights; what the row has so far is scaled to the new largest score.
    void weigh(const float* scores, int64_t row, int64_t key, bool all_seen, Number* weights, Room& room) const {
        f32x16 mine[KEY_VECTORS];
        f32x16 tops = splat(NOTHING);
        for (int v = 0; v < KEY_VECTORS; ++v) {
            if constexpr (IS_QUANTISED)
                mine[v] = load(scores + v * LANES) * load(room.key_scales + v * LANES);
            else
                mine[v] = load(scores + v * LANES) * in_.score_scale();
            if (!all_seen)
                mine[v] = only_between(mine[v], room.from[row] - key - v * LANES, room.to[row] - key - v * LANES);
            tops = maximum(tops, mine[v]);
        }
        float before = room.largest_of[row], most = before;
        if (any_above(tops, before)) most = std::max(before, largest(tops));
        float shift = most == NOTHING ? 0.0f : most;
        f32x16 total = {};
        for (int v = 0; v < KEY_VECTORS; ++v) {
            f32x16 weight = Kind::NUMBERS == 2 ? exp2_rough(mine[v] - shift) : exp2_small(mine[v] - shift);
            total += weight;
            if constexpr (IS_QUANTISED) weight *= load(room.value_scales + v * LANES);
            store(weights + v * LANES, weight);
        }
        float* sums = room.sums_of + row * LANES;
        if (before == most) {
            store(sums, load(sums) + total);
        } else {
            float kept = exp2_small(before - most);
            room.largest_of[row] = most;
            store(sums, load(sums) * kept + total);
            float* values = room.values + row * step_.head_dim;
            for (int64_t d = 0; d < step_.head_dim; d += LANES) store(values + d, load(values + d) * kept);
        }
    }

    void add_weighted(const Number* weights, int64_t row, Room& room) const {
        int64_t dim = step_.head_dim;
        for (int64_t d = 0; d < dim;) {
            int vectors = int(std::min<int64_t>(TILE_VECTORS, (dim - d) / LANES));
            float* values = room.values + row * dim + d;
            with_vectors<TILE_ROWS>(vectors, [&]<int ROWS, int VECTORS>() {
                f32x16 sums_of[ROWS][VECTORS];
                for (int r = 0; r < ROWS; ++r)
                    for (int v = 0; v < VECTORS; ++v) sums_of[r][v] = load(values + r * dim + v * LANES);
                multiply_tile<Kind, ROWS, VECTORS>(weights, KEY_BLOCK, room.packed_values + d, dim,
                                                   KEY_BLOCK / Kind::NUMBERS, sums_of);
                for (int r = 0; r < ROWS; ++r)
                    for (int v = 0; v < VECTORS; ++v) store(values + r * dim + v * LANES, sums_of[r][v]);
            });
            d += vectors * LANES;
        }
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
            to[0] = room.largest_of[row];
            to[1] = sum(load(room.sums_of + row * LANES));
            std::memcpy(to + LANES, values, sizeof(float) * dim);
        }
    }

    template <class Vector>
    static void transpose(Vector (&rows)[LANES]) {
        Vector w[LANES];
        for (int n = 0; n < 8; ++n) {  // 1x1 blocks of rows n and n + 8, and so on: four rounds of a perfect shuffle
            w[2 * n] = SHUFFLE(rows[n], rows[n + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            w[2 * n + 1] = SHUFFLE(rows[n], rows[n + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        for (int n = 0; n < 8; ++n) {
            rows[2 * n] = SHUFFLE(w[n], w[n + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            rows[2 * n + 1] = SHUFFLE(w[n], w[n + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        for (int n = 0; n < 8; ++n) {
            w[2 * n] = SHUFFLE(rows[n], rows[n + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            w[2 * n + 1] = SHUFFLE(rows[n], rows[n + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        for (int n = 0; n < 8; ++n) {
            rows[2 * n] = SHUFFLE(w[n], w[n + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            rows[2 * n + 1] = SHUFFLE(w[n], w[n + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
    }

    const AttentionInputs<T, KV>& in_;
    const Step& step_;
};

}  // namespace engine
