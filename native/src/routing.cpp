// See routing.h.
#include "routing.h"

#include <math.h>
#include <string.h>

#include "exp64.h"
#include "plan.h"

namespace quire {

namespace {

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
