/* The kernels built for AVX-512 (F). */
#if defined(__x86_64__)
#define ISA 512
#include "attend.h"
#include "rows.h"

const struct kernels kernels_avx512 = {
    .name = "avx512",
    .linear = linear_item,
    .attend = attend_item,
    .rms_norm = rms_norm_rows,
    .silu_mul = silu_mul_all,
    .rotary = rotary_rows,
};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
