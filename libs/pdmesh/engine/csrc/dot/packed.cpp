// Linear layers whose weights stay packed: see ../packed.h. Codes are exact in bf16: a chunk of them is widened into the
// first-level cache, and multiplied from there by the processor's products; what these sum for a group is scaled.
//
// A row's result is summed in the same order however many rows there are.

#include <omp.h>

#include <algorithm>

#include "codes.h"
#include "operands.h"

namespace {

using namespace pdmesh;

constexpr int kChunkSteps = 12;  // of a panel: a whole number of groups; they stay in the first-level cache
constexpr int kChunkInputs = kChunkSteps * kStep;
constexpr int kBlockRows = 256;

// bf16 of codes, by the lower bits of 16: a table of 64.
struct Table {
    __m512i lower, upper;

    Table(int bits, int64_t kind) {
        alignas(64) bf16 values[64];
        const int used = std::min(bits, 6);
        for (int i = 0; i < 64; ++i) {
            const float value = static_cast<float>(number_of(static_cast<uint32_t>(i % (1 << used)), used, kind));
            uint32_t word;
            std::memcpy(&word, &value, sizeof(word));
            values[i] = static_cast<bf16>(word >> 16);
        }
        lower = _mm512_load_si512(values);
        upper = _mm512_load_si512(values + 32);
    }

    template <int Bits>
    __m512i at(Words codes) const {
        if (Bits == 6) return _mm512_permutex2var_epi16(lower, (__m512i)codes, upper);
        return _mm512_permutexvar_epi16((__m512i)codes, lower);
    }
};

// Codes of a pair of inputs of a half of a step, for a tile's outputs: a line of a right operand.
template <int Bits>
inline __m512i codes_of(const uint8_t* step, int half, int tile, int pair, const Table& table) {
    if constexpr (Bits == 8) {
        const uint8_t* line = step + (tile * kTile + half * kEighth + pair) * kCodeLine / 2;
        const auto floats = [&](int first) {
            return _mm512_cvtepi32_ps(
                _mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(line + first))));
        };
        return (__m512i)_mm512_cvtne2ps_pbh(floats(16), floats(0));
    } else {
        const Words low = words_at(step + (tile * 4 + half * 2 + pair / 4) * kCodeLine) >> (4 * (pair % 4));
        if constexpr (Bits == 4) return table.template at<Bits>(low);
        constexpr uint16_t kUpper = Bits == 5 ? 0x10 : 0x30;
        const uint8_t* highs = step + (8 + tile * (Bits - 4) + (Bits == 6 ? half : 0)) * kCodeLine;
        const Words high = Bits == 5 ? words_at(highs) >> (8 * half) : words_at(highs);
        const int from = pair * (Bits - 4);  // the upper bits are moved from there to 4
        return table.template at<Bits>((low & 15) | ((from < 4 ? high << (4 - from) : high >> (from - 4)) & kUpper));
    }
}

// to (two tiles): a step's codes, as the right operand of a product.
template <int Bits>
void widen_step(const uint8_t* step, const Table& table, bf16* to) {
    for (int half = 0; half < 2; ++half) {
        fetch<Bits>(step, half);
#pragma GCC unroll 2
        for (int tile = 0; tile < 2; ++tile)
#pragma GCC unroll 8
            for (int pair = 0; pair < kEighth; ++pair)
                _mm512_store_si512(
                    to + tile * kTileValues + (half * kEighth + pair) * kStep,
                    codes_of<Bits>(step, half, tile, pair, table));
    }
}

// A panel's chunk: what scales the sums of its groups, and, for many rows, its codes as right operand.
struct Chunk {
    alignas(64) float scales[kChunkInputs / kLeastGroup * kPanel];
    alignas(64) float minima[kChunkInputs / kLeastGroup * kPanel];
    alignas(64) bf16 codes[kChunkSteps * kPanelStep];
    const uint8_t* packed;
    bool has_minima;
    int group_eighths, num_eighths;
};

