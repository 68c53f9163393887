// Products of rows and weights: each output is one lane, summed over the inputs in order, whatever the number of rows,
// the blocks and the level. Weights lie as csrc/dot/linear.cpp reads them, so that one packed weight serves every level.
//
// A packed weight holds, for each panel of 32 outputs and each step of 32 inputs, two tiles of 16 outputs; a row of a
// tile holds a pair of neighbouring inputs for each of its outputs. Numbers of inputs and outputs are multiples of 32.
#pragma once

#include <omp.h>

#include <algorithm>
#include <climits>
#include <type_traits>

#include "../memory.h"
#include "../strips.h"
#include "vec.h"

namespace pdmesh {

constexpr int kTile = 16;         // outputs of a tile, and pairs of inputs
constexpr int kStep = 2 * kTile;  // inputs of a tile
constexpr int kPanel = 2 * kTile;
constexpr int kLine = 64;  // bytes
constexpr int kTileValues = kTile * kStep;
constexpr int kPanelStep = 2 * kTileValues;  // values of a panel that one step multiplies

#if defined(__aarch64__)
constexpr int kVectors = 4;
#else
constexpr int kVectors = 2;
#endif
constexpr int kWidth = kVectors * kLanes;          // outputs of one multiplication
constexpr int kStrip = kLanes == 16 ? 12 : 6;  // its rows: all sums stay in registers
constexpr int kPackedStrip = kLanes == 16 ? 12 : 5;  // the same where weights are widened in registers
constexpr int kChunkSteps = kLanes == 16 ? 4 : 8;  // their weights stay in the first-level cache, also widened
constexpr int kChunk = kChunkSteps * kStep;
constexpr int kStride = kChunk + 16;     // of widened inputs: rows lie in unlike sets of the cache
constexpr int kBlockRows = 240;          // a chunk of their inputs stays in the second-level cache
// Between a weight's request and its use: where a panel is read in order, and where one part comes after the other.
constexpr int kAheadBytes = 6144, kPartAheadBytes = 2 * kChunk * kPanel;

// Rows from which weights are widened once for all strips. bf16 takes one instruction each time, float16 several.
template <class Value>
constexpr int kWidenFrom = std::is_same_v<Value, F16> ? kPackedStrip + 1 : kLanes == 16 ? INT_MAX : 128;

// A single row leaves registers free for a whole panel.
constexpr int width(int num_rows) { return num_rows == 1 ? kPanel : kWidth; }

// The first or second values of pairs, widened.
inline Floats widen_first(Words pairs, Bf16) { return (Floats)(pairs << 16); }
inline Floats widen_second(Words pairs, Bf16) { return (Floats)(pairs & 0xffff0000); }
inline Floats widen_first(Words pairs, F16) { return widen(__builtin_convertvector(pairs, Halves), F16()); }
inline Floats widen_second(Words pairs, F16) { return widen(__builtin_convertvector(pairs >> 16, Halves), F16()); }

// A chunk of weights as they are packed.
template <class Value>
struct Packed {
    const Value* tiles;

    // A pair of inputs of a tile's outputs: one line.
    const Value* line(int number, int output) const {
        return tiles + number / kTile * kPanelStep + output / kTile * kTileValues + number % kTile * kStep;
    }
    Words pairs(int number, int output) const {
        Words pairs;
        std::memcpy(&pairs, line(number, output) + output % kTile * 2, sizeof(pairs));
        return pairs;
    }
    // Of a pair of inputs, for kLanes outputs.
    Floats first(int number, int output) const { return widen_first(pairs(number, output), Value()); }
    Floats second(int number, int output) const { return widen_second(pairs(number, output), Value()); }
    template <int Width>
    void fetch(int number, int output) const {
        if constexpr (Width == kPanel) {
            const auto* at = reinterpret_cast<const char*>(tiles) + 2 * number * kLine + kAheadBytes;
            prefetch(at);
            prefetch(at + kLine);
        } else {
            prefetch(reinterpret_cast<const char*>(line(number, output)) + kPartAheadBytes);
        }
    }
};

// The same widened, for kWidth outputs.
struct Widened {
    const float* weights;
    const char* ahead;  // what to ask for meanwhile, a line for each pair

