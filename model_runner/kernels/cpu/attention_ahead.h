// Prefetch of stream items.
//
// The prefetch distance is a fixed number of rows (16 rows are 6 KB for 3 heads of 64 in bfloat16), spread evenly, in
// the order of addresses: a core can wait for only a limited number of cache lines, and neighboring lines arrive
// fastest.

#pragma once

#include <algorithm>

#include "attention_plan.h"
#include "fetch.h"

namespace engine {

constexpr int64_t ROWS_AHEAD = FETCH_INTO == 3 ? 16 : KEY_BLOCK;  // more when prefetching into L2, which is larger
constexpr int64_t FIRST_LEVEL_BYTES = 32 << 10;                   // prefetched rows of at most this size go to L1

// A range of the slot table.
struct Rows {
    const int32_t* slots;
    int64_t count;
};

// While the rows of one part are used, prefetches those of them that are more than ROWS_AHEAD away, then ROWS_AHEAD
// rows of the next part. The prefetches are spread over `turns` calls of turn(). A further call would read past the
// slot table.
template <class KV>
class FetchAhead {
  public:
    // Rows of one pool; `scales` is null if the pool has none.
    struct Part {
        const KV* pool;
        const float* scales;
        Rows rows;
    };

    FetchAhead(const Step& step, const Part& now, const Part& next, int64_t turns)
        : row_numbers_(step.num_kv_heads * step.head_dim),
          num_scales_(step.num_kv_heads),
          turns_(turns),
          into_first_level_(FETCH_INTO == 3 || (READS_AHEAD && ROWS_AHEAD * row_bytes() <= FIRST_LEVEL_BYTES)),
          next_(next) {
        int64_t near = std::min(now.rows.count, ROWS_AHEAD);
        next_.rows.count = std::min(next.rows.count, ROWS_AHEAD);
        num_ = now.rows.count - near + next_.rows.count;
        begin(now, near);
    }

    inline __attribute__((always_inline)) void turn() {
        for (due_ += num_; due_ >= turns_; due_ -= turns_) {
            if (slot_ == end_) begin(next_, 0);
            fetch_row(*slot_++);
        }
    }

  private:
    static constexpr int64_t LINE_BYTES = 64;

    int64_t row_bytes() const { return row_numbers_ * int64_t(sizeof(KV)); }

    void begin(const Part& part, int64_t first) {
        slot_ = part.rows.slots + first;
        end_ = part.rows.slots + part.rows.count;
        pool_ = part.pool;
        scales_ = part.scales;
    }

    inline __attribute__((always_inline)) void fetch_row(int64_t slot) const {
        const char* row = reinterpret_cast<const char*>(pool_ + slot * row_numbers_);
        const char* end = row + row_bytes();
        if (into_first_level_)
            for (; row < end; row += LINE_BYTES) fetch<3>(row);
        else
            for (; row < end; row += LINE_BYTES) fetch<2>(row);
        if constexpr (sizeof(KV) == 1) fetch(scales_ + slot * num_scales_);
    }

    int64_t row_numbers_, num_scales_, turns_, num_, due_ = 0;
    bool into_first_level_;
    const int32_t *slot_, *end_;
    const KV* pool_;
    const float* scales_;
    Part next_;
};

}  // namespace engine
