/* What ops.c and the instruction-set builds isa_*.c share: the jobs and the table of functions that run them.
 *
 * A job is split in items; items may run in any order on any thread, for no sum is ever split between two
 * items. All arrays are fp32, row-major and dense unless a stride is named; strides count floats. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define PANEL 16 /* output columns of one weight panel */
#define TILE 32  /* keys of one attention tile, at absolute positions 0, 32, 64, ... */

#define GROUP 6        /* panels of one linear item of several row blocks */
#define LONE_GROUP 3   /* of one row block: small, so that no thread waits long for another's last item */
#define ITEM_BLOCKS 48 /* row blocks of one linear item: as many as find their weights in L2 again */

struct weight {          /* of a linear: n outputs of k inputs */
    const void *panels;  /* [ceil(n / PANEL), k, PANEL] fp32 or int8, zero beyond n */
    const float *scales; /* [ceil(n / PANEL) * PANEL] of int8 panels; NULL: they are fp32 */
    const float *bias;   /* [n] or NULL */
    long n, k;
};

struct linear_job {
    const float *x; /* [rows, k] */
    struct weight w;
    float *packed; /* x once more: block after block, each [k, rows of the block]; x itself at one row */
    float *out;    /* [rows, n] */
    long rows;
    long blocks, block_rows; /* row blocks and the rows of each, the last may have fewer */
    long group;              /* panels of one item */
};

struct attend_item {
    long sequence, row, rows, kv_head; /* rows row .. row+rows of the batch, all of one sequence */
};

struct attend_job {
    const float *pool;  /* this layer's first key: [blocks (block_stride), 2, kv_heads, block_size, head_dim] */
    const float *query; /* [rows, heads, head_dim] */
    float *out;         /* [rows, heads, head_dim] */
    const int32_t *tables, *seq_lens, *query_starts;
    const struct attend_item *items;
    long block_stride, blocks, sequences, max_blocks, heads, kv_heads, block_size, head_dim;
    long window;           /* 0: none */
    float scale, soft_cap; /* soft_cap 0: none */
    long max_vectors;      /* query vectors of the largest item */
};

struct kernels {
    long few_rows, block_rows; /* so many rows are one block; above, blocks have at most block_rows */
    void (*pack)(void *job, long item, void *scratch); /* an item is a row block */
    void (*linear)(void *job, long item, void *scratch);
    void (*attend)(void *job, long item, void *scratch);
    void (*rms_norm)(const float *x, const float *weight, float *out, long rows, long n, float eps);
    void (*silu_mul)(const float *gate, const float *up, float *out, long n);
    void (*rotate)(const float *x, const float *cosine, const float *sine, float *out, long dim);
};

#if defined(__x86_64__)
extern const struct kernels kernels_avx2, kernels_avx512;
#endif
