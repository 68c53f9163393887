// The logarithm of a sum of weights, the same on every processor.
#pragma once

#include <cstdint>
#include <cstring>

namespace pdmesh {

// Natural logarithm of a sum of weights, positive and not tiny; the C library's depends on the processor.
inline float natural_log(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const int32_t exponent = (bits - 0x3f3504f3) >> 23;  // of a mantissa from sqrt(1/2) to sqrt(2)
    bits -= exponent << 23;
    float mantissa;
    std::memcpy(&mantissa, &bits, sizeof(mantissa));
    const double s = (static_cast<double>(mantissa) - 1) / (static_cast<double>(mantissa) + 1), t = s * s;
    const double series = 1 + t * (1.0 / 3 + t * (1.0 / 5 + t * (1.0 / 7 + t * (1.0 / 9))));  // of atanh
    return static_cast<float>(exponent * 0.6931471805599453 + 2 * s * series);
}

}  // namespace pdmesh
