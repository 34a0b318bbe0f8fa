/* measure.c: times of calls that put work onto a stream, apart from the engine's work (task.h). */
#include "exec/cuda/errors.h"

struct ms_cuda_meter {
    ms_engine *engine;
    ms_cuda_stream stream;
    ms_cuda_event from, to;
    ms_cuda_address memory;
};

static ms_cuda_result make(ms_cuda_meter *meter, size_t bytes, unsigned char fill)
{
    const ms_cuda_device *self = ms_cuda_enter(meter->engine);
    const ms_cuda *cuda = &self->cuda;
    ms_cuda_result result = cuda->allocate(&meter->memory, bytes);
    if (!result)
        result = cuda->stream_create(&meter->stream, MS_CUDA_STREAM_NON_BLOCKING, self->least);
    if (!result) result = cuda->event_create(&meter->from, MS_CUDA_EVENT_TIMING);
    if (!result) result = cuda->event_create(&meter->to, MS_CUDA_EVENT_TIMING);
    if (!result) result = cuda->fill(meter->memory, fill, bytes, meter->stream);
    return result;
}

ms_status ms_cuda_meter_open(ms_engine *engine, size_t bytes, unsigned char fill,
                             ms_cuda_meter **out)
{
    void *memory = NULL;
    ms_status status = ms_engine_sync(engine);
    if (!status) status = ms_allocate(&engine->context, sizeof(ms_cuda_meter), "meter", &memory);
    if (status) return status;
    ms_cuda_meter *meter = memory;
    meter->engine = engine;
    ms_cuda_result result = make(meter, bytes, fill);
    if (!result) *out = meter;
    else ms_cuda_meter_close(meter);
    return result ? ms_cuda_fail(engine, result, "nothing can be timed") : MS_OK;
}

void ms_cuda_meter_close(ms_cuda_meter *meter)
{
    const ms_cuda *cuda = &ms_cuda_enter(meter->engine)->cuda;
    if (meter->from) (void)cuda->event_destroy(meter->from);
    if (meter->to) (void)cuda->event_destroy(meter->to);
    if (meter->stream) (void)cuda->stream_destroy(meter->stream);
    if (meter->memory) (void)cuda->release(meter->memory);
    ms_release(&meter->engine->context, meter);
}

char *ms_cuda_meter_memory(const ms_cuda_meter *meter) { return (char *)(uintptr_t)meter->memory; }

ms_status ms_cuda_meter_time(ms_cuda_meter *meter, ms_cuda_metered *call, void *user,
                             uint32_t count, double *us)
{
    const ms_cuda *cuda = &ms_cuda_enter(meter->engine)->cuda;
    bool is_taken = true;
    float ms = 0;
    ms_cuda_result result = cuda->event_record(meter->from, meter->stream);
    for (uint32_t i = 0; i < count && is_taken && !result; i++)
        is_taken = call(user, meter->stream);
    if (!result) result = cuda->event_record(meter->to, meter->stream);
    if (!result) result = cuda->event_synchronize(meter->to);
    if (!result) result = cuda->event_elapsed(&ms, meter->from, meter->to);
    *us = is_taken ? (double)ms * 1e3 / count : -1;
    return result ? ms_cuda_fail(meter->engine, result, "the time of a call") : MS_OK;
}
