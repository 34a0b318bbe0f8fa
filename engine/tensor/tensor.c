/* tensor.c: tensors as windows on storages, and the cast that a tensor keeps of itself.
 *
 * A tensor costs one struct from a free list and a reference to a storage; views and aliases are as
 * cheap as that, so operators make them freely. What a window may reach is checked in one place,
 * ms_tensor_window. */
#include "tensor/tensor.h"

#include <stdio.h>
#include <string.h>

#include "tensor/op.h"
#include "tensor/part.h"

/* Tensors that are allocated at once. */
#define MS_TENSOR_CHUNK 128

/* -------------------------------------------------------- the layer's state */

/* Called when the engine goes. Casts hold references to storages, so they are dropped first. Chunks
 * hold tensors and origins alike, so one loop frees both. The device has finished by now, and
 * staged buffers are no longer read. */
static void state_free(ms_engine *engine, void *object)
{
    ms_tensor_state *state = object;
    ms_context *context = ms_engine_context(engine);
    /* Each call takes the head off the list. */
    while (state->casts) ms_tensor_drop_cast(state->casts);
    for (size_t i = 0; i < state->staged_count; i++)
        ms_host_memory_free(engine, state->staged[i].buffer);
    for (size_t i = 0; i < state->chunk_count; i++) ms_release(context, state->chunks[i]);
    ms_release(context, state->staged);
    ms_release(context, state->chunks);
    ms_release(context, state);
}

/* Made at first use, so an engine without tensors pays nothing. Callers that only read it take
 * ms_engine_get, and NULL for an answer. */
ms_status ms_tensor_state_of(ms_engine *engine, ms_tensor_state **out)
{
    ms_tensor_state *state = ms_engine_get(engine, MS_SLOT_TENSOR);
    if (!state) {
        void *memory = NULL;
        ms_status status =
            ms_allocate(ms_engine_context(engine), sizeof *state, "tensors", &memory);
        if (status) return status;
        state = memory;
        ms_engine_set(engine, MS_SLOT_TENSOR, state, state_free);
    }
    *out = state;
    return MS_OK;
}

/* A tensor of zeros with one reference. Free structs are chained by next_cast. A step makes and
 * frees as many tensors as the step before, so it allocates nothing here after the first one. */
static ms_status struct_take(ms_engine *engine, ms_tensor **out)
{
    ms_tensor_state *state = NULL;
    ms_status status = ms_tensor_state_of(engine, &state);
    if (status) return status;
    if (!state->unused) {
        ms_context *context = ms_engine_context(engine);
        void *chunk = NULL;
        status = ms_grow(context, (void **)&state->chunks, &state->chunk_capacity,
                         state->chunk_count + 1, sizeof *state->chunks);
        if (!status)
            status = ms_allocate(context, MS_TENSOR_CHUNK * sizeof(ms_tensor), "tensors", &chunk);
        if (status) return status;
        state->chunks[state->chunk_count++] = chunk;
        /* From the end, so that tensors are taken in the order of addresses. */
        for (int i = MS_TENSOR_CHUNK - 1; i >= 0; i--) {
            ms_tensor *unused = (ms_tensor *)chunk + i;
            unused->next_cast = state->unused;
            state->unused = unused;
        }
    }
    *out = state->unused;
    state->unused = (*out)->next_cast;
    /* Structs come back from the list with the values of their last tensor. */
    memset(*out, 0, sizeof **out);
    (*out)->engine = engine;
    (*out)->references = 1;
    return MS_OK;
}

/* The chunk is kept until the engine goes, so this cannot fail. */
static void struct_give(ms_tensor *tensor)
{
    ms_tensor_state *state = ms_engine_get(tensor->engine, MS_SLOT_TENSOR);
    tensor->next_cast = state->unused;
    state->unused = tensor;
}

/* ------------------------------------------------------- making and freeing */

/* Fills in what follows from shape and strides. Dimensions of size 1 are never walked, so their
 * strides do not count; a tensor without elements is contiguous whatever its strides. Kernels
 * choose their path by `contiguous`, and hazards are found by `extent`: it covers the gaps between
 * the elements as well. */
