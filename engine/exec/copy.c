/* copy.c: what is enqueued beside tasks: copies between host memory and storages, the check of a
 * flag, and functions of the host; and the host memory that copies are best made from. */
#include "exec/hazard.h"

#include "exec/stream.h"

/* A copy, or the check of a flag, between the call and the device. It lives on the stack of the
 * call: devices copy what they need. */
typedef struct ms_transfer {
    const ms_storage *storage; /* bytes [offset, offset + bytes) of it */
    size_t offset, bytes;
    void *to;         /* host memory that is written */
    const void *from; /* host memory that is read */
    const char *message;
} ms_transfer;

/* The device's memory. It is asked for only when the launch is handed over: ms_stream_hand_over has
 * refused dropped storages by then, and a refill changes the address. */
static char *memory_of(const ms_transfer *transfer)
{
    return transfer->storage->data + transfer->offset;
}

/* The functions `hand_...` are what ms_stream_hand_over calls once the launch has its number. */
static void hand_copy_in(ms_stream *stream, const ms_launch *launch, const void *what)
{
    const ms_transfer *copy = what;
    stream->engine->device->copy_in(stream, launch, memory_of(copy), copy->from, copy->bytes);
}

/* The host memory must stay until the number is reached: the device writes it at any time
 * before. */
static void hand_copy_out(ms_stream *stream, const ms_launch *launch, const void *what)
{
    const ms_transfer *copy = what;
    stream->engine->device->copy_out(stream, launch, copy->to, memory_of(copy), copy->bytes);
}

/* The flag is read on the device, so the host need not wait for its value. */
static void hand_fail_if(ms_stream *stream, const ms_launch *launch, const void *what)
{
    const ms_transfer *check = what;
    stream->engine->device->fail_if(stream, launch, (const float *)(const void *)memory_of(check),
                                    check->message);
}

/* Enqueues a transfer as one access to the bytes of a storage. A dropped or vacant storage is
 * refused before a number is taken, so the stream is unchanged. */
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
    transfer->storage = storage;
    transfer->offset = offset;
    return ms_stream_hand_over(stream, &launch, kind, hand, transfer, out);
}

/* A write of the storage's cells, so it waits for their readers as any task does. */
ms_status ms_stream_copy_in(ms_stream *stream, ms_storage *to, size_t offset, const void *host,
                            size_t bytes, ms_point *out)
{
    ms_transfer copy = { .from = host, .bytes = bytes };
    return enqueue(stream, "write", MS_KIND_COPY, to, offset, MS_WRITE, hand_copy_in, &copy, out);
}

/* A read: copies to the host and tasks that only read may run at the same time. */
ms_status ms_stream_copy_out(ms_stream *stream, ms_storage *from, size_t offset, void *host,
                             size_t bytes, ms_point *out)
{
    ms_transfer copy = { .to = host, .bytes = bytes };
    return enqueue(stream, "read", MS_KIND_COPY, from, offset, MS_READ, hand_copy_out, &copy, out);
}

/* Name and message are not copied: they must outlive the task. */
ms_status ms_stream_fail_if(ms_stream *stream, const char *name, ms_storage *flag, size_t offset,
                            const char *message)
{
    ms_transfer check = { .bytes = sizeof(float), .message = message };
    return enqueue(stream, name, MS_KIND_COMPUTE, flag, offset, MS_READ, hand_fail_if, &check,
                   NULL);
}

/* The call goes to the device as the caller gave it; the device copies it. */
static void hand_call(ms_stream *stream, const ms_launch *launch, const void *what)
{
    stream->engine->device->call(stream, launch, what);
}

/* It takes a number like a task, so other streams can wait for it, and a failed stream skips it. */
ms_status ms_stream_call(ms_stream *stream, const ms_host_call *call, const ms_access *accesses,
                         uint32_t count, ms_task_cost cost, ms_point *out)
{
    if (count > MS_TASK_ACCESS_MAX)
        return ms_engine_fail(stream->engine, MS_ERROR_ARGUMENT, "%s: %u storages; at most %d fit",
                              call->name, count, MS_TASK_ACCESS_MAX);
    ms_launch launch = {
        .name = call->name, .accesses = accesses, .access_count = count, .cost = cost
    };
    return ms_stream_hand_over(stream, &launch, call->kind, hand_call, call, out);
}

/* Readers need not be awaited, as they change nothing. The engine is checked first, so that a value
 * that a failure left undefined is not read as if it were one. */
static ms_status await_writers(ms_storage *storage, size_t offset, size_t bytes)
{
    ms_engine *engine = storage->engine;
    MS_ASSERT(offset + bytes <= storage->bytes);
    ms_point writers[MS_STREAMS_MAX];
    uint32_t count = ms_storage_writers(storage, offset, offset + bytes, writers);
    ms_status status = ms_storage_check(storage, offset, offset + bytes, true, "read");
    if (!status) status = ms_engine_check(engine);
    for (uint32_t i = 0; i < count && !status; i++) status = ms_point_sync(engine, writers[i]);
    return status;
}

/* Reads while the host waits, and enqueues nothing: the device reads at once. */
ms_status ms_storage_read(ms_storage *storage, size_t offset, void *host, size_t bytes)
{
    ms_engine *engine = storage->engine;
    ms_status status = await_writers(storage, offset, bytes);
    if (status || !bytes) return status;
    return engine->device->read(engine, host, storage->data + offset, bytes);
}

/* A device that does not tell how much of its memory is free uses the host's. */
ms_status ms_storage_look(ms_storage *storage, size_t offset, size_t bytes, const void **out)
{
    const ms_device *device = storage->engine->device;
    *out = NULL;
    if (!device->values || device->available) return MS_OK;
    ms_status status = await_writers(storage, offset, bytes);
    if (!status) *out = storage->data + offset;
    return status;
}

/* -------------------------------------------------------------- host memory */

/* A device that copies faster from special memory (pinned, for a GPU) allocates it; for others
 * plain memory is as good. */
ms_status ms_host_memory_new(ms_engine *engine, size_t bytes, const char *what, void **out)
{
    const ms_device *device = engine->device;
    if (!device->host_allocate) return ms_allocate(&engine->context, bytes, what, out);
    void *memory = device->host_allocate(engine, bytes);
    if (!memory)
        return ms_engine_fail(engine, MS_ERROR_MEMORY,
                              "device \"%s\" has no host memory for %zu bytes: %s", device->name,
                              bytes, what);
    *out = memory;
    return MS_OK;
}

/* The caller has made sure that no copy uses the memory any more. */
void ms_host_memory_free(ms_engine *engine, void *memory)
{
    if (!memory) return;
    if (engine->device->host_release) engine->device->host_release(engine, memory);
    else ms_release(&engine->context, memory);
}
