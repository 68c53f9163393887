// Rows in strips whose number of rows is a constant of the code.
#pragma once

#include <type_traits>

namespace pdmesh {

// Calls with the number of rows as a constant.
template <int R, class Call>
inline void with_rows(int num_rows, const Call& call) {
    if (num_rows == R)
        call(std::integral_constant<int, R>());
    else if constexpr (R > 1)
        with_rows<R - 1>(num_rows, call);
}

// Rows in strips of up to Most, as equal as can be: call(first, count), the count as a constant.
template <int Most, class Call>
inline void for_strips(int num_rows, const Call& call) {
    const int num_strips = (num_rows + Most - 1) / Most;
    for (int strip = 0; strip < num_strips; ++strip) {
        const int first = num_rows * strip / num_strips;
        with_rows<Most>(num_rows * (strip + 1) / num_strips - first, [&](auto count) { call(first, count); });
    }
}

}  // namespace pdmesh
