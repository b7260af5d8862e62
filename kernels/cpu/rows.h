/* The row-wise operations. */
#pragma once
#include "kernels.h"
#include "simd.h"

static void rms_norm_rows(const float *x, const float *weight, float *out, long rows, long n, float eps) {
    for (long r = 0; r < rows; r++, x += n, out += n) {
        v16 even = v_zero(), odd = v_zero();
        for (long i = 0; i < n; i += 2 * LANES) {
            v16 y = v_load_part(x + i, n - i);
            even = v_fma(y, y, even);
            if (i + LANES >= n) break;
            y = v_load_part(x + i + LANES, n - i - LANES);
            odd = v_fma(y, y, odd);
        }
        const v16 factor = v_set1(1.0f / sqrtf(v_sum(v_add(even, odd)) / (float)n + eps));
        for (long i = 0; i < n; i += LANES) {
            v16 y = v_mul(v_mul(v_load_part(x + i, n - i), factor), v_load_part(weight + i, n - i));
            v_store_part(out + i, y, n - i);
        }
    }
}

static void silu_mul_all(const float *gate, const float *up, float *out, long n) {
    for (long i = 0; i < n; i += LANES) {
        v16 g = v_load_part(gate + i, n - i);
        v16 e = v_add(v_exp(v_sub(v_zero(), g)), v_set1(1.0f));
        v_store_part(out + i, v_mul(v_div(g, e), v_load_part(up + i, n - i)), n - i);
    }
}

/* One head. Plain loops: with contraction off, the bits are the formula's however a compiler vectorises them. */
static void rotate_head(const float *x, const float *cosine, const float *sine, float *out, long dim) {
    const long half = dim / 2;
    for (long i = 0; i < half; i++) out[i] = x[i] * cosine[i] - x[i + half] * sine[i];
    for (long i = half; i < dim; i++) out[i] = x[i] * cosine[i] + x[i - half] * sine[i];
}
