// From the rows of a GGUF file to the panels of blocks.h, in one pass: 32 rows at a time, on all threads.
//
// A packed weight is the same to the bit as that of `pack_blocks`, from numbers and scales that Python unpacked
// (stored_rows.py). Formats that are rounded to 8 bits follow `round_to_blocks`.

#include <algorithm>
#include <atomic>
#include <cmath>

#include "blocks.h"
#include "bytes.h"
#include "parallel.h"
#include "simd.h"
#include "stored_formats.h"

namespace engine {
namespace {

constexpr float INT8_STEPS = 127.0f, SMALLEST_SCALE = 0x1p-24f;  // as in block_rounding.py
constexpr int INT8_ZERO = 128;

// Rows of a tensor, and the inputs that are taken from them.
struct StoredRows {
    const uint8_t* raw;
    int64_t row_bytes;
    const int64_t* order;  // [num_rows], row of each output; null: as in the file
    int64_t num_rows;
    const int64_t* blocks;  // [num_blocks], block of a row for each 32 inputs; null: all, in order
    int64_t num_blocks;

    const uint8_t* row(int64_t n) const { return raw + (order == nullptr ? n : order[n]) * row_bytes; }
    int64_t block(int64_t n) const { return blocks == nullptr ? n : blocks[n]; }
};

ALWAYS_INLINE float power_of_2(int exponent) { return std::ldexp(1.0f, exponent); }

// Nearest half, ties to even; finite values below 2^15.
ALWAYS_INLINE u16x16 to_halves(f32x16 v) {
#if defined(__AVX512F__)
    return (u16x16)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
    auto half = [](f32x8 v) __attribute__((always_inline)) {
        return (u16x8)vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)v.low), (float32x4_t)v.high);
    };
    return {half(v.low), half(v.high)};
#else
    u32x16 sign = (u32x16)v >> 16 & 0x8000u, bits = (u32x16)v & 0x7fffffffu;
    u32x16 normal = (bits + 0xfffu + ((bits >> 13) & 1u) - (112u << 23)) >> 13;
    // The distance of floats from 1/2 on is that of small halves, so the addition rounds.
    u32x16 small = (u32x16)((f32x16)bits + 0.5f) - 0x3f000000u;
    u32x16 is_small = (u32x16)((i32x16)bits < 0x38800000);
    return narrowed((is_small & small) | (~is_small & normal) | sign);
#endif
}

// ---------------------------------------------------------------- panels

// The numbers of a block of all rows, `BITS * 4` bytes at each pointer, to a packed block.
template <int BITS>
ALWAYS_INLINE void store_numbers(const Rows& numbers, uint8_t* to) {
    for (int r = 0; r < ROWS; r += 4)
        for (int half = 0; half < BITS / 4; ++half) {
            const uint8_t* const four[4] = {numbers[r] + 16 * half, numbers[r + 1] + 16 * half,
                                            numbers[r + 2] + 16 * half, numbers[r + 3] + 16 * half};
            store_transposed(four, to + half * 4 * BlockCall::PANEL * 4 + r * 4);
        }
}

// A weight that is being packed.
struct Target {
    uint8_t* packed;
    int64_t first;          // output of the first row
    int exponent;           // of the power of two by which scales and minima are multiplied
    int zero;               // of the rows' form, for minima that it does not have
    const uint8_t* table;   // [16], for numbers of 8 bits from codes; or null
    const float* factors;   // for rounded formats: by which values are multiplied; one per `factor_rows` rows
    int64_t factor_rows;
};

// A file's block of all rows, as numbers and scales.
template <class Format>
class FileBlock {
  public:
    Scales scales;

    // factors: see `Target`, of each row.
    ALWAYS_INLINE void read(const Rows& rows, const float (&factors)[ROWS]) {
        if constexpr (Format::ROUNDED) {
            round(rows, factors);
        } else {
            Format::scales(rows, scales);
            for (int r = 0; r < ROWS; ++r) Format::numbers(rows[r], numbers_[r]);
        }
    }

