/* state.h: what the tensor layer keeps on an engine, and the tensor itself. For tensor/, ops/,
 * grad/ and fsdp/ only.
 *
 * A tensor's meta object belongs to the layer above (the tape): it is released with free_meta when
 * the tensor goes. */
#ifndef MOONSHARD_TENSOR_STATE_H
#define MOONSHARD_TENSOR_STATE_H

#include "base/assert.h"
#include "moonshard/tensor.h"

/* A window on a storage: which element comes first, and how many elements are between neighbours of
 * each dimension. Several tensors may share a storage; each holds a reference to it. count,
 * contiguous and extent follow from shape and strides (derive in tensor.c) and are kept because
 * every operator asks for them. Strides are never negative; a stride of 0 repeats elements. The
 * shape and the dtype change only in ms_tensor_reshape_onto; storage, offset and strides in
 * ms_tensor_rebase, too. Host thread only: tasks get addresses, never a tensor. */
struct ms_tensor {
    ms_engine *engine;
    ms_storage *storage; /* retained */
    uint32_t references;
    ms_dtype dtype;
    uint32_t dims;
    bool contiguous;
    int64_t count, offset; /* elements */
    /* Elements of the storage from the first to the last, both included; 0 if there are none. */
    int64_t extent;
    int64_t shape[MS_DIMS_MAX], strides[MS_DIMS_MAX];
    uint64_t made_version; /* of its memory when this window, or its history, was made */
    struct ms_part *part;  /* part.h: what it is a part of, or NULL */
    void *meta;            /* the tape's, or NULL */
    void (*free_meta)(void *meta);
    ms_tensor *cast;       /* this weight in the autocast dtype, kept for the step */
    uint64_t cast_version; /* of its memory when it was cast */
    /* A dtype of 16 bits: it has been cast to it, so whoever steps it makes the next cast as well.
     * MS_F32: it has not. */
    ms_dtype cast_wish;
    bool cast_is_new;      /* the cast was made with a step, and nothing has used it yet */
    ms_tensor *next_cast;  /* list of tensors that hold a cast; or the free list */
    ms_tensor *most;       /* see ms_tensor_hold_most; or NULL */
    uint64_t most_version; /* of its memory when that was found */
};

/* The bytes [begin, end) of the storage from the tensor's first element to its last; begin == end
 * if it has none. */
static inline void ms_tensor_span(const ms_tensor *tensor, size_t *begin, size_t *end)
{
    size_t item = ms_dtype_bytes(tensor->dtype);
    *begin = (size_t)tensor->offset * item;
    *end = *begin + (size_t)tensor->extent * item;
}

typedef struct ms_tensor_state ms_tensor_state;

/* A host buffer that a task still reads or writes, and the point after which it may be freed. When
 * that happens depends on how far the device is; nothing else may depend on it. */
typedef struct ms_staged {
    ms_point point;
    void *buffer;
} ms_staged;

/* What a cast was computed from, kept with the cast's storage, so that it can be computed again
 * even when the tensors are gone and only the tape still holds the storage. Both are copies without
 * references: the storages are kept by the tie between them (ms_storage_derive). */
typedef struct ms_cast_origin {
    struct ms_cast_origin *next; /* unused ones */
    ms_tensor_state *state;
    ms_tensor weight, cast;
} ms_cast_origin;

/* The layer's state of an engine (MS_SLOT_TENSOR). Tensors and origins come from chunks and go back
 * to free lists, as a step makes as many as the step before. */
struct ms_tensor_state {
    ms_tensor *unused;
    void **chunks;
    size_t chunk_count, chunk_capacity;
    ms_tensor *casts; /* tensors that hold a cast of themselves */
    ms_dtype autocast;
    ms_fp8 fp8;
    bool fast_attention;
    bool notes_initial; /* see ms_engine_note_initial */
    ms_staged *staged;
    /* readbacks: those that exist. `staged` has room for each of them, as ms_readback_free cannot
     * fail. */
    size_t staged_count, staged_capacity, readbacks;
    ms_cast_origin *unused_origins;
    bool meta;                     /* new tensors are on "meta" */
    bool metas;                    /* some tensor has been */
    struct ms_kept_products *kept; /* products.h; NULL: products are made */
    /* What is written in `restored` is computed from `source` now: see ms_tensor_restoring. */
    const ms_tensor *restored, *source;
};

#endif
