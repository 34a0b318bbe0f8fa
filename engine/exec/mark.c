/* mark.c: lists of marks, which say when a stream passed them. A device writes a mark at any later
 * time, so a list that is given up stays until its marks are passed.
 *
 * The statistics of passes and gathers, the views of planners and `moonshard check` read times
 * through marks (meter/), on every device alike. On the sim device these times are estimates. */
#include "exec/mark.h"

/* A mark and where it was set last. */
typedef struct ms_mark_item {
    ms_mark mark;
    ms_point point; /* where it was set last; seq 0: not yet */
} ms_mark_item;

/* A list of marks whose addresses devices hold until they are passed; so it is never moved, and
 * freed only then. */
struct ms_marks {
    ms_engine *engine;
    ms_marks *next; /* in engine->given_up */
    uint32_t count;
    ms_mark_item items[];
};

/* Closes the first `count` marks, all or those that were opened before an error, and frees the
 * list. */
static void close_marks(ms_marks *marks, uint32_t count)
{
    ms_engine *engine = marks->engine;
    for (uint32_t i = 0; i < count && engine->device->mark_close; i++)
        engine->device->mark_close(engine, &marks->items[i].mark);
    ms_release(&engine->context, marks);
}

/* A mark that was never set counts as passed. */
static bool all_passed(const ms_marks *marks)
{
    for (uint32_t i = 0; i < marks->count; i++)
        if (!ms_point_reached(marks->engine, marks->items[i].point)) return false;
    return true;
}

/* Frees the lists that were given up and are passed. It runs when lists are made and given up, so
 * their number stays small without a thread of its own. */
static void sweep(ms_engine *engine)
{
    ms_marks **at = &engine->given_up;
    while (*at) {
        ms_marks *marks = *at;
        if (all_passed(marks)) {
            *at = marks->next;
            close_marks(marks, marks->count);
        } else at = &marks->next;
    }
}

/* Streams have finished, so no device can write a mark any more. */
void ms_marks_close(ms_engine *engine)
{
    while (engine->given_up) {
        ms_marks *marks = engine->given_up;
        engine->given_up = marks->next;
        close_marks(marks, marks->count);
    }
}

/* The list is made with room for all marks at once: addresses that devices hold never move. */
ms_status ms_marks_new(ms_engine *engine, uint32_t count, ms_marks **out)
{
    void *memory = NULL;
    sweep(engine);
    ms_status status =
        ms_allocate(&engine->context, sizeof(ms_marks) + (size_t)count * sizeof(ms_mark_item),
                    "time marks", &memory);
    if (status) return status;
    ms_marks *marks = memory;
    marks->engine = engine;
    marks->count = count;
    for (uint32_t i = 0; i < count && engine->device->mark_open; i++) {
        status = engine->device->mark_open(engine, &marks->items[i].mark);
        if (status) {
            close_marks(marks, i);
            return status;
        }
    }
    *out = marks;
    return MS_OK;
}

/* The list joins engine->given_up, since a stream may still have to pass one of its marks. */
void ms_marks_free(ms_marks *marks)
{
    if (!marks) return;
    marks->next = marks->engine->given_up;
    marks->engine->given_up = marks;
    sweep(marks->engine);
}

/* A mark is enqueued without hazards: it touches no storage. It cannot fail once its number is
 * taken. */
ms_status ms_marks_set(ms_marks *marks, uint32_t index, ms_stream *stream)
{
    ms_engine *engine = marks->engine;
    ms_mark_item *item = &marks->items[index];
    MS_ASSERT(index < marks->count && ms_on_host(engine) && stream->engine == engine);
    /* As every enqueue does: an error is reported by the next call. */
    if (atomic_load_explicit(&engine->failed, memory_order_relaxed)) return ms_engine_check(engine);
    /* Two streams may not write one mark at the same time. */
    ms_status status = ms_stream_wait(stream, item->point);
    if (status) return status;
    item->point = (ms_point){ .stream = stream->index, .seq = ++stream->enqueued };
    engine->device->mark(stream, item->point.seq, &item->mark);
    return MS_OK;
}

/* Marks that were not set have the point 0, for which nothing is enqueued. */
ms_status ms_marks_wait(const ms_marks *marks, uint32_t first, uint32_t count, ms_stream *stream)
{
    MS_ASSERT(first + count <= marks->count);
    for (uint32_t i = first; i < first + count; i++) {
        ms_status status = ms_stream_wait(stream, marks->items[i].point);
        if (status) return status;
    }
    return MS_OK;
}

/* For callers that wait or ask by themselves. */
ms_point ms_marks_point(const ms_marks *marks, uint32_t index)
{
    MS_ASSERT(index < marks->count);
    return marks->items[index].point;
}

/* Reaching the point orders the device's write of the time before this read. */
bool ms_marks_time(const ms_marks *marks, uint32_t index, uint64_t *ns)
{
    const ms_mark_item *item = &marks->items[index];
    const ms_device *device = marks->engine->device;
    MS_ASSERT(index < marks->count);
    bool known = device->mark_ns && item->point.seq && ms_point_reached(marks->engine, item->point);
    *ns = known ? device->mark_ns(marks->engine, &item->mark) : 0;
    return known;
}
