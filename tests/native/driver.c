/* Hammers the library's calls from C, for the thread and address sanitizers: driver SCENARIO INSTRUCTION_SET.
 *
 * callers  threads share one handle, so that one has its helpers and the others run alone
 * cycles   handles come and go on several threads
 * fork     children of a process in the middle of calls make the same calls
 * memory   every allocation fails once: calls refuse, nothing leaks, the handle still works
 * planted-overrun, planted-overflow, planted-race: defects that a working sanitizer must report
 *
 * Every result is compared, bit for bit, with that of one quiet thread. Exit status 0: all
 * equal; 77: the processor lacks the instruction set. */
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static atomic_long allowance = LONG_MAX; /* allocations and threads that the library still gets */

static bool refused(void) { return atomic_fetch_sub(&allowance, 1) <= 0; }
static void *scarce_malloc(size_t bytes) { return refused() ? NULL : malloc(bytes); }
static void *scarce_calloc(size_t n, size_t bytes) { return refused() ? NULL : calloc(n, bytes); }
static void *scarce_aligned(size_t to, size_t bytes) { return refused() ? NULL : aligned_alloc(to, bytes); }
static int scarce_thread(pthread_t *t, const pthread_attr_t *a, void *(*run)(void *), void *arg) {
    return refused() ? 11 : pthread_create(t, a, run, arg);
}

#define malloc scarce_malloc
#define calloc scarce_calloc
#define aligned_alloc scarce_aligned
#define pthread_create scarce_thread
#include "ops.c"
#include "stack.c"
#undef malloc
#undef calloc
#undef aligned_alloc
#undef pthread_create

enum { ROWS = 100, N = 203, K = 157, PANELS = (N + PANEL - 1) / PANEL };
enum { SEQUENCES = 3, QUERIES = 58, HEADS = 4, KV_HEADS = 2, DIM = 72, BLOCK = 16, TABLE = 5, BLOCKS = 15 };
enum { BLOCK_FLOATS = 2 * KV_HEADS * BLOCK * DIM, LINEAR = ROWS * N, ATTEND = QUERIES * HEADS * DIM };

static float x[ROWS * K], weight[N * K], panels[PANELS * K * PANEL];
static float pool[BLOCKS * BLOCK_FLOATS], query[ATTEND];
static int32_t tables[SEQUENCES * TABLE];
static const int32_t seq_lens[SEQUENCES] = {70, 33, 40}, query_starts[SEQUENCES + 1] = {0, 40, 41, 58};
static float linear_expected[LINEAR], attend_expected[ATTEND];
static const char *isa;

static void fill(float *to, long count) {
    static uint32_t state = 1;
    for (long i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        to[i] = (float)(state >> 8) / (1 << 24) - 0.5f;
    }
}

static int run_linear(struct ops *o, float *out) {
    const struct weight w = {.panels = panels, .n = N, .k = K};
    return ops_linear(o, x, &w, out, ROWS);
}

static int run_attend(struct ops *o, float *out) {
    struct attend_job job = {
        .pool = pool, .query = query, .out = out,
        .tables = tables, .seq_lens = seq_lens, .query_starts = query_starts,
        .block_stride = BLOCK_FLOATS, .blocks = BLOCKS, .sequences = SEQUENCES, .max_blocks = TABLE, .heads = HEADS, .kv_heads = KV_HEADS,
        .block_size = BLOCK, .head_dim = DIM, .scale = 0.125f,
    };
    return ops_attend(o, &job, QUERIES);
}

enum { MOST = LINEAR > ATTEND ? LINEAR : ATTEND };
enum { HIDDEN = HEADS * DIM, QKV = (HEADS + 2 * KV_HEADS) * DIM, WIDTH = 40, LAYER_FLOATS = QUERIES * HIDDEN };
static float hidden[LAYER_FLOATS], cosine[QUERIES * DIM], sine[QUERIES * DIM], norms[HIDDEN];
static float wide[(QKV + PANEL) * HIDDEN]; /* panels of any of the layer's weights */
static int64_t slots[QUERIES];
static float layers_expected[LAYER_FLOATS];

/* Two layers that share their weights and read one pool. */
static int run_layers(struct ops *o, float *out) {
    const struct layer one = {
        .attention_norm = norms, .mlp_norm = norms, .eps = 1e-5f, .scale = 0.1f,
        .qkv = {.panels = wide, .n = QKV, .k = HIDDEN}, .out = {.panels = wide, .n = HIDDEN, .k = HIDDEN},
        .gate_up = {.panels = wide, .n = 2 * WIDTH, .k = HIDDEN}, .down = {.panels = wide, .n = HIDDEN, .k = WIDTH},
    };
    const struct layer layers[2] = {one, one};
    const struct step step = {
        .cosine = cosine, .sine = sine, .slots = slots, .pool = pool, .rows = QUERIES,
        .attend = {
            .tables = tables, .seq_lens = seq_lens, .query_starts = query_starts,
            .block_stride = BLOCK_FLOATS, .blocks = BLOCKS, .sequences = SEQUENCES, .max_blocks = TABLE,
            .heads = HEADS, .kv_heads = KV_HEADS, .block_size = BLOCK, .head_dim = DIM,
        },
    };
    memcpy(out, hidden, sizeof hidden);
    return ops_layers(o, layers, 2, &step, out);
}

