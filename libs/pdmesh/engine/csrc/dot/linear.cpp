// Linear layers with plain weights, which are read once a step: see products.h.

#include <omp.h>

#include "products.h"

using namespace pdmesh;

extern "C" {

// weight (num_outputs x num_inputs) as right operand: for each 32 outputs and 32 inputs, two tiles. Both numbers are
// multiples of 32.
void pdmesh_pack_linear(const uint16_t* weight, uint16_t* packed, int64_t num_outputs, int64_t num_inputs) {
    for (int64_t panel = 0; panel < num_outputs; panel += kPanel)
        for (int64_t k = 0; k < num_inputs; k += kStep)
            for (int64_t n = panel; n < panel + kPanel; n += kTile, packed += kTileValues) {
                __m512i rows[kTile];
                for (int row = 0; row < kTile; ++row)
                    rows[row] = _mm512_loadu_si512(weight + (n + row) * num_inputs + k);
                transpose(rows);
                for (int row = 0; row < kTile; ++row) _mm512_store_si512(packed + row * kStep, rows[row]);
            }
}

// output (num_rows x num_inputs): rows `ids` of the weight that was packed.
void pdmesh_unpack_rows(
    const uint16_t* packed, const int64_t* ids, uint16_t* output, int64_t num_rows, int64_t num_inputs) {
    const __m512i pairs = _mm512_mullo_epi32(
        _mm512_set1_epi32(kTile), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    for (int64_t i = 0; i < num_rows; ++i) {
        const int64_t id = ids[i], tile = id % kPanel / kTile;
        const bf16* from = packed + (id - id % kPanel) * num_inputs + tile * kTileValues + id % kTile * 2;
        for (int64_t k = 0; k < num_inputs; k += kStep, from += 2 * kTileValues)
            _mm512_storeu_si512(output + i * num_inputs + k, _mm512_i32gather_epi32(pairs, from, 4));
    }
}

// output (num_rows x num_outputs, in fp32 if `is_wide`) = rows (num_rows x num_inputs) * packed + bias (unless null).
void pdmesh_linear(
    const uint16_t* rows, const uint16_t* packed, const uint16_t* bias, void* result, int64_t is_wide,
    int64_t num_rows, int64_t num_outputs, int64_t num_inputs, int64_t num_threads) {
    const Output output = {bias, result, is_wide != 0, num_rows, num_outputs};
    const int steps = static_cast<int>(num_inputs / kStep);
    const int64_t block_rows = rows_of_block(num_inputs);
    const int64_t padded = (std::min(num_rows, block_rows) + kTile - 1) / kTile * kTile;
    const auto tiles = buffer<bf16>(static_cast<size_t>(padded * num_inputs));
    const auto multiply_panel = has_amx ? multiply_panel_amx : multiply_panel_avx512;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        configure_tiles();
        for (int64_t block = 0; block < num_rows; block += block_rows) {
            const int64_t end = std::min(block + block_rows, num_rows);
#pragma omp for
            for (int64_t row = block; row < end; row += kTile)
                pack_rows(rows, row, num_rows, num_inputs, tiles.get() + (row - block) * num_inputs);
#pragma omp for
            for (int64_t column = 0; column < num_outputs; column += kPanel)
                multiply_panel(tiles.get(), packed + column * num_inputs, steps, output, block, end, column);
        }
        release_tiles();
    }
}

}  // extern "C"
