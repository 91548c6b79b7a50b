// Software prefetch.
//
// The ISA target avx512_bf16 covers AMD CPUs (isa.py; and Cooper Lake), which differ. On Zen 4 the hardware prefetchers
// are faster alone for sequential reads (one thread reads 27 GB/s, 22 with software prefetch). Other reads are faster
// through L2, because its L1 has few lines in flight (64 decodes of 512 tokens: 18 GB/s, 13 without). Zen 5 has a
// larger L1, and prefetching into it pays: matmuls of one token take 0.90 of the time, of six 0.86, decode attention
// 0.96 (bfloat16) and 0.93 (int8).

#pragma once

#include <cstdint>

#include "simd.h"

#if defined(__AVX512BF16__) && !defined(HAS_AMX)
#include <unistd.h>
#endif

namespace engine {

// FETCH_INTO: the cache (3: L1, 2: L2) for data that several row tiles read.
// READS_AHEAD: whether data that is read once is prefetched, too, into L1.
#if defined(__AVX512BF16__) && !defined(HAS_AMX)
constexpr int FETCH_INTO = 2;

inline bool has_large_first_level() {
#ifdef _SC_LEVEL1_DCACHE_SIZE
    return sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 << 10;
#else
    return false;
#endif
}
inline const bool READS_AHEAD = has_large_first_level();
#else
constexpr int FETCH_INTO = 3;
constexpr bool READS_AHEAD = true;
#endif

// Prefetches the cache line at p. Inline assembly, because GCC 12 drops some __builtin_prefetch in loops that contain
// nothing else (linear_256.h, linear_vectors.h).
template <int CACHE = FETCH_INTO>
ALWAYS_INLINE void fetch(const void* p) {
#if defined(__x86_64__)
    if constexpr (CACHE == 2)
        asm volatile("prefetcht1 %0" ::"m"(*static_cast<const char*>(p)));
    else
        asm volatile("prefetcht0 %0" ::"m"(*static_cast<const char*>(p)));
#else
    __builtin_prefetch(p, 0, CACHE);
#endif
}

}  // namespace engine
