/* Paged causal attention with an online softmax over tiles of TILE keys at absolute positions.
 *
 * 1. An item is consecutive rows of one sequence and one kv head; a query vector is one (row, head) of it.
 * 2. Tile by tile, ascending: keys transposed to panels, scores = query x keys, one exp per score, then
 *    out = out * correction + weights x values, where only the keys the row may see enter the chain.
 * 3. out / sum of weights.
 * A row takes part in a tile when it sees at least one key there, by position alone; nothing else about the
 * batch enters its arithmetic. Key i always sits in lane i % 16, so running sums are kept per lane and added
 * up once, at the end. */
#pragma once
#include <stdbool.h>

#include "gemm.h"
#include "kernels.h"

#define MAX_DIM 256

struct tile_view { /* keys first .. first+count of a sequence, count <= TILE */
    const float *key[TILE], *value[TILE];
};

static const float no_key[MAX_DIM];

INL long at_most(long x, long limit) { return x < limit ? x : limit; }
INL long at_least(long x, long limit) { return x > limit ? x : limit; }

/* Blocks wholly before `oldest`, the first key that the item sees, may be gone and are not looked up. */
static void find_tile(const struct attend_job *j, const struct attend_item *it, long first, long oldest,
                      struct tile_view *tile) {
    const int32_t *table = j->tables + it->sequence * j->max_blocks;
    const long head = j->block_size * j->head_dim, count = at_most(j->seq_lens[it->sequence] - first, TILE);
    long block = first / j->block_size, offset = first % j->block_size, i = 0;
    for (; i < count; block++, offset = 0) {
        const bool gone = (block + 1) * j->block_size <= oldest;
        const float *keys = gone ? no_key : j->pool + table[block] * j->block_stride + it->kv_head * head;
        const long step = gone ? 0 : j->head_dim, to_value = gone ? 0 : j->kv_heads * head;
        for (; i < count && offset < j->block_size; i++, offset++) {
            tile->key[i] = keys + offset * step;
            tile->value[i] = tile->key[i] + to_value;
        }
    }
    for (; i < TILE; i++) tile->key[i] = tile->value[i] = no_key;
}

/* Towards L2, while the tile before is in work: blocks lie scattered, so the hardware does not foresee them. */
INL void fetch8(const struct tile_view *tile, long first, long at) {
#pragma GCC unroll 8
    for (long i = first; i < first + 8; i++) {
        _mm_prefetch((const char *)(tile->key[i] + at), _MM_HINT_T1);
        _mm_prefetch((const char *)(tile->value[i] + at), _MM_HINT_T1);
    }
}

/* Scores of one query vector to weights, in place; it sees keys low .. high. Returns the correction. */
INL float soften(float *score, long low, long high, float soft_cap, float *top, float *lane_sums) {
    v16 s[TILE / LANES], best = v_set1(-INFINITY);
    for (int i = 0; i < TILE / LANES; i++) {
        s[i] = v_load(score + i * LANES);
        if (soft_cap != 0.0f) s[i] = v_mul(v_set1(soft_cap), v_tanh(v_div(s[i], v_set1(soft_cap))));
        if (low > 0 || high < TILE)
            s[i] = v_keep_range(s[i], low - i * LANES, high - i * LANES, v_set1(-INFINITY));
        best = v_max(best, s[i]);
    }
    const float before = *top, peak = v_top(best), after = peak > before ? peak : before;
    float correction = 1.0f;
    if (after != before) {
        float lanes[LANES];
        v_store(lanes, v_exp(v_set1(before - after)));
        correction = lanes[0];
    }
    *top = after;
    v16 sums = v_mul(v_load(lane_sums), v_set1(correction));
    for (int i = 0; i < TILE / LANES; i++) {
        v16 w = v_exp(v_sub(s[i], v_set1(after)));
        v_store(score + i * LANES, w);
        sums = v_add(sums, w);
    }
    v_store(lane_sums, sums);
    return correction;
}

struct attend_state { /* all in scratch; v = query vector of the item */
    float *query;     /* [v, head_dim], times scale */
    float *keys;      /* [TILE / PANEL, head_dim, PANEL] */
    float *values;    /* [TILE, width], where the pool's own rows do not serve */
    float *score;     /* [v, TILE] */
    float *sum;       /* [v, width] */
    float *lane_sums; /* [v, LANES] */
    float *top;       /* [v] */
    long width;       /* head_dim rounded up to LANES */
};

