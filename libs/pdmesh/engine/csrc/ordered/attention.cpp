// Attention over the paged cache: a step's spans as tasks for the threads.
//
// Query rows are those of all heads that share a key-value head; lanes are keys while scores are summed, dims while
// values are. Products of a block of keys with a few rows stay in registers. What a row gets depends on its own context
// alone: blocks and segments of keys begin at multiples of a constant, whatever the chunk, batch, lanes or threads.

#include <omp.h>

#include <vector>

#include "../logarithm.h"
#include "../memory.h"
#include "tile.h"

namespace {

using namespace pdmesh;

constexpr int64_t kTaskRows = 384;  // query rows of one task: what is known of them stays in the second-level cache
constexpr int64_t kSegment = 16 * kKeyBlock;  // keys that are attended to apart, then merged in order

constexpr int64_t kPair = 2 * kLanes;  // dims whose sums lie side by side

// Where the dims begin that lie from `slot` on: the last ones may be among those before.
inline int64_t dim_of(int64_t slot, int64_t head_dim) {
    return std::clamp<int64_t>(slot, 0, std::max<int64_t>(head_dim - kPair, 0));
}

// Query rows first_row ... of one sequence's chunk, for one key-value head; row r is token r / group, head r % group.
template <class Value>
struct Task {
    const int64_t* table;
    int64_t start;  // position of the chunk's first token
    int64_t last;   // key that no row sees beyond
    int64_t first_row, num_rows, head;
    const Value* query;  // of the chunk's first token and the head's first query head
    int64_t query_stride;
    Value* output;  // or null: to `wide`
    float* wide;
    float* lse;  // or null
    int64_t num_heads;

    int64_t position(const Cache<Value>& cache, int64_t row) const { return start + (first_row + row) / cache.group; }
    // The last key that a row sees.
    int64_t last_key(const Cache<Value>& cache, int64_t row) const { return std::min(position(cache, row), last); }
    // Keys that its last row sees.
    int64_t end(const Cache<Value>& cache) const { return last_key(cache, num_rows - 1) + 1; }
    // The first key that a row sees; and the first block of those that its first row sees.
    int64_t first_key(const Cache<Value>& cache, int64_t row) const {
        return cache.window > 0 ? std::max<int64_t>(position(cache, row) + 1 - cache.window, 0) : 0;
    }
    int64_t first_block(const Cache<Value>& cache) const { return first_key(cache, 0) / kKeyBlock * kKeyBlock; }
    int64_t first_segment(const Cache<Value>& cache) const { return first_key(cache, 0) / kSegment; }
    int64_t num_segments(const Cache<Value>& cache) const { return (end(cache) + kSegment - 1) / kSegment; }
    int64_t num_tiles() const { return (num_rows + kTileRows - 1) / kTileRows; }
    // Tiles are of equal size, or one row more.
    int64_t tile_begin(int64_t tile) const { return num_rows * tile / num_tiles(); }
};

// What attention has made of a task's rows so far.
struct State {
    int64_t num_rows, stride;
    float* output;   // (num_rows x stride), to be divided by the sum: head_dim in the order of `load_both`
    float* sums;     // of weights, (num_rows x 16)
    float* maximum;  // of scores, (num_rows)

    static int64_t stride_of(int64_t head_dim) { return (head_dim + kPair - 1) / kPair * kPair; }
    static int64_t size(int64_t num_rows, int64_t head_dim) {
        return num_rows * (stride_of(head_dim) + kTreeLanes + 1);
    }

    State(float* memory, int64_t num_rows, int64_t head_dim)
        : num_rows(num_rows),
          stride(stride_of(head_dim)),
          output(memory),
          sums(output + num_rows * stride),
          maximum(sums + num_rows * kTreeLanes) {}

    void clear() {
        std::fill(output, maximum, 0.0f);
        std::fill_n(maximum, num_rows, kLowest);
    }

    // Adds what was made of keys that come later.
    void merge(const State& later, float factor) {
        for (int64_t row = 0; row < num_rows; ++row) {
            const float peak = std::max(maximum[row], later.maximum[row]);
            const Floats before = exp2(splat((maximum[row] - peak) * factor));
            const Floats after = exp2(splat((later.maximum[row] - peak) * factor));
            maximum[row] = peak;
            const auto add = [&](float* to, const float* from) {
                store(to, load(to) * before + load(from) * after);
            };
            for (int64_t i = 0; i < kTreeLanes; i += kLanes)
                add(sums + row * kTreeLanes + i, later.sums + row * kTreeLanes + i);
            for (int64_t i = 0; i < stride; i += kLanes)
                add(output + row * stride + i, later.output + row * stride + i);
        }
    }
};

// A thread's memory.
template <class Value>
struct Scratch {
    Buffer<float> query, keys, state, segment;
    KeyBlock<Value> blocks[2];  // this one and the next, in turns
    alignas(64) float scores[kTileRows * kScores];
    alignas(64) float gathered[kTileRows * kMaxHeadDim];  // kMaxHeadDim is a multiple of kPair

