// Which processor levels this machine has. Compiled for any processor of its architecture, so that it can be asked
// before a library of a level is loaded.

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>

namespace {

bool has(uint32_t word, int bit) { return word >> bit & 1; }

// Registers that the system saves when it switches tasks.
uint64_t saved_registers() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
}

// Each level has all that the lower ones have.
const char* levels() {
    const char* const baseline = "baseline";
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, 27)) return baseline;  // no wide register is saved
    const bool fma = has(c, 12), f16c = has(c, 29);
    const uint64_t saved = saved_registers(), ymm = 0x06, zmm = 0xe6, tiles = 0x60000;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return baseline;
    const bool avx2 = has(b, 5), amx = has(d, 22) && has(d, 24);
    if ((saved & ymm) != ymm || !fma || !f16c || !avx2) return baseline;
    const bool avx512 = has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31);  // F, DQ, BW, VL
    if ((saved & zmm) != zmm || !avx512) return "avx2 baseline";
    if (a < 1 || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !has(a, 5)) return "avx512 avx2 baseline";
    if ((saved & tiles) != tiles || !amx) return "avx512_bf16 avx512 avx2 baseline";
    return "amx avx512_bf16 avx512 avx2 baseline";
}

}  // namespace

#else
namespace {
const char* levels() { return "neon"; }  // part of aarch64
}
#endif

// Names of pdmesh.engine.levels, the fastest first.
extern "C" const char* pdmesh_levels() { return levels(); }
