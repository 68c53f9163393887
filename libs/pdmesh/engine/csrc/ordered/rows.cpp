// RMS norm, rotary embedding, gated SiLU and short convolutions, row by row: the same bits at every level.

#include <omp.h>

#include <algorithm>

#include "../memory.h"
#include "rows.h"

namespace {

using namespace pdmesh;

template <class Value>
void norm(
    const Value* rows, const float* weight, Value* output, int64_t num_rows, int64_t size, float epsilon,
    int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 16)
    for (int64_t row = 0; row < num_rows; ++row) {
        const Value* from = rows + row * size;
        Value* to = output + row * size;
        norm_row(
            [=](int64_t i, int64_t count) { return load_some(from + i, count); }, weight, size, epsilon,
            [=](int64_t i, Floats normed, int64_t count) { store_some(to + i, normed, count); });
    }
}

template <class Value>
void add_norm(
    float* hidden, const float* delta, const float* weight, Value* output, int64_t num_rows, int64_t size,
    float epsilon, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 16)
    for (int64_t row = 0; row < num_rows; ++row) {
        float* sums = hidden + row * size;
        for (int64_t i = 0; delta != nullptr && i < size; i += kLanes) {
            const int64_t count = size - i;
            const Floats sum = load_some(sums + i, count) + load_some(delta + row * size + i, count);
            store_some(sums + i, with_one_nan(sum), count);
        }
        Value* to = output + row * size;
        norm_row(
            [=](int64_t i, int64_t count) { return load_some(sums + i, count); }, weight, size, epsilon,
            [=](int64_t i, Floats normed, int64_t count) { store_some(to + i, normed, count); });
    }
}

template <class Value>
void norm_heads(
    Value* rows, int64_t stride, const float* weight, int64_t num_rows, int64_t num_heads, int64_t head_dim,
    float epsilon, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 16)
    for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t head = 0; head < num_heads; ++head) {
            Value* values = rows + row * stride + head * head_dim;
            norm_row(
                [=](int64_t i, int64_t count) { return load_some(values + i, count); }, weight, head_dim, epsilon,
                [=](int64_t i, Floats normed, int64_t count) { store_some(values + i, normed, count); });
        }
}

template <class Value>
void rotate_and_store(
    Value* qkv, int64_t stride, const Value* cos, const Value* sin, const int64_t* slots, Value* cache,
    int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t cache_heads, int64_t block_size, int64_t head_dim,
    int64_t num_threads) {
    const int64_t half = head_dim / 2, half_cache = cache_heads * block_size * head_dim;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 16)
    for (int64_t row = 0; row < num_rows; ++row) {
        Value* heads = qkv + row * stride;
        Value* keys = cache + slots[row] / block_size * 2 * half_cache + slots[row] % block_size * head_dim;
        for (int64_t head = 0; head < num_heads + num_kv_heads; ++head) {
            const Value* from = heads + head * head_dim;
            Value* to = head < num_heads ? heads + head * head_dim : keys + (head - num_heads) * block_size * head_dim;
            for (int64_t i = 0; i < half; i += kLanes) {
                const int64_t count = half - i;
                const Floats first = load_some(from + i, count), second = load_some(from + half + i, count);
                const Floats c = load_some(cos + row * half + i, count), s = load_some(sin + row * half + i, count);
                store_some(to + i, first * c - second * s, count);
                store_some(to + half + i, second * c + first * s, count);
            }
        }
        for (int64_t head = 0; head < num_kv_heads; ++head)
            std::memcpy(
                keys + half_cache + head * block_size * head_dim,
                heads + (num_heads + num_kv_heads + head) * head_dim, head_dim * sizeof(Value));
    }
}

template <class Value>
void gated_silu(const Value* gate_up, Value* output, int64_t num_rows, int64_t size, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 16)
    for (int64_t row = 0; row < num_rows; ++row) {
        const Value* gate = gate_up + row * 2 * size;
        for (int64_t i = 0; i < size; i += kLanes) {
            const Floats x = load_some(gate + i, size - i), up = load_some(gate + size + i, size - i);
            store_some(output + row * size + i, silu(x) * up, size - i);
        }
    }
}

