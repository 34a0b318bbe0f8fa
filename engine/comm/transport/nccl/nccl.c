/* nccl.c: the transport over NCCL joins and leaves, and is asked about memory and errors.
 *
 * It is for the memory of GPUs. A user may name it on other devices, too (any_device): it joins
 * there if the library says that it carries host memory, as the library for tests does. */
#include "comm/transport/nccl/call.h"

#include <string.h>

#include "comm/transport/nccl/forget.h"
#include "comm/transport/nccl/graphs.h"
#include "comm/transport/nccl/in_flight.h"
#include "comm/transport/nccl/init.h"
#include "comm/transport/nccl/watchdog.h"
#include "exec/engine.h"

/* Host memory is for libraries that say so: the real one would fail in the first call, with
 * a message about CUDA. */
static ms_status check_device(ms_engine *engine, const ms_nccl_api *api)
{
    const ms_device *device = ms_engine_device_of(engine);
    if (strcmp(device->kernels, ms_transport_nccl.kernels) == 0 || api->host_memory) return MS_OK;
    return ms_engine_fail(engine, MS_ERROR_UNSUPPORTED,
                          "NCCL moves memory of GPUs, and this engine computes on device %s: use "
                          "another transport there",
                          device->name);
}

/* How many multiprocessors of a GPU a call keeps from other work; none of a CPU. */
static uint32_t multiprocessors_of(const ms_comm *comm)
{
    enum { USUAL = 16 };
    const ms_device *device = ms_engine_device_of(comm->engine);
    if (strcmp(device->kernels, ms_transport_nccl.kernels) != 0) return 0;
    return comm->options.max_ctas ? comm->options.max_ctas : USUAL;
}

static ms_status open_nccl(ms_comm *comm)
{
    ms_context *context = ms_engine_context(comm->engine);
    void *memory = NULL;
    MS_ASSERT(comm->rendezvous);
    ms_status status = ms_allocate(context, sizeof(ms_nccl), "rank", &memory);
    if (status) return status;
    ms_nccl *nccl = memory;
    nccl->comm = comm;
    nccl->os = context->os;
    nccl->rendezvous = ms_rendezvous_retain(comm->rendezvous);
    nccl->timeout_ns = comm->timeout_ns;
    status = ms_nccl_load(context, &nccl->api);
    if (!status) status = check_device(comm->engine, &nccl->api);
    if (!status) status = ms_nccl_watchdog_start(nccl);
    if (!status) {
        comm->multiprocessors = multiprocessors_of(comm);
        comm->transport_state = nccl;
        return MS_OK;
    }
    ms_rendezvous_release(nccl->rendezvous);
    ms_release(context, nccl);
    return status;
}

/* Memory that is known already, as the pool hands it out again, is not registered twice. */
static ms_status enroll(ms_comm *comm, ms_storage *storage)
{
    ms_nccl *nccl = comm->transport_state;
    char *begin = ms_storage_data(storage);
    size_t bytes = ms_storage_bytes(storage);
    const ms_nccl_range *newest = atomic_load(&nccl->ranges);
    if (bytes == 0) return MS_OK;
    for (const ms_nccl_range *r = newest; r; r = r->next)
        if (begin >= (char *)r->memory && begin + bytes <= (char *)r->memory + r->bytes)
            return MS_OK;
    void *memory = NULL;
    ms_status status =
        ms_allocate(ms_engine_context(comm->engine), sizeof(ms_nccl_range), "range", &memory);
    if (status) return status;
    ms_nccl_range *range = memory;
    *range = (ms_nccl_range){ .next = newest, .memory = begin, .bytes = bytes };
    atomic_store(&nccl->ranges, range);
    return MS_OK;
}

static ms_status poll_error(ms_comm *comm)
{
    ms_error *error = &ms_engine_context(comm->engine)->error, found;
    if (!ms_nccl_find_error(comm->transport_state, &found)) return MS_OK;
    *error = found;
    return found.status;
}

/* The watchdog aborts, as that may hang. Tasks see the end by themselves. */
static void abort_nccl(ms_comm *comm)
{
    ms_nccl *nccl = comm->transport_state;
    atomic_store(&nccl->ended, true);
    ms_bell_ring(&nccl->bell);
}

static void close_nccl(ms_comm *comm)
{
    ms_nccl *nccl = comm->transport_state;
    ms_context *context = ms_engine_context(comm->engine);
    if (!ms_nccl_watchdog_close(nccl)) {
        /* NCCL still has the record, and memory that was registered. */
        ms_log(context, MS_LOG_WARN,
               "NCCL does not come back from closing the communicators of rank %u: this process "
               "can only end",
               comm->groups[0]->rank);
        return;
    }
    ms_nccl_flights_free(nccl);
    for (ms_nccl_group *g = atomic_load(&nccl->groups), *next; g; g = next) {
        next = g->next;
        for (int i = 0; i < MS_NCCL_COMMUNICATORS; i++)
            ms_nccl_graph_free(nccl, &g->communicators[i]);
        ms_release(context, g);
    }
    for (const ms_nccl_range *r = atomic_load(&nccl->ranges), *next; r; r = next) {
        next = r->next;
        ms_release(context, (void *)(uintptr_t)r);
    }
    ms_rendezvous_release(nccl->rendezvous);
    ms_release(context, nccl);
}

extern const ms_kernels ms_cuda_nccl;

/* NCCL has no u16. */
const ms_transport ms_transport_nccl = { .name = "nccl",
                                         .kernels = "cuda",
                                         .any_device = true,
                                         .kinds = MS_ALL_KINDS,
                                         .dtypes = MS_ALL_DTYPES,
                                         .ops = MS_ALL_OPS,
                                         .reduced_dtypes = MS_ALL_DTYPES & ~(1u << MS_U16),
                                         .tasks = ms_nccl_tasks,
                                         .other = &ms_cuda_nccl,
                                         .open = open_nccl,
                                         .prepare = ms_nccl_prepare,
                                         .forget = ms_nccl_forget,
                                         .enroll = enroll,
                                         .choose = ms_nccl_choose,
                                         .chosen = ms_nccl_chosen,
                                         .poll_error = poll_error,
                                         .abort = abort_nccl,
                                         .close = close_nccl };
