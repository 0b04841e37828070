// Attention over paged slots on a CPU, by the visibility of docs/design.md, 2; the reference is kernels/tree_attention.py.
//
// A row's arithmetic depends only on what the row sees, in order of position: one dot product a slot, sums in a fixed
// order. So its bits are the same alone or in any company, and a node of a tree gets what the same text in a row would.

#include <math.h>
#include <stdint.h>

#define LANES 8
#define MAX_HEAD_SIZE 512

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t integers __attribute__((vector_size(4 * LANES), aligned(4)));

static inline float total(vector a) {
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

static inline float dot(const float *a, const float *b, long size) {
    vector even = {0}, odd = {0};
    long i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES) {
        even += *(const vector *)(a + i) * *(const vector *)(b + i);
        odd += *(const vector *)(a + i + LANES) * *(const vector *)(b + i + LANES);
    }
    if (i < size) even += *(const vector *)(a + i) * *(const vector *)(b + i);
    return total(even + odd);
}

// e^x for x <= 0, to about one unit in the last place; below -87 it is e^-87, which no sum of scores near 1 notices.
static inline vector exponential(vector x) {
    const vector lowest = {-87.0f, -87.0f, -87.0f, -87.0f, -87.0f, -87.0f, -87.0f, -87.0f};
    const integers below = x < lowest;
    x = (vector)((below & (integers)lowest) | (~below & (integers)x));
    const vector shifted = x * 1.44269504f + 12582912.0f; // adding 1.5 * 2^23 rounds to an integer
    const vector n = shifted - 12582912.0f;
    const vector r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    vector p = r * 1.38888889e-3f + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const integers power = (__builtin_convertvector(n, integers) + 127) << 23;
    return p * (vector)power;
}

// The slots that a row sees, in order of position. `blocks` is the sequence's table, of blocks of `size` slots; a window
// counts positions and 0 is none. Returns how many.
static long seen(const int32_t *blocks, long size, long prefix, uint64_t ancestors, long first, long window,
                 int64_t *slots) {
    const long position = prefix + __builtin_popcountll(ancestors) - 1;
    const long lowest = window && position - window + 1 > first ? position - window + 1 : first;
    long count = 0, place = prefix;
    for (long j = lowest; j < prefix;) {
        const long block = j / size, end = (block + 1) * size < prefix ? (block + 1) * size : prefix;
        const int64_t shift = (blocks[block] - block) * size;
        for (; j < end; j++) slots[count++] = j + shift;
    }
    for (; ancestors; ancestors &= ancestors - 1, place++)
        if (!window || place > position - window) {
            const long j = prefix + __builtin_ctzll(ancestors);
            slots[count++] = blocks[j / size] * (int64_t)size + j % size;
        }
    return count;
}

static void attend(const float *q, const float *keys, const float *values, const int64_t *slots, long count, long size,
                   float scale, float softcap, const float *sink, float *weights, float *out) {
    const long padded = (count + LANES - 1) / LANES * LANES;
    float highest = sink ? *sink : -INFINITY;
    for (long j = 0; j < count; j++) {
        float score = dot(q, keys + slots[j] * size, size) * scale;
        if (score - score != 0.0f) score = NAN; // infinity too: neither the softcap nor a weight of 0 may hide it
        if (softcap > 0.0f) score = tanhf(score / softcap) * softcap;
        weights[j] = score;
        if (score > highest || score != score) highest = score;
    }
    for (long j = count; j < padded; j++) weights[j] = highest;
    vector sums = {0};
    for (long j = 0; j < padded; j += LANES) {
        vector e = exponential(*(vector *)(weights + j) - highest);
        if (j + LANES > count)
            for (long lane = count - j; lane < LANES; lane++) e[lane] = 0.0f;
        *(vector *)(weights + j) = e;
        sums += e;
    }
    float sum = total(sums);
    if (sink) sum += expf(*sink - highest);
    vector mixed[MAX_HEAD_SIZE / LANES] = {{0}};
    for (long j = 0; j < count; j++) {
        const float *value = values + slots[j] * size;
        for (long i = 0; i < size / LANES; i++) mixed[i] += weights[j] * *(const vector *)(value + i * LANES);
    }
    for (long i = 0; i < size / LANES; i++) *(vector *)(out + i * LANES) = mixed[i] / sum;
}

// q, out [rows, heads, size]; keys, values [groups, stride / size, size]; blocks: all sequences' block tables end to end, row
// r's from starts[r]; sinks [heads] or NULL; scratch: `longest` + 8 int64 and as many floats a thread.
void tree_attention(const float *q, const float *keys, const float *values, float *out, const int32_t *blocks,
                    const int64_t *starts, const int64_t *prefix, const int64_t *ancestors, const float *sinks,
                    int64_t *slots, float *weights, long rows, long heads, long groups, long size, long stride,
                    long block_size, long longest, long first, long window, float scale, float softcap, int threads) {
    const long shared = heads / groups;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int thread = 0;
#ifdef _OPENMP
        extern int omp_get_thread_num(void);
        thread = omp_get_thread_num();
#endif
        int64_t *own_slots = slots + thread * (longest + LANES);
        float *own_weights = weights + thread * (longest + LANES);
#pragma omp for schedule(static)
        for (long task = 0; task < rows * groups; task++) {
            const long row = task / groups, group = task % groups;
            const long count = seen(blocks + starts[row], block_size, prefix[row], (uint64_t)ancestors[row], first, window,
                                    own_slots);
            for (long head = group * shared; head < (group + 1) * shared; head++)
                attend(q + (row * heads + head) * size, keys + group * stride, values + group * stride, own_slots, count,
                       size, scale, softcap, sinks ? sinks + head : 0, own_weights, out + (row * heads + head) * size);
        }
    }
}