template <class Value>
void gate(
    Value* rows, const Value* gates, int64_t stride, int64_t num_rows, int64_t size, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 16)
    for (int64_t row = 0; row < num_rows; ++row) {
        Value* values = rows + row * size;
        for (int64_t i = 0; i < size; i += kLanes) {
            const Floats factor = sigmoid(load_some(gates + row * stride + i, size - i));
            store_some(values + i, load_some(values + i, size - i) * factor, size - i);
        }
    }
}

// Where a layer's cache has the channels of a short convolution's inputs: one half in place of keys, one of values.
struct ConvCache {
    int64_t num_heads, cache_heads, block_size, head_dim;
    int64_t size() const { return 2 * num_heads * head_dim; }

    // Call `each` with the place of some channels of a slot, their number, and the first.
    template <class Each>
    void over_channels(int64_t slot, const Each& each) const {
        const int64_t half_cache = cache_heads * block_size * head_dim;
        const int64_t first = slot / block_size * 2 * half_cache + slot % block_size * head_dim;
        for (int64_t head = 0; head < 2 * num_heads; ++head) {
            const int64_t at = first + head / num_heads * half_cache + head % num_heads * block_size * head_dim;
            for (int64_t i = 0; i < head_dim; i += kLanes) each(at + i, head_dim - i, head * head_dim + i);
        }
    }
};

template <class Value>
void store_gated(
    const Value* products, const int64_t* slots, Value* cache, int64_t num_rows, const ConvCache& places,
    int64_t num_threads) {
    const int64_t size = places.size();
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 16)
    for (int64_t row = 0; row < num_rows; ++row) {
        const Value *gate = products + row * 3 * size, *inputs = gate + 2 * size;
        places.over_channels(slots[row], [&](int64_t at, int64_t count, int64_t i) {
            store_some(cache + at, load_some(gate + i, count) * load_some(inputs + i, count), count);
        });
    }
}

template <class Value>
void short_conv(
    const Value* products, const Value* cache, const int64_t* earlier, int64_t num_earlier, const float* factors,
    const float* bias, Value* output, int64_t num_rows, int64_t num_taps, const ConvCache& places,
    int64_t num_threads) {
    const int64_t size = places.size();
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 16)
    for (int64_t row = 0; row < num_rows; ++row) {
        const Value* gate = products + (row * 3 + 1) * size;
        const int64_t* slots = earlier + row * num_earlier;
        places.over_channels(0, [&](int64_t at, int64_t count, int64_t i) {
            count = std::min<int64_t>(count, kLanes);
            Floats total = {};
            for (int64_t tap = 0; tap < num_taps; ++tap) {
                if (slots[tap] < 0) continue;
                const int64_t block_values = 2 * places.cache_heads * places.block_size * places.head_dim;
                const int64_t moved = slots[tap] / places.block_size * block_values +
                                      slots[tap] % places.block_size * places.head_dim;
                total += load_some(cache + at + moved, count) * load_some(factors + tap * size + i, count);
            }
            if (bias != nullptr) total += load_some(bias + i, count);
            store_some(output + row * size + i, load_some(gate + i, count) * total, count);
        });
    }
}

}  // namespace

