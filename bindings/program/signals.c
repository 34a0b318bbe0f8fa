/* signals.c: what a process that supervises others waits for: its signals, and the ends of ranks.
 */
#include "bindings/program/signals.h"

#include <errno.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>

/* The signals are blocked and read from a descriptor, so the supervisor handles them between two
 * polls and not in a handler. Threads that are started later inherit the mask. Handlers would have
 * to wake the poll and could run at any point of it. SIGUSR2 is among them although ranks that are
 * processes get it, too: there it is the question where they are (MS_LOCATE_PROCESS), sent to one
 * rank by its descriptor. */
int ms_open_signals(void)
{
    sigset_t set;
    sigemptyset(&set);
    int numbers[] = { SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) sigaddset(&set, numbers[i]);
    /* A signal between this line and the next stays pending and is read from the descriptor. */
    int error = -pthread_sigmask(SIG_BLOCK, &set, NULL);
    if (error) return error;
    int descriptor = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return descriptor < 0 ? -errno : descriptor;
}

ms_status ms_job_watch_end(ms_job *job, uint32_t rank)
{
    struct epoll_event event = { .events = EPOLLIN, .data.u32 = rank };
    if (epoll_ctl(job->ends, EPOLL_CTL_ADD, job->ended[rank], &event) == 0) return MS_OK;
    return ms_fail_os(&job->context, -errno, "the end of a rank cannot be supervised", NULL);
}
