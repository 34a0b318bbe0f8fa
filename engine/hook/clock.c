/* clock.c: tasks that write down the time at which a stream reaches them. */
#include "hook/clock.h"

typedef struct clock_args {
    const ms_os *os;
    uint64_t *slot;
} clock_args;

static ms_task_result run_clock(ms_run *run, void *arguments)
{
    (void)run;
    const clock_args *args = arguments;
    *args->slot = args->os->monotonic_ns(args->os->user);
    return MS_TASK_DONE;
}

static const ms_task clock_task = {
    .name = "time", .function = run_clock, .args_bytes = sizeof(clock_args), .kind = MS_KIND_COPY
};

ms_status ms_clock_write(ms_engine *engine, ms_storage *storage, size_t index, ms_point *out)
{
    clock_args args = { .os = ms_engine_context(engine)->os,
                        .slot = (uint64_t *)ms_storage_data(storage) + index };
    ms_access access = { .storage = storage, .cells = 1, .mode = MS_READ | MS_WRITE };
    return ms_stream_enqueue(ms_engine_current(engine), &clock_task, &args, &access, 1,
                             (ms_task_cost){ .bytes = sizeof(uint64_t) }, out);
}
