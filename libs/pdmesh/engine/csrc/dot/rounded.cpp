// Linear layers whose weights stay packed as numbers that are no integers: see ../packed.h. Weights are computed, rounded
// to bf16, and multiplied as plain ones are: a few rows in registers, others from a panel in the second-level cache.

#include <omp.h>

#include <algorithm>

#include "codes.h"
#include "products.h"

namespace {

using namespace pdmesh;

constexpr int kChunkSteps = 12;  // of a panel: a whole number of groups, whose scales are multiplied out at once

// Pairs of weights of a tile's outputs, as a line of a right operand, for each pair of inputs of a half of a step.
struct Float8 {
    static constexpr int kBits = 8;

    // Of a panel's outputs, for each weight of a line's lower and upper half. Codes are read as fp32, 2^-120 as large.
    struct Scales {
        __m512 low[2], high[2];
    };

    explicit Float8(const PackedWeight&) {}

    Scales scales(const float* group) const {
        const __m512i low = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
        const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
        Scales scales;
#pragma GCC unroll 2
        for (int tile = 0; tile < 2; ++tile) {
            const __m512 each = _mm512_mul_ps(_mm512_load_ps(group + tile * kTile), _mm512_set1_ps(0x1p120f));
            scales.low[tile] = _mm512_permutexvar_ps(low, each);
            scales.high[tile] = _mm512_permutexvar_ps(high, each);
        }
        return scales;
    }

    __m512i line(const uint8_t* step, int half, int tile, int pair, const Scales& scales) const {
        const uint8_t* from = step + (tile * kTile + half * kEighth + pair) * kCodeLine / 2;
        const auto weights = [&](int first, __m512 scale) {  // sign, exponent and mantissa go to their places
            const __m512i codes =
                _mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(from + first)));
            const __m512i floats =
                _mm512_and_si512(_mm512_slli_epi32(codes, 20), _mm512_set1_epi32(static_cast<int32_t>(0x87f00000)));
            return _mm512_mul_ps(_mm512_castsi512_ps(floats), scale);
        };
        return (__m512i)_mm512_cvtne2ps_pbh(weights(kTile, scales.high[tile]), weights(0, scales.low[tile]));
    }
};

struct Table {
    static constexpr int kBits = 4;

    struct Scales {
        __m512 tile[2];
    };

    __m512 numbers;

    explicit Table(const PackedWeight& weight) : numbers(_mm512_loadu_ps(weight.table)) {}

    Scales scales(const float* group) const { return {{_mm512_load_ps(group), _mm512_load_ps(group + kTile)}}; }

    __m512i line(const uint8_t* step, int half, int tile, int pair, const Scales& scales) const {
        const auto codes = (__v16su)_mm512_loadu_si512(step + (tile * 4 + half * 2 + pair / 4) * kCodeLine);
        const auto weights = [&](int shift) {  // of an index, the lower four bits count
            return _mm512_mul_ps(_mm512_permutexvar_ps((__m512i)(codes >> shift), numbers), scales.tile[tile]);
        };
        return interleave((__m512i)_mm512_cvtne2ps_pbh(weights(pair % 4 * 4 + 16), weights(pair % 4 * 4)));
    }
};

// A panel's chunk.
struct Chunk {
    alignas(64) float scales[kChunkSteps * kStep / kLeastGroup * kPanel];
    const uint8_t* codes;
    int num_eighths, group_eighths;

    const float* group(int eighth) const { return scales + eighth / group_eighths * kPanel; }
};

// product (R x 32) [+]= left (within packed rows) * chunk.
template <int R, class Numbers>
void multiply_chunk(const bf16* left, const Chunk& chunk, const Numbers& given, float* product, bool accumulate) {
    const Numbers numbers = given;  // stays in registers
    __m512 low[R], high[R];
    load_sums(product, accumulate, low, high);
    for (int eighth = 0; eighth < chunk.num_eighths; ++eighth) {
        const auto scales = numbers.scales(chunk.group(eighth));
        const uint8_t* step = chunk.codes + eighth / 2 * step_bytes(Numbers::kBits);
        const bf16* inputs = left + eighth / 2 * kTileValues + eighth % 2 * 2 * kEighth;
        fetch<Numbers::kBits>(step, eighth % 2);
#pragma GCC unroll 8
        for (int pair = 0; pair < kEighth; ++pair) {
            const __m512bh lower = (__m512bh)numbers.line(step, eighth % 2, 0, pair, scales);
            const __m512bh upper = (__m512bh)numbers.line(step, eighth % 2, 1, pair, scales);
            multiply_pair(inputs + 2 * pair, lower, upper, low, high);
        }
    }
    store_sums(product, low, high);
}

