/* storage.c: storages: a piece of pool memory with its hazard cells and a count of its writes.
 * Dropping that memory and taking it again is drop.c. */
#include "exec/storage.h"

#include <stddef.h>
#include <string.h>

#include "exec/hazard.h"
#include "exec/pool.h"

#define MS_STORAGE_CHUNK 128

/* Takes a struct from the free list, which is refilled by the chunk: storages come and go with
 * every operator, and a struct costs no allocation. All is zeroed but the reads of its own cell,
 * which an empty set of readers makes invalid. */
static ms_status struct_take(ms_engine *engine, ms_storage **out)
{
    if (!engine->storages.unused) {
        ms_status status = ms_grow(
            &engine->context, (void **)&engine->storages.chunks, &engine->storages.chunk_capacity,
            engine->storages.chunk_count + 1, sizeof *engine->storages.chunks);
        if (status) return status;
        void *chunk = NULL;
        status = ms_allocate(&engine->context, MS_STORAGE_CHUNK * sizeof(ms_storage), "storages",
                             &chunk);
        if (status) return status;
        engine->storages.chunks[engine->storages.chunk_count++] = chunk;
        for (int i = MS_STORAGE_CHUNK - 1; i >= 0; i--) {
            ms_storage *unused = (ms_storage *)chunk + i;
            unused->next = engine->storages.unused;
            engine->storages.unused = unused;
        }
    }
    *out = engine->storages.unused;
    engine->storages.unused = (*out)->next;
    memset(*out, 0, offsetof(ms_storage, own.reads));
    return MS_OK;
}

/* Frees the arrays of a storage that was split. Cells and their ends share one allocation, and so
 * do parts and theirs. */
static void free_split(ms_storage *storage)
{
    ms_context *context = &storage->engine->context;
    if (storage->cells != &storage->own) ms_release(context, storage->cells);
    if (storage->parts != &storage->whole) ms_release(context, storage->parts);
}

/* Storages that are still referenced are freed too: their engine ends. */
void ms_storages_close(ms_engine *engine)
{
    for (ms_storage *storage = engine->storages.live; storage; storage = storage->next)
        free_split(storage);
    for (size_t i = 0; i < engine->storages.chunk_count; i++)
        ms_release(&engine->context, engine->storages.chunks[i]);
    ms_release(&engine->context, engine->storages.chunks);
    engine->storages.live = NULL;
}

/* Memory of the engine's own pool, for use on this stream first. */
ms_status ms_storage_new(ms_stream *stream, size_t bytes, ms_storage **out)
{
    return ms_storage_new_in(&stream->engine->pool, stream, bytes, out);
}

/* Makes a zeroed struct a live storage with one reference and one cell and part; its memory is the
 * caller's business. The list of live storages is for messages, for the poison check and for the
 * end of the engine. */
static void enlist(ms_engine *engine, ms_pool *pool, size_t bytes, ms_storage *storage)
{
    storage->engine = engine;
    storage->pool = pool;
    storage->bytes = bytes;
    storage->serial = ++engine->storages.made;
    storage->references = 1;
    storage->script = engine->script;
    storage->cell_count = storage->part_count = 1;
    storage->cells = &storage->own;
    storage->parts = &storage->whole;
    storage->next = engine->storages.live;
    if (storage->next) storage->next->previous = storage;
    engine->storages.live = storage;
}

/* The struct comes before the memory, so that a failure of the pool has only a struct to give back.
 * uses are written straight into the cell. */
ms_status ms_storage_new_in(ms_pool *pool, ms_stream *stream, size_t bytes, ms_storage **out)
{
    ms_engine *engine = stream->engine;
    MS_ASSERT(ms_on_host(engine));
    ms_storage *storage = NULL;
    ms_status status = struct_take(engine, &storage);
    if (status) return status;
    status = ms_pool_take(pool, stream, bytes, &storage->block, &storage->data, storage->own.reads);
    if (status) {
        storage->next = engine->storages.unused;
        engine->storages.unused = storage;
        return status;
    }
    enlist(engine, pool, bytes, storage);
    /* What was here before counts as read, so that a first write on another stream waits for it. */
    for (uint32_t i = 0; i < engine->stream_count; i++)
        if (storage->own.reads[i]) storage->own.readers |= 1u << i;
    /* New memory holds what its last owner left; the check fills it with NaN, so that reading it
     * shows. */
    if (engine->poison) engine->device->poison->fill(storage);
    *out = storage;
    return MS_OK;
}

