// The changes of a linear layer by LoRA adapters: y += B (A x), with the matrices of each token's slot.
//
// A step's tokens come as runs of equal slots. A piece of work is a run with a stretch of outputs; it computes A x of
// its run itself, also where another piece of the run does so, too: with as many runs as threads nothing is computed
// twice, and with fewer it costs less than a second phase would. Only with many threads and few runs there are two
// phases. Sums are accumulated in float32 in a fixed order, whatever the runs and pieces: the bits of a token do not
// depend on the others.
//
// Matrices are stored in panels of 16 rows, in bfloat16 with pairs of columns: [panel][columns / 2][16][2], in float32
// [panel][columns][16]. The rows of A are those of all modules of the layer, `rank` each; each module's B begins with a
// panel of its own.

#include <algorithm>

#include "activations.h"
#include "parallel.h"
#include "program.h"
#include "simd.h"

namespace engine {
namespace {

#if defined(__AVX512F__)
constexpr int TOKENS = 4;  // of a tile
#else
constexpr int TOKENS = 1;  // the accumulators of more do not fit into the registers
#endif
constexpr int CHAINS = 4;          // of additions, so that they need not wait for each other
constexpr int64_t MOST_SHARES = 2; // pieces of a run that compute the same A x

struct Run {
    int64_t slot, first, last;
    int64_t size() const { return last - first; }
};

struct Plan {
    const int64_t* words;
    int64_t size() const { return words[0]; }
    const Run& operator[](int64_t n) const { return reinterpret_cast<const Run*>(words + 1)[n]; }
};

struct Pairs16 {
    typedef bf16 Number;
    typedef uint32_t Word;
    static constexpr int64_t COLUMNS = 2;  // of a step

    static ALWAYS_INLINE f32x16 multiply(f32x16 sums, const Word* weights, const Number* x) {
        return dot_pairs(sums, load_pairs(weights), splat_bits(load_pair(x)));
    }
};

struct Floats {
    typedef float Number;
    typedef float Word;
    static constexpr int64_t COLUMNS = 1;

    static ALWAYS_INLINE f32x16 multiply(f32x16 sums, const Word* weights, const Number* x) {
        return sums + load(weights) * splat(*x);
    }
};

// The matrices of all slots.
template <class W>
struct Matrices {
    typedef typename W::Number Number;
    typedef typename W::Word Word;

    const Word* a;
    int64_t a_stride;  // words of a slot
    const Word* b;
    int64_t b_stride;
    const int64_t* ranks;    // per slot; 0: the adapter does not change this layer
    const int64_t* outputs;  // per module
    int64_t num_modules, inputs;

    int64_t low_rows(int64_t rank) const { return num_modules * rank; }

    // A x of a run, rounded: [tokens][low_stride], whole panels.
    void shrink(const Run& run, const Number* x, int64_t x_stride, Number* low, int64_t low_stride, int64_t begin,
                int64_t end) const {
        int64_t steps = inputs / W::COLUMNS;
        const Word* slot = a + run.slot * a_stride;
        for (int64_t panel = begin; panel < end; ++panel) {
            const Word* weights = slot + panel * steps * LANES;
            int64_t t = 0, size = run.size();
            for (; t + TOKENS <= size; t += TOKENS)
                shrink_tile<TOKENS>(x + (run.first + t) * x_stride, x_stride, weights, steps,
                                    low + t * low_stride + panel * LANES, low_stride);
            for (; t < size; ++t)
                shrink_tile<1>(x + (run.first + t) * x_stride, x_stride, weights, steps,
                               low + t * low_stride + panel * LANES, low_stride);
        }
    }

    // B times A x of one vector of outputs for a tile of tokens.
    template <int ROWS>
    ALWAYS_INLINE void expand(const Word* weights, const Number* low, int64_t low_stride, int64_t steps,
                              f32x16 (&sums)[ROWS]) const {
        for (int r = 0; r < ROWS; ++r) sums[r] = f32x16{};
        for (int64_t k = 0; k < steps; ++k)
            for (int r = 0; r < ROWS; ++r)
                sums[r] = W::multiply(sums[r], weights + k * LANES, low + r * low_stride + k * W::COLUMNS);
    }

