/* Paged tree attention on CPU; reference.py is the definition, layout.py says where a row's keys lie.
 *
 * Every (row, kv head) is computed alone: its keys in order of position, in blocks of 64 aligned to position, by an
 * online softmax. So a row's result is bitwise the same whatever else is in the batch and however many threads there
 * are. A task takes a few rows through the same blocks in turn, only so that they find keys and values in the cache.
 *
 * Vectors are GCC's, eight floats each; the compiler makes of them what the machine has. Not for -ffast-math: exp8
 * rounds by adding and taking away a large number.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>

enum { BLOCK = 64, MOST_ROWS = 16, LANES = 8 };

typedef float v8 __attribute__((vector_size(32)));
typedef float v8_in_memory __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t v8i __attribute__((vector_size(32)));

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (v8i){__VA_ARGS__})
#endif

/* One query head's online softmax: of a block, and of all blocks so far. */
typedef struct {
    union { v8 vector[BLOCK / LANES]; float at[BLOCK]; } scores;
    v8 shrink; /* what earlier blocks are to be multiplied with, in all lanes */
    v8 total;  /* of the weights; lanes to be added up at the end */
    float largest;
} Head;

ALWAYS_INLINE v8 load(const float *p) { return *(const v8_in_memory *)p; }

ALWAYS_INLINE v8 all(float x) { return (v8){x, x, x, x, x, x, x, x}; }

ALWAYS_INLINE float add_lanes(v8 x) { return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])); }

ALWAYS_INLINE v8 max8(v8 a, v8 b) {
    v8i above = a > b;
    return (v8)(((v8i)a & above) | ((v8i)b & ~above));
}

/* e^x for x <= 0 within a unit in the last place, 0 below -87; Cephes' polynomial after range reduction. */
ALWAYS_INLINE v8 exp8(v8 x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: what is added to it is rounded to an integer in the low bits */
    v8 shifted = x * 1.44269504f + magic, n = shifted - magic;
    v8 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    v8 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    v8 power = (v8)(((v8i)shifted << 23) + 0x3f800000);
    return (v8)((v8i)(p * power) & ~(x < -87.0f));
}

/* Offsets of the keys at positions first..end-1; a multiple of LANES of them, the last one repeated. */
static void find_keys(size_t *offsets, int first, int end, int start, const int32_t *pages, const int32_t *path,
                      int page_size, size_t stride) {
    size_t *at = offsets;
    int position = first;
    while (position < end && position < start) {
        int within = position % page_size;
        size_t slot = (size_t)pages[position / page_size] * page_size + within;
        for (; within < page_size && position < end && position < start; within++, position++) *at++ = slot++ * stride;
    }
    for (; position < end; position++) *at++ = (size_t)path[position - start] * stride;
    for (; (at - offsets) % LANES; at++) *at = at[-1];
}

