// Attention over the paged cache.
//
// Scores are computed transposed, (keys x queries): a page's keys are a left operand as they lie in the cache, and
// softmax works lane by lane with no reduction across lanes. Queries of all heads that share a key-value head are columns
// of one product. Key blocks begin at multiples of kKeyBlock, whatever the chunk, a column never meets another, and both
// ways of `attend` sum in the same order: results do not depend on batch composition or chunk boundaries, bit for bit.

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "tiles.h"

namespace {

using namespace pdmesh;

constexpr int kKeyBlock = 256;   // keys between two settlements of the maximum
constexpr int kSteps = kKeyBlock / kStep;
constexpr int kTaskRows = 1536;  // query rows of one task: its accumulators stay in the second-level cache
constexpr int kPrefetch = 64;    // keys between a page's request and its use
constexpr float kMasked = -1e30f;  // below any score, and finite: infinities would have to be told apart
constexpr float kCentred = 1.0f + 1.0f / 362.0f;  // a weight before truncation over its mean after
constexpr float kSlack = 8.0f;   // weights may grow to 2^kSlack before what was summed is scaled down

// One layer's cache, (blocks, key or value, heads, block_size, head_dim), and the shapes that go with it.
struct Cache {
    const bf16* data;
    int num_kv_heads, block_size, head_dim, group;
    float scale;
};

// Query rows first_row ... of one sequence's chunk, for num_heads_here key-value heads from `head` on; of one of them, row r
// is token r / group, head r % group.
struct Task {
    const int64_t* table;
    int start;  // position of the chunk's first token
    int first_row, num_rows;
    int head, num_heads_here;
    const bf16* query;  // of the chunk's first token and the head's first query head
    int64_t query_stride;
    bf16* output;
    float* lse;  // or null
    int64_t num_heads;

    // The same rows for one of its heads.
    Task of(const Cache& cache, int number) const {
        Task one = *this;
        one.head += number;
        one.num_heads_here = 1;
        one.query += number * cache.group * cache.head_dim;
        one.output += number * cache.group * cache.head_dim;
        if (lse != nullptr) one.lse += number * cache.group;
        return one;
    }

    // Keys that its last row sees.
    int end(const Cache& cache) const { return start + (first_row + num_rows - 1) / cache.group + 1; }
};

// Where 16 keys (half 0) or values (half 1) from position `first` on lie; zeros beyond the sequence's end.
inline const bf16* page(const Cache& cache, const Task& task, int half, int first, int end) {
    alignas(64) static const bf16 zeros[kTile * 1024] = {};
    if (first >= end) return zeros;
    const int64_t block = task.table[first / cache.block_size];
    const int64_t row = (block * 2 + half) * cache.num_kv_heads + task.head;
    return cache.data + (row * cache.block_size + first % cache.block_size) * cache.head_dim;
}

// Pages lie apart, so that the processor does not guess the next one. Asks for 32 keys or values.
inline void prefetch(const Cache& cache, const Task& task, int half, int first, int end) {
    for (int key = first; key < first + kStep && key < end; key += kTile) {
        const bf16* from = page(cache, task, half, key, end);
        for (int i = 0; i < kTile * cache.head_dim; i += 32) _mm_prefetch(from + i, _MM_HINT_T1);
    }
}

// 16Q query rows: their block of scores, and what attention has made of them so far.
template <int Q>
struct Columns {
    static constexpr int kWidth = Q * kTile;

    float* output;       // (head_dim x kWidth), or for Q = 1 (16 x head_dim); to be divided by total
    float* maximum;      // a reference that no score exceeds by much, (kWidth)
    float* total;        // of weights, (kWidth)
    float* peak;         // of the block's scores, (kWidth)
    int32_t* positions;  // (kWidth)
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
            const int row = std::min(first + lane, task.num_rows - 1);
            positions[lane] = task.start + (task.first_row + row) / cache.group;
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

    // Masks keys that come later than a query, and raises `peak` to the rest; of 32 keys from position `first` on.
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

    // Asks for some of the accumulators, cache lines `from` ... `from + count - 1`: they wait in the second-level cache.
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

