// What goes into the products of linear layers, and comes out of them.
#pragma once

#include "tiles.h"

namespace pdmesh {

constexpr int kPanel = 2 * kTile;           // outputs that one product computes
constexpr int kPanelStep = kPanel * kStep;  // values of a panel that one step multiplies
constexpr int kRows = 8;                    // without AMX: times two accumulators, all in registers

// Rows first ... first + 15 as left operand: a tile for each 32 inputs; zeros beyond num_rows.
inline void pack_rows(const bf16* rows, int64_t first, int64_t num_rows, int64_t num_inputs, bf16* tiles) {
    for (int64_t row = first; row < first + kTile; ++row, tiles += kStep)
        for (int64_t k = 0; k < num_inputs; k += kStep)
            _mm512_store_si512(
                tiles + k / kStep * kTileValues,
                row < num_rows ? _mm512_loadu_si512(rows + row * num_inputs + k) : _mm512_setzero_si512());
}

// low and high (R rows of 16 outputs) += a pair of inputs of each row, times a line of either tile of a panel.
template <int R>
__attribute__((always_inline)) inline void multiply_pair(
    const bf16* inputs, __m512bh lower, __m512bh upper, __m512 (&low)[R], __m512 (&high)[R]) {
#pragma GCC unroll 8
    for (int row = 0; row < R; ++row) {
        int32_t values;
        std::memcpy(&values, inputs + row * kStep, 4);
        const __m512bh both = (__m512bh)_mm512_set1_epi32(values);
        low[row] = _mm512_dpbf16_ps(low[row], both, lower);
        high[row] = _mm512_dpbf16_ps(high[row], both, upper);
    }
}

// A product (R x 32) in memory, as what is summed: zeros unless it is added to.
template <int R>
__attribute__((always_inline)) inline void load_sums(
    const float* product, bool accumulate, __m512 (&low)[R], __m512 (&high)[R]) {
#pragma GCC unroll 8
    for (int row = 0; row < R; ++row) {
        low[row] = accumulate ? _mm512_load_ps(product + row * kPanel) : _mm512_setzero_ps();
        high[row] = accumulate ? _mm512_load_ps(product + row * kPanel + kTile) : _mm512_setzero_ps();
    }
}

template <int R>
__attribute__((always_inline)) inline void store_sums(
    float* product, const __m512 (&low)[R], const __m512 (&high)[R]) {
#pragma GCC unroll 8
    for (int row = 0; row < R; ++row) {
        _mm512_store_ps(product + row * kPanel, low[row]);
        _mm512_store_ps(product + row * kPanel + kTile, high[row]);
    }
}

struct Output {
    const bf16* bias;  // or null
    void* rows;
    bool is_wide;  // rows are in fp32, else bf16
    int64_t num_rows, size;
};

// Writes a product (num_rows x 32) at (row, column).
inline void write(const float* product, int num_rows, const Output& output, int64_t row, int64_t column) {
    const bool has_bias = output.bias != nullptr;
    const __m512 low_bias = has_bias ? widen(output.bias + column) : _mm512_setzero_ps();
    const __m512 high_bias = has_bias ? widen(output.bias + column + kTile) : _mm512_setzero_ps();
    for (int i = 0; i < num_rows; ++i, product += kPanel) {
        const __m512 low = _mm512_add_ps(_mm512_load_ps(product), low_bias);
        const __m512 high = _mm512_add_ps(_mm512_load_ps(product + kTile), high_bias);
        const int64_t at = (row + i) * output.size + column;
        if (output.is_wide) {
            float* to = static_cast<float*>(output.rows) + at;
            _mm512_storeu_ps(to, low);
            _mm512_storeu_ps(to + kTile, high);
        } else {
            _mm512_storeu_si512(static_cast<bf16*>(output.rows) + at, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
}

}  // namespace pdmesh
