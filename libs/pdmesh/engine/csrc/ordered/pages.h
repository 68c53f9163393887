// Where the keys and values of a sequence lie, and keys turned so that neighbouring lanes are neighbouring keys.
#pragma once

#include <algorithm>

#include "vec.h"

namespace pdmesh {

constexpr int kKeyBlock = 128;       // keys between two settlements of the maximum; blocks begin at multiples of it
constexpr int kPanel = 2 * kLanes;   // keys that lie side by side once they are turned
constexpr int kMaxHeadDim = 1024;
static_assert(kKeyBlock % kPanel == 0);

// One layer's cache, (blocks, key or value, cache_heads, block_size, head_dim), from the first of one's own heads on, and
// the shapes that go with it.
template <class Value>
struct Cache {
    const Value* data;
    int64_t cache_heads, block_size, head_dim, group;
    float scale;
    int64_t window;  // keys that a row sees, its own among them; 0: all
    float cap;       // of scaled scores; 0: none
};

// Rows of up to kKeyBlock keys and values of one head, from a multiple of kKeyBlock on.
template <class Value>
struct KeyBlock {
    int count;
    const Value* keys[kKeyBlock];  // zeros beyond `count`, so that a panel is always whole
    const Value* values[kKeyBlock];

    // Those from position `first` on, of a sequence that ends at `end`.
    void locate(const Cache<Value>& cache, const int64_t* table, int64_t head, int64_t first, int64_t end) {
        static const Value zeros[kMaxHeadDim] = {};
        count = static_cast<int>(std::clamp<int64_t>(end - first, 0, kKeyBlock));
        const int64_t half = cache.cache_heads * cache.block_size * cache.head_dim;
        int64_t block = first / cache.block_size, offset = first % cache.block_size;
        for (int key = 0; key < count; ++block, offset = 0) {
            const Value* row = cache.data + table[block] * 2 * half + (head * cache.block_size + offset) * cache.head_dim;
            for (; offset < cache.block_size && key < count; ++offset, ++key, row += cache.head_dim) {
                keys[key] = row;
                values[key] = row + half;
            }
        }
        std::fill(keys + count, keys + kKeyBlock, zeros);
    }
};

// Asks the second-level cache for `count` values of a row: pages lie apart, so that the processor does not guess the
// next one.
template <class Value>
inline void prefetch_values(const Value* row, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(Value))) {
        __builtin_prefetch(row + i, 0, 2);
        __asm__ volatile("");  // GCC takes a function that only prefetches for one without effect, and drops calls of it
    }
}

#if defined(__AVX512F__)
#define PDMESH_ZIP(name, suffix) (Words) _mm512_unpack##name##_epi##suffix((__m512i)a, (__m512i)b)
#elif defined(__AVX2__)
#define PDMESH_ZIP(name, suffix) (Words) _mm256_unpack##name##_epi##suffix((__m256i)a, (__m256i)b)
#elif defined(__x86_64__)
#define PDMESH_ZIP(name, suffix) (Words) _mm_unpack##name##_epi##suffix((__m128i)a, (__m128i)b)
#endif

// Words, or pairs of words, of the lower (higher) halves of a and b in turns, within each four lanes.
#if defined(PDMESH_ZIP)
inline Words zip_low32(Words a, Words b) { return PDMESH_ZIP(lo, 32); }
inline Words zip_high32(Words a, Words b) { return PDMESH_ZIP(hi, 32); }
inline Words zip_low64(Words a, Words b) { return PDMESH_ZIP(lo, 64); }
inline Words zip_high64(Words a, Words b) { return PDMESH_ZIP(hi, 64); }
#undef PDMESH_ZIP
#else
inline Words zip_low32(Words a, Words b) { return Words{a[0], b[0], a[1], b[1]}; }
inline Words zip_high32(Words a, Words b) { return Words{a[2], b[2], a[3], b[3]}; }
inline Words zip_low64(Words a, Words b) { return Words{a[0], a[1], b[0], b[1]}; }
inline Words zip_high64(Words a, Words b) { return Words{a[2], a[3], b[2], b[3]}; }
#endif

