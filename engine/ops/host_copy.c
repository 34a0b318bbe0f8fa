/* host_copy.c: the ways between host memory and tensor memory.
 *
 * The caller may reuse its memory as soon as a write returns, and the copy happens later, in stream
 * order. So a write of more than MS_COPY_INLINE bytes is staged in a host buffer of the device,
 * which is freed once the copy is done. Buffers are looked at when the next one is needed; there is
 * no other moment at which the host would ask. */
#include "moonshard/ops.h"

#include <string.h>

#include "base/hash.h"
#include "ops/values.h"
#include "tensor/op.h"
#include "tensor/state.h"

/* ----------------------------------------------------- from and to the host */

/* Frees the buffers whose copies are done. It asks without waiting; a buffer that is still in use
 * stays for the next time. */
static void release_staged(ms_engine *engine, ms_tensor_state *state)
{
    size_t kept = 0;
    for (size_t i = 0; i < state->staged_count; i++)
        if (ms_point_reached(engine, state->staged[i].point))
            ms_host_memory_free(engine, state->staged[i].buffer);
        else state->staged[kept++] = state->staged[i];
    state->staged_count = kept;
}

/* Writes `bytes` bytes from the host into a contiguous tensor with memory. Room in the list comes
 * before the buffer, and that before the copy: after the copy is enqueued nothing can fail. A small
 * write (MS_COPY_INLINE) travels within the command itself, so it needs no buffer. */
static ms_status write_contiguous(ms_tensor *tensor, const void *host, size_t bytes)
{
    ms_engine *engine = tensor->engine;
    ms_context *context = ms_engine_context(engine);
    ms_tensor_state *state = ms_engine_get(engine, MS_SLOT_TENSOR);
    void *buffer = NULL;
    size_t begin, end;
    ms_point ready;
    ms_tensor_span(tensor, &begin, &end);
    /* A device without values copies nothing, and its callers may pass no memory. */
    if (bytes > MS_COPY_INLINE && !ms_engine_is_sim(engine)) {
        release_staged(engine, state);
        ms_status status =
            ms_grow(context, (void **)&state->staged, &state->staged_capacity,
                    state->staged_count + state->readbacks + 1, sizeof *state->staged);
        if (!status) status = ms_host_memory_new(engine, bytes, "a tensor's values", &buffer);
        if (status) return status;
        /* The caller's memory is free from here on. */
        host = memcpy(buffer, host, bytes);
    }
    ms_status status =
        ms_stream_copy_in(ms_engine_current(engine), tensor->storage, begin, host, bytes, &ready);
    if (status) {
        ms_host_memory_free(engine, buffer);
        return status;
    }
    if (buffer)
        state->staged[state->staged_count++] = (ms_staged){ .point = ready, .buffer = buffer };
    ms_storage_touch(tensor->storage, begin, end, "write");
    return MS_OK;
}

/* On "meta" only the version changes. A tensor with gaps is written by way of a contiguous one, by
 * the operator copy without the tape. The bytes are those of the elements in row-major order,
 * whatever the tensor's strides. The copy is released at once: stream order keeps its memory until
 * it was read. */
ms_status ms_tensor_write(ms_tensor *tensor, const void *host, size_t bytes)
{
    if (bytes != ms_tensor_bytes(tensor))
        return ms_engine_fail(tensor->engine, MS_ERROR_ARGUMENT,
                              "write: %zu bytes are given, the tensor has %zu", bytes,
                              ms_tensor_bytes(tensor));
    if (bytes == 0) return MS_OK;
    if (ms_tensor_is_meta(tensor)) {
        size_t begin, end;
        ms_tensor_span(tensor, &begin, &end);
        ms_storage_touch(tensor->storage, begin, end, "write");
        return MS_OK;
    }
    if (tensor->contiguous) return write_contiguous(tensor, host, bytes);
    ms_tensor *whole = NULL, *result = NULL;
    ms_status status =
        ms_tensor_new(tensor->engine, tensor->dtype, tensor->dims, tensor->shape, &whole);
    if (!status) status = write_contiguous(whole, host, bytes);
    if (!status) {
        ms_tensor *inputs[] = { tensor, whole };
        status = ms_op_apply(tensor->engine, &ms_op_copy, NULL, true, inputs, 2, &result, 1);
    }
    ms_tensor_release(result);
    ms_tensor_release(whole);
    return status;
}

/* Blocks until the values are there. The memory is checked before a copy is made of it, so that the
 * error names the read and not the copy. The result has the elements in row-major order. An error
 * of an earlier task is reported here, since the read waits for it. */
ms_status ms_tensor_read(ms_tensor *tensor, void *host, size_t bytes)
{
    ms_engine *engine = tensor->engine;
    if (bytes != ms_tensor_bytes(tensor))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "read: %zu bytes are asked, the tensor has %zu", bytes,
                              ms_tensor_bytes(tensor));
    ms_tensor *whole = NULL;
    size_t first, last;
    ms_tensor_span(tensor, &first, &last);
    ms_status status = ms_storage_check(tensor->storage, first, last, true, "read");
    if (!status) status = ms_op_as_contiguous(engine, tensor, &whole);
    if (status) return status;
    size_t begin = (size_t)whole->offset * ms_dtype_bytes(whole->dtype);
    status = ms_storage_read(whole->storage, begin, host, bytes);
    ms_tensor_release(whole);
    return status;
}

/* Bytes that are copied and hashed at a time: in host memory they stay in a core's own cache
 * between the two, and from a GPU they are enough to copy at its speed. */
