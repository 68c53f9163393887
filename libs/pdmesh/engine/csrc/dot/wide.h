// Attention of many query rows: keys and values are packed once for all of them.
#pragma once

#include "columns.h"

namespace pdmesh {

// 32 keys as left operand (keys x dims): for each 32 dims, two tiles of 16 keys.
inline void pack_keys(const Cache& cache, const Task& task, int first, int end, bf16* packed) {
    for (int half = 0; half < 2; ++half) {
        const bf16* from = page(cache, task, 0, first + half * kTile, end);
        for (int row = 0; row < kTile; ++row)
            for (int dim = 0; dim < cache.head_dim; dim += kStep)
                _mm512_store_si512(
                    packed + (dim / kStep * 2 + half) * kTileValues + row * kStep,
                    _mm512_loadu_si512(from + row * cache.head_dim + dim));
    }
}

// 32 values as left operand (dims x keys): for each 16 dims, a tile at `packed` + kSteps tiles.
inline void pack_values(const Cache& cache, const Task& task, int first, int end, bf16* packed) {
    const bf16* pages[2] = {page(cache, task, 1, first, end), page(cache, task, 1, first + kTile, end)};
    for (int dim = 0; dim < cache.head_dim; dim += kTile) {
        __m512i rows[kTile];
        for (int pair = 0; pair < kTile; ++pair) {
            const bf16* even = pages[pair / 8] + pair % 8 * 2 * cache.head_dim + dim;
            const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even));
            const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + cache.head_dim));
            rows[pair] = interleave(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
        }
        transpose(rows);
        bf16* tile = packed + dim / kTile * kSteps * kTileValues;
        for (int row = 0; row < kTile; ++row) _mm512_store_si512(tile + row * kStep, rows[row]);
    }
}

// Divides by the total and writes rows.
inline void end_wide(const Columns<2>& columns, const Cache& cache, const Task& task, int first) {
    constexpr int kWidth = Columns<2>::kWidth;
    for (int q = 0; q < 2; ++q) {
        const __m512 share = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(columns.total + q * kTile));
        const int num_rows = std::min(kTile, task.num_rows - first - q * kTile);
        for (int dim = 0; dim < cache.head_dim; dim += kTile) {
            __m512i rows[kTile];
            for (int d = 0; d < kTile; ++d)
                rows[d] = _mm512_castps_si512(
                    _mm512_mul_ps(share, _mm512_load_ps(columns.output + (dim + d) * kWidth + q * kTile)));
            transpose(rows);
            for (int lane = 0; lane < num_rows; ++lane)
                columns.write(cache, task, first + q * kTile + lane, dim, _mm512_castsi512_ps(rows[lane]));
        }
    }
    columns.write_lse(cache, task, first);
}

// Two stages overlap, in one thread: while the tile unit multiplies keys for the next 32 rows, vector units weigh this
// one's scores, which the products overwrite as soon as they are read; while it multiplies values for these rows,
// vector units look for the peak of the next ones' scores.
inline void attend_wide(const Cache& cache, const Task& task) {
    constexpr int kWidth = Columns<2>::kWidth;
    const int dims = cache.head_dim, end = task.end(cache), size = Columns<2>::size(dims);
    const int num_columns = (task.num_rows + kWidth - 1) / kWidth;
    const auto memory = buffer<float>(static_cast<size_t>(num_columns) * size);
    const auto keys = buffer<bf16>(static_cast<size_t>(kKeyBlock) * dims);
    const auto values = buffer<bf16>(static_cast<size_t>(kKeyBlock) * dims);
    const auto scores = buffer<float>(kKeyBlock * kWidth);
    const auto weights = buffer<bf16>(kKeyBlock * kWidth);
    const auto column = [&](int number) { return Columns<2>(memory.get() + number * size, dims); };
    for (int number = 0; number < num_columns; ++number) column(number).begin(cache, task, number * kWidth);
    for (int first_key = 0; first_key < end; first_key += kKeyBlock) {
        for (int product = 0; product < kSteps && first_key + product * kStep < end; ++product) {
            const int first = first_key + product * kStep;
            for (int half = 0; half < 2; ++half)
                for (int key = first; key < first + kStep; key += kTile)
                    prefetch(cache, task, half, key + kPrefetch, end);
            pack_keys(cache, task, first, end, keys.get() + product * kStep * dims);
            pack_values(cache, task, first, end, values.get() + product * kTileValues);
        }
        const auto score = [&](const Columns<2>& columns, int product, const auto& beside) {
            const bf16* tiles = keys.get() + product * kStep * dims;
            columns.score(
                cache, {{tiles, tiles + kTileValues}, 64, 2 * kTileValues},
                scores.get() + product * kStep * kWidth, beside);
        };
        const auto rank = [&](Columns<2>& columns, int product) {
            columns.rank(first_key + product * kStep, scores.get() + product * kStep * kWidth);
        };
        int number = 0;
        while (column(number).num_products(first_key) == 0) ++number;
        Columns<2> current = column(number);
        int num_products = current.num_products(first_key);
        for (int product = 0; product < num_products; ++product) score(current, product, Nothing());
        for (int product = 0; product < num_products; ++product) rank(current, product);
        for (; number < num_columns; ++number) {
            Columns<2> next = column(std::min(number + 1, num_columns - 1));
            const int num_next = number + 1 < num_columns ? next.num_products(first_key) : 0;
            current.settle(cache);
            __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
            const auto weigh = [&](int product, int from, int to) {
                current.weigh(
                    cache, scores.get() + product * kStep * kWidth, from, to,
                    weights.get() + product * kStep * kWidth, sums);
            };
            const int steps = dims / kStep;
            for (int product = 0; product < num_next; ++product)
                score(next, product, [&](int step) {
                    current.fetch(dims, (product * steps + step) * kTile, kTile);
                    if (product < num_products)
                        weigh(product, step * kTile / steps * 2, (step + 1) * kTile / steps * 2);
                });
            for (int product = num_next; product < num_products; ++product) weigh(product, 0, kStep);
            current.add(sums);
            int num_ranked = 0;
            for (int dim = 0; dim < dims; dim += 2 * kTile) {
                const bf16* upper = values.get() + dim / kTile * kSteps * kTileValues;
                multiply<2>(
                    {{upper, upper + kSteps * kTileValues}, 64, kTileValues}, weights.get(),
                    current.output + dim * kWidth, num_products, true,
                    [&](int) { if (num_ranked < num_next) rank(next, num_ranked++); });
            }
            while (num_ranked < num_next) rank(next, num_ranked++);
            current = next;
            num_products = num_next;
        }
    }
    for (int number = 0; number < num_columns; ++number) end_wide(column(number), cache, task, number * kWidth);
}

}  // namespace pdmesh
