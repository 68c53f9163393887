// The gated delta rule and Mamba-2's additive rule, token by token. A task is a strip of columns of one head's matrix, whose columns are
// independent. A column's sums over keys are trees, as in engine/recurrence.py, whose bits these are.

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "../memory.h"
#include "vec.h"

namespace {

using namespace pdmesh;

constexpr int64_t kColumns = 16;  // of a strip: no width of vectors is larger
constexpr int64_t kVectors = kColumns / kLanes;
constexpr int64_t kLeaves = 8;  // of a tree's lowest three levels, which stay in registers

// Rows of one sequence. `before` is its state before them, null for zeros; stops are in order, the last at the end.
struct Slice {
    int64_t row, num_tokens;
    const float* before;
    int64_t first_stop, num_stops;
};
struct Stop {
    int64_t num_tokens;
    float* state;
};
static_assert(sizeof(Slice) == 5 * sizeof(int64_t) && sizeof(Stop) == 2 * sizeof(int64_t));

struct Shape {
    int64_t num_key_heads, num_heads, num_keys, num_values;
    bool is_additive;
};

// What a token brings to one head, and the next token.
struct Token {
    const float *query, *key, *value;
    float decay, beta;
};

// Sum of `num_groups` partial sums in a tree; they are overwritten.
inline Floats sum_groups(Floats* sums, int64_t num_groups) {
    for (int64_t apart = num_groups / 2; apart > 0; apart /= 2)
        for (int64_t i = 0; i < apart; ++i) sums[i] += sums[i + apart];
    return sums[0];
}

// For each key, `term` is called once, and gives kSums terms. Returns the trees' sums in `sums`. `partial` has room for
// kSums * num_keys / kLeaves vectors.
template <int kSums, class Term>
inline void sum_over_keys(int64_t num_keys, Floats* partial, Floats (&sums)[kSums], Term term) {
    const int64_t num_groups = num_keys / kLeaves;
    for (int64_t i = 0; i < num_groups; ++i) {
        Floats outer[kSums], inner[kSums], pair[kSums], leaf[kSums];
        const auto add_pair = [&](int64_t leaf_number, Floats(&to)[kSums]) {
            term(i + num_groups * leaf_number, to);
            term(i + num_groups * (leaf_number + kLeaves / 2), leaf);
            for (int s = 0; s < kSums; ++s) to[s] += leaf[s];
        };
        add_pair(0, outer);
        add_pair(2, pair);
        for (int s = 0; s < kSums; ++s) outer[s] += pair[s];
        add_pair(1, inner);
        add_pair(3, pair);
        for (int s = 0; s < kSums; ++s) partial[s * num_groups + i] = outer[s] + (inner[s] + pair[s]);
    }
    for (int s = 0; s < kSums; ++s) sums[s] = sum_groups(partial + s * num_groups, num_groups);
}

// A strip of a matrix: kColumns values of each key. One vector of columns is advanced at a time.
struct Strip {
    float* values;
    int64_t num_keys;
    Floats* partial;

    // Let the strip decay from `from`, whose keys are `stride` apart, and return its product with the key.
    Floats begin(const float* from, int64_t stride, const Token& token, int64_t first) const {
        Floats sums[1];
        const Floats decay = splat(token.decay);
        sum_over_keys(num_keys, partial, sums, [&](int64_t i, Floats(&terms)[1]) {
            const Floats decayed = load(from + i * stride + first) * decay;
            store(values + i * kColumns + first, decayed);
            terms[0] = decayed * splat(token.key[i]);
        });
        return sums[0];
    }

    // Add a token's change, and return the product with its query.
    Floats finish(const Token& token, Floats delta, int64_t first) const {
        Floats sums[1];
        sum_over_keys(num_keys, partial, sums, [&](int64_t i, Floats(&terms)[1]) {
            float* at = values + i * kColumns + first;
            const Floats changed = load(at) + splat(token.key[i]) * delta;
            store(at, changed);
            terms[0] = changed * splat(token.query[i]);
        });
        return sums[0];
    }

    // `finish` a token and `begin` the next one.
    void advance(const Token& token, const Token& next, Floats delta, int64_t first, Floats (&sums)[2]) const {
        const Floats decay = splat(next.decay);
        sum_over_keys(num_keys, partial, sums, [&](int64_t i, Floats(&terms)[2]) {
            float* at = values + i * kColumns + first;
            const Floats changed = load(at) + splat(token.key[i]) * delta;
            terms[0] = changed * splat(token.query[i]);
            const Floats decayed = changed * decay;
            store(at, decayed);
            terms[1] = decayed * splat(next.key[i]);
        });
    }

