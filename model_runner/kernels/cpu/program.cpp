// A program: the calls of a whole decode step, run by all threads in one parallel region.
//
// Called one by one, the kernels of a step wake and await the threads a hundred times over, and cost their Python
// callers some ten microseconds each. Here every thread of a team walks the same list, and only pieces of work are
// waited for (team.h).

#include "program.h"

namespace engine {
namespace {

struct Call {
    void (*function)(const Word*);
    const Word* words;  // its arguments
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
        membership = Membership{&team, omp_get_thread_num(), 0};
        walk(calls, num_calls);
        membership = Membership{};
    }
#endif
}
