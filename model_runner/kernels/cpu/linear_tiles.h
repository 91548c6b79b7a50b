// The matmul of linear.cpp on tiles (amx.h): row tiles of up to 32 tokens by 32 outputs, two AMX tiles by two, so that
// each loaded AMX tile is used twice.
//
// Each accumulator is one chain of tile multiplications in the order of k, 32 inputs per k-step, for any number of
// tokens. Between parts it is stored unrounded: the bits of a token do not depend on the other tokens.
//
// A panel is read once for all row tiles of a block of tokens; the block's x stays in L2 for all panels. Very long
// panels are cut along k, so that one part of them stays in L2, too. (Parts that fit into L1 gain less than storing
// accumulators costs: 1.30 instead of 1.58 TFLOP/s with 1536 inputs.)

#pragma once

#include "amx.h"
#include "linear.h"
#include "parallel.h"
#include "matmul_parts.h"

#if TILES

#include <type_traits>
#include <utility>

namespace engine {

// body.template operator()<0>() ... <COUNT - 1>()
template <int COUNT, class Body>
inline __attribute__((always_inline)) void each(const Body& body) {
    [&]<int... N>(std::integer_sequence<int, N...>) __attribute__((always_inline)) {
        (body.template operator()<N>(), ...);
    }(std::make_integer_sequence<int, COUNT>());
}

// Without a packed weight (`packed` is null) it multiplies columns that the caller has dequantized (block_tiles.h).
struct TileLinear : LinearCall {
    static constexpr int64_t TILE = amx::MAX_ROWS;     // tokens of an AMX tile
    static constexpr int64_t ROW_TILE_ROWS = 2 * TILE;
    static constexpr int64_t INPUTS = 2 * STEP_PAIRS;  // inputs of a k-step
    static constexpr int64_t PART = 128;               // k-steps of a part: 256 KB of a panel
    static constexpr int64_t BLOCK_BYTES = 1 << 20;    // x of a block of tokens
    static constexpr int64_t AHEAD = 8192 / sizeof(uint32_t);  // prefetch distance of a single row tile
    static constexpr int64_t SHARED_TOKENS = 64;               // more tokens may be cut into blocks
    static constexpr int64_t MIN_BYTES = 1 << 16;  // weight per thread, at least: less does not pay for waking it

    // Prefetch of a row tile: `lines` cache lines at each k-step, into L2: L1 is fully used by the data that is
    // multiplied.
    struct Fetch {
        const uint32_t* from;
        int64_t lines;

        void operator()(int64_t step) const {
            for (int64_t n = 0; n < lines; ++n) __builtin_prefetch(from + (step * lines + n) * LINE, 0, 2);
        }
    };

    // Work of a row tile at each k-step, before the AMX tiles of that k-step are loaded: prefetch, and `next(step)`.
    template <class Next>
    struct FetchAnd {
        Fetch fetch;
        const Next& next;
        int64_t begin;

        inline __attribute__((always_inline)) void operator()(int64_t step) const {
            fetch(step);
            next(begin + step);
        }
    };

    // One row tile: tokens [row, row + rows), and the k-steps [begin, end).
    struct RowTile {
        int64_t row, rows, begin, end;
        float* waiting;    // of this row tile
        const bf16* tail;  // of this row tile; null if k needs no padding
    };

    // Stores finished accumulators of a row tile to the output, a few rows at a time, while the AMX tiles multiply the
    // next row tile: all at once it would take a fifth of the time.
    class Finish {
      public:
        Finish(const TileLinear& call, const Columns& columns, float* added, float* sums)
            : gated_(call.form == GATED),
              added_(added),
              next_(sums),
              other_(sums + ROW_TILE_ROWS * PANEL),
              width_(std::min(columns.vectors * LANES, call.outputs - columns.column)),
              number_bytes_(call.form == FLOAT ? sizeof(float) : sizeof(bf16)),
              row_bytes_((call.row_stride ? call.row_stride : call.outputs / call.unit()) * number_bytes_),
              out_(static_cast<char*>(call.out) + columns.column / call.unit() * number_bytes_) {
            std::memset(added, 0, PANEL * sizeof(float));
            if (call.bias != nullptr) call.copy_bias(columns.column, columns.vectors, added);
        }

        // Buffer for the accumulators of the next row tile: [ROW_TILE_ROWS][PANEL].
        float* free_sums() { return next_; }

