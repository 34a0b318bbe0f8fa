/* shm.c: control among the ranks of one node: a rank joins, counts its calls, leaves. */
#include "comm/control/shm/async_calls.h"

#include <stdio.h>
#include <string.h>

#include "comm/control/shm/bell.h"
#include "comm/control/shm/claim.h"
#include "comm/control/shm/files.h"
#include "comm/control/shm/ids.h"
#include "comm/control/shm/job_end.h"
#include "comm/control/shm/liveness.h"
#include "comm/control/shm/oob.h"
#include "comm/control/shm/call_record.h"
#include "comm/control/shm/request.h"
#include "comm/control/shm/straggler.h"
#include "comm/group.h"

/* ------------------------------------------------------------------ the job */

/* One load in the usual case; it runs before every call. After the end of a job, this fails each
 * later call of the rank with the same cause. */
static ms_status check(ms_comm *comm)
{
    ms_shm_rank *self = comm->control_state;
    ms_abort_record cause;
    if (!ms_shm_aborted(self) || !ms_shm_cause(self->files, &cause)) return MS_OK;
    ms_error *error = &ms_engine_context(comm->engine)->error;
    *error = cause.error;
    return error->status;
}

/* How many calls this rank has issued in each channel and to each peer, for ranks on other nodes:
 * they need it once it has finished. Lines that the rank has not used are left alone, since they
 * have no pages. */
static void tell_issued(ms_shm_rank *self)
{
    const ms_comm *comm = self->comm;
    if (!self->files->replication) return;
    for (uint32_t g = 0; g < atomic_load(&comm->group_count); g++)
        for (uint32_t channel = 0; channel < MS_CHANNELS; channel++) {
            const ms_group *group = comm->groups[g];
            if (!group || group->control != comm->control) continue;
            ms_member_line *line = ms_member(self->files, group->id, channel, self->rank);
            ms_shm_tell(self, &line->issued, sizeof line->issued);
        }
    for (uint32_t r = 0; r < self->control->ranks; r++) {
        ms_pair_line *to = ms_pair(self->files, self->rank, r),
                     *from = ms_pair(self->files, r, self->rank);
        if (self->sends[r]) ms_shm_tell(self, &to->sends, sizeof to->sends);
        if (self->receives[r]) ms_shm_tell(self, &from->receives, sizeof from->receives);
    }
}

/* `finished` tells waiting peers that no further call of this rank comes; it is set once. Peers
 * that sleep look around by themselves, but a wake makes them notice at once. A message ends the
 * job first, so that peers do not report "left" instead of the reason. */
static void leave(ms_comm *comm, const char *message)
{
    ms_shm_rank *self = comm->control_state;
    if (message) {
        char text[MS_ERROR_MESSAGE_BYTES];
        snprintf(text, sizeof text, "because rank %u: %.900s", self->rank, message);
        ms_shm_end_job(self->files, MS_ABORT_RAISED, (int32_t)self->rank, text);
    }
    ms_word *finished = &self->control->lines[self->rank].finished;
    /* A second call finds it set, and the peers are awake already. */
    if (atomic_exchange(finished, 1)) return;
    tell_issued(self);
    ms_shm_tell(self, finished, sizeof *finished);
    for (uint32_t r = 0; r < self->control->ranks; r++)
        if (r != self->rank) ms_shm_wake(self, r);
}

/* The line of the script is added unless the message has it already. A mismatch stays one on every
 * rank. Peers get "because rank R", so that a user reads the cause on whichever rank is looked at.
 */
static void raise(ms_comm *comm, const ms_error *error)
{
    ms_shm_rank *self = comm->control_state;
    char text[MS_ERROR_MESSAGE_BYTES];
    const char *at = ", at ", *script = error->script;
    if (!*script || strstr(error->message, script)) at = script = "";
    snprintf(text, sizeof text, "because rank %u: %.800s%s%s", self->rank, error->message, at,
             script);
    ms_shm_end_job(self->files,
                   error->status == MS_ERROR_MISMATCH ? MS_ABORT_MISMATCH : MS_ABORT_RAISED,
                   (int32_t)self->rank, text);
}

