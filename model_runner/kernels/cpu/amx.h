// Intel's AMX: eight registers of 16 rows of 64 bytes ("tiles") and their product; or the same in plain C++.
//
// HAS_AMX is set for a level that has the instructions (isa.py); EMULATE_AMX asks for the plain form at any level, so
// that what is built on tiles is tested on every CPU. TILES says whether there is either.
//
//   amx::Shapes shapes;             rows and bytes of each tile that is used
//   shapes.set(0, 16, 64);
//   {
//       amx::Tiles tiles(shapes);   this thread's tiles, all zero
//       amx::load<1>(from, stride); ... amx::dot_pairs<0, 1, 2>(); ... amx::store<0>(to, stride);
//   }                               and nobody's again
//
// Tiles belong to a thread, and other code in it (oneDNN) sets up its own. So every piece of work makes its own `Tiles`,
// which takes some 50 ns, instead of relying on what an earlier piece has left, and no call leaves any behind: a thread
// with tiles has 8 KB more to save whenever it loses its core.
//
// The product dst += a . b of bfloat16: a is [rows][pairs of k], b is [pairs of k][columns][2], and for each number
//
//   even += a[k][0] * b[k][0] and odd += a[k][1] * b[k][1], pair by pair from 0, each one rounding (a fused addition);
//   dst += even + odd
//
// Denormal numbers count as zero, as inputs and as results. A row's bits depend on that row of `a` and `dst` only; pairs
// of zeros change nothing behind the last one (but make +0 of -0). The plain form keeps to all of that but the zeros for
// denormals.
//
// Instructions are written as assembly: compilers know their intrinsics since later than the rest that a level needs,
// and GCC 12 moves stores behind the tile loads that should see them (it is not told that they read memory).

#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

#if defined(HAS_AMX) || defined(EMULATE_AMX)
#define TILES 1
#else
#define TILES 0
#endif

#if TILES

namespace engine::amx {

constexpr int MAX_ROWS = 16;
constexpr int ROW_BYTES = 64;
constexpr int NUM_TILES = 8;

// The operand of the instruction that sets tiles up.
struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int row_bytes) {
        rows[tile] = uint8_t(num_rows);
        bytes[tile] = uint16_t(row_bytes);
    }
};
static_assert(sizeof(Shapes) == 64);

#if defined(HAS_AMX) && !defined(EMULATE_AMX)

class Tiles {
  public:
    explicit Tiles(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
    ~Tiles() { asm volatile("tilerelease" ::: "memory"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// Rows of the tile, `stride` bytes apart.
template <int TILE>
inline __attribute__((always_inline)) void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
inline __attribute__((always_inline)) void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
inline __attribute__((always_inline)) void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

template <int DST, int A, int B>
inline __attribute__((always_inline)) void dot_pairs() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(DST), "i"(A), "i"(B));
}

#else

// What the instructions refuse ends the process here, too: a tile that is not set up, or shapes that do not fit.
struct Emulated {
    const Shapes* shapes = nullptr;
    alignas(64) char data[NUM_TILES][MAX_ROWS][ROW_BYTES];

    int rows(int tile) const { return checked(shapes != nullptr ? shapes->rows[tile] : 0); }
    int bytes(int tile) const { return checked(shapes != nullptr ? shapes->bytes[tile] : 0); }

    static int checked(int size) {
        check(size > 0);
        return size;
    }

    static void check(bool fits) {
        if (!fits) __builtin_trap();
    }
};

inline thread_local Emulated emulated;

class Tiles {
  public:
    explicit Tiles(const Shapes& shapes) : shapes_(shapes) {
        Emulated::check(emulated.shapes == nullptr);  // the instruction would not mind: two owners are our mistake
        for (int tile = 0; tile < NUM_TILES; ++tile)
            Emulated::check(shapes_.rows[tile] <= MAX_ROWS && shapes_.bytes[tile] <= ROW_BYTES);
        emulated.shapes = &shapes_;
        std::memset(emulated.data, 0, sizeof emulated.data);
    }
    ~Tiles() { emulated.shapes = nullptr; }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

  private:
    Shapes shapes_;
};

template <int TILE>
inline void load(const void* from, int64_t stride) {
    std::memset(emulated.data[TILE], 0, sizeof emulated.data[TILE]);
    for (int row = 0; row < emulated.rows(TILE); ++row)
        std::memcpy(emulated.data[TILE][row], static_cast<const char*>(from) + row * stride, emulated.bytes(TILE));
}

template <int TILE>
inline void store(void* to, int64_t stride) {
    for (int row = 0; row < emulated.rows(TILE); ++row)
        std::memcpy(static_cast<char*>(to) + row * stride, emulated.data[TILE][row], emulated.bytes(TILE));
}

template <int TILE>
inline void zero() {
    Emulated::checked(emulated.rows(TILE));
    std::memset(emulated.data[TILE], 0, sizeof emulated.data[TILE]);
}

template <int DST, int A, int B>
inline void dot_pairs() {
    int pairs = emulated.bytes(A) / 4, columns = emulated.bytes(DST) / 4;
    Emulated::check(emulated.rows(DST) == emulated.rows(A) && emulated.rows(B) == pairs &&
                    emulated.bytes(B) == emulated.bytes(DST));
    for (int row = 0; row < emulated.rows(DST); ++row) {
        float even[MAX_ROWS] = {}, odd[MAX_ROWS] = {}, sums[MAX_ROWS];
        for (int k = 0; k < pairs; ++k) {
            bf16 a[2], b[2];
            std::memcpy(a, emulated.data[A][row] + 4 * k, sizeof a);
            for (int n = 0; n < columns; ++n) {
                std::memcpy(b, emulated.data[B][k] + 4 * n, sizeof b);
                even[n] = __builtin_fmaf(to_float(a[0]), to_float(b[0]), even[n]);
                odd[n] = __builtin_fmaf(to_float(a[1]), to_float(b[1]), odd[n]);
            }
        }
        std::memcpy(sums, emulated.data[DST][row], columns * sizeof(float));
        for (int n = 0; n < columns; ++n) sums[n] += even[n] + odd[n];
        std::memcpy(emulated.data[DST][row], sums, columns * sizeof(float));
    }
}

#endif

}  // namespace engine::amx

#endif  // TILES
