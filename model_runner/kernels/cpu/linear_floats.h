// The matmul of linear.cpp in float, for more tokens than a tile of tile.h has rows, on CPUs without a fast bfloat16
// dot product.
//
// Widening a value costs an instruction, as a multiplication does. Each value is therefore widened once for many
// multiplications: x once per group of panels, one part of k at a time, and a part of a panel by the first row tile,
// which leaves it in L1 for all other row tiles.
//
// Each accumulator is one chain of fused multiply-adds in the order of k, as in tile.h: both give a token the same
// bits. Between two parts accumulators are stored in memory unrounded.

#pragma once

#include <algorithm>

#include "compressed.h"
#include "linear.h"
#include "parallel.h"
#include "matmul_parts.h"
#include "simd.h"
#include "tile.h"

#if defined(__AVX512F__) && !HAS_BF16_DOT && !TILES
#define FLOAT_PRODUCTS 1
#else
#define FLOAT_PRODUCTS 0
#endif

#if FLOAT_PRODUCTS

namespace engine {

// Source of the pairs of VECTORS vectors, k-step by k-step: a packed panel ...
struct PackedPairs {
    const uint32_t* at;
    int64_t width;

    template <int VECTORS>
    inline __attribute__((always_inline)) void next(u32x16 (&to)[VECTORS]) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) to[v] = load_pairs(at + v * LANES);
        at += width;
    }
};

// ... or a compressed panel.
struct CompressedPairs {
    PanelReader from;
    Unpacker unpacker;
    int64_t first;  // first vector in the panel

    template <int VECTORS>
    inline __attribute__((always_inline)) void next(u32x16 (&to)[VECTORS]) {
        unpacker.next(from, first, to);
    }
};

template <bool COMPRESSED>
struct FloatLinear : LinearCall {
    static constexpr int64_t ROWS = 12;     // tokens of a row tile
    static constexpr int64_t VECTORS = 2;   // 24 accumulators, 2 columns, 1 splat, 1 mask: 28 registers; 5 to unpack
    static constexpr int64_t WIDTH = VECTORS * LANES;
    static constexpr int64_t PART = 96;      // k-pairs of a part: 24 KB of widened columns
    static constexpr int64_t FEW_ROW_TILES = 2;  // up to so many row tiles wait for memory, not for FMAs; ...
    static constexpr int64_t FEW_PART = 64;   // ... with this part, what they prefetch is still in L1
    static constexpr int64_t ROW = 2 * PART + LANES;  // floats per token; a power of two causes cache conflicts
    static constexpr int64_t GROUP = 4 * PER_PANEL;   // vectors per widening of x, which takes 14 % of one panel's time
    static constexpr int64_t BLOCK_ROW_TILES = 5;        // row tiles per block of tokens: their part of x stays in L2
    static constexpr int64_t SHARED_TOKENS = BLOCK_ROW_TILES * ROWS;  // more tokens are cut into such blocks
    static constexpr int64_t PIECES = 4;              // per thread, at least, if possible: threads then end together
    static constexpr int64_t STEP_LINES = COMPRESSED ? SHORT_STEP / LINE : PER_PANEL;
    static constexpr int64_t MIN_BYTES = 1 << 16;     // weight per thread, at least: less does not pay for waking it

    // Workspace of one thread.
    struct Workspace {
        float* x;        // [tokens][ROW]: a part of k; first the low values of all pairs, from PART on the high ones
        float* columns;  // [pairs of a part][2][WIDTH]: low and high values
        float* waiting;  // [columns of the group][tokens][WIDTH]: accumulators between two parts
    };

    Workspace workspace(int64_t tokens) const {
        thread_local Scratch scratch;
        int64_t x = tokens * ROW, columns = 2 * PART * WIDTH, waiting = GROUP * LANES * tokens;
        float* memory = reinterpret_cast<float*>(scratch.get((x + columns + waiting) * sizeof(float)));
        return {memory + columns, memory, memory + columns + x};
    }

    // Prefetch of a row tile: two cache lines per pair, or one (twice), or always the same. It has no loop and no
    // branch: with either, the compiler would not keep the accumulators in registers.
    struct Fetch {
        const uint32_t* from;
        int64_t pair, second;

        inline __attribute__((always_inline)) void operator()(int64_t n) const {
            __builtin_prefetch(from + n * pair, 0, 2);
            __builtin_prefetch(from + n * pair + second, 0, 2);
        }
    };

    // One row tile of tokens, and the k-pairs [begin, end).
    struct RowTile {
        int64_t row, begin, end;
        const float* x;
        float* waiting;
    };

    static int64_t row_tiles_of(int64_t tokens) { return (tokens + ROWS - 1) / ROWS; }

