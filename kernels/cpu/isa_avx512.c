/* The kernels built for AVX-512 (F). */
#if defined(__x86_64__)
#define ISA 512
#include "attend.h"
#include "linear.h"
#include "rows.h"

const struct kernels kernels_avx512 = {
    .few_rows = FEW_ROWS,
    .block_rows = BLOCK_ROWS,
    .pack = pack_item,
    .linear = linear_item,
    .attend = attend_item,
    .rms_norm = rms_norm_rows,
    .silu_mul = silu_mul_all,
    .rotate = rotate_head,
};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
