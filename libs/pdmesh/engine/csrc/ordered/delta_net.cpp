// A layer of a gated delta net or of Mamba-2 between its matrix products, as in engine/delta_net.py, whose bits these
// are: a short convolution, normalised queries and keys, decays and updates, the recurrence, a norm and a gate.

#include <omp.h>

#include <vector>

#include "../memory.h"
#include "recurrence.h"
#include "rows.h"

namespace {

using namespace pdmesh;

constexpr int64_t kTileRows = 64;  // their channels and results stay in a cache between the stages
constexpr float kHeadEpsilon = 1e-6f;

// Rows of one sequence. `before` is its state before them, null for zeros; stops are in order, the last at the end. A
// state is the matrices of its heads, and behind these the latest inputs of the convolution.
struct Slice {
    int64_t row, num_tokens;
    const float* before;
    int64_t first_stop, num_stops;
};
static_assert(sizeof(Slice) == 5 * sizeof(int64_t) && sizeof(Stop) == 2 * sizeof(int64_t));

// Weights of a layer. `taps` are (taps, channels), the token's own first; `taps_bias` and `skip` may be null.
struct Weights {
    const float *taps, *taps_bias, *decay_rates, *decay_bias, *norm, *skip;
    int64_t num_taps;
    float epsilon;
};

// Sum of `size` values, a power of two, in a tree. They are overwritten.
inline float sum_halves(float* values, int64_t size) {
    for (int64_t half = size / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; ++i) values[i] += values[i + half];
    return values[0];
}

// Divide a head by its length, and multiply it by `scale`. `squares` has room for `size` values, a power of two.
inline void normalise(float* head, int64_t size, float scale, float* squares) {
    for (int64_t i = 0; i < size; ++i) squares[i] = head[i] * head[i];
    const float factor = 1.0f / std::sqrt(sum_halves(squares, size) + kHeadEpsilon);
    for (int64_t i = 0; i < size; ++i) head[i] = head[i] * factor * scale;
}

template <class Value>
struct Net {
    const Value* products;  // a row: gates of results, channels, and inputs of updates and decays
    Shape shape;
    Weights weights;

    int64_t num_steps() const { return shape.is_additive ? shape.num_heads : 2 * shape.num_heads; }
    const Value* gates(int64_t row) const {
        return products + row * (shape.num_results() + shape.num_channels() + num_steps());
    }

    // Call `use` with the inputs of the convolution of a slice's token `number`, if this is not before the sequence.
    template <class Use>
    void with_inputs(const Slice& slice, int64_t number, const Use& use) const {
        const int64_t num_channels = shape.num_channels(), kept = number + weights.num_taps - 1;
        if (number >= 0)
            use(gates(slice.row + number) + shape.num_results());
        else if (slice.before != nullptr)
            use(slice.before + shape.num_matrix_values() + kept * num_channels);
    }

    // Compute the channels, decays and updates of a slice's token.
    void prepare(
        const Slice& slice, int64_t number, float* channels, float* decay, float* beta, float* squares) const {
        const int64_t num_channels = shape.num_channels(), num_keys = shape.num_keys;
        std::fill_n(channels, num_channels, 0.0f);
        for (int64_t tap = 0; tap < weights.num_taps; ++tap)
            with_inputs(slice, number - tap, [&](const auto* inputs) {
                const float* factors = weights.taps + tap * num_channels;
                for (int64_t i = 0; i < num_channels; i += kLanes) {
                    const int64_t count = num_channels - i;
                    const Floats term = load_some(inputs + i, count) * load_some(factors + i, count);
                    store_some(channels + i, load_some(channels + i, count) + term, count);
                }
            });
        for (int64_t i = 0; i < num_channels; i += kLanes) {
            const int64_t count = num_channels - i;
            Floats total = load_some(channels + i, count);
            if (weights.taps_bias != nullptr) total += load_some(weights.taps_bias + i, count);
            store_some(channels + i, silu(total), count);
        }
        const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(num_keys)));
        for (int64_t head = 0; head < 2 * shape.num_key_heads && !shape.is_additive; ++head)
            normalise(channels + head * num_keys, num_keys, head < shape.num_key_heads ? scale : 1.0f, squares);

