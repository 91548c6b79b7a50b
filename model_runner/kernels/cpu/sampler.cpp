// From logits to tokens and their log-probabilities, without sorting the vocabulary. Rows are independent: each is one
// thread's, and its result does not depend on the others. A row of 49k logits is 200 KB and stays in the second-level
// cache; a pass over it takes a few us, so a single row is not worth waking another thread.
//
//   greedy      one pass: the largest logit, and whether all are numbers; then the first of its block that reaches it
//   draw        the largest sum of logit and noise (model_runner/noise.py). The logarithms of the noise are computed
//               only where a cheap bound does not rule the token out: for some dozens of 49k
//   filters     a bound that the floor cannot be below leaves a few hundred candidates; the floor among them is found
//               by bisection over the integers that order as floats do: exactly, and equal logits are on one side of it
//
// The order of the filters, and what they mean, is that of model_runner/torch_chooser.py.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "parallel.h"
#include "simd.h"

namespace engine {
namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504f;
constexpr int64_t BLOCK = 1024;  // tokens: each lane of a block is a group, of which only the largest counts
constexpr int64_t WORD_BITS = 32;

// One row of the batch; written by model_runner/native_chooser.py.
struct Row {
    int32_t draws;      // 0: takes the argmax
    float temperature;
    uint32_t keys[2];   // of the noise
    int32_t top_k;      // 0 for all
    float top_p;        // 1 for all
    float log_min_p;    // minus infinity for all
    int32_t edited;     // whether anything below is asked for
    int32_t slot;       // of the counts; -1 without penalties
    float repetition, frequency, presence;
    int32_t edits_start, edits_stop;
    int32_t grammar;    // row of the masks; -1 for none
    int32_t unused;
};
static_assert(sizeof(Row) == 64);

struct Batch {
    const float* logits;
    int64_t stride;
    const Row* rows;  // null: all take the argmax of the model's logits
    const uint8_t* in_prompt;
    int32_t* in_output;
    const int32_t* edit_ids;
    const float* edit_values;
    const uint32_t* masks;
    int64_t mask_stride;
    int64_t* token_ids;
    uint8_t* finite;
    int64_t size;  // of the vocabulary
};

int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

int64_t num_groups(int64_t size) { return (size + BLOCK - 1) / BLOCK * LANES; }

// 16 numbers, of which only `count` exist; the others are `fill`.
inline f32x16 load_part(const float* p, int64_t count, float fill) {
    if (count >= LANES) return load(p);
    float part[LANES];
    for (int n = 0; n < LANES; ++n) part[n] = n < count ? p[n] : fill;
    return load(part);
}

inline u32x16 lanes() { return u32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// A bit for each lane that is true.
inline uint32_t bits_of(i32x16 lanes) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
#else
    uint32_t bits = 0;
    for (int n = 0; n < LANES; ++n) bits |= uint32_t(lanes[n] & 1) << n;
    return bits;
#endif
}

// A bit for each lane where a >= b; none where either is NaN.
inline uint32_t bits_at_least(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#else
    return bits_of(a >= b);
#endif
}

inline i32x16 load_keys(const int32_t* p) {
    i32x16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// ---------------------------------------------------------------- whether all are numbers, and the largest

// The bits of NaN and of infinities, without their sign, are the largest integers.
struct Finiteness {
    u32x16 largest = {};

    void see(f32x16 v) {
        u32x16 bits = (u32x16)v & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    bool holds() const {
        uint32_t all = 0;
        for (int n = 0; n < LANES; ++n) all = std::max(all, largest[n]);
        return all < 0x7f800000u;
    }
};

struct Peak {
    int64_t token;  // the first of the largest; any one where not all are numbers
    bool finite;
};

Peak find_peak(const float* x, int64_t size) {
    float best = -INFINITE;
    int64_t block = 0;
    Finiteness finiteness[2];
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        int64_t end = std::min(begin + BLOCK, size), n = begin;
        f32x16 tops[2] = {splat(-INFINITE), splat(-INFINITE)};
        for (; n + 2 * LANES <= end; n += 2 * LANES)
            for (int u = 0; u < 2; ++u) {
                f32x16 v = load(x + n + u * LANES);
                tops[u] = maximum(tops[u], v);
                finiteness[u].see(v);
            }
        for (; n < end; n += LANES) {
            f32x16 v = load_part(x + n, end - n, x[n]);
            tops[0] = maximum(tops[0], v);
            finiteness[0].see(v);
        }
        float top = largest(maximum(tops[0], tops[1]));
        if (top > best) {
            best = top;
            block = begin;
        }
    }
    Peak peak{block, finiteness[0].holds() && finiteness[1].holds()};
    for (int64_t n = block; n < std::min(block + BLOCK, size); n += LANES)
        if (uint32_t bits = bits_at_least(load_part(x + n, size - n, -INFINITE), splat(best))) {
            peak.token = std::min(n + __builtin_ctz(bits), size - 1);
            break;
        }
    return peak;
}

// ---------------------------------------------------------------- the model's logits as a request changes them

// A product that is rounded before it is added to, as torch's is.
inline float rounded_product(float a, float b) {
    volatile float product = a * b;
    return product;
}

void penalise(const Row& row, const Batch& batch, float* x) {
    const uint8_t* in_prompt = batch.in_prompt + row.slot * batch.size;
    const int32_t* in_output = batch.in_output + row.slot * batch.size;
    for (int64_t begin = 0; begin < batch.size; begin += LANES) {
        int64_t end = std::min(begin + LANES, batch.size);
        uint32_t seen = 0;
        for (int64_t n = begin; n < end; ++n) seen |= uint32_t(in_prompt[n]) | uint32_t(in_output[n]);
        if (!seen) continue;
        for (int64_t n = begin; n < end; ++n) {
            if (in_prompt[n] || in_output[n] > 0) x[n] = x[n] > 0 ? x[n] / row.repetition : x[n] * row.repetition;
            x[n] -= rounded_product(row.frequency, float(in_output[n]));
            if (in_output[n] > 0) x[n] -= row.presence;
        }
    }
}

void forbid(const uint32_t* allowed, float* x, int64_t size) {
    for (int64_t n = 0; n < size; n += WORD_BITS) {
        uint32_t word = allowed[n / WORD_BITS];
        if (word == ~0u) continue;
        int64_t count = std::min(WORD_BITS, size - n);
        for (int64_t bit = 0; bit < count; ++bit)
            if (!(word >> bit & 1)) x[n + bit] = -INFINITE;
    }
}

// Writes the changed row; returns whether the model's logits are all numbers.
bool edit(const Row& row, const Batch& batch, const float* logits, float* x) {
    Finiteness finiteness;
    int64_t n = 0;
    for (; n < batch.size; n += LANES) {
        f32x16 v = load_part(logits + n, batch.size - n, logits[n]);
        finiteness.see(v);
        store(x + n, v);  // there is room behind the last one
    }
    if (row.slot >= 0) penalise(row, batch, x);
    for (int32_t e = row.edits_start; e < row.edits_stop; ++e)
        if (int64_t token = batch.edit_ids[e]; token >= 0 && token < batch.size) x[token] += batch.edit_values[e];
    if (row.grammar >= 0) forbid(batch.masks + row.grammar * batch.mask_stride, x, batch.size);
    return finiteness.holds();
}

// ---------------------------------------------------------------- one pass for the filters

struct Survey {
    float largest;
    bool finite;
};

// Writes x over the temperature, unless `scaled` is null, padded with minus infinity; and the largest of each group.
Survey survey(const float* x, int64_t size, float temperature, float* scaled, float* groups) {
    Finiteness finiteness;
    f32x16 top = splat(-INFINITE);
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        int64_t end = std::min(begin + BLOCK, size);
        f32x16 group = splat(-INFINITE);
        for (int64_t n = begin; n < end; n += LANES) {
            f32x16 v = load_part(x + n, end - n, x[n]);
            finiteness.see(v);
            if (end - n < LANES) v = load_part(x + n, end - n, -INFINITE);
            if (scaled != nullptr) {
                v = v / temperature;
                store(scaled + n, v);
            }
            group = maximum(group, v);
        }
        store(groups + begin / BLOCK * LANES, group);
        top = maximum(top, group);
    }
    return Survey{largest(top), finiteness.holds()};
}

// Where k groups reach a number, so do k tokens. Changes the order of the groups.
float bound_of_top_k(float* groups, int64_t size, int64_t k) {
    int64_t count = num_groups(size);
    if (count < k) return -INFINITE;
    std::nth_element(groups, groups + k - 1, groups + count, std::greater<float>());
    return groups[k - 1];
}

inline f32x16 mass(f32x16 x, float largest) { return exp2_small((x - largest) * LOG2_E); }

double sum_in_double(f32x16 v) {
    double total = 0;
    for (int n = 0; n < LANES; ++n) total += v[n];
    return total;
}

constexpr int NUM_LEVELS = 4;
constexpr float LEVELS[NUM_LEVELS] = {3.0f, 6.0f, 9.0f, 13.0f};  // nats below the largest

struct Mass {
    double total = 0;              // of exp(x - largest)
    double above[NUM_LEVELS] = {};  // of the tokens above each level
};

template <bool BY_LEVEL>
Mass weigh(const float* x, int64_t size, float largest) {
    Mass found;
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        int64_t end = std::min(begin + BLOCK, size);
        f32x16 total = {}, above[NUM_LEVELS] = {};
        for (int64_t n = begin; n < end; n += LANES) {
            f32x16 v = load_part(x + n, end - n, -INFINITE);
            f32x16 m = mass(v, largest);
            total += m;
            if (BY_LEVEL)
                for (int level = 0; level < NUM_LEVELS; ++level)
                    above[level] += v >= splat(largest - LEVELS[level]) ? m : f32x16{};
        }
        found.total += sum_in_double(total);
        if (BY_LEVEL)
            for (int level = 0; level < NUM_LEVELS; ++level) found.above[level] += sum_in_double(above[level]);
    }
    return found;
}

