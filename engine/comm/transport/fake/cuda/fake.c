/* fake.c: the tasks of the transport fake (comm/transport/fake/fake.c) on a GPU. */
#include "comm/cuda/comm_reduce.h"
#include "comm/cuda/tasks.h"
#include "comm/flow.h"
#include "ops/cuda/kernels.h"

MS_CUDA_IMAGE(comm_reduce)
MS_CUDA_KERNEL(comm_reduce, comm_reduce_floats)
MS_CUDA_KERNEL(comm_reduce, comm_reduce_integers)
MS_CUDA_KERNEL(comm_reduce, comm_copy)

static void reduce_alike(ms_cuda_work *work, const ms_comm_args *args)
{
    ms_flow flow = ms_flow_from(args, args->group->rank);
    ms_cuda_alike call = { .in = args->in + flow.from * ms_dtype_bytes(args->memory),
                           .out = args->out,
                           .length = (int64_t)flow.length,
                           .ranks = args->group->size,
                           .factor = (float)args->factor,
                           .dtype = args->dtype,
                           .memory = args->memory,
                           .op = args->op };
    bool is_float = ms_dtype_is_float(args->memory);
    ms_cuda_launch(work, is_float ? &comm_reduce_floats : &comm_reduce_integers,
                   ms_cuda_grid(call.length, is_float ? 8 : 1), &call, sizeof call);
}

static void copy(ms_cuda_work *work, char *to, const char *from, uint64_t bytes)
{
    ms_cuda_piece piece = { .from = from, .to = to, .bytes = (int64_t)bytes };
    if (to != from)
        ms_cuda_launch(work, &comm_copy, ms_cuda_grid(piece.bytes, 16), &piece, sizeof piece);
}

/* As run_alone in comm/transport/fake/fake.c: the same parts, and zeros where there is none. */
static void run_alone(ms_cuda_work *work, const void *arguments)
{
    const ms_comm_args *args = arguments;
    const ms_group *group = args->group;
    size_t item = ms_dtype_bytes(args->memory);
    if (args->kind >= MS_SEND || args->kind == MS_BROADCAST || !ms_flow_sink(args) || !args->in)
        return;
    if (ms_kind_reduces(args->kind)) {
        reduce_alike(work, args);
        return;
    }
    for (uint32_t m = 0; m < group->size; m++) {
        if (!ms_flow_source(args, m)) continue;
        ms_flow flow = ms_flow_from(args, m),
                own = ms_flow_slot(args, ms_kind_parts(args->kind) ? group->rank : 0);
        uint64_t length = flow.length < own.length ? flow.length : own.length;
        copy(work, args->out + flow.to * item, args->in + flow.from * item, length * item);
        ms_cuda_clear(work, args->out + (flow.to + length) * item, (flow.length - length) * item);
    }
}

static const ms_cuda_task tasks[MS_COLLECTIVES] = MS_CUDA_COMM_TASKS(run_alone);
static const ms_task *const table[MS_COLLECTIVES] = MS_CUDA_COMM_TABLE(tasks);

const ms_kernels ms_cuda_fake = { .family = "cuda", .tasks = table };
