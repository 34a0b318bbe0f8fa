/* tensor.c: tensors as windows on storages, and the only two ways between host memory and tensor
 * memory. */
#include "tensor/backend.h"

#include <stdio.h>
#include <string.h>

#include "tensor/op.h"
#include "tensor/state.h"

#define MS_TENSOR_CHUNK 128
#define MS_INLINE_WRITE 384 /* bytes that travel inside the task */

static const struct {
    const char *name;
    uint8_t bytes;
} dtypes[MS_DTYPES] = {
    [MS_F32] = { "f32", 4 }, [MS_F16] = { "f16", 2 },   [MS_BF16] = { "bf16", 2 },
    [MS_I64] = { "i64", 8 }, [MS_I32] = { "i32", 4 },   [MS_U16] = { "u16", 2 },
    [MS_U8] = { "u8", 1 },   [MS_BOOL] = { "bool", 1 },
};

size_t ms_dtype_bytes(ms_dtype dtype) { return dtypes[dtype].bytes; }
const char *ms_dtype_name(ms_dtype dtype) { return dtypes[dtype].name; }

bool ms_dtype_find(const char *name, ms_dtype *out)
{
    for (ms_dtype dtype = 0; dtype < MS_DTYPES; dtype++)
        if (strcmp(name, dtypes[dtype].name) == 0) {
            *out = dtype;
            return true;
        }
    return false;
}

/* -------------------------------------------------------- the layer's state */

/* Host buffers of writes that are under way; freed when their task is done, which decides nothing
 * else. */
typedef struct ms_staged {
    ms_point point;
    void *buffer;
} ms_staged;

typedef struct ms_tensor_state {
    ms_tensor *unused;
    void **chunks;
    size_t chunk_count, chunk_capacity;
    ms_tensor *casts; /* tensors that hold a cast of themselves */
    ms_dtype autocast;
    void *gemm;
    ms_staged *staged;
    size_t staged_count, staged_capacity, readbacks;
} ms_tensor_state;

static void state_free(ms_engine *engine, void *object)
{
    ms_tensor_state *state = object;
    ms_context *context = ms_engine_context(engine);
    ms_engine_drop_casts(engine);
    if (state->gemm) ms_gemm_state_free(engine, state->gemm);
    for (size_t i = 0; i < state->staged_count; i++) ms_release(context, state->staged[i].buffer);
    for (size_t i = 0; i < state->chunk_count; i++) ms_release(context, state->chunks[i]);
    ms_release(context, state->staged);
    ms_release(context, state->chunks);
    ms_release(context, state);
}

static ms_status state_of(ms_engine *engine, ms_tensor_state **out)
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

void **ms_engine_gemm_slot(ms_engine *engine)
{
    ms_tensor_state *state = NULL;
    return state_of(engine, &state) ? NULL : &state->gemm;
}

static ms_status struct_take(ms_engine *engine, ms_tensor **out)
{
    ms_tensor_state *state = NULL;
    ms_status status = state_of(engine, &state);
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
        for (int i = MS_TENSOR_CHUNK - 1; i >= 0; i--) {
            ms_tensor *unused = (ms_tensor *)chunk + i;
            unused->next_cast = state->unused;
            state->unused = unused;
        }
    }
    *out = state->unused;
    state->unused = (*out)->next_cast;
    memset(*out, 0, sizeof **out);
    (*out)->engine = engine;
    (*out)->references = 1;
    return MS_OK;
}

static void struct_give(ms_tensor *tensor)
{
    ms_tensor_state *state = ms_engine_get(tensor->engine, MS_SLOT_TENSOR);
    tensor->next_cast = state->unused;
    state->unused = tensor;
}

/* ------------------------------------------------------- making and freeing */

/* Fills in what follows from shape and strides. */
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

static void natural_strides(uint32_t dims, const int64_t *shape, int64_t *strides)
{
    int64_t stride = 1;
    for (int d = (int)dims - 1; d >= 0; d--) {
        strides[d] = stride;
        stride *= shape[d] > 1 ? shape[d] : 1;
    }
}

/* Checks a new tensor's shape; *out: its bytes. */
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
        overflow |= shape[d] > 0
                    && (!ms_multiply(bytes, (size_t)shape[d], &bytes) || bytes > (size_t)INT64_MAX);
    }
    if (overflow)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "a tensor of this shape has more bytes than 63 bits can count");
    *out = empty ? 0 : bytes;
    return MS_OK;
}

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

