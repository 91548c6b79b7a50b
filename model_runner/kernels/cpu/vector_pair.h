// A vector that takes two registers, or four: simd.h builds its vectors from it where registers are shorter.
//
// The compiler supports vectors of any length, but keeps those that exceed a register in memory. Here each half is a
// vector of its own, which stays in a register; halves may be pairs themselves.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// Functions pass vectors that exceed a register in memory, so functions of register pairs are always inlined. Where a
// vector is one register the compiler decides better: with forced inlining, matmuls of up to 6 tokens took a quarter
// longer with AVX-512.
#if defined(__AVX512F__)
#define ALWAYS_INLINE inline
#else
#define ALWAYS_INLINE inline __attribute__((always_inline))
#endif

namespace engine {

template <class Half>
struct VectorPair {
    typedef std::remove_cvref_t<decltype(std::declval<Half>()[0])> Number;
    static constexpr int COUNT = sizeof(Half) / sizeof(Number) * 2;

    Half low, high;

    VectorPair() = default;
    ALWAYS_INLINE VectorPair(Half low, Half high) : low(low), high(high) {}

    template <class... N>
        requires(sizeof...(N) == COUNT)
    ALWAYS_INLINE VectorPair(N... numbers) {
        const Number all[] = {Number(numbers)...};
        std::memcpy(&low, all, sizeof low);
        std::memcpy(&high, all + COUNT / 2, sizeof high);
    }

    // Bit cast.
    template <class Other>
    ALWAYS_INLINE explicit VectorPair(VectorPair<Other> v) : low((Half)v.low), high((Half)v.high) {
        static_assert(sizeof(Half) == sizeof(Other));
    }

    ALWAYS_INLINE Number operator[](int n) const {
        Number all[COUNT];
        std::memcpy(all, &low, sizeof low);
        std::memcpy(all + COUNT / 2, &high, sizeof high);
        return all[n];
    }

    ALWAYS_INLINE VectorPair operator-() const { return {-low, -high}; }
    ALWAYS_INLINE VectorPair operator~() const { return {~low, ~high}; }
};

template <class Number>
concept Scalar = std::is_arithmetic_v<Number>;

// Lane by lane, with a vector or a scalar on either side; comparisons give integers, 0 or -1.
#define LANE_BY_LANE(op)                                                                              \
    template <class Half>                                                                             \
    ALWAYS_INLINE auto operator op(VectorPair<Half> a, VectorPair<Half> b) {                                 \
        return VectorPair<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high};                \
    }                                                                                                 \
    template <class Half, Scalar Number>                                                              \
    ALWAYS_INLINE auto operator op(VectorPair<Half> a, Number b) {                                           \
        return VectorPair<decltype(a.low op b)>{a.low op b, a.high op b};                             \
    }                                                                                                 \
    template <class Half, Scalar Number>                                                              \
    ALWAYS_INLINE auto operator op(Number a, VectorPair<Half> b) {                                           \
        return VectorPair<decltype(a op b.low)>{a op b.low, a op b.high};                             \
    }
#define LANE_BY_LANE_IN_PLACE(op)                                                                     \
    LANE_BY_LANE(op)                                                                                  \
    template <class Half, class Other>                                                                \
    ALWAYS_INLINE VectorPair<Half>& operator op##=(VectorPair<Half>& a, Other b) {                           \
        return a = a op b;                                                                            \
    }
LANE_BY_LANE_IN_PLACE(+)
LANE_BY_LANE_IN_PLACE(-)
LANE_BY_LANE_IN_PLACE(*)
LANE_BY_LANE_IN_PLACE(/)
LANE_BY_LANE_IN_PLACE(&)
LANE_BY_LANE_IN_PLACE(|)
LANE_BY_LANE_IN_PLACE(^)
LANE_BY_LANE_IN_PLACE(<<)
LANE_BY_LANE_IN_PLACE(>>)
LANE_BY_LANE(<)
LANE_BY_LANE(>)
LANE_BY_LANE(<=)
LANE_BY_LANE(>=)
LANE_BY_LANE(==)
#undef LANE_BY_LANE_IN_PLACE
#undef LANE_BY_LANE

template <class Mask, class Vector>
ALWAYS_INLINE Vector select(Mask mask, Vector a, Vector b) {
    return mask ? a : b;
}

template <class Mask, class Half>
ALWAYS_INLINE VectorPair<Half> select(VectorPair<Mask> mask, VectorPair<Half> a, VectorPair<Half> b) {
    return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
}

// ---------------------------------------------------------------- loads and stores

template <class Vector>
ALWAYS_INLINE void get(Vector& v, const void* p) {
    std::memcpy(&v, p, sizeof v);
}

template <class Half>
ALWAYS_INLINE void get(VectorPair<Half>& v, const void* p) {
    get(v.low, p);
    get(v.high, static_cast<const char*>(p) + sizeof(Half));
}

template <class Vector>
ALWAYS_INLINE void put(void* p, const Vector& v) {
    std::memcpy(p, &v, sizeof v);
}

template <class Half>
ALWAYS_INLINE void put(void* p, const VectorPair<Half>& v) {
    put(p, v.low);
    put(static_cast<char*>(p) + sizeof(Half), v.high);
}

// ---------------------------------------------------------------- shuffles

// Lanes N of the concatenation of a and b.
template <int... N, class Vector>
ALWAYS_INLINE Vector shuffle(Vector a, Vector b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, N...);
#else
    constexpr size_t BYTES = sizeof(Vector) / sizeof...(N);
    typedef std::conditional_t<BYTES == 2, int16_t, int32_t> Number;
    typedef Number Lanes __attribute__((vector_size(sizeof(Vector))));
    return __builtin_shuffle(a, b, Lanes{N...});
#endif
}

template <int... N, class Half>
ALWAYS_INLINE VectorPair<Half> shuffle(VectorPair<Half> a, VectorPair<Half> b) {
    // One half of the result, from the at most two halves that it is made of.
    auto half = [&]<int BEGIN, int... I>(std::integer_sequence<int, BEGIN>, std::integer_sequence<int, I...>)
        __attribute__((always_inline)) {
        constexpr int LANES_OF = sizeof...(I), ALL[] = {N...};
        constexpr int FIRST = ALL[BEGIN] / LANES_OF;
        constexpr int SECOND = [] {
            for (int i = 0; i < LANES_OF; ++i)
                if (ALL[BEGIN + i] / LANES_OF != FIRST) return ALL[BEGIN + i] / LANES_OF;
            return FIRST;
        }();
        static_assert((... && (ALL[BEGIN + I] / LANES_OF == FIRST || ALL[BEGIN + I] / LANES_OF == SECOND)));
        const Half parts[] = {a.low, a.high, b.low, b.high};
        return shuffle<(ALL[BEGIN + I] % LANES_OF + (ALL[BEGIN + I] / LANES_OF == FIRST ? 0 : LANES_OF))...>(
            parts[FIRST], parts[SECOND]);
    };
    constexpr int COUNT = sizeof...(N) / 2;
    typedef std::make_integer_sequence<int, COUNT> All;
    return {half(std::integer_sequence<int, 0>{}, All{}), half(std::integer_sequence<int, COUNT>{}, All{})};
}

}  // namespace engine
