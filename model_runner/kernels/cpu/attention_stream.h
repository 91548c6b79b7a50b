// Stream items: a piece of a request's keys and the tokens that it decodes. With one token, memory bandwidth is the
// limit.
//
// The loop works on blocks of 64 keys: scores of all heads, weights of all heads, weighted values of all heads. The
// next rows are prefetched meanwhile (attention_ahead.h).
//
// When drafts are verified, the heads of all tokens use a row while it is in registers. The bits of a token are those
// of a separate decode: a later key has weight 0, which leaves accumulators unchanged. (A NaN value at a later key
// would not; but then the draft's own tokens are NaN, and the model is broken.)

#pragma once

#include <algorithm>

#include "attention_ahead.h"
#include "attention_inputs.h"
#include "attention_words.h"
#include "parallel.h"

// GCC 12 stops inlining add_columns and its callers as soon as code is added elsewhere in the class: one thread then
// takes 37 instead of 28 ns for a key and its value from a cache (Zen 4, 3 heads of 64).
#define INNER_LOOP __attribute__((always_inline))

namespace engine {

template <class T, class KV>
class Stream {
  public:
    explicit Stream(const AttentionInputs<T, KV>& inputs)
        : in_(inputs),
          step_(inputs.step),
          padded_dim_((step_.head_dim + CHUNK - 1) / CHUNK * CHUNK),
          score_scale_(inputs.step.score_scale) {}

    // `next`: the item that this thread computes next, or null.
    void run(const Item& item, const Item* next) {
        heads_per_kv_ = (item.last - item.first) * step_.group;
        make_room();
        begin(item);
        const int32_t* slots = step_.slots + item.table;
        for (int64_t key = item.start; key < item.stop; key += KEY_BLOCK) {
            int64_t behind = key + KEY_BLOCK;
            Rows after = behind < item.stop ? rows_at(slots + behind, item.stop - behind)
                         : next != nullptr  ? rows_at(step_.slots + next->table + next->start, next->stop - next->start)
                                            : Rows{nullptr, 0};
            block(key, rows_at(slots + key, item.stop - key), after);
        }
        for (int64_t head = 0; head < num_heads(); ++head) Dots::put_in_order(heads_[head].values(), step_.head_dim);
    }

  private:
    typedef typename DotsOf<T, KV>::type Dots;
    typedef typename Dots::Sum Sum;  // a register
    typedef std::conditional_t<std::is_same_v<Sum, f32r>, f32x16, i32x16> SumVector;
    typedef typename Dots::Query Query;
    typedef typename Dots::Weight Weight;
    typedef FetchAhead<KV> Ahead;
    static constexpr bool KV_IS_QUANTISED = AttentionInputs<T, KV>::IS_QUANTISED;
    static constexpr bool IS_WORDS = std::is_same<Dots, WordDots>::value;
    static constexpr bool IS_WIDE = std::is_same<Dots, WideDots>::value;
    static constexpr int MAX_GROUP = 4;  // query heads per pass; larger groups make another pass over cached rows
    static constexpr int QUARTER = 4;    // keys reduced together
    // Registers of sums in a loop; the others are for keys or values, and queries or weights.
#if defined(__AVX512F__)
    static constexpr int MAX_SUMS = 16;
#elif defined(__AVX2__)
    static constexpr int MAX_SUMS = 8;
#else
    static constexpr int MAX_SUMS = 2;  // vectors
#endif
    // In a loop over keys: keys of a quarter, and registers of a chunk; in a loop over values: registers of chunks.
    template <int GROUP>
    static constexpr int KEYS_AT_ONCE = GROUP * QUARTER * REGISTERS <= MAX_SUMS ? QUARTER : 2;
    template <int GROUP>
    static constexpr int KEY_COLUMNS = GROUP * KEYS_AT_ONCE<GROUP> * REGISTERS <= MAX_SUMS ? REGISTERS : 1;
    template <int GROUP>
    static constexpr int VALUE_COLUMNS = std::clamp(MAX_SUMS / (2 * GROUP), 1, 2);
    // Keys per pass over the values: more keys load and store accumulators less often; fewer use rows as they arrive.
    static constexpr int64_t VALUES_AT_ONCE = IS_WORDS ? KEY_BLOCK : LANES;
    static constexpr int TURNS_OF_WEIGHTS = IS_WORDS ? 2 : 4;  // FetchAhead turns per head while computing weights