ms_status ms_tensor_new(ms_engine *engine, ms_dtype dtype, uint32_t dims, const int64_t *shape,
                        ms_tensor **out)
{
    size_t bytes = 0;
    ms_status status = shape_bytes(engine, dtype, dims, shape, &bytes);
    if (status) return status;
    ms_tensor *tensor = NULL;
    status = struct_take(engine, &tensor);
    if (status) return status;
    status = ms_storage_new(ms_engine_current(engine), bytes, &tensor->storage);
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

static void drop_cast(ms_tensor *tensor)
{
    ms_tensor_state *state = ms_engine_get(tensor->engine, MS_SLOT_TENSOR);
    ms_tensor **link = &state->casts;
    while (*link && *link != tensor) link = &(*link)->next_cast;
    if (*link) *link = tensor->next_cast;
    ms_tensor *cast = tensor->cast;
    tensor->cast = NULL;
    ms_tensor_release(cast);
}

void ms_tensor_keep_cast(ms_tensor *tensor, ms_tensor *cast)
{
    if (!cast) return;
    ms_tensor_state *state = ms_engine_get(tensor->engine, MS_SLOT_TENSOR);
    if (tensor->cast) drop_cast(tensor);
    tensor->cast = ms_tensor_retain(cast);
    tensor->cast_version = ms_tensor_version(tensor);
    tensor->next_cast = state->casts;
    state->casts = tensor;
}

/* A window of a tensor that has a cast with the same order in memory has that window of the
 * cast. */
static ms_status inherit_cast(ms_tensor *base, int64_t offset, ms_tensor *window)
{
    ms_tensor *cast = base->cast, *part = NULL;
    if (!cast || base->cast_version != ms_tensor_version(base)
        || memcmp(cast->strides, base->strides, base->dims * sizeof *base->strides) != 0)
        return MS_OK;
    ms_status status = ms_tensor_window(cast, window->dims, window->shape, window->strides,
                                        window->count == 0 ? 0 : offset, &part);
    if (status) return status;
    ms_tensor_keep_cast(window, part);
    ms_tensor_release(part);
    return MS_OK;
}

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
    status = inherit_cast(base, offset, tensor);
    if (status) ms_tensor_release(tensor);
    else *out = tensor;
    return status;
}

void ms_tensor_rebase(ms_tensor *tensor, ms_tensor *base, int64_t offset)
{
    ms_storage *before = tensor->storage;
    if (tensor->cast) drop_cast(tensor);
    tensor->storage = ms_storage_retain(base->storage);
    tensor->offset = base->offset + offset;
    natural_strides(tensor->dims, tensor->shape, tensor->strides);
    derive(tensor);
    tensor->made_version = ms_tensor_version(tensor);
    ms_storage_release(before);
}

ms_status ms_tensor_alias(ms_tensor *tensor, ms_tensor **out)
{
    return ms_tensor_window(tensor, tensor->dims, tensor->shape, tensor->strides, 0, out);
}

ms_tensor *ms_tensor_retain(ms_tensor *tensor)
{
    MS_ASSERT(tensor->references > 0);
    tensor->references++;
    return tensor;
}

void ms_tensor_release(ms_tensor *tensor)
{
    MS_ASSERT(!tensor || tensor->references > 0);
    if (!tensor || --tensor->references > 0) return;
    if (tensor->cast) drop_cast(tensor);
    if (tensor->meta) tensor->free_meta(tensor->meta);
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
size_t ms_tensor_bytes(const ms_tensor *tensor)
{
    return (size_t)tensor->count * ms_dtype_bytes(tensor->dtype);
}
bool ms_tensor_is_contiguous(const ms_tensor *tensor) { return tensor->contiguous; }
ms_storage *ms_tensor_storage(const ms_tensor *tensor) { return tensor->storage; }
int64_t ms_tensor_offset(const ms_tensor *tensor) { return tensor->offset; }

void *ms_tensor_data(const ms_tensor *tensor)
{
    return (char *)ms_storage_data(tensor->storage)
           + (size_t)tensor->offset * ms_dtype_bytes(tensor->dtype);
}

uint64_t ms_tensor_version(const ms_tensor *tensor)
{
    size_t begin, end;
    ms_tensor_span(tensor, &begin, &end);
    return ms_storage_version(tensor->storage, begin, end);
}

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

/* ----------------------------------------------------- from and to the host */

typedef struct ms_host_write_args {
    void *to;
    const void *staged;
    uint32_t bytes_inline;
    uint64_t bytes;
    unsigned char data[MS_INLINE_WRITE];
} ms_host_write_args;

static ms_task_result host_write_run(ms_run *run, void *arguments)
{
    (void)run;
    const ms_host_write_args *args = arguments;
    memcpy(args->to, args->staged ? args->staged : args->data, args->bytes);
    return MS_TASK_DONE;
}

const ms_task ms_cpu_host_write = { .name = "write",
                                    .function = host_write_run,
                                    .args_bytes = sizeof(ms_host_write_args),
                                    .kind = MS_KIND_COPY };

static void release_staged(ms_engine *engine, ms_tensor_state *state)
{
    size_t kept = 0;
    for (size_t i = 0; i < state->staged_count; i++)
        if (ms_point_reached(engine, state->staged[i].point))
            ms_release(ms_engine_context(engine), state->staged[i].buffer);
        else state->staged[kept++] = state->staged[i];
    state->staged_count = kept;
}

static ms_status write_contiguous(ms_tensor *tensor, const void *host, size_t bytes)
{
    ms_engine *engine = tensor->engine;
    ms_context *context = ms_engine_context(engine);
    ms_tensor_state *state = ms_engine_get(engine, MS_SLOT_TENSOR);
    ms_host_write_args args = { .to = ms_tensor_data(tensor), .bytes = bytes };
    void *buffer = NULL;
    if (ms_engine_is_sim(engine)) {
        /* There is nowhere to write to, and the caller may have no values at all. */
    } else if (bytes <= MS_INLINE_WRITE) {
        memcpy(args.data, host, bytes);
    } else {
        release_staged(engine, state);
        ms_status status =
            ms_grow(context, (void **)&state->staged, &state->staged_capacity,
                    state->staged_count + state->readbacks + 1, sizeof *state->staged);
        if (!status) status = ms_allocate(context, bytes, "a tensor's values", &buffer);
        if (status) return status;
        memcpy(buffer, host, bytes);
        args.staged = buffer;
    }
    ms_status status =
        ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_host_write), &args, NULL, 0,
                          &tensor, 1, (ms_task_cost){ .bytes = 2 * bytes });
    if (status) ms_release(context, buffer);
    else if (buffer)
        state->staged[state->staged_count++] =
            (ms_staged){ .point = ms_stream_last(ms_engine_current(engine)), .buffer = buffer };
    return status;
}

