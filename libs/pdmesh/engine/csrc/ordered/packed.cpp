// Linear layers whose weights stay packed: see ../packed.h. Products of an input and a code are exact in fp32, so a
// group's sum, over its inputs in order, is the same at every level; what scales it is rounded after each operation.

#include "../packed.h"

#include <omp.h>

#include "../memory.h"
#include "codes.h"
#include "../strips.h"
#include "vec.h"

namespace {

using namespace pdmesh;

constexpr int kPanel = kCodePanel;
constexpr int kChunk = 128;          // inputs: a whole number of groups; their codes stay in the first-level cache
constexpr int kStride = kChunk + 16; // of widened inputs: rows lie in unlike sets of the cache
constexpr int kLeastGroup = 16;
constexpr int kBlockRows = 240;
constexpr int kStrip = kLanes == 16 ? 12 : 6;  // rows whose sums stay in registers
constexpr int kNarrow = 4;           // rows up to which codes are widened in registers
#if defined(__aarch64__)
constexpr int kVectors = 4;
#else
constexpr int kVectors = 2;
#endif

// Numbers of codes that are at the top of words, of a kind.
template <int Bits, CodeKind Kind>
inline Floats numbers_of(Words codes) {
    if constexpr (Kind == kFloat) {
#if defined(__AVX512F__)
        const Floats table = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
        return _mm512_permutexvar_ps((__m512i)(codes >> 28), table);
#else
        // 0 to 4 as they are; from 5 on, steps are 2; from 7 on, 4.
        const Floats size = __builtin_convertvector((Ints)(codes << 1 >> 29), Floats), none = {};
        const Floats magnitude = size + max(size - splat(4.0f), none) + splat(2.0f) * max(size - splat(6.0f), none);
        return (Floats)((Words)magnitude | (codes & 0x80000000));
#endif
    } else {
        return __builtin_convertvector(
            Kind == kSigned ? (Ints)codes >> (32 - Bits) : (Ints)(codes >> (32 - Bits)), Floats);
    }
}

// Of the 8 inputs of a quarter of a step, what a code of each stands for: input i, for kLanes outputs from `output` on.
template <int Bits, CodeKind Kind>
inline Floats codes_of(const uint8_t* step, int quarter, int output, int i) {
    return numbers_of<Bits, Kind>(code_bits<Bits>(step, quarter, output, i));
}

// to (32 inputs x kPanel): a step's codes, widened.
template <int Bits, CodeKind Kind>
void widen_step(const uint8_t* step, float* to) {
    for (int quarter = 0; quarter < 4; ++quarter, to += 8 * kPanel) {
        fetch<Bits>(step, quarter);
        for (int output = 0; output < kPanel; output += kLanes)
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i)
                store(to + i * kPanel + output, codes_of<Bits, Kind>(step, quarter, output, i));
    }
}

// A panel's chunk: what scales the sums of its groups, and, for many rows, its codes as numbers.
struct Chunk {
    alignas(64) float scales[kChunk / kLeastGroup * kPanel];
    alignas(64) float minima[kChunk / kLeastGroup * kPanel];
    alignas(64) float codes[kChunk * kPanel];
    const uint8_t* packed;
    bool has_minima;
    int group_size, num_inputs;
};

// Where rows' inputs (kStride a row), and their sums by group, are; and what their outputs (kPanel a row) are added to.
struct Rows {
    const float* inputs;
    const float* sums;
    int64_t sums_stride;
    float* total;
};

// total += the products of R rows with G groups, scaled, for V vectors of outputs from `output` on. The groups go side
// by side: one alone would wait for each of its sums. `codes(quarter, output, i)` gives codes of input i of 8.
template <int R, int V, int G, class Codes, class Fetch>
inline void multiply_groups(
    const Rows& rows, const Chunk& chunk, int first_group, int output, const Codes& codes, const Fetch& fetch) {
    Floats products[G][R][V];
#pragma GCC unroll 2
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 16
        for (int row = 0; row < R; ++row)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) products[g][row][v] = Floats{};
    const int first = first_group * chunk.group_size;
    const int count = std::min(chunk.group_size, chunk.num_inputs - first);
    for (int number = 0; number < count; number += 8)
#pragma GCC unroll 2
        for (int g = 0; g < G; ++g) {
            const int input = first + g * chunk.group_size + number;
            const float* from = rows.inputs + input;
            fetch(input / 8);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                Floats values[V];
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) values[v] = codes(input / 8, output + v * kLanes, i);
#pragma GCC unroll 16
                for (int row = 0; row < R; ++row)