/* The scores of eight keys. */
ALWAYS_INLINE v8 dot8(const v8 *query, const float *keys, const size_t *offsets, int vectors) {
    v8 sum[LANES] = {0};
    for (int d = 0; d < vectors; d++)
        for (int i = 0; i < LANES; i++) sum[i] += query[d] * load(keys + offsets[i] + d * LANES);
    v8 pairs[4], fours[2];
    for (int i = 0; i < 4; i++)
        pairs[i] = SHUFFLE(sum[2 * i], sum[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13) +
                   SHUFFLE(sum[2 * i], sum[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    for (int i = 0; i < 2; i++)
        fours[i] = SHUFFLE(pairs[2 * i], pairs[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                   SHUFFLE(pairs[2 * i], pairs[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return SHUFFLE(fours[0], fours[1], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(fours[0], fours[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

/* The softmax over a block of up to BLOCK scores: turns them into weights, the missing ones into 0. */
ALWAYS_INLINE void add_scores(Head *head, int n) {
    int full = (n + LANES - 1) / LANES;
    for (int i = n; i < full * LANES; i++) head->scores.at[i] = -INFINITY;
    v8 most = head->scores.vector[0];
    for (int i = 1; i < full; i++) most = max8(most, head->scores.vector[i]);
    float largest = head->largest;
    for (int i = 0; i < LANES; i++) largest = largest > most[i] ? largest : most[i];
    head->shrink = exp8(all(head->largest - largest));
    head->largest = largest;
    head->total *= head->shrink;
    for (int i = 0; i < full; i++) head->total += head->scores.vector[i] = exp8(head->scores.vector[i] - largest);
}

/* Adds the weighted sum of n values, for `width` vectors of each head; width is a constant, so that they stay in
 * registers. */
ALWAYS_INLINE void add_values(v8 *mixed, const Head *heads, int group, int vectors, const float *values,
                              const size_t *offsets, int n, const int width) {
    for (int g = 0; g < group; g++, mixed += vectors) {
        v8 sum[8];
        for (int d = 0; d < width; d++) sum[d] = mixed[d] * heads[g].shrink;
        for (int i = 0; i < n; i++)
            for (int d = 0; d < width; d++)
                sum[d] += heads[g].scores.at[i] * load(values + offsets[i] + d * LANES);
        for (int d = 0; d < width; d++) mixed[d] = sum[d];
    }
}

/* Takes a group of query heads over n keys, BLOCK at most. Heads take turns at a few keys, and at a few columns of the
 * values, so that these stay in the first-level cache. */
static void add_block(const v8 *query, v8 *mixed, Head *heads, int group, int vectors, const float *keys,
                      const float *values, const size_t *offsets, int n) {
    for (int i = 0; i * LANES < n; i++)
        for (int g = 0; g < group; g++)
            heads[g].scores.vector[i] = dot8(query + g * vectors, keys, offsets + i * LANES, vectors);
    for (int g = 0; g < group; g++) add_scores(&heads[g], n);
    int d = 0;
#define ADD_COLUMNS(width) \
    add_values(mixed + d, heads, group, vectors, values + d * LANES, offsets, n, width), d += width
    while (vectors - d >= 8) ADD_COLUMNS(8);
    if (vectors - d >= 4) ADD_COLUMNS(4);
    if (vectors - d >= 2) ADD_COLUMNS(2);
    if (vectors - d >= 1) ADD_COLUMNS(1);
}

/* Queries and out are [rows, kv_heads, group, head_dim], keys and values [slots, kv_heads, head_dim]; the rest is
 * RowLayout's. Rows of queries lie query_stride floats apart. window <= 0: none. */
void attend(float *out, const float *queries, const float *keys, const float *values, const int64_t *positions,
            const int32_t *starts, const int32_t *page_offsets, const int32_t *path_offsets, const int32_t *pages,
            const int32_t *paths, int rows, int kv_heads, int group, int head_dim, int64_t query_stride, int page_size,
            int window, float scale, int threads) {
    int vectors = head_dim / LANES, tile = rows * kv_heads / (4 * threads); /* leaves tasks to share out evenly */
    tile = tile < 1 ? 1 : tile > MOST_ROWS ? MOST_ROWS : tile;
    int tiles = (rows + tile - 1) / tile;
    size_t stride = (size_t)kv_heads * head_dim;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int task = 0; task < tiles * kv_heads; task++) {
        int head = task % kv_heads, row = task / kv_heads * tile, count = rows - row < tile ? rows - row : tile;
        v8 query[count][group][vectors], mixed[count][group][vectors];
        Head heads[count][group];
        int first[count], end[count], begin = INT32_MAX, stop = 0;
        for (int r = 0; r < count; r++) {
            const float *from = queries + (row + r) * query_stride + (size_t)head * group * head_dim;
            for (int i = 0; i < group * vectors; i++) query[r][0][i] = load(from + i * LANES) * scale;
            for (int i = 0; i < group * vectors; i++) mixed[r][0][i] = all(0);
            for (int g = 0; g < group; g++) heads[r][g].total = all(0), heads[r][g].largest = -INFINITY;
            end[r] = (int)positions[row + r] + 1;
            first[r] = window > 0 && end[r] > window ? end[r] - window : 0;
            begin = first[r] < begin ? first[r] : begin;
            stop = end[r] > stop ? end[r] : stop;
        }
        for (int block = begin / BLOCK * BLOCK; block < stop; block += BLOCK)
            for (int r = 0; r < count; r++) {
                size_t offsets[BLOCK];
                int low = first[r] > block ? first[r] : block;
                int n = (end[r] < block + BLOCK ? end[r] : block + BLOCK) - low;
                if (n <= 0) continue;
                find_keys(offsets, low, low + n, starts[row + r], pages + page_offsets[row + r],
                          paths + path_offsets[row + r], page_size, stride);
                add_block(query[r][0], mixed[r][0], heads[r], group, vectors, keys + (size_t)head * head_dim,
                          values + (size_t)head * head_dim, offsets, n);
            }
        for (int r = 0; r < count; r++)
            for (int g = 0; g < group; g++) {
                float *to = out + (row + r) * stride * group + ((size_t)head * group + g) * head_dim;
                float total = add_lanes(heads[r][g].total);
                for (int d = 0; d < vectors; d++) *(v8_in_memory *)(to + d * LANES) = mixed[r][g][d] / total;
            }
    }
}
