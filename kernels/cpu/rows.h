/* Linear layers and the row-wise operations. */
#pragma once
#include "gemm.h"
#include "kernels.h"

#define DEPTH 512 /* k-block: a group of 4 panels then takes 128 KiB, within L2 */

static void linear_item(void *job, long item, void *scratch) {
    const struct linear_job *j = job;
    (void)scratch;
    const long all = (j->n + PANEL - 1) / PANEL, groups = (all + j->group - 1) / j->group;
    const long first = item % groups * j->group, panels = all - first < j->group ? all - first : j->group;
    const long row = item / groups * j->row_step;
    const long rows = j->rows - row < j->row_step ? j->rows - row : j->row_step;
    const long blocks = (j->k + DEPTH - 1) / DEPTH, depth = (j->k + blocks - 1) / blocks;
    const long step = rows == 1 ? j->k : depth;
    for (long k = 0; k < j->k; k += step) {
        float *out = j->out + row * j->n + first * PANEL;
        const float *bias = j->bias ? j->bias + first * PANEL : NULL;
        struct product p = {
            .a = j->x + row * j->k + k,
            .b = j->panels + (first * j->k + k) * PANEL,
            .start = k > 0 ? out : bias,
            .out = out,
            .a_stride = j->k,
            .b_stride = PANEL,
            .panel_stride = j->k * PANEL,
            .start_stride = k > 0 ? j->n : 0,
            .out_stride = j->n,
            .depth = j->k - k < step ? j->k - k : step,
            .columns = j->n - first * PANEL,
        };
        product_all(p, rows, panels);
    }
}

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

/* Plain loops: with contraction off, the bits are the formula's however the compiler vectorises them. */
static void rotary_rows(const float *x, const float *cosine, const float *sine, float *out, long rows,
                        long heads, long dim) {
    const long half = dim / 2;
    for (long r = 0; r < rows; r++, cosine += dim, sine += dim) {
        for (long h = 0; h < heads; h++, x += dim, out += dim) {
            for (long i = 0; i < half; i++) out[i] = x[i] * cosine[i] - x[i + half] * sine[i];
            for (long i = 0; i < half; i++)
                out[i + half] = x[i + half] * cosine[i + half] + x[i] * sine[i + half];
        }
    }
}
