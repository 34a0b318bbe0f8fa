/* storage.c: storages: a piece of pool memory with its hazard cells and a count of its writes. */
#include <string.h>

#include "exec/poison.h"

#define MS_STORAGE_CHUNK 128

static ms_status struct_take(ms_engine *engine, ms_storage **out)
{
    if (!engine->unused_storages) {
        ms_status status = ms_grow(&engine->context, (void **)&engine->storage_chunks, &engine->storage_chunk_capacity, engine->storage_chunk_count + 1,
                                   sizeof *engine->storage_chunks);
        if (status) return status;
        void *chunk = NULL;
        status = ms_allocate(&engine->context, MS_STORAGE_CHUNK * sizeof(ms_storage), "storages", &chunk);
        if (status) return status;
        engine->storage_chunks[engine->storage_chunk_count++] = chunk;
        for (int i = MS_STORAGE_CHUNK - 1; i >= 0; i--) {
            ms_storage *unused = (ms_storage *)chunk + i;
            unused->next = engine->unused_storages;
            engine->unused_storages = unused;
        }
    }
    *out = engine->unused_storages;
    engine->unused_storages = (*out)->next;
    memset(*out, 0, sizeof **out);
    return MS_OK;
}

void ms_storages_close(ms_engine *engine)
{
    for (ms_storage *storage = engine->storages; storage; storage = storage->next)
        if (storage->cells != &storage->own) {
            ms_release(&engine->context, storage->cells);
            ms_release(&engine->context, storage->ends);
        }
    for (size_t i = 0; i < engine->storage_chunk_count; i++) ms_release(&engine->context, engine->storage_chunks[i]);
    ms_release(&engine->context, engine->storage_chunks);
    engine->storages = NULL;
}

ms_status ms_storage_new(ms_stream *stream, size_t bytes, ms_storage **out) { return ms_storage_new_in(&stream->engine->pool, stream, bytes, out); }

ms_status ms_storage_new_in(ms_pool *pool, ms_stream *stream, size_t bytes, ms_storage **out)
{
    ms_engine *engine = stream->engine;
    ms_storage *storage = NULL;
    ms_status status = struct_take(engine, &storage);
    if (status) return status;
    status = ms_pool_take(pool, stream, bytes, &storage->block, &storage->data, storage->own.reads);
    if (status) {
        storage->next = engine->unused_storages;
        engine->unused_storages = storage;
        return status;
    }
    storage->engine = engine;
    storage->pool = pool;
    storage->bytes = bytes;
    storage->references = 1;
    storage->script = engine->script;
    storage->cell_count = 1;
    storage->cells = &storage->own;
    /* What was here before counts as read, so that a first write on another stream waits for it. */
    for (uint32_t i = 0; i < MS_STREAMS_MAX; i++)
        if (storage->own.reads[i]) storage->own.readers |= 1u << i;
    storage->next = engine->storages;
    if (storage->next) storage->next->previous = storage;
    engine->storages = storage;
    if (engine->poison) ms_poison_fill(storage);
    *out = storage;
    return MS_OK;
}

ms_storage *ms_storage_retain(ms_storage *storage)
{
    storage->references++;
    return storage;
}

void ms_storage_release(ms_storage *storage)
{
    if (!storage || --storage->references > 0) return;
    ms_engine *engine = storage->engine;
    if (engine->poison) ms_poison_fill(storage);
    uint64_t uses[MS_STREAMS_MAX];
    ms_hazard_uses(storage, 0, (uint16_t)storage->cell_count, uses);
    ms_pool_give(storage->pool, storage->block, uses);
    engine->memory.live -= storage->bytes;
    if (storage->previous) storage->previous->next = storage->next;
    else engine->storages = storage->next;
    if (storage->next) storage->next->previous = storage->previous;
    if (storage->cells != &storage->own) {
        ms_release(&engine->context, storage->cells);
        ms_release(&engine->context, storage->ends);
    }
    storage->next = engine->unused_storages;
    engine->unused_storages = storage;
}

