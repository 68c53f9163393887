// bf16 kernels of the CPU engine: attention over the paged cache, RMS norm, rotary embedding, gated SiLU.
//
// A plain C interface over raw pointers: nothing of torch is needed to build it, and one build serves every torch.
// Needs AVX-512 with BF16 (Zen 4, Sapphire Rapids and later); matrix products use AMX where the processor has it.
//
// Attention computes everything transposed, (keys x queries) and (dims x queries): a page's keys are a left operand as
// they lie in the cache, and softmax works lane by lane with no reduction across lanes. Queries of all heads that share
// a key-value head are columns of one product. Key blocks begin at multiples of kKeyBlock, whatever the chunk, and a
// column never meets another: results do not depend on batch composition or chunk boundaries, bit for bit.

#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace {

using bf16 = uint16_t;

constexpr int kTile = 16;        // rows, and 32-bit columns, of a tile
constexpr int kStep = 32;        // bf16 values that one tile product contracts over
constexpr int kTileValues = kTile * kStep;
constexpr int kKeyBlock = 256;   // keys between two rescalings; their scores stay in the first-level cache
constexpr int kTaskRows = 1536;  // query rows of one task: its accumulators stay in the second-level cache
constexpr int kPrefetch = 64;    // keys between a page's request and its use
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kMasked = -1e30f;  // below any score, and finite: infinities would have to be told apart

bool g_has_amx = false;

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};
template <class T>
using Buffer = std::unique_ptr<T[], Free>;

template <class T>
Buffer<T> buffer(size_t size) {
    const size_t bytes = (size * sizeof(T) + 63) / 64 * 64;
    return Buffer<T>(static_cast<T*>(std::aligned_alloc(64, bytes)));
}

inline __m512 widen(const bf16* values) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline void narrow(bf16* to, __m512 values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(values));
}

