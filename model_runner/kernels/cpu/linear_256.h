// The matmul of linear.cpp where registers are shorter than a vector (AVX2 and less): the same panels, in float32.
//
// x is converted to float once for all panels that a thread multiplies it with. With few tokens, which wait for memory,
// each value of the weight is widened where it is multiplied. With many, 16 outputs of a part are widened once for all
// row tiles and stay in L1: the loop alone reaches 92 instead of 73 GFLOP/s (AVX2).
//
// In both cases an accumulator is one chain of fused multiply-adds in the order of k, stored unrounded between parts:
// the bits of a token do not depend on the other tokens.

#pragma once

#include <algorithm>

#include "fetch.h"
#include "linear.h"
#include "parallel.h"
#include "tile.h"

namespace engine {

class Linear256 : LinearCall {
  public:
    // Converts the tokens [first, last). The floats are in thread-local memory: one object per thread at a time.
    Linear256(const LinearCall& call, int64_t first, int64_t last)
        : LinearCall(call), first_(first), tokens_(last - first) {
        int64_t most = tokens_ == 1 ? steps() : tokens_ < MANY ? FEW_STEPS : MANY_STEPS;
        parts_ = (steps() + most - 1) / most;
        thread_local Scratch scratch;
        numbers_ = reinterpret_cast<float*>(scratch.get((tokens_ == 1 ? padded(inputs) : parts_ * tokens_ * STRIDE) * sizeof(float)));
        for (int64_t part = 0; part < parts_; ++part) {
            int64_t count = 2 * (begin_of(part + 1) - begin_of(part));
            for (int64_t n = 0; n < tokens_; ++n)
                widen(x + (first + n) * x_stride + 2 * begin_of(part), count, numbers_of(part) + n * STRIDE);
        }
    }

    // Multiplies with some columns of one panel; `next` is the data read after them, or null.
    //
    // Prefetch: a single token prefetches its own data a little ahead; several tokens prefetch the next part.
    void multiply(const Columns& columns, const uint32_t* next) const {
        if (tokens_ == 1) {
            FetchSteps fetch = {columns.weights + AHEAD * columns.width, columns.vectors};
            multiply_row_tile({first_, 1, 0, steps()}, columns, numbers_, nullptr, fetch);
            return;
        }
        thread_local Scratch scratch;
        float* waiting = reinterpret_cast<float*>(scratch.get(tokens_ * PANEL * sizeof(float)));
        for (int64_t part = 0; part < parts_; ++part) {
            int64_t begin = begin_of(part), end = begin_of(part + 1);
            const uint32_t* after = part + 1 < parts_ ? columns.weights + end * columns.width : next;
            tokens_ < MANY ? multiply_few(begin, end, columns, numbers_of(part), waiting, after)
                           : multiply_many(begin, end, columns, numbers_of(part), waiting, after);
        }
    }

  private:
    static constexpr int64_t MANY = 12;           // tokens
    static constexpr int64_t FEW_ROWS = 4;        // rows of a row tile with few tokens
    static constexpr int64_t FEW_STEPS = 64;      // k-steps of a part: 16 KB of a panel
    static constexpr int64_t MANY_STEPS = 128; // 16 KB of floats for 16 outputs
    static constexpr int64_t AHEAD = 16;          // prefetch distance of a single token in k-steps: 4 KB
    static constexpr int64_t STRIDE = 2 * MANY_STEPS + LANES;  // floats of a token's part

    int64_t steps() const { return inputs / 2; }
    int64_t begin_of(int64_t part) const { return steps() * part / parts_; }
    float* numbers_of(int64_t part) const { return numbers_ + part * tokens_ * STRIDE; }

    static void widen(const bf16* from, int64_t count, float* to) {
        int64_t n = 0;
        for (; n + LANES <= count; n += LANES) store(to + n, load(from + n));
        for (; n < count; ++n) to[n] = to_float(from[n]);
    }

    // Some tokens and the k-steps [begin, end).
    struct RowTile {
        int64_t row, rows, begin, end;
    };

    // Prefetches `lines` cache lines at each k-step.
    struct FetchSteps {
        const uint32_t* from;
        int64_t lines;

        void operator()(int64_t step) const {
            for (int64_t n = 0; n < lines; ++n) fetch(from + (step * lines + n) * LINE);
        }
    };

    // Prefetches one cache line at every 2^shift-th k-step.
    struct FetchSome {
        static constexpr int NEVER = 62;

        const uint32_t* from;
        int shift;

        void operator()(int64_t step) const {
            int64_t line = step >> shift;
            if (line << shift == step) fetch(from + line * LINE);
        }
    };

