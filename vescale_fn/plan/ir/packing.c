/* Where buffers lie in one block of memory: what is alive at one moment must not overlap, and all must lie below a capacity.
 *
 * `vfn_offsets` is an exact search (the problem is NP-hard). The idea is that of Moffitt, "MiniMalloc" (ASPLOS 2023): buffers are
 * placed from the bottom up, each directly on top of what lies there already, so that offsets never fall along a branch; any packing
 * can be pushed down into one of this kind. A branch ends where
 *   - at some moment, what waits does not fit above the lowest place that any of it can still have;
 *   - a buffer would lie so high that another one that waits fits below it (that one can be pushed down);
 *   - what was placed last is in nobody's way, and the rest is impossible all the same.
 * Where nothing that waits is alive on both sides of a moment, what waits before and after it are problems of their own, each with
 * its own order of preference: how crowded the moments of a buffer are is counted again of what waits. That is what makes the
 * search find packings without any slack.
 *
 * Moments are the maximal sets of buffers that are alive together. There is no state outside of a call.
 */
#include <stdint.h>
#include <stdlib.h>

typedef struct {
    int32_t first, last; /* moments at which it is alive, both inclusive */
    int64_t size;
} Buffer;

typedef struct {
    const Buffer *buffers;
    int32_t n, crowded;         /* how many buffers; which row of keys is how crowded a buffer's moments are */
    int64_t *keys;              /* [KEYS, n], of each buffer, the most important first: the larger are preferred */
    int64_t capacity, visits;   /* visits: how many more the search may make */
    int64_t *offset;            /* of what waits: the least that it can have; of what is placed: -1 - its offset */
    int32_t *row, *neighbours;  /* who is alive together with i: neighbours[row[i]] up to neighbours[row[i + 1]] */
    int64_t *lowest, *waiting;  /* by moment: the lowest place of what waits there, and how many bytes wait */
    int32_t *pool, *pool_end;   /* for lists, level after level */
    int32_t *moved;             /* whose offsets have changed, */
    int64_t *before, moves;     /* and what they were */
} Search;

enum { IMPOSSIBLE, PACKED, GAVE_UP, KEYS = 3 };

static int together(const Buffer *a, const Buffer *b) { return a->first <= b->last && b->first <= a->last; }

static void move(Search *s, int32_t id, int64_t offset) {
    s->moved[s->moves] = id;
    s->before[s->moves++] = s->offset[id];
    s->offset[id] = offset;
}

/* Places a buffer at the lowest offset that it can have, and raises what waits above it. Returns whether there is any. */
static int place(Search *s, int32_t id) {
    const Buffer *b = s->buffers + id;
    int64_t offset = s->offset[id];
    int in_the_way = 0;
    for (int32_t t = b->first; t <= b->last; t++) s->waiting[t] -= b->size;
    move(s, id, -1 - offset);
    for (int32_t j = s->row[id]; j < s->row[id + 1]; j++) {
        int32_t other = s->neighbours[j];
        in_the_way |= s->offset[other] >= 0;
        if (s->offset[other] >= 0 && s->offset[other] < offset + b->size) move(s, other, offset + b->size);
    }
    return in_the_way;
}

static void undo(Search *s, int64_t moves) {
    while (s->moves > moves) {
        int32_t id = s->moved[--s->moves];
        const Buffer *b = s->buffers + id;
        if (s->offset[id] < 0)
            for (int32_t t = b->first; t <= b->last; t++) s->waiting[t] += b->size;
        s->offset[id] = s->before[s->moves];
    }
}

/* Whether what waits may still fit, if nothing of it lies below `least`. */
static int may_fit(Search *s, const int32_t *ids, int32_t n, int64_t least, int32_t first, int32_t last) {
    for (int32_t t = first; t <= last; t++) s->lowest[t] = s->capacity;
    for (int32_t k = 0; k < n; k++) {
        const Buffer *b = s->buffers + ids[k];
        int64_t offset = s->offset[ids[k]] > least ? s->offset[ids[k]] : least;
        if (offset + b->size > s->capacity) return 0;
        for (int32_t t = b->first; t <= b->last; t++)
            if (offset < s->lowest[t]) s->lowest[t] = offset;
    }
    for (int32_t t = first; t <= last; t++)
        if (s->lowest[t] + s->waiting[t] > s->capacity) return 0;
    return 1;
}

