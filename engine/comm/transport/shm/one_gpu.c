/* one_gpu.c: calls between ranks that are threads of one process and use the same GPU. */
#include "comm/transport/shm/one_gpu.h"

#include <stddef.h>
#include <string.h>

#include "comm/issue.h"
#include "comm/control/shm/bell.h"
#include "comm/control/shm/ledger.h"
#include "comm/control/shm/call_record.h"
#include "comm/control/shm/wait.h"
#include "comm/oob.h"
#include "comm/flow.h"
#include "comm/transport/shm/p2p.h"
#include "comm/transport/shm/staged.h"
#include "comm/transport/shm/throttle.h"

/* ------------------------------------------------------------------ the way */

/* A number for the process and the GPU; 1 for ranks whose tensors travel through the host's
 * memory. */
static uint64_t way_of(const ms_comm *comm)
{
    const ms_os *os = ms_engine_context(comm->engine)->os;
    if (!comm->options.one_gpu) return 1;
    return (uint64_t)os->process_id(os->user) << 16
           | (uint64_t)(ms_engine_device_index(comm->engine) + 1);
}

ms_status ms_local_choose_way(ms_comm *comm, ms_local *local)
{
    uint64_t mine = way_of(comm), found = 0;
    if (ms_comm_runs_on_host(comm)) return MS_OK;
    local->is_direct = comm->options.one_gpu;
    if (local->is_direct) ms_engine_set_companions(comm->engine, local->self->control->ranks - 1);
    if (atomic_compare_exchange_strong(&local->self->control->way, &found, mine) || found == mine)
        return MS_OK;
    if (mine == 1 || found == 1)
        return ms_engine_fail(comm->engine, MS_ERROR_ARGUMENT,
                              "rank %u says that it %s, another rank says the opposite: all ranks "
                              "of a job set one_gpu alike",
                              local->self->rank,
                              mine == 1 ? "shares no GPU with threads of its process"
                                        : "is a thread that shares one GPU with all others");
    return ms_engine_fail(comm->engine, MS_ERROR_ARGUMENT,
                          "one_gpu: rank %u is a thread of another process, or uses another GPU, "
                          "than the first rank that joined: leave one_gpu unset",
                          local->self->rank);
}

bool ms_local_is_direct(const ms_comm *comm)
{
    return ((const ms_local *)comm->transport_state)->is_direct;
}

/* -------------------------------------------------------------------- parts */

/* Of an all_reduce each rank has a slice of all tensors. */
uint32_t ms_local_direct_parts(const ms_comm_args *args, uint64_t *longest)
{
    const ms_group *group = args->group;
    uint64_t begin;
    uint32_t parts = 0;
    bool is_pair = ms_kind_is_pair(args->kind);
    *longest = args->kind == MS_RECV ? args->count * ms_dtype_bytes(args->memory) : 0;
    if (is_pair) return *longest ? 1 : 0;
    if (args->kind == MS_BARRIER || !ms_flow_sink(args)) return 0;
    for (uint32_t m = 0; m < group->size; m++) {
        uint64_t length = ms_flow_from(args, m).length;
        if (!ms_flow_source(args, m)) continue;
        if (args->kind == MS_ALL_REDUCE)
            length = ms_slice(args->count, group->size, group->rank, &begin);
        if (length > *longest) *longest = length;
        parts++;
    }
    if (!ms_kind_reduces(args->kind)) *longest *= ms_dtype_bytes(args->memory);
    return *longest ? parts : 0;
}

/* Of an all_to_all by counts only the sender knows where a part begins; its counts stay until it
 * leaves. */
static uint64_t sent_from(const ms_ledger_entry *slot, const ms_comm_args *args)
{
    uint64_t begin = 0, length;
    const void *counts = (const void *)(uintptr_t)slot->counts;
    ms_flow_part(counts, 0, args->group->size, args->group->rank, &begin, &length);
    return begin;
}

/* The part that this rank's kernel takes of one member. Nothing is copied onto itself. */
static ms_direct_part part_of(const ms_ledger_entry *slot, const ms_comm_args *args,
                              uint32_t member)
{
    size_t item = ms_dtype_bytes(args->memory);
    ms_flow flow = ms_flow_from(args, member);
    char *out = args->out;
    if (args->kind == MS_ALL_TO_ALL && args->by_counts) flow.from = sent_from(slot, args);
    if (args->kind == MS_ALL_REDUCE) {
        flow.length = ms_slice(args->count, args->group->size, args->group->rank, &flow.from);
        flow.to = flow.from;
        out = (char *)(uintptr_t)slot->out;
    }
    ms_direct_part part = { .from = (const char *)(uintptr_t)slot->in + flow.from * item,
                            .to = out + flow.to * item,
                            .bytes = (int64_t)(flow.length * item),
                            .factor = (float)slot->factor };
    if (!ms_kind_reduces(args->kind) && part.from == part.to) part.bytes = 0;
    return part;
}

/* False: ranks disagree about counts, and the job has ended. */
static bool fill(ms_direct_parts *parts, const ms_local *local, const ms_comm_args *args)
{
    uint64_t longest;
    bool by_counts = args->kind == MS_ALL_TO_ALL && args->by_counts;
    for (uint32_t m = 0; by_counts && m < args->group->size; m++) {
        uint64_t counts = ms_ledger_entry_of(local->self, args, m)->counts;
        if (!ms_local_check_counts(local, args, m, (const int64_t *)(uintptr_t)counts))
            return false;
    }
    if (!ms_local_direct_parts(args, &longest)) return true;
    for (uint32_t m = 0; m < args->group->size; m++)
        if (ms_flow_source(args, m))
            parts->part[parts->count++] =
                part_of(ms_ledger_entry_of(local->self, args, m), args, m);
    return true;
}