  private:
    template <int ROWS>
    static __attribute__((noinline)) void shrink_tile(const Number* x, int64_t x_stride, const Word* weights,
                                                      int64_t steps, Number* low, int64_t low_stride) {
        f32x16 sums[ROWS][CHAINS] = {};
        int64_t k = 0;
        for (; k + CHAINS <= steps; k += CHAINS)
            for (int c = 0; c < CHAINS; ++c)
                for (int r = 0; r < ROWS; ++r)
                    sums[r][c] = W::multiply(sums[r][c], weights + (k + c) * LANES, x + r * x_stride + (k + c) * W::COLUMNS);
        for (; k < steps; ++k)
            for (int r = 0; r < ROWS; ++r)
                sums[r][0] = W::multiply(sums[r][0], weights + k * LANES, x + r * x_stride + k * W::COLUMNS);
        for (int r = 0; r < ROWS; ++r)
            store(low + r * low_stride, (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]));
    }
};

template <class Body>
ALWAYS_INLINE void for_tiles(int64_t size, const Body& body) {
    int64_t t = 0;
    for (; t + TOKENS <= size; t += TOKENS) body.template operator()<TOKENS>(t);
    for (; t < size; ++t) body.template operator()<1>(t);
}

// What happens with the change of outputs: it is added to y ...
template <class W, class Y>
struct Add {
    typedef typename W::Number Number;
    static constexpr bool NEEDS_ALL_RUNS = false;

    Matrices<W> matrices;
    Y* y;
    int64_t width;      // outputs of all modules
    int64_t num_units;  // vectors of outputs

    Add(const Matrices<W>& matrices, Y* y) : matrices(matrices), y(y), width(0), num_units(0) {
        for (int64_t m = 0; m < matrices.num_modules; ++m) {
            width += matrices.outputs[m];
            num_units += (matrices.outputs[m] + LANES - 1) / LANES;
        }
    }

    void run(const Run& run, const Number* low, int64_t low_stride, int64_t begin, int64_t end) const {
        int64_t rank = matrices.ranks[run.slot], steps = rank / W::COLUMNS, unit = 0, column = 0;
        const auto* slot = matrices.b + run.slot * matrices.b_stride;
        for (int64_t m = 0; m < matrices.num_modules; ++m) {
            int64_t outputs = matrices.outputs[m], units = (outputs + LANES - 1) / LANES;
            int64_t stop = std::min(end, unit + units);
            for (int64_t u = std::max(begin, unit); u < stop; ++u) {
                int64_t at = (u - unit) * LANES, lanes = std::min<int64_t>(LANES, outputs - at);
                for_tiles(run.size(), [&]<int ROWS>(int64_t t) {
                    f32x16 sums[ROWS];
                    matrices.template expand<ROWS>(slot + u * steps * LANES, low + t * low_stride + m * rank, low_stride,
                                                   steps, sums);
                    for (int r = 0; r < ROWS; ++r)
                        add(y + (run.first + t + r) * width + column + at, lanes, sums[r]);
                });
            }
            unit += units;
            column += outputs;
        }
    }

  private:
    static ALWAYS_INLINE void add(Y* to, int64_t lanes, f32x16 sums) {
        if (lanes == LANES) return store(to, load(to) + sums);
        float all[LANES];
        store(all, sums);
        for (int64_t n = 0; n < lanes; ++n) from_float(to_float(to[n]) + all[n], to + n);
    }
};

// ... or to gates and ups, 16 of each in turns, before the activation.
struct Gate {
    typedef bf16 Number;
    static constexpr bool NEEDS_ALL_RUNS = true;

    Matrices<Pairs16> matrices;
    const bf16* paired;
    bf16* out;
    int64_t num_units;  // vectors of gates

    Gate(const Matrices<Pairs16>& matrices, const bf16* paired, bf16* out)
        : matrices(matrices), paired(paired), out(out), num_units(matrices.outputs[0] / LANES) {}

