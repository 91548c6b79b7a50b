// x @ weight.T + bias with a weight of 4- or 8-bit integers, which have a scale, and optionally a minimum, per output
// and block of 32 inputs: weight = integer * scale + minimum.
//
// x is quantized, too, once per call: each block of a token becomes integers in -127..127 with one scale. A block is
// then a dot product of bytes, exact in 32 bits, and
//
//   out += x's scale * (scale * dot + minimum * sum of x's integers)
//
// in float, in the order of the blocks, for any number of tokens: the bits of a token do not depend on its batch. Where
// a single zero point replaces the minima, the dot product is initialized with -zero * sum. Where 4-bit integers are codes
// of a table, each is replaced with its value first: weight = scale * (value - zero).
//
// Scales cost as much as a quarter of the dot products. Where the scales of 8-bit blocks are equal in pairs, a pair is
// one dot product and x gets one scale for it: 9 % less time (64 and 512 tokens, Zen 4; with one token up to 10 %
// more).
//
// On an ISA target with tiles, calls of `tiles_from` and more tokens dequantize the weight to bfloat16 instead, and x
// is not quantized (block_tiles.h). The bits of a token then depend on whether its call has that many, and on nothing
// else.

#include <algorithm>

#include "block_panels.h"
#include "block_table.h"
#include "block_tiles.h"
#include "block_tokens.h"
#include "blocks.h"
#include "bytes.h"
#include "fetch.h"
#include "parallel.h"
#include "matmul_parts.h"
#include "program.h"
#include "simd.h"
#include "tile.h"

namespace engine {
namespace {

// What the bytes of a weight are.
enum Code {
    BYTES,
    NIBBLES,
    TABLE,        // codes of a table
    SMALL_TABLE,  // the same, with values up to MAX_SMALL_VALUE
};

constexpr int bits_of(Code code) { return code == BYTES ? 8 : 4; }

struct Blocks : BlockPanels<Blocks> {
    // SHARED: `blocks_per_scale` blocks have one scale.
    template <Code CODE, bool MINIMA, int SPAN, int ROWS, bool SHARED = false, class AtBlock>
    void multiply_row_tile(int64_t row, int64_t panel, const Quantized& from, const AtBlock& at_block) const {
        constexpr int BITS = bits_of(CODE);
        constexpr int64_t NUMBERS = number_bytes(BITS), SIZE = SHARED ? NUMBERS : block_bytes(BITS, MINIMA);
        const int64_t per_scale = SHARED ? blocks_per_scale() : 1;
        int64_t left = per_scale;  // blocks before the next scales
        const Values<CODE> values(*this);
        const int64_t blocks = inputs / BLOCK, stride = inputs;
        const int8_t* numbers = from.numbers + row * inputs;
        const BlockScale* scales = from.scales + row * blocks;
        const uint8_t* weights = packed + panel * panel_bytes();
        f32x16 sums[ROWS][VECTORS];
        zero_tile(sums);
        for (int64_t block = 0; block < blocks;
             block += SPAN, weights += SPAN * SIZE, numbers += SPAN * BLOCK, scales += SPAN) {
            if (SHARED && left == 0) left = per_scale, weights += scale_bytes(MINIMA);
            const uint16_t* halves = reinterpret_cast<const uint16_t*>(weights + (SHARED ? left-- : 1) * NUMBERS);
            for (int n = 0; n < SPAN; ++n) at_block(block + n);
#pragma GCC unroll 2
            for (int first = 0; first < VECTORS; first += AT_ONCE) {
                // The compiler does not know the address: it would keep splats for the next vector, on the stack.
                const int8_t* numbers_of = numbers;
                asm volatile("" : "+r"(numbers_of));
                i32x16 dots[ROWS][AT_ONCE];
                begin_dots<CODE, MINIMA>(scales, blocks, dots);
#pragma GCC unroll 1
                for (int n = 0; n < SPAN; ++n)
                    multiply_block(values, weights + n * SIZE + first * LINE, numbers_of + n * BLOCK, stride, dots);
#pragma GCC unroll 2
                for (int v = 0; v < AT_ONCE; ++v) {
                    f32x16 scale = load_halves(halves + (first + v) * LANES);
                    f32x16 minimum = MINIMA ? load_halves(halves + PANEL + (first + v) * LANES) : f32x16{};
#pragma GCC unroll 6
                    for (int r = 0; r < ROWS; ++r) {
                        if (MINIMA) sums[r][first + v] += minimum * splat(sum_of<CODE>(scales[r * blocks]));
                        i32x16 dot = IN_WORDS<CODE> && CODE == NIBBLES ? sum_words(dots[r][v]) : dots[r][v];
                        sums[r][first + v] += to_float(dot) * scale * splat(scales[r * blocks].scale);
                    }
                }
            }
        }
        finish(row, panel * PANEL, sums);
    }

