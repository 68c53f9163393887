// Columns of attention: where keys and values lie, and what is known of each query row while they are gone through.
//
// Scores are computed transposed, (keys x queries): a page's keys are a left operand as they lie in the cache, and
// softmax works lane by lane with no reduction across lanes. Queries of all heads that share a key-value head are
// columns of one product. Key blocks begin at multiples of kKeyBlock, whatever the chunk, a column never meets another,
// and both ways through them, wide.h and narrow.h, sum in the same order: results do not depend on batch composition or
// chunk boundaries, bit for bit.
#pragma once

#include <algorithm>

#include "../logarithm.h"
#include "tiles.h"

namespace pdmesh {

constexpr int kKeyBlock = 256;  // keys between two settlements of the maximum
constexpr int kSteps = kKeyBlock / kStep;
constexpr int kTaskRows = 1536;  // query rows of one task: its accumulators stay in the second-level cache
constexpr int kPrefetch = 64;  // keys between a page's request and its use
constexpr float kMasked = -1e30f;  // below any score, and finite: infinities would have to be told apart
constexpr float kCentred = 1.0f + 1.0f / 362.0f;  // a weight before truncation over its mean after
constexpr float kSlack = 8.0f;  // weights may grow to 2^kSlack before what was summed is scaled down

// One layer's cache, (blocks, key or value, cache_heads, block_size, head_dim), from the first of one's own heads on, and
// the shapes that go with it.
struct Cache {
    const bf16* data;
    int cache_heads, block_size, head_dim, group;
    float scale;
};

// Query rows first_row ... of one sequence's chunk, for num_heads_here key-value heads from `head` on; of one of them,
// row r is token r / group, head r % group.
struct Task {
    const int64_t* table;
    int start;  // position of the chunk's first token
    int last;   // key that no row sees beyond
    int first_row, num_rows;
    int head, num_heads_here;
    const bf16* query;  // of the chunk's first token and the head's first query head
    int64_t query_stride;
    bf16* output;  // or null: to `wide`
    float* wide;
    float* lse;  // or null
    int64_t num_heads;

    // The same rows for one of its heads.
    Task of(const Cache& cache, int number) const {
        Task one = *this;
        one.head += number;
        one.num_heads_here = 1;
        one.query += number * cache.group * cache.head_dim;
        if (output != nullptr) one.output += number * cache.group * cache.head_dim;
        if (wide != nullptr) one.wide += number * cache.group * cache.head_dim;
        if (lse != nullptr) one.lse += number * cache.group;
        return one;
    }

    // The last key that a row sees.
    int last_key(const Cache& cache, int row) const { return std::min(start + (first_row + row) / cache.group, last); }
    // Keys that its last row sees.
    int end(const Cache& cache) const { return last_key(cache, num_rows - 1) + 1; }
};

// Where 16 keys (half 0) or values (half 1) from position `first` on lie; zeros beyond the sequence's end.
inline const bf16* page(const Cache& cache, const Task& task, int half, int first, int end) {
    alignas(64) static const bf16 zeros[kTile * 1024] = {};
    if (first >= end) return zeros;
    const int64_t block = task.table[first / cache.block_size];
    const int64_t row = (block * 2 + half) * cache.cache_heads + task.head;
    return cache.data + (row * cache.block_size + first % cache.block_size) * cache.head_dim;
}

// Pages lie apart, so that the processor does not guess the next one. Asks for 16 keys or values.
// Not by _mm_prefetch: GCC takes a function that only prefetches for one without effect, and drops calls of it.
inline void prefetch(const Cache& cache, const Task& task, int half, int first, int end) {
    if (first >= end) return;
    const bf16* from = page(cache, task, half, first, end);
    for (int i = 0; i < kTile * cache.head_dim; i += 32) __asm__ volatile("prefetcht1 %0" : : "m"(from[i]));
}

// 2^((score - maximum) * scale), as bits of which the upper 16 are the weight.
//
// A float's bits, read as a number, are its logarithm but for a factor that depends on its mantissa m alone:
// 2^(m - 1) / m, here a cubic with a relative error below 7e-4, a sixth of what bf16 rounds off at most. Rounding
// is by truncation after a factor of kCentred. Weights below 2^-126 are 0.
class Weigher {
public:
    explicit Weigher(const Cache& cache) : factor_(_mm512_set1_ps(cache.scale * kLog2E * kOne)) {}

    // What a maximum adds to its scores' logarithms.
    __m512 shift(__m512 maximum) const { return _mm512_fnmadd_ps(maximum, factor_, _mm512_set1_ps(127 * kOne)); }