    void run(const Run& run, const bf16* low, int64_t low_stride, int64_t begin, int64_t end) const {
        int64_t rank = matrices.ranks[run.slot], steps = rank / 2;
        const uint32_t* slot = matrices.b + run.slot * matrices.b_stride;
        for (int64_t u = begin; u < end; ++u)
            for_tiles(run.size(), [&]<int ROWS>(int64_t t) {
                f32x16 gates[ROWS], ups[ROWS];
                matrices.expand<ROWS>(slot + u * steps * LANES, low + t * low_stride, low_stride, steps, gates);
                matrices.expand<ROWS>(slot + (num_units + u) * steps * LANES, low + t * low_stride + rank, low_stride,
                                      steps, ups);
                for (int r = 0; r < ROWS; ++r) {
                    int64_t row = run.first + t + r;
                    const bf16* from = paired + (row * num_units + u) * 2 * LANES;
                    f32x16 gate = rounded(load(from) + gates[r]), up = rounded(load(from + LANES) + ups[r]);
                    store(out + (row * num_units + u) * LANES, Silu{}(gate) * up);
                }
            });
    }
};

int64_t panels_of(int64_t rows) { return (rows + LANES - 1) / LANES; }

template <class End>
void change(const End& end_, const typename End::Number* x, int64_t x_stride, typename End::Number* low,
            int64_t low_stride, Plan plan) {
    typedef typename End::Number Number;
    const auto& matrices = end_.matrices;
    int64_t num_runs = plan.size(), num_units = end_.num_units;
    if (num_runs == 0) return;
    int64_t shares = (max_threads() + num_runs - 1) / num_runs;
    if (shares <= MOST_SHARES) {
        parallel_for(num_runs * shares, 1, [&](int64_t begin, int64_t end) {
            thread_local Scratch scratch;
            int64_t shrunk = -1;
            for (int64_t n = begin; n < end; ++n) {
                const Run& run = plan[n / shares];
                int64_t rank = matrices.ranks[run.slot], share = n % shares;
                if (rank == 0 && !End::NEEDS_ALL_RUNS) continue;
                Number* mine = reinterpret_cast<Number*>(scratch.get(run.size() * low_stride * sizeof(Number)));
                if (rank > 0 && shrunk != n / shares)
                    matrices.shrink(run, x, x_stride, mine, low_stride, 0, panels_of(matrices.low_rows(rank)));
                shrunk = n / shares;
                end_.run(run, mine, low_stride, num_units * share / shares, num_units * (share + 1) / shares);
            }
        });
        return;
    }
    parallel_for_dynamic(num_runs * panels_of(low_stride), [&](int64_t n) {
        const Run& run = plan[n / panels_of(low_stride)];
        int64_t panel = n % panels_of(low_stride);
        if (panel < panels_of(matrices.low_rows(matrices.ranks[run.slot])))
            matrices.shrink(run, x, x_stride, low + run.first * low_stride, low_stride, panel, panel + 1);
    });
    parallel_for(num_runs * shares, 1, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) {
            const Run& run = plan[n / shares];
            int64_t share = n % shares;
            if (matrices.ranks[run.slot] == 0 && !End::NEEDS_ALL_RUNS) continue;
            end_.run(run, low + run.first * low_stride, low_stride, num_units * share / shares,
                     num_units * (share + 1) / shares);
        }
    });
}

template <class W>
Matrices<W> matrices_of(const void* a, int64_t a_stride, const void* b, int64_t b_stride, const int64_t* ranks,
                        const int64_t* outputs, int64_t num_modules, int64_t inputs) {
    typedef typename W::Word Word;
    return {static_cast<const Word*>(a), a_stride, static_cast<const Word*>(b), b_stride, ranks, outputs, num_modules, inputs};
}