template <class Numbers>
constexpr decltype(&multiply_chunk<1, Numbers>) kMultiplyChunk[kRows] = {
    multiply_chunk<1, Numbers>, multiply_chunk<2, Numbers>, multiply_chunk<3, Numbers>, multiply_chunk<4, Numbers>,
    multiply_chunk<5, Numbers>, multiply_chunk<6, Numbers>, multiply_chunk<7, Numbers>, multiply_chunk<8, Numbers>};

// to (two tiles a step): a chunk's weights, as right operand.
template <class Numbers>
void widen_chunk(const Chunk& chunk, const Numbers& given, bf16* to) {
    const Numbers numbers = given;
    for (int eighth = 0; eighth < chunk.num_eighths; ++eighth) {
        const auto scales = numbers.scales(chunk.group(eighth));
        const uint8_t* step = chunk.codes + eighth / 2 * step_bytes(Numbers::kBits);
        bf16* line = to + eighth / 2 * kPanelStep + eighth % 2 * kEighth * kStep;
        fetch<Numbers::kBits>(step, eighth % 2);
#pragma GCC unroll 2
        for (int tile = 0; tile < 2; ++tile)
#pragma GCC unroll 8
            for (int pair = 0; pair < kEighth; ++pair)
                _mm512_store_si512(
                    line + tile * kTileValues + pair * kStep, numbers.line(step, eighth % 2, tile, pair, scales));
    }
}

// Calls with each chunk of a panel, and its first step.
template <int Bits, class Call>
void for_chunks(const PackedWeight& weight, int64_t panel, int64_t num_inputs, Chunk& chunk, const Call& call) {
    const int64_t steps = num_inputs / kStep, size = weight.group_size;
    chunk.group_eighths = static_cast<int>(size / kLeastGroup);
    for (int64_t first = 0; first < steps; first += kChunkSteps) {
        const int64_t here = std::min<int64_t>(kChunkSteps, steps - first);
        expand_factors(
            weight.scales, panel, num_groups(weight, num_inputs), first * kStep / size, (here * kStep + size - 1) / size,
            chunk.scales);
        chunk.codes = weight.codes + (panel * steps + first) * step_bytes(Bits);
        chunk.num_eighths = static_cast<int>(2 * here);
        call(first);
    }
}

template <class Numbers>
void linear(
    const bf16* rows, const PackedWeight& weight, const Output& output, int64_t num_inputs, int64_t num_threads) {
    const int64_t num_rows = output.num_rows, steps = num_inputs / kStep, block_rows = rows_of_block(num_inputs);
    const int64_t padded = (std::min(num_rows, block_rows) + kTile - 1) / kTile * kTile;
    const auto tiles = buffer<bf16>(static_cast<size_t>(padded * num_inputs));
    const auto multiply_panel = has_amx ? multiply_panel_amx : multiply_panel_avx512;
    const bool in_registers = num_rows <= kRows && !has_amx;
    const Numbers numbers(weight);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        const auto right = buffer<bf16>(in_registers ? 0 : static_cast<size_t>(num_inputs * kPanel));
        alignas(64) float product[kRows * kPanel];
        Chunk chunk;
        configure_tiles();
        for (int64_t block = 0; block < num_rows; block += block_rows) {
            const int64_t end = std::min(block + block_rows, num_rows);
#pragma omp for
            for (int64_t row = block; row < end; row += kTile)
                pack_rows(rows, row, num_rows, num_inputs, tiles.get() + (row - block) * num_inputs);
#pragma omp for
            for (int64_t panel = 0; panel < output.size / kPanel; ++panel) {
                for_chunks<Numbers::kBits>(weight, panel, num_inputs, chunk, [&](int64_t step) {
                    if (in_registers)
                        kMultiplyChunk<Numbers>[num_rows - 1](
                            tiles.get() + step * kTileValues, chunk, numbers, product, step > 0);
                    else
                        widen_chunk(chunk, numbers, right.get() + step * kPanelStep);
                });
                if (in_registers)
                    write(product, static_cast<int>(num_rows), output, 0, panel * kPanel);
                else
                    multiply_panel(
                        tiles.get(), right.get(), static_cast<int>(steps), output, block, end, panel * kPanel);
            }
        }
        release_tiles();
    }
}

}  // namespace

extern "C" {

// output (num_rows x num_outputs, in fp32 if `is_wide`) = rows (num_rows x num_inputs) * weight + bias (unless null).
void pdmesh_linear_rounded(
    const uint16_t* rows, const PackedWeight* weight, const uint16_t* bias, void* result, int64_t is_wide,
    int64_t num_rows, int64_t num_outputs, int64_t num_inputs, int64_t num_threads) {
    const Output output = {bias, result, is_wide != 0, num_rows, num_outputs};
    (weight->kind == kFloat8 ? linear<Float8> : linear<Table>)(rows, *weight, output, num_inputs, num_threads);
}

}  // extern "C"