// Each function for bf16, and with the suffix _f16 for float16.
#define PDMESH_ROWS(Value, suffix)                                                                                     \
    /* hidden += delta (unless null); output = hidden / rms(hidden) * weight. Rows of `size` values. */                \
    void pdmesh_add_norm##suffix(                                                                                      \
        float* hidden, const float* delta, const float* weight, Value* output, int64_t num_rows, int64_t size,         \
        float epsilon, int64_t num_threads) {                                                                          \
        add_norm(hidden, delta, weight, output, num_rows, size, epsilon, num_threads);                                 \
    }                                                                                                                  \
    /* output = rows / rms(rows) * weight; rows and output are in fp32 if `is_wide`. */                                \
    void pdmesh_norm##suffix(                                                                                          \
        const void* rows, int64_t is_wide, const float* weight, void* output, int64_t num_rows, int64_t size,          \
        float epsilon, int64_t num_threads) {                                                                          \
        if (is_wide)                                                                                                   \
            norm(                                                                                                      \
                static_cast<const float*>(rows), weight, static_cast<float*>(output), num_rows, size, epsilon,         \
                num_threads);                                                                                          \
        else                                                                                                           \
            norm(                                                                                                      \
                static_cast<const Value*>(rows), weight, static_cast<Value*>(output), num_rows, size, epsilon,         \
                num_threads);                                                                                          \
    }                                                                                                                  \
    /* Normalises heads in place; rows are `stride` values apart. */                                                   \
    void pdmesh_norm_heads##suffix(                                                                                    \
        Value* rows, int64_t stride, const float* weight, int64_t num_rows, int64_t num_heads, int64_t head_dim,       \
        float epsilon, int64_t num_threads) {                                                                          \
        norm_heads(rows, stride, weight, num_rows, num_heads, head_dim, epsilon, num_threads);                         \
    }                                                                                                                  \
    /* Rotates queries in place, and rotates keys and copies values to the cache. A row of `qkv` is its query heads,   \
       key heads, value heads, and `stride` values behind, the next; cos and sin have head_dim / 2 columns. `slots`:   \
       block * block_size + offset. `cache` begins at the first of these key heads, of cache_heads. */                 \
    void pdmesh_rotate_and_store##suffix(                                                                              \
        Value* qkv, int64_t stride, const Value* cos, const Value* sin, const int64_t* slots, Value* cache,            \
        int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t cache_heads, int64_t block_size,            \
        int64_t head_dim, int64_t num_threads) {                                                                       \
        rotate_and_store(                                                                                              \
            qkv, stride, cos, sin, slots, cache, num_rows, num_heads, num_kv_heads, cache_heads, block_size, head_dim, \
            num_threads);                                                                                              \
    }                                                                                                                  \
    /* rows *= sigmoid(gates); rows of gates are `stride` values apart. */                                             \
    void pdmesh_gate##suffix(                                                                                          \
        Value* rows, const Value* gates, int64_t stride, int64_t num_rows, int64_t size, int64_t num_threads) {        \
        gate(rows, gates, stride, num_rows, size, num_threads);                                                        \
    }                                                                                                                  \
    /* output = silu(gate) * up; a row of gate_up is `size` gates, then `size` ups. */                                 \
    void pdmesh_gated_silu##suffix(                                                                                    \
        const Value* gate_up, Value* output, int64_t num_rows, int64_t size, int64_t num_threads) {                    \
        gated_silu(gate_up, output, num_rows, size, num_threads);                                                      \
    }                                                                                                                  \
    /* Gated inputs go to their slots. A row of products is gates of inputs, gates of results, and inputs. */          \
    void pdmesh_store_gated##suffix(                                                                                   \
        const Value* products, const int64_t* slots, Value* cache, int64_t num_rows, int64_t num_kv_heads,             \
        int64_t cache_heads, int64_t block_size, int64_t head_dim, int64_t num_threads) {                              \
        store_gated(products, slots, cache, num_rows, {num_kv_heads, cache_heads, block_size, head_dim}, num_threads); \
    }                                                                                                                  \
    /* output = gates of results * (sum of earlier inputs * factors + bias, unless null). A row of `earlier` has the   \
       slots of the token and of those before, -1 before the first. */                                                 \
    void pdmesh_short_conv##suffix(                                                                                    \
        const Value* products, const Value* cache, const int64_t* earlier, int64_t num_earlier, const float* factors,  \
        const float* bias, Value* output, int64_t num_rows, int64_t num_taps, int64_t num_kv_heads,                    \
        int64_t cache_heads, int64_t block_size, int64_t head_dim, int64_t num_threads) {                              \
        const ConvCache places{num_kv_heads, cache_heads, block_size, head_dim};                                       \
        short_conv(                                                                                                    \
            products, cache, earlier, num_earlier, factors, bias, output, num_rows, num_taps, places, num_threads);    \
    }

extern "C" {
int64_t pdmesh_interface() { return pdmesh::kInterface; }
PDMESH_ROWS(Bf16, )
PDMESH_ROWS(F16, _f16)
}