#define PIECE_IN_HOST ((size_t)1 << 16)
#define PIECE_OF_GPU ((size_t)1 << 20)

/* What is not hashed yet: bytes in host memory, which may be copied on the way, or of a storage,
 * which are read into a block. */
typedef struct ms_unhashed {
    size_t left, piece;
    const char *at;
    char *copy; /* NULL: of no use */
    ms_storage *storage;
    size_t offset;
    void *block; /* NULL: the bytes are in host memory */
} ms_unhashed;

static ms_status next_piece(void *user, const void **piece, size_t *bytes)
{
    ms_unhashed *rest = user;
    size_t count = rest->left < rest->piece ? rest->left : rest->piece, offset = rest->offset;
    *bytes = count;
    if (count == 0) return MS_OK;
    rest->left -= count;
    if (rest->block) {
        *piece = rest->block;
        rest->offset += count;
        return ms_storage_read(rest->storage, offset, rest->block, count);
    }
    *piece = rest->at;
    if (rest->copy) {
        *piece = memcpy(rest->copy, rest->at, count);
        rest->copy += count;
    }
    rest->at += count;
    return MS_OK;
}

/* A GPU is read at once into memory that the caller keeps: it copies the next part while the host
 * takes the last one over. */
static ms_status hash_contiguous(ms_tensor *whole, void *host, size_t block, uint64_t *hashes)
{
    ms_unhashed rest = { .storage = whole->storage,
                         .offset = (size_t)whole->offset * ms_dtype_bytes(whole->dtype),
                         .left = ms_tensor_bytes(whole),
                         .piece = PIECE_IN_HOST };
    const void *memory = NULL;
    ms_status status = ms_storage_look(rest.storage, rest.offset, rest.left, &memory);
    if (status) return status;
    if (memory) {
        rest.at = memory;
        rest.copy = host;
    } else if (host) {
        rest.at = host;
        status = ms_storage_read(rest.storage, rest.offset, host, rest.left);
    } else {
        rest.piece = PIECE_OF_GPU;
        status = ms_host_memory_new(whole->engine, rest.left < rest.piece ? rest.left : rest.piece,
                                    "a block of a tensor", &rest.block);
    }
    if (!status) status = ms_hash_pieces(next_piece, &rest, block, hashes);
    ms_host_memory_free(whole->engine, rest.block);
    return status;
}

ms_status ms_tensor_hash(ms_tensor *tensor, void *host, size_t block, uint64_t *hashes)
{
    ms_engine *engine = tensor->engine;
    ms_tensor *whole = NULL;
    size_t first, last;
    MS_ASSERT(block % PIECE_OF_GPU == 0);
    hashes[0] = ms_hash("", 0, 0);
    if (ms_tensor_bytes(tensor) == 0) return MS_OK;
    if (ms_engine_is_sim(engine) && !host) {
        MS_ASSERT(block == 0);
        hashes[0] = 0;
        return MS_OK;
    }
    ms_tensor_span(tensor, &first, &last);
    ms_status status = ms_storage_check(tensor->storage, first, last, true, host ? "read" : "hash");
    if (!status) status = ms_op_as_contiguous(engine, tensor, &whole);
    if (status) return status;
    status = hash_contiguous(whole, host, block, hashes);
    ms_tensor_release(whole);
    return status;
}

/* ----------------------------------------------------------------- readback */

/* One element on its way to the host; the copy writes into the struct. It is freed when both are
 * true: the host has let it go, and the copy is done. If the host is first, the list of staged
 * buffers keeps it. Its memory comes from ms_host_memory_new, since a device may need memory of a
 * kind of its own for copies that the host does not wait for. */
struct ms_readback {
    ms_engine *engine;
    ms_point ready;
    ms_dtype dtype;
    _Alignas(8) unsigned char value[8];
};

/* The first element is copied; the host does not wait here. A training loop reads its loss this
 * way: it asks for the number, enqueues the next step, and only then waits. */
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
        status = ms_host_memory_new(engine, sizeof(ms_readback), "a value's copy", &memory);
    if (status) return status;
    ms_readback *readback = memory;
    *readback = (ms_readback){ .engine = engine, .dtype = tensor->dtype };
    size_t item = ms_dtype_bytes(tensor->dtype);
    status =
        ms_stream_copy_out(ms_engine_current(engine), tensor->storage,
                           (size_t)tensor->offset * item, readback->value, item, &readback->ready);
    if (status) {
        ms_host_memory_free(engine, memory);
        return status;
    }
    state->readbacks++;
    *out = readback;
    return MS_OK;
}

/* Waits for the copy. i64 beyond 2^53 is rounded. The error of a failed task is returned by the
 * wait. */
ms_status ms_readback_number(ms_readback *readback, double *out)
{
    ms_status status = ms_point_sync(readback->engine, readback->ready);
    if (status) return status;
    /* The wait above orders the device's write before these reads. */
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

/* The host has let go: the struct is freed now, or after the copy that writes into it. The room in
 * `staged` was made by ms_tensor_readback, so nothing is allocated here. */
void ms_readback_free(ms_readback *readback)
{
    if (!readback) return;
    ms_engine *engine = readback->engine;
    ms_tensor_state *state = ms_engine_get(engine, MS_SLOT_TENSOR);
    state->readbacks--;
    if (ms_point_reached(engine, readback->ready)) ms_host_memory_free(engine, readback);
    else
        state->staged[state->staged_count++] =
            (ms_staged){ .point = readback->ready, .buffer = readback };
}
