// Runs every ordered kernel on values of its own and prints a hash of each one's results: equal at every level and on
// every processor, under an emulator too. Compiled together with csrc/ordered, without Python.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

using Value = uint16_t;  // bits of a bf16 or a float16

#define KERNELS(suffix)                                                                                                \
    void pdmesh_attention##suffix(                                                                                     \
        const Value*, int64_t, const Value*, Value*, float*, float*, const int64_t*, int64_t, const int64_t*,          \
        int64_t, int64_t, int64_t, int64_t, int64_t, float, int64_t, float, int64_t);                                  \
    void pdmesh_add_norm##suffix(float*, const float*, const float*, Value*, int64_t, int64_t, float, int64_t);        \
    void pdmesh_norm##suffix(const void*, int64_t, const float*, void*, int64_t, int64_t, float, int64_t);             \
    void pdmesh_rotate_and_store##suffix(                                                                              \
        Value*, const Value*, const Value*, const int64_t*, Value*, int64_t, int64_t, int64_t, int64_t, int64_t,       \
        int64_t, int64_t);                                                                                             \
    void pdmesh_gated_silu##suffix(const Value*, Value*, int64_t, int64_t, int64_t);                                   \
    void pdmesh_linear##suffix(                                                                                        \
        const Value*, const Value*, const Value*, void*, int64_t, int64_t, int64_t, int64_t, int64_t);

extern "C" {
KERNELS()
KERNELS(_f16)
void pdmesh_pack_linear(const Value*, Value*, int64_t, int64_t);
void pdmesh_unpack_rows(const Value*, const int64_t*, Value*, int64_t, int64_t);
}

namespace {

// A linear congruential generator: the same values everywhere.
struct Random {
    uint64_t state;

    uint32_t next() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<uint32_t>(state >> 33);
    }
    // Of either sign, from 2^-lowest to 2^2, as bits of a bf16 or float16.
    std::vector<Value> values(size_t size, bool half, uint32_t lowest = 6) {
        std::vector<Value> result(size);
        for (Value& value : result) {
            const uint32_t sign = next() & 1, mantissa = next(), exponent = 1 - next() % (lowest + 2);
            value = static_cast<Value>(
                half ? sign << 15 | (15 + exponent) << 10 | (mantissa & 0x3ff)
                     : sign << 15 | (127 + exponent) << 7 | (mantissa & 0x7f));
        }
        return result;
    }
    // Of either sign and size, as a sum of layers has them: exact quotients.
    std::vector<float> floats(size_t size) {
        std::vector<float> result(size);
        for (float& value : result) value = (static_cast<float>(next() % 0x1000000) - 0x800000) / 0x40000;
        return result;
    }
};

// FNV-1a.
struct Hash {
    uint64_t value = 14695981039346656037u;

    template <class T>
    void add(const std::vector<T>& data) {
        const auto* bytes = reinterpret_cast<const unsigned char*>(data.data());
        for (size_t i = 0; i < data.size() * sizeof(T); ++i) value = (value ^ bytes[i]) * 1099511628211u;
    }
};

struct Kernels {
    const char* dtype;
    bool half;
    decltype(&pdmesh_attention) attention;
    decltype(&pdmesh_add_norm) add_norm;
    decltype(&pdmesh_norm) norm;
    decltype(&pdmesh_rotate_and_store) rotate_and_store;
    decltype(&pdmesh_gated_silu) gated_silu;
    decltype(&pdmesh_linear) linear;
};

void report(const Kernels& kernels, const char* name, const Hash& hash) {
    std::printf("%s %s %016llx\n", kernels.dtype, name, static_cast<unsigned long long>(hash.value));
}