    // A block's products are added up in 16 bits; those of a small table half a block at a time.
    template <Code CODE>
    static constexpr bool IN_WORDS = HAS_WORD_SUMS && (CODE == NIBBLES || CODE == SMALL_TABLE);
    // Bytes minus SIGNED_ZERO, or a table's values minus the zero point.
    template <Code CODE>
    static constexpr bool IS_SIGNED = HAS_SIGNED_DOT && (CODE == TABLE || CODE == BYTES);

    // The sum of a token's integers, times its scale.
    template <Code CODE>
    static ALWAYS_INLINE float sum_of(const BlockScale& token) {
        return IS_SIGNED<CODE> ? token.scale * float(token.total) : token.sum;
    }

    // The value of each number of a vector.
    template <Code CODE>
    struct Values {
        explicit Values(const BlockCall&) {}
        ALWAYS_INLINE u32x16 operator()(u32x16 numbers) const {
            return IS_SIGNED<CODE> ? numbers ^ 0x01010101u * SIGNED_ZERO : numbers;
        }
    };

    template <Code CODE>
        requires(CODE == TABLE || CODE == SMALL_TABLE)
    struct Values<CODE> : Lookup {
        explicit Values(const BlockCall& call) : Lookup(call.table, IS_SIGNED<CODE> ? call.zero : 0) {}
    };

    template <Code CODE, bool MINIMA, int ROWS>
    static inline __attribute__((always_inline)) void begin_dots(const BlockScale* scales, int64_t blocks,
                                                                 i32x16 (&dots)[ROWS][AT_ONCE]) {
        constexpr bool TOTAL = MINIMA && IS_SIGNED<CODE>;  // of what is subtracted from the bytes
        constexpr bool FROM_ZERO = (MINIMA && !TOTAL) || (CODE == TABLE && IS_SIGNED<CODE>);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < AT_ONCE; ++v) {
                const BlockScale& token = scales[r * blocks];
                int32_t start = TOTAL ? SIGNED_ZERO * token.total : token.start;
                dots[r][v] = FROM_ZERO ? i32x16{} : (i32x16)splat_bits(uint32_t(start));
            }
    }