static void must(bool true_, const char *what) {
    if (true_) return;
    fprintf(stderr, "FAILED: %s\n", what);
    _exit(1);
}

static struct ops *opened(int threads) {
    struct ops *o = ops_open(isa, threads);
    must(o != NULL, "ops_open");
    return o;
}

static void check_both(struct ops *o) {
    float *out = malloc(MOST * sizeof *out);
    must(out != NULL, "the driver's own memory");
    must(run_linear(o, out) == 0, "ops_linear");
    must(memcmp(out, linear_expected, sizeof linear_expected) == 0, "linear has other bits");
    must(run_attend(o, out) == 0, "ops_attend");
    must(memcmp(out, attend_expected, sizeof attend_expected) == 0, "attend has other bits");
    must(run_layers(o, out) == 0, "ops_layers");
    must(memcmp(out, layers_expected, sizeof layers_expected) == 0, "layers have other bits");
    free(out);
}

static void prepare(void) {
    fill(x, ROWS * K);
    fill(weight, N * K);
    fill(pool, BLOCKS * BLOCK_FLOATS);
    fill(query, ATTEND);
    fill(hidden, LAYER_FLOATS);
    fill(norms, HIDDEN);
    fill(wide, sizeof wide / sizeof *wide);
    for (int i = 0; i < QUERIES * DIM; i++) cosine[i] = 1;
    for (int i = 0; i < QUERIES; i++) slots[i] = -1; /* callers share the pool, so nobody writes it */
    for (int i = 0; i < SEQUENCES * TABLE; i++) tables[i] = i * 7 % BLOCKS;
    ops_pack(weight, panels, N, K, sizeof(float));
    struct ops *o = opened(1);
    must(run_linear(o, linear_expected) == 0 && run_attend(o, attend_expected) == 0, "the first calls");
    must(run_layers(o, layers_expected) == 0, "the first layers");
    ops_close(o);
}

static void on_threads(int count, void *(*run)(void *), void *arg) {
    pthread_t threads[8];
    for (int i = 0; i < count; i++) must(pthread_create(&threads[i], NULL, run, arg) == 0, "pthread_create");
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
}

static void *call_often(void *handle) {
    for (int i = 0; i < 100; i++) check_both(handle);
    return NULL;
}

static void *open_often(void *unused) {
    for (int i = 0; i < 60; i++) {
        struct ops *o = opened(1 + i % 4);
        if (i % 3) check_both(o); /* every third is closed before its helpers have looked around */
        ops_close(o);
    }
    return unused;
}

static void callers(void) {
    struct ops *o = opened(3);
    on_threads(3, call_often, o);
    ops_close(o);
}

static void fork_amid_calls(void) {
    struct ops *o = opened(3);
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) must(pthread_create(&threads[i], NULL, call_often, o) == 0, "pthread_create");
    for (int i = 0; i < 20; i++) {
        const pid_t child = fork();
        must(child >= 0, "fork");
        if (child == 0) {
            check_both(o);
            ops_close(o); /* the parent's helpers are not here to be joined */
            _exit(0);
        }
        int status;
        must(waitpid(child, &status, 0) == child && status == 0, "a forked child");
    }
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    ops_close(o);
}

static void memory_runs_out(void) {
    float *out = malloc(MOST * sizeof *out);
    bool all_granted = false;
    for (long granted = 0; !all_granted; granted++) {
        must(granted < 100, "the library allocates without end");
        atomic_store(&allowance, granted);
        struct ops *o = ops_open(isa, 3);
        int status = o ? run_attend(o, out) : NO_MEMORY;
        if (status == 0) status = run_linear(o, out);
        if (status == 0) status = run_layers(o, out);
        all_granted = atomic_load(&allowance) > 0;
        atomic_store(&allowance, LONG_MAX);
        must(status == 0 || status == NO_MEMORY, "a status of its own for want of memory");
        if (o == NULL) continue;
        check_both(o);
        ops_close(o);
    }
    free(out);
    must(ops_open(isa, 0) == NULL && ops_open(isa, -1) == NULL, "a handle without a thread");
}

static void *add_unguarded(void *sum) {
    for (int i = 0; i < 10000; i++) ++*(volatile long *)sum;
    return NULL;
}

int main(int argc, char **argv) {
    must(argc == 3, "usage: driver SCENARIO INSTRUCTION_SET");
    if (!ops_supports(argv[2])) return 77;
    const char *scenario = argv[1];
    isa = argv[2];
    prepare();
    if (strcmp(scenario, "callers") == 0) callers();
    else if (strcmp(scenario, "cycles") == 0) on_threads(2, open_often, NULL);
    else if (strcmp(scenario, "fork") == 0) fork_amid_calls();
    else if (strcmp(scenario, "memory") == 0) memory_runs_out();
    else if (strcmp(scenario, "planted-overrun") == 0) {
        struct ops *o = opened(1);
        float *short_of_one = malloc((LINEAR - 1) * sizeof *short_of_one);
        run_linear(o, short_of_one);
        ops_close(o);
        free(short_of_one);
    } else if (strcmp(scenario, "planted-leak") == 0) opened(1);
    else if (strcmp(scenario, "planted-overflow") == 0) printf("%d\n", INT_MAX - 2 + argc);
    else if (strcmp(scenario, "planted-race") == 0) {
        long sum = 0;
        on_threads(2, add_unguarded, &sum);
    } else must(false, "no such scenario");
    return 0;
}