    Floats first(int number, int output) const { return load(weights + 2 * number * kWidth + output); }
    Floats second(int number, int output) const { return load(weights + (2 * number + 1) * kWidth + output); }
    template <int Width>
    void fetch(int number, int) const {
        prefetch(ahead + number * kLine);
    }
};

// product (R rows of kPanel) [+]= inputs (R rows of kStride) * weights, for width(R) outputs from `output` on.
template <int R, class Weights>
__attribute__((noinline)) void multiply(
    const float* inputs, Weights weights, int output, float* product, int num_pairs, bool accumulate) {
    constexpr int kSums = width(R) / kLanes;
    Floats sums[R][kSums];
#pragma GCC unroll 16
    for (int row = 0; row < R; ++row)
#pragma GCC unroll 16
        for (int i = 0; i < kSums; ++i)
            sums[row][i] = accumulate ? load(product + row * kPanel + i * kLanes) : splat(0.0f);
    for (int number = 0; number < num_pairs; ++number, inputs += 2) {
        weights.template fetch<width(R)>(number, output);
        Floats values[kSums];
#pragma GCC unroll 16
        for (int i = 0; i < kSums; ++i) values[i] = weights.first(number, output + i * kLanes);
#pragma GCC unroll 16
        for (int row = 0; row < R; ++row)
#pragma GCC unroll 16
            for (int i = 0; i < kSums; ++i)
                sums[row][i] = multiply_add(values[i], splat(inputs[row * kStride]), sums[row][i]);
        __asm__ volatile("" ::: "memory");  // pairs are read again rather than kept: there are few registers
#pragma GCC unroll 16
        for (int i = 0; i < kSums; ++i) values[i] = weights.second(number, output + i * kLanes);
#pragma GCC unroll 16
        for (int row = 0; row < R; ++row)
#pragma GCC unroll 16
            for (int i = 0; i < kSums; ++i)
                sums[row][i] = multiply_add(values[i], splat(inputs[row * kStride + 1]), sums[row][i]);
    }
#pragma GCC unroll 16
    for (int row = 0; row < R; ++row)
#pragma GCC unroll 16
        for (int i = 0; i < kSums; ++i) store(product + row * kPanel + i * kLanes, sums[row][i]);
}

// product (num_rows x kPanel) [+]= inputs (num_rows x kStride) * a panel's chunk.
template <class Value>
void multiply_chunk(
    const float* inputs, int num_rows, const Value* tiles, float* product, int num_pairs, bool accumulate) {
    const Packed<Value> packed = {tiles};
    if (num_rows < kWidenFrom<Value>) {
        for_strips<kPackedStrip>(num_rows, [&](int first, auto count) {
            for (int output = 0; output < kPanel; output += width(count))
                multiply<count>(
                    inputs + first * kStride, packed, output, product + first * kPanel + output, num_pairs, accumulate);
        });
        return;
    }
    alignas(64) float weights[kChunk * kWidth];
    const char* ahead = reinterpret_cast<const char*>(tiles + num_pairs / kTile * kPanelStep);  // the next chunk
    for (int output = 0; output < kPanel; output += kWidth, ahead += num_pairs * kLine) {
        for (int number = 0; number < num_pairs; ++number)
            for (int i = 0; i < kWidth; i += kLanes) {
                store(weights + 2 * number * kWidth + i, packed.first(number, output + i));
                store(weights + (2 * number + 1) * kWidth + i, packed.second(number, output + i));
            }
        for_strips<kStrip>(num_rows, [&](int first, auto count) {
            multiply<count>(
                inputs + first * kStride, Widened{weights, ahead}, 0, product + first * kPanel + output, num_pairs,
                accumulate);
        });
    }
}

// output (num_rows x num_outputs) = rows (num_rows x num_inputs) * weight + bias (unless null). `weight.of_thread()` is
// what a thread asks for the chunks of panels: (column, first input, number of inputs).
template <class Value, class Weight>
void linear(
    const Value* rows, const Weight& weight, const Value* bias, Results<Value> output, int64_t num_rows,
    int64_t num_outputs, int64_t num_inputs, int64_t num_threads) {
    const int64_t num_chunks = (num_inputs + kChunk - 1) / kChunk;
    const int64_t num_blocks = (num_rows + kBlockRows - 1) / kBlockRows;
    const int64_t block_rows = (num_rows + num_blocks - 1) / num_blocks;
    const auto inputs = buffer<float>(static_cast<size_t>(block_rows * num_chunks * kStride));
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        const auto product = buffer<float>(static_cast<size_t>(block_rows * kPanel));
        auto&& chunks = weight.of_thread();
        for (int64_t block = 0; block < num_rows; block += block_rows) {
            const int count = static_cast<int>(std::min(block_rows, num_rows - block));
#pragma omp for
            for (int64_t row = 0; row < count; ++row)
                for (int64_t i = 0; i < num_inputs; i += kLanes)
                    store(
                        inputs.get() + (i / kChunk * count + row) * kStride + i % kChunk,
                        load(rows + (block + row) * num_inputs + i));
#pragma omp for
            for (int64_t column = 0; column < num_outputs; column += kPanel) {
                for (int64_t first = 0; first < num_inputs; first += kChunk) {
                    const int here = static_cast<int>(std::min<int64_t>(kChunk, num_inputs - first));
                    multiply_chunk(
                        inputs.get() + first / kChunk * count * kStride, count, chunks(column, first, here),
                        product.get(), here / 2, first > 0);
                }
                for (int row = 0; row < count; ++row)
                    for (int i = 0; i < kPanel; i += kLanes) {
                        const Floats sum = load(product.get() + row * kPanel + i);
                        output.put(
                            (block + row) * num_outputs + column + i,
                            bias == nullptr ? sum : sum + load(bias + column + i));
                    }
            }
        }
    }
}

}  // namespace pdmesh