template <class W, class Y>
void look_up(const void* table_, const int64_t* ids, void* y, Plan plan, const Matrices<W>& matrices,
             int64_t vocab_size, int64_t max_rank) {
    typedef typename W::Number Number;
    const Number* table = static_cast<const Number*>(table_);
    Add<W, Y> add(matrices, static_cast<Y*>(y));
    parallel_for(plan.size(), 1, [&](int64_t begin, int64_t end) {
        thread_local Scratch scratch;
        for (int64_t n = begin; n < end; ++n) {
            const Run& run = plan[n];
            if (matrices.ranks[run.slot] == 0) continue;
            Number* low = reinterpret_cast<Number*>(scratch.get(run.size() * max_rank * sizeof(Number)));
            for (int64_t t = 0; t < run.size(); ++t)
                std::memcpy(low + t * max_rank, table + (run.slot * vocab_size + ids[run.first + t]) * max_rank,
                            max_rank * sizeof(Number));
            add.run(run, low, max_rank, 0, add.num_units);
        }
    });
}

}  // namespace
}  // namespace engine

// y: [tokens][outputs of all modules], contiguous; low: memory, [tokens][low_stride], low_stride a multiple of 16.
// a_stride, b_stride: words of a slot; a word is a float or a pair of bfloat16.
EXPORT void lora_add(const void* x, int64_t x_stride, void* y, void* low, const int64_t* plan, const void* a,
                     int64_t a_stride, const void* b, int64_t b_stride, const int64_t* ranks, const int64_t* outputs,
                     int64_t num_modules, int64_t inputs, int64_t low_stride, int x_is_bf16, int y_is_bf16) {
    using namespace engine;
    if (x_is_bf16) {
        auto matrices = matrices_of<Pairs16>(a, a_stride, b, b_stride, ranks, outputs, num_modules, inputs);
        const bf16* x16 = static_cast<const bf16*>(x);
        bf16* low16 = static_cast<bf16*>(low);
        if (y_is_bf16)
            change(Add<Pairs16, bf16>(matrices, static_cast<bf16*>(y)), x16, x_stride, low16, low_stride, {plan});
        else
            change(Add<Pairs16, float>(matrices, static_cast<float*>(y)), x16, x_stride, low16, low_stride, {plan});
    } else {
        auto matrices = matrices_of<Floats>(a, a_stride, b, b_stride, ranks, outputs, num_modules, inputs);
        change(Add<Floats, float>(matrices, static_cast<float*>(y)), static_cast<const float*>(x), x_stride,
               static_cast<float*>(low), low_stride, {plan});
    }
}

// silu(gate) * up in bfloat16. paired: [tokens][gates / 16][gates or ups][16], out: [tokens][gates].
EXPORT void lora_gated(const void* x, int64_t x_stride, const void* paired, void* out, void* low, const int64_t* plan,
                       const void* a, int64_t a_stride, const void* b, int64_t b_stride, const int64_t* ranks,
                       const int64_t* outputs, int64_t inputs, int64_t low_stride) {
    using namespace engine;
    auto matrices = matrices_of<Pairs16>(a, a_stride, b, b_stride, ranks, outputs, 2, inputs);
    change(Gate(matrices, static_cast<const bf16*>(paired), static_cast<bf16*>(out)), static_cast<const bf16*>(x),
           x_stride, static_cast<bf16*>(low), low_stride, {plan});
}

// The embedding: table: [slots][vocab_size][max_rank], the columns of A; y: [tokens][outputs[0]].
EXPORT void lora_embed(const void* table, const int64_t* ids, void* y, const int64_t* plan, const void* b,
                       int64_t b_stride, const int64_t* ranks, const int64_t* outputs, int64_t vocab_size,
                       int64_t max_rank, int is_bf16) {
    using namespace engine;
    if (is_bf16)
        look_up<Pairs16, bf16>(table, ids, y, {plan},
                               matrices_of<Pairs16>(nullptr, 0, b, b_stride, ranks, outputs, 1, 0), vocab_size, max_rank);
    else
        look_up<Floats, float>(table, ids, y, {plan},
                               matrices_of<Floats>(nullptr, 0, b, b_stride, ranks, outputs, 1, 0), vocab_size, max_rank);
}

RECORDABLE(lora_add)
RECORDABLE(lora_gated)
RECORDABLE(lora_embed)
