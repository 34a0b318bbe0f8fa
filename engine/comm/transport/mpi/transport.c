/* transport.c: the transport between the ranks of several hosts: which way a call takes. */
#include <errno.h>

#include "comm/control/shm/bell.h"
#include "comm/control/shm/wait.h"
#include "comm/transport/mpi/mpi_channel.h"
#include "comm/transport/mpi/p2p.h"
#include "comm/transport/mpi/staged.h"
#include "comm/transport/mpi/two_level_reduce.h"
#include "comm/transport/mpi/two_level_sums.h"
#include "comm/transport/shm/open.h"
#include "comm/transport/shm/shm.h"

/* Calls between ranks of one host are the local transport's. */
static bool is_of_one_host(const ms_comm_args *args)
{
    const ms_topology *at = args->group->topology;
    return ms_kind_is_pair(args->kind) ? at->is_here[args->root] : at->hosts == 1;
}

/* What a call may lack of memory is found before it is entered. A barrier needs no staging area. */
static ms_lane *find_lane(ms_hosts *hosts, const ms_comm_args *args, bool by_hosts)
{
    ms_lane *lane = ms_lane_for(hosts, args);
    if (!lane) return NULL;
    lane->post.args = args;
    if (args->kind != MS_BARRIER && ms_lane_populate(lane)) return NULL;
    return !by_hosts || ms_lane_make_room(lane, ms_slices_room(lane, args)) ? lane : NULL;
}

static ms_task_result run_call(ms_run *run, void *arguments)
{
    const ms_comm_args *args = arguments;
    ms_hosts *hosts = args->group->comm->transport_state;
    ms_host *host = hosts->local.host;
    if (is_of_one_host(args)) return ms_local_run(run, arguments);
    if (ms_kind_is_pair(args->kind)) return ms_hosts_pair_run(run, hosts, args);
    if (ms_host_aborted(host)) return ms_host_fail(run, host, args);
    bool by_hosts = ms_kind_reduces(args->kind) && !host->control->sum_by_ranks;
    ms_lane *lane = find_lane(hosts, args, by_hosts);
    if (!lane)
        return ms_host_raise(run, host, args, MS_ERROR_MEMORY,
                             "no memory for a collective over several hosts");
    bool done = by_hosts ? ms_slices_run(run, lane, args) : ms_steps_run(run, lane, args);
    return done ? MS_TASK_DONE : ms_host_fail(run, host, args);
}

/* --------------------------------------------------------------- membership */

static ms_status open_hosts(ms_comm *comm)
{
    ms_context *context = ms_engine_context(comm->engine);
    const ms_host *host = comm->control_state;
    void *memory = NULL;
    if (!host->files->mpi)
        return ms_fail(
            context, MS_ERROR_UNSUPPORTED,
            "no MPI connects the hosts of this job: start its ranks with mpirun or srun");
    ms_status status = ms_allocate(context, sizeof(ms_hosts), "rank", &memory);
    if (status) return status;
    ms_hosts *hosts = memory;
    hosts->mpi = host->files->mpi;
    status = ms_local_begin(comm, &hosts->local);
    if (status) ms_release(context, hosts);
    else comm->transport_state = hosts;
    return status;
}

/* No message of the group's calls is under way, since they have ended on all members. */
static bool forget(ms_group *group)
{
    ms_hosts *hosts = group->comm->transport_state;
    ms_host *host = hosts->local.host;
    ms_lane **lanes = &hosts->lanes[group->id * MS_CHANNELS];
    if (ms_host_aborted(host)) return false;
    for (uint32_t c = 0; c < MS_CHANNELS; c++) {
        ms_lane_free(host->files->base.os, lanes[c]);
        lanes[c] = NULL;
    }
    return true;
}

static void abort_hosts(ms_comm *comm)
{
    ms_hosts *hosts = comm->transport_state;
    ms_mpi_give_up(hosts->mpi);
}

/* Messages of a job that has ended may be under way. If MPI does not come back from one, its memory
 * must stay as long as the process: the reference to the files that is taken here is never
 * released. */
static void close_hosts(ms_comm *comm)
{
    ms_hosts *hosts = comm->transport_state;
    ms_host *host = hosts->local.host;
    const ms_os *os = host->files->base.os;
    bool ended = ms_host_aborted(host);
    if (ended) ms_mpi_give_up(hosts->mpi);
    ms_local_end(&hosts->local);
    if (ended && !ms_mpi_has_stopped(hosts->mpi)) {
        ms_rendezvous_retain(&host->files->base);
        return;
    }
    for (size_t i = 0; i < sizeof hosts->lanes / sizeof *hosts->lanes; i++)
        ms_lane_free(os, hosts->lanes[i]);
    ms_release(ms_engine_context(comm->engine), hosts);
}

static const ms_task tasks[MS_COLLECTIVES] = MS_COMM_TASKS(run_call);

const ms_transport ms_transport_hosts = { .name = "hosts",
                                          .kernels = "cpu",
                                          .by_hosts = true,
                                          .kinds = MS_ALL_KINDS,
                                          .dtypes = MS_ALL_DTYPES,
                                          .ops = MS_ALL_OPS,
                                          .reduced_dtypes = MS_ALL_DTYPES,
                                          .rounds = true,
                                          .compares_counts = true,
                                          .tasks = tasks,
                                          .open = open_hosts,
                                          .forget = forget,
                                          .storage = ms_local_storage,
                                          .abort = abort_hosts,
                                          .close = close_hosts };
