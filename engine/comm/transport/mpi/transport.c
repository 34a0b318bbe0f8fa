/* transport.c: the transport between the ranks of several nodes, for the cpu device: which way a
 * call takes. */
#include <errno.h>

#include "comm/control/shm/bell.h"
#include "comm/control/shm/wait.h"
#include "comm/transport/mpi/mpi_channel.h"
#include "comm/transport/mpi/p2p.h"
#include "comm/transport/mpi/staged.h"
#include "comm/transport/mpi/two_level_reduce.h"
#include "comm/transport/mpi/two_level_sums.h"
#include "comm/transport/shm/lifetime.h"
#include "comm/transport/shm/shm.h"

/* Calls between ranks of one node are the local transport's. */
static bool is_of_one_node(const ms_comm_args *args)
{
    const ms_topology *at = args->group->topology;
    return ms_kind_is_pair(args->kind) ? at->is_here[args->root] : at->nodes == 1;
}

/* What a call may lack of memory is found before it is entered. A barrier needs no staging area. */
static ms_mpi_channel *find_channel(ms_mpi_transport *transport, const ms_comm_args *args,
                                    bool by_nodes)
{
    ms_mpi_channel *channel = ms_mpi_channel_for(transport, args);
    if (!channel) return NULL;
    channel->post.args = args;
    if (args->kind != MS_BARRIER && ms_mpi_channel_populate(channel)) return NULL;
    return !by_nodes || ms_mpi_channel_make_room(channel, ms_two_level_scratch_bytes(channel, args))
               ? channel
               : NULL;
}

static ms_task_result run_call(ms_run *run, void *arguments)
{
    const ms_comm_args *args = arguments;
    ms_mpi_transport *transport = args->group->comm->transport_state;
    ms_shm_rank *self = transport->local.self;
    if (is_of_one_node(args)) return ms_local_run(run, arguments);
    if (ms_kind_is_pair(args->kind)) return ms_mpi_p2p_run(run, transport, args);
    if (ms_shm_aborted(self)) return ms_shm_fail(run, self, args);
    bool by_nodes = ms_kind_reduces(args->kind) && !self->control->sum_by_ranks;
    ms_mpi_channel *channel = find_channel(transport, args, by_nodes);
    if (!channel)
        return ms_shm_raise(run, self, args, MS_ERROR_MEMORY,
                            "no memory for a collective over several hosts");
    bool done =
        by_nodes ? ms_two_level_run(run, channel, args) : ms_mpi_staged_run(run, channel, args);
    return done ? MS_TASK_DONE : ms_shm_fail(run, self, args);
}

/* --------------------------------------------------------------- membership */

static ms_status open_mpi(ms_comm *comm)
{
    ms_context *context = ms_engine_context(comm->engine);
    const ms_shm_rank *self = comm->control_state;
    void *memory = NULL;
    if (!self->files->mpi)
        return ms_fail(
            context, MS_ERROR_UNSUPPORTED,
            "no MPI connects the hosts of this job: start its ranks with mpirun or srun");
    ms_status status = ms_allocate(context, sizeof(ms_mpi_transport), "rank", &memory);
    if (status) return status;
    ms_mpi_transport *transport = memory;
    transport->mpi = self->files->mpi;
    status = ms_local_begin(comm, &transport->local);
    if (status) ms_release(context, transport);
    else comm->transport_state = transport;
    return status;
}

/* No message of the group's calls is under way, since they have ended on all members. */
static bool forget(ms_group *group)
{
    ms_mpi_transport *transport = group->comm->transport_state;
    ms_shm_rank *self = transport->local.self;
    ms_mpi_channel **channels = &transport->channels[group->id * MS_CHANNELS];
    if (ms_shm_aborted(self)) return false;
    for (uint32_t c = 0; c < MS_CHANNELS; c++) {
        ms_mpi_channel_free(self->files->base.os, channels[c]);
        channels[c] = NULL;
    }
    return true;
}

static void abort_mpi(ms_comm *comm)
{
    ms_mpi_transport *transport = comm->transport_state;
    ms_mpi_give_up(transport->mpi);
}

/* Messages of a job that has ended may be under way. If MPI does not come back from one, its memory
 * must stay as long as the process: the reference to the files that is taken here is never
 * released. */
static void close_mpi(ms_comm *comm)
{
    ms_mpi_transport *transport = comm->transport_state;
    ms_shm_rank *self = transport->local.self;
    const ms_os *os = self->files->base.os;
    bool ended = ms_shm_aborted(self);
    if (ended) ms_mpi_give_up(transport->mpi);
    ms_local_end(&transport->local);
    if (ended && !ms_mpi_has_stopped(transport->mpi)) {
        ms_rendezvous_retain(&self->files->base);
        return;
    }
    for (size_t i = 0; i < sizeof transport->channels / sizeof *transport->channels; i++)
        ms_mpi_channel_free(os, transport->channels[i]);
    ms_release(ms_engine_context(comm->engine), transport);
}

static const ms_task tasks[MS_COLLECTIVES] = MS_COMM_TASKS(run_call);

const ms_transport ms_transport_mpi = { .name = "hosts",
                                        .kernels = "cpu",
                                        .by_nodes = true,
                                        .kinds = MS_ALL_KINDS,
                                        .dtypes = MS_ALL_DTYPES,
                                        .ops = MS_ALL_OPS,
                                        .reduced_dtypes = MS_ALL_DTYPES,
                                        .rounds = true,
                                        .compares_counts = true,
                                        .tasks = tasks,
                                        .open = open_mpi,
                                        .forget = forget,
                                        .storage = ms_local_storage,
                                        .abort = abort_mpi,
                                        .close = close_mpi };
