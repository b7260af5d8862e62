/* The library's interface: what kernels/cpu_ops.py calls through ctypes. See kernels.h for the words used.
 *
 * ops_open picks the instruction set; every other call takes the handle it returns. Calls that read indices
 * check them and return a negative status instead of touching memory outside the arrays they were given. */
#include <string.h>
#include <sys/mman.h>

#include "ops.h"
#include "pool.h"

#define SMALL_WORK 200000 /* multiply-adds below which waking a helper costs more than it brings */
#define ITEM_VECTORS 48   /* query vectors of one attention item, a multiple of every register tile's rows */

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

/* weight [n, k] -> panels [ceil(n / PANEL), k, PANEL], zeros beyond n; elements of 4 bytes or of 1. */
EXPORT void ops_pack(const void *weight, void *panels, long n, long k, long element) {
    const long count = (n + PANEL - 1) / PANEL;
#if defined(MADV_HUGEPAGE)
    const uintptr_t huge = 2u << 20, from = ((uintptr_t)panels + huge - 1) / huge * huge;
    const uintptr_t to = ((uintptr_t)panels + (uintptr_t)(count * k * PANEL * element)) / huge * huge;
    if (to > from)
        madvise((void *)from, to - from, MADV_HUGEPAGE); /* a hint: streaming then misses the TLB less */
#endif
    for (long p = 0; p < count; p++) {
        for (long c = 0; c < PANEL; c++) {
            const long row = p * PANEL + c;
            for (long i = 0; i < k; i++) {
                const long to_index = (p * k + i) * PANEL + c, from_index = row * k + i;
                if (element == 4)
                    ((float *)panels)[to_index] = row < n ? ((const float *)weight)[from_index] : 0.0f;
                else ((int8_t *)panels)[to_index] = row < n ? ((const int8_t *)weight)[from_index] : 0;
            }
        }
    }
}

/* Rows ids [count] of a packed [n, k] weight -> out [count, k]; scales as for ops_linear. */
EXPORT int ops_embed(const void *panels, const float *scales, const int64_t *ids, float *out, long count,
                     long n, long k) {
    for (long r = 0; r < count; r++)
        if (ids[r] < 0 || ids[r] >= n) return BAD_INDEX;
    for (long r = 0; r < count; r++, out += k) {
        const long first = ids[r] / PANEL * k * PANEL + ids[r] % PANEL;
        if (scales) {
            const int8_t *column = (const int8_t *)panels + first;
            for (long i = 0; i < k; i++) out[i] = (float)column[i * PANEL] * scales[ids[r]];
        } else {
            const float *column = (const float *)panels + first;
            for (long i = 0; i < k; i++) out[i] = column[i * PANEL];
        }
    }
    return 0;
}

EXPORT int ops_linear(struct ops *o, const float *x, const struct weight *w, float *out, long rows) {
    if (rows == 0) return 0;
    const struct kernels *kernels = o->kernels;
    const long few = kernels->few_rows, most = kernels->block_rows;
    struct linear_job job = {.x = x, .w = *w, .packed = (float *)x, .out = out, .rows = rows};
    job.blocks = rows <= few ? 1 : (rows + most - 1) / most;
    job.block_rows = job.blocks <= 4 ? (rows + job.blocks - 1) / job.blocks : most;
    float *packed = NULL;
    if (rows > 1) {
        packed = aligned_alloc(64, ((size_t)(rows * w->k) * sizeof(float) + 63) / 64 * 64);
        if (packed == NULL) return NO_MEMORY;
        job.packed = packed;
        pool_run(o->pool, kernels->pack, &job, job.blocks, 0, rows * w->k < SMALL_WORK);
    }
    job.group = job.blocks > 1 ? GROUP : LONE_GROUP;
    const long groups = ((w->n + PANEL - 1) / PANEL + job.group - 1) / job.group;
    const long items = groups * ((job.blocks + ITEM_BLOCKS - 1) / ITEM_BLOCKS);
    const long tiles = job.blocks > 1 ? ITEM_BLOCKS * GROUP : 2; /* a lone block is done at once */
    const size_t sums = (size_t)(tiles * few * PANEL) * sizeof(float);
    const int status = pool_run(o->pool, kernels->linear, &job, items, sums, rows * w->n * w->k < SMALL_WORK);
    free(packed);
    return status;
}

