/* capture.c: a range of work that is enqueued once and replayed as one piece of work.
 *
 * A step of training enqueues the same work again and again. A device that can carry out a whole
 * step from one command saves the cost of enqueueing it. The core keeps what it must know of the
 * work as a whole: which storages it touches, on which streams, and that their addresses are still
 * those of the recording. */
#include "exec/engine.h"

#include <stdlib.h>
#include <string.h>

/* A storage that the work touches, and where its memory was. */
typedef struct touched {
    ms_access access; /* retained storage */
    const char *data;
} touched;

/* A recording. The origin carries the replays; other streams join in by waits. `list` holds one
 * entry for each cell range once the recording has ended, and one for each access before. */
struct ms_capture {
    ms_engine *engine;
    ms_stream *origin;
    uint32_t streams; /* bit for each stream that the work is on */
    bool is_open;
    void *graph; /* the device's, once the recording has ended */
    touched *list;
    size_t count, capacity;
    ms_task_cost cost; /* of all work together */
};

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

ms_status ms_capture_begin(ms_stream *origin, ms_capture **out)
{
    ms_engine *engine = origin->engine;
    void *memory = NULL;
    if (!engine->device->capture_begin)
        return ms_engine_fail(engine, MS_ERROR_UNSUPPORTED,
                              "device \"%s\" cannot record work and replay it",
                              engine->device->name);
    if (engine->capture)
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "a recording is open already: end it before the next one begins");
    ms_status status = ms_allocate(&engine->context, sizeof(ms_capture), "a recording", &memory);
    if (!status) status = join_streams(engine, origin);
    if (!status) status = engine->device->capture_begin(origin);
    if (status) {
        ms_release(&engine->context, memory);
        return status;
    }
    ms_capture *capture = memory;
    capture->engine = engine;
    capture->origin = origin;
    capture->is_open = true;
    engine->capture = capture;
    *out = capture;
    return MS_OK;
}

/* Comes before the work is enqueued, so that a failure leaves nothing that was not recorded. The
 * storages are retained: their memory cannot go to others while the recording may be replayed. */
ms_status ms_capture_note(ms_stream *stream, const ms_launch *launch)
{
    ms_engine *engine = stream->engine;
    ms_capture *capture = engine->capture;
    ms_status status = ms_grow(&engine->context, (void **)&capture->list, &capture->capacity,
                               capture->count + launch->access_count, sizeof *capture->list);
    if (status) return status;
    for (uint32_t i = 0; i < launch->access_count; i++) {
        ms_storage *storage = ms_storage_retain(launch->accesses[i].storage);
        capture->list[capture->count++] =
            (touched){ .access = launch->accesses[i], .data = storage->data };
    }
    capture->streams |= 1u << stream->index;
    capture->cost.flops += launch->cost.flops;
    capture->cost.bytes += launch->cost.bytes;
    return MS_OK;
}

static int by_storage(const void *left, const void *right)
{
    const ms_access *a = &((const touched *)left)->access, *b = &((const touched *)right)->access;
    if (a->storage->serial != b->storage->serial)
        return a->storage->serial < b->storage->serial ? -1 : 1;
    if (a->first_cell != b->first_cell) return a->first_cell < b->first_cell ? -1 : 1;
    return (a->cells > b->cells) - (a->cells < b->cells);
}

/* Merges entries for the same cells, so that a replay declares each once. */
static void merge(ms_capture *capture)
{
    size_t kept = 0;
    if (capture->count == 0) return;
    qsort(capture->list, capture->count, sizeof *capture->list, by_storage);
    for (size_t i = 1; i < capture->count; i++) {
        touched *one = &capture->list[i];
        if (by_storage(&capture->list[kept], one) == 0) {
            capture->list[kept].access.mode |= one->access.mode;
            ms_storage_release(one->access.storage);
        } else capture->list[++kept] = *one;
    }
    capture->count = kept + 1;
}

