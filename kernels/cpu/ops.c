/* The library's interface: what kernels/cpu_ops.py calls through ctypes. See kernels.h for the words used.
 *
 * ops_open picks the instruction set; every other call takes the handle it returns. Calls that read indices
 * check them and return a negative status instead of touching memory outside the arrays they were given. */
#include <string.h>
#include <sys/mman.h>

#include "kernels.h"
#include "pool.h"

#define EXPORT __attribute__((visibility("default")))
#define NO_MEMORY (-1)
#define BAD_INDEX (-2)
#define SMALL_WORK 200000 /* multiply-adds below which waking a helper costs more than it brings */
#define ITEM_ROWS 96      /* rows of one linear item, a multiple of every register tile's rows */
#define ITEM_VECTORS 48   /* query vectors of one attention item, a multiple of every register tile's rows */

struct ops {
    const struct kernels *kernels;
    struct pool *pool;
};

EXPORT int ops_supports(const char *isa) {
#if defined(__x86_64__)
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (strcmp(isa, "avx2") == 0) return avx2;
    if (strcmp(isa, "avx512") == 0) return avx2 && __builtin_cpu_supports("avx512f");
#endif
    (void)isa;
    return 0;
}

EXPORT void ops_close(struct ops *o) {
    if (o->pool) pool_free(o->pool);
    free(o);
}

/* NULL where the machine lacks the instruction set or memory, or threads < 1; threads counts the caller. */
EXPORT struct ops *ops_open(const char *isa, int threads) {
    struct ops *o = threads > 0 && ops_supports(isa) ? calloc(1, sizeof *o) : NULL;
    if (o == NULL) return NULL;
#if defined(__x86_64__)
    o->kernels = strcmp(isa, "avx512") == 0 ? &kernels_avx512 : &kernels_avx2;
#endif
    o->pool = pool_new(threads);
    if (o->pool == NULL) {
        ops_close(o);
        return NULL;
    }
    return o;
}

/* weight [n, k] -> panels [ceil(n / PANEL), k, PANEL], zeros beyond n. */
EXPORT void ops_pack(const float *weight, float *panels, long n, long k) {
    const long count = (n + PANEL - 1) / PANEL;
#if defined(MADV_HUGEPAGE)
    const uintptr_t huge = 2u << 20, from = ((uintptr_t)panels + huge - 1) / huge * huge;
    const uintptr_t to = (uintptr_t)(panels + count * k * PANEL) / huge * huge;
    if (to > from)
        madvise((void *)from, to - from, MADV_HUGEPAGE); /* a hint: streaming then misses the TLB less */
#endif
    for (long p = 0; p < count; p++) {
        for (long c = 0; c < PANEL; c++) {
            const long row = p * PANEL + c;
            for (long i = 0; i < k; i++)
                panels[(p * k + i) * PANEL + c] = row < n ? weight[row * k + i] : 0.0f;
        }
    }
}

/* Rows ids [count] of a packed [n, k] weight -> out [count, k]. */
EXPORT int ops_embed(const float *panels, const int64_t *ids, float *out, long count, long n, long k) {
    for (long r = 0; r < count; r++)
        if (ids[r] < 0 || ids[r] >= n) return BAD_INDEX;
    for (long r = 0; r < count; r++) {
        const float *column = panels + ids[r] / PANEL * k * PANEL + ids[r] % PANEL;
        for (long i = 0; i < k; i++) out[r * k + i] = column[i * PANEL];
    }
    return 0;
}

EXPORT int ops_linear(struct ops *o, const float *x, const float *panels, const float *bias, float *out,
                      long rows, long n, long k) {
    const long count = (n + PANEL - 1) / PANEL;
    struct linear_job job = {x, panels, bias, out, rows, n, k, ITEM_ROWS, 4};
    const long items = (count + job.group - 1) / job.group * ((rows + ITEM_ROWS - 1) / ITEM_ROWS);
    return pool_run(o->pool, o->kernels->linear, &job, items, 0, rows * n * k < SMALL_WORK);
}

EXPORT void ops_rms_norm(struct ops *o, const float *x, const float *weight, float *out, long rows, long n,
                         float eps) {
    o->kernels->rms_norm(x, weight, out, rows, n, eps);
}

EXPORT void ops_silu_mul(struct ops *o, const float *gate, const float *up, float *out, long n) {
    o->kernels->silu_mul(gate, up, out, n);
}

