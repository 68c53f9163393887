// Merging of attention over ranges of keys: each row's results, in the order of the ranges.

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "../logarithm.h"
#include "../memory.h"
#include "vec.h"

namespace {

using namespace pdmesh;

// Results of some rows over one range, in fp32: outputs (heads x head_dim a row) and log-sum-exps (heads a row). Those of
// row `rows[i]` are at `rows[i] - first`. No row is in `rows` twice.
struct Part {
    const float* output;
    const float* lse;  // -inf: the row sees nothing of the range
    const int64_t* rows;
    int64_t num_rows, first;
};
static_assert(sizeof(Part) == 5 * sizeof(int64_t));

// The first `count` (at most kLanes) values; zeros in the other lanes.
inline Floats load_some(const float* from, int64_t count) {
    return count == kLanes ? load(from) : load_part(from, count);
}

template <class Value>
inline void store_some(Value* to, Floats values, int64_t count) {
    if (count == kLanes)
        store(to, values);
    else
        store_part(to, values, count);
}

template <class Value>
void merge(
    const Part* parts, int64_t num_parts, Value* output, float* lse, int64_t num_rows, int64_t num_heads,
    int64_t head_dim, int64_t num_threads) {
    const int64_t num_sums = num_rows * num_heads, size = num_heads * head_dim;
    const auto peaks = buffer<float>(num_sums), totals = buffer<float>(num_sums), outputs = buffer<float>(num_rows * size);
    std::fill_n(peaks.get(), num_sums, -INFINITY);
    std::fill_n(totals.get(), num_sums, 0.0f);
    std::fill_n(outputs.get(), num_rows * size, 0.0f);
    const int threads = static_cast<int>(std::min(num_threads, num_rows));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        for (int64_t number = 0; number < num_parts; ++number) {
            const Part& part = parts[number];
#pragma omp for
            for (int64_t i = 0; i < part.num_rows; ++i) {
                const float* sums = part.lse + (part.rows[i] - part.first) * num_heads;
                float* peak = peaks.get() + part.rows[i] * num_heads;
                for (int64_t head = 0; head < num_heads; ++head)
                    peak[head] = sums[head] > peak[head] ? sums[head] : peak[head];
            }
        }
        for (int64_t number = 0; number < num_parts; ++number) {
            const Part& part = parts[number];
#pragma omp for
            for (int64_t i = 0; i < part.num_rows; ++i) {
                const int64_t row = part.rows[i], place = row - part.first;
                for (int64_t head = 0; head < num_heads; ++head) {
                    const int64_t at = row * num_heads + head;
                    const float distance = part.lse[place * num_heads + head] - peaks[at];
                    const Floats weight = exp2(splat(distance * kLog2E));
                    totals[at] += weight[0];
                    const float* from = part.output + place * size + head * head_dim;
                    float* to = outputs.get() + at * head_dim;
                    for (int64_t dim = 0; dim < head_dim; dim += kLanes) {
                        const int64_t count = std::min<int64_t>(kLanes, head_dim - dim);
                        store_some(to + dim, load_some(to + dim, count) + load_some(from + dim, count) * weight, count);
                    }
                }
            }
        }
#pragma omp for
        for (int64_t at = 0; at < num_sums; ++at) {
            const Floats share = splat(1.0f / totals[at]);
            const float* from = outputs.get() + at * head_dim;
            for (int64_t dim = 0; dim < head_dim; dim += kLanes) {
                const int64_t count = std::min<int64_t>(kLanes, head_dim - dim);
                store_some(output + at * head_dim + dim, load_some(from + dim, count) * share, count);
            }
            if (lse != nullptr) lse[at] = peaks[at] + natural_log(totals[at]);
        }
    }
}

}  // namespace

// Each row is in a part whose log-sum-exp is finite. `lse` may be null.
#define PDMESH_MERGE(Value, suffix)                                                                                    \
    void pdmesh_merge##suffix(                                                                                         \
        const void* parts, int64_t num_parts, Value* output, float* lse, int64_t num_rows, int64_t num_heads,          \
        int64_t head_dim, int64_t num_threads) {                                                                       \
        merge(                                                                                                         \
            static_cast<const Part*>(parts), num_parts, output, lse, num_rows, num_heads, head_dim, num_threads);      \
    }

extern "C" {
PDMESH_MERGE(Bf16, )
PDMESH_MERGE(F16, _f16)
}