/* A storage that is born dropped: it takes no memory until a refill. */
ms_status ms_storage_new_meta(ms_engine *engine, size_t bytes, ms_storage **out)
{
    MS_ASSERT(ms_on_host(engine));
    ms_storage *storage = NULL;
    ms_status status = struct_take(engine, &storage);
    if (status) return status;
    enlist(engine, &engine->pool, bytes, storage);
    storage->data = MS_DROPPED_ADDRESS;
    storage->meta = true;
    *out = storage;
    return MS_OK;
}

/* Host thread only, so the count is not atomic. */
ms_storage *ms_storage_retain(ms_storage *storage)
{
    MS_ASSERT(storage->references > 0);
    storage->references++;
    return storage;
}

/* Gives the block back with the last uses of all cells. The address is replaced by one that faults,
 * so that a stale use is found at once. */
void ms_storage_vacate(ms_storage *storage, bool apart)
{
    ms_engine *engine = storage->engine;
    if (engine->poison) engine->device->poison->fill(storage);
    uint64_t uses[MS_STREAMS_MAX];
    ms_hazard_uses(storage, 0, (uint16_t)storage->cell_count, uses);
    ms_pool_give(storage->pool, storage->block, uses, apart);
    ms_pool_count_gone(storage->pool, storage->bytes);
    storage->block = NULL;
    storage->data = MS_DROPPED_ADDRESS;
}

/* Ends the tie between a derived storage and its origin, and frees the description of how it was
 * derived. Both storages stay. */
static void untie(ms_storage *storage)
{
    if (storage->derived_previous) storage->derived_previous->derived_next = storage->derived_next;
    else storage->origin->derived = storage->derived_next;
    if (storage->derived_next) storage->derived_next->derived_previous = storage->derived_previous;
    if (storage->free_how) storage->free_how(storage->how);
    storage->origin = storage->derived_next = storage->derived_previous = NULL;
    storage->how = NULL;
    storage->free_how = NULL;
}

/* A tie without a reference: either storage may be released first. */
void ms_storage_derive(ms_storage *storage, ms_storage *origin, void *how,
                       void (*free_how)(void *how))
{
    MS_ASSERT(storage != origin && !storage->origin && storage->engine == origin->engine);
    storage->origin = origin;
    storage->how = how;
    storage->free_how = free_how;
    storage->derived_next = origin->derived;
    if (storage->derived_next) storage->derived_next->derived_previous = storage;
    origin->derived = storage;
}

/* Borrowed, and NULL once the origin was released. */
ms_storage *ms_storage_origin(const ms_storage *storage, void **how)
{
    if (how) *how = storage->how;
    return storage->origin;
}

void ms_storage_set_note(ms_storage *storage, void *note, void (*free_note)(void *note))
{
    if (storage->free_note) storage->free_note(storage->note);
    storage->note = note;
    storage->free_note = free_note;
}

void *ms_storage_note(const ms_storage *storage) { return storage->note; }

/* The memory goes back first, while the cells that know its last uses still exist. Tasks that are
 * enqueued may still use the memory: the pool orders its next user after them. */
void ms_storage_release(ms_storage *storage)
{
    MS_ASSERT(!storage || (storage->references > 0 && ms_on_host(storage->engine)));
    if (!storage || --storage->references > 0) return;
    ms_engine *engine = storage->engine;
    if (storage->block) ms_storage_vacate(storage, false);
    /* As a derived storage, then as an origin: no tie may lead to a struct that is used again. */
    if (storage->origin) untie(storage);
    while (storage->derived) untie(storage->derived);
    ms_storage_set_note(storage, NULL, NULL);
    if (storage->previous) storage->previous->next = storage->next;
    else engine->storages.live = storage->next;
    if (storage->next) storage->next->previous = storage->previous;
    free_split(storage);
    storage->next = engine->storages.unused;
    engine->storages.unused = storage;
}

/* Where the cells of these parts end; returns how many there are, at most MS_CELLS_MAX. A cell ends
 * with a part, so one part never has two cells. With too many parts neighbours share a cell, which
 * costs false dependencies and no error. */