ms_status ms_tensor_write(ms_tensor *tensor, const void *host, size_t bytes)
{
    if (bytes != ms_tensor_bytes(tensor))
        return ms_engine_fail(tensor->engine, MS_ERROR_ARGUMENT,
                              "write: %zu bytes are given, the tensor has %zu", bytes,
                              ms_tensor_bytes(tensor));
    if (bytes == 0) return MS_OK;
    if (tensor->contiguous) return write_contiguous(tensor, host, bytes);
    ms_tensor *whole = NULL, *result = NULL;
    ms_status status =
        ms_tensor_new(tensor->engine, tensor->dtype, tensor->dims, tensor->shape, &whole);
    if (!status) status = write_contiguous(whole, host, bytes);
    if (!status) {
        ms_tensor *inputs[] = { tensor, whole };
        status = ms_op_apply(tensor->engine, ms_op_find("copy"), NULL, true, inputs, 2, &result, 1);
    }
    ms_tensor_release(result);
    ms_tensor_release(whole);
    return status;
}

ms_status ms_tensor_read(ms_tensor *tensor, void *host, size_t bytes)
{
    ms_engine *engine = tensor->engine;
    if (bytes != ms_tensor_bytes(tensor))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "read: %zu bytes are asked, the tensor has %zu", bytes,
                              ms_tensor_bytes(tensor));
    ms_tensor *whole = NULL;
    ms_status status = ms_op_as_contiguous(engine, tensor, &whole);
    if (status) return status;
    ms_point writers[MS_STREAMS_MAX];
    size_t begin = (size_t)whole->offset * ms_dtype_bytes(whole->dtype);
    uint32_t count = ms_storage_writers(whole->storage, begin, begin + bytes, writers);
    status = ms_engine_check(engine);
    for (uint32_t i = 0; i < count && !status; i++) status = ms_point_sync(engine, writers[i]);
    if (!status && bytes) {
        if (!ms_engine_is_sim(engine)) memcpy(host, ms_tensor_data(whole), bytes);
        else if (host) memset(host, 0, bytes);
    }
    ms_tensor_release(whole);
    return status;
}

/* ----------------------------------------------------------------- readback */

/* Freed when both the host has let go and the copy is done: the staged list keeps it until then. */
struct ms_readback {
    ms_engine *engine;
    ms_point ready;
    ms_dtype dtype;
    _Alignas(8) unsigned char value[8];
};

typedef struct ms_host_read_args {
    const void *from;
    ms_readback *to;
    uint32_t bytes;
} ms_host_read_args;

static ms_task_result host_read_run(ms_run *run, void *arguments)
{
    (void)run;
    const ms_host_read_args *args = arguments;
    memcpy(args->to->value, args->from, args->bytes);
    return MS_TASK_DONE;
}

const ms_task ms_cpu_host_read = { .name = "read",
                                   .function = host_read_run,
                                   .args_bytes = sizeof(ms_host_read_args),
                                   .kind = MS_KIND_COPY };