ms_status ms_capture_end(ms_capture *capture)
{
    ms_engine *engine = capture->engine;
    if (!capture->is_open)
        return ms_engine_fail(engine, MS_ERROR_STATE, "this recording has ended already");
    capture->is_open = false;
    engine->capture = NULL;
    merge(capture);
    return engine->device->capture_end(capture->origin, &capture->graph);
}

/* ------------------------------------------------------------------- replay */

/* The recorded work has the addresses of its recording in it. A storage that was dropped since, or
 * refilled elsewhere, must not be touched there. */
static ms_status check_addresses(const ms_capture *capture)
{
    for (size_t i = 0; i < capture->count; i++) {
        const ms_storage *storage = capture->list[i].access.storage;
        if (!storage->block) return ms_hazard_refuse(storage, "replay");
        if (storage->data != capture->list[i].data)
            return ms_engine_fail(capture->engine, MS_ERROR_STATE,
                                  "replay: a storage of %zu bytes was refilled elsewhere since it "
                                  "was recorded: record the work again",
                                  storage->bytes);
    }
    return MS_OK;
}

static void hand_replay(ms_stream *stream, const ms_launch *launch, const void *what)
{
    stream->engine->device->replay(stream, launch, ((const ms_capture *)what)->graph);
}

/* The list of accesses as ms_stream_hand_over takes it; the caller frees it. */
static ms_status copy_accesses(const ms_capture *capture, ms_access **out)
{
    void *memory = NULL;
    ms_status status =
        ms_allocate(&capture->engine->context, (capture->count + 1) * sizeof(ms_access),
                    "a recording", &memory);
    if (status) return status;
    *out = memory;
    for (size_t i = 0; i < capture->count; i++) (*out)[i] = capture->list[i].access;
    return MS_OK;
}

/* A write that the tape does not know of: each replay counts as a write of all that the work
 * writes, so that a tensor that was saved before is not taken for unchanged. */
static void touch_all(const ms_capture *capture)
{
    for (size_t i = 0; i < capture->count; i++) {
        const ms_access *access = &capture->list[i].access;
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
ms_status ms_capture_replay(ms_capture *capture, ms_point *out)
{
    ms_engine *engine = capture->engine;
    ms_stream *origin = capture->origin;
    ms_access *accesses = NULL;
    if (capture->is_open || !capture->graph)
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "only a recording that has ended can be replayed");
    ms_status status = check_addresses(capture);
    if (!status) status = copy_accesses(capture, &accesses);
    for (uint16_t i = 0; i < engine->stream_count && !status; i++)
        if (capture->streams >> i & 1)
            status = ms_stream_wait_seq(origin, engine->streams[i], engine->streams[i]->enqueued);
    ms_launch launch = { .name = "replay",
                         .accesses = accesses,
                         .access_count = (uint32_t)capture->count,
                         .cost = capture->cost };
    if (!status)
        status = ms_stream_hand_over(origin, &launch, MS_KIND_COMPUTE, hand_replay, capture, out);
    ms_release(&engine->context, accesses);
    if (!status) touch_all(capture);
    for (uint16_t i = 0; i < engine->stream_count && !status; i++)
        if (capture->streams >> i & 1)
            status = ms_stream_wait_seq(engine->streams[i], origin, origin->enqueued);
    return status;
}

/* The device may still be carrying out a replay, so the host waits for it first. */
void ms_capture_free(ms_capture *capture)
{
    if (!capture) return;
    ms_engine *engine = capture->engine;
    if (capture->is_open) ms_capture_end(capture);
    ms_engine_await(capture->origin, capture->origin->enqueued);
    if (capture->graph) engine->device->capture_free(engine, capture->graph);
    for (size_t i = 0; i < capture->count; i++) ms_storage_release(capture->list[i].access.storage);
    ms_release(&engine->context, capture->list);
    ms_release(&engine->context, capture);
}
