// A team: threads that do the same sequence of phases together, each phase a range of pieces.
//
// Nobody waits for a thread, only for pieces: who comes first takes the next ones, and a phase is over as soon as its
// last piece is done. So a thread that has no core at the moment, because a third process wants one or because it is
// still being woken, holds nobody up unless it is in the middle of a piece. When it is back, it finds the phases over
// that it has missed, and passes through them.
//
//   claimed    [phase | next index]    one word: a late thread cannot take a piece of a phase that is not its own
//   done       indices of this phase that are finished; who finishes the last one begins the next phase
//
// Who waits spins for some microseconds, longer than a small operation takes, and then sleeps: a spinning thread takes
// the core from whoever could use it, and that may be the other thread of its team.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace engine {

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Team {
  public:
    explicit Team(int size) : size_(size) {}
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // This thread's part of a phase: work(begin, end) for pieces of [0, count), whose ends are multiples of `grain`,
    // until there are none left. Others may still be busy with theirs.
    //
    // The first pieces are long and the last ones short, unless all are to be handed out one by one: there is little to
    // claim, and at the end little to wait for.
    template <class Work>
    void take_part(uint32_t phase, int64_t count, int64_t grain, bool one_by_one, const Work& work) {
        uint64_t seen = claimed_.load(std::memory_order_acquire);
        for (;;) {
            if (uint32_t(seen >> 32) != phase) return;  // over
            int64_t begin = int64_t(uint32_t(seen)), left = count - begin;
            if (left <= 0) {
                if (count <= 0) skip(seen, phase);
                return;
            }
            int64_t length = one_by_one ? grain : std::max<int64_t>(1, left / grain / (2 * size_)) * grain;
            if (left < length + grain) length = left;
            if (!claimed_.compare_exchange_weak(seen, seen + uint64_t(length), std::memory_order_acq_rel)) continue;
            work(begin, begin + length);
            if (done_.fetch_add(length, std::memory_order_acq_rel) + length == count) {
                done_.store(0, std::memory_order_relaxed);
                claimed_.store(uint64_t(phase + 1) << 32, std::memory_order_release);
                begin_phase(phase + 1);
                return;
            }
            seen = claimed_.load(std::memory_order_acquire);
        }
    }

    // Until the phase is over.
    void wait(uint32_t phase) {
        for (int n = 0; n < SPINS; ++n) {
            if (phase_.load(std::memory_order_acquire) != phase) return;
            pause();
        }
        sleepers_.fetch_add(1);
        while (phase_.load() == phase) sleep(phase);
        sleepers_.fetch_sub(1);
    }

  private:
    static constexpr int SPINS = 1500;  // some 25 us

    // A phase without pieces is over when somebody says so.
    void skip(uint64_t seen, uint32_t phase) {
        if (claimed_.compare_exchange_strong(seen, uint64_t(phase + 1) << 32)) begin_phase(phase + 1);
    }

    void begin_phase(uint32_t phase) {
        phase_.store(phase);
        if (sleepers_.load() > 0) wake_all();
    }

#ifdef __linux__
    void sleep(uint32_t phase) { syscall(SYS_futex, &phase_, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0); }
    void wake_all() { syscall(SYS_futex, &phase_, FUTEX_WAKE_PRIVATE, size_, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t) { std::this_thread::yield(); }
    void wake_all() {}
#endif

    const int size_;
    alignas(64) std::atomic<uint64_t> claimed_{0};
    std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    std::atomic<int32_t> sleepers_{0};
};

// Where the calling thread stands: in no team, or in which phase of which.
struct Membership {
    Team* team = nullptr;
    uint32_t phase = 0;
};

inline thread_local constinit Membership membership;

}  // namespace engine
