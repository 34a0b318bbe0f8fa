/* future.c: events, futures and in-flight limits: points of a stream that someone holds. */
#include "exec/state.h"

#include <string.h>

/* ------------------------------------------------------------------- events */

/* An event is a remembered point and nothing in the device, so it costs no work on the stream. */
struct ms_event {
    ms_engine *engine;
    ms_point point;
};

/* The point is the stream's last number, so the event covers all that is enqueued there by now. */
ms_status ms_event_record(ms_stream *stream, ms_event **out)
{
    void *memory = NULL;
    ms_status status = ms_allocate(&stream->engine->context, sizeof(ms_event), "event", &memory);
    if (status) return status;
    ms_event *event = memory;
    event->engine = stream->engine;
    event->point = ms_stream_last(stream);
    *out = event;
    return MS_OK;
}

/* The wait is enqueued: the host does not block. */
ms_status ms_event_wait(ms_event *event, ms_stream *stream)
{
    return ms_stream_wait(stream, event->point);
}
ms_point ms_event_point(const ms_event *event) { return event->point; }

/* Waits that were enqueued for the event know the point and do not need the struct. */
void ms_event_free(ms_event *event)
{
    if (event) ms_release(&event->engine->context, event);
}

/* ------------------------------------------------------------------ futures */

/* A value and the point at which it is ready. The future holds one reference to the value. */
struct ms_future {
    ms_engine *engine;
    ms_value value;
    ms_point ready;
    uint32_t references;
};

/* The value's own retain and release are called on the host thread only. */
ms_status ms_future_new(ms_engine *engine, ms_value value, ms_point ready, ms_future **out)
{
    void *memory = NULL;
    ms_status status = ms_allocate(&engine->context, sizeof(ms_future), "future", &memory);
    if (status) return status;
    ms_future *future = memory;
    *future = (ms_future){ .engine = engine, .value = value, .ready = ready, .references = 1 };
    /* A future may be a point alone, without a value. */
    if (value.object) value.retain(value.object);
    *out = future;
    return MS_OK;
}

ms_future *ms_future_retain(ms_future *future)
{
    MS_ASSERT(future->references > 0);
    future->references++;
    return future;
}

/* The last reference releases the value, whether it is ready or not: its memory is reused in stream
 * order. */
void ms_future_release(ms_future *future)
{
    MS_ASSERT(!future || future->references > 0);
    if (!future || --future->references > 0) return;
    if (future->value.object) future->value.release(future->value.object);
    ms_release(&future->engine->context, future);
}

ms_point ms_future_point(const ms_future *future) { return future->ready; }

/* The stream waits, not the host; the value may be used on that stream at once. The value is
 * borrowed: it lives as long as the future or another reference to it. */
ms_status ms_future_value(ms_future *future, ms_stream *stream, void **borrowed)
{
    ms_status status = ms_stream_wait(stream, future->ready);
    if (!status) *borrowed = future->value.object;
    return status;
}

/* The host waits; an error of the tasks before the point comes out here. */
ms_status ms_future_sync(ms_future *future, void **borrowed)
{
    ms_status status = ms_point_sync(future->engine, future->ready);
    if (!status) *borrowed = future->value.object;
    return status;
}

/* --------------------------------------------------------- in-flight limits */

/* A released acquisition: its bytes count against the limit until a stream has waited for its
 * point. */
typedef struct ms_held {
    ms_point point;
    uint64_t bytes;
} ms_held;

/* Acquisitions are open until they are released, then held in a ring, oldest first. Whoever would
 * exceed the limit waits on its stream for the oldest held one: the host never blocks, and the
 * order of the waits depends on calls only. */
struct ms_inflight {
    ms_engine *engine;
    char name[32];
    uint32_t limit_count, open; /* open: acquired and not yet released */
    uint64_t limit_bytes, open_bytes, held_bytes;
    ms_held *held; /* ring */
    size_t first, count, capacity;
};