/* Each count moves the time limits of ranks that wait for this one. */
static void progress(ms_comm *comm)
{
    ms_shm_rank *self = comm->control_state;
    ms_activity_done(&self->control->lines[self->rank].activity);
}

/* -------------------------------------------------------------------- calls */

/* The pages of the group's lines are made before its first use. Without memory for them a rank
 * would die of SIGBUS in the middle of a collective. Every member does it for itself; pages that
 * another has made already cost nothing. Claims of a former group with this number are taken back:
 * one of them could be of the same lap, see claim.c. */
static ms_status join_group(ms_comm *comm, uint32_t id)
{
    ms_shm_rank *self = comm->control_state;
    size_t bytes = (size_t)MS_CHANNELS * self->control->ranks * sizeof(ms_member_line);
    int error = ms_shm_files_populate_control(self->files, ms_member(self->files, id, 0, 0), bytes);
    if (error)
        return ms_fail_os(ms_engine_context(comm->engine), error, "no memory for a new group",
                          NULL);
    ms_ids_note(self->control, id);
    for (uint32_t channel = 0; channel < MS_CHANNELS; channel++) {
        ms_member_line *line = ms_member(self->files, id, channel, self->rank);
        if (!atomic_load(&line->issued)) continue;
        for (uint32_t i = 0; i < MS_CALLS_AHEAD; i++) atomic_store(&line->claims[i], 0);
    }
    return MS_OK;
}

/* Counted by world ranks, so that two groups with the same two members share one sequence. */
static uint64_t pair_number(ms_comm *comm, const ms_comm_args *args)
{
    const ms_shm_rank *self = comm->control_state;
    uint32_t other = args->group->members[args->root];
    return (args->kind == MS_SEND ? self->sends : self->receives)[other] + 1;
}

/* The pages of the pair's line, before the first call between the two. Collectives have their pages
 * since join_group. Later calls of the pair find them. */
static ms_status prepare(ms_comm *comm, const ms_comm_args *args)
{
    ms_shm_rank *self = comm->control_state;
    if (!ms_kind_is_pair(args->kind)) return MS_OK;
    uint32_t other = args->group->members[args->root];
    ms_pair_line *line = args->kind == MS_SEND ? ms_pair(self->files, self->rank, other)
                                               : ms_pair(self->files, other, self->rank);
    int error =
        args->number == 1 ? ms_shm_files_populate_control(self->files, line, sizeof *line) : 0;
    return error ? ms_fail_os(ms_engine_context(comm->engine), error,
                              "no memory for sending between ranks", NULL)
                 : MS_OK;
}

/* Stored after the launch: from now on peers may wait for this call. The host counts its sends and
 * receives itself; peers read the stored number. */
static void launched(ms_comm *comm, const ms_comm_args *args)
{
    ms_shm_rank *self = comm->control_state;
    uint32_t other = ms_kind_is_pair(args->kind) ? args->group->members[args->root] : 0;
    if (args->kind == MS_SEND)
        atomic_store(&ms_pair(self->files, self->rank, other)->sends,
                     self->sends[other] = args->number);
    else if (args->kind == MS_RECV)
        atomic_store(&ms_pair(self->files, other, self->rank)->receives,
                     self->receives[other] = args->number);
    else atomic_store(&ms_ledger_line(self, args, args->group->rank)->issued, args->number);
}

/* ------------------------------------------------------------------ joining */

/* The place at the rendezvous, with the pages of the control file that the rank needs first. The
 * exchange decides between two processes that claim one number. */
