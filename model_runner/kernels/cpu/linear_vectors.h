// x @ weight.T + bias in bfloat16, for any number of tokens, with vector registers.
//
// One vector of a panel is multiplied with a k-pair of x, which needs no shuffles and no reductions across a vector. A
// thread reads its panels sequentially, which is fastest for memory. With more tokens than a tile has rows, a panel is
// cut along k: one part stays in a cache for all row tiles, while their accumulators are stored in memory, unrounded.
// An accumulator is therefore the same chain of additions, whether cut or not, and whether the weight is compressed or
// not.

#pragma once

#include <algorithm>

#include "compressed.h"
#include "fetch.h"
#include "linear.h"
#include "linear_256.h"
#include "parallel.h"
#include "matmul_parts.h"
#include "simd.h"
#include "tile.h"

namespace engine {

// Source of a row tile's columns, from some k-step on: a packed panel ...
struct PackedColumns {
    const uint32_t* weights;
    int64_t width;

    const uint32_t* at() const { return weights; }
    void advance(int64_t steps) { weights += steps * width; }

    template <int ROWS, int VECTORS, class AtStep>
    inline __attribute__((always_inline)) void multiply(const bf16* rows, int64_t row_stride, int64_t steps,
                                                        f32x16 (&sums)[ROWS][VECTORS], const AtStep& at_step) const {
        multiply_tile<Pairs>(rows, row_stride, weights, width, steps, sums, at_step);
    }
};

#if COMPRESSES
// ... or a compressed panel.
struct CompressedColumns {
    PanelReader from;
    int64_t first;       // first vector in the panel
    uint32_t* unpacked;  // where to store the unpacked columns; null: not needed

    const uint32_t* at() const { return from.at(); }
    void advance(int64_t steps) { from.advance(steps); }

    template <int ROWS, int VECTORS, class AtStep>
    inline __attribute__((always_inline)) void multiply(const bf16* rows, int64_t row_stride, int64_t steps,
                                                        f32x16 (&sums)[ROWS][VECTORS], const AtStep& at_step) const {
        multiply_compressed(rows, row_stride, from, first, steps, sums, unpacked, at_step);
    }
};
#endif

// COMPRESSED: see compressed.h; pieces then begin with an even vector of a panel.
template <bool COMPRESSED>
struct VectorLinear : LinearCall {
    static_assert(!COMPRESSED || COMPRESSES);
    static_assert(PER_PANEL <= 4 && SHORT_STEP / LINE <= 4, "two row tiles prefetch two lines each");

#if defined(__AVX512F__) || HAS_BF16_DOT
    static constexpr bool IS_SHORT = false;
#else
    static constexpr bool IS_SHORT = true;
#endif
    static constexpr int64_t BLOCK_ROW_TILES = 21; // row tiles per block of tokens: their x stays in L2 beside a panel
    static constexpr int64_t SHARED_TOKENS = 60;   // more tokens are cut into such blocks
    static constexpr int64_t MOST_PANELS = 4;      // panels of a piece, so that tokens are converted once for them, ...
    static constexpr int64_t SHARES = 4;           // ... as long as each thread gets this many pieces
    static constexpr int64_t PART_STEPS = 384;     // k-steps of a part: 96 KB of a panel
    static constexpr int64_t FEW_ROW_TILES = 3;    // so few row tiles unpack on their own, which is faster than sharing
    static constexpr int64_t GATED_PANELS = 16;    // panels of a single row tile whose gates are computed together
    static constexpr int64_t AHEAD = 16;           // prefetch distance of a single row tile in k-steps: 3 or 4 KB
    static constexpr int64_t MIN_BYTES = 1 << 16;  // weight per thread, at least: less does not pay for waking it

    // Prefetch of one of several row tiles: one or two cache lines at each of the first `steps` k-steps.
    struct Fetch {
        const uint32_t* from;
        int64_t steps, lines;

        ALWAYS_INLINE void operator()(int64_t step) const {
            if (step >= steps) return;
            fetch(from + step * lines * LINE);
            if (lines == 2) fetch(from + (step * lines + 1) * LINE);
        }
    };

    // Prefetch of a single row tile: at each k-step, a whole k-step further on.
    struct FetchLater {
        static constexpr int64_t LINES = COMPRESSED ? SHORT_STEP / LINE : PER_PANEL;

        const uint32_t* from;

        ALWAYS_INLINE void operator()(int64_t step) const {
#pragma GCC unroll 4
            for (int64_t n = 0; n < LINES; ++n) fetch<3>(from + (step * LINES + n) * LINE);
        }
    };

    // Where the accumulators of a row tile are stored, between parts or until they are finished together.
    struct Waiting {
        float* sums = nullptr;
        int64_t stride = 0;
        bool is_finished_by_caller = false;
    };

    static int64_t row_tiles_of(int64_t tokens) { return (tokens + TILE_ROWS - 1) / TILE_ROWS; }