    // 2^((score - maximum) * scale) of keys `from` ... `to` of 32, even numbers, as right operand (pairs of keys
    // interleaved), and adds them to `sums`.
    //
    // A float's bits, read as a number, are its logarithm but for a factor that depends on its mantissa m alone:
    // 2^(m - 1) / m, here a cubic with a relative error below 7e-4, a sixth of what bf16 rounds off at most. Rounding
    // is by truncation after a factor of kCentred. Weights below 2^-126 are 0.
    void weigh(const Cache& cache, const float* scores, int from, int to, bf16* weights, __m512 (&sums)[Q]) const {
        constexpr float kOne = 8388608.0f;  // one binary order, in bits
        const __m512 factor = _mm512_set1_ps(cache.scale * kLog2E * kOne), zero = _mm512_setzero_ps();
        const __m512i mantissa = _mm512_set1_epi32(0x007fffff), one = _mm512_set1_epi32(0x3f800000);
        for (int q = 0; q < Q; ++q) {
            const __m512 shift = _mm512_fnmadd_ps(
                _mm512_load_ps(maximum + q * kTile), factor, _mm512_set1_ps(127 * kOne));
            const auto weight = [&](const float* score) {
                const __m512 line = _mm512_max_ps(_mm512_fmadd_ps(_mm512_load_ps(score), factor, shift), zero);
                const __m512i bits = _mm512_cvtps_epi32(line);
                const __m512 m = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bits, mantissa, one, 0xea));
                __m512 y = _mm512_set1_ps(kCentred * -0.1064457f);
                y = _mm512_fmadd_ps(y, m, _mm512_set1_ps(kCentred * 0.70747582f));
                y = _mm512_fmadd_ps(y, m, _mm512_set1_ps(kCentred * -1.37730757f));
                y = _mm512_fmadd_ps(y, m, _mm512_set1_ps(kCentred * 1.77561472f));
                return _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(bits), y));
            };
            __m512 sum = sums[q];  // a register: the compiler cannot know that `weights` is no part of it
            for (int key = from; key < to; key += 2) {
                const __m512i even = weight(scores + key * kWidth + q * kTile);
                const __m512i odd = weight(scores + (key + 1) * kWidth + q * kTile);
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
        narrow(task.output + head * cache.head_dim + dim, values);
    }

    void write_lse(const Cache& cache, const Task& task, int first) const {
        for (int lane = 0; task.lse != nullptr && lane < std::min(kWidth, task.num_rows - first); ++lane) {
            const int row = task.first_row + first + lane;
            task.lse[row / cache.group * task.num_heads + row % cache.group] =
                maximum[lane] * cache.scale + std::log(total[lane]);
        }
    }

private:
    static const bf16* query_row(const Cache& cache, const Task& task, int row) {
        return task.query + row / cache.group * task.query_stride + row % cache.group * cache.head_dim;
    }
};

// ---- many rows: keys and values are packed once for all of them -----------------------------------------------------

