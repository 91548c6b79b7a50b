// What a later call of a program is going to read, for the calls before it to ask memory for while they compute.
//
// A step's products wait for the multipliers and its attention for memory, one after the other. So products fetch some of
// the keys and values that the next layer's attention reads into the cache that the cores share, as Y. Dong et al. do on
// GPUs (arXiv:2504.06319). Attention reads them twice as fast from there.

#pragma once

#include <cstdint>
#include <vector>

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

// Stretches of keys, and of values, of announcements that another one has followed.
struct Tally {
    int64_t announced, taken;
};

// Each member of a team takes stretches of its own, one out of so many: a counter for all would go from core to core at
// every strip, which took 1 % of a step. In return nobody takes over what a member leaves that is held up.
class LaterReads {
  public:
    // Of a stretch: what a strip of tokens fetches, a line at each step of a part of a product.
    static constexpr int64_t MOST_LINES = 192;

    explicit LaterReads(int num_members) : num_members_(num_members), next_(num_members) {}

    // In place of what was announced before. By one thread, within a phase; the phases behind it see it. What
    // comes of it is added to `tally`, if that is not null, by the next announcement.
    void announce(const Stretch* stretches, int64_t num_stretches, const void* keys, const void* values, int64_t row_bytes,
                  Tally* tally) {
        if (tally_ != nullptr) {
            tally_->announced += num_;
            tally_->taken += num_taken();
        }
        tally_ = tally;
        stretches_ = stretches;
        num_ = 2 * num_stretches;
        pools_[0] = static_cast<const char*>(keys);
        pools_[1] = static_cast<const char*>(values);
        row_bytes_ = row_bytes;
        for (int64_t member = 0; member < num_members_; ++member) next_[member].index = member;
    }

    // What this member has not asked for yet of its share, in the order in which it is read; none at the end.
    Lines next(int member) {
        int64_t& index = next_[member].index;
        if (index >= num_) return {nullptr, 0};
        int64_t n = index;
        index += num_members_;
        const Stretch& rows = stretches_[n / 2];
        return {pools_[n % 2] + rows.first * row_bytes_, (rows.count * row_bytes_ + Lines::BYTES - 1) / Lines::BYTES};
    }

  private:
    int64_t num_taken() const {
        int64_t sum = 0;
        for (int64_t member = 0; member < num_members_; ++member) sum += (next_[member].index - member) / num_members_;
        return sum;
    }

    struct alignas(64) Next {
        int64_t index = 0;
    };

    int64_t num_members_;
    std::vector<Next> next_;
    int64_t num_ = 0, row_bytes_ = 0;
    Tally* tally_ = nullptr;
    const Stretch* stretches_ = nullptr;
    const char* pools_[2] = {};
};

}  // namespace engine