    void multiply_few(int64_t begin, int64_t end, const Columns& columns, const float* numbers, float* waiting, const uint32_t* after) const {
        int64_t row_tiles = (tokens_ + FEW_ROWS - 1) / FEW_ROWS;
        int64_t lines = (columns.vectors + row_tiles - 1) / row_tiles;
        for (int64_t row_tile = 0; row_tile < row_tiles; ++row_tile) {  // of about equal height
            int64_t row = tokens_ * row_tile / row_tiles, rows = tokens_ * (row_tile + 1) / row_tiles - row;
            FetchSteps fetch = {after + row_tile * lines * (end - begin) * LINE, lines};
            if (after == nullptr || row_tile * lines >= columns.vectors) fetch.lines = 0;
            multiply_row_tile({first_ + row, rows, begin, end}, columns, numbers + row * STRIDE, waiting + row * PANEL,
                              fetch);
        }
    }

    // Up to FEW_ROWS rows times all columns.
    void multiply_row_tile(const RowTile& row_tile, const Columns& columns, const float* numbers, float* waiting,
                        FetchSteps fetch) const {
        for (int64_t v = 0; v < columns.vectors; fetch.lines = 0) {
            int vectors = int(std::min<int64_t>(columns.vectors - v, most_vectors(int(row_tile.rows))));
            const uint32_t* weights = columns.weights + row_tile.begin * columns.width + v * LANES;
            with_tile<FEW_ROWS>(int(row_tile.rows), vectors, [&]<int ROWS, int VECTORS>() {
                multiply_tile_of<WidePairs, ROWS, VECTORS>(row_tile, columns.column + v * LANES, numbers, weights,
                                                           columns.width, row_tile.end - row_tile.begin, waiting + v * LANES,
                                                           fetch);
            });
            v += vectors;
        }
    }

    void multiply_many(int64_t begin, int64_t end, const Columns& columns, const float* numbers, float* waiting, const uint32_t* after) const {
        alignas(64) float weights[2 * MANY_STEPS * LANES];
        int64_t row_tiles = (tokens_ + TILE_ROWS - 1) / TILE_ROWS, numbers_of_k = 2 * (end - begin);
        int64_t lines = columns.vectors * (end - begin), fetched = 0;
        int shift = 0;
        while ((numbers_of_k * row_tiles * columns.vectors) >> (shift + 1) >= lines) ++shift;
        for (int64_t v = 0; v < columns.vectors; ++v) {
            widen_columns(columns.weights + begin * columns.width + v * LANES, columns.width, end - begin, weights);
            for (int64_t n = 0; n < row_tiles; ++n) {
                int64_t row = tokens_ * n / row_tiles, rows = tokens_ * (n + 1) / row_tiles - row;
                FetchSome fetch = {after + fetched * LINE, shift};
                if (after == nullptr || fetched >= lines) fetch = {columns.weights, FetchSome::NEVER};
                fetched += numbers_of_k >> shift;
                with_tile(int(rows), 1, [&]<int ROWS, int VECTORS>() {
                    multiply_tile_of<Floats, ROWS, VECTORS>({first_ + row, rows, begin, end}, columns.column + v * LANES,
                                                            numbers + row * STRIDE, weights, LANES, numbers_of_k,
                                                            waiting + row * PANEL + v * LANES, fetch);
                });
            }
        }
    }

    // Widens 16 columns: the first value of each pair, then its second one.
    static void widen_columns(const uint32_t* from, int64_t width, int64_t steps, float* to) {
        for (int64_t n = 0; n < steps; ++n, from += width, to += 2 * LANES)
            for (int part = 0; part < 2; ++part) store(to + part * LANES, WidePairs::load_step(from, part));
    }

    template <class Kind, int ROWS, int VECTORS, class Fetch>
    inline __attribute__((always_inline)) void multiply_tile_of(const RowTile& row_tile, int64_t column,
                                                                const float* numbers,
                                                                const typename Kind::Step* weights, int64_t width,
                                                                int64_t steps, float* waiting, const Fetch& fetch) const {
        f32x16 sums[ROWS][VECTORS];
        if (row_tile.begin == 0)
            zero_tile(sums);
        else
            load_tile(waiting, PANEL, sums);
        multiply_tile<Kind, ROWS, VECTORS>(numbers, STRIDE, weights, width, steps, sums, fetch);
        if (row_tile.end < inputs / 2)
            store_tile(waiting, PANEL, sums);
        else if (VECTORS > 1 || form != GATED)
            finish(row_tile.row, column, sums);
        else if constexpr (VECTORS == 1)
            finish_half(row_tile.row, column, waiting, sums);
    }

    // Stores one vector of a gated matmul: the gates are kept until their ups, which come next.
    template <int ROWS>
    void finish_half(int64_t row, int64_t column, float* waiting, const f32x16 (&sums)[ROWS][1]) const {
        store_tile(waiting, PANEL, sums);
        if (column / LANES % 2 == 1) finish_gated(row, ROWS, column - LANES, 2, waiting - LANES, PANEL);
    }

    int64_t first_, tokens_, parts_ = 1;
    float* numbers_;  // [part][token][STRIDE]: x
};

}  // namespace engine