    // One block of AT_ONCE vectors.
    template <Code CODE, int ROWS>
    static inline __attribute__((always_inline)) void multiply_block(const Values<CODE>& values, const uint8_t* weights,
                                                                     const int8_t* numbers, int64_t stride,
                                                                     i32x16 (&dots)[ROWS][AT_ONCE]) {
        if constexpr (CODE == BYTES) {
#pragma GCC unroll 8
            for (int group = 0; group < GROUPS; ++group) {
                u32x16 w[AT_ONCE];
#pragma GCC unroll 2
                for (int v = 0; v < AT_ONCE; ++v) w[v] = values(load_pairs(weights + (group * VECTORS + v) * LINE));
                add_group<CODE>(numbers + group * 4, stride, w, dots);
            }
        } else if constexpr (IN_WORDS<CODE> && CODE == SMALL_TABLE) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                i32x16 words[ROWS][AT_ONCE] = {};
                add_nibbles(values, weights, numbers, stride, half * GROUPS / 4, (half + 1) * GROUPS / 4, words);
#pragma GCC unroll 6
                for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
                    for (int v = 0; v < AT_ONCE; ++v) dots[r][v] += sum_words(words[r][v]);
            }
        } else {
            add_nibbles(values, weights, numbers, stride, 0, GROUPS / 2, dots);
        }
    }

    // The groups [begin, end), and those in the upper halves of their bytes.
    template <Code CODE, int ROWS>
    static inline __attribute__((always_inline)) void add_nibbles(const Values<CODE>& values, const uint8_t* weights,
                                                                  const int8_t* numbers, int64_t stride, int begin,
                                                                  int end, i32x16 (&dots)[ROWS][AT_ONCE]) {
#pragma GCC unroll 4
        for (int group = begin; group < end; ++group) {
            u32x16 low[AT_ONCE], high[AT_ONCE];
#pragma GCC unroll 2
            for (int v = 0; v < AT_ONCE; ++v) {
                u32x16 both = load_pairs(weights + (group * VECTORS + v) * LINE);
                low[v] = values(both & 0x0f0f0f0fu);
                high[v] = values((both >> 4) & 0x0f0f0f0fu);
            }
            add_group<CODE>(numbers + group * 4, stride, low, dots);
            add_group<CODE>(numbers + (group + GROUPS / 2) * 4, stride, high, dots);
        }
    }

    template <Code CODE, int ROWS>
    static inline __attribute__((always_inline)) void add_group(const int8_t* numbers, int64_t stride,
                                                                const u32x16 (&w)[AT_ONCE],
                                                                i32x16 (&dots)[ROWS][AT_ONCE]) {
#if HAS_SIGNED_DOT
        u32x16 magnitudes[AT_ONCE];
        for (int v = 0; v < AT_ONCE; ++v)
            if (IS_SIGNED<CODE>) magnitudes[v] = magnitudes_of_bytes(w[v]);
#endif
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
            u32x16 four = splat_bits(load_pair(numbers + r * stride));
#pragma GCC unroll 2
            for (int v = 0; v < AT_ONCE; ++v) {
#if HAS_SIGNED_DOT
                if constexpr (IS_SIGNED<CODE>) {
                    dots[r][v] = dot_signed_bytes(dots[r][v], w[v], magnitudes[v], four);
                    continue;
                }
#endif
                dots[r][v] = IN_WORDS<CODE> ? dot_nibbles(dots[r][v], w[v], four) : dot_bytes(dots[r][v], w[v], four);
            }
        }
    }

    // multiply_row_tile for codes of a table with two scales for each block. Each half of a block is multiplied on its own: for
    // all rows of a tile there are no registers for the sums of both.
    template <Code CODE, int ROWS, class AtBlock>
    void multiply_row_tile_by_halves(int64_t row, int64_t panel, const Quantized& from, const AtBlock& at_block) const {
        const Values<CODE> values(*this);
        const int64_t blocks = inputs / BLOCK, stride = inputs;
        const int8_t* numbers = from.numbers + row * inputs;
        const BlockScale* scales = from.scales + row * blocks;
        const uint8_t* weights = packed + panel * panel_bytes();
        f32x16 sums[ROWS][VECTORS];
        zero_tile(sums);
        for (int64_t block = 0; block < blocks; ++block, weights += block_bytes(4, false), numbers += BLOCK, ++scales) {
            const uint16_t* bytes = reinterpret_cast<const uint16_t*>(weights + PANEL * BLOCK / 2);
            at_block(block);
#pragma GCC unroll 2
            for (int first = 0; first < VECTORS; first += AT_ONCE) {
                const int8_t* numbers_of = numbers;  // see multiply_row_tile
                asm volatile("" : "+r"(numbers_of));
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) {
                    i32x16 dots[ROWS][AT_ONCE];
#pragma GCC unroll 6
                    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
                        for (int v = 0; v < AT_ONCE; ++v)
                            dots[r][v] = IS_SIGNED<CODE> ? i32x16{} : (i32x16)splat_bits(uint32_t(scales[r * blocks].starts[half]));
                    multiply_half(values, weights + first * LINE, numbers_of + half * BLOCK / 2, stride, half, dots);
#pragma GCC unroll 2
                    for (int v = 0; v < AT_ONCE; ++v) {
                        f32x16 scale = load_e4m3(bytes + (first + v) * LANES, half == 1);
#pragma GCC unroll 6
                        for (int r = 0; r < ROWS; ++r)
                            sums[r][first + v] += to_float(dots[r][v]) * scale * splat(scales[r * blocks].scale);
                    }
                }
            }
        }
        finish(row, panel * PANEL, sums);
    }

    // One half of a block of AT_ONCE vectors: the codes in the low or the high halves of the bytes.
    template <Code CODE, int ROWS>
    static inline __attribute__((always_inline)) void multiply_half(const Values<CODE>& values, const uint8_t* weights,
                                                                    const int8_t* numbers, int64_t stride, int half,
                                                                    i32x16 (&dots)[ROWS][AT_ONCE]) {
        i32x16 words[ROWS][AT_ONCE] = {};
#pragma GCC unroll 4
        for (int group = 0; group < GROUPS / 2; ++group) {
            u32x16 w[AT_ONCE];
#pragma GCC unroll 2
            for (int v = 0; v < AT_ONCE; ++v)
                w[v] = values((load_pairs(weights + (group * VECTORS + v) * LINE) >> (4 * half)) & 0x0f0f0f0fu);
            add_group<CODE>(numbers + group * 4, stride, w, IN_WORDS<CODE> ? words : dots);
        }
        if (IN_WORDS<CODE>)
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
                for (int v = 0; v < AT_ONCE; ++v) dots[r][v] += sum_words(words[r][v]);
    }

    template <int ROWS, class AtBlock>
    void multiply_row_tile(int64_t row, int64_t panel, const Quantized& from, const AtBlock& at_block) const {
        if (has_half_scales())
            HAS_WORD_SUMS && has_small_values(table) ? multiply_row_tile_by_halves<SMALL_TABLE, ROWS>(row, panel, from, at_block)
                                                     : multiply_row_tile_by_halves<TABLE, ROWS>(row, panel, from, at_block);
        else if (has_shared_scales())
            table != nullptr ? multiply_row_tile<TABLE, false, 1, ROWS, true>(row, panel, from, at_block)
            : has_minima     ? multiply_row_tile<NIBBLES, true, 1, ROWS, true>(row, panel, from, at_block)
                             : multiply_row_tile<NIBBLES, false, 1, ROWS, true>(row, panel, from, at_block);
        else if (table != nullptr)
            HAS_WORD_SUMS && has_small_values(table) ? multiply_row_tile<SMALL_TABLE, false, 1, ROWS>(row, panel, from, at_block)
                                                     : multiply_row_tile<TABLE, false, 1, ROWS>(row, panel, from, at_block);
        else if (bits == 4)
            has_minima ? multiply_row_tile<NIBBLES, true, 1, ROWS>(row, panel, from, at_block)
                       : multiply_row_tile<NIBBLES, false, 1, ROWS>(row, panel, from, at_block);
        else if (has_paired_scales())
            multiply_row_tile<BYTES, false, 2, ROWS>(row, panel, from, at_block);
        else
            has_minima ? multiply_row_tile<BYTES, true, 1, ROWS>(row, panel, from, at_block)
                       : multiply_row_tile<BYTES, false, 1, ROWS>(row, panel, from, at_block);
    }
};

}  // namespace
}  // namespace engine