        // Call when the accumulators of `row_tile` are in that buffer.
        void take(const RowTile& row_tile) {
            advance(left_);
            from_ = next_;
            std::swap(next_, other_);
            to_ = out_ + row_tile.row * row_bytes_;
            left_ = row_tile.rows;
        }

        int64_t left() const { return left_; }

        void advance(int64_t rows) {
            rows = std::min(rows, left_);
            left_ -= rows;
            if (gated_)
                for (; rows > 0; --rows, from_ += PANEL, to_ += row_bytes_) store_gated(reinterpret_cast<bf16*>(to_));
            if (width_ == PANEL && number_bytes_ == sizeof(bf16))
                for (; rows > 0; --rows, from_ += PANEL, to_ += row_bytes_) store_row(reinterpret_cast<bf16*>(to_));
            for (; rows > 0; --rows, from_ += PANEL, to_ += row_bytes_) store_some();
        }

      private:
        template <class Out>
        void store_row(Out* to) const {
            each<PER_PANEL>([&]<int V>() { store(to + V * LANES, load(from_ + V * LANES) + load(added_ + V * LANES)); });
        }

        void store_gated(bf16* to) const {
            static_assert(PER_PANEL == 2, "the gates and ups of a vector are a panel");
            store(to, gated(load(from_) + load(added_), load(from_ + LANES) + load(added_ + LANES)));
        }

        void store_some() const {
            float all[PANEL];  // or PANEL bfloat16
            number_bytes_ == sizeof(bf16) ? store_row(reinterpret_cast<bf16*>(all)) : store_row(all);
            std::memcpy(to_, all, width_ * number_bytes_);
        }

        bool gated_;
        const float* added_;  // [PANEL]: the bias of these columns, or zeros
        float *next_, *other_;  // double buffer: one is filled while the other is stored
        int64_t width_, number_bytes_, row_bytes_, left_ = 0;
        char *out_, *to_ = nullptr;
        const float* from_ = nullptr;
    };

    // Workspace of one thread.
    struct Workspace {
        float* waiting;  // [tokens][PANEL]: accumulators between two parts
        bf16* tails;     // [tokens][INPUTS]: the last inputs of x, padded with zeros
        float *added, *sums;  // see `Finish`
    };

    Workspace workspace(int64_t tokens) const {
        thread_local Scratch scratch;
        int64_t waiting = tokens * PANEL, tails = tokens * INPUTS / 2, sums = 2 * ROW_TILE_ROWS * PANEL;
        float* memory = reinterpret_cast<float*>(scratch.get((waiting + tails + PANEL + sums) * sizeof(float)));
        float* added = memory + waiting + tails;
        return {memory, reinterpret_cast<bf16*>(memory + waiting), added, added + PANEL};
    }

    // AMX tiles: accumulators of the first 16 tokens are 0 and 1, of the second 16 tokens 2 and 3.
    static constexpr int ROWS = 4, WEIGHTS = 6;

    static amx::Shapes shapes(int64_t rows) {
        amx::Shapes shapes;
        int first = int(std::min(rows, TILE)), second = int(rows - first);
        for (int v = 0; v < PER_PANEL; ++v) {
            shapes.set(v, first, amx::ROW_BYTES);
            shapes.set(WEIGHTS + v, STEP_PAIRS, amx::ROW_BYTES);
            if (second > 0) shapes.set(PER_PANEL + v, second, amx::ROW_BYTES);
        }
        shapes.set(ROWS, first, amx::ROW_BYTES);
        if (second > 0) shapes.set(ROWS + 1, second, amx::ROW_BYTES);
        return shapes;
    }

