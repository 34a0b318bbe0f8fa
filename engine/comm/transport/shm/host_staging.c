/* host_staging.c: calls on a device that has no CPU tasks, by way of pinned memory of the host. */
#include "comm/transport/shm/host_staging.h"

#include "comm/oob.h"
#include "comm/flow.h"
#include "comm/transport/shm/state.h"

/* Memory for the calls of one stream of the device. It grows; smaller pieces stay until the end,
 * since earlier calls use them and the driver may wait for these before it frees. */
typedef struct ms_pinned {
    struct ms_pinned *next;
    const void *stream;
    uint64_t bytes;
    char *memory;
} ms_pinned;

#define MS_PINNED_LEAST ((uint64_t)1 << 16)
#define MS_LINE ((uint64_t)64)

/* In elements. */
static uint64_t length_of_in(const ms_comm_args *args)
{
    bool joins = args->kind == MS_ALL_GATHER || args->kind == MS_GATHER;
    if (!args->in || args->kind == MS_RECV || !ms_flow_source(args, args->group->rank)) return 0;
    return joins ? ms_flow_slot(args, 0).length : args->count;
}

/* What this rank gets is all of its tensor for the result. */
static uint64_t length_of_out(const ms_comm_args *args)
{
    uint64_t end = 0;
    if (!args->out || args->kind == MS_SEND || !ms_flow_sink(args)) return 0;
    if (ms_kind_reduces(args->kind)) return ms_flow_from(args, args->group->rank).length;
    for (uint32_t m = 0; m < args->group->size; m++) {
        ms_flow flow = ms_flow_from(args, m);
        if (ms_flow_source(args, m) && flow.to + flow.length > end) end = flow.to + flow.length;
    }
    return end;
}

static char *memory_for(ms_comm *comm, const void *stream, uint64_t bytes)
{
    ms_local *local = comm->transport_state;
    uint64_t before = 0;
    void *memory = NULL, *pinned = NULL;
    for (const ms_pinned *one = local->pinned; one; one = one->next) {
        if (one->stream != stream) continue;
        if (one->bytes >= bytes) return one->memory;
        if (one->bytes > before) before = one->bytes;
    }
    uint64_t wanted = bytes > 2 * before ? bytes : 2 * before;
    if (wanted < MS_PINNED_LEAST) wanted = MS_PINNED_LEAST;
    if (ms_allocate(ms_engine_context(comm->engine), sizeof(ms_pinned), "rank", &memory))
        return NULL;
    if (ms_host_memory_new(comm->engine, wanted, "staging a collective", &pinned)) {
        ms_release(ms_engine_context(comm->engine), memory);
        return NULL;
    }
    ms_pinned *made = memory;
    *made =
        (ms_pinned){ .next = local->pinned, .stream = stream, .bytes = wanted, .memory = pinned };
    local->pinned = made;
    return made->memory;
}

static ms_host_staging *free_host_staging(ms_comm *comm)
{
    ms_local *local = comm->transport_state;
    void *memory = NULL;
    for (ms_host_staging *one = local->stagings; one; one = one->next)
        if (!atomic_load_explicit(&one->under_way, memory_order_acquire)) return one;
    if (ms_allocate(ms_engine_context(comm->engine), sizeof(ms_host_staging), "rank", &memory))
        return NULL;
    ms_host_staging *made = memory;
    made->next = local->stagings;
    local->stagings = made;
    return made;
}

/* A tensor that is changed in place has one copy. */
ms_host_staging *ms_local_take_host_staging(const ms_comm_args *args, const void *stream)
{
    ms_comm *comm = args->group->comm;
    size_t item = ms_dtype_bytes(args->memory);
    uint64_t in = length_of_in(args) * item, out = length_of_out(args) * item,
             apart = args->in == args->out ? 0 : (in + MS_LINE - 1) & ~(MS_LINE - 1);
    ms_host_staging *staging = free_host_staging(comm);
    char *memory = staging ? memory_for(comm, stream, in > apart + out ? in : apart + out) : NULL;
    if (!memory) return NULL;
    staging->in_bytes = in;
    staging->out_bytes = out;
    staging->carry = (ms_oob_call){ .task = &ms_transport_local.tasks[args->kind], .args = *args };
    if (args->in) staging->carry.args.in = memory;
    if (args->out) staging->carry.args.out = memory + apart;
    atomic_store_explicit(&staging->under_way, true, memory_order_relaxed);
    return staging;
}

ms_status ms_local_run_host_staging(void *user, char *message, size_t bytes)
{
    ms_host_staging *staging = user;
    return ms_comm_carry(&staging->carry, message, bytes);
}

void ms_local_give_host_staging(void *user)
{
    ms_host_staging *staging = user;
    atomic_store_explicit(&staging->under_way, false, memory_order_release);
}

void ms_local_free_host_stagings(ms_comm *comm)
{
    ms_local *local = comm->transport_state;
    ms_context *context = ms_engine_context(comm->engine);
    for (ms_host_staging *next = NULL; local->stagings; local->stagings = next) {
        next = local->stagings->next;
        ms_release(context, local->stagings);
    }
    for (ms_pinned *next = NULL; local->pinned; local->pinned = next) {
        next = local->pinned->next;
        ms_host_memory_free(comm->engine, local->pinned->memory);
        ms_release(context, local->pinned);
    }
}