ms_status ms_storage_split(ms_storage *storage, const size_t *ends, uint32_t cells)
{
    ms_engine *engine = storage->engine;
    if (cells == 0 || cells > MS_CELLS_MAX)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "a storage is split into 1 to %d cells, not %u: join small neighbours", MS_CELLS_MAX, cells);
    if (storage->ends || storage->used)
        return ms_engine_fail(engine, MS_ERROR_STATE, "a storage is split once, before its first use");
    for (uint32_t i = 0; i < cells; i++)
        if ((i > 0 && ends[i] <= ends[i - 1]) || (i + 1 == cells) != (ends[i] == storage->bytes))
            return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "cell %u ends at byte %zu: ends must ascend and the last must be the storage's %zu bytes", i, ends[i], storage->bytes);
    void *made = NULL, *limits = NULL;
    ms_status status = ms_allocate(&engine->context, cells * sizeof(ms_cell), "cells", &made);
    if (status) return status;
    status = ms_allocate(&engine->context, cells * sizeof(size_t), "cells", &limits);
    if (status) {
        ms_release(&engine->context, made);
        return status;
    }
    storage->cells = made;
    storage->ends = limits;
    storage->cell_count = cells;
    for (uint32_t i = 0; i < cells; i++) {
        storage->ends[i] = ends[i];
        storage->cells[i] = storage->own;
    }
    return MS_OK;
}

void ms_storage_cells(const ms_storage *storage, size_t begin, size_t end, uint16_t *first, uint16_t *count)
{
    *first = 0;
    *count = 1;
    if (!storage->ends) return;
    uint32_t low = 0;
    while (low + 1 < storage->cell_count && storage->ends[low] <= begin) low++;
    uint32_t high = low;
    while (high + 1 < storage->cell_count && storage->ends[high] < end) high++;
    *first = (uint16_t)low;
    *count = (uint16_t)(high - low + 1);
}

void *ms_storage_data(const ms_storage *storage) { return storage->data; }
size_t ms_storage_bytes(const ms_storage *storage) { return storage->bytes; }
uint32_t ms_storage_references(const ms_storage *storage) { return storage->references; }
ms_engine *ms_storage_engine(const ms_storage *storage) { return storage->engine; }
uint64_t ms_storage_version(const ms_storage *storage) { return storage->version; }
void ms_storage_touch(ms_storage *storage) { storage->version++; }
uint64_t ms_storage_recorded(const ms_storage *storage) { return storage->recorded; }
void ms_storage_record(ms_storage *storage) { storage->recorded = storage->version; }
bool ms_storage_is_home(const ms_storage *storage) { return storage->home; }
void ms_storage_set_home(ms_storage *storage) { storage->home = true; }

uint32_t ms_storage_users(const ms_storage *storage, size_t begin, size_t end, ms_point *out)
{
    uint64_t uses[MS_STREAMS_MAX];
    uint16_t first, cells;
    uint32_t count = 0;
    ms_storage_cells(storage, begin, end, &first, &cells);
    ms_hazard_uses(storage, first, cells, uses);
    for (uint16_t i = 0; i < MS_STREAMS_MAX; i++)
        if (uses[i]) out[count++] = (ms_point){ .stream = i, .seq = uses[i] };
    return count;
}

uint32_t ms_storage_writers(const ms_storage *storage, size_t begin, size_t end, ms_point *out)
{
    uint16_t first, cells;
    uint32_t count = 0;
    ms_storage_cells(storage, begin, end, &first, &cells);
    for (uint32_t c = first; c < (uint32_t)first + cells; c++) {
        ms_point writer = storage->cells[c].writer;
        if (!writer.seq) continue;
        uint32_t at = 0;
        while (at < count && out[at].stream != writer.stream) at++;
        if (at == count) out[count++] = writer;
        else if (out[at].seq < writer.seq) out[at].seq = writer.seq;
    }
    return count;
}