    // The columns at their first k-step; see `CompressedColumns` for `unpacked`.
    static auto begin_of(const Columns& columns, [[maybe_unused]] uint32_t* unpacked) {
#if COMPRESSES
        if constexpr (COMPRESSED)
            return CompressedColumns{PanelReader(columns.weights), columns.column % PANEL / LANES, unpacked};
        else
#endif
            return PackedColumns{columns.weights, columns.width};
    }

    // Tokens [first, last) times some columns.
    //
    // Prefetch: a single row tile prefetches its own data a little ahead. With several, all but the first find the data
    // in the cache; the first few of them prefetch the next part, and during the last part the data at `next`, if any.
    // The others do not prefetch.
    void multiply(int64_t first, int64_t last, const Columns& columns, const uint32_t* next) const {
        int64_t steps = inputs / 2, row_tiles = row_tiles_of(last - first);
        if (row_tiles <= 1) return multiply_single(first, last, columns, {});
        thread_local Scratch scratch;
        bool is_left = COMPRESSED && row_tiles > FEW_ROW_TILES;  // the first row tile stores what it unpacks
        int64_t num_sums = (last - first) * PANEL, num_left = is_left ? PART_STEPS * PANEL : 0;
        float* waiting = reinterpret_cast<float*>(scratch.get((num_sums + num_left) * sizeof(float)));
        uint32_t* unpacked = is_left ? reinterpret_cast<uint32_t*>(waiting + num_sums) : nullptr;
        int64_t parts = (steps + PART_STEPS - 1) / PART_STEPS;
        int64_t all_lines = COMPRESSED ? SHORT_STEP / LINE : columns.vectors;
        int64_t lines = (all_lines + row_tiles - 1) / row_tiles;
        auto from = begin_of(columns, unpacked);
        for (int64_t part = 0; part < parts; ++part) {
            int64_t begin = steps * part / parts, end = steps * (part + 1) / parts;
            auto following = from;
            following.advance(end - begin);
            const uint32_t* after = part + 1 < parts ? following.at() : next;
            for (int64_t row_tile = 0; row_tile < row_tiles; ++row_tile) {  // of equal height: 4 + 4 rows beat 6 + 2
                int64_t row = first + (last - first) * row_tile / row_tiles;
                int rows = int(first + (last - first) * (row_tile + 1) / row_tiles - row);
                Fetch fetch = after != nullptr && row_tile * lines < all_lines
                                  ? Fetch{after + row_tile * lines * (end - begin) * LINE, end - begin,
                                          std::min(lines, all_lines - row_tile * lines)}
                                  : Fetch{nullptr, 0, 0};
                Waiting sums = {waiting + (row - first) * PANEL, PANEL};
                if (is_left && row_tile > 0)
                    multiply_row_tile(row, rows, columns, begin, end, PackedColumns{unpacked, PANEL}, sums, fetch);
                else
                    multiply_row_tile(row, rows, columns, begin, end, from, sums, fetch);
            }
            from = following;
        }
    }

    void multiply_single(int64_t first, int64_t last, const Columns& columns, const Waiting& waiting) const {
        int rows = int(last - first);
        auto from = begin_of(columns, nullptr);
        if (READS_AHEAD && (COMPRESSED || columns.vectors == PER_PANEL))
            multiply_row_tile(first, rows, columns, 0, inputs / 2, from, waiting,
                           FetchLater{from.at() + AHEAD * FetchLater::LINES * LINE});
        else
            multiply_row_tile(first, rows, columns, 0, inputs / 2, from, waiting, Nothing{});
    }

    // A single row tile of a gated matmul. Computing activations panel by panel would interrupt the stream of weights
    // too often: it was 4 to 5 % slower than two operations, for 4 and 6 tokens.
    void multiply_single_gated(int64_t first, int64_t last, int64_t begin, int64_t end) const {
        constexpr int64_t STRIDE = GATED_PANELS * PANEL + LANES;  // a power of two would cause cache conflicts
        alignas(64) float sums[TILE_ROWS * STRIDE];
        for (int64_t stop; begin < end; begin = stop) {
            stop = std::min(end, (begin / PER_PANEL + GATED_PANELS) * PER_PANEL);
            for_columns(begin, stop, TILE_VECTORS, nullptr, [&](const Columns& columns, const uint32_t*) {
                multiply_single(first, last, columns, {sums + columns.column - begin * LANES, STRIDE, true});
            });
            finish_gated(first, last - first, begin * LANES, stop - begin, sums, STRIDE);
        }
    }

    // Where a tile of several rows has one vector, which is a gate without its up: row tile by row tile for each panel.
    void multiply_gated_panels(int64_t first, int64_t last, int64_t begin, int64_t end) const {
        for (int64_t stop; begin < end; begin = stop) {
            stop = std::min(end, (begin / PER_PANEL + 1) * PER_PANEL);
            for (int64_t row = first; row < last; row += TILE_ROWS)
                multiply_single_gated(row, std::min(row + TILE_ROWS, last), begin, stop);
        }
    }

