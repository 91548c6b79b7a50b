// Teams under stress: many short phases, each of which reads what the others wrote in the one before.
//
// Arguments: number of threads, of teams. Ends with 1 if a number is wrong. Compiled and run by test_team.py.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "team.h"

using namespace engine;

struct Phase {
    int64_t count, grain;
    bool one_by_one;
};

// Mostly short ones; some without pieces, as a kernel has them for no tokens.
static std::vector<Phase> make_phases(uint32_t seed) {
    static const int64_t COUNTS[] = {0, 1, 2, 7, 64, 1000}, GRAINS[] = {1, 3, 64};
    std::vector<Phase> phases;
    for (int n = 0; n < 60; ++n) {
        seed = seed * 1664525u + 1013904223u;
        bool one_by_one = seed >> 30 & 1;
        phases.push_back({COUNTS[(seed >> 16) % 6], one_by_one ? 1 : GRAINS[(seed >> 24) % 3], one_by_one});
    }
    return phases;
}

// Numbers [begin, end) of a phase, from those that the last phase with any has left.
static void write(const std::vector<int64_t>& from, std::vector<int64_t>& to, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) to[n] = from[(7 * n + 3) % from.size()] * 31 + n;
}

// Stays away for a while: long enough that who waits for it sleeps, or that it misses whole phases.
static void dawdle(uint32_t& seed) {
    seed = seed * 1664525u + 1013904223u;
    if ((seed >> 20) % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(seed >> 24));
    if ((seed >> 20) % 8 == 1) std::this_thread::yield();
}

static bool run(int num_threads, uint32_t seed) {
    std::vector<Phase> phases = make_phases(seed);
    std::vector<std::vector<int64_t>> ours(1, std::vector<int64_t>(1, 5)), expected = ours;
    std::vector<int> sources;  // of each phase
    for (const Phase& phase : phases) {
        sources.push_back(int(ours.size()) - 1);
        if (phase.count == 0) continue;
        ours.emplace_back(phase.count);
        expected.emplace_back(phase.count);
        write(expected[sources.back()], expected.back(), 0, phase.count);
    }
    Team team(num_threads);
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads; ++t)
        threads.emplace_back([&, t] {
            uint32_t own = seed + 77 * t;
            for (uint32_t n = 0; n < phases.size(); ++n) {
                const Phase& phase = phases[n];
                dawdle(own);
                team.take_part(n, t, phase.count, phase.grain, phase.one_by_one, [&](int64_t begin, int64_t end) {
                    dawdle(own);
                    if (begin % phase.grain || begin >= end || end > phase.count) std::abort();
                    write(ours[sources[n]], ours[sources[n] + 1], begin, end);
                });
                team.wait(n);
            }
        });
    for (std::thread& thread : threads) thread.join();
    return ours == expected;
}

int main(int, char** arguments) {
    int num_threads = std::atoi(arguments[1]), num_teams = std::atoi(arguments[2]);
    for (int n = 0; n < num_teams; ++n)
        if (!run(num_threads, 1000u + n)) {
            std::printf("team %d of %d threads has wrong numbers\n", n, num_threads);
            return 1;
        }
    std::printf("%d teams of %d threads\n", num_teams, num_threads);
}
