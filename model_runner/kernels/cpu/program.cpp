// A program: the kernel calls of a whole decode step, run by all threads in one parallel region.
//
// Called one by one, the kernels of a step wake and join the threads a hundred times, and each call costs Python some
// ten microseconds. In a program every thread walks the same list, and waits only for pieces of work (team.h).

#include "program.h"

namespace engine {
namespace {

struct Call {
    void (*function)(const Word*);
    const Word* words;  // the arguments of the call
};

void walk(const Call* calls, int64_t num_calls) {
    for (int64_t n = 0; n < num_calls; ++n) calls[n].function(calls[n].words);
}

}  // namespace
}  // namespace engine

EXPORT void run_program(const void* calls_, int64_t num_calls) {
    using namespace engine;
    const Call* calls = static_cast<const Call*>(calls_);
    int num_threads = max_threads();
    if (num_threads == 1) {
        walk(calls, num_calls);
        return;
    }
#ifdef _OPENMP
    Team team(num_threads);
#pragma omp parallel num_threads(num_threads)
    {
        thread_context = ThreadContext{&team, omp_get_thread_num(), 0};
        walk(calls, num_calls);
        thread_context = ThreadContext{};
    }
#endif
}
