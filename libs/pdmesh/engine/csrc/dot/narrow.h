// Attention of up to 16 query rows by AMX, as decodes have: keys are multiplied where they lie, values hardly need
// packing.
#pragma once

#include "columns.h"

namespace pdmesh {

// 32 values as right operand (keys x dims), a tile for each 16 dims. Of 32 dims, the first tile holds the first half
// of each 8, the second the other: that is how neighbours interleave cheapest.
inline void interleave_values(const Cache& cache, const Task& task, int first, int end, bf16* tiles) {
    for (int pair = 0; pair < kTile; ++pair) {
        const bf16* even = page(cache, task, 1, first + pair / 8 * kTile, end) + pair % 8 * 2 * cache.head_dim;
        for (int dim = 0; dim < cache.head_dim; dim += kStep) {
            const __m512i low = _mm512_loadu_si512(even + dim);
            const __m512i high = _mm512_loadu_si512(even + cache.head_dim + dim);
            bf16* tile = tiles + dim / kTile * kTileValues + pair * kStep;
            _mm512_store_si512(tile, _mm512_unpacklo_epi16(low, high));
            _mm512_store_si512(tile + kTileValues, _mm512_unpackhi_epi16(low, high));
        }
    }
}

// Weights of 32 keys from right operand (keys x queries) to left operand (queries x keys).
inline void turn(bf16* weights) {
    __m512i rows[kTile];
    for (int row = 0; row < kTile; ++row) rows[row] = _mm512_load_si512(weights + row * kStep);
    transpose(rows);
    for (int row = 0; row < kTile; ++row) _mm512_store_si512(weights + row * kStep, rows[row]);
}

inline void end_narrow(const Columns<1>& columns, const Cache& cache, const Task& task) {
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int lane = 0; lane < task.num_rows; ++lane) {
        const __m512 share = _mm512_set1_ps(1.0f / columns.total[lane]);
        for (int dim = 0; dim < cache.head_dim; dim += kStep) {
            const float* row = columns.output + lane * cache.head_dim + dim;
            const __m512 low = _mm512_mul_ps(share, _mm512_load_ps(row));
            const __m512 high = _mm512_mul_ps(share, _mm512_load_ps(row + kTile));
            columns.write(cache, task, lane, dim, _mm512_permutex2var_ps(low, first, high));
            columns.write(cache, task, lane, dim + kTile, _mm512_permutex2var_ps(low, second, high));
        }
    }
    columns.write_lse(cache, task, 0);
}

// All heads of a page are read one after the other, as they lie: memory is fastest in order.
inline void attend_narrow(const Cache& cache, const Task& all) {
    const int dims = cache.head_dim, end = all.end(cache), num_heads = all.num_heads_here;
    const int stride = dims * static_cast<int>(sizeof(bf16)), size = Columns<1>::size(dims);
    const auto memory = buffer<float>(static_cast<size_t>(num_heads) * size);
    const auto scores = buffer<float>(static_cast<size_t>(num_heads) * kKeyBlock * kTile);
    const auto weights = buffer<bf16>(kKeyBlock * kTile);
    const auto values = buffer<bf16>(static_cast<size_t>(kKeyBlock) * dims);
    const auto tasks = std::make_unique<Task[]>(num_heads);
    const auto columns = [&](int head) { return Columns<1>(memory.get() + head * size, dims); };
    const auto scores_of = [&](int head, int product) {
        return scores.get() + (head * kSteps + product) * kStep * kTile;
    };
    const auto fetch = [&](int first) {
        for (int half = 0; half < 2; ++half)
            for (int head = 0; head < num_heads; ++head)
                for (int key = first; key < first + kStep; key += kTile)
                    prefetch(cache, tasks[head], half, key, end);
    };
    for (int head = 0; head < num_heads; ++head) {
        tasks[head] = all.of(cache, head);
        columns(head).begin(cache, tasks[head], 0);
    }
    for (int first = 0; first < kPrefetch; first += kStep) fetch(first);
    for (int first_key = 0; first_key < end; first_key += kKeyBlock) {
        const int num_products = columns(0).num_products(first_key);
        for (int product = 0; product < num_products; ++product) {
            const int first = first_key + product * kStep;
            fetch(first + kPrefetch);
            for (int head = 0; head < num_heads; ++head) {
                const Task& task = tasks[head];
                const Left keys = {
                    {page(cache, task, 0, first, end), page(cache, task, 0, first + kTile, end)}, stride, kStep};
                multiply_amx<1>(keys, columns(head).query, scores_of(head, product), dims / kStep, false, Nothing());
                columns(head).rank(first, scores_of(head, product));
            }
        }
        for (int head = 0; head < num_heads; ++head) {
            Columns<1> rows = columns(head);
            rows.settle(cache);
            __m512 sums[1] = {_mm512_setzero_ps()};
            for (int product = 0; product < num_products; ++product) {
                const int first = first_key + product * kStep;
                rows.weigh(cache, scores_of(head, product), 0, kStep, weights.get() + product * kTileValues, sums);
                turn(weights.get() + product * kTileValues);
                interleave_values(cache, tasks[head], first, end, values.get() + product * kStep * dims);
            }
            rows.add(sums);
            const auto gather = [&](auto multiply, int dim) {
                multiply(
                    weights.get(), values.get() + dim * kStep, kStep * dims, rows.output + dim, dims, num_products);
            };
            int dim = 0;
            for (; dim + 4 * kTile <= dims; dim += 4 * kTile) gather(multiply_flat_amx<4>, dim);
            if (dim < dims) gather(multiply_flat_amx<2>, dim);
        }
    }
    for (int head = 0; head < num_heads; ++head) end_narrow(columns(head), cache, tasks[head]);
}

}  // namespace pdmesh
