// Codes of packed weights as they lie in memory: see ../packed.h.
#pragma once

#include "../packed.h"
#include "simd.h"

namespace pdmesh {

constexpr int kLeastGroup = 16;         // inputs
constexpr int kEighth = 8;              // pairs of the least group
constexpr int kCodeAheadBytes = 12288;  // between a code's request and its use

using Words = uint16_t __attribute__((vector_size(64)));

inline Words words_at(const uint8_t* from) { return (Words)_mm512_loadu_si512(from); }

// Asks for what follows a half of a step.
template <int Bits>
inline void fetch(const uint8_t* step, int half) {
    const uint8_t* ahead = step + half * step_bytes(Bits) / 2 + kCodeAheadBytes;
#pragma GCC unroll 8
    for (int line = 0; line < step_bytes(Bits) / 2; line += kCodeLine) _mm_prefetch(ahead + line, _MM_HINT_T0);
}

}  // namespace pdmesh
