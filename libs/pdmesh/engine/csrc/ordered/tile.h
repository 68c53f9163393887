// A tile of up to six query rows against a block of keys: scores, weights, weighted sums of values. Every sum is one
// lane's, over dims or keys in order, so that a row's bits depend on nothing but its own context.
#pragma once

#include <utility>

#include "../strips.h"
#include "pages.h"

namespace pdmesh {

constexpr int kTileRows = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
// Scores of one row. Not a power of two: a row's weights would all lie in one bank of the first-level cache (Zen 3: a
// quarter of the products' speed).
constexpr int kScores = kKeyBlock + std::max(kLanes, 8);
constexpr float kMasked = -3e38f;  // scores of keys that come later than the row; below any other
constexpr float kLowest = -1e37f;  // a maximum before any key was seen

// Whether sums of R rows by N vectors stay in registers, beside factors or vectors and what is loaded.
constexpr bool fits(int R, int N) { return R * N + std::min(R, N) + 2 <= kRegisters; }
// Vectors side by side, for R rows.
template <int R>
constexpr int kVectors = fits(R, 8) ? 8 : fits(R, 4) ? 4 : 2;

// sums (R x N) += factors (R) times vectors (N), two of which are loaded at once; whichever are fewer stay in registers.
template <int R, int N, class Factor, class Load>
inline void accumulate(const Factor& factor, const Load& load_two, Floats (&sums)[R][N]) {
    if constexpr (R < N) {
        Floats factors[R];
#pragma GCC unroll 6
        for (int row = 0; row < R; ++row) factors[row] = splat(factor(row));
#pragma GCC unroll 4
        for (int n = 0; n < N; n += 2) {
            Floats first, second;
            load_two(n, first, second);
#pragma GCC unroll 6
            for (int row = 0; row < R; ++row) {
                sums[row][n] = multiply_add(factors[row], first, sums[row][n]);
                sums[row][n + 1] = multiply_add(factors[row], second, sums[row][n + 1]);
            }
        }
    } else {
        Floats vectors[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n += 2) load_two(n, vectors[n], vectors[n + 1]);
#pragma GCC unroll 6
        for (int row = 0; row < R; ++row) {
            const Floats value = splat(factor(row));
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sums[row][n] = multiply_add(value, vectors[n], sums[row][n]);
        }
    }
}

// scores (R x kScores), N vectors a row: query (head_dim x R) times panels of keys, (head_dim x kPanel) each.
template <int R, int N>
inline void score(const float* query, const float* keys, int64_t head_dim, float* scores) {
    Floats sums[R][N];
#pragma GCC unroll 6
    for (int row = 0; row < R; ++row)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) sums[row][n] = Floats{};
    const int64_t panel_size = head_dim * kPanel;
    for (int64_t dim = 0; dim < head_dim; ++dim, query += R, keys += kPanel)
        accumulate<R, N>(
            [&](int row) { return query[row]; },
            [&](int n, Floats& first, Floats& second) {
                first = load(keys + n / 2 * panel_size);
                second = load(keys + n / 2 * panel_size + kLanes);
            },
            sums);
#pragma GCC unroll 6
    for (int row = 0; row < R; ++row)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store(scores + row * kScores + n * kLanes, sums[row][n]);
}

// output (R x stride), N vectors a row in the order of `load_both`: weights (R x kScores) times `count` rows of
// values, from `dim` on, while the same dims of rows `ahead` (unless null) are on their way. Part: of two vectors, only
// the first `num_dims` values are there.
template <int R, int N, bool Part, class Value>
inline void gather(
    const Value* const* values, int count, int64_t dim, int64_t num_dims, const float* weights, float* output,
    int64_t stride, const Value* const* ahead) {
    Floats sums[R][N];
#pragma GCC unroll 6
    for (int row = 0; row < R; ++row)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) sums[row][n] = Floats{};
    for (int key = 0; key < count; ++key, ++weights) {
        const Value* from = values[key] + dim;
        if (ahead != nullptr) prefetch_values(ahead[key] + dim, N * kLanes);
        Value part[2 * kLanes] = {};
        if (Part) {
            std::memcpy(part, from, num_dims * sizeof(Value));
            from = part;
        }
        accumulate<R, N>(
            [&](int row) { return weights[row * kScores]; },
            [&](int n, Floats& first, Floats& second) { load_both(from + n * kLanes, first, second); }, sums);
    }
#pragma GCC unroll 6
    for (int row = 0; row < R; ++row)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store(output + row * stride + n * kLanes, sums[row][n]);
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

// Scores squeezed into -cap ... cap: cap * tanh(score / cap).
inline void squeeze(float* scores, int count, float cap) {
    for (int key = 0; key < count; key += kLanes) {
        const Floats power = exp2(load(scores + key) * splat(2 * kLog2E / cap));  // tanh(x) = 1 - 2 / (e^2x + 1)
        store(scores + key, splat(cap) - splat(2 * cap) / (power + 1.0f));
    }
}

// One row's scores of `count` keys, of which it sees those from `first` to `seen`, become weights, up to the next
// multiple of 16; their sums by lane of 16 are added to `sums`, and what was summed before is to be multiplied by what is
// returned.
inline float weigh(float* scores, int count, int first, int seen, float factor, float& maximum, float* sums) {
    const int end = (count + kTreeLanes - 1) / kTreeLanes * kTreeLanes;
    for (int key = 0; key < first; key += kLanes) {
        const Ints unseen = lane_numbers() + key < splat(first);
        store(scores + key, select(unseen, splat(kMasked), load(scores + key)));
    }
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
