/* The register-tile product inside attention: out[r, c] = sum of a[r, i] * b[i, c] over i.
 *
 * Every output is one chain of FMAs in ascending i, whatever the tile around it, so a row's bits depend on
 * nothing but the row. */
#pragma once
#include "simd.h"

#if ISA == 512
#define MAX_ROWS 12 /* 12 rows x 2 panels or 6 x 4: 24 of 32 registers hold sums */
#else
#define MAX_ROWS 6 /* 6 rows x 1 panel or 3 x 2 or 1 x 4 (a panel is 2 registers): at most 12 of 16 */
#endif

struct product {
    const float *a;     /* [rows, depth], row stride a_stride */
    const float *b;     /* panel p holds b[i, 16p .. 16p+16] at b + p * panel_stride + i * b_stride */
    const float *start; /* where the chains start: [rows, 16 panels], row stride start_stride; NULL: at zero */
    float *out;         /* [rows, columns], row stride out_stride; may be start */
    long a_stride, b_stride, panel_stride, start_stride, out_stride, depth;
};

#define WIDEST (4 * LANES)

INL void product_tile(const struct product *j, const int rows, const int panels) {
    v16 sum[MAX_ROWS][4];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) sum[r][p] = v_load(j->start + r * j->start_stride + p * LANES);
    }
    const float *a = j->a, *b = j->b;
    const long a_stride = j->a_stride, b_stride = j->b_stride, panel_stride = j->panel_stride;
    for (long i = 0; i < j->depth; i++, a++, b += b_stride) {
        v16 column[4];
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) column[p] = v_load(b + p * panel_stride);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const v16 x = v_set1(a[r * a_stride]);
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) sum[r][p] = v_fma(x, column[p], sum[r][p]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) v_store(j->out + r * j->out_stride + p * LANES, sum[r][p]);
    }
}

/* clang-format off */
#define TILE_CASE(r, p) case (r) * 8 + (p): product_tile(j, r, p); break;
#define CASES_1(r) TILE_CASE(r, 1)
#define CASES_2(r) TILE_CASE(r, 1) TILE_CASE(r, 2)
#define CASES_4(r) TILE_CASE(r, 1) TILE_CASE(r, 2) TILE_CASE(r, 4)
/* clang-format on */

INL long widest(long rows) { /* panels a tile of so many rows takes at once */
    if (ISA == 512) return rows <= 6 ? 4 : 2;
    return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
}

/* clang-format off */
static void run_tile(const struct product *j, long rows, long panels) {
    switch (rows * 8 + panels) {
#if ISA == 512
        CASES_4(1) CASES_4(2) CASES_4(3) CASES_4(4) CASES_4(5) CASES_4(6)
        CASES_2(7) CASES_2(8) CASES_2(9) CASES_2(10) CASES_2(11) CASES_2(12)
#else
        CASES_4(1) CASES_2(2) CASES_2(3) CASES_1(4) CASES_1(5) CASES_1(6)
#endif
    }
}

/* clang-format on */

/* One block of at most MAX_ROWS rows against `panels` panels. */
static void product_rows(const struct product *j, long rows, long panels) {
    static const float zeros[WIDEST];
    for (long panel = 0, take; panel < panels; panel += take) {
        for (take = widest(rows); take > panels - panel;) take >>= 1;
        const long column = panel * LANES;
        const struct product tile = {
            .a = j->a,
            .b = j->b + panel * j->panel_stride,
            .start = j->start ? j->start + column : zeros,
            .out = j->out + column,
            .a_stride = j->a_stride,
            .b_stride = j->b_stride,
            .panel_stride = j->panel_stride,
            .start_stride = j->start ? j->start_stride : 0,
            .out_stride = j->out_stride,
            .depth = j->depth,
        };
        run_tile(&tile, rows, take);
    }
}

/* Any number of rows, cut in blocks of nearly equal size. */
static void product_all(struct product job, long rows, long panels) {
    for (long blocks = (rows + MAX_ROWS - 1) / MAX_ROWS; blocks > 0; blocks--) {
        const long take = (rows + blocks - 1) / blocks;
        product_rows(&job, take, panels);
        job.a += take * job.a_stride;
        job.out += take * job.out_stride;
        if (job.start) job.start += take * job.start_stride;
        rows -= take;
    }
}
