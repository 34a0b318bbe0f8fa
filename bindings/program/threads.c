/* threads.c: ranks as threads of this process, each with a Lua state and an engine of its
 * own; the same code as for processes. */
#include "bindings/program/threads.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "bindings/program/rank.h"
#include "bindings/program/signals.h"

/* One rank. ended is written by its thread at the very end, and read by the supervisor's poll. The
 * array of these lives in job->ranks_data, and is not released while a thread that did not leave
 * may still use it. */
typedef struct rank_thread {
    ms_job *job;
    uint32_t rank;
    pthread_t thread;
    int code, ended;
} rank_thread;

/* The thread's Lua state and engine are its own; nothing but the job is shared. The name is for ps,
 * debuggers and profilers, where all ranks are one process. */
static void *run_rank(void *argument)
{
    rank_thread *self = argument;
    char name[16];
    snprintf(name, sizeof name, "rank %u", self->rank);
    pthread_setname_np(pthread_self(), name);
    self->code =
        ms_program(self->job->count, self->job->arguments, self->job->rendezvous, self->rank, true);
    /* Only counting up to 2^64 could fail. */
    if (eventfd_write(self->ended, 1)) return NULL;
    return NULL;
}

/* The thread has written its descriptor, so the join does not wait long. */
static void reap(ms_job *job, uint32_t rank)
{
    rank_thread *thread = (rank_thread *)job->ranks_data + rank;
    pthread_join(thread->thread, NULL);
    job->outcomes[rank].code = thread->code;
}

/* To the rank's own thread, which no process-wide signal can choose. The handler then runs on that
 * thread and finds its Lua states in thread-local memory. */
static void locate(ms_job *job, uint32_t rank)
{
    pthread_kill(((rank_thread *)job->ranks_data)[rank].thread, MS_LOCATE_THREAD);
}

/* The record is complete before the thread starts. The eventfd takes the place of a process
 * descriptor: the supervisor polls both alike. There is no kill for threads: a thread that is
 * stopped anywhere could hold locks of the C library, so job->kill stays NULL, and the process ends
 * with such threads in it. */
static ms_status start_one(ms_job *job, rank_thread *thread, uint32_t rank)
{
    *thread = (rank_thread){ .job = job, .rank = rank, .ended = eventfd(0, EFD_CLOEXEC) };
    job->ended[rank] = thread->ended;
    ms_status status = MS_OK;
    int error = thread->ended < 0 ? errno : 0;
    if (!error) status = ms_job_watch_end(job, rank);
    if (!error && !status) error = pthread_create(&thread->thread, NULL, run_rank, thread);
    if (error)
        status = ms_fail_os(&job->context, -error, "a thread for a rank cannot be started", NULL);
    if (status) {
        if (thread->ended >= 0) close(thread->ended);
        job->ended[rank] = -1;
        return status;
    }
    job->outcomes[rank].process = getpid();
    job->running++;
    return MS_OK;
}

/* Ends the job because not all ranks could be started, and waits for those that were. A thread
 * cannot be killed, so the job gets a cause, which ends every wait of the ranks that run. */
static void stop_all(ms_job *job)
{
    ms_rendezvous_abort(job->rendezvous, MS_ABORT_STOPPED, -1, job->context.error.message);
    for (uint32_t r = 0; r < job->ranks; r++) {
        if (job->ended[r] < 0) continue;
        reap(job, r);
        close(job->ended[r]);
        job->ended[r] = -1;
    }
}

/* The records live until all threads have ended. The handler of MS_LOCATE_THREAD is one for the
 * whole process; each rank installs it for itself, and the signal is ignored until the first has.
 */
ms_status ms_start_threads(ms_job *job)
{
    void *memory = NULL;
    job->reap = reap;
    job->locate = locate;
    /* No rank reads the environment yet. */
    if (job->share_gpu) setenv(MS_QUEUES_VARIABLE, MS_QUEUES_MOST, 0);
    signal(MS_LOCATE_THREAD, SIG_IGN); /* until a rank's thread has its handler */
    ms_status status = ms_allocate(&job->context, job->ranks * sizeof(rank_thread),
                                   "threads of the ranks", &memory);
    if (status) return status;
    job->ranks_data = memory;
    for (uint32_t r = 0; r < job->ranks && !status; r++)
        status = start_one(job, (rank_thread *)memory + r, r);
    if (status) stop_all(job);
    return status;
}
