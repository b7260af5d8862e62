/* Included before every source of the library under AddressSanitizer: each item gets scratch of exactly the
 * size asked for, full of NaN, so that a touch past its end is seen and so is a read of what nobody wrote. */
#pragma once
#include <string.h>

#include "pool.h"

static inline int exact_run(struct pool *p, item_fn run, void *job, long items, size_t bytes, bool small) {
    if (bytes == 0) return pool_run(p, run, job, items, bytes, small);
    for (long i = 0; i < items; i++) {
        void *scratch = malloc(bytes);
        if (scratch == NULL) return -1;
        memset(scratch, 0xff, bytes);
        run(job, i, scratch);
        free(scratch);
    }
    return 0;
}
#define pool_run exact_run
