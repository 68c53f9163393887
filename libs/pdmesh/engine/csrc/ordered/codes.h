// Codes of packed weights as they lie in memory: see ../packed.h.
#pragma once

#include "../packed.h"
#include "vec.h"

namespace pdmesh {

constexpr int kCodeAheadBytes = 6144;  // between a code's request and its use

inline Words words_at(const uint8_t* from) {
    Words words;
    std::memcpy(&words, from, sizeof(words));
    return words;
}

// Of the 8 inputs of a quarter of a step, a code of each, at the top of words: input i, for kLanes outputs from `output`
// on.
template <int Bits>
inline Words code_bits(const uint8_t* step, int quarter, int output, int i) {
    const int tile = output / kCodeTile, lane = output % kCodeTile, part = i % 2;
    Words bits;
    if constexpr (Bits == 8) {
        Halves halves;
        std::memcpy(&halves, step + (tile * 16 + quarter * 4 + i / 2) * kCodeLine / 2 + 2 * lane, sizeof(halves));
        bits = words_of(halves) << (24 - 8 * part);
    } else {
        bits = words_at(step + (tile * 4 + quarter) * kCodeLine + lane * 4) << (28 - i / 2 * 4 - part * 16);
        const uint8_t* highs = step + (8 + tile * (Bits - 4)) * kCodeLine + lane * 4;
        if constexpr (Bits == 5) {
            const Words high = words_at(highs) >> (4 * quarter);
            bits = (high << (31 - i / 2 - part * 16) & 0x80000000) | (bits >> 1 & 0x78000000);
        } else if constexpr (Bits == 6) {
            const Words high = words_at(highs + quarter / 2 * kCodeLine) >> (quarter % 2 * 8);
            bits = (high << (30 - i / 2 * 2 - part * 16) & 0xc0000000) | (bits >> 2 & 0x3c000000);
        }
    }
    return bits;
}

// Asks for what follows a quarter of a step.
template <int Bits>
inline void fetch(const uint8_t* step, int quarter) {
    const uint8_t* ahead = step + quarter * step_bytes(Bits) / 4 + kCodeAheadBytes;
#pragma GCC unroll 4
    for (int line = 0; line < step_bytes(Bits) / 4; line += kCodeLine) prefetch(ahead + line);
}

}  // namespace pdmesh
