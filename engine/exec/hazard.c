/* hazard.c: which waits a task needs, from the last writer and readers of each cell and what each
 * stream is already after.
 *
 * A stream's clock says, for every other stream, the newest number that it is after. Waiting for a
 * point merges the clock that the other stream had at that point, so that orders that follow from
 * others are known and cost nothing; strict mode depends on this being exact. */
#include "exec/hazard.h"

#include <string.h>

#include "exec/stream.h"

/* The clock that `of` had at number seq: the newest remembered change at or before it, or NULL.
 * Older changes fall out of the log, which costs extra waits and never correctness: clocks only
 * grow, so knowing less means waiting more. The search begins at the newest change, since waits are
 * mostly for recent numbers. */
static const uint64_t *clock_at(const ms_stream *of, uint64_t seq)
{
    uint32_t kept = of->log_count < MS_CLOCK_LOG ? of->log_count : MS_CLOCK_LOG;
    for (uint32_t i = 0; i < kept; i++) {
        const ms_clock_change *change = &of->log[(of->log_count - 1 - i) % MS_CLOCK_LOG];
        if (change->seq <= seq) return change->clock;
    }
    return NULL;
}

/* Called once a wait is enqueued on `into`, whose number the change carries. What `of` was after at
 * seq, `into` is after from now on, so waits that follow from it need not be enqueued. */
void ms_hazard_merge(ms_stream *into, const ms_stream *of, uint64_t seq)
{
    MS_ASSERT(into != of && seq <= of->enqueued);
    const uint64_t *clock = clock_at(of, seq);
    uint16_t streams = into->engine->stream_count;
    if (clock)
        for (uint16_t i = 0; i < streams; i++)
            if (clock[i] > into->clock[i]) into->clock[i] = clock[i];
    if (seq > into->clock[of->index]) into->clock[of->index] = seq;
    ms_clock_change *change = &into->log[into->log_count++ % MS_CLOCK_LOG];
    change->seq = into->enqueued; /* the wait's own number: what comes from here on is after */
    memcpy(change->clock, into->clock, streams * sizeof *change->clock);
}

/* The intervals ascend, so the search is binary. It runs for each read of what a stream with such
 * intervals wrote last, so it must be cheap. */
bool ms_hazard_spoiled(const ms_engine *engine, ms_point point)
{
    const ms_stream *stream = engine->streams[point.stream];
    size_t low = 0, high = stream->spoiled_count;
    while (low < high) { /* the first that ends at or after the point */
        size_t middle = low + (high - low) / 2;
        if (stream->spoiled[middle].last < point.seq) low = middle + 1;
        else high = middle;
    }
    return low < stream->spoiled_count && stream->spoiled[low].first <= point.seq;
}

/* Of the last writes only: an older write that was skipped has been written over. */
bool ms_storage_spoiled(const ms_storage *storage)
{
    for (uint32_t c = 0; c < storage->cell_count; c++)
        if (storage->cells[c].writer.seq
            && ms_hazard_spoiled(storage->engine, storage->cells[c].writer))
            return true;
    return false;
}

/* One message for each reason a storage cannot be touched: on "meta", vacant after its first
 * refill, vacant after a drop, dropped. Each says who caused it and where. */
ms_status ms_hazard_refuse(const ms_storage *storage, const char *task)
{
    ms_engine *engine = storage->engine;
    const char *made = ms_strings_get(engine->strings, storage->script);
    const char *owner = ms_strings_get(engine->strings, storage->owner);
    const char *dropped = ms_strings_get(engine->strings, storage->dropped);
    if (storage->meta)
        return ms_engine_fail(
            engine, MS_ERROR_STATE,
            "%s needs the values of a tensor on \"meta\" (made at %s), which has a "
            "shape and no memory",
            task, *made ? made : "the engine");
    if (storage->block && !storage->owner)
        return ms_engine_fail(
            engine, MS_ERROR_STATE,
            "%s reads memory (%zu bytes, made at %s on \"meta\") that nothing has "
            "written since its first refill: write it first",
            task, storage->bytes, *made ? made : "the engine");
    if (storage->block)
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "%s reads memory (%zu bytes, made at %s) that %s has dropped (at %s) "
                              "and that nothing has written since its refill: restore it first",
                              task, storage->bytes, *made ? made : "the engine", owner,
                              *dropped ? dropped : "the engine");
    return ms_engine_fail(engine, MS_ERROR_STATE,
                          "%s touches memory (%zu bytes, made at %s) that %s has dropped (at %s): "
                          "refill it first",
                          task, storage->bytes, *made ? made : "the engine", owner,
                          *dropped ? dropped : "the engine");
}

/* Makes `stream` wait for number seq of `of`, unless its clock says that it is after it already. In
 * strict mode a missing wait is an error; calls that come from a script line get their waits even
 * then. A stream needs no wait for its own earlier work, as it runs in order. */