#pragma GCC unroll 8
                    for (int v = 0; v < V; ++v)
                        products[g][row][v] =
                            multiply_add(values[v], splat(from[row * kStride + i]), products[g][row][v]);
            }
        }
#pragma GCC unroll 2
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            const int group = first_group + g, at = group * kPanel + output + v * kLanes;
            const Floats scale = load(chunk.scales + at);
#pragma GCC unroll 16
            for (int row = 0; row < R; ++row) {
                float* to = rows.total + row * kPanel + output + v * kLanes;
                Floats total = load(to) + scale * products[g][row][v];
                if (chunk.has_minima)
                    total = total - load(chunk.minima + at) * splat(rows.sums[row * rows.sums_stride + group]);
                store(to, total);
            }
        }
}

template <int R, int V, int G, class Codes, class Fetch>
inline void multiply_chunk(const Rows& rows, const Chunk& chunk, const Codes& codes, const Fetch& fetch) {
    const int whole = chunk.num_inputs / chunk.group_size;
    for (int output = 0; output < kPanel; output += V * kLanes) {
        int group = 0;
        for (; group + G <= whole; group += G) multiply_groups<R, V, G>(rows, chunk, group, output, codes, fetch);
        for (; group * chunk.group_size < chunk.num_inputs; ++group)
            multiply_groups<R, V, 1>(rows, chunk, group, output, codes, fetch);
    }
}

// Codes are widened in registers.
template <int Bits, CodeKind Kind>
void multiply_narrow(const Rows& rows, int num_rows, const Chunk& chunk) {
    with_rows<kNarrow>(num_rows, [&](auto count) {
        constexpr int kMost = count == 1 ? 4 : 2, V = std::min(kPanel / kLanes, kMost);
        multiply_chunk<count, V, kLanes == 16 && count == 1 ? 2 : 1>(
            rows, chunk,
            [&](int quarter, int output, int i) {
                return codes_of<Bits, Kind>(chunk.packed + quarter / 4 * step_bytes(Bits), quarter % 4, output, i);
            },
            [&](int quarter) { fetch<Bits>(chunk.packed + quarter / 4 * step_bytes(Bits), quarter % 4); });
    });
}

// Codes have been widened.
void multiply_wide(const Rows& rows, int num_rows, const Chunk& chunk) {
    for_strips<kStrip>(num_rows, [&](int row, auto count) {
        const Rows strip = {
            rows.inputs + row * kStride, rows.sums + row * rows.sums_stride, rows.sums_stride,
            rows.total + row * kPanel};
        multiply_chunk<count, kVectors, 1>(
            strip, chunk,
            [&](int quarter, int output, int i) { return load(chunk.codes + (quarter * 8 + i) * kPanel + output); },
            [](int) {});
    });
}

// Of each group of a row's inputs, the sum: by lane of 16, then in one tree.
void sum_groups(const float* inputs, int64_t num_inputs, int64_t group_size, float* sums) {
    for (int64_t first = 0; first < num_inputs; first += group_size) {
        Floats parts[kTreeLanes / kLanes] = {};
        for (int64_t i = first; i < std::min(first + group_size, num_inputs); i += kTreeLanes)
#pragma GCC unroll 4
            for (int part = 0; part < kTreeLanes / kLanes; ++part)
                parts[part] = parts[part] + load(inputs + i + part * kLanes);
        *sums++ = sum16(parts);
    }
}

// How codes of one kind are computed with.
struct Kernels {
    void (*widen_step)(const uint8_t*, float*);
    void (*narrow)(const Rows&, int, const Chunk&);
};

template <int Bits, CodeKind Kind>
constexpr Kernels kKernels = {widen_step<Bits, Kind>, multiply_narrow<Bits, Kind>};

Kernels kernels_of(const PackedWeight& weight) {
    switch (weight.bits) {
        case 4:
            if (weight.kind == kFloat) return kKernels<4, kFloat>;
            return weight.kind == kSigned ? kKernels<4, kSigned> : kKernels<4, kUnsigned>;
        case 5: return weight.kind == kSigned ? kKernels<5, kSigned> : kKernels<5, kUnsigned>;
        case 6: return weight.kind == kSigned ? kKernels<6, kSigned> : kKernels<6, kUnsigned>;
        default: return kKernels<8, kSigned>;
    }
}