// A number that the floor of top_p is not below. The margins are for rounding, which must not hide a token.
float bound_of_top_p(const Mass& mass, float largest, float top_p, int64_t size) {
    for (int level = 0; level < NUM_LEVELS; ++level)
        if (mass.above[level] >= 1.0001 * top_p * mass.total) return largest - LEVELS[level];
    // All tokens below it together have less than the mass that may be missing.
    return largest + float(std::log(mass.total * (1.0 - top_p) / double(size))) - 0.01f;
}

// ---------------------------------------------------------------- candidates

// Integers in the order of the floats; both zeros are one.
inline i32x16 order_key(f32x16 x) {
    i32x16 bits = (i32x16)x & ~(i32x16)(x == 0.0f);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline int64_t order_key(float x) { return order_key(splat(x))[0]; }

inline float from_order_key(int64_t key) {
    int32_t bits = int32_t(key) ^ ((int32_t(key) >> 31) & 0x7fffffff);
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Writes the lanes whose bit is set, one behind the other; 16 numbers may be written. Returns how many they are.
template <class Vector, class Number>
inline int64_t compress(Vector v, uint32_t bits, Number* to) {
    static_assert(sizeof(Vector) == 64 && sizeof(Number) == 4);
#if defined(__AVX512F__)
    __m512i packed = _mm512_maskz_compress_epi32(bits, (__m512i)v);  // to memory it would take 10 times as long
    std::memcpy(to, &packed, sizeof packed);
    return __builtin_popcount(bits);
#else
    int64_t count = 0;
    for (; bits; bits &= bits - 1) to[count++] = v[__builtin_ctz(bits)];
    return count;
#endif
}

// The arrays go on to a multiple of 16: values with minus infinity, weights with 0.
struct Candidates {
    int64_t count;
    float* values;
    int32_t* ids;
    int32_t* keys;   // of those that `find_floor` still looks at
    float* weights;  // theirs
};

void collect(const float* x, int64_t size, float bound, Candidates& c) {
    constexpr int UNROLL = 4;  // most are below the bound: one branch for 64 tokens
    f32x16 bounds = splat(bound);
    int64_t count = 0, n = 0;
    const auto take = [&](f32x16 v, int64_t first, uint32_t bits) {
        compress(v, bits, c.values + count);
        count += compress(lanes() + uint32_t(first), bits, c.ids + count);
    };
    for (; n + UNROLL * LANES <= size; n += UNROLL * LANES) {
        uint32_t bits[UNROLL], any = 0;
        for (int u = 0; u < UNROLL; ++u) any |= bits[u] = bits_at_least(load(x + n + u * LANES), bounds);
        if (any)
            for (int u = 0; u < UNROLL; ++u) take(load(x + n + u * LANES), n + u * LANES, bits[u]);
    }
    for (; n < size; n += LANES) {
        f32x16 v = load_part(x + n, size - n, -INFINITE);
        uint32_t exist = size - n < LANES ? (1u << (size - n)) - 1 : 0xffffu;
        take(v, n, bits_at_least(v, bounds) & exist);
    }
    c.count = count;
    for (; count < padded(c.count); ++count) {
        c.values[count] = -INFINITE;
        c.ids[count] = 0;
    }
}

// ---------------------------------------------------------------- the floor

// The candidates under search: how much those weigh that have this key or a higher one. Never more for a higher key:
// rounding a sum keeps the order of its terms.
double weight_from(const int32_t* keys, const float* weights, int64_t count, int64_t key) {
    double total = 0;
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        int64_t end = std::min(begin + BLOCK, count);
        f32x16 found = {};
        for (int64_t n = begin; n < end; n += LANES)
            found += load_keys(keys + n) >= int32_t(key) ? load(weights + n) : f32x16{};
        total += sum_in_double(found);
    }
    return total;
}

// Drops those whose key is not in [low, high); returns how many are left.
int64_t narrow(int32_t* keys, float* weights, int64_t count, int64_t low, int64_t high) {
    int64_t left = 0;
    for (int64_t n = 0; n < count; n += LANES) {
        i32x16 key = load_keys(keys + n);
        f32x16 weight = load(weights + n);
        uint32_t bits = bits_of((key >= int32_t(low)) & (key < int32_t(high)));
        if (count - n < LANES) bits &= (1u << (count - n)) - 1;
        compress(weight, bits, weights + left);  // never behind what was read
        left += compress(key, bits, keys + left);
    }
    for (int64_t n = left; n < padded(left); ++n) weights[n] = 0.0f;
    return left;
}

// The highest key from which on the candidates weigh as much as the target; `low` if all of them do not.
//
// low: candidates below it do not count. high: none is at or above it.
template <class Weigh>
int64_t find_floor(Candidates& c, int64_t low, int64_t high, double target, const Weigh& weigh) {
    constexpr int NARROW_EVERY = 3;  // steps, each of which leaves some half of the candidates
    for (int64_t n = 0; n < c.count; n += LANES) {
        f32x16 v = load(c.values + n);
        i32x16 keys = order_key(v);
        std::memcpy(c.keys + n, &keys, sizeof keys);
        store(c.weights + n, weigh(v));
    }
    for (int64_t n = c.count; n < padded(c.count); ++n) c.weights[n] = 0.0f;
    int64_t count = c.count;
    double above = 0;  // what those weigh that are at or above `high`
    for (int step = 1; high - low > 1; ++step) {
        int64_t middle = low + (high - low) / 2;
        (above + weight_from(c.keys, c.weights, count, middle) >= target ? low : high) = middle;
        if (step % NARROW_EVERY == 0 && count > LANES) {
            above += weight_from(c.keys, c.weights, count, high);
            count = narrow(c.keys, c.weights, count, low, high);
        }
    }
    return low;
}

// Collects what may be drawn, and perhaps more; returns the lowest logit that may be. `x` is padded.
float filter(const Row& row, const float* x, int64_t size, float largest, float* groups, Candidates& c) {
    float min_p_floor = largest + row.log_min_p, bound = -INFINITE;
    double total = 0;
    if (row.top_k > 0) {
        bound = bound_of_top_k(groups, size, row.top_k);
    } else if (row.top_p < 1.0f) {
        Mass mass = weigh<true>(x, size, largest);
        total = mass.total;
        bound = bound_of_top_p(mass, largest, row.top_p, size);
    }
    // With both, top_p needs the mass of all that top_k leaves.
    if (!(row.top_k > 0 && row.top_p < 1.0f)) bound = std::max(bound, min_p_floor);
    collect(x, size, bound, c);
    int64_t floor = order_key(bound), ceiling = order_key(largest) + 1;
    if (row.top_k > 0 && row.top_k < c.count)
        floor = find_floor(c, floor, ceiling, row.top_k, [](f32x16) { return splat(1.0f); });
    if (row.top_p < 1.0f) {
        if (row.top_k > 0) {
            collect(x, size, from_order_key(floor), c);
            total = weigh<false>(c.values, c.count, largest).total;
        }
        floor = find_floor(c, floor, ceiling, row.top_p * total, [&](f32x16 v) { return mass(v, largest); });
    }
    return std::max(from_order_key(floor), min_p_floor);
}

// ---------------------------------------------------------------- drawing

// Of model_runner/noise.py: 31 bits for each token.
inline u32x16 noise_bits(u32x16 tokens, const uint32_t* keys) {
    u32x16 x = tokens * 0x9e3779b1u ^ keys[0];
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = ((x ^ (x >> 15)) + keys[1]) * 0x846ca68bu;
    return (x ^ (x >> 16)) & 0x7fffffffu;
}

constexpr float UNIT = 0x1p-31f * (1 - 0x1p-23f);

inline f32x16 uniform(u32x16 bits) { return (__builtin_convertvector((i32x16)bits, f32x16) + 0.5f) * UNIT; }

inline float gumbel(uint32_t bits) {
    float u = (float(int32_t(bits)) + 0.5f) * UNIT;
    return float(-std::log(-std::log1p(-double(u))));
}

// The id with the largest sum of value and noise among values from `floor` on, the first of equals.
//
// ids: of the values; null if the n-th is n. Values go on to a multiple of 16, with minus infinity.
int64_t draw(const float* values, const int32_t* ids, int64_t count, float floor, const uint32_t* keys) {
    float best = -INFINITE;
    int64_t best_id = ids == nullptr ? 0 : ids[0];
    // Noise is -log(-log1p(-u)), and -log1p(-u) is at least u: only where u is at most exp(value - best) can a sum reach
    // the best one. `reach` is minus that best one, and more than rounding can take away.
    float reach = INFINITE;
    for (int64_t n = 0; n < count; n += LANES) {
        f32x16 v = load(values + n);
        u32x16 tokens = lanes() + uint32_t(n);
        if (ids != nullptr) std::memcpy(&tokens, ids + n, sizeof tokens);
        u32x16 noise = noise_bits(tokens, keys);
        uint32_t bits = bits_at_least(exp2((v + reach) * LOG2_E), uniform(noise)) & bits_at_least(v, splat(floor));
        for (; bits; bits &= bits - 1) {
            int lane = __builtin_ctz(bits);
            float score = gumbel(noise[lane]) + v[lane];
            if (score > best) {
                best = score;
                best_id = tokens[lane];
                reach = 1e-4f + 1e-6f * std::fabs(best) - best;
            }
        }
    }
    return best_id;
}

// ---------------------------------------------------------------- a row

class Workspace {
  public:
    explicit Workspace(int64_t size) : room_(padded(size) + LANES), groups_(num_groups(size)) {
        static thread_local Scratch scratch;
        memory_ = reinterpret_cast<float*>(scratch.get(sizeof(float) * (6 * room_ + groups_)));
    }

    float* edited() const { return memory_; }
    float* scaled() const { return memory_ + room_; }
    Candidates candidates() const {
        float* from = memory_ + 2 * room_;
        return {0, from, reinterpret_cast<int32_t*>(from + room_), reinterpret_cast<int32_t*>(from + 2 * room_),
                from + 3 * room_};
    }
    float* groups() const { return memory_ + 6 * room_; }

  private:
    int64_t room_, groups_;
    float* memory_;
};

Peak choose_row(const Batch& batch, int64_t index) {
    const float* x = batch.logits + index * batch.stride;
    if (batch.rows == nullptr) return find_peak(x, batch.size);
    const Row& row = batch.rows[index];
    Workspace work(batch.size);
    bool finite = true;
    if (row.edited) {
        finite = edit(row, batch, x, work.edited());
        x = work.edited();
    }
    Peak peak;
    if (!row.draws) {
        peak = find_peak(x, batch.size);
    } else {
        Survey seen = survey(x, batch.size, row.temperature, work.scaled(), work.groups());
        peak.finite = seen.finite;
        bool numbers = row.edited ? finite : seen.finite;  // a mask's minus infinities are none of the model's
        if (!numbers || !std::isfinite(seen.largest)) {  // nothing to draw from: not numbers, or all forbidden
            peak.token = find_peak(work.scaled(), batch.size).token;
        } else if (row.top_k > 0 || row.top_p < 1.0f || row.log_min_p > -INFINITE) {
            Candidates c = work.candidates();
            float floor = filter(row, work.scaled(), batch.size, seen.largest, work.groups(), c);
            peak.token = draw(c.values, c.ids, c.count, floor, row.keys);
        } else {
            peak.token = draw(work.scaled(), nullptr, batch.size, -INFINITE, row.keys);
        }
    }
    if (row.edited) peak.finite = finite;
    if (row.slot >= 0) ++batch.in_output[row.slot * batch.size + peak.token];
    return peak;
}

// ---------------------------------------------------------------- log-probabilities

// A number that orders candidates by value, then by id, the other way round.
inline uint64_t rank(float value, int32_t id) {
    return uint64_t(uint32_t(order_key(value)) ^ 0x80000000u) << 32 | uint32_t(~id);
}

// In float64: nothing is lost where the likeliest token has nearly all of the mass.
double normaliser(const float* x, int64_t size, float largest) {
    return largest + std::log(weigh<false>(x, size, largest).total);
}

void top_tokens(const float* x, int64_t size, double normaliser, int64_t k, float* groups, Candidates& c, int32_t* ids,
                float* logprobs) {
    if (!std::isnan(normaliser)) collect(x, size, bound_of_top_k(groups, size, k), c);  // else there is no order
    uint64_t* ranks = reinterpret_cast<uint64_t*>(c.keys);  // and the weights behind them
    for (int64_t n = 0; n < c.count; ++n) ranks[n] = rank(c.values[n], c.ids[n]);
    int64_t found = std::min(k, c.count);
    std::partial_sort(ranks, ranks + found, ranks + c.count, std::greater<uint64_t>());
    for (int64_t n = 0; n < found; ++n) {
        ids[n] = int32_t(~uint32_t(ranks[n]));
        logprobs[n] = float(x[ids[n]] - normaliser);
    }
    for (int64_t n = found; n < k; ++n) {  // the row is not made of numbers
        ids[n] = 0;
        logprobs[n] = std::numeric_limits<float>::quiet_NaN();
    }
}

}  // namespace
}  // namespace engine

