/* shm.c: the tasks of the transport local (comm/transport/shm/) on a GPU. */
#include "comm/transport/shm/host_staging.h"
#include "comm/transport/shm/one_gpu.h"

#include "comm/cuda/comm_reduce.h"
#include "comm/cuda/tasks.h"
#include "ops/cuda/kernels.h"

MS_CUDA_IMAGE(comm_reduce)
MS_CUDA_KERNEL(comm_reduce, comm_direct_floats)
MS_CUDA_KERNEL(comm_reduce, comm_direct_integers)
MS_CUDA_KERNEL(comm_reduce, comm_direct_copy)

static void fail_for_memory(ms_cuda_work *work, const ms_comm_args *args)
{
    ms_cuda_work_fail(work, MS_ERROR_MEMORY,
                      "%s: no pinned memory of the host, through which ranks that share a GPU "
                      "exchange tensors or their addresses",
                      ms_collective_name((ms_collective_kind)args->kind));
}

/* ------------------------------------------------- through memory of the host */

/* The numbers are those of the CPU, whose code adds them up. */
static void run_host_staging(ms_cuda_work *work, const ms_comm_args *args)
{
    ms_host_staging *staging = ms_local_take_host_staging(args, ms_cuda_work_stream(work));
    if (!staging) {
        fail_for_memory(work, args);
        return;
    }
    ms_oob_call *carry = &staging->carry;
    carry->stream = ms_cuda_work_place(work, &carry->seq, &carry->script);
    ms_cuda_to_host(work, carry->args.in, args->in, staging->in_bytes);
    ms_cuda_on_host(work, ms_local_run_host_staging, staging);
    ms_cuda_from_host(work, args->out, carry->args.out, staging->out_bytes);
    ms_cuda_finally(work, ms_local_give_host_staging, staging);
}

/* ---------------------------------------------------- in the GPU's own memory */

static void put_kernel(ms_cuda_work *work, const ms_comm_args *args, const ms_direct_parts *table)
{
    uint64_t longest;
    uint32_t parts = ms_local_direct_parts(args, &longest);
    bool is_float = ms_dtype_is_float(args->memory), reduces = ms_kind_reduces(args->kind);
    ms_cuda_direct call = { .table = table,
                            .length = (int64_t)longest,
                            .outputs = args->kind == MS_ALL_REDUCE ? parts : 1,
                            .ranks = args->group->size,
                            .dtype = args->dtype,
                            .memory = args->memory,
                            .op = args->op };
    if (!parts) return;
    ms_cuda_shape shape = ms_cuda_grid(call.length, !reduces ? 16 : is_float ? 8 : 1);
    if (!reduces) shape.blocks[1] = parts;
    ms_cuda_launch(work,
                   !reduces   ? &comm_direct_copy
                   : is_float ? &comm_direct_floats
                              : &comm_direct_integers,
                   shape, &call, sizeof call);
}

static void run_direct(ms_cuda_work *work, const ms_comm_args *args)
{
    ms_direct *direct = ms_local_begin_direct(args);
    if (!direct) {
        fail_for_memory(work, args);
        return;
    }
    ms_oob_call *carry = &direct->carry;
    carry->stream = ms_cuda_work_place(work, &carry->seq, &carry->script);
    ms_cuda_on_host(work, ms_local_enter_direct, direct);
    put_kernel(work, args, direct->parts);
    ms_cuda_on_host(work, ms_local_leave_direct, direct);
    ms_cuda_finally(work, ms_local_end_direct, direct);
}

static void run(ms_cuda_work *work, const void *arguments)
{
    const ms_comm_args *args = arguments;
    if (ms_local_is_direct(args->group->comm)) run_direct(work, args);
    else run_host_staging(work, args);
}

static const ms_cuda_task tasks[MS_COLLECTIVES] = MS_CUDA_COMM_TASKS(run);
static const ms_task *const table[MS_COLLECTIVES] = MS_CUDA_COMM_TABLE(tasks);

const ms_kernels ms_cuda_local = { .family = "cuda", .tasks = table };
