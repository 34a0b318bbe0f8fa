/* dataset.h: the inside of data sets, for their readers and the loader. */
#ifndef MOONSHARD_IO_DATASET_H
#define MOONSHARD_IO_DATASET_H

#include <stdatomic.h>

#include "io/path.h"

/* The memory that data sets share. It is filled by one thread before the first data set refers to
 * it, and is constant from then on, so readers need no lock. Only `references` changes. */
typedef struct ms_data {
    ms_context context; /* for releasing it, on whichever thread that happens */
    atomic_uint references;
    uint8_t *samples; /* tokens of `width` bytes, or images of rows * columns bytes */
    uint8_t *labels;  /* of images; NULL: tokens */
    /* A bit a token, from the lowest of each byte on: 1 means that it is a target. NULL: all are.
     */
    uint8_t *masks;
    size_t capacity, mask_capacity; /* bytes of samples and masks, while they are collected */
    uint64_t count;                 /* tokens or images */
    uint32_t width, rows, columns;
    ms_bare_shards bare;
} ms_data;

/* A range of data. A split makes two of them without a copy. Each holds one reference to its
 * data. */
struct ms_dataset {
    ms_data *data;
    atomic_uint references;
    uint64_t first, count; /* which part of data this is */
};

/* Empty data with one reference. */
ms_status ms_data_new(ms_context *context, ms_data **out);
void ms_data_release(ms_data *data);
/* Takes the data over if it succeeds. */
ms_status ms_dataset_of(ms_context *context, ms_data *data, ms_dataset **out);

#endif
