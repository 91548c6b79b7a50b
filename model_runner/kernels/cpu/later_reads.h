// What a later call of a program is going to read, for the calls before it to ask memory for while they compute.
//
// A step's products wait for the multipliers and its attention for memory, one after the other. So products fetch some of
// the keys and values that the next layer's attention reads into the cache that the cores share, as Y. Dong et al. do on
// GPUs (arXiv:2504.06319). Attention reads them twice as fast from there.

#pragma once

#include <atomic>
#include <cstdint>

namespace engine {

// Rows of a pool side by side.
struct Stretch {
    int32_t first, count;
};

// Cache lines side by side.
struct Lines {
    static constexpr int64_t BYTES = 64;

    const char* from;
    int64_t count;
};

class LaterReads {
  public:
    // Of a stretch: what a strip of tokens fetches, a line at each step of a part of a product.
    static constexpr int64_t MOST_LINES = 192;

    // In place of what was announced before. By one thread, within a phase; the phases behind it see it.
    void announce(const Stretch* stretches, int64_t num_stretches, const void* keys, const void* values, int64_t row_bytes) {
        stretches_ = stretches;
        num_ = 2 * num_stretches;
        pools_[0] = static_cast<const char*>(keys);
        pools_[1] = static_cast<const char*>(values);
        row_bytes_ = row_bytes;
        next_.store(0, std::memory_order_relaxed);
    }

    // Some that nobody has asked for yet, in the order in which they are read; none at the end.
    Lines next() {
        if (next_.load(std::memory_order_relaxed) >= num_) return {nullptr, 0};
        int64_t n = next_.fetch_add(1, std::memory_order_relaxed);
        if (n >= num_) return {nullptr, 0};
        const Stretch& rows = stretches_[n / 2];
        return {pools_[n % 2] + rows.first * row_bytes_, (rows.count * row_bytes_ + Lines::BYTES - 1) / Lines::BYTES};
    }

  private:
    std::atomic<int64_t> next_{0};
    int64_t num_ = 0, row_bytes_ = 0;
    const Stretch* stretches_ = nullptr;
    const char* pools_[2] = {};
};

}  // namespace engine
