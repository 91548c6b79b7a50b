// Work shared out among torch's OpenMP threads. Without OpenMP (-fopenmp not given) everything runs on the caller.
//
// A kernel is called in one of two ways, and shares its work out in the same words in both:
//
//   alone       by one thread: each share_out or hand_out opens a parallel region
//   in a team   by all threads of one region, with the same arguments (program.cpp): share_out and hand_out give the
//               calling thread its pieces, and return when all pieces are done, whoever did them
//
// So what a kernel does outside of the bodies it shares out may be done by several threads, and late, when later calls
// are already at work: it must have no effect, read nothing but arguments and what no later call of a program changes
// (as attention's plan), and how many share_outs and hand_outs a call makes must follow from its arguments alone.
//
// Which thread does which piece is decided by who is free: results must not depend on it.

#pragma once

#include <cstdint>
#include <cstdlib>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "team.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace engine {

// What torch.set_num_threads has set for the calling thread; in a team its size.
inline int max_threads() {
    if (membership.team != nullptr) return membership.team->size();
#ifdef _OPENMP
    return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
    return 1;
#endif
}

// Leaves the team for as long as it exists: what a body calls, it calls alone.
class Alone {
  public:
    Alone() : before_(membership) { membership.team = nullptr; }
    ~Alone() { membership = before_; }
    Alone(const Alone&) = delete;
    Alone& operator=(const Alone&) = delete;

  private:
    Membership before_;
};

template <class Work>
inline void run_phase(int64_t count, int64_t grain, bool one_by_one, const Work& work) {
    if (Team* team = membership.team) {
        uint32_t phase = membership.phase++;
        team->take_part(phase, membership.member, count, grain, one_by_one, [&](int64_t begin, int64_t end) {
            Alone alone;
            work(begin, end);
        });
        team->wait(phase);
        return;
    }
    // All threads or one: for a region of fewer the runtime ends the others, and starts them anew for the next one.
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

// body(begin, end) for pieces of [0, count), which end at multiples of `grain` and are at least as long, but for the last
// one. A grain should be worth some microseconds: more than it takes to claim it, less than anybody would like to wait for.
template <class Body>
inline void share_out(int64_t count, int64_t grain, const Body& body) {
    run_phase(count, std::max<int64_t>(grain, 1), false, body);
}

// body(n) for n in [0, count), handed out one by one: for pieces of unequal cost.
template <class Body>
inline void hand_out(int64_t count, const Body& body) {
    run_phase(count, 1, true, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) body(n);
    });
}

// Memory of one thread that is used again by its next call; grows, and is freed with the thread.
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