    // A vector's pairs from `pair` on.
    auto pairs_at(int64_t vector, int64_t pair) const {
        if constexpr (COMPRESSED) {
            PanelReader from(at(vector * LANES));
            from.advance(pair);
            return CompressedPairs{from, Unpacker(from), vector % PER_PANEL};
        } else {
            int64_t width = panel_width(vector / PER_PANEL);
            return PackedPairs{at(vector * LANES) + pair * width, width};
        }
    }

    // Address of these pairs; in a compressed panel, of the whole k-step.
    const uint32_t* address_of(int64_t vector, int64_t pair) const {
        if constexpr (COMPRESSED)
            return pairs_at(vector, pair).from.at();
        else
            return pairs_at(vector, pair).at;
    }

    void widen_x(int64_t first, int64_t last, int64_t begin, int64_t end, float* to) const {
        for (int64_t token = first; token < last; ++token, to += ROW) {
            const bf16* from = x + token * x_stride;
            int64_t pair = begin;
            for (; pair + LANES <= end; pair += LANES) widen(load_pairs(from + 2 * pair), to + pair - begin);
            if (pair == end) continue;
            u32x16 rest = {};
            std::memcpy(&rest, from + 2 * pair, (end - pair) * sizeof(uint32_t));
            widen(rest, to + pair - begin);
        }
    }

    static void widen(u32x16 pairs, float* to) {
        store(to, low_of(pairs));
        store(to + PART, high_of(pairs));
    }

    static f32x16 low_of(u32x16 pairs) { return (f32x16)(pairs << 16); }
    static f32x16 high_of(u32x16 pairs) { return (f32x16)(pairs & 0xffff0000u); }

    // sum += a * b, in the accumulator's register: GCC tends to compute it in the register of the splat and move it
    // back at the end of each k-step.
    static inline __attribute__((always_inline)) f32x16 add_product(f32x16 sum, f32x16 a, f32x16 b) {
        asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
    }

