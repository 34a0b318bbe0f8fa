/* launch.c: work that goes onto a stream: tasks, copies, functions of the host. */
#include "exec/cuda/launch.h"

#include <stdio.h>
#include <string.h>

#include "exec/cuda/batch.h"
#include "exec/cuda/completion.h"
#include "exec/cuda/errors.h"
#include "exec/cuda/fatal.h"
#include "exec/cuda/host_task.h"
#include "exec/cuda/offload.h"
#include "exec/cuda/progress.h"
#include "exec/cuda/replay.h"
#include "exec/stream.h"

/* -------------------------------------------------------------------- tasks */

/* The completion comes after the kernels: if one of them cannot be launched, the task has failed.
 */
void ms_cuda_keep_note(ms_stream *stream, const ms_launch *launch, ms_cuda_note *note)
{
    ms_cuda_completion *completion = ms_cuda_add_completion(stream, launch->seq, launch->script);
    if (completion) {
        completion->note = note;
        completion->task = (const ms_cuda_task *)(const void *)launch->task;
    } else ms_cuda_give_note(ms_cuda_of(stream->engine), note);
}

ms_cuda_way ms_cuda_carry_out(ms_stream *stream, const ms_launch *launch)
{
    const ms_cuda_task *task = (const ms_cuda_task *)(const void *)launch->task;
    ms_cuda_work work = { .stream = stream,
                          .launch = launch,
                          .on = ms_cuda_queue_of(stream)->stream };
    task->function(&work, launch->arguments);
    if (work.note) ms_cuda_keep_note(stream, launch, work.note);
    if (work.is_launched) return MS_CUDA_WAY_APART;
    return work.is_alone ? MS_CUDA_WAY_ALONE : MS_CUDA_WAY_PLAIN;
}

/* What the task does after functions of the host goes to the stream's thread; whether there is such
 * a thing. */
static bool send_host_task(ms_stream *stream)
{
    if (!ms_cuda_host_task_is_open(ms_cuda_queue_of(stream))) return false;
    if (!ms_stream_has_failed(stream)) ms_cuda_cover(stream);
    ms_cuda_host_task_go(stream);
    return true;
}

/* A program may bring tasks of its own, which have to be tasks of this device. */
static bool is_kernel(ms_stream *stream, const ms_launch *launch)
{
    if (!launch->task->function) return true;
    ms_cuda_batch_put(stream);
    ms_cuda_cut(stream, NULL);
    ms_cuda_fail_stream(stream, launch->seq, launch->script, MS_ERROR_UNSUPPORTED,
                        "task %s is a function for the CPU, and device cuda runs kernels: "
                        "ms_stream_call calls a function in the order of a stream",
                        launch->name);
    ms_cuda_advance(stream, launch->seq);
    return false;
}

/* What comes after a failure is skipped, as far as the host knows of it when it is enqueued. */
void ms_cuda_run(ms_stream *stream, const ms_launch *launch)
{
    ms_cuda_way way = MS_CUDA_WAY_PLAIN;
    (void)ms_cuda_enter(stream->engine);
    if (!is_kernel(stream, launch)) return;
    ms_cuda_remember(stream, launch);
    if (ms_cuda_batch_begins(stream, launch)) ms_cuda_cut(stream, NULL);
    if (ms_cuda_batch_add(stream, launch)) {
        ms_cuda_advance(stream, launch->seq);
        return;
    }
    ms_cuda_batch_put(stream);
    bool is_held = ms_cuda_hold(stream, launch);
    if (!is_held && !ms_stream_has_failed(stream)) {
        ms_cuda_completion *completion = ms_cuda_begin_times(stream, launch);
        way = ms_cuda_carry_out(stream, launch);
        ms_cuda_end_times(stream, completion);
        /* The thread waits, and others may wait for what this host enqueues next. */
        if (!send_host_task(stream)) ms_cuda_block(stream, launch);
    }
    ms_cuda_advance(stream, launch->seq);
    if (!is_held) ms_cuda_learn(stream, way);
}

