// Weights of 4, 5, 6 or 8 bits as they are packed, for both kinds of kernels.
//
// A weight is (code * scale - minimum), where scale and minimum belong to a group of 16, 32, 64 or 128 neighbouring
// inputs of an output. Products of inputs and codes are summed over a group in fp32, and only sums are scaled:
//
//   total = total + scale * sum(input * code) - minimum * sum(input), group after group
//
// Codes are integers with a sign (two's complement) or without, or of 4 bits, numbers with a sign, two bits of exponent
// and one of mantissa (E2M1), which stand for twice their value, so that all are integers. Of 8 bits, they are signed.
//
// Others stand for numbers that are no integers: of 8 bits, floats with a sign, four bits of exponent and three of
// mantissa (E4M3); of 4 bits, numbers of a table. Their weights, number * scale, are computed in fp32, rounded to the
// type of the inputs, and multiplied as weights of that type are: the bits of a linear layer with plain weights.
//
// For each panel of 32 outputs and each step of 32 inputs there are 128 bytes for each bit, in two tiles of 16 outputs,
// each output a lane of 32 bits:
//
//   4 bits: a line for each 8 inputs: input 2k + p at bit 4k + 16p
//   5 bits: the lower four as above in both tiles, then a line a tile: the fifth of input 2k + p at bit k + 16p
//   6 bits: the lower four as above in both tiles, then two lines a tile, one for each 16 inputs: the upper two of input
//           2k + p at bit 2k + 16p
//   8 bits: in half a line for each 2 inputs, a byte each, outputs side by side
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pdmesh {

constexpr int kCodeTile = 16, kCodeStep = 32, kCodePanel = 32;
constexpr int kCodeLine = 64;  // bytes

enum CodeKind : int64_t { kUnsigned = 0, kSigned = 1, kFloat = 2, kFloat8 = 3, kTable = 4 };

// Scales or minima of all groups and outputs: bases, times multipliers if there are any. Bases are for so many groups;
// for each panel, and each base or group, there are 32 values side by side. With a table, multipliers are numbers of its
// values, and each output's offset is added to the products, which are rounded before.
struct Factors {
    const void* bases;  // null: there are none
    int64_t base_type;  // 0: bf16, 1: float16, 2: fp32, 3: a power of two by its exponent, a byte, of which 128 is 1
    int64_t groups_per_base;
    const int8_t* multipliers;  // or null
    const float* table;         // 256 values, or null
    const float* offsets;       // of outputs, where there is a table
};

struct PackedWeight {
    const uint8_t* codes;
    int64_t bits, kind;
    int64_t group_size;  // inputs
    Factors scales, minima;
    const float* table;  // of 16 numbers, for codes that stand for them
};

constexpr int64_t step_bytes(int64_t bits) { return bits * kCodePanel * kCodeStep / 8; }

inline int64_t num_groups(const PackedWeight& weight, int64_t num_inputs) {
    return (num_inputs + weight.group_size - 1) / weight.group_size;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// Of finite values.
inline float widen_half(uint16_t half) {
    const float magnitude = float_of((half & 0x7fffu) << 13) * 0x1p112f;
    return half & 0x8000 ? -magnitude : magnitude;
}

// 2^(exponent - 128); the two smallest ones are subnormal.
inline float power_of_two(uint8_t exponent) {
    return float_of(exponent < 2 ? 0x00200000u << exponent : static_cast<uint32_t>(exponent - 1) << 23);
}

// A panel's, of finite values: the same bits either way.
inline void widen_halves(const uint16_t* from, float* to) {
#if defined(__AVX512F__)
    for (int i = 0; i < kCodePanel; i += 16)
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
#elif defined(__F16C__)
    for (int i = 0; i < kCodePanel; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#else
    for (int i = 0; i < kCodePanel; ++i) to[i] = widen_half(from[i]);
#endif
}

inline float base(const Factors& factors, int64_t index) {
    switch (factors.base_type) {
        case 0: return float_of(static_cast<uint32_t>(static_cast<const uint16_t*>(factors.bases)[index]) << 16);
        case 1: return widen_half(static_cast<const uint16_t*>(factors.bases)[index]);
        case 3: return power_of_two(static_cast<const uint8_t*>(factors.bases)[index]);
        default: return static_cast<const float*>(factors.bases)[index];
    }
}

// to (count x 32): factors of a panel's groups from `first` on, of so many in all.
inline void expand_factors(
    const Factors& factors, int64_t panel, int64_t groups, int64_t first, int64_t count, float* to) {
    const int64_t bases = (groups + factors.groups_per_base - 1) / factors.groups_per_base;
    for (int64_t group = first; group < first + count; ++group, to += kCodePanel) {
        const int64_t at = (panel * bases + group / factors.groups_per_base) * kCodePanel;
        if (factors.base_type == 0) {
            const uint16_t* from = static_cast<const uint16_t*>(factors.bases) + at;
            for (int i = 0; i < kCodePanel; ++i) to[i] = float_of(static_cast<uint32_t>(from[i]) << 16);
        } else if (factors.base_type == 1) {
            const uint16_t* from = static_cast<const uint16_t*>(factors.bases) + at;
            widen_halves(from, to);
        } else if (factors.base_type == 3) {
            const uint8_t* from = static_cast<const uint8_t*>(factors.bases) + at;
            for (int i = 0; i < kCodePanel; ++i) to[i] = power_of_two(from[i]);
        } else {
            std::memcpy(to, static_cast<const float*>(factors.bases) + at, kCodePanel * sizeof(float));
        }
        if (factors.multipliers == nullptr) continue;
        const int8_t* by = factors.multipliers + (panel * groups + group) * kCodePanel;
        if (factors.table == nullptr) {
            for (int i = 0; i < kCodePanel; ++i) to[i] *= by[i];
            continue;
        }
        for (int i = 0; i < kCodePanel; ++i) to[i] *= factors.table[static_cast<uint8_t>(by[i])];
        __asm__ volatile("" ::: "memory");  // no level makes one operation of both
        for (int i = 0; i < kCodePanel; ++i) to[i] += factors.offsets[panel * kCodePanel + i];
    }
}

// Where the parts of one code lie within a step: bytes from its begin, and bits to be shifted away.
struct CodePlace {
    int low, low_shift, high, high_shift;
};

inline CodePlace code_place(int bits, int output, int input) {
    const int tile = output / kCodeTile, lane = output % kCodeTile, pair = input / 2, part = input % 2;
    if (bits == 8) return {tile * 8 * kCodeLine + pair * kCodeLine / 2 + lane * 2 + part, 0, 0, 0};
    const int low = (tile * 4 + pair / 4) * kCodeLine + lane * 4, low_shift = pair % 4 * 4 + part * 16;
    const int highs = 8 * kCodeLine;
    if (bits == 5) return {low, low_shift, highs + tile * kCodeLine + lane * 4, pair + part * 16};
    if (bits == 6)
        return {low, low_shift, highs + (tile * 2 + pair / 8) * kCodeLine + lane * 4, pair % 8 * 2 + part * 16};
    return {low, low_shift, 0, 0};
}

inline uint32_t word_at(const uint8_t* from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof(word));
    return word;
}

// codes (num_outputs x num_inputs, a byte each, of which the lower bits count), packed. Both are multiples of 32, and
// `packed` is zeros.
inline void pack_codes(const uint8_t* codes, uint8_t* packed, int bits, int64_t num_outputs, int64_t num_inputs) {
    const auto put = [](uint8_t* at, uint32_t value, int shift) {
        const uint32_t word = word_at(at) | value << shift;
        std::memcpy(at, &word, sizeof(word));
    };
    for (int64_t panel = 0; panel < num_outputs; panel += kCodePanel)
        for (int64_t step = 0; step < num_inputs; step += kCodeStep, packed += step_bytes(bits))
            for (int output = 0; output < kCodePanel; ++output)
                for (int input = 0; input < kCodeStep; ++input) {
                    const uint32_t code = codes[(panel + output) * num_inputs + step + input];
                    const CodePlace place = code_place(bits, output, input);
                    if (bits == 8) {
                        packed[place.low] = static_cast<uint8_t>(code);
                        continue;
                    }
                    put(packed + place.low, code & 15, place.low_shift);
                    if (bits > 4) put(packed + place.high, code >> 4 & ((1u << (bits - 4)) - 1), place.high_shift);
                }
}

// What a code that is an integer stands for.
inline int number_of(uint32_t code, int bits, int64_t kind) {
    constexpr int kDoubled[] = {0, 1, 2, 3, 4, 6, 8, 12};
    if (kind == kFloat) return code & 8 ? -kDoubled[code & 7] : kDoubled[code & 7];
    const int half = 1 << (bits - 1);
    return kind == kSigned ? static_cast<int>(code ^ half) - half : static_cast<int>(code);
}

// E4M3, of finite values.
inline float widen_float8(uint32_t code) {
    const float magnitude = float_of((code & 0x7fu) << 20) * 0x1p120f;
    return code & 0x80 ? -magnitude : magnitude;
}

// One code's number, of a step's begin.
inline float number_at(const uint8_t* step, const PackedWeight& weight, int output, int input) {
    const int bits = static_cast<int>(weight.bits);
    const CodePlace place = code_place(bits, output, input);
    uint32_t code = step[place.low];
    if (bits < 8) code = word_at(step + place.low) >> place.low_shift & 15;
    if (bits == 5 || bits == 6)
        code |= (word_at(step + place.high) >> place.high_shift & ((1u << (bits - 4)) - 1)) << 4;
    if (weight.kind == kFloat8) return widen_float8(code);
    if (weight.kind == kTable) return weight.table[code];
    return static_cast<float>(number_of(code, bits, weight.kind));
}

// output (num_rows x num_inputs): rows `ids` of a weight.
inline void unpack_codes(
    const PackedWeight& weight, const int64_t* ids, float* output, int64_t num_rows, int64_t num_inputs) {
    const int64_t groups = num_groups(weight, num_inputs);
    const auto factor = [&](const Factors& factors, int64_t panel, int64_t group, int64_t lane) {
        const int64_t bases = (groups + factors.groups_per_base - 1) / factors.groups_per_base;
        const float value = base(factors, (panel * bases + group / factors.groups_per_base) * kCodePanel + lane);
        if (factors.multipliers == nullptr) return value;
        const int8_t by = factors.multipliers[(panel * groups + group) * kCodePanel + lane];
        if (factors.table == nullptr) return value * by;
        const volatile float product = value * factors.table[static_cast<uint8_t>(by)];
        return product + factors.offsets[panel * kCodePanel + lane];
    };
    const int bits = static_cast<int>(weight.bits);
    for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t panel = ids[row] / kCodePanel;
        const int lane = static_cast<int>(ids[row] % kCodePanel);
        const uint8_t* codes = weight.codes + panel * (num_inputs / kCodeStep) * step_bytes(bits);
        for (int64_t first = 0; first < num_inputs; first += weight.group_size) {
            const float scale = factor(weight.scales, panel, first / weight.group_size, lane);
            const bool has_minimum = weight.minima.bases != nullptr;
            const float minimum = has_minimum ? factor(weight.minima, panel, first / weight.group_size, lane) : 0.0f;
            const int64_t end = std::min(first + weight.group_size, num_inputs);
            for (int64_t i = first; i < end; ++i) {
                const float number = number_at(
                    codes + i / kCodeStep * step_bytes(bits), weight, lane, static_cast<int>(i % kCodeStep));
                output[row * num_inputs + i] = scale * number - minimum;
            }
        }
    }
}

}  // namespace pdmesh
