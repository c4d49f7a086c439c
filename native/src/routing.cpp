// See routing.h.
#include "routing.h"

#include <math.h>
#include <string.h>

#include "plan.h"

namespace quire {

namespace {

// e^x to about 1 ulp. Plain sums and products: the same bits wherever doubles are IEEE's.
double exp64(double x) {
    if (!(x > -745.2)) return x < 0 ? 0.0 : x;  // a NaN stays one
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

// The best of those that are left, of two equal ones the lower number; a NaN is worse than any number. Marks it as taken.
int take_best(const double* worth, uint8_t* left, int n) {
    int best = -1;
    for (int i = 0; i < n; i++)
        if (left[i] && (best < 0 || worth[i] > worth[best] || (isnan(worth[best]) && !isnan(worth[i])))) best = i;
    left[best] = 0;
    return best;
}

double two_highest(const double* worth, int n) {
    double first = worth[0], second = -INFINITY;
    for (int i = 1; i < n; i++) {
        if (worth[i] > first) second = first, first = worth[i];
        else if (worth[i] > second) second = worth[i];
    }
    return n > 1 ? first + second : first;
}

double highest(const double* worth, int n) {
    double first = worth[0];
    for (int i = 1; i < n; i++)
        if (worth[i] > first) first = worth[i];
    return first;
}

}  // namespace

void Routing::route(const float* logits, uint8_t* scratch, int32_t* chosen, float* share) const {
    double *score = (double*)scratch, *ranked = score + experts, *worth = ranked + experts;
    uint8_t *left = (uint8_t*)(worth + groups), *runs = left + experts;
    double total = 0;
    const float most = [&] {
        float m = logits[0];
        for (int e = 1; e < experts; e++)
            if (logits[e] > m) m = logits[e];
        return m;
    }();
    for (int e = 0; e < experts; e++) {
        score[e] = sigmoid ? 1.0 / (1.0 + exp64(-(double)logits[e])) : exp64((double)logits[e] - (double)most);
        total += score[e];
    }
    for (int e = 0; e < experts; e++) {
        if (!sigmoid) score[e] /= total;
        ranked[e] = bias ? score[e] + (double)bias->data()[e] : score[e];
    }
    memset(left, 1, (size_t)experts);
    if (groups > 1) {
        const int run = experts / groups;
        for (int g = 0; g < groups; g++) worth[g] = pair ? two_highest(ranked + g * run, run) : highest(ranked + g * run, run);
        memset(runs, 1, (size_t)groups);
        memset(left, 0, (size_t)experts);
        for (int i = 0; i < top_groups; i++) memset(left + take_best(worth, runs, groups) * run, 1, (size_t)run);
    }
    for (int i = 0; i < top; i++) chosen[i] = take_best(ranked, left, experts);
    for (int i = 1; i < top; i++)  // by number
        for (int j = i; j > 0 && chosen[j - 1] > chosen[j]; j--) {
            const int32_t e = chosen[j];
            chosen[j] = chosen[j - 1], chosen[j - 1] = e;
        }
    double sum = 1e-20;
    for (int i = 0; i < top; i++) sum += score[chosen[i]];
    for (int i = 0; i < top; i++) {
        const double s = score[chosen[i]];
        share[i] = (float)((renormalize ? s / sum : s) * scale);
    }
}

}  // namespace quire