    // The k-steps [begin, end) of one row tile. If these are not all, accumulators are loaded from and stored to
    // `waiting`.
    template <class From, class AtStep>
    void multiply_row_tile(int64_t row, int rows, const Columns& columns, int64_t begin, int64_t end, const From& from,
                        const Waiting& waiting, const AtStep& at_step) const {
        with_tile(rows, int(columns.vectors), [&]<int ROWS, int VECTORS>() {
            multiply_rows<ROWS, VECTORS>(row, columns.column, begin, end, from, waiting, at_step);
        });
    }

    // A function of its own: inlined, GCC 12 stores all accumulators at each k-step. Arguments by reference: stack
    // copies are read in 16-byte loads that wait for the previous row tile's stores to reach the cache (3 % of 512
    // tokens).
    template <int ROWS, int VECTORS, class From, class AtStep>
    __attribute__((noinline)) void multiply_rows(int64_t row, int64_t column, int64_t begin, int64_t end, const From& from,
                                                 const Waiting& waiting, const AtStep& at_step) const {
        f32x16 sums[ROWS][VECTORS];
        if (begin == 0)
            zero_tile(sums);
        else
            load_tile(waiting.sums, waiting.stride, sums);
        from.multiply(x + row * x_stride + 2 * begin, x_stride, end - begin, sums, at_step);
        if (end < inputs / 2 || waiting.is_finished_by_caller)
            store_tile(waiting.sums, waiting.stride, sums);
        else
            finish(row, column, sums);
    }

    // The vectors [begin, end) of the outputs.
    void multiply_vectors(int64_t first, int64_t last, int64_t begin, int64_t end, const uint32_t* next) const {
        if constexpr (IS_SHORT) {
            Linear256 product(*this, first, last);
            for_columns(begin, end, PER_PANEL, next, [&](const Columns& columns, const uint32_t* after) {
                product.multiply(columns, after);
            });
        } else if (form == GATED && last - first <= TILE_ROWS) {
            multiply_single_gated(first, last, begin, end);
        } else if (form == GATED && TILE_VECTORS == 1) {
            multiply_gated_panels(first, last, begin, end);
        } else {
            for_columns(begin, end, TILE_VECTORS, next, [&](const Columns& columns, const uint32_t* after) {
                multiply(first, last, columns, after);
            });
        }
    }

    void multiply_part(int64_t begin, int64_t end) const {
        for_token_blocks(num_tokens, TILE_ROWS, num_tokens <= SHARED_TOKENS ? num_tokens : BLOCK_ROW_TILES,
                         [&](int64_t first, int64_t last) { multiply_vectors(first, last, begin, end, nullptr); });
    }

    void run() const {
        if (num_tokens == 0) return;
        num_tokens <= SHARED_TOKENS ? run_few() : run_many();
    }

  private:
    // Whole panels if all threads get some: a panel that two threads read comes from memory twice.
    void run_few() const {
        int64_t vectors = num_vectors(), vector_bytes = inputs * LANES * 2;
        int64_t least = COMPRESSED ? 2 : 1, unit = num_panels() >= SHARES * max_threads() ? PER_PANEL : least;
        parallel_for(vectors, vectors_of(MIN_BYTES, vector_bytes, unit), [&](int64_t begin, int64_t end) {
            const uint32_t* next = end < vectors ? at(end * LANES) : nullptr;
            multiply_vectors(0, num_tokens, begin, end, next);
        });
    }

    // A piece is some panels with a block of tokens. The remainder of pieces, if at most half of the threads would get
    // one, is cut into parts.
    void run_many() const {
        int64_t panels = num_panels(), row_tiles = row_tiles_of(num_tokens), ahead = max_threads();
        int64_t blocks = (row_tiles + BLOCK_ROW_TILES - 1) / BLOCK_ROW_TILES;
        int64_t together = IS_SHORT ? std::clamp<int64_t>(blocks * panels / (SHARES * ahead), 1, MOST_PANELS) : 1;
        int64_t groups = (panels + together - 1) / together, pieces = blocks * groups;
        int64_t rest = pieces % ahead, whole = pieces - rest;
        int64_t parts = rest > 0 ? std::clamp<int64_t>(ahead / rest, 1, row_tiles / blocks) : 1;
        auto piece_of = [&](int64_t n) { return n < whole ? n : whole + (n - whole) / parts; };
        parallel_for_dynamic(whole + rest * parts, [&](int64_t n) {
            int64_t piece = piece_of(n), block = piece / groups, panel = piece % groups * together;
            int64_t part = n < whole ? 0 : (n - whole) % parts, num_parts = n < whole ? 1 : parts;
            int64_t first_row_tile = row_tiles * block / blocks;
            int64_t num_row_tiles = row_tiles * (block + 1) / blocks - first_row_tile;
            int64_t first = num_tokens * (first_row_tile + num_row_tiles * part / num_parts) / row_tiles;
            int64_t last = num_tokens * (first_row_tile + num_row_tiles * (part + 1) / num_parts) / row_tiles;
            int64_t after = piece_of(n + ahead);  // probably this thread's next piece
            const uint32_t* next = after < pieces ? at(after % groups * together * PANEL) : nullptr;
            multiply_vectors(first, last, panel * PER_PANEL, std::min((panel + together) * PER_PANEL, num_vectors()), next);
        });
    }
};

}  // namespace engine