static void attend_tile(const struct attend_job *j, const struct attend_item *it,
                        const struct attend_state *st, const struct tile_view *tile,
                        const struct tile_view *next, long position, long first) {
    const long group = j->heads / j->kv_heads, dim = j->head_dim, width = st->width;
    /* rows from .. to see keys of this tile; row i stands at position + i */
    const long from = at_least(first - position, 0);
    const long to = j->window ? at_most(first + TILE + j->window - 1 - position, it->rows) : it->rows;
    if (from >= to) return;

    for (long r = 0; r < TILE; r += 8) {
        for (long d = 0; d < dim; d += 8) {
            if (d % LANES == 0) fetch8(next, r, d);
            transpose8(tile->key + r, d, st->keys + (r / PANEL * dim + d) * PANEL + r % PANEL, PANEL);
        }
    }
    struct product scores = {
        .a = st->query + from * group * dim,
        .b = st->keys,
        .out = st->score + from * group * TILE,
        .a_stride = dim,
        .b_stride = PANEL,
        .panel_stride = dim * PANEL,
        .out_stride = TILE,
        .depth = dim,
    };
    product_all(scores, (to - from) * group, TILE / PANEL);

    const float *values = tile->value[0];
    if (width != dim || j->block_size % TILE != 0) { /* not one dense run of rows: copy */
        for (long i = 0; i < TILE; i++)
            memcpy(st->values + i * width, tile->value[i], (size_t)dim * sizeof(float));
        values = st->values;
    }
    for (long row = from; row < to;) {
        long end = row, low = 0, high = 0;
        for (; end < to; end++) { /* rows that see the same keys go together */
            const long p = position + end, l = j->window ? at_least(p - j->window + 1 - first, 0) : 0;
            const long h = at_most(p + 1 - first, TILE);
            if (end == row) low = l, high = h;
            if (l != low || h != high) break;
            for (long v = end * group; v < (end + 1) * group; v++) {
                float *sum = st->sum + v * width;
                const float correction = soften(st->score + v * TILE, low, high, j->soft_cap, st->top + v,
                                                st->lane_sums + v * LANES);
                if (correction == 1.0f) continue;
                for (long d = 0; d < width; d += LANES)
                    v_store(sum + d, v_mul(v_load(sum + d), v_set1(correction)));
            }
        }
        float *sum = st->sum + row * group * width;
        struct product weighted = {
            .a = st->score + row * group * TILE + low,
            .b = values + low * width,
            .start = sum,
            .out = sum,
            .a_stride = TILE,
            .b_stride = width,
            .panel_stride = LANES,
            .start_stride = width,
            .out_stride = width,
            .depth = high - low,
        };
        product_all(weighted, (end - row) * group, width / LANES);
        row = end;
    }
}

static void attend_item(void *job, long item, void *scratch) {
    const struct attend_job *j = job;
    const struct attend_item *it = j->items + item;
    const long group = j->heads / j->kv_heads, dim = j->head_dim, vectors = it->rows * group;
    const long width = (dim + LANES - 1) / LANES * LANES, s = it->sequence;
    const long position = j->seq_lens[s] - j->query_starts[s + 1] + it->row; /* of the item's first row */
    struct attend_state st = {.width = width, .query = scratch};
    st.keys = st.query + j->max_vectors * width;
    st.values = st.keys + TILE * width;
    st.score = st.values + TILE * width;
    st.sum = st.score + j->max_vectors * TILE;
    st.lane_sums = st.sum + j->max_vectors * width;
    st.top = st.lane_sums + j->max_vectors * LANES;

    for (long r = 0; r < it->rows; r++) {
        const float *q = j->query + ((it->row + r) * j->heads + it->kv_head * group) * dim;
        for (long i = 0; i < group * dim; i++) st.query[r * group * dim + i] = q[i] * j->scale;
    }
    memset(st.sum, 0, (size_t)(vectors * width) * sizeof(float));
    memset(st.lane_sums, 0, (size_t)(vectors * LANES) * sizeof(float));
    memset(st.values, 0, (size_t)(TILE * width) * sizeof(float));
    for (long v = 0; v < vectors; v++) st.top[v] = -INFINITY;

    const long oldest = j->window ? at_least(position - j->window + 1, 0) : 0;
    struct tile_view tile, next;
    find_tile(j, it, oldest / TILE * TILE, oldest, &next);
    for (long first = oldest / TILE * TILE; first < position + it->rows; first += TILE) {
        tile = next;
        find_tile(j, it, first + TILE, oldest, &next);
        attend_tile(j, it, &st, &tile, &next, position, first);
    }

    for (long v = 0; v < vectors; v++) {
        float *out = j->out + ((it->row + v / group) * j->heads + it->kv_head * group + v % group) * dim;
        const v16 total = v_set1(v_sum(v_load(st.lane_sums + v * LANES)));
        for (long d = 0; d < dim; d += LANES)
            v_store_part(out + d, v_div(v_load(st.sum + v * width + d), total), dim - d);
    }
}