static int preferred(const Search *s, int32_t a, int32_t b) {
    for (const int64_t *key = s->keys; key < s->keys + KEYS * s->n; key += s->n)
        if (key[a] != key[b]) return key[a] > key[b];
    return a < b;
}

/* Puts buffers that wait into the order of preference. */
static void sort(Search *s, int32_t *ids, int32_t n) {
    int64_t *crowded = s->keys + s->crowded * s->n;
    for (int32_t k = 0; k < n; k++) {
        const Buffer *b = s->buffers + ids[k];
        crowded[ids[k]] = 0;
        for (int32_t t = b->first; t <= b->last; t++)
            if (s->waiting[t] > crowded[ids[k]]) crowded[ids[k]] = s->waiting[t];
    }
    for (int32_t k = 1; k < n; k++) {
        int32_t id = ids[k], at = k;
        for (; at > 0 && preferred(s, id, ids[at - 1]); at--) ids[at] = ids[at - 1];
        ids[at] = id;
    }
}

/* Places the `n` buffers `ids`, which are in the order of preference. `least`: the offset of what was placed last; `after`: how many
 * of them were preferred to it: of buffers that can be placed at one offset in any order, one order is enough. */
static int solve(Search *s, const int32_t *ids, int32_t n, int64_t least, int32_t after) {
    if (n == 0) return PACKED;
    if (s->visits-- <= 0) return GAVE_UP;
    int32_t first = INT32_MAX, last = -1;
    int64_t lid = INT64_MAX; /* the lowest top that one of them can have */
    for (int32_t k = 0; k < n; k++) {
        const Buffer *b = s->buffers + ids[k];
        if (b->first < first) first = b->first;
        if (b->last > last) last = b->last;
        if (s->offset[ids[k]] + b->size < lid) lid = s->offset[ids[k]] + b->size;
    }
    if (!may_fit(s, ids, n, least, first, last)) return IMPOSSIBLE;
    int32_t *outer = s->pool, *order = outer, *rest = order + n, *part = rest + n, *inner = part + (last - first + 1);
    if (inner > s->pool_end) return GAVE_UP;
    int32_t candidates = 0;
    for (int32_t k = 0; k < n; k++) { /* the lowest first, then the preferred */
        int64_t offset = s->offset[ids[k]];
        if (offset < least || offset >= lid || (offset == least && k < after)) continue;
        int32_t at = candidates++;
        for (; at > 0 && s->offset[ids[order[at - 1]]] > offset; at--) order[at] = order[at - 1];
        order[at] = k;
    }
    int answer = IMPOSSIBLE;
    for (int32_t c = 0; c < candidates && answer == IMPOSSIBLE; c++) {
        int32_t id = ids[order[c]], crossing = 0, parts = 0;
        int64_t offset = s->offset[id], moves = s->moves;
        int in_the_way = place(s, id);
        for (int32_t t = 0; t <= last - first; t++) part[t] = 0;
        for (int32_t k = 0; k < n; k++)
            if (ids[k] != id) {
                part[s->buffers[ids[k]].first - first]++;
                part[s->buffers[ids[k]].last - first]--;
            }
        for (int32_t t = 0; t <= last - first; t++) {
            crossing += part[t]; /* how many are alive at t and at the next moment */
            part[t] = parts;
            parts += crossing == 0;
        }
        s->pool = inner;
        answer = PACKED;
        for (int32_t p = 0; p < parts && answer == PACKED; p++) {
            int32_t count = 0, before = 0;
            for (int32_t k = 0; k < n; k++) {
                if (k == order[c]) before = count;
                if (ids[k] != id && part[s->buffers[ids[k]].first - first] == p) rest[count++] = ids[k];
            }
            if (parts > 1) sort(s, rest, count), before = 0;
            answer = solve(s, rest, count, offset, before);
        }
        if (answer != PACKED) undo(s, moves);
        if (answer == IMPOSSIBLE && !in_the_way) break;
    }
    s->pool = outer;
    return answer;
}

