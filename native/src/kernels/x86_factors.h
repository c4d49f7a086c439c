// What quantizing needs of four groups at a time on x86, where one alone waits for a maximum, two divisions and a sum. Included at the end of
// simd_avx2.h and simd_avx512.h.
#pragma once

#include "../weight.h"

namespace {

// Of four groups of 32: 127 / amax and group_scale, both 0 where amax is too small. The maxima meet in hmax's order.
inline void factors_of_four(const float* x, float* inv, float* scale) {
    auto most = [x](int g) { return four_largest(fmax(fabs_(fload(x + 32 * g)), fabs_(fload(x + 32 * g + 16)))); };
    auto two = [](__m128 a, __m128 b) { return _mm_max_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a)); };
    const __m128 low = two(most(0), most(1)), high = two(most(2), most(3));
    const __m128 amax = _mm_max_ps(_mm_shuffle_ps(low, high, 0x88), _mm_shuffle_ps(low, high, 0xdd));
    const __m128 tiny = _mm_cmplt_ps(amax, _mm_set1_ps(1e-36f)), large = _mm_cmpge_ps(amax, _mm_set1_ps(quire::kScaleLimit));
    const __m128 most_code = _mm_set1_ps(127.0f), not_a_number = _mm_castsi128_ps(_mm_set1_epi32(0x7fc00000));
    const __m128 cut = _mm_and_ps(_mm_div_ps(amax, most_code), _mm_castsi128_ps(_mm_set1_epi32(~3)));
    _mm_storeu_ps(inv, _mm_andnot_ps(tiny, _mm_div_ps(most_code, amax)));
    _mm_storeu_ps(scale, _mm_andnot_ps(tiny, _mm_blendv_ps(cut, not_a_number, large)));
}

// An instruction adds eight bytes that have no sign.
inline void code_sums(I a, I b, int32_t* of_a, int32_t* of_b) {
    auto eights = [](I x) { return _mm_sad_epu8(_mm_xor_si128(bytes_of(x), _mm_set1_epi8((char)0x80)), _mm_setzero_si128()); };
    const __m128i x = eights(a), y = eights(b);
    const __m128i sums = _mm_sub_epi32(_mm_add_epi32(_mm_unpacklo_epi64(x, y), _mm_unpackhi_epi64(x, y)), _mm_set1_epi32(16 * 128));
    *of_a = _mm_cvtsi128_si32(sums);
    *of_b = _mm_extract_epi32(sums, 2);
}

}  // namespace
