/* Sixteen-lane vectors for the two instruction sets.
 *
 * Each translation unit isa_*.c defines ISA (256 or 512) and includes this file once. A v16 is one zmm or two
 * ymm registers; lane i of a v16 goes through the same operations in both, and the two horizontal reductions
 * use one tree, so the two builds give the same bits. Contraction is off (-ffp-contract=off): an FMA happens
 * only where v_fma is written. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__clang__) && ISA == 512
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f"))), apply_to = function)
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#elif ISA == 512
#pragma GCC target("avx2,fma,avx512f")
#else
#pragma GCC target("avx2,fma")
#endif
#include <immintrin.h>

#define INL static inline __attribute__((always_inline))
#define LANES 16

#if ISA == 512
typedef __m512 v16;
INL v16 v_set1(float x) { return _mm512_set1_ps(x); }
INL v16 v_load(const float *p) { return _mm512_loadu_ps(p); }
INL void v_store(float *p, v16 x) { _mm512_storeu_ps(p, x); }
INL v16 v_add(v16 x, v16 y) { return _mm512_add_ps(x, y); }
INL v16 v_sub(v16 x, v16 y) { return _mm512_sub_ps(x, y); }
INL v16 v_mul(v16 x, v16 y) { return _mm512_mul_ps(x, y); }
INL v16 v_div(v16 x, v16 y) { return _mm512_div_ps(x, y); }
INL v16 v_fma(v16 x, v16 y, v16 z) { return _mm512_fmadd_ps(x, y, z); }
INL v16 v_min(v16 x, v16 y) { return _mm512_min_ps(x, y); } /* y where either is NaN */
INL v16 v_max(v16 x, v16 y) { return _mm512_max_ps(x, y); }
INL v16 v_abs(v16 x) { return _mm512_abs_ps(x); }
INL v16 v_round(v16 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INL v16 v_where_lt(v16 x, v16 y, v16 yes, v16 no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), no, yes);
}
INL v16 v_load_int8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INL v16 v_pow2(v16 n) { /* 2**n for whole n in -126..127 */
    __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(e, 23));
}
INL __m256 v_low(v16 x) { return _mm512_castps512_ps256(x); }
INL __m256 v_high(v16 x) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)); }
#else
typedef struct {
    __m256 a, b;
} v16;
#define PAIR(f, x, y) ((v16){f((x).a, (y).a), f((x).b, (y).b)})
INL v16 v_set1(float x) { return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INL v16 v_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INL void v_store(float *p, v16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
INL v16 v_add(v16 x, v16 y) { return PAIR(_mm256_add_ps, x, y); }
INL v16 v_sub(v16 x, v16 y) { return PAIR(_mm256_sub_ps, x, y); }
INL v16 v_mul(v16 x, v16 y) { return PAIR(_mm256_mul_ps, x, y); }
INL v16 v_div(v16 x, v16 y) { return PAIR(_mm256_div_ps, x, y); }
INL v16 v_fma(v16 x, v16 y, v16 z) {
    return (v16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INL v16 v_min(v16 x, v16 y) { return PAIR(_mm256_min_ps, x, y); } /* y where either is NaN */
INL v16 v_max(v16 x, v16 y) { return PAIR(_mm256_max_ps, x, y); }
INL v16 v_abs(v16 x) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return (v16){_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
INL v16 v_round(v16 x) {
    return (v16){_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                 _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
INL v16 v_where_lt(v16 x, v16 y, v16 yes, v16 no) {
    return (v16){_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
                 _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
INL __m256 y_load_int8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INL v16 v_load_int8(const int8_t *p) { return (v16){y_load_int8(p), y_load_int8(p + 8)}; }
INL __m256 y_pow2(__m256 n) {
    __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
INL v16 v_pow2(v16 n) { return (v16){y_pow2(n.a), y_pow2(n.b)}; }
INL __m256 v_low(v16 x) { return x.a; }
INL __m256 v_high(v16 x) { return x.b; }
#endif

INL v16 v_zero(void) { return v_set1(0.0f); }

INL float v_sum(v16 x) { /* ((0+8)+(4+12)) + ..., the one tree of both instruction sets */
    __m256 y = _mm256_add_ps(v_low(x), v_high(x));
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_shuffle_ps(z, z, 1)));
}

INL float v_top(v16 x) {
    __m256 y = _mm256_max_ps(v_low(x), v_high(x));
    __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_max_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_shuffle_ps(z, z, 1)));
}

/* The first n lanes (all when n >= 16); lanes past n read as zero and are not written. */
INL v16 v_load_part(const float *p, long n) {
    if (n >= LANES) return v_load(p);
    float lanes[LANES] = {0};
    memcpy(lanes, p, (size_t)n * sizeof(float));
    return v_load(lanes);
}
INL void v_store_part(float *p, v16 x, long n) {
    if (n >= LANES) {
        v_store(p, x);
        return;
    }
    float lanes[LANES];
    v_store(lanes, x);
    memcpy(p, lanes, (size_t)n * sizeof(float));
}

/* out[i * stride + r] = row[r][at + i] for 8 rows and 8 i */
INL void transpose8(const float *const *row, long at, float *out, long stride) {
    __m256 r[8], s[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(row[i] + at);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xEE);
        r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(out + i * stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(out + (i + 4) * stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

INL void transpose4(const float *const *row, long at, float *out, long stride) { /* the same, 4 by 4 */
    __m128 r[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) r[i] = _mm_loadu_ps(row[i] + at);
    _MM_TRANSPOSE4_PS(r[0], r[1], r[2], r[3]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) _mm_storeu_ps(out + i * stride, r[i]);
}

INL v16 v_keep_range(v16 x, long low, long high, v16 fill) { /* lanes low <= i < high of x, fill elsewhere */
    static const float index[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    v16 i = v_load(index);
    return v_where_lt(i, v_set1((float)low), fill, v_where_lt(i, v_set1((float)high), x, fill));
}

/* e**x to about 1 ulp (Cephes polynomial); 0 below -87.33, held at e**88.37 above, NaN stays NaN, e**0 is
 * exactly 1. */
INL v16 v_exp(v16 x) {
    const v16 bottom = v_set1(-87.33654f);
    v16 y = v_max(bottom, v_min(v_set1(88.37626f), x));
    v16 n = v_round(v_mul(y, v_set1(1.44269504f)));
    v16 r = v_fma(n, v_set1(-0.693359375f), y);
    r = v_fma(n, v_set1(2.12194440e-4f), r);
    v16 p = v_set1(1.9875691500e-4f);
    p = v_fma(p, r, v_set1(1.3981999507e-3f));
    p = v_fma(p, r, v_set1(8.3334519073e-3f));
    p = v_fma(p, r, v_set1(4.1665795894e-2f));
    p = v_fma(p, r, v_set1(1.6666665459e-1f));
    p = v_fma(p, r, v_set1(5.0000001201e-1f));
    p = v_add(v_fma(p, v_mul(r, r), r), v_set1(1.0f));
    return v_where_lt(x, bottom, v_zero(), v_mul(p, v_pow2(n)));
}

/* tanh x (Cephes): a polynomial near zero, the exponential form elsewhere. */
INL v16 v_tanh(v16 x) {
    v16 size = v_abs(x), z = v_mul(x, x);
    v16 p = v_set1(-5.70498872745e-3f);
    p = v_fma(p, z, v_set1(2.06390887954e-2f));
    p = v_fma(p, z, v_set1(-5.37397155531e-2f));
    p = v_fma(p, z, v_set1(1.33314422036e-1f));
    p = v_fma(p, z, v_set1(-3.33332819422e-1f));
    p = v_fma(v_mul(p, z), x, x);
    v16 e = v_add(v_exp(v_add(size, size)), v_set1(1.0f));
    v16 t = v_sub(v_set1(1.0f), v_div(v_set1(2.0f), e));
    t = v_where_lt(x, v_zero(), v_sub(v_zero(), t), t);
    return v_where_lt(size, v_set1(0.625f), p, t);
}
