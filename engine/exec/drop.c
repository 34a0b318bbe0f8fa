/* drop.c: giving up the memory of a storage and taking memory again, while all that refers to the
 * storage stays.
 *
 * Why versions may stay: a tensor that backward needs is checked by its version. A part whose bytes
 * were computed from a source, and are computed from it again while the source is unchanged, holds
 * the same values as before. So each part remembers what restored it last, at which version of that
 * source, and the version that this left in the part. If all of it still holds, nothing that was
 * saved is wrong. If anything differs, the restore is a write, and the version check reports it. */
#include "exec/hazard.h"

#include <string.h>

#include "exec/pool.h"
#include "exec/static_block.h"
#include "exec/storage.h"

/* ------------------------------------------------------ dropping, refilling */

/* Storages derived from this one (casts) are dropped with it: they hold its values once more, and
 * the drop is to free those as well. The recursion is as deep as the chain of derivations. Vacant
 * parts lose their mark with the memory; `dropped` and `owner` are for the message of whoever
 * touches it next. */
static void drop(ms_storage *storage, uint32_t owner)
{
    ms_storage_vacate(storage, true);
    storage->owner = owner;
    storage->dropped = storage->engine->script;
    for (uint32_t i = 0; i < storage->part_count; i++) storage->parts[i].vacant = false;
    storage->vacant = 0;
    for (ms_storage *one = storage->derived; one; one = one->derived_next)
        if (one->block) drop(one, owner);
}

/* Every error comes before the drop, so a failed call leaves the memory in place. Tasks that are
 * enqueued keep their addresses: the pool hands the block out in stream order, after its last
 * use. */
ms_status ms_storage_drop(ms_storage *storage, const char *owner)
{
    ms_engine *engine = storage->engine;
    MS_ASSERT(ms_on_host(engine) && storage->references > 0);
    uint32_t id = 0;
    if (storage->meta)
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "%s drops a storage of %zu bytes on \"meta\", which has no memory",
                              owner, storage->bytes);
    if (!storage->block)
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "%s drops a storage of %zu bytes that %s has dropped already", owner,
                              storage->bytes, ms_strings_get(engine->strings, storage->owner));
    ms_status status = ms_strings_add(engine->strings, owner, strlen(owner), &id);
    if (!status) drop(storage, id);
    return status;
}

static ms_status check_refill(const ms_storage *storage)
{
    MS_ASSERT(ms_on_host(storage->engine) && storage->references > 0);
    if (!storage->block) return MS_OK;
    return ms_engine_fail(storage->engine, MS_ERROR_STATE,
                          "a storage of %zu bytes is refilled that has memory: drop it before",
                          storage->bytes);
}

/* All parts are vacant: reading one is an error until it is written. The pool knows who used the
 * old memory. What was in the new memory before counts as read, so that a first write on another
 * stream waits for it. */
static void begin_again(ms_storage *storage, const uint64_t uses[MS_STREAMS_MAX])
{
    const ms_engine *engine = storage->engine;
    uint32_t readers = 0;
    for (uint16_t i = 0; i < engine->stream_count; i++)
        if (uses[i]) readers |= 1u << i;
    for (uint32_t c = 0; c < storage->cell_count; c++) {
        ms_cell *cell = &storage->cells[c];
        cell->writer = (ms_point){ 0 };
        cell->readers = readers;
        memcpy(cell->reads, uses, engine->stream_count * sizeof *uses);
    }
    /* An empty storage has nothing to write. */
    storage->vacant = storage->bytes ? storage->part_count : 0;
    for (uint32_t i = 0; i < storage->part_count; i++) storage->parts[i].vacant = storage->bytes;
    storage->meta = false;
    if (engine->poison) engine->device->poison->fill(storage);
}

/* The address is a new one: tasks that are enqueued from now on take it from the storage. */
ms_status ms_storage_refill(ms_storage *storage, ms_stream *stream)
{
    uint64_t uses[MS_STREAMS_MAX];
    ms_status status = check_refill(storage);
    MS_ASSERT(stream->engine == storage->engine);
    if (!status)
        status = ms_pool_take(storage->pool, stream, storage->bytes, &storage->block,
                              &storage->data, uses);
    if (!status) begin_again(storage, uses);
    return status;
}