void engine::multiply_blocks_part(const BlockCall& call, const Quantized& tokens, int64_t begin, int64_t end,
                                  int64_t tiles_from) {
#if TILES
    if (part_takes_tiles(call.num_tokens, tiles_from)) return BlockTiles{call}.multiply_part(begin, end);
#endif
    if (call.is_super) return multiply_superblocks_part(call, tokens, begin, end);
    Blocks{{call}}.multiply_part(tokens, begin, end);
}

// Whether the ISA target has byte dot products; without them the matmul is exact, but slow.
EXPORT int blocks_are_fast() { return HAS_BYTE_DOT || HAS_WORD_SUMS; }

// Bytes of the packed form of [outputs, inputs]; inputs is a multiple of 32, and of scale_inputs if that is larger; bits 4
// or 8.
EXPORT int64_t packed_blocks_bytes(int64_t outputs, int64_t inputs, int bits, int has_minima, int scale_inputs) {
    using namespace engine;
    BlockCall call = {{nullptr, nullptr, Form(0), outputs}};
    call.inputs = inputs, call.bits = bits, call.has_minima = has_minima != 0, call.scale_inputs = scale_inputs;
    return call.panels() * call.panel_bytes();
}

// Bytes of the workspace of `blocks`, for quantized tokens; 0 if the call uses tiles.
EXPORT int64_t blocks_workspace_bytes(int64_t num_tokens, int64_t inputs, int64_t tiles_from) {
    using namespace engine;
    if (TILES && num_tokens >= tiles_from) return 0;
    return Quantized::bytes(num_tokens, inputs);
}

