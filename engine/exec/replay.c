/* replay.c: a range of work that is enqueued once and replayed as one piece of work.
 *
 * A step of training enqueues the same work again and again. A device that can carry out a whole
 * step from one command saves the cost of enqueueing it. The core keeps what it must know of the
 * work as a whole: which storages it touches, on which streams, and that their addresses are still
 * those of the recording. */
#include "exec/engine.h"

#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------- recording */

/* All streams start from one place: each waits for what all others have enqueued so far. No task of
 * the recording then waits for work from before it, which a replay would not repeat. */
static ms_status join_streams(ms_engine *engine, ms_stream *origin)
{
    ms_status status = MS_OK;
    for (uint16_t i = 0; i < engine->stream_count && !status; i++)
        status = ms_stream_wait_seq(origin, engine->streams[i], engine->streams[i]->enqueued);
    for (uint16_t i = 0; i < engine->stream_count && !status; i++)
        status = ms_stream_wait_seq(engine->streams[i], origin, origin->enqueued);
    return status;
}

ms_status ms_replay_begin(ms_stream *origin, ms_replay **out)
{
    ms_engine *engine = origin->engine;
    void *memory = NULL;
    if (!engine->device->record_begin)
        return ms_engine_fail(engine, MS_ERROR_UNSUPPORTED,
                              "device \"%s\" cannot record work and replay it",
                              engine->device->name);
    if (engine->replay)
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "a recording is open already: end it before the next one begins");
    ms_status status = ms_allocate(&engine->context, sizeof(ms_replay), "a recording", &memory);
    if (!status) status = join_streams(engine, origin);
    if (!status) status = engine->device->record_begin(origin);
    if (status) {
        ms_release(&engine->context, memory);
        return status;
    }
    ms_replay *replay = memory;
    replay->engine = engine;
    replay->origin = origin;
    replay->is_open = true;
    engine->replay = replay;
    *out = replay;
    return MS_OK;
}

static int by_storage(const void *left, const void *right)
{
    const ms_access *a = &((const ms_touched *)left)->access,
                    *b = &((const ms_touched *)right)->access;
    if (a->storage->serial != b->storage->serial)
        return a->storage->serial < b->storage->serial ? -1 : 1;
    if (a->first_cell != b->first_cell) return a->first_cell < b->first_cell ? -1 : 1;
    return (a->cells > b->cells) - (a->cells < b->cells);
}

/* Merges entries for the same cells, so that a replay declares each once. */
static void merge(ms_replay *replay)
{
    size_t kept = 0;
    if (replay->count == 0) return;
    qsort(replay->list, replay->count, sizeof *replay->list, by_storage);
    for (size_t i = 1; i < replay->count; i++) {
        ms_touched *one = &replay->list[i];
        if (by_storage(&replay->list[kept], one) == 0) {
            replay->list[kept].access.mode |= one->access.mode;
            ms_storage_release(one->access.storage);
        } else replay->list[++kept] = *one;
    }
    replay->count = kept + 1;
}

ms_status ms_replay_end(ms_replay *replay)
{
    ms_engine *engine = replay->engine;
    if (!replay->is_open)
        return ms_engine_fail(engine, MS_ERROR_STATE, "this recording has ended already");
    replay->is_open = false;
    engine->replay = NULL;
    merge(replay);
    return engine->device->record_end(replay->origin, &replay->graph);
}

/* ------------------------------------------------------------------- replay */

/* The recorded work has the addresses of its recording in it. A storage that was dropped since, or
 * refilled elsewhere, must not be touched there. */
static ms_status check_addresses(const ms_replay *replay)
{
    for (size_t i = 0; i < replay->count; i++) {
        const ms_storage *storage = replay->list[i].access.storage;
        if (!storage->block) return ms_hazard_refuse(storage, "replay");
        if (storage->data != replay->list[i].data)
            return ms_engine_fail(replay->engine, MS_ERROR_STATE,
                                  "replay: a storage of %zu bytes was refilled elsewhere since it "
                                  "was recorded: record the work again",
                                  storage->bytes);
    }
    return MS_OK;
}

static void hand_replay(ms_stream *stream, const ms_launch *launch, const void *what)
{
    stream->engine->device->replay(stream, launch, ((const ms_replay *)what)->graph);
}

/* The list of accesses as ms_stream_hand_over takes it; the caller frees it. */
static ms_status copy_accesses(const ms_replay *replay, ms_access **out)
{
    void *memory = NULL;
    ms_status status = ms_allocate(&replay->engine->context,
                                   (replay->count + 1) * sizeof(ms_access), "a recording", &memory);
    if (status) return status;
    *out = memory;
    for (size_t i = 0; i < replay->count; i++) (*out)[i] = replay->list[i].access;
    return MS_OK;
}

/* A write that the tape does not know of: each replay counts as a write of all that the work
 * writes, so that a tensor that was saved before is not taken for unchanged. */
static void touch_all(const ms_replay *replay)
{
    for (size_t i = 0; i < replay->count; i++) {
        const ms_access *access = &replay->list[i].access;
        if (!(access->mode & MS_WRITE)) continue;
        size_t begin = 0, end = access->storage->bytes;
        if (access->storage->ends) {
            begin = access->first_cell ? access->storage->ends[access->first_cell - 1] : 0;
            end = access->storage->ends[access->first_cell + access->cells - 1];
        }
        ms_storage_touch(access->storage, begin, end, "replay");
    }
}

/* The work is one number of the origin, after all that its streams have enqueued. The streams then
 * wait for it, as if each had carried out its part. */
ms_status ms_replay_run(ms_replay *replay, ms_point *out)
{
    ms_engine *engine = replay->engine;
    ms_stream *origin = replay->origin;
    ms_access *accesses = NULL;
    if (replay->is_open || !replay->graph)
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "only a recording that has ended can be replayed");
    ms_status status = check_addresses(replay);
    if (!status) status = copy_accesses(replay, &accesses);
    for (uint16_t i = 0; i < engine->stream_count && !status; i++)
        if (replay->streams >> i & 1)
            status = ms_stream_wait_seq(origin, engine->streams[i], engine->streams[i]->enqueued);
    ms_launch launch = { .name = "replay",
                         .accesses = accesses,
                         .access_count = (uint32_t)replay->count,
                         .cost = replay->cost };
    if (!status)
        status = ms_stream_hand_over(origin, &launch, MS_KIND_COMPUTE, hand_replay, replay, out);
    ms_release(&engine->context, accesses);
    if (!status) touch_all(replay);
    for (uint16_t i = 0; i < engine->stream_count && !status; i++)
        if (replay->streams >> i & 1)
            status = ms_stream_wait_seq(engine->streams[i], origin, origin->enqueued);
    return status;
}

/* The device may still be carrying out a replay, so the host waits for it first. */
void ms_replay_free(ms_replay *replay)
{
    if (!replay) return;
    ms_engine *engine = replay->engine;
    if (replay->is_open) ms_replay_end(replay);
    ms_engine_await(replay->origin, replay->origin->enqueued);
    if (replay->graph) engine->device->record_free(engine, replay->graph);
    for (size_t i = 0; i < replay->count; i++) ms_storage_release(replay->list[i].access.storage);
    ms_release(&engine->context, replay->list);
    ms_release(&engine->context, replay);
}