    template <int ROWS_, int VECTORS_>
    static inline __attribute__((always_inline)) void multiply_add(const f32x16 (&columns)[VECTORS_], const float* x,
                                                                   f32x16 (&sums)[ROWS_][VECTORS_]) {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS_; ++r) {
            f32x16 row = splat(x[r * ROW]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS_; ++v) sums[r][v] = add_product(sums[r][v], columns[v], row);
        }
    }

    // The first row tile widens the columns and stores them at `widened`, `stride` floats per pair (0: not needed).
    template <int ROWS_, int VECTORS_, class Pairs>
    static inline __attribute__((always_inline)) void multiply_first(const RowTile& row_tile, Pairs from,
                                                                     float* widened, int64_t stride, const Fetch& fetch,
                                                                     f32x16 (&sums)[ROWS_][VECTORS_]) {
        const float* x = row_tile.x;
        for (int64_t k = 0; k < row_tile.end - row_tile.begin; ++k, ++x, widened += stride) {
            fetch(k);
            u32x16 pairs[VECTORS_];
            from.next(pairs);
            f32x16 columns[VECTORS_];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS_; ++v) {
                columns[v] = low_of(pairs[v]);
                store(widened + v * LANES, columns[v]);
            }
            multiply_add(columns, x, sums);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS_; ++v) {
                columns[v] = high_of(pairs[v]);
                store(widened + WIDTH + v * LANES, columns[v]);
            }
            multiply_add(columns, x + PART, sums);
        }
    }

    template <int ROWS_, int VECTORS_>
    static inline __attribute__((always_inline)) void multiply_next(const RowTile& row_tile, const float* widened,
                                                                    const Fetch& fetch, f32x16 (&sums)[ROWS_][VECTORS_]) {
        const float* x = row_tile.x;
        for (int64_t k = 0; k < row_tile.end - row_tile.begin; ++k, ++x, widened += 2 * WIDTH) {
            fetch(k);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                f32x16 columns[VECTORS_];
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS_; ++v) columns[v] = load(widened + half * WIDTH + v * LANES);
                multiply_add(columns, x + half * PART, sums);
            }
        }
    }

    template <int ROWS_, int VECTORS_>
    void multiply_row_tile(const RowTile& row_tile, int64_t vector, float* widened, bool is_first, int64_t stride,
                        const Fetch& fetch) const {
        f32x16 sums[ROWS_][VECTORS_];
        if (row_tile.begin == 0)
            zero_tile(sums);
        else
            load_tile(row_tile.waiting, WIDTH, sums);
        if (is_first)
            multiply_first(row_tile, pairs_at(vector, row_tile.begin), widened, stride, fetch, sums);
        else
            multiply_next(row_tile, widened, fetch, sums);
        if (row_tile.end < inputs / 2)
            store_tile(row_tile.waiting, WIDTH, sums);
        else
            finish(row_tile.row, vector * LANES, sums);
    }

    // Calls body<ROWS, VECTORS>() for run-time numbers of rows and vectors.
    template <int MOST, class Body>
    static void with_rows(int64_t rows, int64_t vectors, const Body& body) {
        if constexpr (MOST > 1)
            if (rows < MOST) return with_rows<MOST - 1>(rows, vectors, body);
        vectors == 1 ? body.template operator()<MOST, 1>() : body.template operator()<MOST, VECTORS>();
    }

    // Tokens [first, last) times the vectors [begin, end), at most a group; prefetches the vectors from `next` on, if
    // any.
    void multiply(int64_t first, int64_t last, int64_t begin, int64_t end, int64_t next) const {
        int64_t tokens = last - first, row_tiles = row_tiles_of(tokens), pairs = inputs / 2;
        int64_t most = row_tiles <= FEW_ROW_TILES ? FEW_PART : PART, parts = (pairs + most - 1) / most;
        Workspace memory = workspace(tokens);
        for (int64_t part = 0; part < parts; ++part) {
            int64_t from = pairs * part / parts, to = pairs * (part + 1) / parts;
            widen_x(first, last, from, to, memory.x);
            float* waiting = memory.waiting;
            for (int64_t vector = begin; vector < end;) {
                int64_t stop = std::min(end, (vector / PER_PANEL + 1) * PER_PANEL);  // end of the panel
                const uint32_t* after = stop < end             ? address_of(stop, from)
                                        : part + 1 < parts     ? address_of(begin, to)
                                        : next < num_vectors() ? address_of(next, 0)
                                                               : nullptr;
                int64_t all = row_tiles * ((stop - vector + VECTORS - 1) / VECTORS);
                int64_t lines = all < STEP_LINES ? 2 : 1, n = 0;
                for (; vector < stop; vector += VECTORS, waiting += tokens * WIDTH) {
                    for (int64_t row_tile = 0; row_tile < row_tiles; ++row_tile, ++n) {
                        int64_t row = tokens * row_tile / row_tiles, rows = tokens * (row_tile + 1) / row_tiles - row;
                        Fetch fetch = {after + n * lines * (to - from) * LINE, lines * LINE, (lines - 1) * LINE};
                        if (after == nullptr || n * lines >= STEP_LINES) fetch = {packed, 0, 0};
                        RowTile work = {first + row, from, to, memory.x + row * ROW, waiting + row * WIDTH};
                        with_rows<ROWS>(rows, std::min(stop - vector, VECTORS), [&]<int ROWS_, int VECTORS_>() {
                            multiply_row_tile<ROWS_, VECTORS_>(work, vector, memory.columns, row_tile == 0,
                                                            row_tiles > 1 ? 2 * WIDTH : 0, fetch);
                        });
                    }
                }
                vector = stop;
            }
        }
    }

    // The same for any number of vectors.
    void multiply_all(int64_t first, int64_t last, int64_t begin, int64_t end, int64_t next) const {
        for (int64_t stop; begin < end; begin = stop) {
            stop = std::min(end, (begin / GROUP + 1) * GROUP);
            multiply(first, last, begin, stop, stop < end ? stop : next);
        }
    }

    void multiply_part(int64_t begin, int64_t end) const {
        for_token_blocks(num_tokens, ROWS, BLOCK_ROW_TILES,
                         [&](int64_t first, int64_t last) { multiply_all(first, last, begin, end, num_vectors()); });
    }

    void run() const {
        int64_t vectors = num_vectors(), vector_bytes = inputs * LANES * 2;
        if (num_tokens <= SHARED_TOKENS) {
            parallel_for(vectors, vectors_of(MIN_BYTES, vector_bytes, COMPRESSED ? VECTORS : 1),
                      [&](int64_t begin, int64_t end) { multiply_all(0, num_tokens, begin, end, end); });
            return;
        }
        int64_t row_tiles = row_tiles_of(num_tokens), blocks = (row_tiles + BLOCK_ROW_TILES - 1) / BLOCK_ROW_TILES;
        int64_t ahead = max_threads();  // a thread gets every ahead-th group, if all threads are equally fast
        int64_t panels = std::clamp<int64_t>(blocks * num_panels() / (PIECES * ahead), 1, GROUP / PER_PANEL);
        int64_t group = panels * PER_PANEL, groups = (vectors + group - 1) / group;
        parallel_for_dynamic(blocks * groups, [&](int64_t n) {
            int64_t block = n / groups, begin = n % groups * group;
            int64_t first = num_tokens * (row_tiles * block / blocks) / row_tiles;
            int64_t last = num_tokens * (row_tiles * (block + 1) / blocks) / row_tiles;
            int64_t next = n + ahead < blocks * groups ? (n + ahead) % groups * group : vectors;
            multiply(first, last, begin, std::min(begin + group, vectors), next);
        });
    }
};

}  // namespace engine

#endif  // FLOAT_PRODUCTS
