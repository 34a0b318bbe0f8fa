/* copy.c: the ways of values between host memory and storages, and the check of a flag on a
 * stream. */
#include "exec/engine.h"

/* A copy, or the check of a flag, on its way to the device. */
typedef struct ms_transfer {
    char *memory;     /* the device's */
    void *to;         /* host memory that is written */
    const void *from; /* host memory that is read */
    size_t bytes;
    const char *message;
} ms_transfer;

static void hand_copy_in(ms_stream *stream, const ms_launch *launch, const void *what)
{
    const ms_transfer *copy = what;
    stream->engine->device->copy_in(stream, launch, copy->memory, copy->from, copy->bytes);
}

static void hand_copy_out(ms_stream *stream, const ms_launch *launch, const void *what)
{
    const ms_transfer *copy = what;
    stream->engine->device->copy_out(stream, launch, copy->to, copy->memory, copy->bytes);
}

static void hand_fail_if(ms_stream *stream, const ms_launch *launch, const void *what)
{
    const ms_transfer *check = what;
    stream->engine->device->fail_if(stream, launch, (const float *)(const void *)check->memory,
                                    check->message);
}

static ms_status enqueue(ms_stream *stream, const char *name, uint8_t kind, ms_storage *storage,
                         size_t offset, uint8_t mode, ms_hand hand, ms_transfer *transfer,
                         ms_point *out)
{
    MS_ASSERT(offset + transfer->bytes <= storage->bytes);
    ms_access access;
    if (ms_storage_access(storage, offset, offset + transfer->bytes, mode, &access))
        return ms_hazard_refuse(storage, name);
    ms_launch launch = {
        .name = name, .accesses = &access, .access_count = 1, .cost = { .bytes = transfer->bytes }
    };
    transfer->memory = storage->data + offset;
    return ms_stream_hand_over(stream, &launch, kind, hand, transfer, out);
}

ms_status ms_stream_copy_in(ms_stream *stream, ms_storage *to, size_t offset, const void *host,
                            size_t bytes, ms_point *out)
{
    ms_transfer copy = { .from = host, .bytes = bytes };
    return enqueue(stream, "write", MS_KIND_COPY, to, offset, MS_WRITE, hand_copy_in, &copy, out);
}

ms_status ms_stream_copy_out(ms_stream *stream, ms_storage *from, size_t offset, void *host,
                             size_t bytes, ms_point *out)
{
    ms_transfer copy = { .to = host, .bytes = bytes };
    return enqueue(stream, "read", MS_KIND_COPY, from, offset, MS_READ, hand_copy_out, &copy, out);
}

ms_status ms_stream_fail_if(ms_stream *stream, const char *name, ms_storage *flag, size_t offset,
                            const char *message)
{
    ms_transfer check = { .bytes = sizeof(float), .message = message };
    return enqueue(stream, name, MS_KIND_COMPUTE, flag, offset, MS_READ, hand_fail_if, &check,
                   NULL);
}

ms_status ms_storage_read(ms_storage *storage, size_t offset, void *host, size_t bytes)
{
    ms_engine *engine = storage->engine;
    MS_ASSERT(offset + bytes <= storage->bytes);
    ms_point writers[MS_STREAMS_MAX];
    uint32_t count = ms_storage_writers(storage, offset, offset + bytes, writers);
    ms_status status = ms_storage_check(storage, offset, offset + bytes, true, "read");
    if (!status) status = ms_engine_check(engine);
    for (uint32_t i = 0; i < count && !status; i++) status = ms_point_sync(engine, writers[i]);
    if (!status && bytes) engine->device->read(engine, host, storage->data + offset, bytes);
    return status;
}