    ALWAYS_INLINE const uint8_t* numbers(int row, int unit) const { return numbers_[row] + unit * Format::BITS * 4; }

  private:
    // As `round_to_blocks`, operation by operation.
    void round(const Rows& rows, const float (&factors)[ROWS]) {
        alignas(64) float values[ROWS][MAX_UNITS * BLOCK], steps[MAX_UNITS][ROWS];
        for (int r = 0; r < ROWS; ++r) {
            Format::values(rows[r], factors[r], values[r]);
            for (int unit = 0; unit < MAX_UNITS; ++unit) {
                LargestMagnitude largest;
                largest.see(load(values[r] + unit * BLOCK));
                largest.see(load(values[r] + unit * BLOCK + LANES));
                steps[unit][r] = largest.get();
            }
        }
        for (int unit = 0; unit < MAX_UNITS; ++unit)
            for (int r = 0; r < ROWS; r += LANES) {
                uint16_t halves[LANES];
                put(halves, to_halves(load(steps[unit] + r) / INT8_STEPS));
                f32x16 step = maximum(load_halves(halves), splat(SMALLEST_SCALE));
                store(steps[unit] + r, step);
                store(scales.scales[unit] + r, step / load(factors + r));
            }
        for (int r = 0; r < ROWS; ++r)
            for (int unit = 0; unit < MAX_UNITS; ++unit) {
                alignas(64) int32_t whole[BLOCK];
                f32x16 step = splat(steps[unit][r]);
                for (int half = 0; half < 2; ++half)
                    put(whole + half * LANES, round_to_int(load(values[r] + unit * BLOCK + half * LANES) / step));
                uint8_t* to = numbers_[r] + unit * BLOCK;
                for (int k = 0; k < BLOCK; ++k)
                    to[k] = uint8_t(std::min(std::max(whole[k], -int(INT8_STEPS)), int(INT8_STEPS)) + INT8_ZERO);
            }
    }

    alignas(64) uint8_t numbers_[ROWS][Format::UNITS * Format::BITS * 4];
};

// Fetches the next rows into the cache while rows are packed: a stride of a row is more than the core foresees.
class NextRows {
  public:
    // [begin, end), and the number of calls in which they are fetched; nothing if only parts of rows are packed.
    NextRows(const StoredRows& from, int64_t begin, int64_t end, int64_t calls)
        : from_(from), row_(begin), end_(from.blocks == nullptr ? std::min(end, from.num_rows) : begin) {
        lines_ = ((end_ - row_) * ((from.row_bytes + LINE - 1) / LINE) + calls - 1) / calls;
        start();
    }

    ALWAYS_INLINE void fetch_some() {
        for (int64_t n = 0; n < lines_ && row_ < end_; ++n) {
            __builtin_prefetch(at_, 0, 2);
            if ((at_ += LINE) < row_end_) continue;
            ++row_;
            start();
        }
    }

  private:
    static constexpr int64_t LINE = BlockCall::LINE;

    void start() {
        if (row_ >= end_) return;
        at_ = from_.row(row_);
        row_end_ = at_ + from_.row_bytes;
    }

    const StoredRows& from_;
    int64_t row_, end_, lines_;
    const uint8_t *at_ = nullptr, *row_end_ = nullptr;
};

