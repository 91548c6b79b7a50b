// What is asked of memory before it is used.
//
// The level avx512_bf16 is AMD's (isa.py; and Cooper Lake's), and these CPUs differ. Zen 4's own prefetchers do better alone
// where something is read from one end to the other (one thread reads 27 GB/s, 22 if asked), and what is read elsewhere comes
// faster by way of the second-level cache, as its first level has few lines on their way (64 decodes of 512 tokens: 18 GB/s,
// 13 without). Zen 5's first level is larger, and is to be asked: products of one token take 0.90 of the time, of six
// 0.86, decode attention 0.96 (bfloat16) and 0.93 (int8).

#pragma once

#include <cstdint>

#include "simd.h"

#if HAS_BF16_DOT && !defined(HAS_AMX)
#include <unistd.h>
#endif

namespace engine {

// FETCH_INTO: the cache into which is fetched what several strips of tokens are going to read.
// READS_AHEAD: whether what is read once is fetched, too, into the first-level cache.
#if HAS_BF16_DOT && !defined(HAS_AMX)
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

// Asks for the cache line at p. GCC 12 left out some of its own __builtin_prefetch, in loops with nothing else in them
// (linear_short.h, linear_vectors.h).
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
