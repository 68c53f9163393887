// Products of packed rows and weights; weights are in the order that tiles, and rows of AVX-512 lanes, are loaded in.
//
// A row of the result is summed in the same order however many rows there are, so that results do not depend on what
// else is in the batch, bit for bit.
#pragma once

#include <algorithm>

#include "operands.h"

namespace pdmesh {

constexpr int kBlockValues = 1 << 19;     // of packed rows with AMX: they stay in the second-level cache
constexpr int kLine = 64 / sizeof(bf16);  // values of a cache line
// Without AMX:
constexpr int kBlockRows = 128;
constexpr int kChunk = 12;        // steps of a panel that stay in the first-level cache for all rows of a block
constexpr int kAhead = 12;        // steps between a panel's request and its use, not fewer than kChunk

// product (R x 32) [+]= left (R x 32 steps, within packed rows) * right, part of a panel. Asks for `num_lines` lines a
// step from `ahead` on.
template <int R>
void multiply_rows(
    const bf16* left, const bf16* right, float* product, int steps, bool accumulate, const bf16* ahead,
    int num_lines) {
    __m512 low[R], high[R];
    load_sums(product, accumulate, low, high);
    for (int step = 0; step < steps; ++step, left += kTileValues, right += kPanelStep) {
        for (int line = 0; line < num_lines; ++line, ahead += kLine) _mm_prefetch(ahead, _MM_HINT_T0);
        for (int pair = 0; pair < kTile; ++pair) {
            const __m512bh first = (__m512bh)_mm512_load_si512(right + pair * kStep);
            const __m512bh second = (__m512bh)_mm512_load_si512(right + kTileValues + pair * kStep);
            multiply_pair(left + 2 * pair, first, second, low, high);
        }
    }
    store_sums(product, low, high);
}

constexpr decltype(&multiply_rows<1>) kMultiplyRows[kRows] = {
    multiply_rows<1>, multiply_rows<2>, multiply_rows<3>, multiply_rows<4>,
    multiply_rows<5>, multiply_rows<6>, multiply_rows<7>, multiply_rows<8>};

// One panel's outputs of packed rows, which are `first_row` ... `end` of all.
inline void multiply_panel_avx512(
    const bf16* tiles, const bf16* panel, int steps, const Output& output, int64_t first_row, int64_t end,
    int64_t column) {
    alignas(64) float product[kBlockRows * kPanel];
    const int num_rows = static_cast<int>(end - first_row), num_products = (num_rows + kRows - 1) / kRows;
    const int num_lines = (kPanelStep / kLine + num_products - 1) / num_products;
    for (int step = 0; step < steps; step += kChunk) {
        const int num_steps = std::min(kChunk, steps - step);
        const bf16* right = panel + step * kPanelStep;
        const bf16* ahead = right + kAhead * kPanelStep;
        const auto multiply = [&](int row, int count) {
            const bf16* left = tiles + (row / kTile * steps + step) * kTileValues + row % kTile * kStep;
            kMultiplyRows[count - 1](left, right, product + row * kPanel, num_steps, step > 0, ahead, num_lines);
            ahead += num_steps * num_lines * kLine;
        };
        for (int row = 0; row < num_rows; row += kTile) {
            const int count = std::min(num_rows - row, kTile), half = count > kRows ? (count + 1) / 2 : count;
            multiply(row, half);
            if (count > half) multiply(row + half, count - half);
        }
    }
    write(product, num_rows, output, first_row, column);
}

// The same by AMX.
inline void multiply_panel_amx(
    const bf16* tiles, const bf16* panel, int steps, const Output& output, int64_t first_row, int64_t end,
    int64_t column) {
    alignas(64) float product[kPanel * kPanel];
    const int64_t tile_row = kTileValues * steps, panel_values = kPanelStep * steps;
    const int64_t num_lines = std::max<int64_t>(kPanelStep / kLine * kPanel / (end - first_row), 1);
    for (int64_t row = first_row; row < end; row += kPanel) {
        const bf16* left = tiles + (row - first_row) / kTile * tile_row;
        if (end - row > kTile) {
            // The next panel is on its way from memory while this one is multiplied, and these rows' next tiles from
            // the second-level cache.
            const bf16* ahead = panel + panel_values + (row - first_row) / kPanel * num_lines * kLine;
            const auto fetch = [&](int step) {
                for (int64_t line = 0; line < num_lines; ++line)
                    _mm_prefetch(ahead + step * kPanelStep + line * kLine, _MM_HINT_T1);
                const bf16* next = left + (step + 2) * kTileValues;
                for (int line = 0; line < kTileValues; line += kLine) {
                    _mm_prefetch(next + line, _MM_HINT_T0);
                    _mm_prefetch(next + tile_row + line, _MM_HINT_T0);
                }
            };
            multiply_amx<2>({{left, left + tile_row}, 64, kTileValues}, panel, product, steps, false, fetch);
        } else {
            std::fill_n(product, kTile * kPanel, 0.0f);
            multiply_flat_amx<2>(left, panel, 2 * kTileValues, product, kPanel, steps);
        }
        write(product, static_cast<int>(std::min<int64_t>(end - row, kPanel)), output, row, column);
    }
}

// Rows that are packed at once.
inline int64_t rows_of_block(int64_t num_inputs) {
    return has_amx ? std::max<int64_t>(kBlockValues / num_inputs / kPanel, 1) * kPanel : kBlockRows;
}

}  // namespace pdmesh