// numbers: [outputs][inputs] uint8, below 16 for 4 bits; scales, minima (or null): [outputs][inputs / 32] float16, or with 4
// bits [outputs][inputs / scale_inputs] if that is larger; packed: packed_blocks_bytes bytes.
EXPORT void pack_blocks(const uint8_t* numbers, const uint16_t* scales, const uint16_t* minima, int64_t outputs,
                        int64_t inputs, int bits, int scale_inputs, uint8_t* packed) {
    using namespace engine;
    const int64_t per_scale = Blocks::blocks_per_scale(bits, scale_inputs), blocks = inputs / BLOCK, groups = blocks / per_scale;
    const int64_t bytes = groups * Blocks::group_bytes(bits, minima != nullptr, scale_inputs);
    parallel_for((outputs + Blocks::PANEL - 1) / Blocks::PANEL, 1, [&](int64_t begin, int64_t end) {
        if (end * Blocks::PANEL > outputs) std::memset(packed + (end - 1) * bytes, 0, bytes);
        for (int64_t output = begin * Blocks::PANEL; output < std::min(end * Blocks::PANEL, outputs); ++output) {
            uint8_t* to = packed + output / Blocks::PANEL * bytes;
            int64_t column = output % Blocks::PANEL;
            for (int64_t block = 0; block < blocks; ++block, to += Blocks::number_bytes(bits)) {
                const uint8_t* from = numbers + output * inputs + block * BLOCK;
                for (int64_t group = 0; group < GROUPS * bits / 8; ++group) {
                    uint32_t four = load_pair(from + group * 4);
                    if (bits == 4) four |= load_pair(from + (group + GROUPS / 2) * 4) << 4;
                    std::memcpy(to + (group * Blocks::PANEL + column) * 4, &four, sizeof four);
                }
                if ((block + 1) % per_scale) continue;
                uint8_t* halves = to + Blocks::number_bytes(bits);
                std::memcpy(halves + 2 * column, scales + output * groups + block / per_scale, 2);
                if (minima != nullptr)
                    std::memcpy(halves + 2 * (Blocks::PANEL + column), minima + output * groups + block / per_scale, 2);
                to += Blocks::scale_bytes(minima != nullptr);
            }
        }
    });
}

// Rearranges a packed weight for a gated matmul (output.h), in place.
EXPORT void pair_blocks(uint8_t* packed, int64_t outputs, int64_t inputs, int bits, int has_minima, int scale_inputs,
                        int is_super) {
    using namespace engine;
    BlockCall call = {{nullptr, nullptr, GATED, outputs}};
    call.inputs = inputs, call.bits = bits, call.has_minima = has_minima != 0, call.is_super = is_super != 0;
    call.scale_inputs = scale_inputs;
    // Blocks with scales of their own, or all that share some.
    const int64_t blocks = inputs / (is_super ? SUPERBLOCK : BLOCK * call.blocks_per_scale());
    const int64_t bytes = call.panel_bytes() / blocks;
    const int64_t panels = call.panels(), halves = has_minima ? 2 : 1;  // half precision numbers, [vector of the panel]
    const int64_t lines = (bytes / BlockCall::LINE - halves) / BlockCall::VECTORS;  // the others: [line][vector]
    const int64_t before_halves = is_super ? (has_minima ? 3 : 4) : lines;          // see SuperLayout
    parallel_for(blocks, 1, [&](int64_t begin, int64_t end) {
        thread_local Scratch scratch;
        uint8_t* before = reinterpret_cast<uint8_t*>(scratch.get(panels * bytes));
        for (int64_t block = begin; block < end; ++block) {
            uint8_t* first = packed + block * bytes;
            for (int64_t panel = 0; panel < panels; ++panel)
                std::memcpy(before + panel * bytes, first + panel * blocks * bytes, bytes);
            for (int64_t v = 0; v < 2 * panels; ++v) {
                int64_t old = call.first_of(v) / LANES;
                const uint8_t* from = before + old / 2 * bytes;
                uint8_t* to = first + v / 2 * blocks * bytes;
                auto copy = [&](int64_t at, int64_t size) {
                    std::memcpy(to + at + v % 2 * size, from + at + old % 2 * size, size);
                };
                for (int64_t line = 0; line < lines; ++line)
                    copy((line * 2 + (line < before_halves ? 0 : halves)) * BlockCall::LINE, BlockCall::LINE);
                for (int64_t n = 0; n < halves; ++n) copy((before_halves * 2 + n) * BlockCall::LINE, BlockCall::LINE / 2);
            }
        }
    });
}