EXPORT void ops_rms_norm(struct ops *o, const float *x, const float *weight, float *out, long rows, long n,
                         float eps) {
    o->kernels->rms_norm(x, weight, out, rows, n, eps);
}

/* gate_up [rows, 2 n] -> out [rows, n] */
EXPORT void ops_silu_mul(struct ops *o, const float *gate_up, float *out, long rows, long n) {
    for (long r = 0; r < rows; r++, gate_up += 2 * n, out += n)
        o->kernels->silu_mul(gate_up, gate_up + n, out, n);
}

static int slots_check(const int64_t *slots, long rows, long end) {
    for (long r = 0; r < rows; r++)
        if (slots[r] < -1 || slots[r] >= end) return BAD_INDEX;
    return 0;
}

/* pool: this layer's first key; slots [rows], -1 to skip a row. */
EXPORT int ops_write_kv(float *pool, long block_stride, long blocks, long kv_heads, long block_size,
                        long head_dim, const float *key, const float *value, const int64_t *slots,
                        long rows) {
    if (slots_check(slots, rows, blocks * block_size) != 0) return BAD_INDEX;
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

/* qkv [rows, heads + 2 kv_heads, head_dim]: turns queries into out [rows, heads, head_dim], turns keys into the
 * pool and copies values there; cosine, sine [rows, head_dim]. */
EXPORT int ops_rotate_write(struct ops *o, float *pool, long block_stride, long blocks, long heads,
                            long kv_heads, long block_size, long head_dim, const float *qkv,
                            const float *cosine, const float *sine, const int64_t *slots, float *out,
                            long rows) {
    if (slots_check(slots, rows, blocks * block_size) != 0) return BAD_INDEX;
    for (long r = 0; r < rows; r++, cosine += head_dim, sine += head_dim) {
        for (long h = 0; h < heads; h++, qkv += head_dim, out += head_dim)
            o->kernels->rotate(qkv, cosine, sine, out, head_dim);
        if (slots[r] >= 0) {
            float *to = pool + slots[r] / block_size * block_stride + slots[r] % block_size * head_dim;
            for (long h = 0; h < 2 * kv_heads; h++, to += block_size * head_dim) {
                const float *from = qkv + h * head_dim;
                if (h < kv_heads) o->kernels->rotate(from, cosine, sine, to, head_dim);
                else memcpy(to, from, (size_t)head_dim * sizeof(float));
            }
        }
        qkv += 2 * kv_heads * head_dim;
    }
    return 0;
}

static int attend_check(const struct attend_job *j, long rows) {
    const long sequences = j->sequences;
    if (j->window < 0 || j->window > INT32_MAX) return BAD_INDEX;
    if (j->query_starts[0] != 0 || j->query_starts[sequences] > rows) return BAD_INDEX;
    for (long s = 0; s < sequences; s++) {
        const long length = j->seq_lens[s], own = (long)j->query_starts[s + 1] - j->query_starts[s];
        if (own < 0 || (own > 0 && length < own) || length > j->max_blocks * j->block_size) return BAD_INDEX;
        for (long b = 0; own > 0 && b * j->block_size < length; b++) {
            const int32_t block = j->tables[s * j->max_blocks + b];
            const int seen = !j->window || (b + 1) * j->block_size > length - own - j->window + 1;
            if (seen && (block < 0 || block >= j->blocks)) return BAD_INDEX;
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
EXPORT int ops_attend(struct ops *o, struct attend_job *job, long rows) {
    const long sequences = job->sequences;
    const int status = attend_check(job, rows);
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
