// x @ weight.T + bias in bfloat16, for any number of tokens, from a weight that is packed once (linear.h), by vectors.
//
// One vector of the panel is multiplied with a pair of x, which needs no shuffling and no sums across a vector. A thread
// reads its panels from the first byte to the last, which is what memory is fastest at. With more tokens than a tile has
// rows a panel is cut along k: a part of it stays in a cache for all strips of tokens, while their sums wait in memory,
// as they are. So a sum is the same chain of additions, cut or not.

#include <algorithm>

#include "linear.h"
#include "linear_floats.h"
#include "linear_short.h"
#include "linear_tiles.h"
#include "parallel.h"
#include "program.h"
#include "simd.h"
#include "tile.h"

namespace engine {
namespace {

#if defined(__AVX512F__)
constexpr bool IS_SHORT = false;
#else
constexpr bool IS_SHORT = true;
#endif
constexpr int64_t BLOCK_STRIPS = 21;    // of tokens, whose x stays in the second-level cache beside a panel
constexpr int64_t SHARED_TOKENS = 60;   // more are cut into such blocks
constexpr int64_t MOST_PANELS = 4;      // that are handed out at once, for one conversion of their tokens, ...
constexpr int64_t SHARES = 4;           // ... as long as each thread gets so many pieces
constexpr int64_t PART_STEPS = 384;     // of k: 96 KB of a panel
constexpr int64_t GATED_PANELS = 16;    // of a single strip whose gates are finished together
constexpr int64_t AHEAD = 16;           // steps that a single strip fetches in advance: 4 KB
constexpr int64_t MIN_BYTES = 1 << 16;  // of weights for each thread: less is not worth waking it

int64_t strips_of(int64_t tokens) { return (tokens + TILE_ROWS - 1) / TILE_ROWS; }

struct Linear : LinearCall {
    // What a strip fetches while it adds: so many cache lines at each step.
    struct Fetch {
        const uint32_t* from;
        int64_t lines;

        void operator()(int64_t step) const {
            for (int64_t n = 0; n < lines; ++n) __builtin_prefetch(from + (step * lines + n) * LINE, 0, FETCH_INTO);
        }
    };

    // Tokens [first, last) times some columns.
    //
    // Memory is kept busy meanwhile: a single strip fetches what it reads a little later; several, which find all but
    // the first in the cache, fetch the next part, and with the last part what is at `next`, if anything.
    void multiply(int64_t first, int64_t last, const Columns& columns, const uint32_t* next) const {
        int64_t steps = inputs / 2, strips = strips_of(last - first);
        if (strips <= 1) return multiply_single(first, last, columns, {});
        thread_local Scratch scratch;
        float* waiting = reinterpret_cast<float*>(scratch.get((last - first) * PANEL * sizeof(float)));
        int64_t parts = (steps + PART_STEPS - 1) / PART_STEPS;
        int64_t lines = (columns.vectors + strips - 1) / strips;
        for (int64_t part = 0; part < parts; ++part) {
            int64_t begin = steps * part / parts, end = steps * (part + 1) / parts;
            const uint32_t* after = part + 1 < parts ? columns.weights + end * columns.width : next;
            for (int64_t strip = 0; strip < strips; ++strip) {  // of equal height: 4 + 4 rows beat 6 + 2
                int64_t row = first + (last - first) * strip / strips;
                int rows = int(first + (last - first) * (strip + 1) / strips - row);
                Fetch fetch = {after + strip * lines * (end - begin) * LINE, lines};
                if (after == nullptr || strip * lines >= columns.vectors) fetch.lines = 0;
                multiply_strip(row, rows, columns, begin, end, {waiting + (row - first) * PANEL, PANEL}, fetch);
            }
        }
    }

    // Where sums of a strip wait, for other steps or to be finished with others.
    struct Waiting {
        float* sums = nullptr;
        int64_t stride = 0;
        bool is_finished_by_caller = false;
    };

    void multiply_single(int64_t first, int64_t last, const Columns& columns, const Waiting& waiting) const {
        int rows = int(last - first);
        if constexpr (READS_AHEAD)
            multiply_strip(first, rows, columns, 0, inputs / 2, waiting,
                           Fetch{columns.weights + AHEAD * columns.width, columns.vectors});
        else
            multiply_strip(first, rows, columns, 0, inputs / 2, waiting, Nothing{});
    }