template <class Value>
void linear(
    const Value* rows, const PackedWeight& weight, const Value* bias, Results<Value> output, int64_t num_rows,
    int64_t num_outputs, int64_t num_inputs, int64_t num_threads) {
    const int64_t num_chunks = (num_inputs + kChunk - 1) / kChunk, groups = num_groups(weight, num_inputs);
    const int64_t num_blocks = (num_rows + kBlockRows - 1) / kBlockRows;
    const int64_t block_rows = (num_rows + num_blocks - 1) / num_blocks;
    const int64_t panel_bytes = num_inputs / kCodeStep * step_bytes(weight.bits);
    const Kernels kernels = kernels_of(weight);
    const bool is_narrow = num_rows <= kNarrow;
    const auto inputs = buffer<float>(static_cast<size_t>(block_rows * num_chunks * kStride));
    const auto sums = buffer<float>(static_cast<size_t>(block_rows * groups));
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        const auto total = buffer<float>(static_cast<size_t>(block_rows * kPanel));
        Chunk chunk;
        chunk.has_minima = weight.minima.bases != nullptr;
        chunk.group_size = static_cast<int>(weight.group_size);
        for (int64_t block = 0; block < num_rows; block += block_rows) {
            const int count = static_cast<int>(std::min(block_rows, num_rows - block));
#pragma omp for
            for (int64_t row = 0; row < count; ++row)
                for (int64_t i = 0; i < num_inputs; i += kChunk) {
                    float* to = inputs.get() + (i / kChunk * count + row) * kStride;
                    const int64_t here = std::min<int64_t>(kChunk, num_inputs - i);
                    for (int64_t j = 0; j < here; j += kLanes)
                        store(to + j, load(rows + (block + row) * num_inputs + i + j));
                    if (chunk.has_minima)
                        sum_groups(to, here, weight.group_size, sums.get() + row * groups + i / weight.group_size);
                }
#pragma omp for
            for (int64_t panel = 0; panel < num_outputs / kPanel; ++panel) {
                std::fill_n(total.get(), count * kPanel, 0.0f);
                const uint8_t* codes = weight.codes + panel * panel_bytes;
                for (int64_t first = 0; first < num_inputs; first += kChunk) {
                    chunk.num_inputs = static_cast<int>(std::min<int64_t>(kChunk, num_inputs - first));
                    const int64_t group = first / weight.group_size;
                    const int64_t num = (chunk.num_inputs + weight.group_size - 1) / weight.group_size;
                    chunk.packed = codes;
                    for (int step = 0; step < chunk.num_inputs; step += kCodeStep, codes += step_bytes(weight.bits))
                        if (!is_narrow) kernels.widen_step(codes, chunk.codes + step * kPanel);
                    expand_factors(weight.scales, panel, groups, group, num, chunk.scales);
                    if (chunk.has_minima) expand_factors(weight.minima, panel, groups, group, num, chunk.minima);
                    const Rows here = {
                        inputs.get() + first / kChunk * count * kStride, sums.get() + group, groups, total.get()};
                    (is_narrow ? kernels.narrow : multiply_wide)(here, count, chunk);
                }
                for (int row = 0; row < count; ++row)
                    for (int i = 0; i < kPanel; i += kLanes) {
                        const Floats sum = load(total.get() + row * kPanel + i);
                        const int64_t column = panel * kPanel + i;
                        output.put(
                            (block + row) * num_outputs + column, bias == nullptr ? sum : sum + load(bias + column));
                    }
            }
        }
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
    const Bf16* rows, const PackedWeight* weight, const Bf16* bias, void* output, int64_t is_wide, int64_t num_rows,
    int64_t num_outputs, int64_t num_inputs, int64_t num_threads) {
    linear<Bf16>(rows, *weight, bias, {output, is_wide != 0}, num_rows, num_outputs, num_inputs, num_threads);
}

void pdmesh_linear_packed_f16(
    const F16* rows, const PackedWeight* weight, const F16* bias, void* output, int64_t is_wide, int64_t num_rows,
    int64_t num_outputs, int64_t num_inputs, int64_t num_threads) {
    linear<F16>(rows, *weight, bias, {output, is_wide != 0}, num_rows, num_outputs, num_inputs, num_threads);
}

}  // extern "C"