// Packs rows [begin, end) of one panel, in which they have the outputs from `column` on; BITS, MINIMA: the form of the
// packed weight. Returns whether blocks 2k and 2k + 1 have the same scale everywhere.
template <class Format, int BITS, bool MINIMA>
bool pack_panel(const StoredRows& from, const Target& target, int64_t begin, int64_t end, int column, uint8_t* panel) {
    constexpr int64_t BYTES = BlockCall::block_bytes(BITS, MINIMA);
    const int width = int(end - begin);
    Rows starts, rows, numbers;
    alignas(64) float factors[ROWS] = {};
    for (int r = 0; r < ROWS; ++r) {
        int64_t row = begin + std::min(std::max(r - column, 0), width - 1);  // other columns repeat a row
        starts[r] = from.row(row);
        if (Format::ROUNDED) factors[r] = target.factors[row / target.factor_rows];
    }
    const f32x16 first = splat(power_of_2(target.exponent / 2));
    const f32x16 second = splat(power_of_2(target.exponent - target.exponent / 2));
    FileBlock<Format> block;
    alignas(64) float before[ROWS];
    uint8_t spread[Format::BITS < BITS ? ROWS : 1][BLOCK];
    uint8_t part[BYTES];
    bool is_paired = from.num_blocks % 2 == 0;
    int64_t known = -1;
    NextRows next(from, end, end + ROWS, from.num_blocks);
    for (int64_t n = 0; n < from.num_blocks; ++n, panel += BYTES) {
        next.fetch_some();
        int64_t at = from.block(n) / Format::UNITS;
        int unit = int(from.block(n) % Format::UNITS);
        if (at != known) {
            for (int r = 0; r < ROWS; ++r) rows[r] = starts[r] + at * Format::BYTES;
            block.read(rows, factors);
            known = at;
        }
        for (int r = 0; r < ROWS; ++r) {
            numbers[r] = block.numbers(r, unit);
            if constexpr (Format::BITS < BITS) {
                spread_nibbles(numbers[r], spread[r]);
                if (target.table != nullptr)
                    for (int k = 0; k < BLOCK; ++k) spread[r][k] = target.table[spread[r][k]];
                numbers[r] = spread[r];
            }
        }
        uint8_t* to = width == ROWS ? panel : part;
        store_numbers<BITS>(numbers, to);
        uint16_t* halves = reinterpret_cast<uint16_t*>(to + BlockCall::PANEL * BLOCK * BITS / 8);
        for (int r = 0; r < ROWS; r += LANES) {
            f32x16 scale = load(block.scales.scales[unit] + r);
            put(halves + r, to_halves(scale * first * second));
            if (MINIMA) {
                f32x16 minimum = Format::MINIMA ? load(block.scales.minima[unit] + r) : scale * float(-target.zero);
                put(halves + BlockCall::PANEL + r, to_halves(minimum * first * second));
            }
        }
        if (width < ROWS) {
            for (int group = 0; group < GROUPS * BITS / 8; ++group)
                std::memcpy(panel + (group * ROWS + column) * 4, part + (group * ROWS + column) * 4, width * 4);
            for (int64_t line = BlockCall::PANEL * BLOCK * BITS / 8; line < BYTES; line += ROWS * 2)
                std::memcpy(panel + line + column * 2, part + line + column * 2, width * 2);
        }
        if (BITS == 8 && !MINIMA && is_paired) {
            const float* scales = block.scales.scales[unit];
            if (n % 2 == 0)
                std::copy(scales, scales + ROWS, before);
            else
                is_paired = std::equal(scales, scales + ROWS, before);
        }
    }
    return is_paired;
}

template <class Format, int BITS, bool MINIMA>
bool pack(const StoredRows& from, const Target& target) {
    constexpr int64_t PANEL = BlockCall::PANEL;
    const int64_t bytes = from.num_blocks * BlockCall::block_bytes(BITS, MINIMA);
    const int64_t begin = target.first, end = begin + from.num_rows;
    std::atomic<bool> is_paired = true;
    parallel_for((end + PANEL - 1) / PANEL - begin / PANEL, 1, [&](int64_t panel, int64_t last) {
        for (panel += begin / PANEL, last += begin / PANEL; panel < last; ++panel) {
            int64_t low = std::max(begin, panel * PANEL), high = std::min(end, (panel + 1) * PANEL);
            if (!pack_panel<Format, BITS, MINIMA>(from, target, low - begin, high - begin, int(low % PANEL),
                                                  target.packed + panel * bytes))
                is_paired = false;
        }
    });
    return is_paired;
}

template <class Format>
bool pack_as(const StoredRows& from, const Target& target, int bits, bool has_minima) {
    if (bits == Format::BITS && has_minima == Format::MINIMA) return pack<Format, Format::BITS, Format::MINIMA>(from, target);
    return pack<Format, 8, true>(from, target);
}

