// A weight of linear.h in 12 bits per value instead of 16, lossless. bfloat16 has 256 exponents; nearly all values of
// 64 neighboring outputs use only 16 of them (their entropy is some 2.6 bits; T. Zhang et al.: "70% Size, 100%
// Accuracy", arXiv:2504.11651), so four bits encode the exponent. A k-step with any other exponent is stored
// uncompressed.
//
//   [panels] int64      start of each panel, in words (uint32); padded to 64 bytes
//   each panel:
//     [32] uint16       its 16 exponents, shifted into place; twice: the lookup instruction reads five index bits
//     uint32            start of its first k-step, in words
//     [...] uint32      uncompressed k-steps, in ascending order; then the number of k-steps; padded to 64 bytes
//     each k-step:
//       [two vectors of the panel][32] uint16    signs and mantissas: those of the first vector at their place in a
//                                                bfloat16, those of the second one there after swapping bytes
//       [32] uint16                              four bits per vector, those of the first one lowest
//     or, uncompressed:
//       [vector of the panel][32] uint16
//
// All panels have 64 outputs; the last one is padded with zeros. Calls that wait for memory read three quarters of the
// bytes. With few tokens the weight is unpacked in registers; with many, the first row tile stores it in a cache for
// the others.

#pragma once

#include <algorithm>

#include "linear.h"
#include "simd.h"
#include "tile.h"

// Requires the 16-bit instructions of AVX-512BW for unpacking; AMX tiles would need another layout.
#if defined(__AVX512BW__) && !TILES
#define COMPRESSES 1
#else
#define COMPRESSES 0
#endif

namespace engine {

constexpr int64_t EXPONENTS = 16;                           // per panel
constexpr int64_t EXPONENT_WORDS = EXPONENTS;               // each twice, two per word
constexpr int64_t REST_WORDS = PANEL / 2;                   // signs and mantissas of a k-step
constexpr int64_t SHORT_STEP = REST_WORDS + PANEL / 4;      // a whole compressed k-step
constexpr int64_t WHOLE_STEP = PANEL;
constexpr uint32_t REST = 0x807f807f;                       // signs and mantissas of a pair

inline int64_t head_words(int64_t whole_steps) {
    return (EXPONENT_WORDS + 2 + whole_steps + LINE - 1) / LINE * LINE;
}

// Position of a reader that goes through the k-steps of a panel in order.
class PanelReader {
  public:
    explicit PanelReader(const uint32_t* panel)
        : panel_(panel), at_(panel + panel[EXPONENT_WORDS]), whole_(panel + EXPONENT_WORDS + 1) {}

    const uint16_t* exponents() const { return reinterpret_cast<const uint16_t*>(panel_); }
    const uint32_t* at() const { return at_; }

    // Moves past this k-step; returns whether it was uncompressed.
    ALWAYS_INLINE bool advance() {
        bool is_whole = step_++ == *whole_;
        at_ += is_whole ? WHOLE_STEP : SHORT_STEP;
        whole_ += is_whole;
        return is_whole;
    }

    // Moves past `steps` k-steps.
    void advance(int64_t steps) {
        const uint32_t* before = whole_;
        for (step_ += steps; *whole_ < step_;) ++whole_;
        at_ += steps * SHORT_STEP + (whole_ - before) * (WHOLE_STEP - SHORT_STEP);
    }

  private:
    const uint32_t* panel_;
    const uint32_t* at_;
    const uint32_t* whole_;
    int64_t step_ = 0;
};

#if COMPRESSES

// Unpacks k-steps of a panel; holds its exponents and constants in registers.
struct Unpacker {
    __m512i exponents, kept, swapped;

    explicit Unpacker(const PanelReader& panel)
        : exponents(_mm512_loadu_si512(panel.exponents())),
          kept(_mm512_set1_epi32(int(REST))),
          swapped(_mm512_set4_epi32(0x0e0f0c0d, 0x0a0b0809, 0x06070405, 0x02030001)) {}

    // Unpacks VECTORS vectors of the reader's k-step from `first` (even) on, and moves the reader past it.
    //
    // (Rotating by 8 bits instead of swapping bytes has the same size, but makes matmuls of 6 rows 7 % slower on Zen 4:
    // it competes for the ports of the multipliers.)
    template <int VECTORS>
    inline __attribute__((always_inline)) void next(PanelReader& from, int64_t first, u32x16 (&to)[VECTORS]) const {
        const uint32_t* at = from.at();
        if (from.advance()) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) to[v] = load_pairs(at + (first + v) * LANES);
            return;
        }
        __m512i codes = _mm512_loadu_si512(at + REST_WORDS);
        if (first > 0) codes = _mm512_srl_epi16(codes, _mm_cvtsi64_si128(4 * first));
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            __m512i exponent = _mm512_permutexvar_epi16(v == 0 ? codes : _mm512_srli_epi16(codes, 4 * v), exponents);
            __m512i rest = _mm512_loadu_si512(at + (first + v) / 2 * LANES);
            if (v % 2 == 1) rest = _mm512_shuffle_epi8(rest, swapped);
            constexpr int OR_AND = 0xf8;  // a | (b & c)
            to[v] = (u32x16)_mm512_ternarylogic_epi32(exponent, rest, kept, OR_AND);
        }
    }
};

// As multiply_tile, with the vectors from `first` on: sums[r][v] += rows[r] . columns[v]. Stores the unpacked vectors
// at `unpacked` unless that is null.
template <int ROWS, int VECTORS, class AtStep>
inline __attribute__((always_inline)) void multiply_compressed(const bf16* rows, int64_t row_stride, PanelReader from,
                                                               int64_t first, int64_t steps, f32x16 (&sums)[ROWS][VECTORS],
                                                               uint32_t* unpacked, const AtStep& at_step) {
    const Unpacker unpacker(from);
    for (int64_t k = 0; k < steps; ++k) {
        at_step(k);
        u32x16 columns[VECTORS];
        unpacker.next(from, first, columns);
        if (unpacked != nullptr)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) put(unpacked + k * PANEL + v * LANES, columns[v]);
        add_products<Pairs>(columns, rows + k * Pairs::NUMBERS, row_stride, 0, sums);
    }
}

#endif  // COMPRESSES

}  // namespace engine
