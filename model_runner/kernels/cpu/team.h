// A team: threads that do the same sequence of phases together, each phase a range of pieces.
//
// Nobody waits for a thread, only for pieces: who comes first takes the next ones, and a phase is over as soon as its
// last piece is done. So a thread that has no core at the moment, because a third process wants one or because it is
// still being woken, holds nobody up unless it is in the middle of a piece. When it is back, it finds the phases over
// that it has missed, and passes through them.
//
//   ranges     [phase | next index]    one word: a late thread cannot take a piece of a phase that is not its own
//   done       indices of this phase that are finished; who finishes the last one begins the next phase
//
// A phase has a range of indices for each member, equally long. A member begins with its own, from the first index to
// the last, and helps with the others' when nothing of it is left. So a thread reads one long stretch of a weight: two
// cores that read 64 KB each in turn fetch 28 GB/s from memory, of a half each 46 (Zen 4).
//
// Who waits spins for some microseconds, longer than a small operation takes, and then sleeps: a spinning thread takes
// the core from whoever could use it, and that may be the other thread of its team.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

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
    explicit Team(int size) : size_(size), ranges_(size) {}
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // This member's part of a phase: work(begin, end) for pieces of [0, count), whose ends are multiples of `grain`,
    // until there are none left. Others may still be busy with theirs.
    //
    // A range's first pieces are long and its last ones short: there is little to claim, and at the end little to wait
    // for. Who helps takes less at a time: all may come to the same range. Where all are to be handed out one by one,
    // there is one range for all.
    template <class Work>
    void take_part(uint32_t phase, int member, int64_t count, int64_t grain, bool one_by_one, const Work& work) {
        if (count <= 0) return skip(phase);
        int num_ranges = one_by_one ? 1 : size_;
        int64_t grains = (count + grain - 1) / grain;
        for (int n = 0; n < num_ranges; ++n) {
            int range = (member + n) % num_ranges;
            int64_t first = grains * range / num_ranges * grain;
            int64_t last = std::min(grains * (range + 1) / num_ranges * grain, count);
            if (first >= last) continue;
            std::atomic<uint64_t>& claimed = ranges_[range].claimed;
            uint64_t seen = claimed.load(std::memory_order_acquire);
            for (;;) {
                if (uint32_t(seen >> 32) != phase) return;  // over
                int64_t begin = first + int64_t(uint32_t(seen)), left = last - begin;
                if (left <= 0) break;
                int64_t pieces = n == 0 ? 2 : 2 * size_;
                int64_t length = one_by_one ? grain : std::max<int64_t>(1, left / grain / pieces) * grain;
                if (left < length + grain) length = left;
                if (!claimed.compare_exchange_weak(seen, seen + uint64_t(length), std::memory_order_acq_rel)) continue;
                work(begin, begin + length);
                if (done_.fetch_add(length, std::memory_order_acq_rel) + length == count) return begin_phase(phase + 1);
                seen = claimed.load(std::memory_order_acquire);
            }
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

    struct alignas(64) Range {
        std::atomic<uint64_t> claimed{0};
    };

    // A phase without pieces is over when somebody says so.
    void skip(uint32_t phase) {
        uint64_t seen = uint64_t(phase) << 32;
        if (ranges_[0].claimed.compare_exchange_strong(seen, uint64_t(phase + 1) << 32)) begin_phase(phase + 1);
    }

    // Nobody takes pieces of it before `phase_` says so.
    void begin_phase(uint32_t phase) {
        done_.store(0, std::memory_order_relaxed);
        for (Range& range : ranges_) range.claimed.store(uint64_t(phase) << 32, std::memory_order_release);
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
    std::vector<Range> ranges_;
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    std::atomic<int32_t> sleepers_{0};
};

// Where the calling thread stands: in no team, or in which phase of which, as which member in [0, size).
struct Membership {
    Team* team = nullptr;
    int member = 0;
    uint32_t phase = 0;
};

inline thread_local constinit Membership membership;

}  // namespace engine