        const Value* updates = gates(slice.row + number) + shape.num_results() + num_channels;
        const Value* decays = updates + num_steps() - shape.num_heads;
        for (int64_t i = 0; i < shape.num_heads; i += kLanes) {
            const int64_t count = shape.num_heads - i;
            const Floats length = softplus(load_some(decays + i, count) + load_some(weights.decay_bias + i, count));
            const Floats rates = load_some(weights.decay_rates + i, count);
            store_some(decay + i, exp2(length * rates * splat(-kLog2E)), count);
            store_some(beta + i, shape.is_additive ? length : sigmoid(load_some(updates + i, count)), count);
        }
    }

    // Gate and normalise a row's results, or in an additive layer first add values.
    void finish(int64_t row, const float* channels, float* results, Value* output) const {
        const Value* gate = gates(row);
        const float* values = channels + 2 * shape.num_queries();
        for (int64_t head = 0; head < shape.num_heads && shape.is_additive; ++head)
            for (int64_t i = head * shape.num_values, end = i + shape.num_values; i < end; i += kLanes) {
                Floats result = load_some(results + i, end - i);
                if (weights.skip != nullptr) result += load_some(values + i, end - i) * splat(weights.skip[head]);
                store_some(results + i, result * silu(load_some(gate + i, end - i)), end - i);
            }
        const int64_t size = shape.is_additive ? shape.num_results() / shape.num_key_heads : shape.num_values;
        for (int64_t first = 0; first < shape.num_results(); first += size)
            norm_row(
                [=](int64_t i, int64_t count) { return load_some(results + first + i, count); },
                weights.norm + (shape.is_additive ? first : 0), size, weights.epsilon,
                [=](int64_t i, Floats normed, int64_t count) {
                    if (!shape.is_additive) normed = normed * silu(load_some(gate + first + i, count));
                    store_some(output + row * shape.num_results() + first + i, normed, count);
                });
    }

    // Write the latest inputs behind a slice's first tokens to their place in a state.
    void keep_inputs(const Slice& slice, const Stop& stop) const {
        const int64_t num_channels = shape.num_channels(), num_kept = weights.num_taps - 1;
        float* to = stop.state + shape.num_matrix_values();
        std::fill_n(to, num_kept * num_channels, 0.0f);
        for (int64_t kept = 0; kept < num_kept; ++kept)
            with_inputs(slice, stop.num_tokens - num_kept + kept, [&](const auto* inputs) {
                for (int64_t i = 0; i < num_channels; i += kLanes)
                    store_some(to + kept * num_channels + i, load_some(inputs + i, num_channels - i), num_channels - i);
            });
    }
};

