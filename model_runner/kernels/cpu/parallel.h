// Divides work among torch's OpenMP threads. Without OpenMP (no -fopenmp) everything runs on the calling thread.
//
// A kernel is called in one of two ways; its code is the same for both:
//
//   alone       by one thread: each parallel_for or parallel_for_dynamic opens a parallel region
//   in a team   by all threads of one region, with the same arguments (program.cpp): parallel_for and
//               parallel_for_dynamic give the calling thread its pieces, and return when all pieces are done, by any
//               thread
//
// In a team, the code of a kernel outside of these bodies may run on several threads, and late, when later calls have
// already begun. It must have no side effects, and may read only its arguments and data that no later call of a program
// changes (such as attention's plan). The number of parallel_for and parallel_for_dynamic calls must depend on its
// arguments alone.
//
// Any free thread takes the next piece: results must not depend on which thread computes a piece.

#pragma once

#include <cstdint>
#include <cstdlib>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "team.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace engine {

// The value of torch.set_num_threads for the calling thread; in a team, its size.
inline int max_threads() {
    if (thread_context.team != nullptr) return thread_context.team->size();
#ifdef _OPENMP
    return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
    return 1;
#endif
}

// Leaves the team while it exists: nested calls in a body run on the calling thread.
class SerialScope {
  public:
    SerialScope() : before_(thread_context) { thread_context.team = nullptr; }
    ~SerialScope() { thread_context = before_; }
    SerialScope(const SerialScope&) = delete;
    SerialScope& operator=(const SerialScope&) = delete;

  private:
    ThreadContext before_;
};

template <class Work>
inline void run_phase(int64_t count, int64_t grain, bool one_by_one, const Work& work) {
    if (Team* team = thread_context.team) {
        uint32_t phase = thread_context.phase++;
        team->take_part(phase, thread_context.member, count, grain, one_by_one, [&](int64_t begin, int64_t end) {
            SerialScope serial;
            work(begin, end);
        });
        team->wait(phase);
        return;
    }
    // All threads or one: for a smaller region the runtime ends the other threads, and starts new ones for the next
    // region.
    int num_threads = max_threads();
    if (num_threads == 1 || count / grain <= 1) {
        if (count > 0) work(int64_t(0), count);
        return;
    }
#ifdef _OPENMP
    Team team(num_threads);
#pragma omp parallel num_threads(num_threads)
    team.take_part(0, omp_get_thread_num(), count, grain, one_by_one, work);
#endif
}

// body(begin, end) for pieces of [0, count). Pieces end at multiples of `grain` and have at least that length, except
// the last one. A grain should take some microseconds: more than claiming a piece costs, but less than an acceptable
// wait.
template <class Body>
inline void parallel_for(int64_t count, int64_t grain, const Body& body) {
    run_phase(count, std::max<int64_t>(grain, 1), false, body);
}

// body(n) for n in [0, count), dispatched one by one: for pieces of unequal cost.
template <class Body>
inline void parallel_for_dynamic(int64_t count, const Body& body) {
    run_phase(count, 1, true, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) body(n);
    });
}

// Reusable memory of one thread, 64-byte aligned; grows, and is freed with the thread.
class Scratch {
  public:
    ~Scratch() { std::free(memory_); }

    char* get(size_t bytes) {
        if (bytes > size_) {
            std::free(memory_);
            size_ = (bytes + 4095) / 4096 * 4096;
            memory_ = static_cast<char*>(std::aligned_alloc(64, size_));
            if (memory_ == nullptr) std::abort();
        }
        return memory_;
    }

  private:
    char* memory_ = nullptr;
    size_t size_ = 0;
};

}  // namespace engine
