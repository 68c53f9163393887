// Vectors of the ordered kernels. This file is compiled once for each processor level, and every function in it gives
// the same bits at every level: 4 lanes (SSE2, NEON), 8 (AVX2 with FMA and F16C) or 16 (AVX-512F).
//
// Rules that keep the bits equal, for all who use it:
// - -ffp-contract=off: a * b + c rounds twice at every level. Only `multiply_add`, for products that are exact in fp32,
//   may be fused.
// - The order of a sum never depends on kLanes. Sums across lanes go through `sum16`.
// - Subnormals count: no FTZ, no DAZ. Division and square root are IEEE's; no approximate reciprocal.
// - The sign and payload of a NaN differ between processors until `narrow` makes every NaN the same.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace pdmesh {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kTreeLanes = 16;  // of every sum across lanes
constexpr float kLog2E = 1.4426950408889634f;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));  // also a mask: lanes are 0 or -1
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

// Values in memory. Both kinds have exact products in fp32: 8 + 8 and 11 + 11 bits of mantissa.
enum class Bf16 : uint16_t {};
enum class F16 : uint16_t {};

inline Floats splat(float value) { return value - Floats{}; }
inline Ints splat(int32_t value) { return value - Ints{}; }
inline Floats as_floats(Ints bits) { return (Floats)bits; }
inline Ints as_ints(Floats values) { return (Ints)values; }

// The lanes' numbers: 0, 1, 2, ...
inline Ints lane_numbers() {
    Ints numbers;
    for (int i = 0; i < kLanes; ++i) numbers[i] = i;
    return numbers;
}

inline Floats load(const float* from) {
    Floats values;
    std::memcpy(&values, from, sizeof(values));
    return values;
}
inline Ints load(const int32_t* from) {
    Ints values;
    std::memcpy(&values, from, sizeof(values));
    return values;
}
inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof(values)); }
inline void store(int32_t* to, Ints values) { std::memcpy(to, &values, sizeof(values)); }

// Store past the caches, for values that are not read soon. `to` is aligned. `fence` orders such stores before others.
inline void stream(float* to, Floats values) {
#if defined(__AVX512F__)
    _mm512_stream_ps(to, values);
#elif defined(__AVX2__)
    _mm256_stream_ps(to, values);
#elif defined(__x86_64__)
    _mm_stream_ps(to, values);
#else
    store(to, values);
#endif
}
inline void fence() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// Lanes of `yes` where the mask is set, else of `no`.
inline Floats select(Ints mask, Floats yes, Floats no) { return mask ? yes : no; }
inline Ints select(Ints mask, Ints yes, Ints no) { return mask ? yes : no; }
inline Ints where_nan(Floats values) { return values != values; }

// a > b ? a : b: `b` where either is NaN, and of two zeros.
inline Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#elif defined(__x86_64__)
    return _mm_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

// a < b ? a : b: `b` where either is NaN, and of two zeros.
inline Floats min(Floats a, Floats b) {
#if defined(__AVX512F__)
    return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_min_ps(a, b);
#elif defined(__x86_64__)
    return _mm_min_ps(a, b);
#else
    return a < b ? a : b;
#endif
}

// sum + a * b, for factors that were widened from Bf16 or F16: their product is exact, so that fused and unfused
// round alike. Not for products of any other floats. A product below 2^-126 or above 2^127, which bf16 values of
// extreme size can have, is not exact: SSE2 may then differ from the fused levels in the last bits.
inline Floats multiply_add(Floats a, Floats b, Floats sum) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, sum);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, sum);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
    return sum + a * b;
#endif
}

inline Words words_of(Halves values) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu16_epi32((__m256i)values);
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu16_epi32((__m128i)values);  // GCC 12 would make four instructions of it
#else
    return __builtin_convertvector(values, Words);
#endif
}

inline Floats widen(Halves values, Bf16) { return (Floats)(words_of(values) << 16); }

inline Floats widen(Halves values, F16) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps((__m256i)values);
#elif defined(__F16C__)
    return _mm256_cvtph_ps((__m128i)values);
#elif defined(__aarch64__)
    return (Floats)vcvt_f32_f16((float16x4_t)values);
#else
    const Words wide = __builtin_convertvector(values, Words);
    const Words magnitude = (wide & 0x7fff) << 13, sign = (wide & 0x8000) << 16;
    // 2^112 moves the exponent from f16's bias to fp32's, exactly, subnormals too.
    const Words finite = (Words)((Floats)magnitude * 0x1p112f);
    const Words special = magnitude | 0x7f800000 | ((Words)((wide & 0x3ff) != 0) & 0x400000);
    return (Floats)(((Words)(magnitude >= 0x0f800000) & (special ^ finite)) ^ finite ^ sign);
#endif
}

// Every NaN becomes the same.
inline Floats with_one_nan(Floats values) {
    return select(where_nan(values), as_floats(splat(0x7fc00000)), values);
}

// To nearest, ties to even. Every NaN becomes 0x7fc0 or 0x7e00.
inline Halves narrow(Floats values, Bf16) {
    const Words bits = (Words)values;
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words result = (Words)select(where_nan(values), splat(0x7fc0), (Ints)rounded);
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i packed = _mm256_packus_epi32((__m256i)result, (__m256i)result);
    return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
    return __builtin_convertvector(result, Halves);
#endif
}

