/* tasks.h: the tasks of a transport for GPUs, one for each kind, with one function. */
#ifndef MOONSHARD_COMM_CUDA_TASKS_H
#define MOONSHARD_COMM_CUDA_TASKS_H

#include "comm/state.h"

#include "exec/cuda/task.h"
#include "exec/device.h"

#define MS_CUDA_COMM_TASK(number, text, run)                   \
    [number] = { .task = { .name = text,                       \
                           .args_bytes = sizeof(ms_comm_args), \
                           .kind = MS_KIND_COMMUNICATION },    \
                 .function = run },
#define MS_CUDA_COMM_TASKS(run)              \
    {                                        \
        MS_COMM_LIST(MS_CUDA_COMM_TASK, run) \
    }

/* The table of an array of them. */
#define MS_CUDA_COMM_ENTRY(number, text, tasks) [number] = &tasks[number].task,
#define MS_CUDA_COMM_TABLE(tasks)               \
    {                                           \
        MS_COMM_LIST(MS_CUDA_COMM_ENTRY, tasks) \
    }

#endif
