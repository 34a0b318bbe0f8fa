/* open.c: joins a job on one host: its control, and the transport between its ranks. */
#include "comm/local/local.h"

static int populate_heap(void *user, void *address, uint64_t bytes)
{
    const ms_local *local = user;
    return ms_rendezvous_populate_heap(local->host->rendezvous, local->host->rank, address, bytes);
}

/* A task that fails would leave peers waiting for the collectives after it. In a forked child
 * nothing here is this process' business. */
static void end_job(ms_engine *engine, const ms_error *error)
{
    ms_comm *comm = ms_comm_of(engine);
    const ms_os *os = ms_engine_context(engine)->os;
    if (comm && os->process_id(os->user) == comm->process) comm->control->abort(comm, error);
}

static ms_status open_transport(ms_engine *engine, ms_host *host, ms_local **out)
{
    ms_context *context = ms_engine_context(engine);
    void *memory = NULL;
    ms_status status = ms_allocate(context, sizeof(ms_local), "rank", &memory);
    if (status) return status;
    ms_local *local = memory;
    local->host = host;
    const ms_rendezvous *rendezvous = host->rendezvous;
    status =
        ms_arena_new(engine, rendezvous->heaps[host->rank].memory + MS_STAGES_BYTES,
                     rendezvous->heap_bytes - MS_STAGES_BYTES, populate_heap, local, &local->arena);
    if (status) ms_release(context, local);
    else *out = local;
    return status;
}

ms_status ms_comm_open(ms_engine *engine, ms_rendezvous *rendezvous, uint32_t rank,
                       ms_group **world)
{
    ms_host *host = NULL;
    ms_local *local = NULL;
    if (ms_engine_is_sim(engine))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "the sim device has no data to exchange: open a fake world");
    if (rank >= rendezvous->ranks)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "rank %u of %u: ranks count from 0", rank,
                              rendezvous->ranks);
    if (ms_comm_of(engine))
        return ms_engine_fail(engine, MS_ERROR_STATE, "this engine belongs to a world already");
    ms_status status = ms_host_open(engine, rendezvous, rank, &host);
    if (status) return status;
    status = open_transport(engine, host, &local);
    if (!status)
        status = ms_comm_new(engine, &ms_control_host, &ms_transport_local, rank, rendezvous->ranks,
                             world);
    if (status) {
        if (local) {
            ms_arena_free(local->arena);
            ms_release(ms_engine_context(engine), local);
        }
        ms_host_forget(ms_engine_context(engine), host);
        return status;
    }
    ms_comm *comm = (*world)->comm;
    comm->transport_state = local;
    ms_host_show(host, comm);
    ms_engine_on_failure(engine, end_job);
    return MS_OK;
}
