/* A model's decoder layers in one call: between two layers nothing but the sums is touched, so the caches keep
 * the kernels' data and the caller's interpreter is out of the way. */
#include <stdlib.h>

#include "ops.h"

struct layer { /* x += out(attend(qkv(norm(x)))); x += down(silu_mul(gate_up(norm(x)))) */
    const float *attention_norm, *mlp_norm;
    struct weight qkv, out, gate_up, down;
    float eps, scale;
    long window; /* 0: none */
};

struct step {
    const float *cosine, *sine; /* [rows, head_dim] */
    const int64_t *slots;       /* [rows], -1 to skip a row */
    float *pool;                /* the first layer's first key */
    long layer_stride, rows;
    struct attend_job attend; /* all but pool, query, out, scale, window */
};

static void add(float *x, const float *y, long n) {
    for (long i = 0; i < n; i++) x[i] += y[i];
}

/* Floats that ops_layers needs to work in. */
static long work_floats(const struct layer *l, const struct step *s) {
    const long inner = s->attend.heads * s->attend.head_dim;
    return s->rows * (l->qkv.k + l->qkv.n + 2 * inner + l->gate_up.n + l->down.k);
}

static int run_layer(struct ops *o, const struct layer *l, const struct step *s, float *pool, float *x,
                     float *work) {
    const long rows = s->rows, hidden = l->qkv.k, inner = s->attend.heads * s->attend.head_dim;
    float *normed = work, *qkv = normed + rows * hidden, *query = qkv + rows * l->qkv.n;
    float *context = query + rows * inner, *gate_up = context + rows * inner;
    float *gated = gate_up + rows * l->gate_up.n;
    struct attend_job job = s->attend;
    job.pool = pool;
    job.query = query;
    job.out = context;
    job.scale = l->scale;
    job.window = l->window;
    int status;

    ops_rms_norm(o, x, l->attention_norm, normed, rows, hidden, l->eps);
    if ((status = ops_linear(o, normed, &l->qkv, qkv, rows)) != 0) return status;
    status = ops_rotate_write(o, pool, job.block_stride, job.blocks, job.heads, job.kv_heads, job.block_size,
                              job.head_dim, qkv, s->cosine, s->sine, s->slots, query, rows);
    if (status != 0 || (status = ops_attend(o, &job, rows)) != 0) return status;
    if ((status = ops_linear(o, context, &l->out, normed, rows)) != 0) return status;
    add(x, normed, rows * hidden);

    ops_rms_norm(o, x, l->mlp_norm, normed, rows, hidden, l->eps);
    if ((status = ops_linear(o, normed, &l->gate_up, gate_up, rows)) != 0) return status;
    ops_silu_mul(o, gate_up, gated, rows, l->down.k);
    if ((status = ops_linear(o, gated, &l->down, normed, rows)) != 0) return status;
    add(x, normed, rows * hidden);
    return 0;
}

/* Bytes of a struct that the caller lays out by itself, to be compared: 0 weight, 1 attend_job, 2 layer, 3 step. */
EXPORT long ops_struct_bytes(int which) {
    const size_t bytes[] = {sizeof(struct weight), sizeof(struct attend_job), sizeof(struct layer), sizeof(struct step)};
    return (long)bytes[which];
}

/* x [rows, hidden] through count layers, in place; layers share their shapes. After an error x is undefined. */
EXPORT int ops_layers(struct ops *o, const struct layer *layers, long count, const struct step *s, float *x) {
    if (count == 0 || s->rows == 0) return 0;
    float *work = malloc((size_t)work_floats(layers, s) * sizeof(float));
    int status = work ? 0 : NO_MEMORY;
    for (long i = 0; i < count && status == 0; i++)
        status = run_layer(o, layers + i, s, s->pool + i * s->layer_stride, x, work);
    free(work);
    return status;
}
