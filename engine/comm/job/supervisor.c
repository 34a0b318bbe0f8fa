/* supervisor.c: a job as the supervisor of a node sees it, through the memory files of this node:
 * the tables of both kinds of rendezvous. */
#include "comm/control/shm/files.h"

#include "comm/control/shm/hang_report.h"
#include "comm/control/shm/job_end.h"
#include "comm/control/shm/request.h"
#include "comm/job/rendezvous_socket.h"

/* What the rank shows to others, in the control file. The caller has checked the number. */
static ms_rank_line *line_of(const ms_rendezvous *rendezvous, uint32_t rank)
{
    return &ms_shm_files_of(rendezvous)->control->lines[rank];
}

/* Fixed when the files were made. */
static uint32_t threads(const ms_rendezvous *rendezvous)
{
    return ms_shm_files_of(rendezvous)->control->threads;
}

static bool crowded(const ms_rendezvous *rendezvous)
{
    return ms_shm_files_of(rendezvous)->control->crowded;
}

static uint32_t place(const ms_rendezvous *rendezvous, uint32_t rank, uint32_t *here)
{
    const uint16_t *node_of = ms_shm_files_of(rendezvous)->control->node_of;
    uint32_t before = 0;
    *here = 0;
    for (uint32_t r = 0; r < rendezvous->ranks; r++) {
        if (node_of[r] != node_of[rank]) continue;
        if (r < rank) before++;
        ++*here;
    }
    return before;
}

/* The supervisor is one more writer of the record; the first of all wins. */
static bool end_job(ms_rendezvous *rendezvous, ms_abort_reason reason, int32_t rank,
                    const char *message)
{
    return ms_shm_end_job(ms_shm_files_of(rendezvous), reason, rank, message);
}

/* The text may come a moment after the cause: ms_shm_cause waits for it. */
static bool cause(const ms_rendezvous *rendezvous, ms_abort_record *out)
{
    return ms_shm_cause(ms_shm_files_of(rendezvous), out);
}

/* Of ranks that have ended; see ms_rendezvous_flight. */
static bool flight(const ms_rendezvous *rendezvous, uint32_t rank, uint64_t index, ms_flight *out)
{
    return ms_shm_flight(ms_shm_files_of(rendezvous), rank, index, out);
}

/* The fields are read one by one while the rank runs, so they may be of different moments. step is
 * kept plus 1, so that 0, which the pages begin with, means none. */
static void rank_state(const ms_rendezvous *rendezvous, uint32_t rank, ms_rank_state *out)
{
    ms_rank_line *line = line_of(rendezvous, rank);
    *out = (ms_rank_state){ .phase = (ms_rank_phase)atomic_load(&line->phase),
                            .process = atomic_load(&line->process),
                            .progress = ms_rank_progress(line),
                            .collectives = atomic_load(&line->flights),
                            .step = atomic_load(&line->step) - 1,
                            .finished = atomic_load(&line->finished) != 0,
                            .waits = atomic_load(&line->still) != 0 };
    ms_activity_read(&line->activity, &out->activity);
}

/* Called by the supervisor after the rank's process has ended. Its tasks never run any more, so
 * ranks that wait for it are woken. `finished` before `gone`: a peer that sees the process gone
 * also sees that no call of it will come. */
static void left(ms_rendezvous *rendezvous, uint32_t rank)
{
    atomic_store(&line_of(rendezvous, rank)->finished, 1);
    atomic_store(&line_of(rendezvous, rank)->gone, 1);
    ms_shm_files *files = ms_shm_files_of(rendezvous);
    ms_shm_ring_all(files->control);
    if (files->replication) files->replication->stir(files->replication);
}

/* In the control file, so that the supervisor and the rank see the same record. */
static ms_activity *activity(ms_rendezvous *rendezvous, uint32_t rank)
{
    return &line_of(rendezvous, rank)->activity;
}

#define MS_SHM_RENDEZVOUS(of)                                                                     \
    {                                                                                             \
        .prefix = MS_SHM_PREFIX, .control = of, .create = ms_shm_files_new, .meet = ms_shm_meet,  \
        .share = ms_shm_files_share, .adopt = ms_shm_files_adopt, .close = ms_shm_files_close,    \
        .threads = threads, .crowded = crowded, .place = place, .abort = end_job, .cause = cause, \
        .rank = rank_state, .flight = flight, .left = left, .activity = activity,                 \
        .judge = ms_shm_judge, .hang_report = ms_shm_hang_report,                                 \
        .dismiss_hang_report = ms_shm_dismiss_hang_report, .request = ms_shm_request,             \
        .folder = ms_shm_folder                                                                   \
    }

/* rendezvous_kinds.c finds the first by its prefix. The second is that of a job over several nodes.
 * An agent makes it (comm/control/cluster/agent.c), and a rank gets it at the local socket of its
 * agent (local_ranks.c). Both see the job through the memory files of their node, as in a job of
 * one node. What differs goes through ms_replication (comm/control/shm/state.h) and the agents. */
const ms_rendezvous_kind ms_rendezvous_shm = MS_SHM_RENDEZVOUS(&ms_control_shm),
                         ms_rendezvous_cluster = MS_SHM_RENDEZVOUS(&ms_control_cluster);
