/* poison.c: a check that tasks touch nothing but what they declare: slow, for tests.
 *
 * While it is on, every task runs alone. Before it all live storages that it does not declare are
 * saved and filled with 0xff bytes (NaN in every float dtype, -1 in integers), and so is memory
 * when it is handed out and given back; after it they must still be that, and come back. A read
 * that is not declared spoils results; a write that is not declared is an error that names the
 * task. */
#include "exec/cpu/poison.h"

#include <string.h>

#include "exec/stream.h"

#define MS_POISON 0xff

/* Whether a storage is left alone: the task declares it, or it has no memory. A storage counts as a
 * whole: a task that declares one cell of it may touch the others unnoticed. */
static bool is_spared(const ms_access *accesses, uint32_t count, const ms_storage *storage)
{
    if (!storage->block) return true;
    for (uint32_t i = 0; i < count; i++)
        if (accesses[i].storage == storage) return true;
    return false;
}

/* Streams are drained without a check for errors, since the values must be in place in any case. */
static void await_all(ms_engine *engine)
{
    for (uint16_t i = 0; i < engine->stream_count; i++)
        ms_engine_await(engine->streams[i], engine->streams[i]->enqueued);
}

/* After all work has ended, since the block's former users may still run. */
static void fill(ms_storage *storage)
{
    await_all(storage->engine);
    memset(storage->data, MS_POISON, storage->bytes);
}

/* The copies are in the order of the list of storages, which does not change before put_back. All
 * of the engine's memory is copied for each task, which is why this is for small tests only. */
static ms_status save(ms_engine *engine, const ms_access *accesses, uint32_t count, void **saved)
{
    size_t bytes = 0;
    for (const ms_storage *storage = engine->storages.live; storage; storage = storage->next)
        if (!is_spared(accesses, count, storage)) bytes += storage->bytes;
    ms_status status = ms_allocate(&engine->context, bytes + 1, "values put aside", saved);
    if (status) return status;
    await_all(engine);
    char *to = *saved;
    for (const ms_storage *storage = engine->storages.live; storage; storage = storage->next) {
        if (is_spared(accesses, count, storage)) continue;
        memcpy(to, storage->data, storage->bytes);
        memset(storage->data, MS_POISON, storage->bytes);
        to += storage->bytes;
    }
    return MS_OK;
}

/* Whether all bytes are still MS_POISON: the first one is, and each equals the one before it. */
static bool is_poison(const ms_storage *storage)
{
    const char *data = storage->data;
    if (!storage->bytes) return true;
    return (unsigned char)data[0] == MS_POISON && memcmp(data, data + 1, storage->bytes - 1) == 0;
}

/* Every storage gets its values back, also after a violation was found, so that the program can go
 * on. */
static ms_status put_back(ms_engine *engine, const char *task, const ms_access *accesses,
                          uint32_t count, void *saved)
{
    await_all(engine);
    const char *from = saved;
    const ms_storage *written = NULL;
    for (const ms_storage *storage = engine->storages.live; storage; storage = storage->next) {
        if (is_spared(accesses, count, storage)) continue;
        if (!written && !is_poison(storage)) written = storage;
        memcpy(storage->data, from, storage->bytes);
        from += storage->bytes;
    }
    ms_release(&engine->context, saved);
    if (!written) return MS_OK;
    return ms_engine_fail(engine, MS_ERROR_HAZARD,
                          "%s wrote to a storage of %zu bytes that it does not declare", task,
                          written->bytes);
}

const ms_poison ms_cpu_poison = { .before = save, .after = put_back, .fill = fill };