// total (32) += a group's products (32), scaled, for one row; `sum`: of its inputs.
inline void add_group(__m512 low, __m512 high, const Chunk& chunk, int group, float sum, float* total) {
    const float* scales = chunk.scales + group * kPanel;
    __m512 lower = _mm512_fmadd_ps(low, _mm512_load_ps(scales), _mm512_load_ps(total));
    __m512 upper = _mm512_fmadd_ps(high, _mm512_load_ps(scales + kTile), _mm512_load_ps(total + kTile));
    if (chunk.has_minima) {
        const float* minima = chunk.minima + group * kPanel;
        lower = _mm512_fnmadd_ps(_mm512_set1_ps(sum), _mm512_load_ps(minima), lower);
        upper = _mm512_fnmadd_ps(_mm512_set1_ps(sum), _mm512_load_ps(minima + kTile), upper);
    }
    _mm512_store_ps(total, lower);
    _mm512_store_ps(total + kTile, upper);
}

// Where rows' inputs, and their sums by group, are; and what their outputs are added to.
struct Rows {
    const bf16* left;  // within packed rows
    const float* sums;
    int64_t sums_stride;
    float* total;  // kPanel a row
};

// The products of R rows with G groups at once, side by side: one alone would wait for each of its sums. `right(e, h,
// tile, pair)` gives a line of codes of half h of step e.
template <int R, int G, class Right, class Fetch>
inline void multiply_groups(
    const Rows& rows, const Chunk& chunk, int first_group, const Right& right, const Fetch& fetch) {
    __m512 low[G][R], high[G][R];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
        for (int row = 0; row < R; ++row) low[g][row] = high[g][row] = _mm512_setzero_ps();
    const int first = first_group * chunk.group_eighths;
    const int count = std::min(chunk.group_eighths, chunk.num_eighths - first);
    for (int number = 0; number < count; ++number)
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
            const int eighth = first + g * chunk.group_eighths + number, step = eighth / 2, half = eighth % 2;
            const bf16* inputs = rows.left + step * kTileValues + half * 2 * kEighth;
            fetch(step, half);
#pragma GCC unroll 8
            for (int pair = 0; pair < kEighth; ++pair) {
                const __m512bh lower = (__m512bh)right(step, half, 0, pair);
                const __m512bh upper = (__m512bh)right(step, half, 1, pair);
                multiply_pair(inputs + 2 * pair, lower, upper, low[g], high[g]);
            }
        }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
        for (int row = 0; row < R; ++row)
            add_group(
                low[g][row], high[g][row], chunk, first_group + g,
                chunk.has_minima ? rows.sums[row * rows.sums_stride + first_group + g] : 0.0f,
                rows.total + row * kPanel);
}

template <int R, int Bits, class Right, class Fetch>
inline void multiply_chunk(const Rows& rows, const Chunk& chunk, const Right& right, const Fetch& fetch) {
    constexpr int kAtOnce = R == 1 ? 4 : R == 2 ? 2 : 1;
    const int whole = chunk.num_eighths / chunk.group_eighths;
    const int groups = (chunk.num_eighths + chunk.group_eighths - 1) / chunk.group_eighths;
    int group = 0;
    if (chunk.group_eighths > 2) {
        for (; group + kAtOnce <= whole; group += kAtOnce) multiply_groups<R, kAtOnce>(rows, chunk, group, right, fetch);
        // Of 128 inputs, a chunk has three; of 8 bits they are too far apart to be fetched side by side.
        if constexpr (R == 1 && Bits < 8) {
            if (whole - group == 3) multiply_groups<R, 3>(rows, chunk, group, right, fetch), group += 3;
            if (whole - group == 2) multiply_groups<R, 2>(rows, chunk, group, right, fetch), group += 2;
        }
    }
    for (; group < groups; ++group) multiply_groups<R, 1>(rows, chunk, group, right, fetch);
}

