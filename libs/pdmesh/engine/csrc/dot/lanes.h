// Attention of up to 16 query rows without AMX, as decodes have: lanes are keys, so that none idles however few rows
// there are. Of each row, everything is summed in the order of wide.h.
#pragma once

#include "../strips.h"
#include "narrow.h"

namespace pdmesh {

constexpr int kRowsAtOnce = 4;    // query rows whose accumulators are in registers
constexpr int kKeyVectors = 4;    // vectors of 16 keys that are scored at once: enough sums under way
constexpr int kScoredKeys = kKeyVectors * kTile;

// 16 keys from position `first` on, transposed: for each pair of dims, a vector of `turned` is `kKeyVectors` on.
inline void turn_keys(const Cache& cache, const Task& task, int first, int end, bf16* turned) {
    const bf16* from = page(cache, task, 0, first, end);
    for (int dim = 0; dim < cache.head_dim; dim += kStep) {
        __m512i rows[kTile];
        for (int key = 0; key < kTile; ++key) rows[key] = _mm512_loadu_si512(from + key * cache.head_dim + dim);
        transpose(rows);
        for (int pair = 0; pair < kTile; ++pair)
            _mm512_store_si512(turned + (dim / 2 + pair) * kKeyVectors * kStep, rows[pair]);
    }
}

// Scores of kScoredKeys keys for R rows, kKeyBlock scores a row; `query` is right operand (head_dim x 16), its first
// column the first row.
template <int R>
void score_keys(const bf16* keys, const bf16* query, int head_dim, float* scores) {
    __m512 sums[R][kKeyVectors];
#pragma GCC unroll 4
    for (int row = 0; row < R; ++row)
#pragma GCC unroll 4
        for (int i = 0; i < kKeyVectors; ++i) sums[row][i] = _mm512_setzero_ps();
    for (int pair = 0; pair < head_dim / 2; ++pair, keys += kKeyVectors * kStep, query += kStep) {
        __m512bh vectors[kKeyVectors];
#pragma GCC unroll 4
        for (int i = 0; i < kKeyVectors; ++i) vectors[i] = (__m512bh)_mm512_load_si512(keys + i * kStep);
#pragma GCC unroll 4
        for (int row = 0; row < R; ++row) {
            int32_t values;
            std::memcpy(&values, query + 2 * row, 4);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(values);
#pragma GCC unroll 4
            for (int i = 0; i < kKeyVectors; ++i) sums[row][i] = _mm512_dpbf16_ps(sums[row][i], both, vectors[i]);
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < R; ++row)
#pragma GCC unroll 4
        for (int i = 0; i < kKeyVectors; ++i) _mm512_store_ps(scores + row * kKeyBlock + i * kTile, sums[row][i]);
}

// Masks one row's keys that come later than `position`, of `num_keys` from position `first` on; the largest score.
inline float rank_keys(float* scores, int first, int num_keys, int position) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512 peak = _mm512_set1_ps(kMasked);
    for (int key = 0; key < num_keys; key += kTile) {
        const __mmask16 later = _mm512_cmpgt_epi32_mask(lanes, _mm512_set1_epi32(position - first - key));
        const __m512 masked = _mm512_mask_mov_ps(_mm512_load_ps(scores + key), later, _mm512_set1_ps(kMasked));
        _mm512_store_ps(scores + key, masked);
        peak = _mm512_max_ps(peak, masked);
    }
    return _mm512_reduce_max_ps(peak);
}

// Weights of R rows' scores, kKeyBlock a row; what they sum to, pair after pair of keys.
template <int R>
__m128 weigh_keys(const Cache& cache, const float* maximum, const float* scores, int num_keys, bf16* weights) {
    const Weigher weigh(cache);
    __m512 shift[R];
#pragma GCC unroll 4
    for (int row = 0; row < R; ++row) shift[row] = weigh.shift(_mm512_set1_ps(maximum[row]));
    __m128 sum = _mm_setzero_ps();
    for (int key = 0; key < num_keys; key += kTile) {
        __m512 pairs[kRowsAtOnce];  // even lane and odd lane: the sum of both
#pragma GCC unroll 4
        for (int row = 0; row < kRowsAtOnce; ++row) {
            if (row >= R) {
                pairs[row] = _mm512_setzero_ps();
                continue;
            }
            const __m512i bits = weigh(_mm512_load_ps(scores + row * kKeyBlock + key), shift[row]);
            _mm256_store_si256(
                reinterpret_cast<__m256i*>(weights + row * kKeyBlock + key),
                _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
            const __m512 values = _mm512_castsi512_ps(bits);
            pairs[row] = _mm512_add_ps(values, _mm512_permute_ps(values, 0xb1));
        }
        const __m512d first = _mm512_castps_pd(_mm512_mask_mov_ps(pairs[0], 0xaaaa, pairs[1]));
        const __m512d second = _mm512_castps_pd(_mm512_mask_mov_ps(pairs[2], 0xaaaa, pairs[3]));
        const __m512 even = _mm512_castpd_ps(_mm512_unpacklo_pd(first, second));
        const __m512 odd = _mm512_castpd_ps(_mm512_unpackhi_pd(first, second));
        sum = _mm_add_ps(_mm_add_ps(sum, _mm512_extractf32x4_ps(even, 0)), _mm512_extractf32x4_ps(odd, 0));
        sum = _mm_add_ps(_mm_add_ps(sum, _mm512_extractf32x4_ps(even, 1)), _mm512_extractf32x4_ps(odd, 1));
        sum = _mm_add_ps(_mm_add_ps(sum, _mm512_extractf32x4_ps(even, 2)), _mm512_extractf32x4_ps(odd, 2));
        sum = _mm_add_ps(_mm_add_ps(sum, _mm512_extractf32x4_ps(even, 3)), _mm512_extractf32x4_ps(odd, 3));
    }
    return sum;
}

// output (R x 16N of head_dim) += weights * values, from position `first` on. Of 32 dims, the first vector holds the
// first half of each 8, the second the other. `beside(key)` is called for each 16 keys.
template <int R, int N, class Beside>
void gather_values(
    const Cache& cache, const Task& task, int first, int num_keys, int end, int dim, const bf16* weights,
    float* output, const Beside& beside) {
    __m512 sums[R][N];
#pragma GCC unroll 4
    for (int row = 0; row < R; ++row)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[row][n] = _mm512_load_ps(output + row * cache.head_dim + n * kTile);
    for (int key = 0; key < num_keys; key += kTile) {
        beside(key);
        const bf16* even = page(cache, task, 1, first + key, end) + dim;
        for (int pair = key; pair < key + kTile; pair += 2, even += 2 * cache.head_dim) {
            __m512bh values[N];
#pragma GCC unroll 4
            for (int n = 0; n < N; n += 2) {
                const __m512i low = _mm512_loadu_si512(even + n * kTile);
                const __m512i high = _mm512_loadu_si512(even + cache.head_dim + n * kTile);
                values[n] = (__m512bh)_mm512_unpacklo_epi16(low, high);
                values[n + 1] = (__m512bh)_mm512_unpackhi_epi16(low, high);
            }
#pragma GCC unroll 4
            for (int row = 0; row < R; ++row) {
                int32_t both;
                std::memcpy(&both, weights + row * kKeyBlock + pair, 4);
                const __m512bh weight = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) sums[row][n] = _mm512_dpbf16_ps(sums[row][n], values[n], weight);
            }
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < R; ++row)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) _mm512_store_ps(output + row * cache.head_dim + n * kTile, sums[row][n]);
}

// All heads of a page are read one after the other, as they lie. While keys are multiplied, the block's values are on
// their way from memory, and while values are, the next block's keys.
inline void attend_lanes(const Cache& cache, const Task& all) {
    const int dims = cache.head_dim, end = all.end(cache), num_heads = all.num_heads_here, num_rows = all.num_rows;
    const int size = Columns<1>::size(dims);
    const auto memory = buffer<float>(static_cast<size_t>(num_heads) * size);
    const auto scores = buffer<float>(static_cast<size_t>(num_heads) * num_rows * kKeyBlock);
    const auto turned = buffer<bf16>(static_cast<size_t>(kScoredKeys) * dims);
    const auto tasks = std::make_unique<Task[]>(num_heads);
    alignas(64) bf16 weights[kRowsAtOnce * kKeyBlock];
    const auto columns = [&](int head) { return Columns<1>(memory.get() + head * size, dims); };
    const auto scores_of = [&](int head, int row) { return scores.get() + (head * num_rows + row) * kKeyBlock; };
    for (int head = 0; head < num_heads; ++head) {
        tasks[head] = all.of(cache, head);
        columns(head).begin(cache, tasks[head], 0);
        for (int key = 0; key < kScoredKeys; key += kTile) prefetch(cache, tasks[head], 0, key, end);
    }
    for (int first_key = 0; first_key < end; first_key += kKeyBlock) {
        const int num_keys = columns(0).num_products(first_key) * kStep;
        for (int scored = 0; scored < num_keys; scored += kScoredKeys)
            for (int head = 0; head < num_heads; ++head) {
                for (int i = 0; i < kKeyVectors; ++i) {
                    const int first = first_key + scored + i * kTile;
                    prefetch(cache, tasks[head], 1, first, end);
                    if (first_key == 0) prefetch(cache, tasks[head], 0, first + kScoredKeys, end);
                    turn_keys(cache, tasks[head], first, end, turned.get() + i * kStep);
                }
                for (int row = 0; row < num_rows; row += kRowsAtOnce)
                    with_rows<kRowsAtOnce>(std::min(num_rows - row, kRowsAtOnce), [&](auto count) {
                        score_keys<count>(
                            turned.get(), columns(head).query + 2 * row, dims, scores_of(head, row) + scored);
                    });
            }
        for (int head = 0; head < num_heads; ++head) {
            Columns<1> rows = columns(head);
            for (int row = 0; row < num_rows; ++row)
                rows.peak[row] = rank_keys(scores_of(head, row), first_key, num_keys, rows.positions[row]);
            rows.settle(cache);
            alignas(64) float sums[kTile] = {};
            for (int row = 0; row < num_rows; row += kRowsAtOnce) {
                with_rows<kRowsAtOnce>(std::min(num_rows - row, kRowsAtOnce), [&](auto count) {
                    const __m128 sum =
                        weigh_keys<count>(cache, rows.maximum + row, scores_of(head, row), num_keys, weights);
                    _mm_store_ps(sums + row, sum);
                    const auto gather = [&](auto width, int dim) {
                        const auto fetch = [&](int key) {
                            if (row == 0 && dim == 0)
                                prefetch(cache, tasks[head], 0, first_key + kKeyBlock + key, end);
                        };
                        gather_values<count, width>(
                            cache, tasks[head], first_key, num_keys, end, dim, weights,
                            rows.output + row * dims + dim, fetch);
                    };
                    int dim = 0;
                    for (; dim + 4 * kTile <= dims; dim += 4 * kTile) gather(std::integral_constant<int, 4>(), dim);
                    if (dim < dims) gather(std::integral_constant<int, 2>(), dim);
                });
            }
            const __m512 total[1] = {_mm512_load_ps(sums)};
            rows.add(total);
        }
    }
    for (int head = 0; head < num_heads; ++head) end_narrow(columns(head), cache, tasks[head]);
}

}  // namespace pdmesh