    // Let the strip decay from `from`, whose keys are `stride` apart, add a token's change, and return the product with
    // its query.
    Floats add(const float* from, int64_t stride, const Token& token, Floats delta, int64_t first) const {
        Floats sums[1];
        const Floats decay = splat(token.decay);
        sum_over_keys(num_keys, partial, sums, [&](int64_t i, Floats(&terms)[1]) {
            const Floats changed = load(from + i * stride + first) * decay + splat(token.key[i]) * delta;
            store(values + i * kColumns + first, changed);
            terms[0] = changed * splat(token.query[i]);
        });
        return sums[0];
    }
};

// Copy columns of a matrix into a strip, or out of it.
inline void copy_in(float* values, const float* from, int64_t num_keys, int64_t stride, int64_t count) {
    std::fill_n(values, num_keys * kColumns, 0.0f);
    if (from != nullptr)
        for (int64_t i = 0; i < num_keys; ++i) std::memcpy(values + i * kColumns, from + i * stride, count * sizeof(float));
}
inline void copy_out(const float* values, float* to, int64_t num_keys, int64_t stride, int64_t count) {
    for (int64_t i = 0; i < num_keys; ++i) std::memcpy(to + i * stride, values + i * kColumns, count * sizeof(float));
}

struct Inputs {
    const float *query, *key, *value, *decay, *beta;
};

// Advance a strip of `count` columns of one head over a slice's rows.
void advance_strip(
    const Slice& slice, const Stop* stops, const Inputs& inputs, float* output, const Shape& shape, int64_t head,
    int64_t column, float* values, Floats* partial) {
    const int64_t num_keys = shape.num_keys, num_values = shape.num_values;
    const int64_t count = std::min(kColumns, num_values - column), key_head = head * shape.num_key_heads / shape.num_heads;
    const int64_t first_of_head = head * num_keys * num_values + column;
    const bool is_whole = count == kColumns;
    const Strip strip{values, num_keys, partial};
    const auto token_of = [&](int64_t number) {
        const int64_t row = slice.row + number, of_key = (row * shape.num_key_heads + key_head) * num_keys;
        const int64_t of_head = row * shape.num_heads + head;
        return Token{
            inputs.query + of_key, inputs.key + of_key, inputs.value + of_head * num_values + column,
            inputs.decay[of_head], inputs.beta[of_head]};
    };
    const float* from = slice.before == nullptr ? nullptr : slice.before + first_of_head;
    int64_t stride = num_values;
    if (from == nullptr || !is_whole) {
        copy_in(values, from, num_keys, stride, count);
        from = values, stride = kColumns;
    }
    const Stop *stop = stops + slice.first_stop, *stops_end = stop + slice.num_stops;
    Floats products[kVectors];
    bool has_begun = false;
    for (int64_t number = 0; number < slice.num_tokens; ++number) {
        const Token token = token_of(number);
        const bool is_stop = stop != stops_end && stop->num_tokens == number + 1;
        const bool is_last = number + 1 == slice.num_tokens;
        float* to = output + ((slice.row + number) * shape.num_heads + head) * num_values + column;
        for (int64_t v = 0; v < kVectors; ++v) {
            const int64_t first = v * kLanes, left = std::min<int64_t>(kLanes, count - first);
            if (left <= 0) break;
            const Floats value = left == kLanes ? load(token.value + first) : load_part(token.value + first, left);
            if (!has_begun && !shape.is_additive) products[v] = strip.begin(from, stride, token, first);
            const Floats delta = (shape.is_additive ? value : value - products[v]) * splat(token.beta);
            Floats sums[2];
            if (shape.is_additive)
                sums[0] = strip.add(from, stride, token, delta, first);
            else if (is_stop || is_last)
                sums[0] = strip.finish(token, delta, first);
            else {
                strip.advance(token, token_of(number + 1), delta, first, sums);
                products[v] = sums[1];
            }
            if (left == kLanes)
                store(to + first, sums[0]);
            else
                store_part(to + first, sums[0], left);
        }
        has_begun = !is_stop;
        from = values, stride = kColumns;
        if (is_stop) {
            copy_out(values, stop->state + first_of_head, num_keys, num_values, count);
            ++stop;
        }
    }
}

}  // namespace

extern "C" {

// Query and key are (rows, key heads, keys), value and output (rows, heads, values), decay and beta (rows, heads).
// `num_keys` is a power of two, and at least kLeaves. An additive rule adds a value whatever its key already gives.
void pdmesh_recurrence(
    const void* slices, int64_t num_slices, const void* stops, const float* query, const float* key, const float* value,
    const float* decay, const float* beta, float* output, int64_t num_key_heads, int64_t num_heads, int64_t num_keys,
    int64_t num_values, int64_t is_additive, int64_t num_threads) {
    const Shape shape{num_key_heads, num_heads, num_keys, num_values, is_additive != 0};
    const Inputs inputs{query, key, value, decay, beta};
    const int64_t num_strips = (num_values + kColumns - 1) / kColumns, num_each = num_heads * num_strips;
    const int64_t num_tasks = num_slices * num_each;
    const int threads = static_cast<int>(std::min(num_threads, num_tasks));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const auto values = buffer<float>(num_keys * kColumns);
        const auto partial = buffer<float>(2 * num_keys / kLeaves * kLanes);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < num_tasks; ++task)
            advance_strip(
                static_cast<const Slice*>(slices)[task / num_each], static_cast<const Stop*>(stops), inputs, output, shape,
                task % num_each / num_strips, task % num_strips * kColumns, values.get(),
                reinterpret_cast<Floats*>(partial.get()));
    }
}
}
