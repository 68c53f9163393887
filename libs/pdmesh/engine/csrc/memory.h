// What all kernels share: their interface's number, and buffers of their threads, aligned to cache lines, uninitialized.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace pdmesh {

// Of the functions that engine/levels.py calls: raised when what one of them takes changes.
constexpr int64_t kInterface = 11;

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

}  // namespace pdmesh
