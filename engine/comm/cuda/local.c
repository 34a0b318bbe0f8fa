/* local.c: the tasks of the transport local (comm/local/) on a GPU. */
#include "comm/local/detour.h"

#include "comm/cuda/tasks.h"

/* The numbers are those of the CPU, whose code adds them up. */
static void run(ms_cuda_work *work, const void *arguments)
{
    const ms_comm_args *args = arguments;
    ms_detour *detour = ms_local_take_detour(args, ms_cuda_work_stream(work));
    if (!detour) {
        ms_cuda_work_fail(work, MS_ERROR_MEMORY,
                          "%s: no pinned memory of the host, through which ranks that share a GPU "
                          "exchange tensors",
                          ms_collective_name((ms_collective_kind)args->kind));
        return;
    }
    ms_host_carry *carry = &detour->carry;
    carry->stream = ms_cuda_work_place(work, &carry->seq, &carry->script);
    ms_cuda_to_host(work, carry->args.in, args->in, detour->in_bytes);
    ms_cuda_on_host(work, ms_local_detour, detour);
    ms_cuda_from_host(work, args->out, carry->args.out, detour->out_bytes);
}

static const ms_cuda_task tasks[MS_COLLECTIVES] = MS_CUDA_COMM_TASKS(run);
static const ms_task *const table[MS_COLLECTIVES] = MS_CUDA_COMM_TABLE(tasks);

const ms_kernels ms_cuda_local = { .family = "cuda", .tasks = table };
