/* host.c: copies between host memory and tensor memory on the CPU. */
#include "tensor/host.h"

#include <string.h>

static ms_task_result host_write_run(ms_run *run, void *arguments)
{
    (void)run;
    const ms_host_write_args *args = arguments;
    memcpy(args->to, args->staged ? args->staged : args->data, args->bytes);
    return MS_TASK_DONE;
}

static ms_task_result host_read_run(ms_run *run, void *arguments)
{
    (void)run;
    const ms_host_read_args *args = arguments;
    memcpy(args->to, args->from, args->bytes);
    return MS_TASK_DONE;
}

const ms_task ms_cpu_host_write = { .name = "write",
                                    .function = host_write_run,
                                    .args_bytes = sizeof(ms_host_write_args),
                                    .kind = MS_KIND_COPY };
const ms_task ms_cpu_host_read = { .name = "read",
                                   .function = host_read_run,
                                   .args_bytes = sizeof(ms_host_read_args),
                                   .kind = MS_KIND_COPY };