/* ------------------------------------------------------------------- copies */

/* The driver has read host memory that is not pinned, up to 64 KiB of it, when the call returns;
 * more than that is the caller's to keep. */
void ms_cuda_copy_in(ms_stream *stream, const ms_launch *launch, void *to, const void *host,
                     size_t bytes)
{
    ms_cuda_device *self = ms_cuda_enter(stream->engine);
    ms_cuda_cut(stream, NULL);
    ms_cuda_remember(stream, launch);
    if (bytes && !ms_stream_has_failed(stream)) {
        ms_cuda_completion *completion = ms_cuda_begin_times(stream, launch);
        ms_cuda_check(stream, launch,
                      ms_cuda_copy_to(self, to, host, bytes, ms_cuda_queue_of(stream)->stream));
        ms_cuda_end_times(stream, completion);
        ms_cuda_block(stream, launch);
    }
    ms_cuda_advance(stream, launch->seq);
}

void ms_cuda_copy_out(ms_stream *stream, const ms_launch *launch, void *host, const void *from,
                      size_t bytes)
{
    ms_cuda_device *self = ms_cuda_enter(stream->engine);
    ms_cuda_cut(stream, NULL);
    ms_cuda_remember(stream, launch);
    if (bytes && !ms_stream_has_failed(stream)) {
        ms_cuda_completion *completion = ms_cuda_begin_times(stream, launch);
        ms_cuda_check(stream, launch,
                      ms_cuda_copy_from(self, host, from, bytes, ms_cuda_queue_of(stream)->stream));
        ms_cuda_end_times(stream, completion);
        ms_cuda_block(stream, launch);
    }
    ms_cuda_advance(stream, launch->seq);
}

/* --------------------------------------------------------- on the host's side */

/* On a thread of the driver, in stream order. It calls nothing of the driver. */
static void look_at_flag(void *argument)
{
    ms_cuda_completion *completion = argument;
    if (completion->note->flag != 0)
        ms_cuda_fail_named(completion->stream, completion->seq, completion->script,
                           completion->name, MS_ERROR_TASK, completion->message);
}

void ms_cuda_call(ms_stream *stream, const ms_launch *launch, const ms_host_call *call)
{
    (void)ms_cuda_enter(stream->engine);
    ms_cuda_cut(stream, "a function of the host");
    if (!ms_stream_has_failed(stream)) {
        ms_cuda_completion *completion = ms_cuda_begin_times(stream, launch);
        ms_cuda_check(stream, launch,
                      ms_cuda_host_task_call(stream, launch, call->function, call->user));
        ms_cuda_end_times(stream, completion);
        (void)send_host_task(stream);
    }
    ms_cuda_advance(stream, launch->seq);
}

/* The flag is copied to pinned memory, and a function of the host looks at it. */
static ms_cuda_result put_flag(ms_stream *stream, const ms_launch *launch, const float *flag,
                               const char *message)
{
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    ms_cuda_stream on = ms_cuda_queue_of(stream)->stream;
    ms_cuda_completion *completion = ms_cuda_add_completion(stream, launch->seq, launch->script);
    if (!completion) return MS_CUDA_SUCCESS;
    completion->message = message;
    completion->name = launch->name;
    completion->note = ms_cuda_take_note(self);
    if (!completion->note) return MS_CUDA_OUT_OF_MEMORY;
    ms_cuda_result result = self->cuda.copy_out(&completion->note->flag,
                                                (ms_cuda_address)(uintptr_t)flag, sizeof *flag, on);
    return result ? result : self->cuda.launch_host(on, look_at_flag, completion);
}

void ms_cuda_fail_if(ms_stream *stream, const ms_launch *launch, const float *flag,
                     const char *message)
{
    (void)ms_cuda_enter(stream->engine);
    ms_cuda_cut(stream, NULL);
    if (!ms_stream_has_failed(stream))
        ms_cuda_check(stream, launch, put_flag(stream, launch, flag, message));
    ms_cuda_advance(stream, launch->seq);
}
