/* gate.h: a task that waits until a test opens its gate, and then fails. */
#ifndef MOONSHARD_TESTS_GATE_H
#define MOONSHARD_TESTS_GATE_H

#include <stdatomic.h>

#include "moonshard/cpu_task.h"

typedef struct gate_args {
    _Atomic int *open;
} gate_args;

static ms_task_result fail_behind_gate(ms_run *run, void *arguments)
{
    const gate_args *args = arguments;
    if (!atomic_load(args->open)) return MS_TASK_PENDING;
    ms_run_fail(run, MS_ERROR_ARGUMENT, "a bad index");
    return MS_TASK_FAILED;
}

static const ms_task bad_task = { .name = "bad_gather",
                                  .function = fail_behind_gate,
                                  .args_bytes = sizeof(gate_args) };

#endif