// Codes are widened in registers.
template <int R, int Bits>
void multiply_narrow(const Rows& rows, const Chunk& chunk, const Table& table) {
    const Table own = table;  // stays in registers
    multiply_chunk<R, Bits>(
        rows, chunk,
        [&](int step, int half, int tile, int pair) {
            return codes_of<Bits>(chunk.packed + step * step_bytes(Bits), half, tile, pair, own);
        },
        [&](int step, int half) { fetch<Bits>(chunk.packed + step * step_bytes(Bits), half); });
}

// Codes have been widened. One group after the other, with nothing between products but what scales their sums: through
// multiply_groups, groups of 32 take a tenth longer.
template <int R>
void multiply_wide(const Rows& rows, const Chunk& chunk, const Table&) {
    int eighth = 0;
    for (int group = 0; eighth < chunk.num_eighths; ++group) {
        __m512 low[R], high[R];
#pragma GCC unroll 8
        for (int row = 0; row < R; ++row) low[row] = high[row] = _mm512_setzero_ps();
        const int end = std::min(eighth + chunk.group_eighths, chunk.num_eighths);
        for (; eighth < end; ++eighth) {
            const bf16* inputs = rows.left + eighth / 2 * kTileValues + eighth % 2 * 2 * kEighth;
            const bf16* codes = chunk.codes + eighth / 2 * kPanelStep + eighth % 2 * kEighth * kStep;
#pragma GCC unroll 8
            for (int pair = 0; pair < kEighth; ++pair) {
                const __m512bh lower = (__m512bh)_mm512_load_si512(codes + pair * kStep);
                const __m512bh upper = (__m512bh)_mm512_load_si512(codes + kTileValues + pair * kStep);
                multiply_pair(inputs + 2 * pair, lower, upper, low, high);
            }
        }
#pragma GCC unroll 8
        for (int row = 0; row < R; ++row)
            add_group(
                low[row], high[row], chunk, group,
                chunk.has_minima ? rows.sums[row * rows.sums_stride + group] : 0.0f, rows.total + row * kPanel);
    }
}

using WidenStep = void (*)(const uint8_t*, const Table&, bf16*);

using Multiply = void (*)(const Rows&, const Chunk&, const Table&);

// By the number of rows, from 1 on.
constexpr Multiply kMultiplyWide[kRows] = {multiply_wide<1>, multiply_wide<2>, multiply_wide<3>, multiply_wide<4>,
                                           multiply_wide<5>, multiply_wide<6>, multiply_wide<7>, multiply_wide<8>};
template <int Bits>
constexpr Multiply kMultiplyNarrow[kRows] = {
    multiply_narrow<1, Bits>, multiply_narrow<2, Bits>, multiply_narrow<3, Bits>, multiply_narrow<4, Bits>,
    multiply_narrow<5, Bits>, multiply_narrow<6, Bits>, multiply_narrow<7, Bits>, multiply_narrow<8, Bits>};

struct Codes {
    WidenStep widen_step;
    const Multiply* narrow;
};

Codes codes_of(int64_t bits) {
    switch (bits) {
        case 4: return {widen_step<4>, kMultiplyNarrow<4>};
        case 5: return {widen_step<5>, kMultiplyNarrow<5>};
        case 6: return {widen_step<6>, kMultiplyNarrow<6>};
        default: return {widen_step<8>, kMultiplyNarrow<8>};
    }
}

void sum_groups(const bf16* row, int64_t num_inputs, int64_t group_size, float* sums) {
    for (int64_t first = 0; first < num_inputs; first += group_size) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = first; i < std::min(first + group_size, num_inputs); i += kTile)
            sum = _mm512_add_ps(sum, widen(row + i));
        *sums++ = _mm512_reduce_add_ps(sum);
    }
}

}  // namespace

