// Products of small matrices of bf16 in fp32: by AMX tiles where the processor has them, else by AVX-512.
#pragma once

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace pdmesh {

constexpr int kStep = 32;  // bf16 values that one tile product contracts over
constexpr int kTileValues = kTile * kStep;

inline bool has_amx = false;  // set by pdmesh_prepare

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Before and after the products of one thread.
__attribute__((target("amx-tile"))) inline void configure_tiles() {
    // Not on the stack: GCC does not see that the intrinsic reads all of it.
    static const TileConfig config;
    if (has_amx) _tile_loadconfig(&config);
}

__attribute__((target("amx-tile"))) inline void release_tiles() {
    if (has_amx) _tile_release();
}

// Two tiles of rows of a left operand: row-major, `stride` bytes apart; the next kStep columns are `step` values on.
struct Left {
    const bf16* tile[2];
    int stride;
    int step;
};

// What a product does between its steps when there is nothing to do.
struct Nothing {
    void operator()(int) const {}
};

// c (32 x 16Q) [+]= left (32 x 32 steps) * right; right holds, for each step and each of the Q column tiles, pairs of
// rows interleaved. `beside(step)` is vector work for the processor to do while its tile unit multiplies; it may read
// what c held before.
template <int Q, class Beside>
__attribute__((target("amx-tile,amx-bf16"))) void multiply_amx(
    const Left& left, const bf16* right, float* c, int steps, bool accumulate, const Beside& beside) {
    constexpr int row_bytes = Q * kTile * sizeof(float);
    float* lower = c + kTile * Q * kTile;
    if (accumulate) {
        _tile_loadd(0, c, row_bytes);
        _tile_loadd(2, lower, row_bytes);
        if (Q == 2) {
            _tile_loadd(1, c + kTile, row_bytes);
            _tile_loadd(3, lower + kTile, row_bytes);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int step = 0; step < steps; ++step, right += Q * kTileValues) {
        _tile_loadd(4, left.tile[0] + step * left.step, left.stride);
        _tile_loadd(6, right, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, left.tile[1] + step * left.step, left.stride);
        _tile_dpbf16ps(2, 5, 6);
        if (Q == 2) {
            _tile_loadd(7, right + kTileValues, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        beside(step);
    }
    _tile_stored(0, c, row_bytes);
    _tile_stored(2, lower, row_bytes);
    if (Q == 2) {
        _tile_stored(1, c + kTile, row_bytes);
        _tile_stored(3, lower + kTile, row_bytes);
    }
}

template <int Q>
void multiply_avx512(const Left& left, const bf16* right, float* c, int steps, bool accumulate) {
    constexpr int kRows = 8;  // times Q accumulators, all in registers
    for (int first = 0; first < 2 * kTile; first += kRows) {
        float* out = c + first * Q * kTile;
        __m512 sums[kRows][Q];
        for (int row = 0; row < kRows; ++row)
            for (int q = 0; q < Q; ++q)
                sums[row][q] = accumulate ? _mm512_load_ps(out + (row * Q + q) * kTile) : _mm512_setzero_ps();
        const char* rows = reinterpret_cast<const char*>(left.tile[first / kTile]) + first % kTile * left.stride;
        for (int step = 0; step < steps; ++step) {
            const char* a = rows + step * left.step * sizeof(bf16);
            for (int pair = 0; pair < kTile; ++pair) {
                __m512bh b[Q];
                for (int q = 0; q < Q; ++q)
                    b[q] = (__m512bh)_mm512_load_si512(right + (step * Q + q) * kTileValues + pair * kStep);
                for (int row = 0; row < kRows; ++row) {
                    int32_t values;
                    std::memcpy(&values, a + row * left.stride + pair * 4, 4);
                    const __m512bh both = (__m512bh)_mm512_set1_epi32(values);
                    for (int q = 0; q < Q; ++q) sums[row][q] = _mm512_dpbf16_ps(sums[row][q], both, b[q]);
                }
            }
        }
        for (int row = 0; row < kRows; ++row)
            for (int q = 0; q < Q; ++q) _mm512_store_ps(out + (row * Q + q) * kTile, sums[row][q]);
    }
}

template <int Q, class Beside = Nothing>
inline void multiply(
    const Left& left, const bf16* right, float* c, int steps, bool accumulate, const Beside& beside = {}) {
    if (has_amx) {
        multiply_amx<Q>(left, right, c, steps, accumulate, beside);
        return;
    }
    for (int step = 0; step < steps; ++step) beside(step);
    multiply_avx512<Q>(left, right, c, steps, accumulate);
}

// c (16 x 16N, row-major with `stride` values) += left (16 x 32 steps, a tile for each step) * right, which holds
// N tiles for each step, `right_step` values apart.
template <int N>
__attribute__((target("amx-tile,amx-bf16"))) void multiply_flat_amx(
    const bf16* left, const bf16* right, int right_step, float* c, int stride, int steps) {
    const int row_bytes = stride * static_cast<int>(sizeof(float));
    _tile_loadd(0, c, row_bytes);
    _tile_loadd(1, c + kTile, row_bytes);
    if (N == 4) {
        _tile_loadd(2, c + 2 * kTile, row_bytes);
        _tile_loadd(3, c + 3 * kTile, row_bytes);
    }
    for (int step = 0; step < steps; ++step, right += right_step) {
        _tile_loadd(4, left + step * kTileValues, 64);
        _tile_loadd(5, right, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, right + kTileValues, 64);
        _tile_dpbf16ps(1, 4, 6);
        if (N == 4) {
            _tile_loadd(7, right + 2 * kTileValues, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_loadd(5, right + 3 * kTileValues, 64);
            _tile_dpbf16ps(3, 4, 5);
        }
    }
    _tile_stored(0, c, row_bytes);
    _tile_stored(1, c + kTile, row_bytes);
    if (N == 4) {
        _tile_stored(2, c + 2 * kTile, row_bytes);
        _tile_stored(3, c + 3 * kTile, row_bytes);
    }
}

}  // namespace pdmesh