// ---------------------------------------------------------------- the largest scales

float value_of(const std::atomic<uint32_t>& from) {
    uint32_t bits = from.load(std::memory_order_relaxed);
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Raises the magnitude at `to`; NaN is larger than infinity.
void raise(std::atomic<uint32_t>& to, float value) {
    uint32_t bits, found = to.load(std::memory_order_relaxed);
    std::memcpy(&bits, &value, sizeof bits);
    bits &= 0x7fffffff;
    while (found < bits && !to.compare_exchange_weak(found, bits, std::memory_order_relaxed)) {
    }
}

ALWAYS_INLINE float half_magnitude(uint16_t half) {
    uint32_t bits = uint32_t(half & 0x7fff) << 13;
    float scaled;
    std::memcpy(&scaled, &bits, sizeof scaled);
    return scaled * 0x1p112f;  // corrects the exponent bias
}

// The largest scales and minima, or values, of some rows.
template <class Format>
class Largest {
  public:
    // Only what is larger than these is looked for.
    Largest(float scale, float minimum) : scale_(scale), minimum_(minimum) {}

    void see_row(const StoredRows& from, const uint8_t* row) {
        for (int64_t n = 0; n < from.num_blocks;) {
            const int64_t begin = n, at = from.block(n) / Format::UNITS;
            if (from.blocks == nullptr) n += Format::UNITS;
            else
                while (++n < from.num_blocks && from.block(n) / Format::UNITS == at) {
                }
            see(from, row + at * Format::BYTES, begin, n);
        }
    }

    // NaN if a scale or a minimum is not finite.
    float scale() const {
        if (std::max(scale_half_, minimum_half_) >= 0x7c00) return std::numeric_limits<float>::quiet_NaN();
        return ONLY_HALVES ? std::max(scale_, half_magnitude(scale_half_)) : scale_;
    }

    float minimum() const { return ONLY_HALVES ? std::max(minimum_, half_magnitude(minimum_half_)) : minimum_; }

  private:
    static constexpr bool ONLY_HALVES = Format::UNITS == 1 && Format::SCALE_AT >= 0;

    // Inputs [begin, end) * 32 of the row, which are in this block.
    ALWAYS_INLINE void see(const StoredRows& from, const uint8_t* block, int64_t begin, int64_t end) {
        if constexpr (Format::SCALE_AT < 0) {
            scale_ = std::max(scale_, Format::scale(block[0]));
            return;
        }
        const uint16_t half = see_half(block + Format::SCALE_AT, scale_half_);
        const uint16_t other = Format::MINIMUM_AT < 0 ? 0 : see_half(block + Format::MINIMUM_AT, minimum_half_);
        if constexpr (ONLY_HALVES) return;
        const float most = half_magnitude(half) * Format::MOST;
        const float most_of_minima = half_magnitude(other) * Format::MOST_OF_MINIMA;
        if constexpr (Format::ROUNDED) {
            if (most + most_of_minima <= scale_) return;
            alignas(64) float values[Format::UNITS * BLOCK];
            Format::values(block, 1.0f, values);
            LargestMagnitude largest;
            for (int64_t n = begin; n < end; ++n) {
                const float* unit = values + from.block(n) % Format::UNITS * BLOCK;
                largest.see(load(unit));
                largest.see(load(unit + LANES));
            }
            scale_ = std::max(scale_, largest.get());
        } else {
            if (most <= scale_ && most_of_minima <= minimum_) return;
            Rows rows;
            Scales found;
            std::fill(rows, rows + ROWS, block);
            Format::scales(rows, found);
            for (int64_t n = begin; n < end; ++n) {
                int unit = int(from.block(n) % Format::UNITS);
                scale_ = std::max(scale_, std::abs(found.scales[unit][0]));
                if (Format::MINIMA) minimum_ = std::max(minimum_, std::abs(found.minima[unit][0]));
            }
        }
    }

    ALWAYS_INLINE static uint16_t see_half(const uint8_t* at, uint16_t& largest) {
        uint16_t half;
        std::memcpy(&half, at, sizeof half);
        half &= 0x7fff;
        largest = std::max(largest, half);
        return half;
    }

    float scale_, minimum_;
    uint16_t scale_half_ = 0, minimum_half_ = 0;  // the largest of all blocks, without sign
};

template <class Format>
void scan(const StoredRows& from, int64_t rows_per_result, std::atomic<uint32_t>* scales, std::atomic<uint32_t>* minima) {
    parallel_for((from.num_rows + ROWS - 1) / ROWS, 1, [&](int64_t begin, int64_t end) {
        for (int64_t first = begin * ROWS; first < std::min(end * ROWS, from.num_rows); first += ROWS) {
            int64_t last = std::min(first + ROWS, from.num_rows), result = first / rows_per_result;
            Largest<Format> largest(value_of(scales[result]), value_of(minima[result]));
            for (int64_t row = first; row < last; ++row) largest.see_row(from, from.row(row));
            raise(scales[result], largest.scale());
            raise(minima[result], largest.minimum());
        }
    });
}

// Calls work(Format{}) for the type with this number in ggml; false: rows of this type are not read here.
template <class Work>
bool with_format(int type, const Work& work) {
    switch (type) {
        case 2: return work(Q4_0{}), true;
        case 3: return work(Q4_1{}), true;
        case 6: return work(Q5_0{}), true;
        case 7: return work(Q5_1{}), true;
        case 8: return work(Q8_0{}), true;
        case 10: return work(Q2_K{}), true;
        case 11: return work(Q3_K{}), true;
        case 12: return work(Q4_K{}), true;
        case 13: return work(Q5_K{}), true;
        case 14: return work(Q6_K{}), true;
        case 20: return work(IQ4_NL{}), true;
        case 23: return work(IQ4_XS{}), true;
        case 39: return work(MXFP4{}), true;
        default: return false;
    }
}

}  // namespace
}  // namespace engine