    // A single strip of a gated product. Activations of one panel at a time would interrupt the stream of weights too
    // often: that made it 4 to 5 % slower than two operations are, for 4 and 6 tokens.
    void multiply_single_gated(int64_t first, int64_t last, int64_t begin, int64_t end) const {
        constexpr int64_t STRIDE = GATED_PANELS * PANEL + LANES;  // not a power of two, whose lines collide
        alignas(64) float sums[TILE_ROWS * STRIDE];
        for (int64_t stop; begin < end; begin = stop) {
            stop = std::min(end, (begin / PER_PANEL + GATED_PANELS) * PER_PANEL);
            for_columns(begin, stop, TILE_VECTORS, nullptr, [&](const Columns& columns, const uint32_t*) {
                multiply_single(first, last, columns, {sums + columns.column - begin * LANES, STRIDE, true});
            });
            finish_gated(first, last - first, begin * LANES, stop - begin, sums, STRIDE);
        }
    }

    // The steps [begin, end) of one strip. Where they are not all, its sums come from `waiting` and go there.
    template <class AtStep>
    void multiply_strip(int64_t row, int rows, const Columns& columns, int64_t begin, int64_t end,
                        const Waiting& waiting, const AtStep& at_step) const {
        with_tile(rows, int(columns.vectors), [&]<int ROWS, int VECTORS>() {
            f32x16 sums[ROWS][VECTORS];
            if (begin == 0)
                zero_tile(sums);
            else
                load_tile(waiting.sums, waiting.stride, sums);
            multiply_tile<Pairs, ROWS, VECTORS>(x + row * x_stride + 2 * begin, x_stride,
                                                columns.weights + begin * columns.width, columns.width, end - begin,
                                                sums, at_step);
            if (end < inputs / 2 || waiting.is_finished_by_caller)
                store_tile(waiting.sums, waiting.stride, sums);
            else
                finish(row, columns.column, sums);
        });
    }

    // The vectors [begin, end) of the outputs.
    void multiply_vectors(int64_t first, int64_t last, int64_t begin, int64_t end, const uint32_t* next) const {
        if constexpr (IS_SHORT) {
            ShortLinear product(*this, first, last);
            for_columns(begin, end, PER_PANEL, next, [&](const Columns& columns, const uint32_t* after) {
                product.multiply(columns, after);
            });
        } else if (form == GATED && last - first <= TILE_ROWS) {
            multiply_single_gated(first, last, begin, end);
        } else {
            for_columns(begin, end, TILE_VECTORS, next, [&](const Columns& columns, const uint32_t* after) {
                multiply(first, last, columns, after);
            });
        }
    }

    void run() const {
        if (num_tokens == 0) return;
        int64_t vectors = num_vectors(), vector_bytes = inputs * LANES * 2;
        if (num_tokens <= SHARED_TOKENS) {
            // Whole panels, as long as all threads get some: one that two threads read comes from memory twice.
            int64_t unit = num_panels() >= SHARES * max_threads() ? PER_PANEL : 1;
            share_out(vectors, vectors_of(MIN_BYTES, vector_bytes, unit), [&](int64_t begin, int64_t end) {
                const uint32_t* next = end < vectors ? at(end * LANES) : nullptr;
                multiply_vectors(0, num_tokens, begin, end, next);
            });
            return;
        }
        int64_t panels = num_panels(), strips = strips_of(num_tokens);
        int64_t blocks = (strips + BLOCK_STRIPS - 1) / BLOCK_STRIPS;
        int64_t ahead = max_threads();  // groups: one is mine after so many, if all threads are equally fast
        int64_t together = IS_SHORT ? std::clamp<int64_t>(blocks * panels / (SHARES * ahead), 1, MOST_PANELS) : 1;
        int64_t groups = (panels + together - 1) / together;
        hand_out(blocks * groups, [&](int64_t n) {
            int64_t block = n / groups, panel = n % groups * together;
            int64_t first = num_tokens * (strips * block / blocks) / strips;
            int64_t last = num_tokens * (strips * (block + 1) / blocks) / strips;
            const uint32_t* next = n + ahead < blocks * groups ? at((n + ahead) % groups * together * PANEL) : nullptr;
            multiply_vectors(first, last, panel * PER_PANEL, std::min((panel + together) * PER_PANEL, vectors), next);
        });
    }
};

}  // namespace
}  // namespace engine