static ms_status order(ms_stream *stream, const char *task, uint16_t of, uint64_t seq,
                       const ms_storage *storage)
{
    ms_engine *engine = stream->engine;
    if (of == stream->index || seq <= stream->clock[of]) return MS_OK;
    if (engine->options.strict && engine->script == 0) {
        const char *made = ms_strings_get(engine->strings, storage->script);
        return ms_engine_fail(engine, MS_ERROR_HAZARD,
                              "%s on stream \"%s\" uses memory (%zu bytes, made at %s) that task "
                              "%llu of stream \"%s\" uses, without a wait between them: "
                              "record an event after that task and let this stream wait for it",
                              task, stream->name, storage->bytes, *made ? made : "the engine",
                              (unsigned long long)seq, engine->streams[of]->name);
    }
    return ms_stream_wait_seq(stream, engine->streams[of], seq);
}

/* Every access waits for the last writer of its cells; a write also waits for the readers since.
 * Dropped storages are refused first, so that no wait is enqueued for a task that will not be. A
 * read of what a failure has skipped is an error, as its value is undefined. */
ms_status ms_hazard_before(ms_stream *stream, const char *task, const ms_access *accesses,
                           uint32_t count)
{
    ms_engine *engine = stream->engine;
    for (uint32_t a = 0; a < count; a++)
        if (!accesses[a].storage->block) return ms_hazard_refuse(accesses[a].storage, task);
    for (uint32_t a = 0; a < count; a++) {
        const ms_access *access = &accesses[a];
        for (uint32_t c = access->first_cell; c < (uint32_t)access->first_cell + access->cells;
             c++) {
            const ms_cell *cell = &access->storage->cells[c];
            if (cell->writer.seq) {
                if (engine->streams[cell->writer.stream]->spoiled_count && (access->mode & MS_READ)
                    && ms_hazard_spoiled(engine, cell->writer))
                    return ms_engine_fail(engine, MS_ERROR_TASK,
                                          "%s reads a tensor that was never written, because of "
                                          "the error reported before",
                                          task);
                ms_status status =
                    order(stream, task, cell->writer.stream, cell->writer.seq, access->storage);
                if (status) return status;
            }
            /* Readers need not wait for each other. */
            if (!(access->mode & MS_WRITE)) continue;
            for (uint32_t readers = cell->readers; readers; readers &= readers - 1) {
                uint16_t reader = (uint16_t)__builtin_ctz(readers);
                ms_status status =
                    order(stream, task, reader, cell->reads[reader], access->storage);
                if (status) return status;
            }
        }
    }
    return MS_OK;
}

/* A write ends all earlier uses of the cell: it came after them, so whoever waits for the write
 * waits for them too. That is why its readers are cleared. It cannot fail, so that the launch,
 * which follows, is always remembered. */
void ms_hazard_after(ms_stream *stream, uint64_t seq, const ms_access *accesses, uint32_t count)
{
    for (uint32_t a = 0; a < count; a++) {
        const ms_access *access = &accesses[a];
        MS_ASSERT(access->storage->references > 0 && access->storage->engine == stream->engine);
        MS_ASSERT((uint32_t)access->first_cell + access->cells <= access->storage->cell_count);
        access->storage->used = true;
        for (uint32_t c = access->first_cell; c < (uint32_t)access->first_cell + access->cells;
             c++) {
            ms_cell *cell = &access->storage->cells[c];
            if (access->mode & MS_WRITE) {
                cell->writer = (ms_point){ .stream = stream->index, .seq = seq };
                cell->readers = 0;
            } else {
                cell->reads[stream->index] = seq;
                cell->readers |= 1u << stream->index;
            }
        }
    }
}

/* The pool stores the result with a freed block. A stream's entry is the greatest number over the
 * cells, which covers all of its earlier uses. */
void ms_hazard_uses(const ms_storage *storage, uint16_t first, uint16_t cells,
                    uint64_t uses[MS_STREAMS_MAX])
{
    memset(uses, 0, storage->engine->stream_count * sizeof uses[0]);
    for (uint32_t c = first; c < (uint32_t)first + cells; c++) {
        const ms_cell *cell = &storage->cells[c];
        MS_ASSERT(cell->writer.seq <= storage->engine->streams[cell->writer.stream]->enqueued);
        if (cell->writer.seq > uses[cell->writer.stream])
            uses[cell->writer.stream] = cell->writer.seq;
        for (uint32_t readers = cell->readers; readers; readers &= readers - 1) {
            uint16_t reader = (uint16_t)__builtin_ctz(readers);
            if (cell->reads[reader] > uses[reader]) uses[reader] = cell->reads[reader];
        }
    }
}
