// What one core can do at most: multiply-adds in registers, and reading memory in order. Compiled once for each
// processor level, with that level's flags: its vectors' width, fused multiply-adds or not, products of bf16 pairs or not.

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
#if defined(__AVX512BF16__)
constexpr double kOperations = 4;  // of a lane
#else
constexpr double kOperations = 2;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));

extern "C" {

// Returns the number of floating-point operations done.
double multiply_adds(int64_t rounds, float* out) {
    constexpr int kSums = 12;
    Floats sums[kSums];
    for (int i = 0; i < kSums; ++i) sums[i] = Floats{} + static_cast<float>(i);  // unlike, or they would become one
    Floats factor = {}, term = {};
    std::memcpy(&factor, out, 4);
    std::memcpy(&term, out + 1, 4);
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
        for (int i = 0; i < kSums; ++i) {
#if defined(__AVX512BF16__)
            sums[i] = (Floats)_mm512_dpbf16_ps((__m512)sums[i], (__m512bh)factor, (__m512bh)term);
#else
            sums[i] = sums[i] * factor + term;
#endif
        }
        __asm__ volatile("" : "+x"(factor));
    }
    for (int i = 1; i < kSums; ++i) sums[0] += sums[i];  // all of them count, or the compiler would leave some out
    std::memcpy(out, &sums[0], 4);
    return kOperations * kSums * kLanes * static_cast<double>(rounds);
}

// Reads so many bytes, a multiple of 256.
uint64_t read_memory(const char* from, int64_t num_bytes) {
    typedef uint64_t Words __attribute__((vector_size(4 * kLanes), aligned(16)));
    Words sums[4] = {};
    for (int64_t i = 0; i < num_bytes; i += 256) {
        for (int line = 0; line < 4; ++line) __builtin_prefetch(from + i + 4096 + 64 * line);
        for (int part = 0; part < 256 / static_cast<int>(sizeof(Words)); ++part)
            sums[part % 4] |= *reinterpret_cast<const Words*>(from + i + part * sizeof(Words));
    }
    const Words all = sums[0] | sums[1] | sums[2] | sums[3];
    return all[0];
}

}  // extern "C"