static void derive(ms_tensor *tensor)
{
    tensor->count = ms_shape_count(tensor->dims, tensor->shape);
    int64_t expected = 1, last = 0;
    tensor->contiguous = true;
    for (int d = (int)tensor->dims - 1; d >= 0; d--) {
        if (tensor->shape[d] != 1 && tensor->strides[d] != expected) tensor->contiguous = false;
        expected *= tensor->shape[d];
        if (tensor->shape[d] > 0) last += (tensor->shape[d] - 1) * tensor->strides[d];
    }
    if (tensor->count == 0) tensor->contiguous = true;
    tensor->extent = tensor->count ? last + 1 : 0;
}

/* Row-major. A size of 0 counts as 1, so that all strides stay above 0. Strides above 0 keep apart
 * a repeated dimension (0) and an empty one. */
static void natural_strides(uint32_t dims, const int64_t *shape, int64_t *strides)
{
    int64_t stride = 1;
    for (int d = (int)dims - 1; d >= 0; d--) {
        strides[d] = stride;
        stride *= shape[d] > 1 ? shape[d] : 1;
    }
}

/* Checks a new tensor's shape; *out: its bytes, 0 if a size is 0. The product of the other sizes
 * must not overflow either: count and strides are computed from them. Messages count dimensions
 * from 1. */
static ms_status shape_bytes(ms_engine *engine, ms_dtype dtype, uint32_t dims, const int64_t *shape,
                             size_t *out)
{
    if (dims > MS_DIMS_MAX)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "a tensor has at most %d dimensions, not %u", MS_DIMS_MAX, dims);
    size_t bytes = ms_dtype_bytes(dtype);
    bool empty = false, overflow = false;
    for (uint32_t d = 0; d < dims; d++) {
        if (shape[d] < 0)
            return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                  "dimension %u of a tensor cannot be %lld", d + 1,
                                  (long long)shape[d]);
        empty |= shape[d] == 0;
        /* A size of 0 is left out of the product, so that it cannot hide an overflow of the
         * others. */
        overflow |= shape[d] > 0
                    && (!ms_multiply(bytes, (size_t)shape[d], &bytes) || bytes > (size_t)INT64_MAX);
    }
    if (overflow)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "a tensor of this shape has more bytes than 63 bits can count");
    *out = empty ? 0 : bytes;
    return MS_OK;
}

/* A tensor on a storage that exists already. The check of its room is that of a window on a tensor
 * without dimensions that begins at the storage's first byte; that tensor lives on the stack only.
 * The storage is retained by the window. */
ms_status ms_tensor_on(ms_storage *storage, ms_dtype dtype, uint32_t dims, const int64_t *shape,
                       ms_tensor **out)
{
    ms_tensor whole = { .engine = ms_storage_engine(storage), .storage = storage, .dtype = dtype };
    int64_t strides[MS_DIMS_MAX];
    size_t bytes = 0;
    ms_status status = shape_bytes(whole.engine, dtype, dims, shape, &bytes);
    if (status) return status;
    natural_strides(dims, shape, strides);
    return ms_tensor_window(&whole, dims, shape, strides, 0, out);
}

/* As ms_engine_set_meta. */
bool ms_engine_note_initial(ms_engine *engine, bool on)
{
    ms_tensor_state *state = NULL;
    if (ms_tensor_state_of(engine, &state)) return false;
    bool before = state->notes_initial;
    state->notes_initial = on;
    return before;
}

/* Returns what it was, for callers to put back; a state that cannot be made for want of memory
 * stays off. */
bool ms_engine_set_meta(ms_engine *engine, bool on)
{
    ms_tensor_state *state = NULL;
    if (ms_tensor_state_of(engine, &state)) return false;
    bool before = state->meta;
    state->meta = on;
    return before;
}

/* An engine without tensors has no state yet, and makes tensors with memory. */
bool ms_engine_makes_meta(const ms_engine *engine)
{
    const ms_tensor_state *state = ms_engine_get(engine, MS_SLOT_TENSOR);
    return state && state->meta;
}