static uint32_t cells_of_parts(const size_t *ends, uint32_t parts, size_t cell_ends[MS_CELLS_MAX])
{
    size_t total = ends[parts - 1], begin = 0,
           least = parts > MS_CELLS_MAX ? total / MS_CELLS_MAX + 1 : 1;
    uint32_t cells = 0;
    for (uint32_t i = 0; i < parts; i++)
        if (ends[i] - begin >= least) cell_ends[cells++] = begin = ends[i];
    /* The last parts, which together were too small for a cell. */
    if (begin < total) cell_ends[cells++] = total;
    return cells;
}

/* Only before the first use: earlier uses could not be attributed to cells. Both allocations come
 * before the first change, so a failure leaves the storage whole. */
ms_status ms_storage_split(ms_storage *storage, const size_t *ends, uint32_t parts)
{
    ms_engine *engine = storage->engine;
    if (parts == 0)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "a storage is split into 1 part or more, not 0");
    if (storage->part_ends || storage->used)
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "a storage is split once, before its first use");
    for (uint32_t i = 0; i < parts; i++)
        if ((i > 0 && ends[i] <= ends[i - 1]) || (i + 1 == parts) != (ends[i] == storage->bytes))
            return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                  "part %u ends at byte %zu: ends must ascend and the last must be "
                                  "the storage's %zu bytes",
                                  i, ends[i], storage->bytes);
    /* A storage is one part from the start. */
    if (parts == 1) return MS_OK;
    size_t cell_ends[MS_CELLS_MAX];
    uint32_t cells = cells_of_parts(ends, parts, cell_ends);
    void *cell_memory = NULL, *part_memory = NULL;
    ms_status status = ms_allocate(&engine->context, cells * (sizeof(ms_cell) + sizeof(size_t)),
                                   "cells", &cell_memory);
    if (status) return status;
    status = ms_allocate(&engine->context, parts * (sizeof(ms_version_part) + sizeof(size_t)),
                         "parts", &part_memory);
    if (status) {
        ms_release(&engine->context, cell_memory);
        return status;
    }
    storage->cells = cell_memory;
    storage->ends = (size_t *)(void *)(storage->cells + cells);
    storage->cell_count = cells;
    /* Each cell takes over the former users of the memory. */
    for (uint32_t i = 0; i < cells; i++) storage->cells[i] = storage->own;
    memcpy(storage->ends, cell_ends, cells * sizeof *cell_ends);
    storage->parts = part_memory;
    storage->part_ends = (size_t *)(void *)(storage->parts + parts);
    storage->part_count = parts;
    for (uint32_t i = 0; i < parts; i++) storage->parts[i] = storage->whole;
    memcpy(storage->part_ends, ends, parts * sizeof *ends);
    return MS_OK;
}

/* Linear: a storage has few cells, and most have one. */
void ms_storage_cells(const ms_storage *storage, size_t begin, size_t end, uint16_t *first,
                      uint16_t *count)
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

/* -------------------------------------------------------------------- parts */

/* The parts that bytes [begin, end) are in, by binary search for the first. A storage of one part
 * has no ends to look up: nothing is compared then. */
ms_version_part_range ms_storage_parts(const ms_storage *storage, size_t begin, size_t end)
{
    if (!storage->part_ends) return (ms_version_part_range){ storage->parts, storage->parts + 1 };
    /* No bytes: the part in which they would be, so that a write of an empty tensor counts. */
    if (begin == end) end = begin + 1;
    uint32_t low = 0, high = storage->part_count;
    while (low < high) { /* the first that ends after `begin` */
        uint32_t middle = low + (high - low) / 2;
        if (storage->part_ends[middle] <= begin) low = middle + 1;
        else high = middle;
    }
    uint32_t last = low;
    while (last < storage->part_count && (last == 0 ? 0 : storage->part_ends[last - 1]) < end)
        last++;
    return (ms_version_part_range){ storage->parts + low,
                                    storage->parts + (last > low ? last : low) };
}

/* The newest write to any part of the range. */
uint64_t ms_storage_version(const ms_storage *storage, size_t begin, size_t end)
{
    uint64_t version = 0;
    ms_version_part_range range = ms_storage_parts(storage, begin, end);
    for (const ms_version_part *part = range.first; part < range.end; part++)
        if (part->version > version) version = part->version;
    return version;
}

/* `vacant` of the storage counts the parts that are, so both change together. */
void ms_part_settle(ms_storage *storage, ms_version_part *part)
{
    if (part->vacant) storage->vacant--;
    part->vacant = false;
}

/* The version is the number of the write, so versions of one storage are unique and ascend. */
void ms_part_write(ms_storage *storage, ms_version_part *part, const char *task, uint32_t script)
{
    ms_part_settle(storage, part);
    part->version = storage->writes;
    part->task = task;
    part->script = script;
}

