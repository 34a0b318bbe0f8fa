/* device.c: the table of the cuda device, and its state in an engine.
 *
 * Streams of communication are made with MS_PRIORITY_HIGH (comm/group.c), which is the greatest
 * priority of the driver. A stream of a script has the priority that the script asks for.
 *
 * Functions of the table that are NULL, and why
 * - `adopt`, `disown` and `poison` need memory that the host and the device share.
 * - `share`, `import` and `forget` would need CUDA IPC. A transport that copies between the GPUs of
 *   one node would use them. NCCL's windows, and its gathers by copy engines, which take no
 *   multiprocessors, would also need memory that other processes can open. */
#include <stdio.h>
#include <string.h>

#include "exec/cuda/batch.h"
#include "exec/cuda/completion.h"
#include "exec/cuda/deferred.h"
#include "exec/cuda/errors.h"
#include "exec/cuda/kernel.h"
#include "exec/cuda/memory.h"
#include "exec/cuda/offload.h"
#include "exec/cuda/pinned.h"
#include "exec/cuda/progress.h"
#include "exec/cuda/replay.h"

/* ------------------------------------------------------------------ opening */

static void release_spare(ms_cuda_device *self)
{
    while (self->spare_count > 0) (void)self->cuda.event_destroy(self->spare[--self->spare_count]);
    if (self->began) (void)self->cuda.event_destroy(self->began);
    if (self->anchor) (void)self->cuda.event_destroy(self->anchor);
    if (self->next_anchor) (void)self->cuda.event_destroy(self->next_anchor);
    while (self->notes) (void)self->cuda.host_release(ms_cuda_take_note(self));
    ms_cuda_give_pinned_back(self);
}

static void cuda_close(ms_engine *engine, void *state)
{
    ms_cuda_device *self = state;
    (void)self->cuda.context_set(self->context);
    ms_cuda_forget_kernels(self, &engine->context);
    release_spare(self);
    if (self->reader) (void)self->cuda.stream_destroy(self->reader);
    if (self->builder) (void)self->cuda.stream_destroy(self->builder);
    ms_release(&engine->context, self->spare);
    ms_release(&engine->context, self->memory.parked);
    (void)self->cuda.context_release(self->gpu);
    ms_release(&engine->context, self);
}

/* What the GPU can do, and what every engine needs of it. */
static ms_cuda_result prepare(ms_cuda_device *self, int *major, int *minor)
{
    const ms_cuda *cuda = &self->cuda;
    int has_virtual = 0;
    ms_cuda_allocation properties = { .type = MS_CUDA_ALLOCATION_PINNED,
                                      .location = { MS_CUDA_LOCATION_GPU, self->gpu } };
    ms_cuda_result result = cuda->gpu_attribute(major, MS_CUDA_MAJOR, self->gpu);
    if (!result) result = cuda->gpu_attribute(minor, MS_CUDA_MINOR, self->gpu);
    if (!result) result = cuda->gpu_attribute(&has_virtual, MS_CUDA_VIRTUAL_MEMORY, self->gpu);
    if (!result) result = cuda->priorities(&self->least, &self->greatest);
    self->memory.has_virtual = has_virtual != 0;
    self->memory.grain = 1 << 21;
    if (!result && self->memory.has_virtual)
        result =
            cuda->granularity(&self->memory.grain, &properties, MS_CUDA_GRANULARITY_RECOMMENDED);
    /* The pool moves granules of 2 MiB, which is what all GPUs have. */
    if (self->memory.grain > 1 << 21) self->memory.has_virtual = false;
    if (!result)
        result = cuda->stream_create(&self->reader, MS_CUDA_STREAM_NON_BLOCKING, self->least);
    if (!result) result = cuda->event_create(&self->began, MS_CUDA_EVENT_NO_TIMING);
    if (!result) result = cuda->event_create(&self->anchor, MS_CUDA_EVENT_TIMING);
    if (!result) result = cuda->event_create(&self->next_anchor, MS_CUDA_EVENT_TIMING);
    if (!result) result = cuda->event_record(self->began, self->reader);
    if (!result) result = cuda->event_record(self->anchor, self->reader);
    if (!result) result = cuda->stream_synchronize(self->reader);
    return result;
}

#define MS_CUDA_MAJOR_LEAST 8 /* of the compute capability for which kernels are built */