template <class Value>
void delta_net(
    const Net<Value>& net, const Slice* slices, int64_t num_slices, const Stop* stops, Value* output, int64_t num_rows,
    int num_threads) {
    const Shape& shape = net.shape;
    const int64_t num_channels = shape.num_channels(), num_results = shape.num_results();
    const int64_t tile_rows = std::min(num_rows, kTileRows), num_matrix_values = shape.num_matrix_values();
    const auto channels = buffer<float>(tile_rows * num_channels), results = buffer<float>(tile_rows * num_results);
    const auto steps = buffer<float>(2 * tile_rows * shape.num_heads);
    const auto carries = buffer<float>(num_rows > tile_rows ? 2 * num_matrix_values : 0);
    float *decay = steps.get(), *beta = decay + tile_rows * shape.num_heads;
    const int64_t num_strips = (shape.num_values + kLanes - 1) / kLanes;
    std::vector<Part> parts;
    const Slice* slice_of[kTileRows];
    const Slice* slice = slices;
    for (int64_t first = 0; first < num_rows; first += tile_rows) {
        const int64_t end = std::min(num_rows, first + tile_rows);
        float* carry = carries.get() + first / tile_rows % 2 * num_matrix_values;  // the next tile reads this one
        const float* carried = carries.get() + (first / tile_rows + 1) % 2 * num_matrix_values;
        for (parts.clear(); slice != slices + num_slices; ++slice) {
            const int64_t begin = std::max(first, slice->row), slice_end = slice->row + slice->num_tokens;
            const int64_t num_before = begin - slice->row, num_tokens = std::min(end, slice_end) - begin;
            const Stop *stop = stops + slice->first_stop, *stops_end = stop + slice->num_stops;
            while (stop != stops_end && stop->num_tokens <= num_before) ++stop;
            std::fill_n(slice_of + begin - first, num_tokens, slice);
            parts.push_back(
                {begin - first, num_tokens, num_before, num_before ? carried : slice->before, stop, stops_end,
                 slice_end > end ? carry : nullptr});
            if (slice_end >= end) break;
        }
        if (slice != slices + num_slices && slice->row + slice->num_tokens == end) ++slice;
        const int64_t num_tasks = static_cast<int64_t>(parts.size()) * shape.num_heads;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
        {
            const auto strips = buffer<float>(num_strips * shape.num_keys * kLanes);
            const auto partial = buffer<float>(2 * shape.num_keys / kLeaves * kLanes);
#pragma omp for
            for (int64_t row = 0; row < end - first; ++row)
                net.prepare(
                    *slice_of[row], first + row - slice_of[row]->row, channels.get() + row * num_channels,
                    decay + row * shape.num_heads, beta + row * shape.num_heads, strips.get());
#pragma omp for schedule(dynamic) nowait
            for (int64_t task = 0; task < num_tasks; ++task)
                advance_head(
                    parts[task / shape.num_heads], {channels.get(), decay, beta}, results.get(), shape,
                    task % shape.num_heads, strips.get(), reinterpret_cast<Floats*>(partial.get()));
            fence();
#pragma omp barrier
#pragma omp for
            for (int64_t row = 0; row < end - first; ++row)
                net.finish(
                    first + row, channels.get() + row * num_channels, results.get() + row * num_results, output);
        }
    }
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
    for (int64_t number = 0; number < num_slices; ++number)
        for (int64_t stop = 0; stop < slices[number].num_stops; ++stop)
            net.keep_inputs(slices[number], stops[slices[number].first_stop + stop]);
}

}  // namespace

// For bf16, and with a suffix for float16 and fp32. Rows of `products` and `output` (rows, heads * values) are
// contiguous, and slices are one behind the other. `num_keys` is a power of two, and at least kLeaves.
#define PDMESH_DELTA_NET(Value, suffix)                                                                                \
    void pdmesh_delta_net##suffix(                                                                                     \
        const Value* products, const void* slices, int64_t num_slices, const void* stops, Value* output,               \
        int64_t num_rows, const float* taps, const float* taps_bias, const float* decay_rates,                         \
        const float* decay_bias, const float* norm, const float* skip, int64_t num_taps, int64_t num_key_heads,        \
        int64_t num_heads, int64_t num_keys, int64_t num_values, int64_t is_additive, int64_t tiles_heads,             \
        float epsilon, int64_t num_threads) {                                                                          \
        const Shape shape{num_key_heads, num_heads, num_keys, num_values, is_additive != 0, tiles_heads != 0};         \
        const Weights weights{taps, taps_bias, decay_rates, decay_bias, norm, skip, num_taps, epsilon};                \
        delta_net(                                                                                                     \
            Net<Value>{products, shape, weights}, static_cast<const Slice*>(slices), num_slices,                       \
            static_cast<const Stop*>(stops), output, num_rows, static_cast<int>(num_threads));                         \
    }

extern "C" {
PDMESH_DELTA_NET(Bf16, )
PDMESH_DELTA_NET(F16, _f16)
PDMESH_DELTA_NET(float, _f32)
}