void hash_attention(const Kernels& kernels) {
    Hash hash;
    Random random = {1};
    const int64_t shapes[][2] = {{8, 1}, {24, 3}, {64, 7}, {80, 1}, {128, 2}};  // head_dim, queries of a key head
    for (const auto& [head_dim, group] : shapes) {
        const int64_t block_size = 5, num_kv_heads = 2, num_heads = group * num_kv_heads;
        // A decode, a chunk, and one beyond a segment of keys.
        const int64_t spans[] = {
            0, 1, 150, 0, INT64_MAX, 1, 9, 5, 40, INT64_MAX, 10, 4, head_dim == 24 ? 2060 : 130, 32, INT64_MAX};
        std::vector<int64_t> tables(32 + 420);
        for (size_t i = 0; i < tables.size(); ++i) tables[i] = static_cast<int64_t>((i * 7) % tables.size());
        const auto cache = random.values(tables.size() * 2 * num_kv_heads * block_size * head_dim, kernels.half);
        const auto query = random.values(14 * num_heads * head_dim, kernels.half);
        std::vector<Value> output(query.size());
        std::vector<float> lse(14 * num_heads);
        kernels.attention(
            query.data(), num_heads * head_dim, cache.data(), output.data(), nullptr, lse.data(), spans, 3, tables.data(),
            num_heads, num_kv_heads, num_kv_heads, block_size, head_dim, 0.125f, 0, 0.0f, 1);
        hash.add(output);
        hash.add(lse);
    }
    report(kernels, "attention", hash);
}

void hash_rows(const Kernels& kernels) {
    Hash norm, rotation, silu;
    Random random = {2}, wide = {4};
    for (const int64_t size : {1, 15, 16, 40, 100}) {
        const auto heads = wide.values(3 * size, kernels.half);
        const auto delta = wide.floats(3 * size), weight = wide.floats(size);
        auto hidden = wide.floats(3 * size);
        std::vector<Value> output(3 * size);
        kernels.add_norm(hidden.data(), delta.data(), weight.data(), output.data(), 3, size, 1e-6f, 1);
        norm.add(hidden);
        norm.add(output);
        kernels.norm(heads.data(), 0, weight.data(), output.data(), 3, size, 1e-6f, 1);
        norm.add(output);
        kernels.norm(hidden.data(), 1, weight.data(), hidden.data(), 3, size, 1e-6f, 1);
        norm.add(hidden);
        kernels.gated_silu(random.values(6 * size, kernels.half).data(), output.data(), 3, size, 1);
        silu.add(output);
        const int64_t head_dim = 2 * size, slots[] = {5, 0, 7};
        auto qkv = random.values(3 * 5 * head_dim, kernels.half);
        const auto angles = random.values(3 * size, kernels.half);
        std::vector<Value> cache(2 * 2 * 4 * head_dim);
        kernels.rotate_and_store(
            qkv.data(), angles.data(), angles.data(), slots, cache.data(), 3, 3, 1, 1, 4, head_dim, 1);
        rotation.add(qkv);
        rotation.add(cache);
    }
    report(kernels, "add_norm", norm);
    report(kernels, "rotate_and_store", rotation);
    report(kernels, "gated_silu", silu);
}

void hash_linear(const Kernels& kernels) {
    Hash hash;
    Random random = {3};
    for (const int64_t num_inputs : {32, 96, 448})
        for (const int64_t num_outputs : {32, 96})
            for (const int64_t num_rows : {1, 3, 8, 70}) {
                const auto weight = random.values(num_outputs * num_inputs, kernels.half);
                const auto bias = random.values(num_outputs, kernels.half);
                const auto rows = random.values(num_rows * num_inputs, kernels.half);
                std::vector<Value> packed(weight.size()), output(num_rows * num_outputs), unpacked(num_inputs);
                pdmesh_pack_linear(weight.data(), packed.data(), num_outputs, num_inputs);
                kernels.linear(
                    rows.data(), packed.data(), bias.data(), output.data(), 0, num_rows, num_outputs, num_inputs,
                    1);
                const int64_t id = num_outputs - 1;
                pdmesh_unpack_rows(packed.data(), &id, unpacked.data(), 1, num_inputs);
                hash.add(packed);
                hash.add(output);
                hash.add(unpacked);
            }
    report(kernels, "linear", hash);
}

}  // namespace

int main() {
    const Kernels all[] = {
        {"bfloat16", false, pdmesh_attention, pdmesh_add_norm, pdmesh_norm, pdmesh_rotate_and_store,
         pdmesh_gated_silu, pdmesh_linear},
        {"float16", true, pdmesh_attention_f16, pdmesh_add_norm_f16, pdmesh_norm_f16, pdmesh_rotate_and_store_f16,
         pdmesh_gated_silu_f16, pdmesh_linear_f16},
    };
    for (const Kernels& kernels : all) {
        hash_attention(kernels);
        hash_rows(kernels);
        hash_linear(kernels);
    }
}
