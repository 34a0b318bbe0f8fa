/* services.c: what the CPU device does beside running kernels: copies between host and device
 * memory, the check of a flag, and functions of the host. */
#include "exec/cpu/services.h"

#include <stdio.h>
#include <string.h>

/* Hands a task of the device's own to the engine's device, in place of the launch that the core
 * made. The core has numbered the launch and found its hazards, so the task only needs to run. */
static void run(ms_stream *stream, const ms_launch *launch, const ms_task *task,
                const void *arguments)
{
    ms_launch own = *launch;
    own.task = task;
    own.arguments = arguments;
    stream->engine->device->run(stream, &own);
}

/* ------------------------------------------------------------------- copies */

/* Small copies carry their bytes, so the caller's memory is free at once. copy_out leaves `data`
 * out of its arguments. */
typedef struct ms_copy_args {
    void *to;
    const void *from; /* NULL: the bytes are in `data` */
    uint64_t bytes;
    unsigned char data[MS_COPY_INLINE];
} ms_copy_args;

_Static_assert(sizeof(ms_copy_args) <= MS_TASK_ARGS_MAX, "small copies travel inside their task");

/* `from` NULL means that the bytes travel in the arguments. One thread copies: a copy is bound by
 * memory, and host copies are rare next to tasks. */
static ms_task_result run_copy(ms_run *task, void *arguments)
{
    (void)task;
    const ms_copy_args *args = arguments;
    memcpy(args->to, args->from ? args->from : args->data, args->bytes);
    return MS_TASK_DONE;
}

/* Arguments of a task are copied into the ring, and so are the bytes of a small write. */
void ms_cpu_copy_in(ms_stream *stream, const ms_launch *launch, void *to, const void *host,
                    size_t bytes)
{
    static const ms_task task = { .name = "write",
                                  .function = run_copy,
                                  .args_bytes = sizeof(ms_copy_args),
                                  .kind = MS_KIND_COPY };
    ms_copy_args args = { .to = to, .bytes = bytes };
    /* `from` stays NULL then. */
    if (bytes <= MS_COPY_INLINE) memcpy(args.data, host, bytes);
    else args.from = host;
    run(stream, launch, &task, &args);
}

/* Its host memory is the caller's until the number is reached. */
void ms_cpu_copy_out(ms_stream *stream, const ms_launch *launch, void *host, const void *from,
                     size_t bytes)
{
    static const ms_task task = { .name = "read",
                                  .function = run_copy,
                                  .args_bytes = offsetof(ms_copy_args, data),
                                  .kind = MS_KIND_COPY };
    ms_copy_args args;
    args.to = host;
    args.from = from;
    args.bytes = bytes;
    run(stream, launch, &task, &args);
}

/* -------------------------------------------------------------------- flags */

/* The flag is read when the task runs, in stream order. The texts are not copied and must outlive
 * the task. */
typedef struct ms_flag_args {
    const float *flag;
    const char *name, *message;
} ms_flag_args;

/* The operation in the record is the caller's name for the check, not this task's. */
static ms_task_result run_flag(ms_run *task, void *arguments)
{
    const ms_flag_args *args = arguments;
    if (*args->flag == 0) return MS_TASK_DONE;
    ms_run_fail(task, MS_ERROR_TASK, "%s", args->message);
    ms_error *error = ms_run_error(task);
    snprintf(error->operation, sizeof error->operation, "%s", args->name);
    return MS_TASK_FAILED;
}

/* One float decides, so a kernel can compute the condition. */
void ms_cpu_fail_if(ms_stream *stream, const ms_launch *launch, const float *flag,
                    const char *message)
{
    static const ms_task task = { .name = "fail_if",
                                  .function = run_flag,
                                  .args_bytes = sizeof(ms_flag_args),
                                  .kind = MS_KIND_COMPUTE };
    ms_flag_args args = { .flag = flag, .name = launch->name, .message = message };
    run(stream, launch, &task, &args);
}

/* ----------------------------------------------------------- host functions */

/* The function reports through its own buffer, since it knows nothing of the engine's errors. */
static ms_task_result run_call(ms_run *task, void *arguments)
{
    const ms_host_call *call = arguments;
    char message[MS_ERROR_MESSAGE_BYTES] = "";
    ms_status status = call->function(call->user, message, sizeof message);
    if (!status) return MS_TASK_DONE;
    ms_run_fail(task, status, "%s", *message ? message : "the host function failed");
    ms_error *error = ms_run_error(task);
    snprintf(error->operation, sizeof error->operation, "%s", call->name);
    return MS_TASK_FAILED;
}

/* The function runs on the stream's worker: while it runs, the stream does nothing else. */
void ms_cpu_call_host(ms_stream *stream, const ms_launch *launch, const ms_host_call *call)
{
    static const ms_task task = { .name = "call",
                                  .function = run_call,
                                  .args_bytes = sizeof(ms_host_call),
                                  .kind = MS_KIND_COPY };
    run(stream, launch, &task, call);
}