/* A limit of 0 could never admit anything, so it is refused here and not at the first
 * acquisition. */
ms_status ms_inflight_new(ms_engine *engine, const char *name, uint32_t count, uint64_t bytes,
                          ms_inflight **out)
{
    if (count == 0 || bytes == 0)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "limit \"%.31s\": count and bytes must be above 0", name);
    void *memory = NULL;
    ms_status status =
        ms_allocate(&engine->context, sizeof(ms_inflight), "in-flight limit", &memory);
    if (status) return status;
    ms_inflight *inflight = memory;
    inflight->engine = engine;
    strncpy(inflight->name, name, sizeof inflight->name - 1);
    inflight->limit_count = count;
    inflight->limit_bytes = bytes;
    *out = inflight;
    return MS_OK;
}

/* Held points need no wait: they only limited what was enqueued. */
void ms_inflight_free(ms_inflight *inflight)
{
    if (!inflight) return;
    ms_release(&inflight->engine->context, inflight->held);
    ms_release(&inflight->engine->context, inflight);
}

/* Refuses what no wait could make room for: more than the limit itself, or more than the open
 * acquisitions leave. An open acquisition has no point yet that a stream could wait for, so running
 * into it is an error and not a deadlock. */
static ms_status check_room(const ms_inflight *inflight, uint64_t bytes)
{
    ms_engine *engine = inflight->engine;
    if (bytes > inflight->limit_bytes)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "limit \"%s\": %llu bytes are asked at once but %llu is the limit: "
                              "raise it to at least that",
                              inflight->name, (unsigned long long)bytes,
                              (unsigned long long)inflight->limit_bytes);
    if (inflight->open + 1 > inflight->limit_count
        || inflight->open_bytes + bytes > inflight->limit_bytes)
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "limit \"%s\": %u acquisitions (%llu bytes) are open and none of "
                              "them has a release to wait for",
                              inflight->name, inflight->open,
                              (unsigned long long)inflight->open_bytes);
    return MS_OK;
}

/* Waits that the stream took before an error stay taken; they do no harm. The oldest is taken out
 * before the next is looked at, so each point is waited for once. */
ms_status ms_inflight_acquire(ms_inflight *inflight, ms_stream *stream, uint64_t bytes)
{
    ms_status status = check_room(inflight, bytes);
    if (status) return status;
    while (inflight->open + inflight->count + 1 > inflight->limit_count
           || inflight->open_bytes + inflight->held_bytes + bytes > inflight->limit_bytes) {
        ms_held oldest = inflight->held[inflight->first];
        status = ms_stream_wait(stream, oldest.point);
        if (status) return status;
        inflight->first = (inflight->first + 1) % inflight->capacity;
        inflight->count--;
        inflight->held_bytes -= oldest.bytes;
    }
    inflight->open++;
    inflight->open_bytes += bytes;
    return MS_OK;
}

/* The ring is allocated at first use. It needs limit_count places at most, because acquire removes
 * before it adds. */
ms_status ms_inflight_release(ms_inflight *inflight, ms_point point, uint64_t bytes)
{
    ms_engine *engine = inflight->engine;
    /* Otherwise the counts would wrap, and the limit would hold no more. */
    if (inflight->open == 0 || bytes > inflight->open_bytes)
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "limit \"%s\": released more than was acquired", inflight->name);
    if (!inflight->held) {
        void *memory = NULL; /* never more than limit_count are held: acquire takes out first */
        ms_status status = ms_allocate(&engine->context, inflight->limit_count * sizeof(ms_held),
                                       "in-flight limit", &memory);
        if (status) return status;
        inflight->held = memory;
        inflight->capacity = inflight->limit_count;
    }
    inflight->held[(inflight->first + inflight->count++) % inflight->capacity] =
        (ms_held){ .point = point, .bytes = bytes };
    inflight->held_bytes += bytes;
    inflight->open--;
    inflight->open_bytes -= bytes;
    return MS_OK;
}
