// e^x, log(x) and log(1 + e^x) in double, of plain sums and products: the same bits wherever doubles are IEEE's.
#pragma once

#include <math.h>

namespace quire {

// To about 1 ulp. A NaN stays one.
inline double exp64(double x) {
    if (!(x > -745.2)) return x < 0 ? 0.0 : x;
    if (x > 709.79) return INFINITY;
    constexpr double kRound = 0x1.8p52;  // pushes everything behind the point out of the number
    const double n = (x * 0x1.71547652b82fep0 + kRound) - kRound;
    const double r = (x - n * 0x1.62e42fee00000p-1) - n * 0x1.a39ef35793c76p-33;
    double p = 1.0 / 6227020800.0;
    constexpr double kTerms[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                                 1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0,         1.0};
    for (double term : kTerms) p = p * r + term;
    return ldexp(p, (int)n);
}

// 2^power * (1 + z) / (1 - z): twice the series of atanh.
inline double log_of(double z, int power) {
    const double s = z * z;
    double p = 1.0 / 27;
    for (int k = 25; k > 0; k -= 2) p = p * s + 1.0 / k;
    return power * 0x1.62e42fefa39efp-1 + 2.0 * z * p;
}

// Of a positive number, to a few ulp.
inline double log64(double x) {
    int power = 0;
    double m = frexp(x, &power);
    if (m < 0x1.6a09e667f3bcdp-1) m *= 2.0, power--;
    return log_of((m - 1.0) / (m + 1.0), power);
}

// To a few ulp.
inline double softplus64(double x) {
    if (!(x < 40.0)) return x;  // and a NaN
    const double e = exp64(x);
    return e > 0.5 ? log64(1.0 + e) : log_of(e / (2.0 + e), 0);
}

}  // namespace quire
