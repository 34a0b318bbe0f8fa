/* liveness.c: how ranks without a supervisor find out that another has died. The process of each
 * rank claims a place in the control file; the system frees the place when the process ends. */
#include "comm/control/shm/liveness.h"

#include <inttypes.h>
#include <stdio.h>

#include "comm/control/shm/job_end.h"

/* Only in jobs without a supervisor. If the system has no such claims, the rank is not watched, and
 * a peer notices its death by the time limit only. The claim is a lock of the file, which the
 * kernel frees with the process, however it ended. */
void ms_liveness_watch(ms_shm_rank *self)
{
    const ms_os *os = self->files->base.os;
    if (!self->control->unsupervised
        || os->shared_claim(os->user, self->files->control_file, self->rank))
        return;
    atomic_store(&self->control->lines[self->rank].claimed, 1);
}

/* The system may free the places of all ranks of one process when one of them leaves. */
static bool is_alone(const ms_control_file *control, uint32_t rank)
{
    int64_t process = atomic_load(&control->lines[rank].process);
    for (uint32_t r = 0; r < control->ranks; r++)
        if (r != rank && atomic_load(&control->lines[r].process) == process) return false;
    return true;
}

/* The claim is tested before `finished` is read: a rank that leaves in order sets `finished` before
 * its process ends, so it is not taken for dead. */
void ms_liveness_look(ms_shm_rank *self, uint32_t rank)
{
    const ms_os *os = self->files->base.os;
    ms_rank_line *line = &self->control->lines[rank];
    /* A process does not see its own claims. */
    if (rank == self->rank || !atomic_load(&line->claimed) || !is_alone(self->control, rank))
        return;
    if (os->shared_is_claimed(os->user, self->files->control_file, rank) != 0
        || atomic_load(&line->finished))
        return;
    char text[512], call[256];
    ms_flight flight;
    uint64_t flights = atomic_load(&line->flights);
    int64_t step = atomic_load(&line->step) - 1;
    int used = snprintf(text, sizeof text, "rank %u (pid %" PRId64 ") has ended without leaving",
                        rank, atomic_load(&line->process));
    if (flights && ms_shm_flight(self->files, rank, flights - 1, &flight))
        used += snprintf(text + used, sizeof text - (size_t)used, " %s %s",
                         flight.left_ns ? "after" : "during",
                         ms_flight_describe(&flight, call, sizeof call));
    if (step >= 0) snprintf(text + used, sizeof text - (size_t)used, " at step %" PRId64, step);
    ms_shm_end_job(self->files, MS_ABORT_DIED, (int32_t)rank, text);
}

/* Its claim is freed by the kernel, as those of ranks are. */
bool ms_liveness_of_agent(const ms_shm_files *files)
{
    const ms_os *os = files->base.os;
    return atomic_load(&files->control->agent_claimed)
           && os->shared_is_claimed(os->user, files->control_file, files->control->ranks) == 0;
}

/* Without its agent a node hears nothing of the others: not even that the job has ended. */
void ms_liveness_look_agent(ms_shm_rank *self)
{
    const ms_control_file *control = self->control;
    if (!ms_liveness_of_agent(self->files)) return;
    char text[256];
    snprintf(text, sizeof text,
             "the keeper of host %s has ended (the process that connects it with other hosts); "
             "rank %u found it gone",
             control->node_names[control->here], self->rank);
    ms_shm_end_job(self->files, MS_ABORT_DIED, -1, text);
}
