// Rows of any size, in vectors: what kernels of rows share.
#pragma once

#include "vec.h"

namespace pdmesh {

constexpr int kParts = kTreeLanes / kLanes;

// Up to kLanes values; zeros beyond `count`.
template <class Value>
inline Floats load_some(const Value* from, int64_t count) {
    return count >= kLanes ? load(from) : load_part(from, count);
}

template <class Value>
inline void store_some(Value* to, Floats values, int64_t count) {
    if (count >= kLanes)
        store(to, values);
    else
        store_part(to, values, count);
}

// One row: values / rms(values) * weight. `values(i, count)`: those from i on; `put(i, results, count)` takes results.
template <class Values, class Put>
inline void norm_row(const Values& values, const float* weight, int64_t size, float epsilon, const Put& put) {
    Floats squares[kParts] = {};
    for (int64_t first = 0; first < size; first += kTreeLanes)
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
            const int64_t i = first + part * kLanes, count = size - i;
            if (count <= 0) break;
            const Floats value = values(i, count);
            squares[part] = squares[part] + value * value;
        }
    const Floats factor = splat(1.0f / std::sqrt(sum16(squares) / static_cast<float>(size) + epsilon));
    for (int64_t i = 0; i < size; i += kLanes) {
        const int64_t count = size - i;
        put(i, values(i, count) * factor * load_some(weight + i, count), count);
    }
}

}  // namespace pdmesh