/* ------------------------------------------------- the functions of the host */

static ms_direct_parts *parts_of(const ms_comm_args *args)
{
    const char *at = (const char *)args - offsetof(ms_direct, carry) - offsetof(ms_oob_call, args);
    return ((const ms_direct *)(const void *)at)->parts;
}

static ms_task_result enter_pair(ms_run *run, ms_local *local, const ms_comm_args *args)
{
    ms_direct_parts *parts = parts_of(args);
    const ms_ledger_entry *theirs = NULL;
    ms_task_result result = ms_pair_enter(run, local, args, &theirs);
    if (result != MS_TASK_DONE || args->kind == MS_SEND) return result;
    parts->part[parts->count++] =
        (ms_direct_part){ .from = (const char *)(uintptr_t)theirs->in,
                          .to = args->in,
                          .bytes = (int64_t)(args->count * ms_dtype_bytes(args->memory)) };
    return result;
}

static ms_task_result enter(ms_run *run, void *arguments)
{
    const ms_comm_args *args = arguments;
    ms_local *local = args->group->comm->transport_state;
    if (ms_kind_is_pair(args->kind)) return enter_pair(run, local, args);
    if (ms_ledger_enter(local->self, args) && ms_local_pace(local, args->wire_bytes)
        && fill(parts_of(args), local, args))
        return MS_TASK_DONE;
    return ms_shm_fail(run, local->self, args);
}

/* The kernel of this rank has ended. */
static ms_task_result leave(ms_run *run, void *arguments)
{
    const ms_comm_args *args = arguments;
    ms_local *local = args->group->comm->transport_state;
    if (ms_kind_is_pair(args->kind)) return ms_pair_leave(run, local, args);
    return ms_ledger_leave(local->self, args, 1, NULL) ? MS_TASK_DONE
                                                       : ms_shm_fail(run, local->self, args);
}

static const ms_task entering[MS_COLLECTIVES] = MS_COMM_TASKS(enter),
                     leaving[MS_COLLECTIVES] = MS_COMM_TASKS(leave);

ms_status ms_local_enter_direct(void *user, char *message, size_t bytes)
{
    ms_direct *direct = user;
    direct->carry.task = &entering[direct->carry.args.kind];
    return ms_comm_carry(&direct->carry, message, bytes);
}

ms_status ms_local_leave_direct(void *user, char *message, size_t bytes)
{
    ms_direct *direct = user;
    direct->carry.task = &leaving[direct->carry.args.kind];
    return ms_comm_carry(&direct->carry, message, bytes);
}

/* -------------------------------------------------------------------- calls */

static ms_direct *new_direct(ms_comm *comm)
{
    ms_local *local = comm->transport_state;
    ms_context *context = ms_engine_context(comm->engine);
    void *memory = NULL, *parts = NULL;
    if (ms_allocate(context, sizeof(ms_direct), "rank", &memory)) return NULL;
    if (ms_host_memory_new(comm->engine, sizeof(ms_direct_parts), "addresses of a collective",
                           &parts)) {
        ms_release(context, memory);
        return NULL;
    }
    ms_direct *made = memory;
    made->parts = parts;
    made->next = local->directs;
    local->directs = made;
    return made;
}

ms_direct *ms_local_begin_direct(const ms_comm_args *args)
{
    ms_comm *comm = args->group->comm;
    ms_local *local = comm->transport_state;
    ms_direct *direct = local->directs;
    while (direct && atomic_load_explicit(&direct->under_way, memory_order_acquire))
        direct = direct->next;
    if (!direct) direct = new_direct(comm);
    if (!direct) return NULL;
    direct->carry = (ms_oob_call){ .args = *args };
    direct->parts->count = 0;
    atomic_store_explicit(&direct->under_way, true, memory_order_relaxed);
    atomic_fetch_add(&local->self->control->lines[local->self->rank].direct_calls, 1);
    return direct;
}

void ms_local_end_direct(void *user)
{
    ms_direct *direct = user;
    const ms_local *local = direct->carry.args.group->comm->transport_state;
    atomic_fetch_sub(&local->self->control->lines[local->self->rank].direct_calls, 1);
    atomic_store_explicit(&direct->under_way, false, memory_order_release);
}

/* ------------------------------------------------------------------ the end */

/* In a job that goes on, this rank has left all its calls, and so have the kernels of all others.
 * In one that has ended, a rank that has entered a call may still launch its kernel: it waits for
 * nothing but streams, which come to their end. */
void ms_local_settle(const ms_local *local)
{
    ms_shm_rank *self = local->self;
    if (!local->is_direct || !ms_shm_aborted(self)) return;
    for (uint32_t r = 0; r < self->control->ranks; r++)
        while (atomic_load(&self->control->lines[r].direct_calls)) ms_yield();
}

void ms_local_free_directs(ms_comm *comm)
{
    ms_local *local = comm->transport_state;
    for (ms_direct *next = NULL; local->directs; local->directs = next) {
        next = local->directs->next;
        ms_host_memory_free(comm->engine, local->directs->parts);
        ms_release(ms_engine_context(comm->engine), local->directs);
    }
}