    // Compile-time knowledge of a head's dimensions: none, a multiple of the chunk size, or the exact number. The more
    // is known, the fewer branches remain in the innermost loops.
    static constexpr int ANY = 0, WHOLE = 1;

    // The same in loops over GROUP heads. On AVX2, compilers that know the number keep whole queries on the stack.
    template <int GROUP, int DIM>
    static constexpr int KNOWN = REGISTERS > 1 && GROUP > 1 && DIM > WHOLE ? WHOLE : DIM;

    template <int DIM>
    int64_t dim_of() const {
        return DIM > WHOLE ? DIM : step_.head_dim;
    }

    static Rows rows_at(const int32_t* slots, int64_t count) { return {slots, std::min(count, KEY_BLOCK)}; }

    // One query head of one of the tokens.
    struct Head {
        const Query* query;
        float* state;     // its partial result: the maximum score, the sum of the weights, the weighted values
        int64_t seen_to;  // end of the keys that it sees, exclusive
        float query_scale, value_scale;  // if queries and weights are integers
        float kept;                      // likewise: factor for the values accumulated so far

        float* values() const { return state + LANES; }
    };

    // ------------------------------------------------------------ items

    int64_t num_heads() const { return step_.num_kv_heads * heads_per_kv_; }

    void make_room() {
        static thread_local Scratch scratch;
        int64_t heads = num_heads(), per_key = heads * KEY_BLOCK;
        size_t all = (sizeof(Head) * heads + 63) / 64 * 64;
        size_t queries = IS_WORDS || IS_WIDE ? sizeof(Query) * heads * padded_dim_ : 0;
        size_t scales = KV_IS_QUANTISED ? sizeof(float) * step_.num_kv_heads * KEY_BLOCK : 0;
        char* at = scratch.get(all + queries + (sizeof(float) + sizeof(Weight)) * per_key + 2 * scales);
        heads_ = reinterpret_cast<Head*>(at);
        queries_ = reinterpret_cast<Query*>(at += all);
        scores_ = reinterpret_cast<float*>(at += queries);
        weights_ = reinterpret_cast<Weight*>(at += sizeof(float) * per_key);
        key_scales_ = reinterpret_cast<float*>(at += sizeof(Weight) * per_key);
        token_value_scales_ = reinterpret_cast<float*>(at += scales);
    }

    // Heads that read the same KV head are contiguous: those of the first token, then those of the next.
    void begin(const Item& item) {
        int64_t group = step_.group, num_tokens = item.last - item.first;
        for (int64_t n = 0; n < num_tokens; ++n) {
            int64_t token = step_.tokens[item.first + n], partial = step_.partials[item.first + n];
            for (int64_t kv_head = 0; kv_head < step_.num_kv_heads; ++kv_head)
                for (int64_t g = 0; g < group; ++g) {
                    int64_t head = kv_head * group + g, place = (kv_head * num_tokens + n) * group + g;
                    Head& mine = heads_[place];
                    mine.seen_to = step_.seen_to[token];
                    mine.state = in_.result(partial, head);
                    mine.state[0] = NOTHING;
                    mine.state[1] = 0.0f;
                    std::memset(mine.values(), 0, sizeof(float) * padded_dim_);
                    use_query(in_.q + token * in_.q_stride + head * step_.head_dim, queries_ + place * padded_dim_, mine);
                }
        }
    }

    void use_query(const T* q, [[maybe_unused]] Query* room, Head& head) const {
        if constexpr (IS_WORDS) {
            head.query_scale = quantize_query(q, step_.head_dim, padded_dim_, room);
            head.query = room;
        } else if constexpr (IS_WIDE) {
            for (int64_t d = 0; d < step_.head_dim; d += CHUNK) {
                for (int r = 0; r < REGISTERS; ++r) {
                    typename Dots::Row row = Dots::load_row(q + d, r, step_.head_dim - d);
                    for (int u = 0; u < 2; ++u) put(room + d + u * LANES + r * REGISTER_LANES, row.parts[u]);
                }
            }
            head.query = room;
        } else {
            head.query = q;
        }
    }