// 2^x to 1e-4, a twentieth of bf16's rounding; exactly 1 for 0 and 0 below -150. x must not be infinite.
inline __m512 exp2(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(0.05500826f);  // the least largest relative error on [-1/2, 1/2]
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(0.24220958f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(0.69328285f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}

// The values of the lower half and those of the upper one, in turns.
inline __m512i interleave(__m512i halves) {
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
        16, 0);
    return _mm512_permutexvar_epi16(order, halves);
}

inline void transpose(__m512i (&r)[kTile]) {
    __m512i t[kTile];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

// ---- products of tiles ----------------------------------------------------------------------------------------------

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Two tiles of rows of a left operand: row-major, `stride` bytes apart; the next kStep columns are `step` values on.
struct Left {
    const bf16* tile[2];
    int stride;
    int step;
};

// c (32 x 16Q) [+]= left (32 x 32 steps) * right; right holds, for each step and each of the Q column tiles, pairs of
// rows interleaved.
template <int Q>
__attribute__((target("amx-tile,amx-bf16"))) void multiply_amx(
    const Left& left, const bf16* right, float* c, int steps, bool accumulate) {
    constexpr int row_bytes = Q * kTile * sizeof(float);
    float* lower = c + kTile * Q * kTile;
    if (accumulate) {
        _tile_loadd(0, c, row_bytes);
        _tile_loadd(2, lower, row_bytes);
        if (Q == 2) {
            _tile_loadd(1, c + kTile, row_bytes);
            _tile_loadd(3, lower + kTile, row_bytes);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int step = 0; step < steps; ++step, right += Q * kTileValues) {
        _tile_loadd(4, left.tile[0] + step * left.step, left.stride);
        _tile_loadd(6, right, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, left.tile[1] + step * left.step, left.stride);
        _tile_dpbf16ps(2, 5, 6);
        if (Q == 2) {
            _tile_loadd(7, right + kTileValues, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, row_bytes);
    _tile_stored(2, lower, row_bytes);
    if (Q == 2) {
        _tile_stored(1, c + kTile, row_bytes);
        _tile_stored(3, lower + kTile, row_bytes);
    }
}

template <int Q>
void multiply_avx512(const Left& left, const bf16* right, float* c, int steps, bool accumulate) {
    constexpr int kRows = 8;  // times Q accumulators, all in registers
    for (int first = 0; first < 2 * kTile; first += kRows) {
        float* out = c + first * Q * kTile;
        __m512 sums[kRows][Q];
        for (int row = 0; row < kRows; ++row)
            for (int q = 0; q < Q; ++q)
                sums[row][q] = accumulate ? _mm512_load_ps(out + (row * Q + q) * kTile) : _mm512_setzero_ps();
        const char* rows = reinterpret_cast<const char*>(left.tile[first / kTile]) + first % kTile * left.stride;
        for (int step = 0; step < steps; ++step) {
            const char* a = rows + step * left.step * sizeof(bf16);
            for (int pair = 0; pair < kTile; ++pair) {
                __m512bh b[Q];
                for (int q = 0; q < Q; ++q)
                    b[q] = (__m512bh)_mm512_load_si512(right + (step * Q + q) * kTileValues + pair * kStep);
                for (int row = 0; row < kRows; ++row) {
                    int32_t values;
                    std::memcpy(&values, a + row * left.stride + pair * 4, 4);
                    const __m512bh both = (__m512bh)_mm512_set1_epi32(values);
                    for (int q = 0; q < Q; ++q) sums[row][q] = _mm512_dpbf16_ps(sums[row][q], both, b[q]);
                }
            }
        }
        for (int row = 0; row < kRows; ++row)
            for (int q = 0; q < Q; ++q) _mm512_store_ps(out + (row * Q + q) * kTile, sums[row][q]);
    }
}

template <int Q>
inline void multiply(const Left& left, const bf16* right, float* c, int steps, bool accumulate) {
    if (g_has_amx)
        multiply_amx<Q>(left, right, c, steps, accumulate);
    else
        multiply_avx512<Q>(left, right, c, steps, accumulate);
}

__attribute__((target("amx-tile"))) void configure_tiles() {
    // Not on the stack: GCC does not see that the intrinsic reads all of it.
    static const TileConfig config;
    _tile_loadconfig(&config);
}

__attribute__((target("amx-tile"))) void release_tiles() { _tile_release(); }

// ---- attention ------------------------------------------------------------------------------------------------------

// One layer's cache, (blocks, key or value, heads, block_size, head_dim), and the shapes that go with it.
struct Cache {
    const bf16* data;
    int num_kv_heads, block_size, head_dim, group;
    float scale;
};

// Query rows first_row ... of one key-value head of one sequence's chunk; row r is token r / group, head r % group.
struct Task {
    const int64_t* table;
    int start;  // position of the chunk's first token
    int first_row, num_rows;
    int head;
    const bf16* query;  // of the chunk's first token and the head's first query head
    int64_t query_stride;
    bf16* output;
    float* lse;  // or null
    int64_t num_heads;
};

// Where 16 keys (half 0) or values (half 1) from position `first` on lie; zeros beyond the sequence's end.
inline const bf16* page(const Cache& cache, const Task& task, int half, int first, int end) {
    alignas(64) static const bf16 zeros[kTile * 1024] = {};
    if (first >= end) return zeros;
    const int64_t block = task.table[first / cache.block_size];
    const int64_t row = (block * 2 + half) * cache.num_kv_heads + task.head;
    return cache.data + (row * cache.block_size + first % cache.block_size) * cache.head_dim;
}

inline void prefetch(const Cache& cache, const bf16* from) {
    for (int i = 0; i < kTile * cache.head_dim; i += 32) _mm_prefetch(from + i, _MM_HINT_T0);
}

// Values of `num_keys` keys as left operand (dims x keys): for each 16 dims, for each 32 keys one tile.
void pack_values(const Cache& cache, const Task& task, int first, int num_keys, int end, bf16* packed) {
    for (int key = 0; key < num_keys; key += kStep) {
        const bf16* pages[2] = {
            page(cache, task, 1, first + key, end), page(cache, task, 1, first + key + kTile, end)};
        // Pages lie apart, so that the processor does not guess the next one; these keys are read after their values.
        for (int half = 0; half < 2 * kTile; half += kTile) {
            prefetch(cache, page(cache, task, 0, first + key + half, end));
            prefetch(cache, page(cache, task, 1, first + key + half + kPrefetch, end));
        }
        for (int dim = 0; dim < cache.head_dim; dim += kTile) {
            __m512i rows[kTile];
            for (int pair = 0; pair < kTile; ++pair) {
                const bf16* even = pages[pair / 8] + pair % 8 * 2 * cache.head_dim + dim;
                const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even));
                const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + cache.head_dim));
                rows[pair] = interleave(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
            }
            transpose(rows);
            bf16* tile = packed + (dim / kTile * (kKeyBlock / kStep) + key / kStep) * kTileValues;
            for (int row = 0; row < kTile; ++row) _mm512_store_si512(tile + row * kStep, rows[row]);
        }
    }
}

// 16Q query rows and what attention has made of them so far.
template <int Q>
struct Columns {
    static constexpr int kWidth = Q * kTile;

    // Sizes in floats.
    static int size(int head_dim) { return head_dim * kWidth + 2 * kWidth + head_dim * kWidth / 2 + kWidth; }

    Columns(float* memory, int head_dim)
        : output(memory),
          maximum(output + head_dim * kWidth),
          total(maximum + kWidth),
          positions(reinterpret_cast<int32_t*>(total + kWidth)),
          query(reinterpret_cast<bf16*>(positions + kWidth)) {}

    void begin(const Cache& cache, const Task& task, int first) {
        const int dims = cache.head_dim;
        for (int q = 0; q < Q; ++q) {
            for (int pair = 0; pair < dims / 2; pair += kTile) {
                __m512i rows[kTile];
                for (int lane = 0; lane < kTile; ++lane) {
                    const int row = task.first_row + first + q * kTile + lane;
                    rows[lane] = first + q * kTile + lane < task.num_rows
                                     ? _mm512_loadu_si512(query_row(cache, task, row) + 2 * pair)
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
            maximum[lane] = kMasked;
            total[lane] = 0;
        }
        std::fill_n(output, dims * kWidth, 0.0f);
    }

    // Scores and softmax of keys first_key ...; `scores` and `weights` are scratch.
    void attend(
        const Cache& cache, const Task& task, int first_key, int end, const bf16* values, float* scores,
        bf16* weights) {
        const int visible = std::min(positions[kWidth - 1] + 1 - first_key, kKeyBlock);
        if (visible <= 0) return;
        const int num_keys = (visible + kStep - 1) / kStep * kStep;
        const int stride = cache.head_dim * static_cast<int>(sizeof(bf16));
        for (int key = 0; key < num_keys; key += kStep) {
            const Left keys = {
                {page(cache, task, 0, first_key + key, end), page(cache, task, 0, first_key + key + kTile, end)},
                stride,
                kStep};
            multiply<Q>(keys, query, scores + key * kWidth, cache.head_dim / kStep, false);
        }
        if (first_key + num_keys - 1 > positions[0]) mask(first_key, num_keys, scores);
        softmax(cache.scale * kLog2E, num_keys, cache.head_dim, scores, weights);
        for (int dim = 0; dim < cache.head_dim; dim += 2 * kTile) {
            const bf16* upper = values + dim / kTile * (kKeyBlock / kStep) * kTileValues;
            const Left left = {{upper, upper + kKeyBlock / kStep * kTileValues}, 64, kTileValues};
            multiply<Q>(left, weights, output + dim * kWidth, num_keys / kStep, true);
        }
    }

    void end(const Cache& cache, const Task& task, int first) {
        for (int q = 0; q < Q; ++q) {
            const __m512 share = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(total + q * kTile));
            const int num_rows = std::min(kTile, task.num_rows - first - q * kTile);
            for (int dim = 0; dim < cache.head_dim; dim += kTile) {
                __m512i rows[kTile];
                for (int d = 0; d < kTile; ++d)
                    rows[d] = _mm512_castps_si512(
                        _mm512_mul_ps(share, _mm512_load_ps(output + (dim + d) * kWidth + q * kTile)));
                transpose(rows);
                for (int lane = 0; lane < num_rows; ++lane) {
                    const int row = task.first_row + first + q * kTile + lane;
                    const int64_t head = row / cache.group * task.num_heads + row % cache.group;
                    narrow(task.output + head * cache.head_dim + dim, _mm512_castsi512_ps(rows[lane]));
                }
            }
            for (int lane = 0; task.lse != nullptr && lane < num_rows; ++lane) {
                const int row = task.first_row + first + q * kTile + lane;
                task.lse[row / cache.group * task.num_heads + row % cache.group] =
                    maximum[q * kTile + lane] * cache.scale + std::log(total[q * kTile + lane]);
            }
        }
    }

private:
    float* output;  // (head_dim x kWidth), to be divided by total
    float* maximum;
    float* total;
    int32_t* positions;
    bf16* query;  // right operand

    static const bf16* query_row(const Cache& cache, const Task& task, int row) {
        return task.query + row / cache.group * task.query_stride + row % cache.group * cache.head_dim;
    }

    // A query sees keys up to its own position.
    void mask(int first_key, int num_keys, float* scores) const {
        for (int q = 0; q < Q; ++q) {
            const __m512i last = _mm512_load_si512(positions + q * kTile);
            for (int key = 0; key < num_keys; ++key) {
                const __mmask16 later = _mm512_cmplt_epi32_mask(last, _mm512_set1_epi32(first_key + key));
                _mm512_mask_store_ps(scores + key * kWidth + q * kTile, later, _mm512_set1_ps(kMasked));
            }
        }
    }

    void softmax(float scale, int num_keys, int head_dim, const float* scores, bf16* weights) {
        for (int q = 0; q < Q; ++q) {
            const float* column = scores + q * kTile;
            const __m512 before = _mm512_load_ps(maximum + q * kTile);
            __m512 even_max = before, odd_max = before;
            for (int key = 0; key < num_keys; key += 2) {
                even_max = _mm512_max_ps(even_max, _mm512_load_ps(column + key * kWidth));
                odd_max = _mm512_max_ps(odd_max, _mm512_load_ps(column + (key + 1) * kWidth));
            }
            const __m512 now = _mm512_max_ps(even_max, odd_max);
            const __m512 factor = _mm512_set1_ps(scale);
            const __m512 shift = _mm512_mul_ps(now, factor);
            __m512 even_sum = _mm512_setzero_ps(), odd_sum = _mm512_setzero_ps();
            for (int key = 0; key < num_keys; key += 2) {
                const __m512 even = exp2(_mm512_fmsub_ps(_mm512_load_ps(column + key * kWidth), factor, shift));
                const __m512 odd = exp2(_mm512_fmsub_ps(_mm512_load_ps(column + (key + 1) * kWidth), factor, shift));
                even_sum = _mm512_add_ps(even_sum, even);
                odd_sum = _mm512_add_ps(odd_sum, odd);
                const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
                bf16* tile = weights + (key / kStep * Q + q) * kTileValues + key % kStep * kTile;
                _mm512_store_si512(tile, interleave(both));
            }
            const __m512 sum = _mm512_add_ps(even_sum, odd_sum);
            _mm512_store_ps(maximum + q * kTile, now);
            const __mmask16 grew = _mm512_cmpneq_ps_mask(before, now);
            __m512 old_total = _mm512_load_ps(total + q * kTile);
            if (grew) {
                const __m512 shrink = exp2(_mm512_mul_ps(_mm512_sub_ps(before, now), factor));
                const __m512 keep = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), grew, shrink);
                old_total = _mm512_mul_ps(old_total, keep);
                for (int dim = 0; dim < head_dim; ++dim) {
                    float* row = output + dim * kWidth + q * kTile;
                    _mm512_store_ps(row, _mm512_mul_ps(keep, _mm512_load_ps(row)));
                }
            }
            _mm512_store_ps(total + q * kTile, _mm512_add_ps(old_total, sum));
        }
    }
};

template <int Q>
void run(const Cache& cache, const Task& task) {
    constexpr int kWidth = Columns<Q>::kWidth;
    const int num_columns = (task.num_rows + kWidth - 1) / kWidth;
    const int size = Columns<Q>::size(cache.head_dim);
    const auto memory = buffer<float>(static_cast<size_t>(num_columns) * size);
    const auto values = buffer<bf16>(static_cast<size_t>(kKeyBlock) * cache.head_dim);
    const auto scores = buffer<float>(kKeyBlock * kWidth);
    const auto weights = buffer<bf16>(kKeyBlock * kWidth);
    const int end = task.start + (task.first_row + task.num_rows - 1) / cache.group + 1;
    for (int column = 0; column < num_columns; ++column)
        Columns<Q>(memory.get() + column * size, cache.head_dim).begin(cache, task, column * kWidth);
    for (int first_key = 0; first_key < end; first_key += kKeyBlock) {
        const int num_keys = std::min(kKeyBlock, (end - first_key + kStep - 1) / kStep * kStep);
        pack_values(cache, task, first_key, num_keys, end, values.get());
        for (int column = 0; column < num_columns; ++column)
            Columns<Q>(memory.get() + column * size, cache.head_dim)
                .attend(cache, task, first_key, end, values.get(), scores.get(), weights.get());
    }
    for (int column = 0; column < num_columns; ++column)
        Columns<Q>(memory.get() + column * size, cache.head_dim).end(cache, task, column * kWidth);
}

}  // namespace