    template <int ROW_TILES, int VECTORS, class Ahead>
    void multiply_row_tile(const RowTile& row_tile, const Columns& columns, const Ahead& ahead, Finish& finish) const {
        each<ROW_TILES>([&]<int R>() {
            each<VECTORS>([&]<int V>() {
                if (row_tile.begin == 0)
                    amx::zero<R * PER_PANEL + V>();
                else
                    amx::load<R * PER_PANEL + V>(row_tile.waiting + R * TILE * PANEL + V * LANES, PANEL * sizeof(float));
            });
        });
        const uint32_t* weights = columns.weights + row_tile.begin * STEP_PAIRS * columns.width;
        const int64_t width = columns.width, stride = x_stride;  // locals: tile loads clobber memory
        auto step = [](const bf16* rows, int64_t stride, const uint32_t* weights)
            __attribute__((always_inline)) {
            each<ROW_TILES>([=]<int R>() { amx::load<ROWS + R>(rows + R * TILE * stride, stride * sizeof(bf16)); });
            each<VECTORS>([=]<int V>() {
                amx::load<WEIGHTS + V>(weights + V * STEP_PAIRS * LANES, amx::ROW_BYTES);
                each<ROW_TILES>([]<int R>() { amx::dot_pairs<R * PER_PANEL + V, ROWS + R, WEIGHTS + V>(); });
            });
        };
        const bf16* rows = x + row_tile.row * x_stride + row_tile.begin * INPUTS;
        bool is_last = row_tile.end == steps_of(inputs), has_tail = is_last && row_tile.tail != nullptr;
        int64_t to_finish = (finish.left() + row_tile.end - row_tile.begin - 1) / (row_tile.end - row_tile.begin);
        const int64_t whole = row_tile.end - has_tail;
        for (int64_t n = row_tile.begin; n < whole; ++n, rows += INPUTS, weights += STEP_PAIRS * width) {
            ahead(n - row_tile.begin);
            step(rows, stride, weights);
            finish.advance(to_finish);
        }
        if (has_tail) step(row_tile.tail, INPUTS, weights);
        float* to = is_last ? finish.free_sums() : row_tile.waiting;
        each<ROW_TILES>([&]<int R>() {
            each<VECTORS>([&]<int V>() {
                amx::store<R * PER_PANEL + V>(to + R * TILE * PANEL + V * LANES, PANEL * sizeof(float));
            });
        });
        if (is_last) finish.take(row_tile);
    }

    template <class Ahead>
    void multiply_row_tile(const RowTile& row_tile, const Columns& columns, const Ahead& ahead, Finish& finish) const {
        if (row_tile.rows > TILE)
            columns.vectors == 1 ? multiply_row_tile<2, 1>(row_tile, columns, ahead, finish)
                                 : multiply_row_tile<2, 2>(row_tile, columns, ahead, finish);
        else
            columns.vectors == 1 ? multiply_row_tile<1, 1>(row_tile, columns, ahead, finish)
                                 : multiply_row_tile<1, 2>(row_tile, columns, ahead, finish);
    }

    void multiply(int64_t first, int64_t last, const Columns& columns, const uint32_t* next) const {
        multiply(first, last, columns, next, nullptr);
    }

    // Tokens [first, last) times some columns of one panel; `next` is the data read after them, or null. `unpack`, or
    // null, is called once with each k-step of the columns, in order, before that k-step is read.
    //
    // Prefetch: a single row tile prefetches its own data a little ahead. With several, all but the first find the data
    // in a cache; they prefetch the next part, and during the last part the data at `next`.
    template <class Unpack>
    void multiply(int64_t first, int64_t last, const Columns& columns, const uint32_t* next, const Unpack& unpack) const {
        int64_t tokens = last - first, steps = steps_of(inputs);
        Workspace memory = workspace(tokens);
        Finish finish(*this, columns, memory.added, memory.sums);
        bool has_tail = inputs % INPUTS != 0;
        if (has_tail) copy_tails(first, last, memory.tails);
        auto row_tile_at = [&](int64_t row, int64_t rows, int64_t begin, int64_t end) {
            return RowTile{row, rows, begin, end, memory.waiting + (row - first) * PANEL,
                         has_tail ? memory.tails + (row - first) * INPUTS : nullptr};
        };
        auto multiply_first = [&](const RowTile& row_tile, const Fetch& fetch) {
            if constexpr (std::is_null_pointer_v<Unpack>)
                multiply_row_tile(row_tile, columns, fetch, finish);
            else
                multiply_row_tile(row_tile, columns, FetchAnd<Unpack>{fetch, unpack, row_tile.begin}, finish);
        };
        int64_t row_tiles = (tokens + ROW_TILE_ROWS - 1) / ROW_TILE_ROWS, rest = tokens - (row_tiles - 1) * ROW_TILE_ROWS;
        if (row_tiles == 1) {
            amx::Tiles tiles(shapes(tokens));
            Fetch fetch = {columns.weights + AHEAD, packed != nullptr ? columns.vectors * STEP_PAIRS : 0};
            multiply_first(row_tile_at(first, tokens, 0, steps), fetch);
            finish.advance(tokens);
            return;
        }
        int64_t parts = (steps + PART - 1) / PART;
        int64_t all_lines = columns.vectors * STEP_PAIRS, lines = (all_lines + row_tiles - 1) / row_tiles;
        for (int64_t part = 0; part < parts; ++part) {
            int64_t begin = steps * part / parts, end = steps * (part + 1) / parts;
            const uint32_t* after = part + 1 < parts ? columns.weights + end * STEP_PAIRS * columns.width : next;
            auto fetch = [&](int64_t row_tile) {
                bool is_idle = after == nullptr || row_tile * lines >= all_lines;
                return Fetch{after + row_tile * lines * (end - begin) * LINE, is_idle ? 0 : lines};
            };
            {
                amx::Tiles tiles(shapes(ROW_TILE_ROWS));
                multiply_first(row_tile_at(first, ROW_TILE_ROWS, begin, end), fetch(0));
                for (int64_t row_tile = 1; row_tile < row_tiles - 1; ++row_tile)
                    multiply_row_tile(row_tile_at(first + row_tile * ROW_TILE_ROWS, ROW_TILE_ROWS, begin, end), columns,
                                      fetch(row_tile), finish);
            }
            amx::Tiles tiles(shapes(rest));
            multiply_row_tile(row_tile_at(last - rest, rest, begin, end), columns, fetch(row_tiles - 1), finish);
        }
        finish.advance(ROW_TILE_ROWS);
    }

