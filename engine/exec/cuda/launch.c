/* launch.c: work that goes onto a stream: kernels, copies, functions of the host. */
#include <stdio.h>
#include <string.h>

#include "exec/cuda/cuda.h"

/* ------------------------------------------------------------------ kernels */

static ms_cuda_result load_image(ms_cuda_device *self, ms_context *context, const void *image,
                                 ms_cuda_module *out)
{
    for (size_t i = 0; i < self->image_count; i++)
        if (self->images[i].image == image) {
            *out = self->images[i].module;
            return MS_CUDA_SUCCESS;
        }
    if (ms_grow(context, (void **)&self->images, &self->image_capacity, self->image_count + 1,
                sizeof *self->images))
        return MS_CUDA_OUT_OF_MEMORY;
    ms_cuda_result result = self->cuda.module_load(out, image);
    if (!result)
        self->images[self->image_count++] = (ms_cuda_image){ .image = image, .module = *out };
    return result;
}

static size_t place_of(const ms_cuda_device *self, const ms_cuda_task *task, uint32_t variant)
{
    size_t mask = self->known_capacity - 1;
    size_t at = ((uintptr_t)task / 16 * 31 + variant * 7) & mask;
    while (self->known[at].task
           && (self->known[at].task != task || self->known[at].variant != variant))
        at = (at + 1) & mask;
    return at;
}

/* Twice the room, when it is half full. */
static ms_status make_room(ms_cuda_device *self, ms_context *context)
{
    if (self->known_capacity && self->known_count * 2 < self->known_capacity) return MS_OK;
    ms_cuda_known *before = self->known;
    size_t count = self->known_capacity, capacity = count ? 2 * count : 64;
    void *memory = NULL;
    ms_status status =
        ms_allocate(context, capacity * sizeof *self->known, "table of kernels", &memory);
    if (status) return status;
    self->known = memory;
    self->known_capacity = capacity;
    for (size_t i = 0; i < count; i++)
        if (before[i].task)
            self->known[place_of(self, before[i].task, before[i].variant)] = before[i];
    ms_release(context, before);
    return MS_OK;
}

/* A kernel is found at its first launch. */
static ms_cuda_result find(ms_cuda_device *self, ms_context *context, const ms_cuda_task *task,
                           uint32_t variant, ms_cuda_function *out)
{
    ms_cuda_module module = NULL;
    if (make_room(self, context)) return MS_CUDA_OUT_OF_MEMORY;
    ms_cuda_known *known = &self->known[place_of(self, task, variant)];
    if (known->task) {
        *out = known->function;
        return MS_CUDA_SUCCESS;
    }
    ms_cuda_result result = load_image(self, context, task->image, &module);
    if (!result) result = self->cuda.module_function(out, module, task->kernels[variant]);
    if (result) return result;
    *known = (ms_cuda_known){ .task = task, .variant = variant, .function = *out };
    self->known_count++;
    return MS_CUDA_SUCCESS;
}

void ms_cuda_forget_kernels(ms_cuda_device *self, ms_context *context)
{
    for (size_t i = 0; i < self->image_count; i++)
        (void)self->cuda.module_unload(self->images[i].module);
    ms_release(context, self->images);
    ms_release(context, self->known);
}

/* Where a trace is recorded, events with times stand around the task. */
static ms_cuda_duty *begin_times(ms_stream *stream, const ms_launch *launch)
{
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    ms_cuda_duty *duty =
        launch->record ? ms_cuda_add_duty(stream, launch->seq, launch->script) : NULL;
    if (!duty) return NULL;
    duty->record = launch->record;
    if (self->cuda.event_create(&duty->started, MS_CUDA_EVENT_TIMING)) duty->started = NULL;
    if (self->cuda.event_create(&duty->finished, MS_CUDA_EVENT_TIMING)) duty->finished = NULL;
    if (duty->started)
        (void)self->cuda.event_record(duty->started, ms_cuda_queue_of(stream)->stream);
    return duty;
}

static void end_times(ms_stream *stream, const ms_cuda_duty *duty)
{
    if (duty && duty->finished)
        (void)ms_cuda_of(stream->engine)
            ->cuda.event_record(duty->finished, ms_cuda_queue_of(stream)->stream);
}

static ms_cuda_result launch_kernel(ms_stream *stream, const ms_launch *launch)
{
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    const ms_cuda_task *task = (const ms_cuda_task *)(const void *)launch->task;
    ms_cuda_function function = NULL;
    ms_cuda_shape s = { { 1, 1, 1 }, { 1, 1, 1 }, 0 };
    uint32_t variant = task->shape(launch->arguments, &s);
    if (!s.blocks[0] || !s.blocks[1] || !s.blocks[2]) return MS_CUDA_SUCCESS;
    ms_cuda_result result = find(self, &stream->engine->context, task, variant, &function);
    /* The driver copies the arguments. */
    void *arguments[] = { (void *)(uintptr_t)launch->arguments };
    if (result) return result;
    return self->cuda.launch(function, s.blocks[0], s.blocks[1], s.blocks[2], s.threads[0],
                             s.threads[1], s.threads[2], s.shared_bytes,
                             ms_cuda_queue_of(stream)->stream, arguments, NULL);
}