extern "C" {

// 0: this processor lacks what the kernels need; 1: AVX-512 with BF16; 2: AMX too. To be called first.
int pdmesh_prepare() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512bf16"))
        return 0;
    // Linux grants the tiles' state to a process that asks (ARCH_REQ_XCOMP_PERM, XTILEDATA); others get an error.
    g_has_amx = __builtin_cpu_supports("amx-bf16") && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return g_has_amx ? 2 : 1;
}

// For tests: do without AMX, or with it again.
void pdmesh_use_amx(int use) { g_has_amx = use; }

// Spans (row, num_tokens, start, offset of the block table in `tables`), 4 numbers each. head_dim is a multiple of 32
// up to 1024, block_size one of 16.
void pdmesh_attention(
    const bf16* query, int64_t query_stride, const bf16* cache_data, bf16* output, float* lse, const int64_t* spans,
    int64_t num_spans, const int64_t* tables, int64_t num_heads, int64_t num_kv_heads, int64_t block_size,
    int64_t head_dim, float scale, int64_t num_threads) {
    const int group = static_cast<int>(num_heads / num_kv_heads);
    const Cache cache = {
        cache_data, static_cast<int>(num_kv_heads), static_cast<int>(block_size), static_cast<int>(head_dim), group,
        scale};
    // Whole tokens, so that a task's rows begin at a token's first head.
    const int64_t task_rows = std::max<int64_t>(1, kTaskRows / group) * group;
    int64_t num_tasks = 0;
    for (int64_t i = 0; i < num_spans; ++i)
        num_tasks += (spans[4 * i + 1] * group + task_rows - 1) / task_rows * num_kv_heads;
    const auto tasks = std::make_unique<Task[]>(num_tasks);
    Task* next = tasks.get();
    for (int64_t i = 0; i < num_spans; ++i) {
        const int64_t row = spans[4 * i], num_rows = spans[4 * i + 1] * group;
        for (int64_t first = 0; first < num_rows; first += task_rows)
            for (int64_t head = 0; head < num_kv_heads; ++head)
                *next++ = {
                    tables + spans[4 * i + 3],
                    static_cast<int>(spans[4 * i + 2]),
                    static_cast<int>(first),
                    static_cast<int>(std::min(task_rows, num_rows - first)),
                    static_cast<int>(head),
                    query + row * query_stride + head * group * head_dim,
                    query_stride,
                    output + (row * num_heads + head * group) * head_dim,
                    lse == nullptr ? nullptr : lse + row * num_heads + head * group,
                    num_heads};
    }
    const int threads = static_cast<int>(std::min(num_threads, num_tasks));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        if (g_has_amx) configure_tiles();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_tasks; ++i) {
            if (tasks[i].num_rows <= kTile)
                run<1>(cache, tasks[i]);
            else
                run<2>(cache, tasks[i]);
        }
        if (g_has_amx) release_tiles();
    }
}