    // ------------------------------------------------------------ blocks

    void block(int64_t key, Rows rows, Rows after) {
        // Common sizes only: specializing the other kinds saves no time, because they wait for memory.
        if constexpr (IS_WORDS && sizeof(T) == 2) {
            if (step_.head_dim == 64) return block<64>(key, rows, after);
            if (step_.head_dim == 128) return block<128>(key, rows, after);
        }
        step_.head_dim % CHUNK ? block<ANY>(key, rows, after) : block<WHOLE>(key, rows, after);
    }

    typename Ahead::Part keys_of(Rows rows) const { return {in_.k, in_.k_scale, rows}; }
    typename Ahead::Part values_of(Rows rows) const { return {in_.v, in_.v_scale, rows}; }

    template <int DIM>
    void block(int64_t key, Rows rows, Rows after) {
        int64_t sixteens = (rows.count + LANES - 1) / LANES;
        Ahead of_scores(step_, keys_of(rows), values_of(rows), num_passes() * sixteens * (LANES / QUARTER));
        find_rows(in_.k, rows, sixteens * LANES);
        for (int64_t from = 0; from < rows.count; from += LANES)
            for_heads([&]<int GROUP>(int64_t kv_head, int64_t head) INNER_LOOP {
                score<GROUP, KNOWN<GROUP, DIM>>(kv_head, head, from, of_scores);
            });
        if constexpr (KV_IS_QUANTISED) {
            find_scales(rows.slots, rows.count);
        }
        int64_t quarters = (rows.count + QUARTER - 1) / QUARTER;
        Ahead of_values(step_, values_of(rows), keys_of(after),
                        num_heads() * TURNS_OF_WEIGHTS + num_passes() * quarters * (QUARTER / 2));
        bool is_capped = step_.score_cap > 0.0f;
        for (int64_t head = 0; head < num_heads(); ++head) {
            int64_t seen = std::min(rows.count, heads_[head].seen_to - key);
            is_capped ? weigh<true>(head, rows.count, seen) : weigh<false>(head, rows.count, seen);
            for (int n = 0; n < TURNS_OF_WEIGHTS; ++n) of_values.turn();
        }
        find_rows(in_.v, rows, quarters * QUARTER);
        for (int64_t from = 0; from < rows.count; from += VALUES_AT_ONCE) {
            int64_t to = std::min(from + VALUES_AT_ONCE, quarters * QUARTER);
            for_heads([&]<int GROUP>(int64_t kv_head, int64_t head) INNER_LOOP {
                add_values<GROUP, KNOWN<GROUP, DIM>>(kv_head, head, from, to, of_values);
            });
        }
    }

    // Heads of a KV head that a pass may mix. Only those of one token if the compiler chooses how to contract a * b +
    // c: it does so for each GROUP, and a head must use the GROUP that it has in a decode.
    int64_t unit() const { return Dots::MIXES ? heads_per_kv_ : step_.group; }

    int64_t num_passes() const { return num_heads() / unit() * ((unit() + MAX_GROUP - 1) / MAX_GROUP); }

    // Calls body<GROUP>(kv_head, index of the first of GROUP heads) for all heads.
    template <class Body>
    INNER_LOOP inline void for_heads(const Body& body) {
        for (int64_t first = 0; first < num_heads(); first += unit())
            for (int64_t g = 0; g < unit(); g += MAX_GROUP) {
                int64_t head = first + g, kv_head = head / heads_per_kv_;
                switch (std::min<int64_t>(MAX_GROUP, unit() - g)) {
                    case 1: body.template operator()<1>(kv_head, head); break;
                    case 2: body.template operator()<2>(kv_head, head); break;
                    case 3: body.template operator()<3>(kv_head, head); break;
                    case 4: body.template operator()<4>(kv_head, head); break;
                }
            }
    }