ms_status ms_tensor_readback(ms_tensor *tensor, ms_readback **out)
{
    ms_engine *engine = tensor->engine;
    if (tensor->count < 1)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "readback: the tensor is empty");
    ms_tensor_state *state = ms_engine_get(engine, MS_SLOT_TENSOR);
    void *memory = NULL;
    /* Room in the list of what is freed later: ms_readback_free cannot fail. */
    ms_status status =
        ms_grow(ms_engine_context(engine), (void **)&state->staged, &state->staged_capacity,
                state->staged_count + state->readbacks + 1, sizeof *state->staged);
    if (!status)
        status =
            ms_allocate(ms_engine_context(engine), sizeof(ms_readback), "a value's copy", &memory);
    if (status) return status;
    ms_readback *readback = memory;
    *readback = (ms_readback){ .engine = engine, .dtype = tensor->dtype };
    ms_host_read_args args = { .from = ms_tensor_data(tensor),
                               .to = readback,
                               .bytes = (uint32_t)ms_dtype_bytes(tensor->dtype) };
    status = ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_host_read), &args,
                               &tensor, 1, NULL, 0, (ms_task_cost){ .bytes = args.bytes });
    if (status) {
        ms_release(ms_engine_context(engine), memory);
        return status;
    }
    readback->ready = ms_stream_last(ms_engine_current(engine));
    state->readbacks++;
    *out = readback;
    return MS_OK;
}

ms_status ms_readback_number(ms_readback *readback, double *out)
{
    ms_status status = ms_point_sync(readback->engine, readback->ready);
    if (status) return status;
    const void *value = readback->value;
    switch (readback->dtype) {
    case MS_F32: *out = (double)*(const float *)value; break;
    case MS_F16: *out = (double)ms_float_from_f16(*(const uint16_t *)value); break;
    case MS_BF16: *out = (double)ms_float_from_bf16(*(const uint16_t *)value); break;
    case MS_I64: *out = (double)*(const int64_t *)value; break;
    case MS_I32: *out = *(const int32_t *)value; break;
    case MS_U16: *out = *(const uint16_t *)value; break;
    default: *out = *(const uint8_t *)value; break;
    }
    return MS_OK;
}

void ms_readback_free(ms_readback *readback)
{
    if (!readback) return;
    ms_engine *engine = readback->engine;
    ms_tensor_state *state = ms_engine_get(engine, MS_SLOT_TENSOR);
    state->readbacks--;
    if (ms_point_reached(engine, readback->ready)) ms_release(ms_engine_context(engine), readback);
    else
        state->staged[state->staged_count++] =
            (ms_staged){ .point = readback->ready, .buffer = readback };
}

/* ----------------------------------------------------------------- autocast */

void ms_engine_set_autocast(ms_engine *engine, ms_dtype dtype)
{
    ms_tensor_state *state = NULL;
    if (!state_of(engine, &state)) state->autocast = dtype;
}

ms_dtype ms_engine_autocast(const ms_engine *engine)
{
    const ms_tensor_state *state = ms_engine_get(engine, MS_SLOT_TENSOR);
    return state ? state->autocast : MS_F32;
}

void ms_engine_drop_casts(ms_engine *engine)
{
    ms_tensor_state *state = ms_engine_get(engine, MS_SLOT_TENSOR);
    while (state && state->casts) drop_cast(state->casts);
}

ms_status ms_tensor_cast_cached(ms_engine *engine, ms_tensor *tensor, ms_dtype dtype, bool keep,
                                ms_tensor **out)
{
    if (tensor->dtype == dtype) {
        *out = ms_tensor_retain(tensor);
        return MS_OK;
    }
    uint64_t version = ms_tensor_version(tensor);
    if (tensor->cast
        && (tensor->cast->dtype != dtype || tensor->cast_version != version
            || ms_storage_spoiled(tensor->cast->storage)))
        drop_cast(tensor);
    if (tensor->cast) {
        *out = ms_tensor_retain(tensor->cast);
        return MS_OK;
    }
    ms_attributes attributes = { .cast = { .dtype = dtype } };
    ms_tensor *cast = NULL;
    ms_status status = ms_op_unary(engine, ms_op_find("cast"), &attributes, tensor, &cast);
    if (status) return status;
    if (keep) ms_tensor_keep_cast(tensor, cast);
    *out = cast;
    return MS_OK;
}

ms_status ms_tensor_new_cast(ms_engine *engine, const ms_tensor *tensor, ms_tensor **out)
{
    ms_dtype dtype = ms_engine_autocast(engine);
    if (dtype == MS_F32 || tensor->dtype != MS_F32 || tensor->count == 0) return MS_OK;
    ms_tensor *memory = NULL;
    ms_status status = ms_tensor_new(engine, dtype, 1, &tensor->count, &memory);
    if (!status)
        status = ms_tensor_window(memory, tensor->dims, tensor->shape, tensor->strides, 0, out);
    ms_tensor_release(memory);
    return status;
}