bool ms_tensor_is_meta(const ms_tensor *tensor) { return ms_storage_is_meta(tensor->storage); }

/* The struct comes first: it is given back if the pool has no memory. The memory is the current
 * stream's: it is ready for tasks of that stream at once, and holds anything. */
ms_status ms_tensor_new(ms_engine *engine, ms_dtype dtype, uint32_t dims, const int64_t *shape,
                        ms_tensor **out)
{
    size_t bytes = 0;
    ms_status status = shape_bytes(engine, dtype, dims, shape, &bytes);
    if (status) return status;
    ms_tensor *tensor = NULL;
    status = struct_take(engine, &tensor);
    if (status) return status;
    ms_tensor_state *state = ms_engine_get(engine, MS_SLOT_TENSOR);
    status = state->meta ? ms_storage_new_meta(engine, bytes, &tensor->storage)
                         : ms_storage_new(ms_engine_current(engine), bytes, &tensor->storage);
    state->metas |= state->meta;
    if (status) {
        struct_give(tensor);
        return status;
    }
    tensor->dtype = dtype;
    tensor->dims = dims;
    if (dims) memcpy(tensor->shape, shape, dims * sizeof *shape);
    natural_strides(dims, shape, tensor->strides);
    derive(tensor);
    *out = tensor;
    return MS_OK;
}

/* The list is searched from its head. It is short: it holds the weights of a step, and casts that
 * tasks wrote along with their results. */
void ms_tensor_drop_cast(ms_tensor *tensor)
{
    ms_tensor_state *state = ms_engine_get(tensor->engine, MS_SLOT_TENSOR);
    /* `link` is the pointer that leads to the tensor, so its removal needs no case for the head. */
    ms_tensor **link = &state->casts;
    while (*link && *link != tensor) link = &(*link)->next_cast;
    if (*link) *link = tensor->next_cast;
    ms_tensor *cast = tensor->cast;
    tensor->cast = NULL;
    ms_tensor_release(cast);
}

/* The cast is valid as long as the tensor's memory has the version that it has now. The tensor is
 * not retained: when it goes, it takes itself off the list (ms_tensor_release). */
void ms_tensor_hold_cast(ms_tensor *tensor, ms_tensor *cast)
{
    ms_tensor_state *state = ms_engine_get(tensor->engine, MS_SLOT_TENSOR);
    if (tensor->cast) ms_tensor_drop_cast(tensor);
    tensor->cast = ms_tensor_retain(cast);
    tensor->cast_is_new = false;
    tensor->cast_version = ms_tensor_version(tensor);
    tensor->next_cast = state->casts;
    state->casts = tensor;
}

/* Gives a window of a tensor that has a valid cast the same window of the cast. Without it, the
 * parts of one weight (queries, keys and values in one matrix) would be cast again, each for
 * itself. The cast must have the base's order in memory, as the window's strides apply to both. A
 * cast with another version than the base's is out of date and is left alone: ms_tensor_cast_cached
 * drops it. */
static ms_status inherit_cast(ms_tensor *base, int64_t offset, ms_tensor *window)
{
    ms_tensor *cast = base->cast, *part = NULL;
    base->cast_is_new = false;
    /* Out of date, or in another order of memory: the window is cast for itself when a product
     * needs it. */
    if (!cast || base->cast_version != ms_tensor_version(base)
        || memcmp(cast->strides, base->strides, base->dims * sizeof *base->strides) != 0)
        return MS_OK;
    ms_status status = ms_tensor_window(cast, window->dims, window->shape, window->strides,
                                        window->count == 0 ? 0 : offset, &part);
    if (status) return status;
    ms_tensor_hold_cast(window, part);
    ms_tensor_release(part);
    return MS_OK;
}

/* It is not tied to anything: the version says whether it still holds. */
void ms_tensor_hold_most(ms_tensor *tensor, ms_tensor *most)
{
    ms_tensor_retain(most);
    ms_tensor_drop_most(tensor);
    tensor->most = most;
    tensor->most_version = ms_tensor_version(tensor);
}