/* Looks for offsets, in at most `visits` steps.
 *
 * keys: [KEYS, n], an order of preference, the most important first: buffers with the larger ones are placed first.
 * crowded: which of its rows is how many bytes wait at most while a buffer is alive: that row is written here.
 * moments: how many there are.
 * offset: out: of each buffer, if the answer is PACKED.
 * Returns PACKED, IMPOSSIBLE or GAVE_UP. */
int vfn_offsets(int32_t n, const Buffer *buffers, int64_t *keys, int32_t crowded, int32_t moments, int64_t capacity, int64_t visits,
                int64_t *offset) {
    int64_t pairs = 0, depth = 0;
    for (int32_t i = 0; i < n; i++)
        for (int32_t j = 0; j < n; j++) pairs += i != j && together(buffers + i, buffers + j);
    depth = (int64_t)n * (n + 1) + (int64_t)n * moments + 1; /* lists of n, n - 1, ... twice, and as many parts */
    Search s = {.buffers = buffers, .n = n, .crowded = crowded, .keys = keys, .capacity = capacity, .visits = visits, .offset = offset};
    s.row = malloc((n + 1) * sizeof *s.row);
    s.neighbours = malloc((pairs + 1) * sizeof *s.neighbours);
    s.moved = malloc((pairs + n + 1) * sizeof *s.moved);
    s.before = malloc((pairs + n + 1) * sizeof *s.before);
    s.lowest = malloc((moments + 1) * sizeof *s.lowest);
    s.waiting = calloc(moments + 1, sizeof *s.waiting);
    int32_t *pool = s.pool = malloc(depth * sizeof *pool), *ids = calloc(n + 1, sizeof *ids);
    int answer = GAVE_UP;
    if (s.row && s.neighbours && s.moved && s.before && s.lowest && s.waiting && pool && ids) {
        int32_t at = 0;
        s.pool_end = pool + depth;
        for (int32_t i = 0; i < n; i++) {
            s.row[i] = at;
            for (int32_t j = 0; j < n; j++)
                if (i != j && together(buffers + i, buffers + j)) s.neighbours[at++] = j;
            for (int32_t t = buffers[i].first; t <= buffers[i].last; t++) s.waiting[t] += buffers[i].size;
            ids[i] = i;
            offset[i] = 0;
        }
        s.row[n] = at;
        sort(&s, ids, n);
        answer = solve(&s, ids, n, 0, 0);
        for (int32_t i = 0; i < n; i++) offset[i] = offset[i] < 0 ? -1 - offset[i] : offset[i];
    }
    free(s.row), free(s.neighbours), free(s.moved), free(s.before), free(s.lowest), free(s.waiting), free(pool), free(ids);
    return answer;
}

/* Places buffers one after the other, in the order given, each into the tightest gap that takes it: quick, and rarely the best.
 *
 * scratch: 2 * n integers. Returns how high they lie. */
int64_t vfn_best_fit(int32_t n, const Buffer *buffers, int64_t *offset, int64_t *scratch) {
    int64_t height = 0;
    int32_t *by_offset = (int32_t *)scratch; /* of what is placed, who, the lowest first */
    for (int32_t i = 0; i < n; i++) {
        int64_t top = 0, best = -1, gap = INT64_MAX;
        for (int32_t k = 0; k < i; k++) {
            int32_t j = by_offset[k];
            if (!together(buffers + i, buffers + j)) continue;
            if (offset[j] - top >= buffers[i].size && offset[j] - top < gap) best = top, gap = offset[j] - top;
            if (offset[j] + buffers[j].size > top) top = offset[j] + buffers[j].size;
        }
        offset[i] = best >= 0 ? best : top;
        if (offset[i] + buffers[i].size > height) height = offset[i] + buffers[i].size;
        int32_t at = i;
        for (; at > 0 && offset[by_offset[at - 1]] > offset[i]; at--) by_offset[at] = by_offset[at - 1];
        by_offset[at] = i;
    }
    return height;
}