    __m512i operator()(__m512 score, __m512 shift) const {
        const __m512i mantissa = _mm512_set1_epi32(0x007fffff), one = _mm512_set1_epi32(0x3f800000);
        const __m512 line = _mm512_max_ps(_mm512_fmadd_ps(score, factor_, shift), _mm512_setzero_ps());
        const __m512i bits = _mm512_cvtps_epi32(line);
        const __m512 m = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bits, mantissa, one, 0xea));
        __m512 y = _mm512_set1_ps(kCentred * -0.1064457f);
        y = _mm512_fmadd_ps(y, m, _mm512_set1_ps(kCentred * 0.70747582f));
        y = _mm512_fmadd_ps(y, m, _mm512_set1_ps(kCentred * -1.37730757f));
        y = _mm512_fmadd_ps(y, m, _mm512_set1_ps(kCentred * 1.77561472f));
        return _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(bits), y));
    }

private:
    static constexpr float kOne = 8388608.0f;  // one binary order, in bits
    __m512 factor_;
};

// 16Q query rows: their block of scores, and what attention has made of them so far.
template <int Q>
struct Columns {
    static constexpr int kWidth = Q * kTile;

    float* output;       // (head_dim x kWidth), or for Q = 1 (16 x head_dim); to be divided by total
    float* maximum;      // a reference that no score exceeds by much, (kWidth)
    float* total;        // of weights, (kWidth)
    float* peak;         // of the block's scores, (kWidth)
    int32_t* positions;  // of the last key that each row sees, (kWidth)
    bf16* query;         // right operand, (head_dim x kWidth)

    // Sizes in floats.
    static int size(int head_dim) { return head_dim * kWidth + 4 * kWidth + head_dim * kWidth / 2; }

    Columns(float* memory, int head_dim)
        : output(memory),
          maximum(output + head_dim * kWidth),
          total(maximum + kWidth),
          peak(total + kWidth),
          positions(reinterpret_cast<int32_t*>(peak + kWidth)),
          query(reinterpret_cast<bf16*>(positions + kWidth)) {}

    void begin(const Cache& cache, const Task& task, int first) {
        const int dims = cache.head_dim;
        for (int q = 0; q < Q; ++q) {
            for (int pair = 0; pair < dims / 2; pair += kTile) {
                __m512i rows[kTile];
                for (int lane = 0; lane < kTile; ++lane) {
                    const int row = first + q * kTile + lane;
                    rows[lane] = row < task.num_rows
                                     ? _mm512_loadu_si512(query_row(cache, task, task.first_row + row) + 2 * pair)
                                     : _mm512_setzero_si512();
                }
                transpose(rows);
                bf16* tile = query + (pair / kTile * Q + q) * kTileValues;
                for (int row = 0; row < kTile; ++row) _mm512_store_si512(tile + row * kStep, rows[row]);
            }
        }
        for (int lane = 0; lane < kWidth; ++lane) {
            positions[lane] = task.last_key(cache, std::min(first + lane, task.num_rows - 1));
            maximum[lane] = peak[lane] = kMasked;
            total[lane] = 0;
        }
        std::fill_n(output, dims * kWidth, 0.0f);
    }

    // Products of 32 keys that its rows see any of, in the block that begins at first_key.
    int num_products(int first_key) const {
        return (std::clamp(positions[kWidth - 1] + 1 - first_key, 0, kKeyBlock) + kStep - 1) / kStep;
    }

    template <class Beside = Nothing>
    void score(const Cache& cache, const Left& keys, float* scores, const Beside& beside = {}) const {
        multiply<Q>(keys, query, scores, cache.head_dim / kStep, false, beside);
    }

    // Masks keys that a query does not see, and raises `peak` to the rest; of 32 keys from position `first` on.
    void rank(int first, float* scores) {
        const bool masks = first + kStep - 1 > positions[0];
        for (int q = 0; q < Q; ++q) {
            const __m512i last = _mm512_load_si512(positions + q * kTile);
            __m512 even = _mm512_load_ps(peak + q * kTile), odd = even;
            for (int key = 0; masks && key < kStep; ++key) {
                const __mmask16 later = _mm512_cmplt_epi32_mask(last, _mm512_set1_epi32(first + key));
                _mm512_mask_store_ps(scores + key * kWidth + q * kTile, later, _mm512_set1_ps(kMasked));
            }
            for (int key = 0; key < kStep; key += 2) {
                even = _mm512_max_ps(even, _mm512_load_ps(scores + key * kWidth + q * kTile));
                odd = _mm512_max_ps(odd, _mm512_load_ps(scores + (key + 1) * kWidth + q * kTile));
            }
            _mm512_store_ps(peak + q * kTile, _mm512_max_ps(even, odd));
        }
    }