// 16 bytes at `offset` of each fourth row, from rows[0] on: four lanes a row.
template <class Value>
inline Words load_quads(const Value* const* rows, int64_t offset) {
#if defined(__AVX512F__)
    const auto quad = [&](int row) { return _mm_loadu_si128((const __m128i*)(rows[row] + offset)); };
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(quad(0)), quad(4), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(quad(8)), quad(12), 1);
    return (Words)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#elif defined(__AVX2__)
    const auto quad = [&](int row) { return _mm_loadu_si128((const __m128i*)(rows[row] + offset)); };
    return (Words)_mm256_inserti128_si256(_mm256_castsi128_si256(quad(0)), quad(4), 1);
#else
    Words words;
    std::memcpy(&words, rows[0] + offset, sizeof(words));
    return words;
#endif
}

// The first and the second of two values in each lane, widened.
inline Floats widen_first(Words pairs, Bf16) { return (Floats)(pairs << 16); }
inline Floats widen_second(Words pairs, Bf16) { return (Floats)(pairs & 0xffff0000); }
inline Floats widen_first(Words pairs, F16) { return widen(__builtin_convertvector(pairs & 0xffff, Halves), F16()); }
inline Floats widen_second(Words pairs, F16) { return widen(__builtin_convertvector(pairs >> 16, Halves), F16()); }

// 2 * kLanes values, widened, in whichever order is cheapest: bf16 ones at even places, then at odd ones.
inline void load_both(const Bf16* from, Floats& first, Floats& second) {
    Words pairs;
    std::memcpy(&pairs, from, sizeof(pairs));
    first = widen_first(pairs, Bf16());
    second = widen_second(pairs, Bf16());
}
inline void load_both(const F16* from, Floats& first, Floats& second) {
    first = load(from);
    second = load(from + kLanes);
}

// Stores what is in the order of `load_both`.
inline void store_both(Bf16* to, Floats first, Floats second) {
    Bf16 values[2][kLanes];
    store(values[0], first);
    store(values[1], second);
    for (int i = 0; i < kLanes; ++i) {
        to[2 * i] = values[0][i];
        to[2 * i + 1] = values[1][i];
    }
}
inline void store_both(F16* to, Floats first, Floats second) {
    store(to, first);
    store(to + kLanes, second);
}

// Stores what is in the order of `load_both` of values of the third argument's type.
inline void store_wide(float* to, Floats first, Floats second, Bf16) {
    float values[2][kLanes];
    store(values[0], first);
    store(values[1], second);
    for (int i = 0; i < kLanes; ++i) {
        to[2 * i] = values[0][i];
        to[2 * i + 1] = values[1][i];
    }
}
inline void store_wide(float* to, Floats first, Floats second, F16) {
    store(to, first);
    store(to + kLanes, second);
}

// kPanel keys, widened and turned: `panel` is (head_dim x kPanel). head_dim is a multiple of 8.
template <class Value>
inline void turn_keys(const Value* const* keys, int64_t head_dim, float* panel) {
    for (int first = 0; first < kPanel; first += kLanes) {
        const Value* rows[kLanes];
        std::copy_n(keys + first, kLanes, rows);
        float* to = panel + first;
        for (int64_t dim = 0; dim < head_dim; dim += 8, to += 8 * kPanel) {
            const Words a = load_quads(rows, dim), b = load_quads(rows + 1, dim);
            const Words c = load_quads(rows + 2, dim), d = load_quads(rows + 3, dim);
            const Words ab = zip_low32(a, b), cd = zip_low32(c, d), ef = zip_high32(a, b), gh = zip_high32(c, d);
            const Words pairs[4] = {zip_low64(ab, cd), zip_high64(ab, cd), zip_low64(ef, gh), zip_high64(ef, gh)};
#pragma GCC unroll 4
            for (int pair = 0; pair < 4; ++pair) {
                store(to + 2 * pair * kPanel, widen_first(pairs[pair], Value()));
                store(to + (2 * pair + 1) * kPanel, widen_second(pairs[pair], Value()));
            }
        }
    }
}

}  // namespace pdmesh
