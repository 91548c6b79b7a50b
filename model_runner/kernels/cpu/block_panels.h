// How the matmuls of blocks.cpp and super_matmul.cpp divide their work: among threads, and on a thread into row tiles, a
// few tokens times a panel.

#pragma once

#include <algorithm>

#include "block_tokens.h"
#include "blocks.h"
#include "fetch.h"
#include "matmul_parts.h"
#include "parallel.h"

namespace engine {

#if defined(__AVX512F__)
constexpr int ROW_TILE_ROWS = 6;  // 12 dot products, 12 accumulators, 2 vectors of weights, 1 splat, unpacking
constexpr int AT_ONCE = BlockCall::VECTORS;  // vectors of a panel
#elif defined(__AVX2__)
constexpr int ROW_TILE_ROWS = 4;  // 8 registers of dot products; accumulators are in memory
constexpr int AT_ONCE = 1;
#elif defined(__aarch64__)
constexpr int ROW_TILE_ROWS = 4;  // 16 registers of dot products, 8 of weights, 1 splat; accumulators are in memory
constexpr int AT_ONCE = 1;
#else
constexpr int ROW_TILE_ROWS = 1;
constexpr int AT_ONCE = 1;
#endif

// body<ROWS>() for 1 <= rows <= ROW_TILE_ROWS.
template <int ROWS = ROW_TILE_ROWS, class Body>
inline void with_rows(int rows, const Body& body) {
    if (rows == ROWS)
        body.template operator()<ROWS>();
    else if constexpr (ROWS > 1)
        with_rows<ROWS - 1>(rows, body);
}

// Kernel: multiply_row_tile<ROWS>(row, panel, from, at_block), which multiplies tokens [row, row + ROWS) with a panel and
// calls at_block(n) at each block of inputs. It may replace `multiply`.
template <class Kernel>
struct BlockPanels : BlockCall {
    static constexpr int64_t SHARED_TOKENS = 60;    // more tokens are cut into blocks
    static constexpr int64_t BLOCK_ROW_TILES = 42;  // row tiles per block of tokens: their x stays in L2 beside a panel
    static constexpr int64_t MIN_BYTES = 1 << 16;   // weight per thread, at least: less does not pay for waking it
    static constexpr int64_t MIN_NUMBERS = 1 << 13;  // values of x per thread that quantizes, at least

    // Prefetch of a row tile: an eighth of `lines_of_8` cache lines at each block, into L1 (CACHE 3) or L2 (CACHE 2).
    template <int CACHE>
    struct Fetch {
        const uint8_t* from;
        int64_t lines_of_8;

        void operator()(int64_t block) const {
            int64_t begin = block * lines_of_8 >> 3, end = (block + 1) * lines_of_8 >> 3;
            for (int64_t n = begin; n < end; ++n) fetch<CACHE>(from + n * LINE);
        }
    };

    const Kernel& kernel() const { return static_cast<const Kernel&>(*this); }

    static int64_t row_tiles_of(int64_t tokens) { return (tokens + ROW_TILE_ROWS - 1) / ROW_TILE_ROWS; }

    // Prefetches a panel while a single row tile reads it.
    Fetch<3> fetch_of(int64_t panel) const {
        static const int64_t AHEAD = READS_AHEAD ? 4096 : 256;  // bytes
        return {packed + panel * panel_bytes() + AHEAD, lines_of_8()};
    }

    // body(n, row, rows) for the row tiles of tokens [first, last).
    template <class Body>
    static void for_row_tiles(int64_t first, int64_t last, const Body& body) {
        int64_t row_tiles = row_tiles_of(last - first);
        for (int64_t n = 0; n < row_tiles; ++n) {
            int64_t row = first + (last - first) * n / row_tiles;
            body(n, row, int(first + (last - first) * (n + 1) / row_tiles - row));
        }
    }

    template <class AtBlock>
    void multiply_rows(int64_t row, int rows, int64_t panel, const Quantized& from, const AtBlock& at_block) const {
        with_rows(rows, [&]<int ROWS>() { kernel().template multiply_row_tile<ROWS>(row, panel, from, at_block); });
    }

    // Tokens [first, last) times one panel. Prefetches panel `next`; a single row tile prefetches its own panel.
    void multiply(int64_t first, int64_t last, int64_t panel, int64_t next, const Quantized& from) const {
        int64_t row_tiles = row_tiles_of(last - first), lines = lines_of_8();
        if (row_tiles == 1) return multiply_rows(first, int(last - first), panel, from, fetch_of(panel));
        int64_t share = (lines + row_tiles - 1) / row_tiles;
        const uint8_t* from_next = packed + next * panel_bytes();
        for_row_tiles(first, last, [&](int64_t n, int64_t row, int rows) {
            Fetch<FETCH_INTO> fetch = {from_next + n * share * (inputs / BLOCK) / 8 * LINE, share};
            if (next >= panels() || n * share >= lines) fetch.lines_of_8 = 0;
            multiply_rows(row, rows, panel, from, fetch);
        });
    }

    void multiply_part(const Quantized& tokens, int64_t begin, int64_t end) const {
        for_token_blocks(num_tokens, ROW_TILE_ROWS, BLOCK_ROW_TILES, [&](int64_t first, int64_t last) {
            for (int64_t panel = begin / VECTORS; panel * VECTORS < end; ++panel)
                kernel().multiply(first, last, panel, (panel + 1) * VECTORS < end ? panel + 1 : panels(), tokens);
        });
    }

    void run(void* workspace) const {
        if (num_tokens == 0) return;
        Quantized all(workspace, num_tokens, inputs);
        parallel_for(num_tokens, (MIN_NUMBERS + inputs - 1) / inputs, [&](int64_t begin, int64_t end) {
            for (int64_t token = begin; token < end; ++token) quantize(*this, token, all);
        });
        if (num_tokens <= SHARED_TOKENS) {
            parallel_for(panels(), (MIN_BYTES + panel_bytes() - 1) / panel_bytes(), [&](int64_t begin, int64_t end) {
                for (int64_t panel = begin; panel < end; ++panel) kernel().multiply(0, num_tokens, panel, panel + 1, all);
            });
            return;
        }
        int64_t row_tiles = row_tiles_of(num_tokens), blocks = (row_tiles + BLOCK_ROW_TILES - 1) / BLOCK_ROW_TILES;
        int64_t ahead = max_threads();  // a thread gets every ahead-th panel, if all threads are equally fast
        parallel_for_dynamic(blocks * panels(), [&](int64_t n) {
            int64_t block = n / panels(), panel = n % panels();
            int64_t first = num_tokens * (row_tiles * block / blocks) / row_tiles;
            int64_t last = num_tokens * (row_tiles * (block + 1) / blocks) / row_tiles;
            kernel().multiply(first, last, panel, (n + ahead) % panels(), all);
        });
    }
};

}  // namespace engine
