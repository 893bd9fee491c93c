/* The loops of native.c, for one instruction set: counters to hash words to values, a block at a time. */

#define INLINE TARGET static inline __attribute__((always_inline))
#define SEPARATE __attribute__((noinline)) /* else the loops share too few registers */

/* --- the hash: threefry.py ----------------------------------------------------------------------------------------- */

/* Four vectors go through the rounds side by side: each round waits for the one before it, and they fill the gaps. */
typedef uint32_t SUFFIX(vector) __attribute__((vector_size(WIDTH)));
enum { SUFFIX(LANES) = WIDTH / 4, SUFFIX(ABREAST) = 4 };

#define ALL(statement) _Pragma("GCC unroll 4") for (int j = 0; j < SUFFIX(ABREAST); j++) { statement; }
#define ROUND(r) ALL(x0[j] += x1[j]; x1[j] = (x1[j] << (r) | x1[j] >> (32 - (r))) ^ x0[j])
#define EVEN ROUND(13) ROUND(15) ROUND(26) ROUND(6)
#define ODD ROUND(17) ROUND(29) ROUND(16) ROUND(24)
#define INJECT(a, b, i) ALL(x0[j] += a; x1[j] += (b) + i)

/* Of `n` counters; the arrays are BLOCK long, so that what lies behind the last one may be hashed too. */
TARGET SEPARATE static void SUFFIX(hash)(uint32_t k0, uint32_t k1, const uint32_t *hi, const uint32_t *lo, uint32_t *y0,
                                uint32_t *y1, int n) {
    const uint32_t k2 = k0 ^ k1 ^ 0x1BD11BDA;
    SUFFIX(vector) x0[SUFFIX(ABREAST)], x1[SUFFIX(ABREAST)];
    for (int i = 0; i < n; i += SUFFIX(LANES) * SUFFIX(ABREAST)) {
        memcpy(x0, hi + i, sizeof x0);
        memcpy(x1, lo + i, sizeof x1);
        INJECT(k0, k1, 0) EVEN INJECT(k1, k2, 1) ODD INJECT(k2, k0, 2) EVEN INJECT(k0, k1, 3) ODD INJECT(k1, k2, 4)
        EVEN INJECT(k2, k0, 5)
        memcpy(y0 + i, x0, sizeof x0);
        memcpy(y1 + i, x1, sizeof x1);
    }
}

/* --- the functions: floats.py -------------------------------------------------------------------------------------- */

