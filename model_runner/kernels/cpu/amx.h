// Intel AMX: eight tile registers of 16 rows of 64 bytes, and their matmul; or an emulation in plain C++.
//
// HAS_AMX is set for an ISA target that has the instructions (isa.py). EMULATE_AMX selects the emulation on any target,
// so that the code built on tiles is tested on every CPU. TILES is 1 if either is available.
//
//   amx::Shapes shapes;             rows and bytes of each tile that is used
//   shapes.set(0, 16, 64);
//   {
//       amx::Tiles tiles(shapes);   configures this thread's tiles, all zero
//       amx::load<1>(from, stride); ... amx::dot_pairs<0, 1, 2>(); ... amx::store<0>(to, stride);
//   }                               releases them
//
// The tile configuration is per thread, and other code (oneDNN) sets its own. Every piece of work therefore constructs
// its own `Tiles`, which takes some 50 ns, and releases it before it returns: a thread with configured tiles has 8 KB
// more state to save on every context switch.
//
// The bfloat16 matmul dst += a . b: a is [rows][k-pairs], b is [k-pairs][columns][2]. For each element of dst
//
//   even += a[k][0] * b[k][0] and odd += a[k][1] * b[k][1], pair by pair from 0, each one fused multiply-add;
//   dst += even + odd
//
// Denormals are flushed to zero, inputs and results. The bits of a row depend only on that row of `a` and `dst`.
// Trailing pairs of zeros do not change the result (except that -0 becomes +0). The emulation does the same, but keeps
// denormals.
//
// The instructions are inline assembly: compilers gained the intrinsics later than the rest of what an ISA target
// needs, and GCC 12 moves stores past the tile loads that must see them (its intrinsics do not declare that they read
// memory).

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

// Operand of `ldtilecfg`.
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

// Loads the rows of the tile, `stride` bytes apart.
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

// Aborts where the instructions would fault, too: an unconfigured tile, or shapes that do not match.
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
        Emulated::check(emulated.shapes == nullptr);  // the instruction allows it, but two live `Tiles` are our bug
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