// x: [num_tokens][inputs] bfloat16, rows `x_stride` elements apart; bias: [outputs] bfloat16 or null; out: rows
// `out_stride` elements apart, contiguous if gated, see output.h for `form`; workspace: blocks_workspace_bytes for the same `tiles_from`, which is at least 1;
// scale_inputs: 32; 64 with 4 bits, or with 8 bits and without minima; 128 only with 4 bits; 16 only with a table, and `factor` includes E4M3_FACTOR;
// table: [16] bytes that differ from `zero` by at most 127, or null;
// only with 4 bits and without minima; is_super: in superblocks of 4, 5 or 6 bits (super_blocks.h), whose factor is 1 and
// which have minima if they do not have 6 bits.
EXPORT void blocks(const void* x, int64_t x_stride, const uint8_t* packed, const void* bias, void* out,
                   void* workspace, int64_t num_tokens, int64_t inputs, int64_t outputs, int bits, int has_minima,
                   int zero, float factor, int form, int scale_inputs, int64_t tiles_from,
                   const uint8_t* table, int is_super, int64_t out_stride) {
    using namespace engine;
    BlockCall call = {{static_cast<const bf16*>(bias), out, Form(form), outputs, out_stride},
                      static_cast<const bf16*>(x),
                      x_stride,
                      packed,
                      num_tokens,
                      inputs,
                      bits,
                      zero,
                      has_minima != 0,
                      scale_inputs,
                      factor,
                      table,
                      is_super != 0};
#if TILES
    if (num_tokens >= tiles_from) return BlockTiles{call}.run();
#endif
    if (call.is_super) return multiply_superblocks(call, workspace);
    Blocks{{call}}.run(workspace);
}

// out[n] = weight[ids[n]], rounded to bfloat16; ids: [num_rows] in [0, outputs); out: [num_rows][inputs] bfloat16.
EXPORT void blocks_rows(const uint8_t* packed, const int64_t* ids, void* out_, int64_t num_rows, int64_t inputs, int bits,
                        int has_minima, int zero, float factor, const uint8_t* table, int scale_inputs) {
    using namespace engine;
    bf16* out = static_cast<bf16*>(out_);
    const int64_t per_scale = Blocks::blocks_per_scale(bits, scale_inputs), blocks = inputs / BLOCK;
    const int64_t group_bytes = Blocks::group_bytes(bits, has_minima != 0, scale_inputs);
    parallel_for(num_rows, Blocks::MIN_NUMBERS / inputs + 1, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) {
            const uint8_t* panel = packed + ids[n] / Blocks::PANEL * (blocks / per_scale) * group_bytes;
            int64_t column = ids[n] % Blocks::PANEL;
            for (int64_t block = 0; block < blocks; ++block) {
                const uint8_t* group_of = panel + block / per_scale * group_bytes;
                const uint8_t* from = group_of + block % per_scale * Blocks::number_bytes(bits);
                const uint8_t* halves = group_of + per_scale * Blocks::number_bytes(bits);
                float scale = half_to_float(halves + 2 * column) * factor, minimum = -float(zero) * scale, upper = scale;
                if (scale_inputs < BLOCK) {
                    uint16_t both[LANES] = {};
                    std::memcpy(both, halves + 2 * column, sizeof *both);
                    scale = load_e4m3(both, false)[0] * factor, upper = load_e4m3(both, true)[0] * factor;
                }
                if (has_minima) minimum = half_to_float(halves + 2 * (Blocks::PANEL + column)) * factor;
                for (int64_t k = 0; k < BLOCK; ++k) {
                    int64_t group = k / 4 % (GROUPS * bits / 8);
                    uint8_t number = from[group * Blocks::PANEL * 4 + column * 4 + k % 4];
                    if (bits == 4) number = k / 4 == group ? number & 15 : number >> 4;
                    if (table != nullptr) number = table[number];
                    float value = float(number) * scale + minimum;
                    if (scale_inputs < BLOCK) value = float(int(number) - zero) * (k < scale_inputs ? scale : upper);
                    from_float(value, out + n * inputs + block * BLOCK + k);
                }
            }
        }
    });
}

RECORDABLE(blocks)
RECORDABLE(blocks_rows)