// Bytes of the packed form of [outputs, inputs]; inputs must be even.
EXPORT int64_t packed_linear_bytes(int64_t outputs, int64_t inputs) {
    return engine::padded(outputs) * engine::steps_of(inputs) * engine::STEP_PAIRS * 4;
}

EXPORT void pack_linear(const void* weight_, int64_t outputs, int64_t inputs, void* packed_) {
    using namespace engine;
    const uint16_t* weight = static_cast<const uint16_t*>(weight_);
    uint32_t* packed = static_cast<uint32_t*>(packed_);
    int64_t all = padded(outputs), panels = (all + PANEL - 1) / PANEL, pairs = steps_of(inputs) * STEP_PAIRS;
    share_out(panels, 1, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) {
            int64_t width = std::min(PANEL, all - panel * PANEL);
            uint32_t* to = packed + panel * PANEL * pairs;
            for (int64_t n = 0; n < width; ++n) {
                const uint16_t* from = weight + (panel * PANEL + n) * inputs;
                int64_t filled = panel * PANEL + n < outputs ? inputs / 2 : 0;
                for (int64_t k = 0; k < pairs; ++k) to[pair_at(n, k, width)] = k < filled ? load_pair(from + 2 * k) : 0;
            }
        }
    });
}

// Makes the weight of a gated product (output.h) of a packed one, in place.
EXPORT void pair_linear(void* packed_, int64_t outputs, int64_t inputs) {
    using namespace engine;
    constexpr int64_t UNIT = STEP_PAIRS * LANES, MIN_STEPS = 16;  // neighbours in memory, which one thread should move
    uint32_t* packed = static_cast<uint32_t*>(packed_);
    LinearCall call = {{nullptr, nullptr, GATED, outputs}, nullptr, 0, packed, 0, inputs};
    int64_t vectors = call.num_vectors();
    auto place_of = [&](int64_t vector, int64_t step) {
        return packed + (call.at(vector * LANES) - packed) + step * STEP_PAIRS * call.panel_width(vector / PER_PANEL);
    };
    share_out(steps_of(inputs), MIN_STEPS, [&](int64_t begin, int64_t end) {
        thread_local Scratch scratch;
        uint32_t* before = reinterpret_cast<uint32_t*>(scratch.get(vectors * UNIT * sizeof(uint32_t)));
        for (int64_t step = begin; step < end; ++step) {
            for (int64_t v = 0; v < vectors; ++v) std::memcpy(before + v * UNIT, place_of(v, step), UNIT * sizeof(uint32_t));
            for (int64_t v = 0; v < vectors; ++v)
                std::memcpy(place_of(v, step), before + call.first_of(v) / LANES * UNIT, UNIT * sizeof(uint32_t));
        }
    });
}

// `form`: see output.h.
EXPORT void linear_to(const void* x, int64_t x_stride, const void* packed, const void* bias, void* out,
                      int64_t num_tokens, int64_t inputs, int64_t outputs, int form) {
    using namespace engine;
    LinearCall call = {{static_cast<const bf16*>(bias), out, Form(form), outputs},
                       static_cast<const bf16*>(x),
                       x_stride,
                       static_cast<const uint32_t*>(packed),
                       num_tokens,
                       inputs};
#if TILES
    TileLinear{call}.run();
#else
#if FLOAT_PRODUCTS
    if (num_tokens > TILE_ROWS) return FloatLinear{{call}}.run();
#endif
    Linear{{call}}.run();
#endif
}

// Rows of the weight as it was before it was packed: out[n] = weight[ids[n]]; ids in [0, outputs).
EXPORT void linear_rows(const void* packed_, const int64_t* ids, void* out_, int64_t num_rows, int64_t inputs,
                        int64_t outputs) {
    using namespace engine;
    const uint32_t* packed = static_cast<const uint32_t*>(packed_);
    uint32_t* out = static_cast<uint32_t*>(out_);
    share_out(num_rows, MIN_BYTES / (inputs * 2) + 1, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) {
            int64_t panel = ids[n] / PANEL, width = std::min(PANEL, padded(outputs) - panel * PANEL);
            const uint32_t* from = packed + panel * PANEL * steps_of(inputs) * STEP_PAIRS;
            for (int64_t k = 0; k < inputs / 2; ++k)
                std::memcpy(out + n * (inputs / 2) + k, from + pair_at(ids[n] % PANEL, k, width), sizeof *out);
        }
    });
}

RECORDABLE(linear_to)
RECORDABLE(linear_rows)
