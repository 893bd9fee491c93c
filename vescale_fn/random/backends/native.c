/* Draws in C: the recipes of elementwise_draws.py and floats.py once more, bit for bit, as loops that a compiler turns into vectors.
 *
 * The loops are in native_loops.h, which is compiled once for each instruction set below; `vfn_available` says which of
 * them this processor runs. Nothing here knows Python or torch: it is called with plain pointers. There is no state, so
 * a fork is harmless. A product that is added to something is fused where it says `fmaf`, and nowhere else, for which
 * the compiler must not contract others (-ffp-contract=off).
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

enum { BLOCK = 1024, MOST_THREADS = 64, LEAST_WORK = 1 << 16 };

enum kind { BITS8, BITS16, BITS32, BITS64, UNIFORM32, UNIFORM64, NORMAL32, BERNOULLI32, RANDINT8, RANDINT16, RANDINT32,
            EXPONENTIAL32, GUMBEL32, LAPLACE32, LOGISTIC32, WORDS, DROPOUT32, DROPOUTBF16 };

/* A draw, or the part of one that a rectangle holds. An element's counter is its place in the whole draw: the sum of one
 * entry of each outer dim's offsets, and of its place in the inner run (`inner`, or consecutive where that is NULL). */
typedef struct {
    int32_t kind, ndim;
    const uint32_t *keys; /* [nkeys][streams][2] */
    int64_t nkeys, streams;
    const int64_t *sizes;   /* [ndim], of the outer dims */
    const int64_t *offsets; /* of the outer dims, one after the other */
    int64_t first, run;     /* of the inner run */
    const int64_t *inner;   /* [run] or NULL */
    double params[3];
    const char *x; /* what a dropout reads */
    char *out;
} Draw;

static const int ITEM[] = {1, 2, 4, 8, 4, 8, 4, 1, 1, 2, 4, 4, 4, 4, 4, 8, 4, 2};

static int64_t elements(const Draw *d) { /* of one key */
    int64_t n = d->run;
    for (int i = 0; i < d->ndim; i++) n *= d->sizes[i];
    return n;
}

#define SUFFIX(name) name##_baseline
#define TARGET
#define WIDTH 16
#include "native_loops.h"
#undef SUFFIX
#undef TARGET
#undef WIDTH

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define SUFFIX(name) name##_avx2
#define WIDTH 32
#define TARGET __attribute__((target("avx2,fma,bmi,bmi2,lzcnt,popcnt")))
#include "native_loops.h"
#undef SUFFIX
#undef TARGET
#undef WIDTH
#define SUFFIX(name) name##_avx512
#define WIDTH 64
#define TARGET __attribute__((target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,bmi,bmi2,lzcnt,popcnt,prefer-vector-width=512")))
#include "native_loops.h"
#undef SUFFIX
#undef TARGET
#undef WIDTH
static void (*const RANGE[])(const Draw *, int64_t, int64_t) = {range_baseline, range_avx2, range_avx512};

/* The instruction sets that this processor has, one bit each: 1 baseline, 2 AVX2 with FMA, 4 AVX-512. */
int vfn_available(void) {
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
    return 1 | avx2 << 1 | avx512 << 2;
}
#else
static void (*const RANGE[])(const Draw *, int64_t, int64_t) = {range_baseline};
int vfn_available(void) { return 1; }
#endif

typedef struct {
    const Draw *draw;
    int variant;
    int64_t start, stop;
} Part;

static void *run_part(void *part) {
    const Part *p = part;
    RANGE[p->variant](p->draw, p->start, p->stop);
    return NULL;
}

/* Ask for large pages under a long result: to fault small ones in would take as long as to draw. */
static void large_pages(char *out, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t page = (uintptr_t)1 << 21, start = ((uintptr_t)out + page - 1) & ~(page - 1);
    const uintptr_t stop = ((uintptr_t)out + (uintptr_t)bytes) & ~(page - 1);
    if (stop > start + 2 * page) madvise((void *)start, stop - start, MADV_HUGEPAGE);
#else
    (void)out, (void)bytes;
#endif
}

/* The whole of a draw, by several threads where it is long. */
void vfn_draw(int variant, int threads, const Draw *draw) {
    int64_t total = elements(draw) * draw->nkeys, n = total / LEAST_WORK;
    large_pages(draw->out, total * ITEM[draw->kind]);
    if (n > threads) n = threads;
    if (n > MOST_THREADS) n = MOST_THREADS;
    if (n <= 1) {
        RANGE[variant](draw, 0, total);
        return;
    }
    Part parts[MOST_THREADS];
    pthread_t started[MOST_THREADS];
    int running[MOST_THREADS];
    int64_t each = (total / n + BLOCK - 1) / BLOCK * BLOCK;
    for (int64_t i = 0; i < n; i++) {
        int64_t stop = (i + 1) * each;
        parts[i] = (Part){draw, variant, i * each, i == n - 1 || stop > total ? total : stop};
        running[i] = i + 1 < n && pthread_create(&started[i], NULL, run_part, &parts[i]) == 0;
        if (!running[i]) run_part(&parts[i]); /* the last part, and what no thread was to be had for */
    }
    for (int64_t i = 0; i < n; i++)
        if (running[i]) pthread_join(started[i], NULL);
}

/* `vfn_draw` of n elements in a row under one key, in one thread, its arguments packed: for small draws, where the call counts. */
typedef struct {
    int32_t variant, kind;
    uint32_t key[2];
    int64_t first, n;
    double params[3];
} Small;

void vfn_small(const Small *s, void *out) {
    Draw draw = {s->kind, 0, s->key, 1, 1, NULL, NULL, s->first, s->n, NULL, {s->params[0], s->params[1], s->params[2]}, NULL, out};
    RANGE[s->variant](&draw, 0, s->n);
}
