// Attention over the paged cache: a step's spans as tasks for the threads.

#include <omp.h>

#include "lanes.h"
#include "narrow.h"
#include "wide.h"

using namespace pdmesh;

// Spans (row, num_tokens, start, offset of the block table in `tables`, last key that is seen), 5 numbers each. head_dim is
// a multiple of 32 up to 1024, block_size one of 16. `cache_data` begins at the first of num_kv_heads of cache_heads.
// Results go to `output`, or if that is null, in fp32, to `wide`.
extern "C" void pdmesh_attention(
    const bf16* query, int64_t query_stride, const bf16* cache_data, bf16* output, float* wide, float* lse, const int64_t* spans,
    int64_t num_spans, const int64_t* tables, int64_t num_heads, int64_t num_kv_heads, int64_t cache_heads,
    int64_t block_size, int64_t head_dim, float scale, int64_t, float, int64_t num_threads) {
    const int group = static_cast<int>(num_heads / num_kv_heads);
    const Cache cache = {
        cache_data, static_cast<int>(cache_heads), static_cast<int>(block_size), static_cast<int>(head_dim), group,
        scale};
    // Whole tokens, so that a task's rows begin at a token's first head.
    const int64_t task_rows = std::max<int64_t>(1, kTaskRows / group) * group;
    // Decodes take all heads together, unless there are fewer of them than threads.
    const auto heads_each = [&](int64_t num_rows) {
        return num_rows <= kTile && num_spans >= num_threads ? num_kv_heads : 1;
    };
    int64_t num_tasks = 0;
    for (int64_t i = 0; i < num_spans; ++i) {
        const int64_t num_rows = spans[5 * i + 1] * group;
        num_tasks += (num_rows + task_rows - 1) / task_rows * (num_kv_heads / heads_each(num_rows));
    }
    const auto tasks = std::make_unique<Task[]>(num_tasks);
    Task* next = tasks.get();
    for (int64_t i = 0; i < num_spans; ++i) {
        const int64_t row = spans[5 * i], num_rows = spans[5 * i + 1] * group;
        const Task all = {
            tables + spans[5 * i + 3],
            static_cast<int>(spans[5 * i + 2]),
            static_cast<int>(spans[5 * i + 4]),
            0,
            static_cast<int>(num_rows),
            0,
            static_cast<int>(num_kv_heads),
            query + row * query_stride,
            query_stride,
            output == nullptr ? nullptr : output + row * num_heads * head_dim,
            wide == nullptr ? nullptr : wide + row * num_heads * head_dim,
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
            if (tasks[i].num_rows > kTile)
                attend_wide(cache, tasks[i]);
            else if (has_amx)
                attend_narrow(cache, tasks[i]);
            else
                attend_lanes(cache, tasks[i]);
        }
        release_tiles();
    }
}