static ms_status use_gpu(ms_engine *engine, ms_cuda_device *self)
{
    char name[128] = "", what[192];
    int major = 0, minor = 0;
    ms_cuda_result result = self->cuda.gpu_get(&self->gpu, (int)engine->options.device_index);
    if (!result) result = self->cuda.gpu_name(name, sizeof name, self->gpu);
    ms_cuda_context context = NULL;
    if (!result) result = self->cuda.context_retain(&context, self->gpu);
    if (result) return ms_cuda_fail(engine, result, "the GPU cannot be used");
    self->context = context;
    result = self->cuda.context_set(context);
    if (!result) result = prepare(self, &major, &minor);
    self->anchor_ns = self->anchored_ns = ms_now(engine);
    snprintf(what, sizeof what, "%s cannot be used", name);
    if (result) return ms_cuda_fail(engine, result, what);
    if (major >= MS_CUDA_MAJOR_LEAST) return MS_OK;
    return ms_engine_fail(engine, MS_ERROR_UNSUPPORTED,
                          "GPU %u, %s, has compute capability %d.%d: %d.0 or later is needed",
                          engine->options.device_index, name, major, minor, MS_CUDA_MAJOR_LEAST);
}

static ms_status cuda_open(ms_engine *engine, void **state)
{
    void *memory = NULL;
    ms_status status = ms_allocate(&engine->context, sizeof(ms_cuda_device), "device", &memory);
    if (status) return status;
    ms_cuda_device *self = memory;
    atomic_flag_clear(&self->failing);
    status = ms_cuda_load(&engine->context, &self->cuda);
    if (status) {
        ms_release(&engine->context, self);
        return status;
    }
    const ms_os *os = engine->context.os;
    const char *blocking = os->environment(os->user, MS_CUDA_BLOCKING);
    self->blocks = blocking && strcmp(blocking, "1") == 0;
    *state = self;
    status = use_gpu(engine, self);
    if (!status) return MS_OK;
    if (self->context) cuda_close(engine, self);
    else ms_release(&engine->context, self);
    *state = NULL;
    return status;
}

/* How many GPUs this machine has. That there is no driver is told when the device opens. */
static uint32_t cuda_count(const ms_engine *engine)
{
    ms_cuda cuda;
    ms_context context;
    ms_context_init(&context, engine->context.os);
    if (ms_cuda_load(&context, &cuda)) return 1;
    return (uint32_t)cuda.gpus;
}

static ms_status cuda_set_priority(ms_stream *stream, int32_t priority)
{
    /* The driver sets it when a stream is made, so it makes another one while this one is new. */
    ms_engine *engine = stream->engine;
    ms_cuda_device *self = ms_cuda_enter(engine);
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    ms_cuda_stream made = NULL;
    ms_cuda_await(stream, queue->head);
    ms_cuda_result result = self->cuda.stream_create(&made, MS_CUDA_STREAM_NON_BLOCKING,
                                                     ms_cuda_priority(self, priority));
    if (result) return ms_cuda_fail(engine, result, "cannot make a CUDA stream");
    (void)self->cuda.stream_destroy(queue->stream);
    queue->stream = made;
    return MS_OK;
}

static void cuda_stream_close(ms_stream *stream, void *state)
{
    ms_cuda_put_rest(stream);
    ms_cuda_queue_close(stream, state);
}

/* Whoever asks puts work of his own on the stream, which must come after what is held. */
static void *cuda_native(ms_stream *stream)
{
    (void)ms_cuda_enter(stream->engine);
    ms_cuda_put_rest(stream);
    ms_cuda_cut(stream, NULL);
    ms_cuda_queue_of(stream)->is_shared = true;
    return ms_cuda_queue_of(stream)->stream;
}

const ms_device ms_device_cuda = {
    .name = "cuda",
    .kernels = "cuda",
    .values = true,
    .count = cuda_count,
    .variable = "CUDA_VISIBLE_DEVICES",
    .open = cuda_open,
    .close = cuda_close,
    .stream_open = ms_cuda_queue_open,
    .stream_close = cuda_stream_close,
    .set_priority = cuda_set_priority,
    .native = cuda_native,
    .run = ms_cuda_run_in_turn,
    .batch = ms_cuda_batch,
    .wait = ms_cuda_wait_in_turn,
    .reached = ms_cuda_reached_in_turn,
    .await = ms_cuda_await_in_turn,
    .mark_open = ms_cuda_mark_open,
    .mark_close = ms_cuda_mark_close,
    .mark = ms_cuda_mark_in_turn,
    .mark_ns = ms_cuda_mark_ns,
    .copy_in = ms_cuda_copy_in_in_turn,
    .copy_out = ms_cuda_copy_out_in_turn,
    .read = ms_cuda_read,
    .fail_if = ms_cuda_fail_if_in_turn,
    .call = ms_cuda_call_in_turn,
    .repeat = ms_cuda_repeat,
    .repeats = ms_cuda_repeats,
    .memory = &ms_cuda_inside,
    .outside = &ms_cuda_outside,
    .host_allocate = ms_cuda_host_allocate,
    .host_release = ms_cuda_host_release,
    .available = ms_cuda_available,
};