// hidden += delta (unless null); output = weight * round(hidden / rms(hidden)). Rows of `size` values, a multiple of 16.
void pdmesh_add_norm(
    bf16* hidden, const bf16* delta, const bf16* weight, bf16* output, int64_t num_rows, int64_t size, float epsilon,
    int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 16)
    for (int64_t row = 0; row < num_rows; ++row) {
        bf16* x = hidden + row * size;
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < size; i += 16) {
            if (delta != nullptr) narrow(x + i, _mm512_add_ps(widen(x + i), widen(delta + row * size + i)));
            const __m512 value = widen(x + i);
            squares = _mm512_fmadd_ps(value, value, squares);
        }
        const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / size + epsilon));
        for (int64_t i = 0; i < size; i += 16) {
            bf16* to = output + row * size + i;
            narrow(to, _mm512_mul_ps(widen(x + i), factor));
            narrow(to, _mm512_mul_ps(widen(to), widen(weight + i)));
        }
    }
}

// Rotates queries in place, and rotates keys and copies values to the cache. A row of `qkv` is its query heads, key
// heads, value heads; cos and sin have head_dim / 2 columns, a multiple of 16. `slots`: block * block_size + offset.
void pdmesh_rotate_and_store(
    bf16* qkv, const bf16* cos, const bf16* sin, const int64_t* slots, bf16* cache, int64_t num_rows,
    int64_t num_heads, int64_t num_kv_heads, int64_t block_size, int64_t head_dim, int64_t num_threads) {
    const int64_t half = head_dim / 2;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 16)
    for (int64_t row = 0; row < num_rows; ++row) {
        bf16* heads = qkv + row * (num_heads + 2 * num_kv_heads) * head_dim;
        const int64_t block = slots[row] / block_size, offset = slots[row] % block_size;
        const int64_t half_cache = num_kv_heads * block_size * head_dim;
        bf16* keys = cache + block * 2 * half_cache + offset * head_dim;
        for (int64_t head = 0; head < num_heads + num_kv_heads; ++head) {
            const bf16* from = heads + head * head_dim;
            bf16* to = head < num_heads ? heads + head * head_dim : keys + (head - num_heads) * block_size * head_dim;
            for (int64_t i = 0; i < half; i += 16) {
                const __m512 first = widen(from + i), second = widen(from + half + i);
                const __m512 c = widen(cos + row * half + i), s = widen(sin + row * half + i);
                narrow(to + i, _mm512_fmsub_ps(first, c, _mm512_mul_ps(second, s)));
                narrow(to + half + i, _mm512_fmadd_ps(second, c, _mm512_mul_ps(first, s)));
            }
        }
        for (int64_t head = 0; head < num_kv_heads; ++head)
            std::memcpy(
                keys + half_cache + head * block_size * head_dim,
                heads + (num_heads + num_kv_heads + head) * head_dim, head_dim * sizeof(bf16));
    }
}

// output = silu(gate) * up; a row of gate_up is `size` gates, then `size` ups.
void pdmesh_gated_silu(const bf16* gate_up, bf16* output, int64_t num_rows, int64_t size, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 16)
    for (int64_t row = 0; row < num_rows; ++row) {
        const bf16* gate = gate_up + row * 2 * size;
        for (int64_t i = 0; i < size; i += 16) {
            const __m512 x = widen(gate + i);
            const __m512 inverse = exp2(_mm512_mul_ps(x, _mm512_set1_ps(-kLog2E)));
            const __m512 silu = _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), inverse));
            narrow(output + row * size + i, _mm512_mul_ps(silu, widen(gate + size + i)));
        }
    }
}

}  // extern "C"
