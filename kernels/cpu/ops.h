/* What the files behind the library's interface share. */
#pragma once
#include "kernels.h"

#define EXPORT __attribute__((visibility("default")))
#define NO_MEMORY (-1)
#define BAD_INDEX (-2)

struct pool;

struct ops {
    const struct kernels *kernels;
    struct pool *pool;
};

int ops_linear(struct ops *o, const float *x, const struct weight *w, float *out, long rows);
void ops_rms_norm(struct ops *o, const float *x, const float *weight, float *out, long rows, long n, float eps);
void ops_silu_mul(struct ops *o, const float *gate_up, float *out, long rows, long n);
int ops_rotate_write(struct ops *o, float *pool, long block_stride, long blocks, long heads, long kv_heads,
                     long block_size, long head_dim, const float *qkv, const float *cosine,
                     const float *sine, const int64_t *slots, float *out, long rows);
int ops_attend(struct ops *o, struct attend_job *job, long rows);
