/* lifetime.c: the transport between the ranks of a node joins and leaves. */
#include "comm/transport/shm/lifetime.h"

#include "comm/issue.h"
#include "comm/control/shm/files.h"
#include "comm/transport/shm/host_staging.h"
#include "comm/transport/shm/one_gpu.h"

/* The arena asks for pages as it grows, so a heap takes no more memory than is used. */
static int populate_heap(void *user, void *address, uint64_t bytes)
{
    const ms_local *local = user;
    return ms_shm_files_populate_heap(local->self->files, local->self->rank, address, bytes);
}

/* The staging areas are at the beginning of the heap, the arena after them. The arena is a pool of
 * its own, so tensors of the group's memory count like any others. */
ms_status ms_local_begin(ms_comm *comm, ms_local *local)
{
    local->self = comm->control_state;
    const ms_shm_files *files = local->self->files;
    if (!ms_comm_runs_on_host(comm)) return MS_OK;
    return ms_arena_new(comm->engine, files->heaps[local->self->rank].memory + MS_STAGES_BYTES,
                        files->heap_bytes - MS_STAGES_BYTES, populate_heap, local, &local->arena);
}

ms_status ms_local_open(ms_comm *comm)
{
    ms_context *context = ms_engine_context(comm->engine);
    MS_ASSERT(comm->control == &ms_control_shm || comm->control == &ms_control_cluster);
    void *memory = NULL;
    ms_status status = ms_allocate(context, sizeof(ms_local), "rank", &memory);
    if (status) return status;
    ms_local *local = memory;
    status = ms_local_begin(comm, local);
    if (!status) status = ms_local_choose_way(comm, local);
    if (status) ms_release(context, local);
    else comm->transport_state = local;
    return status;
}

/* After the streams have ended; tensors in the arena are gone by then. */
void ms_local_end(ms_local *local)
{
    if (local->arena) ms_arena_free(local->arena);
}

void ms_local_close(ms_comm *comm)
{
    ms_local *local = comm->transport_state;
    ms_local_settle(local);
    ms_local_end(local);
    ms_local_free_host_stagings(comm);
    ms_local_free_directs(comm);
    ms_release(ms_engine_context(comm->engine), local);
}
