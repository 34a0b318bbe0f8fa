/* tasks.h: the tasks of a transport for GPUs, one for each kind, with one function. */
#ifndef MOONSHARD_COMM_CUDA_TASKS_H
#define MOONSHARD_COMM_CUDA_TASKS_H

#include "comm/comm.h"
#include "exec/cuda/task.h"
#include "exec/device.h"

#define MS_CUDA_COMM_TASK(number, text, run)                   \
    [number] = { .task = { .name = text,                       \
                           .args_bytes = sizeof(ms_comm_args), \
                           .kind = MS_KIND_COMMUNICATION },    \
                 .function = run }
#define MS_CUDA_COMM_TASKS(run)                                                               \
    {                                                                                         \
        MS_CUDA_COMM_TASK(MS_ALL_REDUCE, "all_reduce", run),                                  \
            MS_CUDA_COMM_TASK(MS_REDUCE, "reduce", run),                                      \
            MS_CUDA_COMM_TASK(MS_REDUCE_SCATTER, "reduce_scatter", run),                      \
            MS_CUDA_COMM_TASK(MS_ALL_GATHER, "all_gather", run),                              \
            MS_CUDA_COMM_TASK(MS_ALL_TO_ALL, "all_to_all", run),                              \
            MS_CUDA_COMM_TASK(MS_BROADCAST, "broadcast", run),                                \
            MS_CUDA_COMM_TASK(MS_GATHER, "gather", run),                                      \
            MS_CUDA_COMM_TASK(MS_SCATTER, "scatter", run),                                    \
            MS_CUDA_COMM_TASK(MS_SEND, "send", run), MS_CUDA_COMM_TASK(MS_RECV, "recv", run), \
            MS_CUDA_COMM_TASK(MS_BARRIER, "barrier", run)                                     \
    }

/* The table of an array of them. */
#define MS_CUDA_COMM_ENTRY(tasks, number) [number] = &tasks[number].task
#define MS_CUDA_COMM_TABLE(tasks)                                                               \
    {                                                                                           \
        MS_CUDA_COMM_ENTRY(tasks, MS_ALL_REDUCE), MS_CUDA_COMM_ENTRY(tasks, MS_REDUCE),         \
            MS_CUDA_COMM_ENTRY(tasks, MS_REDUCE_SCATTER),                                       \
            MS_CUDA_COMM_ENTRY(tasks, MS_ALL_GATHER), MS_CUDA_COMM_ENTRY(tasks, MS_ALL_TO_ALL), \
            MS_CUDA_COMM_ENTRY(tasks, MS_BROADCAST), MS_CUDA_COMM_ENTRY(tasks, MS_GATHER),      \
            MS_CUDA_COMM_ENTRY(tasks, MS_SCATTER), MS_CUDA_COMM_ENTRY(tasks, MS_SEND),          \
            MS_CUDA_COMM_ENTRY(tasks, MS_RECV), MS_CUDA_COMM_ENTRY(tasks, MS_BARRIER)           \
    }

#endif