INLINE float SUFFIX(as_float)(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE uint32_t SUFFIX(as_bits)(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

#define FMA __builtin_fmaf
#define P(y, c) y = FMA(y, x, c)

INLINE float SUFFIX(log)(float v) {
    uint32_t bits = SUFFIX(as_bits)(v) - 0x3F3504F3;
    float e = (float)((int32_t)bits >> 23), x = SUFFIX(as_float)((bits & 0x007FFFFF) + 0x3F3504F3) - 1.0f;
    float square = x * x, cube = square * x;
    float a = 7.0376836292e-2f, b = -1.2420140846e-1f, c = 2.0000714765e-1f;
    P(a, -1.1514610310e-1f), P(a, 1.1676998740e-1f);
    P(b, 1.4249322787e-1f), P(b, -1.6668057665e-1f);
    P(c, -2.4999993993e-1f), P(c, 3.3333331174e-1f);
    float y = FMA(FMA(FMA(a, cube, b), cube, c), cube, e * -2.12194440e-4f);
    return FMA(e, 0.693359375f, y + (square * -0.5f + x));
}

INLINE float SUFFIX(log1p)(float x) {
    float square = x * x, top = 4.5270000862445199635215e-5f, bottom = 1.0f;
    P(top, 4.9854102823193375972212e-1f), P(top, 6.5787325942061044846969f), P(top, 2.9911919328553073277375e1f);
    P(top, 6.0949667980987787057556e1f), P(top, 5.7112963590585538103336e1f), P(top, 2.0039553499201281259648e1f);
    P(bottom, 1.5062909083469192043167e1f), P(bottom, 8.3047565967967209469434e1f), P(bottom, 2.2176239823732856465394e2f);
    P(bottom, 3.0909872225312059774938e2f), P(bottom, 2.1642788614495947685003e2f), P(bottom, 6.0118660497603843919306e1f);
    float near = FMA(square, -0.5f, top / bottom * (x * square)) + x, far = SUFFIX(log)(x + 1.0f);
    return fabsf(x) < 0.41421356237309503f ? near : far;
}

INLINE float SUFFIX(erfinv)(float u) {
    float w = -SUFFIX(log1p)(-(u * u)), x = w - 2.5f, y = 2.81022636e-08f;
    P(y, 3.43273939e-07f), P(y, -3.5233877e-06f), P(y, -4.39150654e-06f), P(y, 0.00021858087f);
    P(y, -0.00125372503f), P(y, -0.00417768164f), P(y, 0.246640727f), P(y, 1.50140941f);
    float centre = y;
    x = sqrtf(w) - 3.0f, y = -0.000200214257f;
    P(y, 0.000100950558f), P(y, 0.00134934322f), P(y, -0.00367342844f), P(y, 0.00573950773f);
    P(y, -0.0076224613f), P(y, 0.00943887047f), P(y, 1.00167406f), P(y, 2.83297682f);
    return (w < 5.0f ? centre : y) * u;
}

/* --- the kinds: elementwise_draws.py ------------------------------------------------------------------------------- */

#define UNIT(i) (SUFFIX(as_float)((y0[i] ^ y1[i]) >> 9 | 0x3F800000) - 1.0f) /* uniform on [0, 1) */
#define OPEN(i) (UNIT(i) > 0.0f ? UNIT(i) : 1.17549435e-38f)                 /* and on (0, 1) */
#define LOOP(type, value) { type *o = (type *)out; for (int i = 0; i < n; i++) o[i] = (type)(value); }
#define EACH(type, value) LOOP(type, value) break

/* The values of one block. y0, y1: the hash words of each element; z0, z1: those of its second stream. */
TARGET SEPARATE static void SUFFIX(values)(const Draw *d, const uint32_t *restrict y0, const uint32_t *restrict y1,
                                  const uint32_t *restrict z0, const uint32_t *restrict z1, const char *restrict x,
                                  char *restrict out, int n) {
    const float p0 = (float)d->params[0], p1 = (float)d->params[1], wide = p1 - p0;
    switch (d->kind) {
    case BITS8: EACH(uint8_t, y0[i] ^ y1[i]);
    case BITS16: EACH(uint16_t, y0[i] ^ y1[i]);
    case BITS32: EACH(uint32_t, y0[i] ^ y1[i]);
    case BITS64: EACH(uint64_t, (uint64_t)y0[i] << 32 | y1[i]);
    case UNIFORM32:
        if (p0 == 0.0f && p1 == 1.0f) LOOP(float, UNIT(i))
        else if (p1 < p0) LOOP(float, FMA(UNIT(i), wide, p0) > p0 ? FMA(UNIT(i), wide, p0) : p0)
        else LOOP(float, FMA(UNIT(i), wide, p0))
        break;
    case UNIFORM64: {
        const double low = d->params[0], high = d->params[1];
        double *o = (double *)out;
        for (int i = 0; i < n; i++) {
            uint64_t bits = ((uint64_t)y0[i] << 32 | y1[i]) >> 12 | 0x3FF0000000000000;
            double u;
            memcpy(&u, &bits, 8);
            u = __builtin_fma(u - 1.0, high - low, low);
            o[i] = high < low && u < low ? low : u;
        }
        break;
    }
    case NORMAL32: EACH(float, SUFFIX(erfinv)(FMA(UNIT(i), 2.0f, -0.99999994f)) * 1.41421356237309504880f);
    case BERNOULLI32: EACH(uint8_t, UNIT(i) < p0);
    case RANDINT8: case RANDINT16: case RANDINT32: {
        const uint32_t span = (uint32_t)(int64_t)d->params[1], factor = (uint32_t)(int64_t)d->params[2];
        const uint32_t low = (uint32_t)(int64_t)d->params[0];
        for (int i = 0; i < n; i++) {
            uint32_t high = y0[i] ^ y1[i], lower = z0[i] ^ z1[i];
            uint32_t value = low + (span ? (high % span * factor + lower % span) % span : high * factor + lower);
            if (d->kind == RANDINT8) ((uint8_t *)out)[i] = (uint8_t)value;
            else if (d->kind == RANDINT16) ((uint16_t *)out)[i] = (uint16_t)value;
            else ((uint32_t *)out)[i] = value;
        }
        break;
    }
    case EXPONENTIAL32: EACH(float, -SUFFIX(log1p)(-UNIT(i)));
    case GUMBEL32: EACH(float, -SUFFIX(log)(-SUFFIX(log)(OPEN(i))));
    case LAPLACE32: {
        float *o = (float *)out;
        for (int i = 0; i < n; i++) {
            float u = FMA(UNIT(i), 2.0f, -0.99999994f), far = SUFFIX(log1p)(-fabsf(u));
            o[i] = far * (float)((u > 0.0f) - (u < 0.0f));
        }
        break;
    }
    case LOGISTIC32: EACH(float, SUFFIX(log)(OPEN(i)) - SUFFIX(log1p)(-OPEN(i)));
    case WORDS:
        for (int i = 0; i < n; i++) ((uint32_t *)out)[2 * i] = y0[i], ((uint32_t *)out)[2 * i + 1] = y1[i];
        break;
    case DROPOUT32: EACH(float, UNIT(i) < p0 ? ((const float *)x)[i] * p1 : 0.0f);
    case DROPOUTBF16: {
        const uint16_t *in = (const uint16_t *)x;
        uint16_t *o = (uint16_t *)out;
        for (int i = 0; i < n; i++) { /* to float32 and back, rounded to the nearest even */
            float kept = SUFFIX(as_float)((uint32_t)in[i] << 16) * p1;
            uint32_t bits = SUFFIX(as_bits)(kept);
            uint32_t rounded = kept == kept ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : 0x7FC0;
            o[i] = UNIT(i) < p0 ? (uint16_t)rounded : 0;
        }
        break;
    }
    default: break;
    }
}

/* --- the walk: counters.py ----------------------------------------------------------------------------------------- */

/* Consecutive counters from `from` on. Writes in whole steps, up to STEP - 1 behind the last. */
INLINE void SUFFIX(count)(uint64_t from, uint32_t *restrict hi, uint32_t *restrict lo, int n) {
    enum { STEP = 16 };
    const uint32_t high = (uint32_t)(from >> 32), low = (uint32_t)from;
    for (int i = 0; i < n; i += STEP)
        for (int j = 0; j < STEP; j++) lo[i + j] = low + (uint32_t)(i + j), hi[i + j] = high;
    if (low + (uint32_t)n < low) /* past a multiple of 2**32 */
        for (int64_t i = (int64_t)(0x100000000 - low); i < n; i++) hi[i] = high + 1;
}

/* What all outer dims but the last add to a counter, and where the offsets of the last begin. */
INLINE uint64_t SUFFIX(base)(const Draw *d, const int64_t *at, const int64_t **last) {
    uint64_t base = (uint64_t)d->first;
    *last = d->offsets;
    for (int i = 0; i + 1 < d->ndim; i++) base += (uint64_t)(*last)[at[i]], *last += d->sizes[i];
    return base;
}

/* The elements start <= e < stop of all keys' draws, laid one after the other. */
TARGET static void SUFFIX(range)(const Draw *d, int64_t start, int64_t stop) {
    /* Not a multiple of 4096 bytes apart, where a processor takes a load for one of what was just stored. */
    _Alignas(64) uint32_t block[6][BLOCK + 48], *hi = block[0], *lo = block[1], *y0 = block[2], *y1 = block[3], *z0 = block[4];
    uint32_t *z1 = block[5];
    const int64_t per_key = elements(d);
    const int item = ITEM[d->kind];
    int64_t at[64];
    while (start < stop) {
        const int64_t key = start / per_key, end = stop < (key + 1) * per_key ? stop : (key + 1) * per_key;
        const uint32_t *k = d->keys + key * 2 * d->streams;
        int64_t row = (start - key * per_key) / d->run, column = (start - key * per_key) % d->run;
        for (int i = d->ndim - 1; i >= 0; i--) at[i] = row % d->sizes[i], row /= d->sizes[i];
        const int64_t *last;
        uint64_t outer = SUFFIX(base)(d, at, &last);
        while (start < end) {
            int n = 0;
            const int most = end - start < BLOCK ? (int)(end - start) : BLOCK;
            while (n < most) { /* one run, or what of it the block takes */
                const uint64_t base = outer + (uint64_t)(d->ndim ? last[at[d->ndim - 1]] : 0);
                const int take = d->run - column < most - n ? (int)(d->run - column) : most - n;
                if (d->inner) {
                    for (int i = 0; i < take; i++) {
                        const uint64_t c = base + (uint64_t)d->inner[column + i];
                        hi[n + i] = (uint32_t)(c >> 32), lo[n + i] = (uint32_t)c;
                    }
                } else {
                    SUFFIX(count)(base + (uint64_t)column, hi + n, lo + n, take);
                }
                n += take, column += take;
                if (column == d->run) {
                    column = 0;
                    if (d->ndim && ++at[d->ndim - 1] == d->sizes[d->ndim - 1]) {
                        at[d->ndim - 1] = 0;
                        for (int i = d->ndim - 2; i >= 0 && ++at[i] == d->sizes[i]; i--) at[i] = 0;
                        outer = SUFFIX(base)(d, at, &last);
                    }
                }
            }
            SUFFIX(hash)(k[0], k[1], hi, lo, y0, y1, n);
            if (d->streams == 2) SUFFIX(hash)(k[2], k[3], hi, lo, z0, z1, n);
            SUFFIX(values)(d, y0, y1, z0, z1, d->x + start * item, d->out + start * item, n);
            start += n;
        }
    }
}

#undef INLINE
#undef SEPARATE
#undef ALL
#undef ROUND
#undef EVEN
#undef ODD
#undef INJECT
#undef FMA
#undef P
#undef UNIT
#undef OPEN
#undef LOOP
#undef EACH
