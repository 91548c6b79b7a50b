// A team: threads that execute the same sequence of phases together; each phase is a range of pieces.
//
// A phase ends when its last piece is done; it does not wait for every thread. A free thread takes the next piece. A
// thread without a core (another process runs there, or it is still being woken) delays the others only if it is in the
// middle of a piece. When it runs again, it passes through the phases that have ended meanwhile.
//
//   ranges     [phase | next index]    one word: a late thread cannot take a piece of another phase
//   done       finished indices of this phase; the thread that finishes the last one begins the next phase
//
// A phase has a range of indices for each member, of equal length. A member begins with its own, from the first index
// to the last, and helps with the others' afterwards. Each thread thus reads one contiguous range of a weight: two
// cores that alternate in blocks of 64 KB read 28 GB/s from memory; with one half each they read 46 (Zen 4).
//
// A waiting thread spins for some microseconds, longer than a small operation takes, and then sleeps: a spinning thread
// occupies a core that another thread, possibly of its own team, could use.

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

    // This member's part of a phase: work(begin, end) for pieces of [0, count), with ends at multiples of `grain`,
    // until there are none left. Other members may still be computing theirs.
    //
    // The first pieces of a range are long and the last ones short: few claims, and little waiting at the end. A
    // helping member takes shorter pieces, because all members may come to the same range. With `one_by_one` there is a
    // single range for all members.
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
                if (uint32_t(seen >> 32) != phase) return;  // the phase has ended
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

    // Returns when the phase has ended.
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
    static constexpr int SPINS = 1500;  // about 25 us

    struct alignas(64) Range {
        std::atomic<uint64_t> claimed{0};
    };

    // Ends a phase without pieces.
    void skip(uint32_t phase) {
        uint64_t seen = uint64_t(phase) << 32;
        if (ranges_[0].claimed.compare_exchange_strong(seen, uint64_t(phase + 1) << 32)) begin_phase(phase + 1);
    }

    // Pieces of the new phase are taken only after `phase_` is set.
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

// The calling thread's team (or null), its index in [0, size) there, and its current phase.
struct ThreadContext {
    Team* team = nullptr;
    int member = 0;
    uint32_t phase = 0;
};

inline thread_local constinit ThreadContext thread_context;

}  // namespace engine