/* What comes after a failure is skipped, as far as the host knows of it when it is enqueued. */
void ms_cuda_run(ms_stream *stream, const ms_launch *launch)
{
    (void)ms_cuda_enter(stream->engine);
    if (!ms_stream_has_failed(stream)) {
        ms_cuda_duty *duty = begin_times(stream, launch);
        ms_cuda_check(stream, launch, launch_kernel(stream, launch));
        end_times(stream, duty);
    }
    ms_cuda_advance(stream, launch->seq);
}

/* ------------------------------------------------------------------- copies */

/* The driver has read host memory that is not pinned, up to 64 KiB of it, when the call returns;
 * more than that is the caller's to keep. */
void ms_cuda_copy_in(ms_stream *stream, const ms_launch *launch, void *to, const void *host,
                     size_t bytes)
{
    ms_cuda_device *self = ms_cuda_enter(stream->engine);
    if (bytes && !ms_stream_has_failed(stream)) {
        ms_cuda_duty *duty = begin_times(stream, launch);
        ms_cuda_check(stream, launch,
                      self->cuda.copy_in((ms_cuda_address)(uintptr_t)to, host, bytes,
                                         ms_cuda_queue_of(stream)->stream));
        end_times(stream, duty);
    }
    ms_cuda_advance(stream, launch->seq);
}

void ms_cuda_copy_out(ms_stream *stream, const ms_launch *launch, void *host, const void *from,
                      size_t bytes)
{
    ms_cuda_device *self = ms_cuda_enter(stream->engine);
    if (bytes && !ms_stream_has_failed(stream)) {
        ms_cuda_duty *duty = begin_times(stream, launch);
        ms_cuda_check(stream, launch,
                      self->cuda.copy_out(host, (ms_cuda_address)(uintptr_t)from, bytes,
                                          ms_cuda_queue_of(stream)->stream));
        end_times(stream, duty);
    }
    ms_cuda_advance(stream, launch->seq);
}

/* On a stream of its own, which waits for no other. An error here is one of the GPU, which the
 * streams find as well; the host reads zeros. */
void ms_cuda_read(ms_engine *engine, void *host, const void *from, size_t bytes)
{
    ms_cuda_device *self = ms_cuda_enter(engine);
    ms_cuda_result result =
        self->cuda.copy_out(host, (ms_cuda_address)(uintptr_t)from, bytes, self->reader);
    if (!result) result = self->cuda.stream_synchronize(self->reader);
    if (result) memset(host, 0, bytes);
}

/* --------------------------------------------------------- on the host's side */

/* On a thread of the driver, in stream order. It calls nothing of the driver. */
static void run_call(void *argument)
{
    ms_cuda_duty *duty = argument;
    char message[sizeof((ms_error *)0)->message] = "";
    if (ms_stream_has_failed(duty->stream)) return;
    ms_status status = duty->call.function(duty->call.user, message, sizeof message);
    if (status) ms_cuda_fail_stream(duty->stream, duty->seq, duty->script, status, "%s", message);
}

static void look_at_flag(void *argument)
{
    ms_cuda_duty *duty = argument;
    if (*duty->flag != 0)
        ms_cuda_fail_stream(duty->stream, duty->seq, duty->script, MS_ERROR_TASK, "%s",
                            duty->message);
}

void ms_cuda_call(ms_stream *stream, const ms_launch *launch, const ms_host_call *call)
{
    ms_cuda_device *self = ms_cuda_enter(stream->engine);
    ms_cuda_duty *duty =
        ms_stream_has_failed(stream) ? NULL : ms_cuda_add_duty(stream, launch->seq, launch->script);
    if (duty) {
        duty->call = *call;
        ms_cuda_check(stream, launch,
                      self->cuda.launch_host(ms_cuda_queue_of(stream)->stream, run_call, duty));
    }
    ms_cuda_advance(stream, launch->seq);
}

/* The flag is copied to pinned memory, and a function of the host looks at it. */
void ms_cuda_fail_if(ms_stream *stream, const ms_launch *launch, const float *flag,
                     const char *message)
{
    ms_cuda_device *self = ms_cuda_enter(stream->engine);
    ms_cuda_stream on = ms_cuda_queue_of(stream)->stream;
    ms_cuda_duty *duty =
        ms_stream_has_failed(stream) ? NULL : ms_cuda_add_duty(stream, launch->seq, launch->script);
    if (duty) {
        duty->message = message;
        duty->flag = ms_cuda_take_flag(self);
        ms_cuda_result result = duty->flag ? MS_CUDA_SUCCESS : MS_CUDA_OUT_OF_MEMORY;
        if (!result)
            result = self->cuda.copy_out(duty->flag, (ms_cuda_address)(uintptr_t)flag,
                                         sizeof *duty->flag, on);
        if (!result) result = self->cuda.launch_host(on, look_at_flag, duty);
        ms_cuda_check(stream, launch, result);
    }
    ms_cuda_advance(stream, launch->seq);
}