    void copy_tails(int64_t first, int64_t last, bf16* to) const {
        int64_t numbers = inputs % INPUTS;
        std::memset(to, 0, (last - first) * INPUTS * sizeof(bf16));
        for (int64_t row = first; row < last; ++row, to += INPUTS)
            std::memcpy(to, x + row * x_stride + inputs - numbers, numbers * sizeof(bf16));
    }

    void multiply_part(int64_t begin, int64_t end) const {
        for_token_blocks(num_tokens, ROW_TILE_ROWS, row_tiles_of_block(), [&](int64_t first, int64_t last) {
            for_columns(begin, end, PER_PANEL, nullptr, [&](const Columns& columns, const uint32_t* after) {
                multiply(first, last, columns, after);
            });
        });
    }

    void run() const {
        if (num_tokens == 0) return;
        if (num_tokens <= SHARED_TOKENS) {
            int64_t vector_bytes = steps_of(inputs) * STEP_PAIRS * LANES * 4;
            parallel_for(num_vectors(), vectors_of(MIN_BYTES, vector_bytes, 1), [&](int64_t begin, int64_t end) {
                const uint32_t* next = end < num_vectors() ? at(end * LANES) : nullptr;
                for_columns(begin, end, PER_PANEL, next, [&](const Columns& columns, const uint32_t* after) {
                    multiply(0, num_tokens, columns, after);
                });
            });
            return;
        }
        parallel_for_panels([&](int64_t first, int64_t last, int64_t panel, int64_t after) {
            const uint32_t* next = after < num_panels() ? at(after * PANEL) : nullptr;
            for_columns(panel * PER_PANEL, std::min((panel + 1) * PER_PANEL, num_vectors()), PER_PANEL, next,
                        [&](const Columns& columns, const uint32_t* after) { multiply(first, last, columns, after); });
        });
    }

    // Row tiles per block of tokens: their x stays in L2.
    int64_t row_tiles_of_block() const {
        return std::max<int64_t>(BLOCK_BYTES / (inputs * int64_t(sizeof(bf16)) * ROW_TILE_ROWS), 2);
    }

    // body(first, last, panel, after) for blocks of tokens [first, last) and panels; `after` is the panel that this
    // thread probably gets next, or num_panels().
    template <class Body>
    void parallel_for_panels(const Body& body) const {
        int64_t panels = num_panels(), row_tiles = (num_tokens + ROW_TILE_ROWS - 1) / ROW_TILE_ROWS;
        int64_t most = row_tiles_of_block(), blocks = (row_tiles + most - 1) / most;
        int64_t ahead = max_threads();  // a thread gets every ahead-th panel, if all threads are equally fast
        parallel_for_dynamic(blocks * panels, [&](int64_t n) {
            int64_t block = n / panels;
            int64_t first = row_tiles * block / blocks * ROW_TILE_ROWS;
            int64_t last = std::min(row_tiles * (block + 1) / blocks * ROW_TILE_ROWS, num_tokens);
            body(first, last, n % panels, n + ahead < blocks * panels ? (n + ahead) % panels : panels);
        });
    }
};

}  // namespace engine

#endif  // TILES
