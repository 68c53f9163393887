// Linear layers whose weights stay packed as numbers that are no integers: see ../packed.h. A chunk of a panel is
// computed into the first-level cache, rounded and in the order of plain weights, and multiplied as they are.

#include "codes.h"
#include "products.h"

namespace {

using namespace pdmesh;

// Numbers of codes that are at the top of words, kScale times smaller.
struct Float8 {
    static constexpr int kBits = 8;
    static constexpr float kScale = 0x1p120f;

    explicit Float8(const PackedWeight&) {}
    Floats operator()(Words codes) const {
        return (Floats)((Ints)codes >> 4 & splat(static_cast<int32_t>(0x87f00000)));
    }
};

class Table {
public:
    static constexpr int kBits = 4;
    static constexpr float kScale = 1.0f;

#if defined(__AVX512F__)
    explicit Table(const PackedWeight& weight) : numbers(load(weight.table)) {}
    Floats operator()(Words codes) const { return _mm512_permutexvar_ps((__m512i)(codes >> 28), numbers); }

private:
    Floats numbers;
#elif defined(__AVX2__)
    explicit Table(const PackedWeight& weight) : low(load(weight.table)), high(load(weight.table + 8)) {}
    Floats operator()(Words codes) const {
        const __m256i index = (__m256i)(codes >> 28);  // of which three bits count
        return _mm256_blendv_ps(
            _mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index), (__m256)codes);
    }

private:
    Floats low, high;
#else
    explicit Table(const PackedWeight& weight) : numbers(weight.table) {}
    Floats operator()(Words codes) const {
        Floats found;
        for (int i = 0; i < kLanes; ++i) found[i] = numbers[codes[i] >> 28];
        return found;
    }

private:
    const float* numbers;
#endif
};

// Pairs of weights that are numbers, rounded as `narrow` does.
inline Words pairs_of(Floats first, Floats second, Bf16) {
    const auto rounded = [](Words bits) { return bits + 0x7fff + (bits >> 16 & 1); };
    return rounded((Words)first) >> 16 | (rounded((Words)second) & 0xffff0000);
}
inline Words pairs_of(Floats first, Floats second, F16) {
    return words_of(narrow(first, F16())) | words_of(narrow(second, F16())) << 16;
}

// A thread's chunks.
template <class Value, class Numbers>
class Chunks {
public:
    Chunks(const PackedWeight& weight, int64_t num_inputs)
        : weight(weight), num_inputs(num_inputs), numbers(weight), tiles(buffer<Value>(kChunk * kPanel)) {}

    const Value* operator()(int64_t column, int64_t first, int count) {
        const int64_t panel = column / kPanel, size = weight.group_size;
        expand_factors(
            weight.scales, panel, num_groups(weight, num_inputs), first / size, (count + size - 1) / size, scales);
        const uint8_t* step = weight.codes + (panel * num_inputs + first) / kStep * step_bytes(Numbers::kBits);
        for (int input = 0; input < count; input += 8) {
            write(step, input % kStep / 8, scales + input / size * kPanel, tiles.get() + input / kStep * kPanelStep);
            if (input % kStep == kStep - 8) step += step_bytes(Numbers::kBits);
        }
        return tiles.get();
    }

private:
    static constexpr int kLeastGroup = 16;

    const PackedWeight& weight;
    const int64_t num_inputs;
    const Numbers numbers;
    const Buffer<Value> tiles;
    alignas(64) float scales[kChunk / kLeastGroup * kPanel];

    // A quarter of a step: 8 inputs, whose scales are those of one group.
    void write(const uint8_t* step, int quarter, const float* group_scales, Value* to) const {
        fetch<Numbers::kBits>(step, quarter);
        for (int output = 0; output < kPanel; output += kLanes) {
            const Floats scale = load(group_scales + output) * splat(Numbers::kScale);
            Value* line = to + output / kTile * kTileValues + quarter * 4 * kStep + output % kTile * 2;
#pragma GCC unroll 4
            for (int pair = 0; pair < 4; ++pair, line += kStep) {
                const auto weights = [&](int i) {
                    return numbers(code_bits<Numbers::kBits>(step, quarter, output, i)) * scale;
                };
                const Words pairs = pairs_of(weights(2 * pair), weights(2 * pair + 1), Value());
                std::memcpy(line, &pairs, sizeof(pairs));
            }
        }
    }
};

template <class Value, class Numbers>
struct RoundedWeight {
    const PackedWeight& weight;
    int64_t num_inputs;

    Chunks<Value, Numbers> of_thread() const { return {weight, num_inputs}; }
};

template <class Value>
void linear_rounded(
    const Value* rows, const PackedWeight& weight, const Value* bias, Results<Value> output, int64_t num_rows,
    int64_t num_outputs, int64_t num_inputs, int64_t num_threads) {
    if (weight.kind == kFloat8)
        linear(
            rows, RoundedWeight<Value, Float8>{weight, num_inputs}, bias, output, num_rows, num_outputs, num_inputs,
            num_threads);
    else
        linear(
            rows, RoundedWeight<Value, Table>{weight, num_inputs}, bias, output, num_rows, num_outputs, num_inputs,
            num_threads);
}

}  // namespace

extern "C" {

// output (num_rows x num_outputs, in fp32 if `is_wide`) = rows (num_rows x num_inputs) * weight + bias (unless null).
void pdmesh_linear_rounded(
    const Bf16* rows, const PackedWeight* weight, const Bf16* bias, void* output, int64_t is_wide, int64_t num_rows,
    int64_t num_outputs, int64_t num_inputs, int64_t num_threads) {
    linear_rounded<Bf16>(
        rows, *weight, bias, {output, is_wide != 0}, num_rows, num_outputs, num_inputs, num_threads);
}

void pdmesh_linear_rounded_f16(
    const F16* rows, const PackedWeight* weight, const F16* bias, void* output, int64_t is_wide, int64_t num_rows,
    int64_t num_outputs, int64_t num_inputs, int64_t num_threads) {
    linear_rounded<F16>(rows, *weight, bias, {output, is_wide != 0}, num_rows, num_outputs, num_inputs, num_threads);
}

}  // extern "C"
