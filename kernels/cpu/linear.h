/* Linear layers on packed weights: fp32, or int8 with one scale per output.
 *
 * Rows are cut in blocks of nearly equal size, each repacked once per call to [k][rows of the block], so that a
 * register tile reads both its operands in one direction. An item is a group of panels against all rows of a
 * row group. Every output is the sum, in ascending k, of one chain of FMAs per CHUNK of k, whatever the tile
 * around it, so a row's bits depend on nothing but the row; the int8 ones are a single chain. */
#pragma once
#include <stdbool.h>

#include "kernels.h"
#include "simd.h"

#if ISA == 512
#define FEW_ROWS 16   /* up to here one block and one panel: 16 of 32 registers hold sums */
#define BLOCK_ROWS 12 /* else blocks of 12 rows x 2 panels: 24 sums */
#define PANELS(blocks, rows) ((blocks) > 1 ? 2 : 1)
#else
#define FEW_ROWS 6 /* a panel is two registers: 12 of 16 hold sums */
#define BLOCK_ROWS 6
#define PANELS(blocks, rows) ((rows) <= 3 ? 2 : 1)
#endif
#define BLOCK_FLOATS (FEW_ROWS * PANEL) /* of partial sums: the largest block by a panel */
#define CHUNK 96 /* k of one chain: long ones round too much; 2 panels of a chunk stay in L1 */
#define WEIGHTS_AHEAD 2048 /* a lone panel is fetched by hand; several at once the hardware keeps up with */

struct packed_tile {
    const float *a; /* [depth, rows] */
    const void *b;  /* [panels (panel_stride), depth, PANEL] */
    const float *start, *scale;
    float *out;
    long panel_stride, start_stride, out_stride, depth;
};

INL v16 weights(const void *b, long at, const bool int8) {
    return int8 ? v_load_int8((const int8_t *)b + at) : v_load((const float *)b + at);
}

INL void fetch_weights(const void *b, long at, const bool int8) {
    _mm_prefetch(int8 ? (const char *)b + at : (const char *)((const float *)b + at), _MM_HINT_T1);
}

INL void packed_product(const struct packed_tile *j, const int rows, const int panels, const bool int8) {
    v16 sum[FEW_ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++)
            sum[r][p] = v_zero();
    }
    const float *a = j->a;
    const long end = j->depth * PANEL, panel_stride = j->panel_stride;
    for (long at = 0; at < end; at += PANEL, a += rows) {
        v16 column[2];
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++) column[p] = weights(j->b, at + p * panel_stride, int8);
        if (panels == 1) fetch_weights(j->b, at + WEIGHTS_AHEAD, int8);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const v16 x = v_set1(a[r]);
#pragma GCC unroll 2
            for (int p = 0; p < panels; p++) sum[r][p] = v_fma(x, column[p], sum[r][p]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++) {
            const v16 start = v_load(j->start + r * j->start_stride + p * PANEL);
            const v16 y = int8 ? v_fma(sum[r][p], v_load(j->scale + p * PANEL), start) : v_add(start, sum[r][p]);
            v_store(j->out + r * j->out_stride + p * PANEL, y);
        }
    }
}

/* clang-format off */
#define PACKED_CASE(r, p, int8) case (r) * 4 + (p): packed_product(j, r, p, int8); break;
#define PACKED_BOTH(r, int8) PACKED_CASE(r, 1, int8) PACKED_CASE(r, 2, int8)
#if ISA == 512
#define PACKED_CASES(int8) \
    PACKED_BOTH(1, int8) PACKED_BOTH(2, int8) PACKED_BOTH(3, int8) PACKED_BOTH(4, int8) PACKED_BOTH(5, int8) \
    PACKED_BOTH(6, int8) PACKED_BOTH(7, int8) PACKED_BOTH(8, int8) PACKED_BOTH(9, int8) PACKED_BOTH(10, int8) \
    PACKED_BOTH(11, int8) PACKED_BOTH(12, int8) PACKED_CASE(13, 1, int8) PACKED_CASE(14, 1, int8) \
    PACKED_CASE(15, 1, int8) PACKED_CASE(16, 1, int8)
#else
#define PACKED_CASES(int8) \
    PACKED_BOTH(1, int8) PACKED_BOTH(2, int8) PACKED_BOTH(3, int8) PACKED_CASE(4, 1, int8) \
    PACKED_CASE(5, 1, int8) PACKED_CASE(6, 1, int8)
#endif
/* clang-format on */

static void packed_fp32(const struct packed_tile *j, long rows, long panels) {
    switch (rows * 4 + panels) { PACKED_CASES(false) }
}

static void packed_int8(const struct packed_tile *j, long rows, long panels) {
    switch (rows * 4 + panels) { PACKED_CASES(true) }
}

