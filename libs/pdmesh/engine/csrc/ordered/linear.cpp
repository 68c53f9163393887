// Linear layers with plain weights: see products.h.

#include "products.h"

namespace {

using namespace pdmesh;

template <class Value>
struct PlainWeight {
    const Value* packed;
    int64_t num_inputs;

    const PlainWeight& of_thread() const { return *this; }
    const Value* operator()(int64_t column, int64_t first, int) const {
        return packed + column * num_inputs + first * kPanel;
    }
};

}  // namespace

extern "C" {

// weight (num_outputs x num_inputs), packed.
void pdmesh_pack_linear(const uint16_t* weight, uint16_t* packed, int64_t num_outputs, int64_t num_inputs) {
    for (int64_t panel = 0; panel < num_outputs; panel += kPanel)
        for (int64_t k = 0; k < num_inputs; k += kStep, packed += kPanelStep)
            for (int64_t row = 0; row < kPanel; ++row) {
                const uint16_t* from = weight + (panel + row) * num_inputs + k;
                uint16_t* to = packed + row / kTile * kTileValues + row % kTile * 2;
                for (int pair = 0; pair < kTile; ++pair) std::memcpy(to + pair * kStep, from + 2 * pair, 4);
            }
}

// output (num_rows x num_inputs): rows `ids` of the weight that was packed.
void pdmesh_unpack_rows(
    const uint16_t* packed, const int64_t* ids, uint16_t* output, int64_t num_rows, int64_t num_inputs) {
    for (int64_t i = 0; i < num_rows; ++i) {
        const int64_t id = ids[i], tile = id % kPanel / kTile;
        const uint16_t* from = packed + (id - id % kPanel) * num_inputs + tile * kTileValues + id % kTile * 2;
        for (int64_t k = 0; k < num_inputs; k += kStep, from += kPanelStep)
            for (int pair = 0; pair < kTile; ++pair)
                std::memcpy(output + i * num_inputs + k + 2 * pair, from + pair * kStep, 4);
    }
}

// output (num_rows x num_outputs, in fp32 if `is_wide`) = rows (num_rows x num_inputs) * packed + bias (unless null).
void pdmesh_linear(
    const Bf16* rows, const Bf16* packed, const Bf16* bias, void* output, int64_t is_wide, int64_t num_rows,
    int64_t num_outputs, int64_t num_inputs, int64_t num_threads) {
    const PlainWeight<Bf16> weight = {packed, num_inputs};
    linear<Bf16>(rows, weight, bias, {output, is_wide != 0}, num_rows, num_outputs, num_inputs, num_threads);
}

void pdmesh_linear_f16(
    const F16* rows, const F16* packed, const F16* bias, void* output, int64_t is_wide, int64_t num_rows,
    int64_t num_outputs, int64_t num_inputs, int64_t num_threads) {
    const PlainWeight<F16> weight = {packed, num_inputs};
    linear<F16>(rows, weight, bias, {output, is_wide != 0}, num_rows, num_outputs, num_inputs, num_threads);
}

}  // extern "C"