void ms_tensor_drop_most(ms_tensor *tensor)
{
    ms_tensor_release(tensor->most);
    tensor->most = NULL;
}

ms_tensor *ms_tensor_most(ms_tensor *tensor)
{
    if (tensor->most && tensor->most_version != ms_tensor_version(tensor))
        ms_tensor_drop_most(tensor);
    return tensor->most;
}

/* A view in another shape, such as the rows of a matrix, has the same greatest size. */
static void inherit_most(ms_tensor *base, ms_tensor *window)
{
    bool is_whole = base->contiguous && window->contiguous && window->count == base->count
                    && window->offset == base->offset;
    if (is_whole && ms_tensor_most(base)) ms_tensor_hold_most(window, base->most);
}

/* offset counts from the base's first element. The window must be in the storage; it may be larger
 * than the base. An empty window keeps the base's offset, so that it never points past the end.
 * made_version is that of its memory now: the tape compares it with later versions. */
ms_status ms_tensor_window(ms_tensor *base, uint32_t dims, const int64_t *shape,
                           const int64_t *strides, int64_t offset, ms_tensor **out)
{
    ms_engine *engine = base->engine;
    if (dims > MS_DIMS_MAX)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "a tensor has at most %d dimensions, not %u", MS_DIMS_MAX, dims);
    /* Strides of 0 let a small memory have more elements than can be counted. */
    size_t bytes = 0;
    ms_status status = shape_bytes(engine, base->dtype, dims, shape, &bytes);
    if (status) return status;
    int64_t last = 0,
            room = (int64_t)(ms_storage_bytes(base->storage) / ms_dtype_bytes(base->dtype));
    bool inside = offset >= 0, empty = bytes == 0;
    for (uint32_t d = 0; d < dims && inside; d++) {
        int64_t reach = 0;
        inside = strides[d] >= 0;
        if (inside && shape[d] > 1)
            inside = !__builtin_mul_overflow(shape[d] - 1, strides[d], &reach)
                     && !__builtin_add_overflow(last, reach, &last);
    }
    inside = inside
             && (empty ? offset <= INT64_MAX - base->offset
                       : (last < room && offset < room && base->offset + offset + last < room));
    if (!inside)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "a view reaches outside its tensor's memory");
    ms_tensor *tensor = NULL;
    status = struct_take(engine, &tensor);
    if (status) return status;
    tensor->storage = ms_storage_retain(base->storage);
    tensor->dtype = base->dtype;
    tensor->dims = dims;
    tensor->offset = base->offset + (empty ? 0 : offset);
    if (dims) {
        memcpy(tensor->shape, shape, dims * sizeof *shape);
        memcpy(tensor->strides, strides, dims * sizeof *strides);
    }
    derive(tensor);
    tensor->made_version = ms_tensor_version(tensor);
    if (base->most) inherit_most(base, tensor);
    status = inherit_cast(base, offset, tensor);
    if (status) ms_tensor_release(tensor);
    else *out = tensor;
    return status;
}

/* The tensor's cast is of the old memory, so it goes. Natural strides: the part is filled in
 * row-major order. Nothing is allocated, so it cannot fail. Gradient history that points at the old
 * memory is the caller's concern. */
void ms_tensor_rebase(ms_tensor *tensor, ms_tensor *base, int64_t offset)
{
    ms_storage *before = tensor->storage;
    if (tensor->cast) ms_tensor_drop_cast(tensor);
    ms_tensor_drop_most(tensor);
    tensor->storage = ms_storage_retain(base->storage);
    tensor->offset = base->offset + offset;
    natural_strides(tensor->dims, tensor->shape, tensor->strides);
    derive(tensor);
    tensor->made_version = ms_tensor_version(tensor);
    ms_storage_release(before);
}

