// RMS norm, rotary embedding and gated SiLU, row by row; and what this processor can do.

#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>

#include "../memory.h"
#include "tiles.h"

using namespace pdmesh;

namespace {

template <class Value, class Result>
void norm_row(const Value* row, const float* weight, Result* output, int64_t size, float epsilon) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) {
        const __m512 value = widen(row + i);
        squares = _mm512_fmadd_ps(value, value, squares);
    }
    const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / size + epsilon));
    for (int64_t i = 0; i < size; i += 16)
        narrow(output + i, _mm512_mul_ps(_mm512_mul_ps(widen(row + i), factor), widen(weight + i)));
}

}  // namespace

extern "C" {

// 0: this processor lacks what the kernels need; 1: AVX-512 with BF16; 2: AMX too. To be called first.
int pdmesh_prepare() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512bf16"))
        return 0;
    // Linux grants the tiles' state to a process that asks (ARCH_REQ_XCOMP_PERM, XTILEDATA); others get an error.
    has_amx = __builtin_cpu_supports("amx-bf16") && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return has_amx ? 2 : 1;
}

// For tests: do without AMX, or with it again.
void pdmesh_use_amx(int use) { has_amx = use; }

// hidden += delta (unless null); output = hidden / rms(hidden) * weight. Rows of `size` values, a multiple of 16.
void pdmesh_add_norm(
    float* hidden, const float* delta, const float* weight, bf16* output, int64_t num_rows, int64_t size, float epsilon,
    int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 16)
    for (int64_t row = 0; row < num_rows; ++row) {
        float* sums = hidden + row * size;
        for (int64_t i = 0; delta != nullptr && i < size; i += 16)
            _mm512_storeu_ps(sums + i, _mm512_add_ps(widen(sums + i), widen(delta + row * size + i)));
        norm_row(sums, weight, output + row * size, size, epsilon);
    }
}

// output = rows / rms(rows) * weight; rows and output are in fp32 if `is_wide`.
void pdmesh_norm(
    const void* rows, int64_t is_wide, const float* weight, void* output, int64_t num_rows, int64_t size,
    float epsilon, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 16)
    for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t at = row * size;
        if (is_wide)
            norm_row(static_cast<const float*>(rows) + at, weight, static_cast<float*>(output) + at, size, epsilon);
        else
            norm_row(static_cast<const bf16*>(rows) + at, weight, static_cast<bf16*>(output) + at, size, epsilon);
    }
}

// Normalises heads in place; rows are `stride` values apart.
void pdmesh_norm_heads(
    bf16* rows, int64_t stride, const float* weight, int64_t num_rows, int64_t num_heads, int64_t head_dim,
    float epsilon, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 16)
    for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t head = 0; head < num_heads; ++head) {
            bf16* values = rows + row * stride + head * head_dim;
            norm_row(values, weight, values, head_dim, epsilon);
        }
}

// Rotates queries in place, and rotates keys and copies values to the cache. A row of `qkv` is its query heads, key
// heads, value heads, and `stride` values behind, the next; cos and sin have head_dim / 2 columns, a multiple of 16.
// `slots`: block * block_size + offset. `cache` begins at the first of these key heads, of cache_heads.
void pdmesh_rotate_and_store(
    bf16* qkv, int64_t stride, const bf16* cos, const bf16* sin, const int64_t* slots, bf16* cache, int64_t num_rows,
    int64_t num_heads, int64_t num_kv_heads, int64_t cache_heads, int64_t block_size, int64_t head_dim,
    int64_t num_threads) {
    const int64_t half = head_dim / 2;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 16)
    for (int64_t row = 0; row < num_rows; ++row) {
        bf16* heads = qkv + row * stride;
        const int64_t block = slots[row] / block_size, offset = slots[row] % block_size;
        const int64_t half_cache = cache_heads * block_size * head_dim;
        bf16* keys = cache + block * 2 * half_cache + offset * head_dim;
        for (int64_t head = 0; head < num_heads + num_kv_heads; ++head) {
            const bf16* from = heads + head * head_dim;
            bf16* to = head < num_heads ? heads + head * head_dim : keys + (head - num_heads) * block_size * head_dim;
            for (int64_t i = 0; i < half; i += 16) {
                const __m512 first = widen(from + i), second = widen(from + half + i);
                const __m512 c = widen(cos + row * half + i), s = widen(sin + row * half + i);
                narrow(to + i, _mm512_fmsub_ps(first, c, _mm512_mul_ps(second, s)));
                narrow(to + half + i, _mm512_fmadd_ps(second, c, _mm512_mul_ps(first, s)));
            }
        }
        for (int64_t head = 0; head < num_kv_heads; ++head)
            std::memcpy(
                keys + half_cache + head * block_size * head_dim,
                heads + (num_heads + num_kv_heads + head) * head_dim, head_dim * sizeof(bf16));
    }
}

// output = silu(gate) * up; a row of gate_up is `size` gates, then `size` ups.
void pdmesh_gated_silu(const bf16* gate_up, bf16* output, int64_t num_rows, int64_t size, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 16)
    for (int64_t row = 0; row < num_rows; ++row) {
        const bf16* gate = gate_up + row * 2 * size;
        for (int64_t i = 0; i < size; i += 16) {
            const __m512 x = widen(gate + i);
            const __m512 inverse = exp2(_mm512_mul_ps(x, _mm512_set1_ps(-kLog2E)));
            const __m512 silu = _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), inverse));
            narrow(output + row * size + i, _mm512_mul_ps(silu, widen(gate + size + i)));
        }
    }
}

// rows *= sigmoid(gates); rows of gates are `stride` values apart, and `size` is a multiple of 16.
void pdmesh_gate(
    bf16* rows, const bf16* gates, int64_t stride, int64_t num_rows, int64_t size, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 16)
    for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t i = 0; i < size; i += 16) {
            const __m512 inverse = exp2(_mm512_mul_ps(widen(gates + row * stride + i), _mm512_set1_ps(-kLog2E)));
            bf16* values = rows + row * size + i;
            narrow(values, _mm512_div_ps(widen(values), _mm512_add_ps(_mm512_set1_ps(1.0f), inverse)));
        }
}

int64_t pdmesh_interface() { return pdmesh::kInterface; }

}  // extern "C"
