/* fake.c: the transport of a world with one rank in it: every other rank is taken to bring the
 * same numbers, so no bytes move and no task waits. The group of a rank alone has this transport,
 * too, and so has a job of one rank on a GPU, unless the user names another transport. */
#include "comm/transport_table.h"

#include <string.h>

#include "comm/flow.h"
#include "exec/device.h"

/* Every rank brings this rank's numbers. They are still added one by one, in the same kernel as on
 * a real transport, so the rounding is the same as there. Adding a number n times and multiplying
 * it by n round differently, so a loss in a fake world could not be compared with a run. */
static ms_task_result reduce_alike(ms_run *run, const ms_comm_args *args)
{
    const ms_group *group = args->group;
    /* Lists of every rank's tensor and factor, though all are this rank's own. A fake world may
     * have 65536 ranks, so they are not on the stack. */
    char *memory = ms_thread_scratch(ms_run_thread(run), 3,
                                     group->size * (sizeof(char *) + sizeof(float))),
         *out = args->out;
    if (!memory) {
        ms_run_fail(run, MS_ERROR_MEMORY, "no memory for a fake group of %u ranks", group->size);
        return MS_TASK_FAILED;
    }
    const char **data = (const char **)(void *)memory;
    float *factors = (float *)(void *)(memory + group->size * sizeof *data);
    ms_flow flow = ms_flow_from(args, group->rank);
    for (uint32_t m = 0; m < group->size; m++) {
        data[m] = args->in + flow.from * ms_dtype_bytes(args->memory);
        factors[m] = (float)args->factor;
    }
    ms_sources sources = ms_flow_members(args, data, factors);
    ms_flow_reduce(run, args, &sources, &out, 1, flow.length);
    return MS_TASK_DONE;
}

/* All data are this rank's own; where its part for a member is shorter than what that member is
 * expected to send, the rest is zero. A recv leaves its tensor as it is: what a peer would send is
 * not known. */
static ms_task_result run_alone(ms_run *run, void *arguments)
{
    const ms_comm_args *args = arguments;
    const ms_group *group = args->group;
    size_t item = ms_dtype_bytes(args->memory);
    /* A rank that gets nothing, or whose result is its own tensor, has nothing to do. */
    if (args->kind >= MS_SEND || args->kind == MS_BROADCAST || !ms_flow_sink(args) || !args->in)
        return MS_TASK_DONE;
    if (ms_kind_reduces(args->kind)) return reduce_alike(run, args);
    for (uint32_t m = 0; m < group->size; m++) {
        if (!ms_flow_source(args, m)) continue;
        ms_flow flow = ms_flow_from(args, m),
                own = ms_flow_slot(args, ms_kind_parts(args->kind) ? group->rank : 0);
        /* With counts the parts differ: no more is copied than this rank would send. */
        uint64_t length = flow.length < own.length ? flow.length : own.length;
        ms_flow_copy(run, args->out + flow.to * item, args->in + flow.from * item, length * item);
        if (flow.length > length)
            memset(args->out + (flow.to + length) * item, 0, (flow.length - length) * item);
    }
    return MS_TASK_DONE;
}

static const ms_task tasks[MS_COLLECTIVES] = MS_COMM_TASKS(run_alone);

extern const ms_kernels ms_cuda_fake;

const ms_transport ms_transport_fake = { .name = "fake",
                                         .kernels = "cpu",
                                         .kinds = MS_ALL_KINDS,
                                         .dtypes = MS_ALL_DTYPES,
                                         .ops = MS_ALL_OPS,
                                         .reduced_dtypes = MS_ALL_DTYPES,
                                         .rounds = true,
                                         .by_nodes = true,
                                         .tasks = tasks,
                                         .other = &ms_cuda_fake };