    Scratch(int64_t num_rows, int64_t head_dim)
        : query(buffer<float>(num_rows * head_dim)),
          keys(buffer<float>(kKeyBlock * head_dim)),
          state(buffer<float>(State::size(num_rows, head_dim))),
          segment(buffer<float>(State::size(num_rows, head_dim))) {}
};

// Query rows, widened: for each tile, (head_dim x rows).
template <class Value>
void turn_query(const Cache<Value>& cache, const Task<Value>& task, Scratch<Value>& scratch) {
    const int64_t dims = cache.head_dim;
    float* wide = scratch.gathered;
    for (int64_t tile = 0; tile < task.num_tiles(); ++tile) {
        const int64_t begin = task.tile_begin(tile), count = task.tile_begin(tile + 1) - begin;
        for (int64_t i = 0; i < count; ++i) {
            const int64_t row = task.first_row + begin + i;
            const Value* from = task.query + row / cache.group * task.query_stride + row % cache.group * dims;
            for (int64_t dim = 0; dim < dims; dim += kLanes)
                store(wide + dim, dim + kLanes <= dims ? load(from + dim) : load_part(from + dim, dims - dim));
            float* to = scratch.query.get() + begin * dims + i;
            for (int64_t dim = 0; dim < dims; ++dim) to[dim * count] = wide[dim];
        }
    }
}

// weights (R x kScores) times values, to `output` (R x stride).
template <int R, class Value>
void gather_rows(
    const Value* const* values, int count, int64_t head_dim, const float* weights, float* output, int64_t stride,
    const Value* const* ahead) {
    if (head_dim < kPair)
        return gather<R, 2, true>(values, count, 0, head_dim, weights, output, stride, ahead);
    int64_t slot = 0;
    const auto gather_by = [&](auto vectors) {
        constexpr int N = vectors;
        for (; slot + N * kLanes <= head_dim; slot += N * kLanes)
            gather<R, N, false>(values, count, slot, N * kLanes, weights, output + slot, stride, ahead);
    };
    if constexpr (kVectors<R> >= 8) gather_by(std::integral_constant<int, 8>());
    if constexpr (kVectors<R> >= 4) gather_by(std::integral_constant<int, 4>());
    gather_by(std::integral_constant<int, 2>());
    if (slot < head_dim)
        gather<R, 2, false>(values, count, dim_of(slot, head_dim), kPair, weights, output + slot, stride, ahead);
}

// A tile's rows from `begin` on, against the block from `first_key` on. Rows `ahead` (unless null) are read next.
template <int R, class Value>
void attend_tile(
    const Cache<Value>& cache, const Task<Value>& task, int64_t begin, int64_t first_key,
    const KeyBlock<Value>& block, const Value* const* ahead, State& state, Scratch<Value>& scratch) {
    const int64_t dims = cache.head_dim, last = task.last_key(cache, begin + R - 1);
    const int count = static_cast<int>(std::min<int64_t>(last + 1 - first_key, block.count));
    const int64_t first_seen = task.first_key(cache, begin);
    if (count <= 0 || first_key + count <= first_seen) return;
    for (int key = 0; key < count; key += kVectors<R> * kLanes)
        score<R, kVectors<R>>(
            scratch.query.get() + begin * dims, scratch.keys.get() + key * dims, dims, scratch.scores + key);
    float shrink[R];
    for (int row = 0; row < R; ++row) {
        const auto within = [&](int64_t key) {
            return static_cast<int>(std::clamp<int64_t>(key - first_key, 0, kKeyBlock));
        };
        float* scores = scratch.scores + row * kScores;
        if (cache.cap > 0) squeeze(scores, count, cache.cap / cache.scale);
        shrink[row] = weigh(
            scores, count, within(task.first_key(cache, begin + row)), within(task.last_key(cache, begin + row) + 1),
            cache.scale * kLog2E, state.maximum[begin + row], state.sums + (begin + row) * kTreeLanes);
    }
    gather_rows<R>(block.values, count, dims, scratch.scores, scratch.gathered, state.stride, ahead);
    for (int row = 0; row < R; ++row) {
        float* output = state.output + (begin + row) * state.stride;
        const float* gathered = scratch.gathered + row * state.stride;
        for (int64_t i = 0; i < state.stride; i += kLanes)
            store(output + i, load(output + i) * splat(shrink[row]) + load(gathered + i));
    }
}

// A task's rows against one segment of keys; its query is in `scratch`. The thread's task after it (unless null) finds
// its first keys on their way.
template <class Value>
void attend_segment(
    const Cache<Value>& cache, const Task<Value>& task, int64_t segment, const Task<Value>* after, State& state,
    Scratch<Value>& scratch) {
    state.clear();
    const int64_t end = task.end(cache), segment_end = std::min(end, (segment + 1) * kSegment);
    KeyBlock<Value>*block = &scratch.blocks[0], *next = &scratch.blocks[1];
    const int64_t begin = std::max(segment * kSegment, task.first_block(cache));
    block->locate(cache, task.table, task.head, begin, end);
    for (int64_t first_key = begin; first_key < segment_end; first_key += kKeyBlock) {
        if (first_key + kKeyBlock < end || after == nullptr)
            next->locate(cache, task.table, task.head, first_key + kKeyBlock, end);
        else
            next->locate(cache, after->table, after->head, after->first_block(cache), after->end(cache));
        for (int key = 0; key < block->count; key += kPanel) {
            for (int i = key; i < std::min(key + kPanel, block->count); ++i)
                prefetch_values(block->values[i], cache.head_dim);
            turn_keys(block->keys + key, cache.head_dim, scratch.keys.get() + key * cache.head_dim);
        }
        for (int64_t tile = 0; tile < task.num_tiles(); ++tile) {
            const int64_t begin = task.tile_begin(tile);
            with_rows<kTileRows>(static_cast<int>(task.tile_begin(tile + 1) - begin), [&](auto count) {
                attend_tile<count>(
                    cache, task, begin, first_key, *block, tile == 0 ? next->keys : nullptr, state, scratch);
            });
        }
        std::swap(block, next);
    }
}

// Divides by the sums and writes rows.
template <class Value>
void write(const Cache<Value>& cache, const Task<Value>& task, const State& state) {
    const int64_t dims = cache.head_dim;
    for (int64_t i = 0; i < task.num_rows; ++i) {
        const int64_t row = task.first_row + i;
        const int64_t head = row / cache.group * task.num_heads + row % cache.group;
        Floats parts[kTreeLanes / kLanes];
        for (int part = 0; part < kTreeLanes / kLanes; ++part)
            parts[part] = load(state.sums + i * kTreeLanes + part * kLanes);
        const float sum = sum16(parts);
        const Floats share = splat(1.0f / sum);
        for (int64_t slot = 0; slot < dims; slot += kPair) {
            const float* from = state.output + i * state.stride + slot;
            const int64_t count = std::min(kPair, dims), to = head * dims + dim_of(slot, dims);
            // + 0: levels disagree about the sign of a sum that underflowed.
            const Floats low = load(from) * share + 0.0f, high = load(from + kLanes) * share + 0.0f;
            const auto put = [&](auto* output) {
                std::remove_pointer_t<decltype(output)> values[kPair];
                if constexpr (std::is_same_v<decltype(output), Value*>)
                    store_both(values, low, high);
                else
                    store_wide(values, low, high, Value());
                std::memcpy(output + to, values, count * sizeof(*output));
            };
            if (task.output != nullptr) put(task.output);
            else put(task.wide);
        }
        if (task.lse != nullptr)
            task.lse[head] = state.maximum[i] * cache.scale + natural_log(sum);
    }
}

// Spans are (row, num_tokens, start, offset of the block table in `tables`, last key that is seen), 5 numbers each. Each
// row sees a key at least.
template <class Value>
void attention(
    const Value* query, int64_t query_stride, const Value* cache_data, Value* output, float* wide, float* lse,
    const int64_t* spans, int64_t num_spans, const int64_t* tables, int64_t num_heads, int64_t num_kv_heads,
    int64_t cache_heads, int64_t block_size, int64_t head_dim, float scale, int64_t window, float cap,
    int64_t num_threads) {
    const int64_t group = num_heads / num_kv_heads;
    const Cache<Value> cache = {cache_data, cache_heads, block_size, head_dim, group, scale, window, cap};
    std::vector<Task<Value>> tasks;
    int64_t most_rows = 0;
    for (int64_t i = 0; i < num_spans; ++i) {
        const int64_t row = spans[5 * i], num_rows = spans[5 * i + 1] * group;
        // The last rows see most keys: they begin first.
        for (int64_t first = (num_rows - 1) / kTaskRows * kTaskRows; first >= 0; first -= kTaskRows)
            for (int64_t head = 0; head < num_kv_heads; ++head) {
                const int64_t place = (row * num_heads + head * group) * head_dim;
                tasks.push_back({
                    tables + spans[5 * i + 3], spans[5 * i + 2], spans[5 * i + 4], first,
                    std::min(kTaskRows, num_rows - first), head,
                    query + row * query_stride + head * group * head_dim, query_stride,
                    output == nullptr ? nullptr : output + place, wide == nullptr ? nullptr : wide + place,
                    lse == nullptr ? nullptr : lse + row * num_heads + head * group, num_heads});
                most_rows = std::max(most_rows, tasks.back().num_rows);
            }
    }
    // Segments are threads' work where there are fewer tasks than threads.
    struct Part {
        int64_t task, segment;
    };
    std::vector<Part> parts;
    const bool splits = static_cast<int64_t>(tasks.size()) < num_threads;
    for (int64_t task = 0; task < static_cast<int64_t>(tasks.size()); ++task)
        for (int64_t first = tasks[task].first_segment(cache), segment = first;
             segment < (splits ? tasks[task].num_segments(cache) : first + 1); ++segment)
            parts.push_back({task, segment});
    const int64_t num_parts = static_cast<int64_t>(parts.size()), state_size = State::size(most_rows, head_dim);
    const auto states = buffer<float>(splits ? num_parts * state_size : 1);
    const int threads = static_cast<int>(std::min(num_threads, num_parts));
    const float factor = scale * kLog2E;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const auto scratch = std::make_unique<Scratch<Value>>(most_rows, head_dim);
        if (omp_get_thread_num() < num_parts) {
            const Task<Value>& task = tasks[parts[omp_get_thread_num()].task];
            KeyBlock<Value>& block = scratch->blocks[0];
            block.locate(cache, task.table, task.head, task.first_block(cache), task.end(cache));
            for (int key = 0; key < block.count; ++key) prefetch_values(block.keys[key], head_dim);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_parts; ++i) {
            const Task<Value>& task = tasks[parts[i].task];
            turn_query(cache, task, *scratch);
            State state(splits ? states.get() + i * state_size : scratch->state.get(), task.num_rows, head_dim);
            const Task<Value>* after = i + threads < num_parts ? &tasks[parts[i + threads].task] : nullptr;
            attend_segment(cache, task, parts[i].segment, after, state, *scratch);
            if (splits) continue;
            State later(scratch->segment.get(), task.num_rows, head_dim);
            for (int64_t segment = parts[i].segment + 1; segment < task.num_segments(cache); ++segment) {
                attend_segment(cache, task, segment, after, later, *scratch);
                state.merge(later, factor);
            }
            write(cache, task, state);
        }
        if (splits) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < num_parts; ++i) {
                const Task<Value>& task = tasks[parts[i].task];
                if (parts[i].segment != task.first_segment(cache)) continue;
                State state(states.get() + i * state_size, task.num_rows, head_dim);
                for (int64_t later = 1; later < task.num_segments(cache) - parts[i].segment; ++later)
                    state.merge(State(states.get() + (i + later) * state_size, task.num_rows, head_dim), factor);
                write(cache, task, state);
            }
        }
    }
}

}  // namespace

// head_dim is a multiple of 8 up to 1024. Results go to `output`, or if that is null, in fp32, to `wide`. lse may be
// null. A row sees the `window` latest keys, its own among them, 0:
// all; scores are squeezed into -cap ... cap, 0: as they are. `cache` begins at the first of num_kv_heads of cache_heads.
#define PDMESH_ATTENTION(Value, suffix)                                                                                \
    void pdmesh_attention##suffix(                                                                                     \
        const Value* query, int64_t query_stride, const Value* cache, Value* output, float* wide, float* lse,          \
        const int64_t* spans, int64_t num_spans, const int64_t* tables, int64_t num_heads, int64_t num_kv_heads,       \
        int64_t cache_heads, int64_t block_size, int64_t head_dim, float scale, int64_t window, float cap,             \
        int64_t num_threads) {                                                                                         \
        attention(                                                                                                     \
            query, query_stride, cache, output, wide, lse, spans, num_spans, tables, num_heads, num_kv_heads,          \
            cache_heads, block_size, head_dim, scale, window, cap, num_threads);                                       \
    }

extern "C" {
PDMESH_ATTENTION(Bf16, )
PDMESH_ATTENTION(F16, _f16)
}
