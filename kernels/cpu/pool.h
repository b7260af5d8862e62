/* A thread pool that sleeps: workers of several processes share cores. Before it sleeps a helper looks for the
 * next job a few hundred times, as within a decode step that is there sooner than a sleeper can be woken.
 *
 * The caller works too. It opens a job, takes items from a shared counter with whichever helpers wake, closes
 * the job when no item is left and waits only for helpers that had begun: a helper the machine never
 * scheduled costs nothing. A second caller at the same time, or a forked child (which has no helpers), runs
 * its job alone; the results are the same. */
#pragma once
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#define SPINS 400

typedef void (*item_fn)(void *job, long item, void *scratch);

struct scratch {
    void *memory;
    size_t bytes;
};

struct pool {
    pthread_mutex_t busy; /* held by the caller for a whole job; guards scratch */
    pthread_mutex_t lock; /* guards what follows, up to next */
    pthread_cond_t wake, done;
    item_fn run;
    void *job;
    long items;
    atomic_long opened; /* jobs opened so far; written under lock, as active is */
    atomic_int active;  /* helpers inside the open job */
    bool open, stop;
    atomic_long next;
    pid_t owner;
    int helpers;
    pthread_t *threads;
    struct scratch *scratch; /* [1 + helpers], the caller's first */
};

struct helper_start {
    struct pool *pool;
    int index;
};

static void pool_work(struct pool *p, int index) {
    for (long i; (i = atomic_fetch_add(&p->next, 1)) < p->items;) p->run(p->job, i, p->scratch[index].memory);
}

static inline void pool_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void *pool_helper(void *start) {
    struct pool *p = ((struct helper_start *)start)->pool;
    const int index = ((struct helper_start *)start)->index;
    free(start);
    long seen = 0;
    pthread_mutex_lock(&p->lock);
    while (true) {
        if (!p->stop && p->opened == seen) {
            pthread_mutex_unlock(&p->lock);
            for (int i = 0; i < SPINS && atomic_load(&p->opened) == seen; i++) pool_pause();
            pthread_mutex_lock(&p->lock);
        }
        while (!p->stop && !(p->open && p->opened != seen)) pthread_cond_wait(&p->wake, &p->lock);
        if (p->stop) break;
        seen = p->opened;
        p->active++;
        pthread_mutex_unlock(&p->lock);
        pool_work(p, index);
        pthread_mutex_lock(&p->lock);
        if (--p->active == 0) pthread_cond_signal(&p->done);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static bool scratch_hold(struct scratch *s, size_t bytes) {
    if (s->bytes >= bytes) return true;
    free(s->memory);
    bytes = (bytes + 4095) / 4096 * 4096;
    s->memory = aligned_alloc(64, bytes);
    s->bytes = s->memory ? bytes : 0;
    return s->memory != NULL;
}

static int pool_alone(item_fn run, void *job, long items, size_t scratch_bytes) {
    struct scratch own = {0};
    if (!scratch_hold(&own, scratch_bytes)) return -1;
    for (long i = 0; i < items; i++) run(job, i, own.memory);
    free(own.memory);
    return 0;
}

/* Runs every item; 0, or -1 where there is no memory for scratch (then nothing ran). */
static int pool_run(struct pool *p, item_fn run, void *job, long items, size_t scratch_bytes, bool small) {
    if (getpid() != p->owner || pthread_mutex_trylock(&p->busy) != 0)
        return pool_alone(run, job, items, scratch_bytes);
    const int helpers = small || items < 2 ? 0 : p->helpers;
    int status = 0;
    for (int i = 0; i <= helpers; i++)
        if (!scratch_hold(&p->scratch[i], scratch_bytes)) status = -1;
    if (status == 0 && helpers == 0) {
        for (long i = 0; i < items; i++) run(job, i, p->scratch[0].memory);
    } else if (status == 0) {
        pthread_mutex_lock(&p->lock);
        p->run = run;
        p->job = job;
        p->items = items;
        atomic_store(&p->next, 0);
        p->opened++;
        p->open = true;
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->lock);
        pool_work(p, 0);
        pthread_mutex_lock(&p->lock);
        p->open = false;
        pthread_mutex_unlock(&p->lock);
        for (int i = 0; i < SPINS && atomic_load(&p->active) > 0; i++) pool_pause();
        pthread_mutex_lock(&p->lock);
        while (p->active > 0) pthread_cond_wait(&p->done, &p->lock);
        pthread_mutex_unlock(&p->lock);
    }
    pthread_mutex_unlock(&p->busy);
    return status;
}

static void pool_free(struct pool *p) {
    if (getpid() != p->owner) return; /* the threads, and so the pool, are the parent's */
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->helpers; i++) pthread_join(p->threads[i], NULL);
    for (int i = 0; p->scratch && i <= p->helpers; i++) free(p->scratch[i].memory);
    pthread_cond_destroy(&p->wake);
    pthread_cond_destroy(&p->done);
    pthread_mutex_destroy(&p->lock);
    pthread_mutex_destroy(&p->busy);
    free(p->threads);
    free(p->scratch);
    free(p);
}

/* threads counts the caller; fewer helpers may come to life than asked for, which is not an error. */
static struct pool *pool_new(int threads) {
    struct pool *p = calloc(1, sizeof *p);
    if (p == NULL) return NULL;
    p->owner = getpid();
    p->threads = calloc((size_t)threads, sizeof *p->threads);
    p->scratch = calloc((size_t)threads, sizeof *p->scratch);
    pthread_mutex_init(&p->busy, NULL);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    pthread_cond_init(&p->done, NULL);
    if (p->threads == NULL || p->scratch == NULL) {
        pool_free(p);
        return NULL;
    }
    for (int i = 1; i < threads; i++) {
        struct helper_start *start = malloc(sizeof *start);
        if (start == NULL) break;
        *start = (struct helper_start){p, i};
        if (pthread_create(&p->threads[i - 1], NULL, pool_helper, start) != 0) {
            free(start);
            break;
        }
        p->helpers++;
    }
    return p;
}