    // Asks the second-level cache for `count` lines of the accumulators.
    void fetch(int head_dim, int from, int count) const {
        for (int line = from; line < std::min(from + count, head_dim * Q); ++line)
            __builtin_prefetch(output + line * kTile, 1);
    }

    // Raises `maximum` to `peak` where that is much higher, and scales what was summed accordingly.
    void settle(const Cache& cache) {
        const __m512 factor = _mm512_set1_ps(cache.scale * kLog2E);
        const __m512 slack = _mm512_set1_ps(kSlack / (cache.scale * kLog2E));
        for (int q = 0; q < Q; ++q) {
            const __m512 before = _mm512_load_ps(maximum + q * kTile), now = _mm512_load_ps(peak + q * kTile);
            _mm512_store_ps(peak + q * kTile, _mm512_set1_ps(kMasked));
            const __mmask16 grew = _mm512_cmp_ps_mask(now, _mm512_add_ps(before, slack), _CMP_GT_OQ);
            if (!grew) continue;
            alignas(64) float keep[kTile];
            const __m512 shrink = exp2(_mm512_mul_ps(_mm512_sub_ps(before, now), factor));
            _mm512_store_ps(keep, _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), grew, shrink));
            _mm512_mask_store_ps(maximum + q * kTile, grew, now);
            _mm512_store_ps(total + q * kTile, _mm512_mul_ps(_mm512_load_ps(keep), _mm512_load_ps(total + q * kTile)));
            for (int i = 0; i < cache.head_dim; ++i) {
                // For Q = 1, rows of output are queries.
                float* part = Q == 1 ? output + i * kTile : output + i * kWidth + q * kTile;
                const __m512 by = Q == 1 ? _mm512_set1_ps(keep[i * kTile / cache.head_dim]) : _mm512_load_ps(keep);
                _mm512_store_ps(part, _mm512_mul_ps(by, _mm512_load_ps(part)));
            }
        }
    }

    // Weights of keys `from` ... `to` of 32, even numbers, as right operand (pairs of keys interleaved); adds them to
    // `sums`.
    void weigh(const Cache& cache, const float* scores, int from, int to, bf16* weights, __m512 (&sums)[Q]) const {
        const Weigher weight(cache);
        for (int q = 0; q < Q; ++q) {
            const __m512 shift = weight.shift(_mm512_load_ps(maximum + q * kTile));
            __m512 sum = sums[q];  // a register: the compiler cannot know that `weights` is no part of it
            for (int key = from; key < to; key += 2) {
                const float* score = scores + key * kWidth + q * kTile;
                const __m512i even = weight(_mm512_load_ps(score), shift);
                const __m512i odd = weight(_mm512_load_ps(score + kWidth), shift);
                const __m512i both = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd);
                sum = _mm512_add_ps(sum, _mm512_add_ps(_mm512_castsi512_ps(even), _mm512_castsi512_ps(odd)));
                _mm512_store_si512(weights + q * kTileValues + key * kTile, both);
            }
            sums[q] = sum;
        }
    }

    void add(const __m512 (&sums)[Q]) {
        for (int q = 0; q < Q; ++q) {
            float* to = total + q * kTile;
            _mm512_store_ps(to, _mm512_fmadd_ps(sums[q], _mm512_set1_ps(1 / kCentred), _mm512_load_ps(to)));
        }
    }

    // `lane`'s row of results, from 16 dims at a time.
    void write(const Cache& cache, const Task& task, int lane, int dim, __m512 values) const {
        const int row = task.first_row + lane;
        const int64_t head = row / cache.group * task.num_heads + row % cache.group;
        if (task.output != nullptr)
            narrow(task.output + head * cache.head_dim + dim, values);
        else
            narrow(task.wide + head * cache.head_dim + dim, values);
    }

    void write_lse(const Cache& cache, const Task& task, int first) const {
        for (int lane = 0; task.lse != nullptr && lane < std::min(kWidth, task.num_rows - first); ++lane) {
            const int row = task.first_row + first + lane;
            task.lse[row / cache.group * task.num_heads + row % cache.group] =
                maximum[lane] * cache.scale + natural_log(total[lane]);
        }
    }

private:
    static const bf16* query_row(const Cache& cache, const Task& task, int row) {
        return task.query + row / cache.group * task.query_stride + row % cache.group * cache.head_dim;
    }
};

}  // namespace pdmesh
