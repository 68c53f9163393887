// The gated delta rule and Mamba-2's additive rule, token by token. Strips of columns of a head's matrix are advanced
// one after the other: columns are independent. A column's sums over keys are trees, as in engine/recurrence.py, whose bits these are.
#pragma once

#include <algorithm>
#include <cstring>

#include "rows.h"

namespace pdmesh {

constexpr int64_t kLeaves = 8;  // of a tree's lowest three levels, which stay in registers

// A state to write behind so many of a slice's tokens.
struct Stop {
    int64_t num_tokens;
    float* state;
};

// Rows of one sequence in a tile. `before` is the state before them, null for zeros; `num_before` tokens of the slice
// are in earlier tiles. `carry` takes the state behind the rows, unless they are the slice's last.
struct Part {
    int64_t row, num_tokens, num_before;
    const float* before;
    const Stop *stop, *stops_end;
    float* carry;
};

struct Shape {
    int64_t num_key_heads, num_heads, num_keys, num_values;
    bool is_additive, tiles_heads;

    int64_t num_queries() const { return num_key_heads * num_keys; }
    int64_t num_results() const { return num_heads * num_values; }
    int64_t num_channels() const { return 2 * num_queries() + num_results(); }
    int64_t num_matrix_values() const { return num_results() * num_keys; }
    int64_t key_head_of(int64_t head) const {
        return tiles_heads ? head % num_key_heads : head * num_key_heads / num_heads;
    }
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

// For each key, `term` is called once with the key and its place in a strip, and gives kSums terms. Returns the trees'
// sums in `sums`. `partial` has room for kSums * num_keys / kLeaves vectors.
template <int kSums, class Term>
inline void sum_over_keys(int64_t num_keys, Floats* partial, Floats (&sums)[kSums], Term term) {
    const int64_t num_groups = num_keys / kLeaves;
    for (int64_t i = 0; i < num_groups; ++i) {
        Floats outer[kSums], inner[kSums], pair[kSums], leaf[kSums];
        const auto add_pair = [&](int64_t leaf_number, Floats(&to)[kSums]) {
            const int64_t other = leaf_number + kLeaves / 2;
            term(i + num_groups * leaf_number, i * kLeaves + leaf_number, to);
            term(i + num_groups * other, i * kLeaves + other, leaf);
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

// A strip of a matrix: a vector of columns for each key. The keys of a tree's leaves are neighbours: stores to places
// 4,096 bytes apart would hold up loads.
struct Strip {
    float* values;
    int64_t num_keys;
    Floats* partial;

    // Let the strip decay, and return its product with the key.
    Floats begin(const Token& token) const {
        Floats sums[1];
        const Floats decay = splat(token.decay);
        sum_over_keys(num_keys, partial, sums, [&](int64_t key, int64_t place, Floats(&terms)[1]) {
            float* at = values + place * kLanes;
            const Floats decayed = load(at) * decay;
            store(at, decayed);
            terms[0] = decayed * splat(token.key[key]);
        });
        return sums[0];
    }

    // Add a token's change, and return the product with its query.
    Floats finish(const Token& token, Floats delta) const {
        Floats sums[1];
        sum_over_keys(num_keys, partial, sums, [&](int64_t key, int64_t place, Floats(&terms)[1]) {
            float* at = values + place * kLanes;
            const Floats changed = load(at) + splat(token.key[key]) * delta;
            store(at, changed);
            terms[0] = changed * splat(token.query[key]);
        });
        return sums[0];
    }

    // `finish` a token and `begin` the next one.
    void advance(const Token& token, const Token& next, Floats delta, Floats (&sums)[2]) const {
        const Floats decay = splat(next.decay);
        sum_over_keys(num_keys, partial, sums, [&](int64_t key, int64_t place, Floats(&terms)[2]) {
            float* at = values + place * kLanes;
            const Floats changed = load(at) + splat(token.key[key]) * delta;
            terms[0] = changed * splat(token.query[key]);
            const Floats decayed = changed * decay;
            store(at, decayed);
            terms[1] = decayed * splat(next.key[key]);
        });
    }

    // Let the strip decay, add a token's change, and return the product with its query.
    Floats add(const Token& token, Floats delta) const {
        Floats sums[1];
        const Floats decay = splat(token.decay);
        sum_over_keys(num_keys, partial, sums, [&](int64_t key, int64_t place, Floats(&terms)[1]) {
            float* at = values + place * kLanes;
            const Floats changed = load(at) * decay + splat(token.key[key]) * delta;
            store(at, changed);
            terms[0] = changed * splat(token.query[key]);
        });
        return sums[0];
    }
};

inline int64_t place_of(int64_t key, int64_t num_keys) {
    const int64_t num_groups = num_keys / kLeaves;
    return key % num_groups * kLeaves + key / num_groups;
}

// Copy a matrix into strips side by side, zeros without a matrix, or out of them. Matrices are read and written from
// end to end, which is how memory is fast.
inline void copy_in(float* strips, const float* from, int64_t num_keys, int64_t num_values) {
    const int64_t num_strips = (num_values + kLanes - 1) / kLanes;
    if (from == nullptr) {
        std::fill_n(strips, num_strips * num_keys * kLanes, 0.0f);
        return;
    }
    for (int64_t i = 0; i < num_keys; ++i)
        for (int64_t column = 0; column < num_values; column += kLanes)
            store(
                strips + column * num_keys + place_of(i, num_keys) * kLanes,
                load_some(from + i * num_values + column, num_values - column));
}
inline void copy_out(const float* strips, float* to, int64_t num_keys, int64_t num_values, bool streams) {
    streams = streams && num_values % kLanes == 0 && reinterpret_cast<uintptr_t>(to) % sizeof(Floats) == 0;
    for (int64_t i = 0; i < num_keys; ++i)
        for (int64_t column = 0; column < num_values; column += kLanes) {
            const Floats values = load(strips + column * num_keys + place_of(i, num_keys) * kLanes);
            if (streams)
                stream(to + i * num_values + column, values);
            else
                store_some(to + i * num_values + column, values, num_values - column);
        }
}

// Of a tile's rows: queries, keys and values of all heads, decays and updates.
struct Inputs {
    const float *channels, *decay, *beta;
};

// Advance a vector of columns of one head over the part's tokens from `begin` to `end`.
inline void advance_strip(
    const Part& part, const Inputs& inputs, float* output, const Shape& shape, int64_t head, int64_t column,
    int64_t begin, int64_t end, const Strip& strip) {
    const int64_t num_queries = shape.num_queries(), of_key = shape.key_head_of(head) * shape.num_keys;
    const int64_t of_value = head * shape.num_values + column, left = shape.num_values - column;
    const auto token_of = [&](int64_t number) {
        const int64_t row = part.row + number, of_head = row * shape.num_heads + head;
        const float *channels = inputs.channels + row * shape.num_channels(), *query = channels + of_key;
        const float* value = channels + 2 * num_queries + of_value;
        return Token{query, query + num_queries, value, inputs.decay[of_head], inputs.beta[of_head]};
    };
    Floats sums[2] = {};
    if (!shape.is_additive) sums[1] = strip.begin(token_of(begin));
    for (int64_t number = begin; number < end; ++number) {
        const Token token = token_of(number);
        const Floats value = load_some(token.value, left);
        const Floats delta = (shape.is_additive ? value : value - sums[1]) * splat(token.beta);
        if (shape.is_additive)
            sums[0] = strip.add(token, delta);
        else if (number + 1 == end)
            sums[0] = strip.finish(token, delta);
        else
            strip.advance(token, token_of(number + 1), delta, sums);
        store_some(output + (part.row + number) * shape.num_results() + of_value, sums[0], left);
    }
}

// Advance one head over a part's rows. `strips` has room for the head's matrix.
inline void advance_head(
    const Part& part, const Inputs& inputs, float* output, const Shape& shape, int64_t head, float* strips,
    Floats* partial) {
    const int64_t num_keys = shape.num_keys, num_values = shape.num_values, of_head = head * num_keys * num_values;
    copy_in(strips, part.before == nullptr ? nullptr : part.before + of_head, num_keys, num_values);
    const Stop* stop = part.stop;
    for (int64_t begin = 0, end; begin < part.num_tokens; begin = end) {
        end = stop == part.stops_end ? part.num_tokens : std::min(part.num_tokens, stop->num_tokens - part.num_before);
        for (int64_t column = 0; column < num_values; column += kLanes)
            advance_strip(
                part, inputs, output, shape, head, column, begin, end,
                {strips + column * num_keys, num_keys, partial});
        if (stop != part.stops_end && stop->num_tokens == part.num_before + end)
            copy_out(strips, stop++->state + of_head, num_keys, num_values, true);
    }
    if (part.carry != nullptr) copy_out(strips, part.carry + of_head, num_keys, num_values, false);
}

}  // namespace pdmesh