    // The first `num` rows of the block. Missing rows repeat the last one, the request's own values, with weight 0.
    void find_rows(const KV* pool, Rows rows, int64_t num) {
        for (int64_t n = 0; n < rows.count; ++n) rows_[n] = pool + rows.slots[n] * in_.kv_stride();
        for (int64_t n = rows.count; n < num; ++n) rows_[n] = rows_[rows.count - 1];
    }

    // Scores of 16 keys, not multiplied by the keys' scales.
    template <int GROUP, int DIM>
    INNER_LOOP inline void score(int64_t kv_head, int64_t head, int64_t from, Ahead& ahead) {
        const Query* queries[GROUP];
#pragma GCC unroll 4
        for (int g = 0; g < GROUP; ++g) queries[g] = heads_[head + g].query;
        SumVector parts[GROUP][LANES / QUARTER];
#pragma GCC unroll 4
        for (int quarter = 0; quarter < LANES / QUARTER; ++quarter) {
#pragma GCC unroll 2
            for (int r = 0; r < REGISTERS; r += KEY_COLUMNS<GROUP>)
                score_quarter<GROUP, DIM>(rows_ + from + quarter * QUARTER, kv_head * dim_of<DIM>(), r, queries, quarter,
                                          parts);
            ahead.turn();
        }
#pragma GCC unroll 4
        for (int g = 0; g < GROUP; ++g) {
            float scale = score_scale_;
            if constexpr (IS_WORDS) scale *= heads_[head + g].query_scale;
            store(scores_ + (head + g) * KEY_BLOCK + from, to_float(add_parts(parts[g])) * scale);
        }
    }

    // Calls body(i, j, first(i), second(j)) for all i < A and j < B. The side with fewer values stays in registers.
    template <int A, int B, class First, class Second, class Body>
    static INNER_LOOP inline void for_pairs(const First& first, const Second& second, const Body& body) {
        if constexpr (A > B) {
            for_pairs<B, A>(second, first,
                            [&](int j, int i, const auto& b, const auto& a) INNER_LOOP { body(i, j, a, b); });
        } else {
            decltype(first(0)) kept[A];
#pragma GCC unroll 4
            for (int i = 0; i < A; ++i) kept[i] = first(i);
#pragma GCC unroll 4
            for (int j = 0; j < B; ++j) {
                auto other = second(j);
#pragma GCC unroll 4
                for (int i = 0; i < A; ++i) body(i, j, kept[i], other);
            }
        }
    }

