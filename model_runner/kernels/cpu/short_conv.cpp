// The gated short convolution of state layers: out = C * (taps of B * x), over runs of tokens with states.
//
// A piece of work is some channels of all runs, in their order: so a run may start from a state that an earlier one has
// stored, and the bits of a token do not depend on the pieces. B * x is rounded, because states are; the rest is rounded
// once.

#include <cstring>

#include "parallel.h"
#include "program.h"
#include "simd.h"
#include "state_runs.h"

namespace engine {
namespace {

template <class T>
struct Conv {
    const T *bcx, *weight, *bias;  // bias: may be null
    T* slots;
    const int64_t* plan;
    T* out;
    int64_t size;
    int taps;

    // 16 channels from `at` on. TAPS: the number of taps, or 0: any number.
    template <int TAPS>
    void vector(int64_t at) const {
        const int num = TAPS ? TAPS : taps, kept = num - 1;
        f32x16 weights[TAPS ? TAPS : MAX_TAPS], columns[TAPS ? TAPS : MAX_TAPS];
        for (int j = 0; j < num; ++j) weights[j] = load(weight + j * size + at);
        f32x16 start = bias == nullptr ? f32x16{} : load(bias + at);
        const Run* runs = runs_of(plan);
        for (int64_t n = 0; n < plan[0]; ++n) {
            const T* from = slots + runs[n].load * kept * size + at;
            for (int j = 0; j < kept; ++j) columns[j] = load(from + j * size);
            for (int64_t token = runs[n].first; token < runs[n].last; ++token) {
                const T* row = bcx + token * 3 * size + at;
                columns[kept] = as_stored(load(row) * load(row + 2 * size));
                f32x16 sum = start;
                for (int j = 0; j < num; ++j) sum += weights[j] * columns[j];
                store(out + token * size + at, sum * load(row + size));
                for (int j = 0; j < kept; ++j) columns[j] = columns[j + 1];
            }
            T* to = slots + runs[n].store * kept * size + at;
            for (int j = 0; j < kept; ++j) store(to + j * size, columns[j]);
        }
    }

    void channel(int64_t at) const {
        const int kept = taps - 1;
        float columns[MAX_TAPS];
        const Run* runs = runs_of(plan);
        for (int64_t n = 0; n < plan[0]; ++n) {
            const T* from = slots + runs[n].load * kept * size + at;
            for (int j = 0; j < kept; ++j) columns[j] = to_float(from[j * size]);
            for (int64_t token = runs[n].first; token < runs[n].last; ++token) {
                const T* row = bcx + token * 3 * size + at;
                T input;
                from_float(to_float(row[0]) * to_float(row[2 * size]), &input);
                columns[kept] = to_float(input);
                float sum = bias == nullptr ? 0.0f : to_float(bias[at]);
                for (int j = 0; j < taps; ++j) sum += to_float(weight[j * size + at]) * columns[j];
                from_float(sum * to_float(row[size]), out + token * size + at);
                for (int j = 0; j < kept; ++j) columns[j] = columns[j + 1];
            }
            T* to = slots + runs[n].store * kept * size + at;
            for (int j = 0; j < kept; ++j) from_float(columns[j], to + j * size);
        }
    }

    void channels(int64_t begin, int64_t end) const {
        int64_t at = begin;
        for (; at + LANES <= end; at += LANES) {
            if (taps == 3)
                vector<3>(at);
            else if (taps == 4)
                vector<4>(at);
            else
                vector<0>(at);
        }
        for (; at < end; ++at) channel(at);
    }

  private:
    static f32x16 as_stored(f32x16 v) {
        if constexpr (sizeof(T) == sizeof(float))
            return v;
        else
            return rounded(v);
    }
};

template <class T>
void short_conv(const Conv<T>& conv, int64_t num_tokens) {
    int64_t vectors = (conv.size + LANES - 1) / LANES;
    int64_t grain = rows_per_thread(LANES * (num_tokens > 0 ? num_tokens : 1));
    parallel_for(vectors, grain, [&](int64_t begin, int64_t end) {
        conv.channels(begin * LANES, end * LANES < conv.size ? end * LANES : conv.size);
    });
}

}  // namespace
}  // namespace engine

// bcx: [tokens, 3, size]; weight: [taps, size], 2 to 64 taps; slots: [.., taps - 1, size]; out: [tokens, size]; all
// bfloat16 if `is_bf16`, else float32. plan: see `state_runs.py`.
EXPORT void short_conv(const void* bcx, const void* weight, const void* bias, void* slots, const int64_t* plan, void* out,
                       int64_t num_tokens, int64_t size, int64_t taps, int is_bf16) {
    using namespace engine;
    if (is_bf16)
        short_conv(Conv<bf16>{static_cast<const bf16*>(bcx), static_cast<const bf16*>(weight),
                              static_cast<const bf16*>(bias), static_cast<bf16*>(slots), plan, static_cast<bf16*>(out),
                              size, int(taps)},
                   num_tokens);
    else
        short_conv(Conv<float>{static_cast<const float*>(bcx), static_cast<const float*>(weight),
                               static_cast<const float*>(bias), static_cast<float*>(slots), plan, static_cast<float*>(out),
                               size, int(taps)},
                   num_tokens);
}

RECORDABLE(short_conv)