// `rows`: null if all take the argmax of the model's logits; then what follows up to `mask_stride` is not read.
EXPORT void choose_tokens(const float* logits, int64_t stride, const void* rows, const uint8_t* in_prompt,
                          int32_t* in_output, const int32_t* edit_ids, const float* edit_values, const void* masks,
                          int64_t mask_stride, int64_t* token_ids, uint8_t* finite, int64_t num_rows, int64_t size) {
    using namespace engine;
    Batch batch{logits, stride, static_cast<const Row*>(rows), in_prompt, in_output, edit_ids, edit_values,
                static_cast<const uint32_t*>(masks), mask_stride, token_ids, finite, size};
    hand_out(num_rows, [&](int64_t index) {
        Peak peak = choose_row(batch, index);
        batch.token_ids[index] = peak.token;
        batch.finite[index] = peak.finite;
    });
}

// Row indices[n] of the logits, and its token token_ids[indices[n]], for each n.
EXPORT void token_logprobs(const float* logits, int64_t stride, const int64_t* indices, const int64_t* token_ids,
                           float* token, int32_t* top_ids, float* top, int64_t count, int64_t size, int64_t top_k) {
    using namespace engine;
    hand_out(count, [&](int64_t n) {
        const float* x = logits + indices[n] * stride;
        Workspace work(size);
        Survey seen = survey(x, size, 1.0f, nullptr, work.groups());
        double log_total = normaliser(x, size, seen.largest);
        token[n] = float(x[token_ids[indices[n]]] - log_total);
        if (top_k == 0) return;
        Candidates c = work.candidates();
        top_tokens(x, size, log_total, top_k, work.groups(), c, top_ids + n * top_k, top + n * top_k);
    });
}