void ms_tensor_reshape_onto(ms_tensor *tensor, ms_tensor *base, int64_t offset, uint32_t dims,
                            const int64_t *shape)
{
    MS_ASSERT(dims <= MS_DIMS_MAX);
    tensor->dtype = base->dtype;
    tensor->dims = dims;
    memcpy(tensor->shape, shape, dims * sizeof *shape);
    ms_tensor_rebase(tensor, base, offset);
}

/* A new window on the same elements, without history: operators save aliases, so that a node does
 * not hold itself. It shares the storage, so it keeps the memory alive and sees later writes; the
 * version says whether there were any. */
ms_status ms_tensor_alias(ms_tensor *tensor, ms_tensor **out)
{
    ms_status status =
        ms_tensor_window(tensor, tensor->dims, tensor->shape, tensor->strides, 0, out);
    if (!status && tensor->part) ms_tensor_set_part(*out, tensor->part);
    return status;
}

/* A plain counter: tensors belong to the host thread. */
ms_tensor *ms_tensor_retain(ms_tensor *tensor)
{
    MS_ASSERT(tensor->references > 0);
    tensor->references++;
    return tensor;
}

/* NULL is allowed, so that exits release what they may not have made. The storage's memory is
 * reused in stream order: tasks that are still enqueued may go on reading it. */
void ms_tensor_release(ms_tensor *tensor)
{
    MS_ASSERT(!tensor || tensor->references > 0);
    if (!tensor || --tensor->references > 0) return;
    /* The list of casts must not hold a tensor that is gone. */
    if (tensor->cast) ms_tensor_drop_cast(tensor);
    ms_tensor_drop_most(tensor);
    if (tensor->meta) tensor->free_meta(tensor->meta);
    ms_part_release(tensor->part);
    ms_storage_release(tensor->storage);
    struct_give(tensor);
}

/* ------------------------------------------------------------------ reading */

ms_engine *ms_tensor_engine(const ms_tensor *tensor) { return tensor->engine; }
ms_dtype ms_tensor_dtype(const ms_tensor *tensor) { return tensor->dtype; }
uint32_t ms_tensor_dims(const ms_tensor *tensor) { return tensor->dims; }
const int64_t *ms_tensor_shape(const ms_tensor *tensor) { return tensor->shape; }
const int64_t *ms_tensor_strides(const ms_tensor *tensor) { return tensor->strides; }
int64_t ms_tensor_count(const ms_tensor *tensor) { return tensor->count; }
/* The bytes of its elements, which is more than its memory where it is expanded and less than its
 * extent where it has gaps. */
size_t ms_tensor_bytes(const ms_tensor *tensor)
{
    return (size_t)tensor->count * ms_dtype_bytes(tensor->dtype);
}
bool ms_tensor_is_contiguous(const ms_tensor *tensor) { return tensor->contiguous; }
ms_storage *ms_tensor_storage(const ms_tensor *tensor) { return tensor->storage; }
int64_t ms_tensor_offset(const ms_tensor *tensor) { return tensor->offset; }

/* An address is right until the storage is dropped; tasks get it when they are enqueued. */
void *ms_tensor_data(const ms_tensor *tensor)
{
    return (char *)ms_storage_data(tensor->storage)
           + (size_t)tensor->offset * ms_dtype_bytes(tensor->dtype);
}

/* The version of the parts that the tensor touches: see ms_storage_version. */
uint64_t ms_tensor_version(const ms_tensor *tensor)
{
    size_t begin, end;
    ms_tensor_span(tensor, &begin, &end);
    return ms_storage_version(tensor->storage, begin, end);
}

/* The form of messages: "[2, 3] f32". Cuts off what does not fit. */
const char *ms_tensor_describe(const ms_tensor *tensor, char *text, size_t bytes)
{
    size_t used = 0;
    for (uint32_t d = 0; d < tensor->dims && used < bytes; d++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%lld", d ? ", " : "[",
                                 (long long)tensor->shape[d]);
    if (used < bytes)
        snprintf(text + used, bytes - used, "%s %s", tensor->dims ? "]" : "[]",
                 ms_dtype_name(tensor->dtype));
    return text;
}
