/* trace.c: a record for each task and wait while tracing is on. Workers write times into records whose addresses never change. */
#include "exec/engine.h"

#define MS_TRACE_CHUNK 4096

ms_trace_record *ms_trace_add(ms_engine *engine)
{
    size_t chunk = engine->trace_count / MS_TRACE_CHUNK;
    if (chunk == engine->trace_chunk_count) {
        void *memory = NULL;
        if (ms_grow(&engine->context, (void **)&engine->trace_chunks, &engine->trace_chunk_capacity, chunk + 1, sizeof *engine->trace_chunks)) return NULL;
        if (ms_allocate(&engine->context, MS_TRACE_CHUNK * sizeof(ms_trace_record), "trace", &memory)) return NULL;
        engine->trace_chunks[engine->trace_chunk_count++] = memory;
    }
    ms_trace_record *record = &engine->trace_chunks[chunk][engine->trace_count++ % MS_TRACE_CHUNK];
    *record = (ms_trace_record){ .enqueued_ns = ms_now(engine) };
    return record;
}

ms_status ms_trace_start(ms_engine *engine)
{
    ms_status status = ms_engine_sync(engine);     /* workers may still write into records of an earlier trace */
    if (status) return status;
    engine->trace_count = 0;
    engine->tracing = true;
    return MS_OK;
}

ms_status ms_trace_stop(ms_engine *engine)
{
    engine->tracing = false;
    return ms_engine_sync(engine);
}

size_t ms_trace_count(const ms_engine *engine) { return engine->trace_count; }

const ms_trace_record *ms_trace_get(const ms_engine *engine, size_t index)
{
    return index < engine->trace_count ? &engine->trace_chunks[index / MS_TRACE_CHUNK][index % MS_TRACE_CHUNK] : NULL;
}

void ms_trace_close(ms_engine *engine)
{
    for (size_t i = 0; i < engine->trace_chunk_count; i++) ms_release(&engine->context, engine->trace_chunks[i]);
    ms_release(&engine->context, engine->trace_chunks);
}