/* A tile whose last panel is not full: bias and out end at the last column, so they go through buffers. */
static void packed_edge(struct packed_tile j, long rows, long panels, long columns, bool sums_in, bool to_out,
                        bool int8) {
    float start[2 * PANEL] = {0}, edge[FEW_ROWS * 2 * PANEL];
    float *const out = j.out;
    const long out_stride = j.out_stride;
    if (!sums_in) {
        memcpy(start, j.start, (size_t)columns * sizeof(float));
        j.start = start;
    }
    if (to_out) {
        j.out = edge;
        j.out_stride = panels * PANEL;
    }
    if (int8) packed_int8(&j, rows, panels);
    else packed_fp32(&j, rows, panels);
    for (long r = 0; to_out && r < rows; r++)
        memcpy(out + r * out_stride, edge + r * panels * PANEL, (size_t)columns * sizeof(float));
}

INL long block_row(const struct linear_job *j, long block) { /* where a block's rows begin */
    return block * j->block_rows < j->rows ? block * j->block_rows : j->rows;
}

/* x rows of one block -> [k, rows of the block] at the same place of packed. */
static void pack_item(void *job, long item, void *scratch) {
    const struct linear_job *j = job;
    (void)scratch;
    const long k = j->w.k, row = block_row(j, item), rows = block_row(j, item + 1) - row;
    const float *x = j->x + row * k;
    float *out = j->packed + row * k;
    const float *from[8];
    for (long r = 0, take; r < rows; r += take) {
        long i = 0;
        take = rows - r >= 8 ? 8 : rows - r >= 4 ? 4 : 1;
        for (int c = 0; c < take; c++) from[c] = x + (r + c) * k;
        if (take == 8)
            for (; i + 8 <= k; i += 8) transpose8(from, i, out + i * rows + r, rows);
        if (take == 4)
            for (; i + 4 <= k; i += 4) transpose4(from, i, out + i * rows + r, rows);
        for (; i < k; i++)
            for (int c = 0; c < take; c++) out[i * rows + r + c] = from[c][i];
    }
}

/* Panels panel .. panel+panels against row blocks from .. to, over weights k .. k+depth. */
static void linear_chunk(const struct linear_job *j, long panel, long panels, long from, long to, long k,
                         long depth, float *sums) {
    static const float zeros[2 * PANEL];
    const bool int8 = j->w.scales != NULL, last = k + depth >= j->w.k;
    const long column = panel * PANEL, columns = j->w.n - column, width = panels * PANEL;
    struct packed_tile tile = {
        .b = (const char *)j->w.panels + (panel * j->w.k + k) * PANEL * (long)(int8 ? 1 : sizeof(float)),
        .start = j->w.bias ? j->w.bias + column : zeros,
        .scale = int8 ? j->w.scales + column : NULL,
        .panel_stride = j->w.k * PANEL,
        .start_stride = k > 0 ? width : 0,
        .out_stride = last ? j->w.n : width,
        .depth = depth,
    };
    for (long b = from; b < to; b++, sums += GROUP * BLOCK_FLOATS) {
        const long row = block_row(j, b), rows = block_row(j, b + 1) - row;
        tile.a = j->packed + row * j->w.k + k * rows;
        if (k > 0) tile.start = sums;
        tile.out = last ? j->out + row * j->w.n + column : sums;
        if (columns < width) packed_edge(tile, rows, panels, columns, k > 0, last, int8);
        else if (int8) packed_int8(&tile, rows, panels);
        else packed_fp32(&tile, rows, panels);
    }
}

/* Several row blocks share a chunk of weights while it is in L1; a lone block takes each panel from end to end,
 * as memory holds it. */
static void linear_item(void *job, long item, void *scratch) {
    const struct linear_job *j = job;
    const long all = (j->w.n + PANEL - 1) / PANEL, groups = (all + j->group - 1) / j->group;
    const long first = item % groups * j->group, last = first + j->group < all ? first + j->group : all;
    const long from = item / groups * ITEM_BLOCKS;
    const long to = from + ITEM_BLOCKS < j->blocks ? from + ITEM_BLOCKS : j->blocks;
    const long widest = PANELS(j->blocks, j->block_rows);
    const long chunk = j->w.scales ? j->w.k : CHUNK;
    float *const sums = scratch; /* [row blocks, GROUP, BLOCK_FLOATS]; of a lone block only one tile */
    if (to - from > 1) {
        for (long k = 0; k < j->w.k; k += chunk) {
            const long depth = j->w.k - k < chunk ? j->w.k - k : chunk;
            for (long panel = first, panels; panel < last; panel += panels) {
                panels = last - panel < widest ? last - panel : widest;
                linear_chunk(j, panel, panels, from, to, k, depth, sums + (panel - first) * BLOCK_FLOATS);
            }
        }
    } else {
        for (long panel = first, panels; panel < last; panel += panels) {
            panels = last - panel < widest ? last - panel : widest;
            for (long k = 0; k < j->w.k; k += chunk) {
                const long depth = j->w.k - k < chunk ? j->w.k - k : chunk;
                linear_chunk(j, panel, panels, from, to, k, depth, sums);
            }
        }
    }
}