ms_status ms_storage_refill_in(ms_storage *storage, ms_stream *stream, ms_static_block *fixed)
{
    uint64_t uses[MS_STREAMS_MAX];
    ms_status status = check_refill(storage);
    MS_ASSERT(stream->engine == storage->engine);
    if (status) return status;
    if (!ms_static_block_fits(fixed, storage))
        return ms_engine_fail(storage->engine, MS_ERROR_STATE,
                              "a storage of %zu bytes cannot use a room of %zu bytes%s",
                              storage->bytes, fixed->bytes,
                              fixed->storage                 ? ": another one does"
                              : fixed->pool != storage->pool ? " of another pool"
                                                             : "");
    status = ms_static_block_enter(fixed, storage, stream, uses);
    if (!status) begin_again(storage, uses);
    return status;
}

bool ms_storage_is_dropped(const ms_storage *storage) { return !storage->block; }
bool ms_storage_is_meta(const ms_storage *storage) { return storage->meta; }

/* ----------------------------------------------------------------- touching */

/* The count of vacant parts answers for most storages without a look at the parts. */
bool ms_storage_is_vacant(const ms_storage *storage, size_t begin, size_t end)
{
    if (!storage->vacant || begin == end) return false;
    ms_version_part_range range = ms_storage_parts(storage, begin, end);
    for (const ms_version_part *part = range.first; part < range.end; part++)
        if (part->vacant) return true;
    return false;
}

/* A write of a vacant part is allowed: it is what ends the vacancy. */
ms_status ms_storage_check(const ms_storage *storage, size_t begin, size_t end, bool read,
                           const char *task)
{
    if (storage->block && !(read && ms_storage_is_vacant(storage, begin, end))) return MS_OK;
    return ms_hazard_refuse(storage, task);
}

/* Reports problems as flags and makes no message: an enqueue with many accesses asks each of them,
 * and only one refusal needs a text. The cells are those of the bytes between begin and end. */
uint32_t ms_storage_access(ms_storage *storage, size_t begin, size_t end, uint8_t mode,
                           ms_access *out)
{
    out->storage = storage;
    out->mode = mode;
    ms_storage_cells(storage, begin, end, &out->first_cell, &out->cells);
    if (!storage->block)
        return storage->meta ? MS_ACCESS_DROPPED | MS_ACCESS_META : MS_ACCESS_DROPPED;
    return (mode & MS_READ) && ms_storage_is_vacant(storage, begin, end) ? MS_ACCESS_VACANT : 0;
}

/* ---------------------------------------------------------------- restoring */

/* Whether the bytes are all of the part. A restore of a part of a part leaves the rest as it was,
 * so it cannot bring the whole part back to a known state. */
static bool covers(const ms_storage *storage, const ms_version_part *part, size_t begin, size_t end)
{
    size_t index = (size_t)(part - storage->parts);
    size_t from = index && storage->part_ends ? storage->part_ends[index - 1] : 0;
    size_t to = storage->part_ends ? storage->part_ends[index] : storage->bytes;
    return begin <= from && to <= end;
}

/* The same range of the same storage, whatever its version. */
static bool same_bytes(ms_source a, ms_source b)
{
    return a.storage == b.storage && a.begin == b.begin && a.end == b.end;
}

/* A part keeps its version only if the same bytes of the same source restored it before, nothing
 * has written it since, and the source has the version it had then. Otherwise the restore is a
 * write. storage->writes rises at most once, as one restore is one write. */
void ms_storage_restore(ms_storage *storage, size_t begin, size_t end, const ms_storage *source,
                        size_t source_begin, size_t source_end, const char *task)
{
    ms_version_part_range range = ms_storage_parts(storage, begin, end);
    ms_source now = { .storage = source->serial,
                      .begin = source_begin,
                      .end = source_end,
                      .version = ms_storage_version(source, source_begin, source_end) };
    uint32_t script = 0;
    const char *writer = ms_storage_written_by(source, source_begin, source_end, &script);
    uint64_t before = storage->writes;
    for (ms_version_part *part = range.first; part < range.end; part++) {
        bool whole = covers(storage, part, begin, end);
        bool known = whole && same_bytes(part->source, now) && part->restored == part->version;
        ms_part_settle(storage, part);
        if (!known || part->source.version != now.version) {
            storage->writes = before + 1;
            /* Where only the source has changed, its last write is what a user must look at. */
            if (known && writer) ms_part_write(storage, part, writer, script);
            else ms_part_write(storage, part, task, storage->engine->script);
        }
        part->source = whole ? now : (ms_source){ 0 };
        part->restored = part->version;
    }
}
