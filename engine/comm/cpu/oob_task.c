/* oob_task.c: control's calls as functions of the host, for devices that have no CPU tasks.
 *
 * The numbers that control carries (ms_comm_args.out_of_band) are in host memory, and control's
 * tasks are CPU functions. On another device such a call is a function of the host in a stream
 * (ms_stream_call). All calls of this kind of a rank are on one stream (issue.c). */
#include "comm/oob.h"

#include <stdio.h>

#include "exec/cpu/task.h"
#include "exec/stream.h"

/* On a thread of the device. The error is that of the task, with rank and collective: it is given
 * to the stream here, since the device adds only what it knows itself. */
ms_status ms_comm_carry(void *user, char *message, size_t bytes)
{
    if (!user) return MS_OK;
    ms_oob_call *carry = user;
    ms_thread thread = { .engine = carry->stream->engine };
    ms_task_result result = MS_TASK_PENDING;
    ms_error error;
    while (result == MS_TASK_PENDING)
        result = ms_cpu_call(&thread, NULL, carry->task, &carry->args, &error);
    ms_thread_close(&thread);
    if (result == MS_TASK_DONE) return MS_OK;
    ms_stream_fail(carry->stream, carry->seq, &error, carry->script);
    snprintf(message, bytes, "%s", error.message);
    return error.status;
}