static ms_status take_place(ms_comm *comm, ms_shm_files *files, uint32_t rank)
{
    uint32_t absent = MS_RANK_ABSENT;
    ms_word *phase = &files->control->lines[rank].phase;
    if (!atomic_compare_exchange_strong(phase, &absent, MS_RANK_PRESENT))
        return ms_engine_fail(comm->engine, MS_ERROR_STATE,
                              "rank %u of this job is taken: every rank joins once", rank);
    int error = ms_shm_files_populate_control(files, ms_member(files, 0, 0, 0),
                                              (size_t)MS_CHANNELS * files->base.ranks
                                                  * sizeof(ms_member_line));
    if (!error) return MS_OK;
    /* Another process may take the place now. */
    atomic_store(phase, MS_RANK_ABSENT);
    return ms_fail_os(ms_engine_context(comm->engine), error,
                      "no memory for the control file of a job", NULL);
}

/* The place is taken before the record is filled; a failure before it leaves the rendezvous as it
 * was. A reference to the rendezvous keeps the files mapped until close. */
static ms_status open_shm(ms_comm *comm, ms_rendezvous *rendezvous)
{
    ms_context *context = ms_engine_context(comm->engine);
    ms_shm_files *files = ms_shm_files_of(rendezvous);
    uint32_t rank = comm->groups[0]->rank;
    void *memory = NULL;
    ms_status status = ms_allocate(context, sizeof(ms_shm_rank), "rank", &memory);
    if (status) return status;
    status = take_place(comm, files, rank);
    if (status) {
        ms_release(context, memory);
        return status;
    }
    ms_shm_rank *self = memory;
    ms_rendezvous_retain(rendezvous);
    self->comm = comm;
    self->files = files;
    self->control = files->control;
    self->rank = rank;
    self->pressure = files->control->crowded ? MS_SHARED_CORE : MS_OWN_CORE;
    ms_straggler_step(self, 0);
    comm->control_state = self;
    comm->timeout_ns = files->control->timeout_ns;
    ms_comm_place(comm, self->control->node_of, files->base.ranks, self->control->sum_by_ranks);
    return MS_OK;
}

/* From now on other ranks and the supervisor see the process and its activity. The process number
 * goes first, since liveness.c compares it. */
static void joined(ms_comm *comm)
{
    ms_shm_rank *self = comm->control_state;
    ms_context *context = ms_engine_context(comm->engine);
    ms_rank_line *line = &self->control->lines[self->rank];
    self->joined = true;
    atomic_store(&line->process, context->os->process_id(context->os->user));
    context->activity = &line->activity;
    ms_liveness_watch(self);
}

/* A rank that was never visible gives its place back; one that was leaves the job, and its place
 * stays taken. */
static void close_shm(ms_comm *comm)
{
    ms_shm_rank *self = comm->control_state;
    ms_word *phase = &self->control->lines[self->rank].phase;
    ms_context *context = ms_engine_context(comm->engine);
    if (self->joined) {
        leave(comm, NULL);
        atomic_store(phase, MS_RANK_LEFT);
        context->activity = NULL; /* the streams have come to their end */
    } else atomic_store(phase, MS_RANK_ABSENT);
    ms_rendezvous_release(&self->files->base);
    ms_release(context, self);
}

#define MS_SHM_CONTROL(text, take, give)                                                      \
    {                                                                                         \
        .name = text, .has_others = true, .open = open_shm, .joined = joined, .check = check, \
        .take_ids = take, .give_ids = give, .join = join_group, .number = pair_number,        \
        .prepare = prepare, .claim = ms_shm_claim, .retract = ms_shm_retract,                 \
        .launched = launched, .entered = ms_shm_entered, .landed = ms_shm_landed,             \
        .look = ms_shm_look, .tasks = ms_shm_tasks, .leave = leave, .abort = raise,           \
        .progress = progress, .step = ms_shm_step, .set_folder = ms_shm_set_folder,           \
        .close = close_shm                                                                    \
    }

/* Over several nodes a rank works on its node's files in the same way: the replication and the
 * agents (comm/control/cluster/) carry what other nodes need. */
const ms_control ms_control_shm = MS_SHM_CONTROL("host", ms_shm_ids_take, ms_shm_ids_give),
                 ms_control_cluster =
                     MS_SHM_CONTROL("hosts", ms_cluster_ids_take, ms_cluster_ids_give);
