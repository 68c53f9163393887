// What the dot kernels share: bf16 vectors, 2^x, transposition.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../memory.h"

namespace pdmesh {

using bf16 = uint16_t;

constexpr int kTile = 16;  // rows, and 32-bit columns, of a tile
constexpr float kLog2E = 1.4426950408889634f;

inline __m512 widen(const bf16* values) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline __m512 widen(const float* values) { return _mm512_loadu_ps(values); }

inline void narrow(float* to, __m512 values) { _mm512_storeu_ps(to, values); }

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

}  // namespace pdmesh