// 32 keys as left operand (keys x dims): for each 32 dims, two tiles of 16 keys.
void pack_keys(const Cache& cache, const Task& task, int first, int end, bf16* packed) {
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
void pack_values(const Cache& cache, const Task& task, int first, int end, bf16* packed) {
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
void end_wide(const Columns<2>& columns, const Cache& cache, const Task& task, int first) {
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
void attend_wide(const Cache& cache, const Task& task) {
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
            prefetch(cache, task, 0, first + kPrefetch, end);
            prefetch(cache, task, 1, first + kPrefetch, end);
            pack_keys(cache, task, first, end, keys.get() + product * kStep * dims);
            pack_values(cache, task, first, end, values.get() + product * kTileValues);
        }
        const auto score = [&](const Columns<2>& columns, int product, const auto& beside) {
            const bf16* tiles = keys.get() + product * kStep * dims;
            columns.score(
                cache, {{tiles, tiles + kTileValues}, 64, 2 * kTileValues}, scores.get() + product * kStep * kWidth, beside);
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

// ---- up to 16 rows, as decodes have: keys are multiplied where they lie, values hardly need packing -----------------

// 32 values as right operand (keys x dims), a tile for each 16 dims. Of 32 dims, the first tile holds the first half
// of each 8, the second the other: that is how neighbours interleave cheapest.
void interleave_values(const Cache& cache, const Task& task, int first, int end, bf16* tiles) {
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
void turn(bf16* weights) {
    __m512i rows[kTile];
    for (int row = 0; row < kTile; ++row) rows[row] = _mm512_load_si512(weights + row * kStep);
    transpose(rows);
    for (int row = 0; row < kTile; ++row) _mm512_store_si512(weights + row * kStep, rows[row]);
}

void end_narrow(const Columns<1>& columns, const Cache& cache, const Task& task) {
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
void attend_narrow(const Cache& cache, const Task& all) {
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
            for (int head = 0; head < num_heads; ++head) prefetch(cache, tasks[head], half, first, end);
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
                columns(head).score(cache, keys, scores_of(head, product));
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
                    weights.get(), values.get() + dim * kStep, kStep * dims, rows.output + dim, dims, num_products,
                    all.num_rows);
            };
            int dim = 0;
            for (; dim + 4 * kTile <= dims; dim += 4 * kTile) gather(multiply_flat<4>, dim);
            if (dim < dims) gather(multiply_flat<2>, dim);
        }
    }
    for (int head = 0; head < num_heads; ++head) end_narrow(columns(head), cache, tasks[head]);
}

}  // namespace

// Spans (row, num_tokens, start, offset of the block table in `tables`), 4 numbers each. head_dim is a multiple of 32
// up to 1024, block_size one of 16.
extern "C" void pdmesh_attention(
    const bf16* query, int64_t query_stride, const bf16* cache_data, bf16* output, float* lse, const int64_t* spans,
    int64_t num_spans, const int64_t* tables, int64_t num_heads, int64_t num_kv_heads, int64_t block_size,
    int64_t head_dim, float scale, int64_t num_threads) {
    const int group = static_cast<int>(num_heads / num_kv_heads);
    const Cache cache = {
        cache_data, static_cast<int>(num_kv_heads), static_cast<int>(block_size), static_cast<int>(head_dim), group,
        scale};
    // Whole tokens, so that a task's rows begin at a token's first head.
    const int64_t task_rows = std::max<int64_t>(1, kTaskRows / group) * group;
    // Decodes take all heads together, unless there are fewer of them than threads.
    const auto heads_each = [&](int64_t num_rows) {
        return num_rows <= kTile && num_spans >= num_threads ? num_kv_heads : 1;
    };
    int64_t num_tasks = 0;
    for (int64_t i = 0; i < num_spans; ++i) {
        const int64_t num_rows = spans[4 * i + 1] * group;
        num_tasks += (num_rows + task_rows - 1) / task_rows * (num_kv_heads / heads_each(num_rows));
    }
    const auto tasks = std::make_unique<Task[]>(num_tasks);
    Task* next = tasks.get();
    for (int64_t i = 0; i < num_spans; ++i) {
        const int64_t row = spans[4 * i], num_rows = spans[4 * i + 1] * group;
        const Task all = {
            tables + spans[4 * i + 3],
            static_cast<int>(spans[4 * i + 2]),
            0,
            static_cast<int>(num_rows),
            0,
            static_cast<int>(num_kv_heads),
            query + row * query_stride,
            query_stride,
            output + row * num_heads * head_dim,
            lse == nullptr ? nullptr : lse + row * num_heads,
            num_heads};
        if (heads_each(num_rows) == num_kv_heads) {
            *next++ = all;
            continue;
        }
        for (int64_t first = 0; first < num_rows; first += task_rows)
            for (int64_t head = 0; head < num_kv_heads; ++head) {
                *next = all.of(cache, static_cast<int>(head));
                next->first_row = static_cast<int>(first);
                next->num_rows = static_cast<int>(std::min(task_rows, num_rows - first));
                ++next;
            }
    }
    const int threads = static_cast<int>(std::min(num_threads, num_tasks));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        configure_tiles();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_tasks; ++i) {
            if (tasks[i].num_rows <= kTile)
                attend_narrow(cache, tasks[i]);
            else
                attend_wide(cache, tasks[i]);
        }
        release_tiles();
    }
}