    // The same for 4 keys and the registers [first_r, first_r + COLUMNS) of each chunk; `at` is the offset of the head in
    // their rows.
    template <int GROUP, int DIM>
    INNER_LOOP inline void score_quarter(const KV* const* rows, int64_t at, int first_r,
                                         const Query* const (&queries)[GROUP], int quarter,
                                         SumVector (&parts)[GROUP][LANES / QUARTER]) {
        constexpr int KEYS = KEYS_AT_ONCE<GROUP>, COLUMNS = KEY_COLUMNS<GROUP>;  // GROUP * KEYS * COLUMNS sums
        Sum neighbors[GROUP][COLUMNS][QUARTER / 2];
#pragma GCC unroll 2
        for (int first = 0; first < QUARTER; first += KEYS) {
            Sum sums_of[GROUP][COLUMNS][KEYS] = {};
#pragma GCC unroll 4
            for (int64_t d = 0; d < dim_of<DIM>(); d += CHUNK) {
                int64_t left = DIM == ANY ? step_.head_dim - d : CHUNK;
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS; ++c) {
                    auto key = [&](int n) INNER_LOOP { return Dots::load_row(rows[first + n] + at + d, first_r + c, left); };
                    auto query = [&](int g) INNER_LOOP { return Dots::load_query(queries[g] + d, first_r + c, left); };
                    auto add = [&](int g, int n, const auto& mine, const auto& row) INNER_LOOP {
                        sums_of[g][c][n] = Dots::multiply_add(sums_of[g][c][n], row, mine);
                    };
                    for_pairs<GROUP, KEYS>(query, key, add);
                }
            }
#pragma GCC unroll 4
            for (int g = 0; g < GROUP; ++g)
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 4
                    for (int n = 0; n < KEYS; n += 2)
                        neighbors[g][c][(first + n) / 2] = add_neighbors(sums_of[g][c][n], sums_of[g][c][n + 1]);
        }
#pragma GCC unroll 4
        for (int g = 0; g < GROUP; ++g)
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; ++c)
                set_register(parts[g][quarter], first_r + c, sums_of_parts(neighbors[g][c][0], neighbors[g][c][1]));
    }

    // For each KV head, the scales of the block's tokens, contiguous and padded with zeros.
    void find_scales(const int32_t* slots, int64_t count) const {
        int64_t heads = step_.num_kv_heads, padded = (count + LANES - 1) / LANES * LANES;
        int32_t offsets[KEY_BLOCK];
        for (int64_t n = 0; n < count; ++n) offsets[n] = int32_t(slots[n] * heads);
        for (int64_t h = 0; h < heads; ++h) {
            const float *keys = in_.k_scale + h, *values = in_.v_scale + h;
            float* __restrict of_keys = key_scales_ + h * KEY_BLOCK;
            float* __restrict of_values = token_value_scales_ + h * KEY_BLOCK;
#pragma GCC unroll 4
            for (int64_t n = 0; n < count; ++n) {
                of_keys[n] = keys[offsets[n]];
                of_values[n] = values[offsets[n]];
            }
            for (int64_t n = count; n < padded; ++n) of_keys[n] = of_values[n] = 0.0f;
        }
    }

    // Turns scores of one head, which sees the first `seen` keys, into weights. What the head has accumulated is
    // rescaled to the new maximum score, at once or later (`kept`).
    template <bool CAPPED>
    void weigh(int64_t head, int64_t count, int64_t seen) {
        constexpr int VECTORS = KEY_BLOCK / LANES;
        int vectors = int((count + LANES - 1) / LANES);
        f32x16 scores[VECTORS];
        f32x16 tops = splat(NOTHING);
        for (int v = 0; v < vectors; ++v) {
            scores[v] = load(scores_ + head * KEY_BLOCK + v * LANES);
            if constexpr (KV_IS_QUANTISED)
                scores[v] *= load(key_scales_ + head / heads_per_kv_ * KEY_BLOCK + v * LANES);
            if constexpr (CAPPED) scores[v] = SoftCap(step_.score_cap)(scores[v]);
            if (seen < (v + 1) * LANES) scores[v] = only_between(scores[v], 0, seen - v * LANES);
            tops = maximum(tops, scores[v]);
        }
        float* state = heads_[head].state;
        float before = state[0], most = std::max(before, largest(tops));
        float shift = most == NOTHING ? 0.0f : most;
        f32x16 total = {};
        for (int v = 0; v < vectors; ++v) {
            scores[v] = sizeof(T) == 2 ? exp2_rough(scores[v] - shift) : exp2_small(scores[v] - shift);
            total += scores[v];
        }
        float kept = before == most ? 1.0f : exp2_small(before - most);
        state[0] = most;
        state[1] = state[1] * kept + sum(total);
        if constexpr (IS_WORDS)
            heads_[head].kept = kept;
        else if (kept != 1.0f)
            for (int64_t d = 0; d < padded_dim_; d += LANES) store(state + LANES + d, load(state + LANES + d) * kept);
        keep_weights(head, vectors, scores);
    }

    template <size_t VECTORS>
    void keep_weights(int64_t head, int vectors, f32x16 (&weights)[VECTORS]) {
        if constexpr (KV_IS_QUANTISED)
            for (int v = 0; v < vectors; ++v)
                weights[v] *= load(token_value_scales_ + head / heads_per_kv_ * KEY_BLOCK + v * LANES);
        Weight* out = weights_ + head * KEY_BLOCK;
        if constexpr (IS_WORDS) {
            LargestMagnitude most;
            for (int v = 0; v < vectors; ++v) most.see(weights[v]);
            WordScale words(most.get());
            heads_[head].value_scale = words.scale;
            for (int v = 0; v < vectors; ++v) store_words(out + v * LANES, weights[v] * words.inverse);
        } else {
            for (int v = 0; v < vectors; ++v) store(out + v * LANES, weights[v]);
        }
    }

    // Adds the weighted values of the block's keys [from, to), a multiple of 4.
    template <int GROUP, int DIM>
    INNER_LOOP inline void add_values(int64_t kv_head, int64_t head, int64_t from, int64_t to, Ahead& ahead) {
        constexpr int COLUMNS = VALUE_COLUMNS<GROUP>, CHUNKS = std::max(COLUMNS / REGISTERS, 1);
        int64_t d = 0;
        for (; d + (CHUNKS - 1) * CHUNK < dim_of<DIM>(); d += CHUNKS * CHUNK) {
#pragma GCC unroll 2
            for (int r = 0; r < CHUNKS * REGISTERS; r += COLUMNS)
                add_columns<GROUP, COLUMNS, DIM>(kv_head, head, from, to, d, r, ahead);
        }
        if (CHUNKS > 1 && d < dim_of<DIM>()) add_columns<GROUP, REGISTERS, DIM>(kv_head, head, from, to, d, 0, ahead);
    }

    // The same for the registers [first_r, first_r + COLUMNS) of the chunks from dimension `d` on.
    template <int GROUP, int COLUMNS, int DIM>
    INNER_LOOP inline void add_columns(int64_t kv_head, int64_t head, int64_t from, int64_t to, int64_t d, int first_r,
                                       Ahead& ahead) {
        int64_t at = kv_head * dim_of<DIM>() + d;
        float* values_of[GROUP];
        for (int g = 0; g < GROUP; ++g) values_of[g] = heads_[head + g].values() + d;
        auto sum_at = [&](int g, int c, int u) INNER_LOOP {
            int r = first_r + c;
            return values_of[g] + r / REGISTERS * CHUNK + u * LANES + r % REGISTERS * REGISTER_LANES;
        };
        Sum sums_of[GROUP][COLUMNS][2];
#pragma GCC unroll 4
        for (int g = 0; g < GROUP; ++g)
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 4
                for (int u = 0; u < 2; ++u) {
                    if constexpr (IS_WORDS)
                        sums_of[g][c][u] = Sum{};
                    else
                        sums_of[g][c][u] = load_floats(sum_at(g, c, u));
                }
        for (int64_t quarter = from; quarter < to; quarter += QUARTER) {
            const KV* const* rows = rows_ + quarter;
            const Weight* weights = weights_ + head * KEY_BLOCK + quarter;
#pragma GCC unroll 2
            for (int n = 0; n < QUARTER; n += 2) {
                const KV *first = rows[n] + at, *second = rows[n + 1] + at;
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS; ++c) {
                    int r = first_r + c, chunk = r / REGISTERS * CHUNK;
                    int64_t left = DIM == ANY ? step_.head_dim - d - chunk : CHUNK;
                    typename Dots::Values values(first + chunk, second + chunk, r % REGISTERS, left);
#pragma GCC unroll 4
                    for (int g = 0; g < GROUP; ++g)
                        Dots::add(sums_of[g][c], values, Dots::load_weights(weights + g * KEY_BLOCK + n));
                }
                if (d == 0 && first_r == 0) ahead.turn();
            }
        }
#pragma GCC unroll 4
        for (int g = 0; g < GROUP; ++g)
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 4
                for (int u = 0; u < 2; ++u) {
                    const Head& mine = heads_[head + g];
                    float* sum = sum_at(g, c, u);
                    if constexpr (IS_WORDS)
                        put(sum, fused(load_floats(sum) * mine.kept, to_float(sums_of[g][c][u]),
                                       splat_float(mine.value_scale)));
                    else
                        put(sum, sums_of[g][c][u]);
                }
    }

    const AttentionInputs<T, KV>& in_;
    const Step& step_;
    int64_t padded_dim_, heads_per_kv_ = 0;
    float score_scale_;
    Head* heads_ = nullptr;
    Query* queries_ = nullptr;  // unless they are read in place
    float *scores_ = nullptr, *key_scales_ = nullptr, *token_value_scales_ = nullptr;  // for the block's keys
    Weight* weights_ = nullptr;
    const KV* rows_[KEY_BLOCK];
};

}  // namespace engine

#undef INNER_LOOP