inline Halves narrow(Floats values, F16) {
#if defined(__AVX512F__)
    const Floats quiet = with_one_nan(values);
    return (Halves)_mm512_cvtps_ph(quiet, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
    const Floats quiet = with_one_nan(values);
    return (Halves)_mm256_cvtps_ph(quiet, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
    const Floats quiet = with_one_nan(values);
    return (Halves)vcvt_f16_f32((float32x4_t)quiet);
#else
    const Words bits = (Words)values, sign = bits & 0x80000000, magnitude = bits ^ sign;
    const Words normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Below 2^-14: adding 1/2 leaves the rounded subnormal in the low bits.
    const Words subnormal = (Words)((Floats)magnitude + 0.5f) - 0x3f000000;
    const Words finite = (Words)select((Ints)(magnitude < 0x38800000), (Ints)subnormal, (Ints)normal);
    const Words result = (Words)select((Ints)(magnitude >= 0x47800000), splat(0x7c00), (Ints)finite) | (sign >> 16);
    return __builtin_convertvector((Words)select(where_nan(values), splat(0x7e00), (Ints)result), Halves);
#endif
}

// kLanes values, widened.
template <class Value>
inline Floats load(const Value* from) {
    Halves values;
    std::memcpy(&values, from, sizeof(values));
    return widen(values, Value());
}

template <class Value>
inline void store(Value* to, Floats values) {
    const Halves narrowed = narrow(values, Value());
    std::memcpy(to, &narrowed, sizeof(narrowed));
}

// Results in memory: rounded to Value, or in fp32 where `is_wide`.
template <class Value>
struct Results {
    void* values;
    bool is_wide;

    void put(int64_t at, Floats results) const {
        if (is_wide)
            store(static_cast<float*>(values) + at, with_one_nan(results));
        else
            store(static_cast<Value*>(values) + at, results);
    }
};

// The first `count` (at most kLanes) values; zeros in the other lanes.
template <class Value>
inline Floats load_part(const Value* from, int64_t count) {
    Value values[kLanes] = {};
    std::memcpy(values, from, count * sizeof(Value));
    return load(values);
}

template <class Value>
inline void store_part(Value* to, Floats values, int64_t count) {
    Value all[kLanes];
    store(all, values);
    std::memcpy(to, all, count * sizeof(Value));
}

// One value widened, by the same rules; not for inner loops.
template <class Value>
inline float widen_one(Value value) {
    return load_part(&value, 1)[0];
}

// Values as they would be read back after a store.
template <class Value>
inline Floats rounded(Floats values) {
    return widen(narrow(values, Value()), Value());
}

// 2^x to 2e-7; exactly 1 for 0; 0 below -126, infinite from 128 on, NaN for NaN.
inline Floats exp2(Floats x) {
    const Floats bounded = max(splat(-127.0f), min(splat(128.0f), x));  // NaN passes: the second operand
    const Floats magic = splat(0x1.8p23f);                             // a float of this size has no fraction
    const Floats shifted = bounded + magic;
    const Floats part = bounded - (shifted - magic);
    Floats y = splat(0.0013264728f);  // the least largest relative error on [-1/2, 1/2] with 1 at 0
    y = y * part + 0.009671514f;
    y = y * part + 0.055507336f;
    y = y * part + 0.24022242f;
    y = y * part + 0.693147f;
    y = y * part + 1.0f;
    // In two steps, so that neither factor leaves the range of normal numbers.
    const Ints whole = as_ints(shifted) - as_ints(magic), half = whole >> 1;
    y = y * as_floats((half + 127) << 23) * as_floats((whole - half + 127) << 23);
    return select((Ints)(x < splat(-126.0f)), splat(0.0f), y);
}

inline Floats sigmoid(Floats x) { return 1.0f / (exp2(x * splat(-kLog2E)) + 1.0f); }
inline Floats silu(Floats x) { return x / (exp2(x * splat(-kLog2E)) + 1.0f); }

// log(1 + e^x) to 3e-7.
inline Floats softplus(Floats x) {
    const Floats magnitude = as_floats(as_ints(x) & 0x7fffffff), y = exp2(magnitude * splat(-kLog2E));
    const Floats s = y / (y + 2.0f), t = s * s;  // log(1 + y) is 2 atanh(s)
    Floats series = splat(1.0f / 15);
    for (int odd = 13; odd > 0; odd -= 2) series = series * t + 1.0f / static_cast<float>(odd);
    return max(splat(0.0f), x) + s * 2.0f * series;
}

// Sum of 16 lanes, given as 16 / kLanes vectors in order, in one tree: lane i + lane i + 8, then 4, 2, 1 apart.
inline float sum16(const Floats (&parts)[kTreeLanes / kLanes]) {
    float lanes[kTreeLanes];
    std::memcpy(lanes, parts, sizeof(lanes));
    for (int apart = kTreeLanes / 2; apart > 0; apart /= 2)
        for (int i = 0; i < apart; ++i) lanes[i] += lanes[i + apart];
    return lanes[0];
}

// Largest of all lanes; not defined where one is NaN.
inline float max_lane(Floats values) {
    float lanes[kLanes];
    store(lanes, values);
    float largest = lanes[0];
    for (int i = 1; i < kLanes; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
}

inline void prefetch(const void* from) {
    __builtin_prefetch(from);
    __asm__ volatile("");  // GCC takes a function that only prefetches for one without effect, and drops calls of it
}

}  // namespace pdmesh