/* x, out [rows, heads, dim]; cosine, sine [rows, dim]. */
EXPORT void ops_rotary(struct ops *o, const float *x, const float *cosine, const float *sine, float *out,
                       long rows, long heads, long dim) {
    o->kernels->rotary(x, cosine, sine, out, rows, heads, dim);
}

/* pool: this layer's first key; slots [rows], -1 to skip a row. */
EXPORT int ops_write_kv(float *pool, long block_stride, long blocks, long kv_heads, long block_size,
                        long head_dim, const float *key, const float *value, const int64_t *slots,
                        long rows) {
    for (long r = 0; r < rows; r++)
        if (slots[r] < -1 || slots[r] >= blocks * block_size) return BAD_INDEX;
    for (long r = 0; r < rows; r++) {
        if (slots[r] < 0) continue;
        float *to = pool + slots[r] / block_size * block_stride + slots[r] % block_size * head_dim;
        for (long h = 0; h < 2 * kv_heads; h++) {
            const float *from = h < kv_heads ? key + (r * kv_heads + h) * head_dim
                                             : value + (r * kv_heads + h - kv_heads) * head_dim;
            memcpy(to + h * block_size * head_dim, from, (size_t)head_dim * sizeof(float));
        }
    }
    return 0;
}

static int attend_check(const struct attend_job *j, long blocks, long sequences, long rows) {
    if (j->window < 0 || j->window > INT32_MAX) return BAD_INDEX;
    if (j->query_starts[0] != 0 || j->query_starts[sequences] > rows) return BAD_INDEX;
    for (long s = 0; s < sequences; s++) {
        const long length = j->seq_lens[s], own = (long)j->query_starts[s + 1] - j->query_starts[s];
        if (own < 0 || (own > 0 && length < own) || length > j->max_blocks * j->block_size) return BAD_INDEX;
        for (long b = 0; own > 0 && b * j->block_size < length; b++) {
            const int32_t block = j->tables[s * j->max_blocks + b];
            const int seen = !j->window || (b + 1) * j->block_size > length - own - j->window + 1;
            if (seen && (block < 0 || block >= blocks)) return BAD_INDEX;
        }
    }
    return 0;
}

/* Fills items (where not NULL) and returns their number. */
static long attend_items(const struct attend_job *j, long sequences, long rows, struct attend_item *items) {
    long count = 0;
    for (long s = 0; s < sequences; s++) {
        const long end = j->query_starts[s + 1];
        for (long row = j->query_starts[s]; row < end; row += rows) {
            for (long h = 0; h < j->kv_heads; h++, count++)
                if (items)
                    items[count] = (struct attend_item){s, row, end - row < rows ? end - row : rows, h};
        }
    }
    return count;
}

/* job comes without items and max_vectors. Out is written for all rows: those of no sequence become zero. */
EXPORT int ops_attend(struct ops *o, struct attend_job *job, long blocks, long sequences, long rows) {
    const int status = attend_check(job, blocks, sequences, rows);
    if (status != 0) return status;
    const long row_floats = job->heads * job->head_dim, used = job->query_starts[sequences];
    if (rows > used)
        memset(job->out + used * row_floats, 0, (size_t)((rows - used) * row_floats) * sizeof(float));

    const long group = job->heads / job->kv_heads;
    const long item_rows = group < ITEM_VECTORS ? ITEM_VECTORS / group : 1;
    const long count = attend_items(job, sequences, item_rows, NULL);
    struct attend_item *items = malloc((size_t)(count + 1) * sizeof *items);
    if (items == NULL) return NO_MEMORY;
    attend_items(job, sequences, item_rows, items);
    job->items = items;
    job->max_vectors = item_rows * group;
    double work = 0;
    for (long s = 0; s < sequences; s++)
        work += 2.0 * job->seq_lens[s] * (job->query_starts[s + 1] - job->query_starts[s]) * row_floats;
    const long width = (job->head_dim + 15) / 16 * 16;
    const long floats = 2 * TILE * width + job->max_vectors * (2 * width + TILE + 16 + 1);
    const int ran = pool_run(o->pool, o->kernels->attend, job, count, (size_t)floats * sizeof(float),
                             work < SMALL_WORK);
    free(items);
    return ran;
}
