// A tile of up to six query rows against a block of keys: scores, weights, weighted sums of values. Every sum is one
// lane's, over dims or keys in order, so that a row's bits depend on nothing but its own context.
#pragma once

#include <type_traits>
#include <utility>

#include "pages.h"

namespace pdmesh {

constexpr int kTileRows = 6;
// Vectors that a product sums in registers, of 16 or (AVX-512, NEON) 32.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSums = 24;
#else
constexpr int kSums = 12;
#endif
constexpr float kMasked = -3e38f;  // scores of keys that come later than the row; below any other
constexpr float kLowest = -1e37f;  // a maximum before any key was seen

// Vectors side by side, for R rows.
template <int R>
constexpr int kVectors = R * 4 <= kSums ? 4 : 2;

// Calls with the number of rows, 1 ... kTileRows, as a constant.
template <class Call>
inline void with_rows(int num_rows, const Call& call) {
    switch (num_rows) {
        case 1: return call(std::integral_constant<int, 1>());
        case 2: return call(std::integral_constant<int, 2>());
        case 3: return call(std::integral_constant<int, 3>());
        case 4: return call(std::integral_constant<int, 4>());
        case 5: return call(std::integral_constant<int, 5>());
        default: return call(std::integral_constant<int, 6>());
    }
}

// scores (R x kKeyBlock), N vectors a row: query (head_dim x R) times keys (head_dim x kPanel).
template <int R, int N>
inline void score(const float* query, const float* keys, int64_t head_dim, float* scores) {
    Floats sums[R][N];
#pragma GCC unroll 6
    for (int row = 0; row < R; ++row)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[row][n] = Floats{};
    for (int64_t dim = 0; dim < head_dim; ++dim, query += R, keys += kPanel) {
        Floats vectors[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) vectors[n] = load(keys + n * kLanes);
#pragma GCC unroll 6
        for (int row = 0; row < R; ++row) {
            const Floats value = splat(query[row]);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sums[row][n] = multiply_add(value, vectors[n], sums[row][n]);
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < R; ++row)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) store(scores + row * kKeyBlock + n * kLanes, sums[row][n]);
}

// output (R x stride), N vectors a row: weights (R x kKeyBlock) times `count` rows of values, from `dim` on. Part: a
// row has fewer values than a vector.
template <int R, int N, bool Part, class Value>
inline void gather(
    const Value* const* values, int count, int64_t dim, int64_t head_dim, const float* weights, float* output,
    int64_t stride) {
    Floats sums[R][N];
#pragma GCC unroll 6
    for (int row = 0; row < R; ++row)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[row][n] = Floats{};
    for (int key = 0; key < count; ++key, ++weights) {
        Floats vectors[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
            vectors[n] = Part ? load_part(values[key], head_dim) : load(values[key] + dim + n * kLanes);
#pragma GCC unroll 6
        for (int row = 0; row < R; ++row) {
            const Floats weight = splat(weights[row * kKeyBlock]);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sums[row][n] = multiply_add(weight, vectors[n], sums[row][n]);
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < R; ++row)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) store(output + row * stride + dim + n * kLanes, sums[row][n]);
}

// 2^x for x <= 0 to 3e-6, rounded to 13 bits: its product with a float16 or bf16 value is exact. 1 for 0; 0 below -60.
inline Floats weight_of(Floats x) {
    const Floats bounded = max(x, splat(-64.0f)), magic = splat(0x1.8p23f);  // which leaves no fraction
    const Floats shifted = bounded + magic, part = bounded - (shifted - magic);
    Floats y = splat(0.00958285f);
    y = y * part + 0.05590643f;
    y = y * part + 0.24024099f;
    y = y * part + 0.69312419f;
    y = y * part + 1.0f;
    const Ints bits = as_ints(y) + (as_ints(shifted) << 23);
    return as_floats((bits + 0x400) & ~0x7ff & (x >= splat(-60.0f)));
}

// One row's scores of `count` keys, of which it sees `seen`, become weights, up to the next multiple of 16; their sums
// by lane of 16 are added to `sums`, and what was summed before is to be multiplied by what is returned.
inline float weigh(float* scores, int count, int seen, float factor, float& maximum, float* sums) {
    const int end = (count + kTreeLanes - 1) / kTreeLanes * kTreeLanes;
    for (int key = seen < 0 ? 0 : seen / kLanes * kLanes; key < end; key += kLanes) {
        const Ints later = lane_numbers() + key >= splat(seen);
        store(scores + key, select(later, splat(kMasked), load(scores + key)));
    }
    Floats peaks = splat(maximum);
    for (int key = 0; key < end; key += kLanes) peaks = max(load(scores + key), peaks);
    const float peak = max_lane(peaks);
    const float shrink = peak > maximum ? exp2(splat((maximum - peak) * factor))[0] : 1.0f;
    maximum = peak;
    Floats parts[kTreeLanes / kLanes] = {};
    for (int key = 0; key < end; key += kTreeLanes)
#pragma GCC unroll 4
        for (int part = 0; part < kTreeLanes / kLanes; ++part) {
            float* at = scores + key + part * kLanes;
            const Floats weight = weight_of((load(at) - splat(peak)) * splat(factor));
            store(at, weight);
            parts[part] = parts[part] + weight;
        }
#pragma GCC unroll 4
    for (int part = 0; part < kTreeLanes / kLanes; ++part) {
        float* at = sums + part * kLanes;
        store(at, load(at) * splat(shrink) + parts[part]);
    }
    return shrink;
}

}  // namespace pdmesh