// Whether rows of the type with this number in ggml can be packed.
EXPORT int packs_rows(int type) {
    return engine::with_format(type, [](auto) {});
}

// The largest magnitudes of scales and minima, one result for `rows_per_result` rows (a multiple of 32), NaN if one of
// them is not finite. For types that are rounded: of values, and no minima. See `StoredRows`.
//
// scales, minima: zeros, as many as there are results.
EXPORT void scan_rows(const uint8_t* raw, int64_t row_bytes, int type, const int64_t* order, int64_t num_rows,
                      const int64_t* blocks, int64_t num_blocks, int64_t rows_per_result, float* scales, float* minima) {
    using namespace engine;
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(float));
    StoredRows from = {raw, row_bytes, order, num_rows, blocks, num_blocks};
    with_format(type, [&](auto format) {
        scan<decltype(format)>(from, rows_per_result, reinterpret_cast<std::atomic<uint32_t>*>(scales),
                               reinterpret_cast<std::atomic<uint32_t>*>(minima));
    });
}

// Packs rows as the outputs from `first` on of a packed weight (blocks.h) of `bits` and `has_minima`: the form of the
// type, or 8 bits and minima. Returns whether the scales of 8-bit blocks without minima are equal in pairs. The values must
// be finite.
//
// exponent: scales and minima are multiplied by this power of two, and are then below 2^15; zero, table: of the
// type's form; factors: see `round_to_blocks`, one per `factor_rows` rows, for types that are rounded.
EXPORT int pack_rows(const uint8_t* raw, int64_t row_bytes, int type, const int64_t* order, int64_t num_rows,
                     const int64_t* blocks, int64_t num_blocks, uint8_t* packed, int64_t first, int bits, int has_minima,
                     int exponent, int zero, const uint8_t* table, const float* factors, int64_t factor_rows) {
    using namespace engine;
    StoredRows from = {raw, row_bytes, order, num_rows, blocks, num_blocks};
    Target target = {packed, first, exponent, zero, table, factors, factor_rows};
    bool is_paired = false;
    with_format(type, [&](auto format) { is_paired = pack_as<decltype(format)>(from, target, bits, has_minima != 0); });
    return is_paired;
}