/* One call counts as one write for all parts that it covers. Task names are static strings, so only
 * the pointer is kept. */
void ms_storage_touch(ms_storage *storage, size_t begin, size_t end, const char *task)
{
    ms_version_part_range range = ms_storage_parts(storage, begin, end);
    storage->writes++;
    for (ms_version_part *part = range.first; part < range.end; part++)
        ms_part_write(storage, part, task, storage->engine->script);
}

/* Of several parts the one that was written last; NULL where nothing has written any. */
const char *ms_storage_written_by(const ms_storage *storage, size_t begin, size_t end,
                                  uint32_t *script)
{
    ms_version_part_range range = ms_storage_parts(storage, begin, end);
    const ms_version_part *last = NULL;
    for (const ms_version_part *part = range.first; part < range.end; part++)
        if (!last || part->version > last->version) last = part;
    *script = last ? last->script : 0;
    return last ? last->task : NULL;
}

/* The newest of the range, as backward's question is whether anything was recorded after a
 * version. */
uint64_t ms_storage_recorded(const ms_storage *storage, size_t begin, size_t end)
{
    uint64_t recorded = 0;
    ms_version_part_range range = ms_storage_parts(storage, begin, end);
    for (const ms_version_part *part = range.first; part < range.end; part++)
        if (part->recorded > recorded) recorded = part->recorded;
    return recorded;
}

/* The write that the tape has recorded is the last one, whose number storage->writes is. */
void ms_storage_record(ms_storage *storage, size_t begin, size_t end)
{
    ms_version_part_range range = ms_storage_parts(storage, begin, end);
    for (ms_version_part *part = range.first; part < range.end; part++)
        part->recorded = storage->writes;
}

/* Called in pairs: +1 when a running pass gets a read of these bytes to do, -1 when it has done
 * it. */
void ms_storage_expect_reads(ms_storage *storage, size_t begin, size_t end, int change)
{
    ms_version_part_range range = ms_storage_parts(storage, begin, end);
    for (ms_version_part *part = range.first; part < range.end; part++)
        part->reads += (uint32_t)change;
}

/* One part with a reader is enough, since a write of the range would reach it. */
bool ms_storage_expects_reads(const ms_storage *storage, size_t begin, size_t end)
{
    ms_version_part_range range = ms_storage_parts(storage, begin, end);
    for (const ms_version_part *part = range.first; part < range.end; part++)
        if (part->reads) return true;
    return false;
}

/* The recursion is as deep as the chain of derivations. */
bool ms_storage_expects_any(const ms_storage *storage)
{
    bool any = ms_storage_expects_reads(storage, 0, storage->bytes);
    for (const ms_storage *one = storage->derived; one && !any; one = one->derived_next)
        any = ms_storage_expects_any(one);
    return any;
}

/* Never taken back: a parameter is one as long as its memory. */
void ms_storage_mark_parameter(ms_storage *storage, size_t begin, size_t end)
{
    ms_version_part_range range = ms_storage_parts(storage, begin, end);
    for (ms_version_part *part = range.first; part < range.end; part++) part->parameter = true;
}

/* True for a range that holds some other bytes as well. */
bool ms_storage_is_parameter(const ms_storage *storage, size_t begin, size_t end)
{
    ms_version_part_range range = ms_storage_parts(storage, begin, end);
    for (const ms_version_part *part = range.first; part < range.end; part++)
        if (part->parameter) return true;
    return false;
}

bool ms_storage_is_home(const ms_storage *storage) { return storage->home; }
void ms_storage_set_home(ms_storage *storage) { storage->home = true; }

/* One point per stream, its last use, which covers the earlier ones. Also former users of the
 * memory count, as a new storage takes over their points. */
uint32_t ms_storage_users(const ms_storage *storage, size_t begin, size_t end, ms_point *out)
{
    uint64_t uses[MS_STREAMS_MAX];
    uint16_t first, cells;
    uint32_t count = 0;
    ms_storage_cells(storage, begin, end, &first, &cells);
    ms_hazard_uses(storage, first, cells, uses);
    for (uint16_t i = 0; i < storage->engine->stream_count; i++)
        if (uses[i]) out[count++] = (ms_point){ .stream = i, .seq = uses[i] };
    return count;
}

/* One point per stream: of several cells that one stream wrote, the last write covers the
 * others. */
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
