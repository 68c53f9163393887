// RMS norm, rotary embedding and gated SiLU, row by row: the same bits at every level.

#include <omp.h>

#include <algorithm>

#include "../memory.h"
#include "vec.h"

namespace {

using namespace pdmesh;

constexpr int kParts = kTreeLanes / kLanes;

// Up to kLanes values; zeros beyond `count`.
template <class Value>
Floats load_some(const Value* from, int64_t count) {
    return count >= kLanes ? load(from) : load_part(from, count);
}

template <class Value>
void store_some(Value* to, Floats values, int64_t count) {
    if (count >= kLanes)
        store(to, values);
    else
        store_part(to, values, count);
}

// One row: output = values / rms(values) * weight. `values(i, count)`: those from i on.
template <class Output, class Values>
void norm_row(const Values& values, const float* weight, Output* output, int64_t size, float epsilon) {
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
        store_some(output + i, values(i, count) * factor * load_some(weight + i, count), count);
    }
}

template <class Value>
void norm(
    const Value* rows, const float* weight, Value* output, int64_t num_rows, int64_t size, float epsilon,
    int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 16)
    for (int64_t row = 0; row < num_rows; ++row) {
        const Value* from = rows + row * size;
        norm_row(
            [=](int64_t i, int64_t count) { return load_some(from + i, count); }, weight, output + row * size, size,
            epsilon);
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
        norm_row(
            [=](int64_t i, int64_t count) { return load_some(sums + i, count); }, weight, output + row * size, size,
            epsilon);
    }
}

template <class Value>
void rotate_and_store(
    Value* qkv, const Value* cos, const Value* sin, const int64_t* slots, Value* cache, int64_t num_rows,
    int64_t num_heads, int64_t num_kv_heads, int64_t cache_heads, int64_t block_size, int64_t head_dim,
    int64_t num_threads) {
    const int64_t half = head_dim / 2, half_cache = cache_heads * block_size * head_dim;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 16)
    for (int64_t row = 0; row < num_rows; ++row) {
        Value* heads = qkv + row * (num_heads + 2 * num_kv_heads) * head_dim;
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
            const Floats silu = x / (exp2(x * splat(-kLog2E)) + 1.0f);
            store_some(output + row * size + i, silu * up, size - i);
        }
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
    /* Rotates queries in place, and rotates keys and copies values to the cache. A row of `qkv` is its query heads,   \
       key heads, value heads; cos and sin have head_dim / 2 columns. `slots`: block * block_size + offset. `cache`     \
       begins at the first of these key heads, of cache_heads. */                                                      \
    void pdmesh_rotate_and_store##suffix(                                                                              \
        Value* qkv, const Value* cos, const Value* sin, const int64_t* slots, Value* cache, int64_t num_rows,          \
        int64_t num_heads, int64_t num_kv_heads, int64_t cache_heads, int64_t block_size, int64_t head_dim,            \
        int64_t num_threads) {                                                                                         \
        rotate_and_store(                                                                                              \
            qkv, cos, sin, slots, cache, num_rows, num_heads, num_kv_heads, cache_heads, block_size, head_dim,         \
            num_threads);                                                                                              \
    }                                                                                                                  \
    /* output = silu(gate) * up; a row of gate_up is `size` gates, then `size` ups. */                                 \
    void pdmesh_gated_silu##suffix(                                                                                    \
        const Value* gate_up, Value* output, int64_t num_rows, int64_t size, int64_t num_threads) {                    \
        gated_silu(gate_up, output, num_rows, size, num_threads);                                                      \
    }

extern "C" {
int64_t pdmesh_interface() { return pdmesh::kInterface; }
PDMESH_ROWS(Bf16, )
PDMESH_ROWS(F16, _f16)
}
