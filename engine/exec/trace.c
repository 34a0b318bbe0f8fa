/* trace.c: a record for each task and wait while tracing is on. Workers write times into records
 * whose addresses never change. */
#include "exec/trace.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MS_TRACE_CHUNK 4096

/* Records come in chunks that never move, as workers write times into them later. Without memory
 * the task runs untraced; a trace never makes a program fail. */
ms_trace_record *ms_trace_add(ms_engine *engine)
{
    size_t chunk = engine->trace.count / MS_TRACE_CHUNK;
    if (chunk == engine->trace.chunk_count) {
        void *memory = NULL;
        if (ms_grow(&engine->context, (void **)&engine->trace.chunks, &engine->trace.chunk_capacity,
                    chunk + 1, sizeof *engine->trace.chunks))
            return NULL;
        if (ms_allocate(&engine->context, MS_TRACE_CHUNK * sizeof(ms_trace_record), "trace",
                        &memory))
            return NULL;
        engine->trace.chunks[engine->trace.chunk_count++] = memory;
    }
    ms_trace_record *record = &engine->trace.chunks[chunk][engine->trace.count++ % MS_TRACE_CHUNK];
    *record = (ms_trace_record){ .enqueued_ns = ms_now(engine),
                                 .script = engine->script,
                                 .label = engine->trace.label,
                                 .step = (int64_t)engine->trace.step - 1 };
    return record;
}

/* Records of an earlier trace are used again, so all work that may write to them is awaited
 * first. */
ms_status ms_trace_start(ms_engine *engine)
{
    /* Workers may still write into records of an earlier trace. */
    ms_status status = ms_engine_sync(engine);
    if (status) return status;
    engine->trace.count = engine->trace.range_count = 0;
    engine->trace.is_on = true;
    return MS_OK;
}

/* The sync makes all times complete before the records are read. */
ms_status ms_trace_stop(ms_engine *engine)
{
    engine->trace.is_on = false;
    return ms_engine_sync(engine);
}

/* Kept as step + 1, so that a zeroed engine has no step (-1). */
void ms_trace_step(ms_engine *engine, int64_t step) { engine->trace.step = (uint64_t)(step + 1); }

/* Returns the label before, for ms_trace_relabel: labels nest like calls. The text is formatted
 * only while tracing. */
uint32_t ms_trace_label(ms_engine *engine, const char *format, ...)
{
    uint32_t before = engine->trace.label;
    if (!engine->trace.is_on) return before;
    char text[128];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    /* Without memory the records have no label; tracing goes on. */
    if (ms_strings_add(engine->strings, text, strlen(text), &engine->trace.label))
        engine->trace.label = 0;
    return before;
}

/* The caller puts back what ms_trace_label returned. */
void ms_trace_relabel(ms_engine *engine, uint32_t label) { engine->trace.label = label; }

size_t ms_trace_count(const ms_engine *engine) { return engine->trace.count; }

/* NULL past the end. After ms_trace_stop all times are complete. */
const ms_trace_record *ms_trace_get(const ms_engine *engine, size_t index)
{
    return index < engine->trace.count
               ? &engine->trace.chunks[index / MS_TRACE_CHUNK][index % MS_TRACE_CHUNK]
               : NULL;
}

/* Without memory the trace lacks the range. */
void ms_trace_add_range(ms_engine *engine, size_t first, const char *format, ...)
{
    char text[128];
    va_list list;
    ms_trace_range range = { .first = first, .end = engine->trace.count };
    if (!engine->trace.is_on || first == engine->trace.count) return;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    if (ms_strings_add(engine->strings, text, strlen(text), &range.name)
        || ms_grow(&engine->context, (void **)&engine->trace.ranges, &engine->trace.range_capacity,
                   engine->trace.range_count + 1, sizeof range))
        return;
    engine->trace.ranges[engine->trace.range_count++] = range;
}

/* NULL past the end. In the order in which ranges ended. */
const ms_trace_range *ms_trace_range_get(const ms_engine *engine, size_t index)
{
    return index < engine->trace.range_count ? &engine->trace.ranges[index] : NULL;
}

/* Streams are closed by now, so no worker writes into a record. */
void ms_trace_close(ms_engine *engine)
{
    for (size_t i = 0; i < engine->trace.chunk_count; i++)
        ms_release(&engine->context, engine->trace.chunks[i]);
    ms_release(&engine->context, engine->trace.chunks);
    ms_release(&engine->context, engine->trace.ranges);
}
