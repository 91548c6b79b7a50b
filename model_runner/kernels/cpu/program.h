// Makes a kernel recordable as part of a program: a list of recorded calls, see program.cpp.

#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "parallel.h"

namespace engine {

typedef uint64_t Word;  // an argument: a pointer, an int64, an int, or the bits of a float in the lower half

template <class T>
inline T from_word(Word word) {
    if constexpr (std::is_pointer_v<T>)
        return reinterpret_cast<T>(word);
    else if constexpr (std::is_floating_point_v<T>)
        return std::bit_cast<T>(uint32_t(word));
    else
        return T(int64_t(word));
}

template <auto KERNEL>
struct Recorded;

template <class... Arguments, void (*KERNEL)(Arguments...)>
struct Recorded<KERNEL> {
    static void call(const Word* words) {
        [&]<size_t... N>(std::index_sequence<N...>) {
            KERNEL(from_word<Arguments>(words[N])...);
        }(std::index_sequence_for<Arguments...>{});
    }
};

}  // namespace engine

// Follows an exported function that obeys the rules of parallel.h, so that it may be called in a team. A function
// without this line cannot be recorded; steps that call it run call by call.
#define RECORDABLE(kernel) \
    EXPORT void recorded_##kernel(const engine::Word* words) { engine::Recorded<&kernel>::call(words); }