extern "C" {

void pdmesh_pack_codes(
    const uint8_t* codes, uint8_t* packed, int64_t bits, int64_t num_outputs, int64_t num_inputs) {
    pack_codes(codes, packed, static_cast<int>(bits), num_outputs, num_inputs);
}

void pdmesh_unpack_codes(
    const PackedWeight* weight, const int64_t* ids, float* output, int64_t num_rows, int64_t num_inputs) {
    unpack_codes(*weight, ids, output, num_rows, num_inputs);
}

// output (num_rows x num_outputs, in fp32 if `is_wide`) = rows (num_rows x num_inputs) * weight + bias (unless null).
void pdmesh_linear_packed(
    const uint16_t* rows, const PackedWeight* packed, const uint16_t* bias, void* result, int64_t is_wide,
    int64_t num_rows, int64_t num_outputs, int64_t num_inputs, int64_t num_threads) {
    const PackedWeight& weight = *packed;
    const Output output = {bias, result, is_wide != 0, num_rows, num_outputs};
    const int64_t steps = num_inputs / kStep, groups = num_groups(weight, num_inputs);
    const int64_t padded = (std::min<int64_t>(num_rows, kBlockRows) + kTile - 1) / kTile * kTile;
    const auto tiles = buffer<bf16>(static_cast<size_t>(padded * num_inputs));
    const auto sums = buffer<float>(static_cast<size_t>(padded * groups));
    const Codes kind = codes_of(weight.bits);
    const bool is_narrow = num_rows <= kRows;
    const Table table(static_cast<int>(weight.bits), weight.kind);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        alignas(64) float total[kBlockRows * kPanel];
        Chunk chunk;
        chunk.has_minima = weight.minima.bases != nullptr;
        chunk.group_eighths = static_cast<int>(weight.group_size / kLeastGroup);
        for (int64_t block = 0; block < num_rows; block += kBlockRows) {
            const int count = static_cast<int>(std::min<int64_t>(kBlockRows, num_rows - block));
#pragma omp for
            for (int64_t row = 0; row < count; row += kTile) {
                pack_rows(rows, block + row, num_rows, num_inputs, tiles.get() + row * num_inputs);
                for (int64_t i = row; chunk.has_minima && i < std::min<int64_t>(row + kTile, count); ++i)
                    sum_groups(rows + (block + i) * num_inputs, num_inputs, weight.group_size, sums.get() + i * groups);
            }
#pragma omp for
            for (int64_t panel = 0; panel < num_outputs / kPanel; ++panel) {
                std::fill_n(total, count * kPanel, 0.0f);
                const uint8_t* codes = weight.codes + panel * steps * step_bytes(weight.bits);
                for (int64_t first = 0; first < steps; first += kChunkSteps) {
                    const int here = static_cast<int>(std::min<int64_t>(kChunkSteps, steps - first));
                    chunk.num_eighths = 2 * here;
                    const int64_t group = first * kStep / weight.group_size;
                    const int64_t end = ((first + here) * kStep + weight.group_size - 1) / weight.group_size;
                    expand_factors(weight.scales, panel, groups, group, end - group, chunk.scales);
                    if (chunk.has_minima) expand_factors(weight.minima, panel, groups, group, end - group, chunk.minima);
                    chunk.packed = codes + first * step_bytes(weight.bits);
                    for (int step = 0; step < here && !is_narrow; ++step)
                        kind.widen_step(
                            chunk.packed + step * step_bytes(weight.bits), table, chunk.codes + step * kPanelStep);
                    const auto multiply = [&](int row, int num) {
                        const bf16* left = tiles.get() + (row / kTile * steps + first) * kTileValues;
                        const Rows here = {
                            left + row % kTile * kStep, sums.get() + row * groups + group, groups, total + row * kPanel};
                        (is_narrow ? kind.narrow : kMultiplyWide)[num - 1](here, chunk, table);
                    };
                    for (int row = 0; row < count; row += kTile) {
                        const int num = std::min(count - row, kTile), half = num > kRows ? (num + 1) / 2 : num;
                        multiply(row, half);
                        if (num > half) multiply(row + half, num - half);
                    }
                }
                write(total, count, output, block, panel * kPanel);
            }
        }
    }
}

}  // extern "C"
