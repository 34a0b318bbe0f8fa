/* select.h: what the selecting kernels of a GPU get. */
#ifndef MOONSHARD_OPS_CUDA_SELECT_H
#define MOONSHARD_OPS_CUDA_SELECT_H

#include "exec/cuda/fault.h"
#include "ops/select.h"

/* Elements move as pieces of `size` bytes: 16 of them are several elements. */
typedef struct ms_cuda_gather_call {
    ms_select_args s;
    ms_cuda_fault *fault;
    int64_t count;
    int32_t size;
} ms_cuda_gather_call;

/* A thread takes the indices of one column that are `i` modulo `shares`, a power of two. */
typedef struct ms_cuda_scatter_call {
    ms_select_args s;
    ms_cuda_fault *fault;
    int64_t columns, shares;
    int32_t size; /* of an element */
    bool add;
} ms_cuda_scatter_call;

/* Where the search for the last of the `left` best elements of a row has got to. Elements are
 * ordered by their key, and by their distance from the end among equal keys. Digits below those
 * that are known are 0, so in the end all elements from here on are the best ones. */
typedef struct ms_cuda_search {
    uint64_t key, distance;
    int64_t left;
    uint32_t done, collected;
    uint64_t counts[256]; /* of each digit */
} ms_cuda_search;

/* One element that may be chosen. */
typedef struct ms_cuda_candidate {
    uint64_t key;
    int64_t position;
} ms_cuda_candidate;

/* The search of `rows.n` elements in each of so many rows, from `first` on. */
typedef struct ms_cuda_search_call {
    ms_rows rows;
    const void *in;
    ms_cuda_search *searches; /* one a row */
    int64_t first, count, k;
    int64_t ranks[3]; /* of quantile: how many are wanted of its three rows */
    int32_t bits, shift;
    uint8_t dtype;
    bool largest;
    bool of_distance; /* the digit is one of the distance */
    bool exact;       /* all digits of the key are wanted */
} ms_cuda_search_call;

/* Candidates of a row are sorted in shared memory where they are few, else in `candidates`, of
 * search.k a row. */
typedef struct ms_cuda_topk_call {
    ms_cuda_search_call search;
    void *values;
    int64_t *indices;
    ms_cuda_candidate *candidates;
} ms_cuda_topk_call;

typedef struct ms_cuda_quantile_call {
    const ms_cuda_search *searches;
    void *out;
    double share; /* of the upper neighbour */
    uint8_t dtype;
} ms_cuda_quantile_call;

/* counts: how many elements of each part are above. */
typedef struct ms_cuda_above_call {
    ms_above_args a;
    int64_t *counts;
    int64_t parts, part;
} ms_cuda_above_call;

/* Rows of so many elements are sorted as a whole, and so many candidates in shared memory. */
enum { MS_CUDA_SORTED_MOST = 2048 };
#define MS_CUDA_ABOVE_TILE (8 * 256)

#endif
