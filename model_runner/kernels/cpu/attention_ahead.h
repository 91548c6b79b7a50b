// What stream items fetch from memory before they use it.
//
// Always so many rows ahead (16 are 6 KB for 3 heads of 64 in bfloat16), evenly, in the order of addresses: a core waits
// for only so many lines of memory at a time, and rows come fastest where neighbours come together.

#pragma once

#include <algorithm>

#include "attention_plan.h"
#include "simd.h"

namespace engine {

constexpr int64_t ROWS_AHEAD = FETCH_INTO == 3 ? 16 : 32;  // the second-level cache has room for more

// Some of the slot table.
struct Rows {
    const int32_t* slots;
    int64_t count;
};

// Fetches, while the rows of one part are used, those of them that are more than ROWS_AHEAD away, and then so many of the
// next part. Spread evenly over so many turns.
template <class KV>
class FetchAhead {
  public:
    // Rows of one of the pools; `scales` are null where it has none.
    struct Part {
        const KV* pool;
        const float* scales;
        Rows rows;
    };

    FetchAhead(const Step& step, Part now, Part next, int64_t turns)
        : row_numbers_(step.num_kv_heads * step.head_dim),
          num_scales_(step.num_kv_heads),
          turns_(turns),
          now_(now),
          next_(next) {
        int64_t near = std::min(now.rows.count, ROWS_AHEAD);
        now_.rows = {now.rows.slots + near, now.rows.count - near};
        next_.rows.count = std::min(next.rows.count, ROWS_AHEAD);
        num_ = now_.rows.count + next_.rows.count;
    }

    void turn() {
        for (due_ += num_; due_ >= turns_; due_ -= turns_) {
            if (ROWS_AHEAD < KEY_BLOCK && now_.rows.count > 0)
                fetch_row(now_);
            else if (next_.rows.count > 0)
                fetch_row(next_);
        }
    }

  private:
    void fetch_row(Part& part) {
        int64_t slot = *part.rows.slots++;
        --part.rows.count;
        const char* row = reinterpret_cast<const char*>(part.pool + slot * row_numbers_);
        const int64_t bytes = row_numbers_ * int64_t(sizeof(KV));
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, FETCH_INTO);
        if constexpr (sizeof(KV) == 1) __builtin_prefetch(part.scales + slot * num_scales_, 0, FETCH_INTO);
    }

    int64_t row_numbers_, num_scales_, turns_, num_, due_ = 0;
    Part now_, next_;
};

}  // namespace engine
