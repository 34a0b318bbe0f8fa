/* processes.c: ranks as processes: copies of this program with the same arguments. Two variables of
 * the environment name the rendezvous and the rank. Where ranks compute on slices of GPUs (MIG),
 * CUDA_VISIBLE_DEVICES of each process names its own slice, since NVIDIA's driver shows a process
 * only the first one of a list. */
#include "bindings/program/processes.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bindings/adopt.h"
#include "bindings/program/signals.h"
#include "moonshard/exec.h"

#define MS_NUMBER_BYTES 32 /* of "MOONSHARD_RANK=4294967295" */

extern char **environ;

/* Waits for a process that has ended, which frees its number. Until then the dead process keeps its
 * number, so that kill_rank and /proc cannot meet a stranger. It does not wait long: the descriptor
 * was readable. */
static void reap(ms_job *job, uint32_t rank)
{
    ms_outcome *outcome = &job->outcomes[rank];
    int status = 0;
    while (waitpid((pid_t)outcome->process, &status, 0) < 0 && errno == EINTR) {}
    if (WIFSIGNALED(status)) outcome->signal = WTERMSIG(status);
    else outcome->code = WEXITSTATUS(status);
}

/* By descriptor, not by number: a number may belong to another process by now. The error
 * for a rank that has ended meanwhile is ignored. */
static void kill_rank(ms_job *job, uint32_t rank)
{
    pidfd_send_signal(job->ended[rank], SIGKILL, NULL, 0);
}

/* By descriptor, as in kill_rank. The signal goes to the process as a whole, and the system would
 * choose a thread; the handler is made for the host thread, and the other threads of a rank block
 * it. */
static void locate(ms_job *job, uint32_t rank)
{
    pidfd_send_signal(job->ended[rank], MS_LOCATE_PROCESS, NULL, 0);
}

/* Where a rank is to run near its GPU it takes its cores itself: the supervisor, which forks, must
 * not ask the driver. */
static bool leaves_cores(const ms_job *job)
{
    return job->near_gpu && ms_has_numa_nodes(job->context.os);
}

#define MS_VISIBLE_VARIABLE "CUDA_VISIBLE_DEVICES"

/* What is shown to ranks that compute on slices of GPUs (MIG), of which a process sees one: NULL
 * where they see what this process sees. */
static const char *slices_of(const ms_job *job)
{
    const ms_os *os = job->context.os;
    const char *visible = os->environment(os->user, MS_VISIBLE_VARIABLE);
    return job->near_gpu && ms_mig_slices(visible) > 1 ? visible : NULL;
}

/* Texts of the environment about slices, of which *visible is filled for each rank. */
static ms_status make_slices(ms_job *job, char **all, char **visible)
{
    const char *slices = slices_of(job);
    void *memory = NULL;
    *all = *visible = NULL;
    if (!slices) return MS_OK;
    size_t room = sizeof MS_VISIBLE_VARIABLE + sizeof MS_SLICES_VARIABLE + strlen(slices);
    ms_status status = ms_allocate(&job->context, 2 * room, "environment of the ranks", &memory);
    if (status) return status;
    *all = memory;
    *visible = *all + room;
    snprintf(*all, room, MS_SLICES_VARIABLE "=%s", slices);
    return MS_OK;
}

static void choose_slice(const ms_job *job, uint32_t rank, char *visible)
{
    static const char head[] = MS_VISIBLE_VARIABLE "=";
    const char *slices = slices_of(job);
    if (!visible) return;
    memcpy(visible, head, sizeof head);
    ms_mig_slice(slices, rank % ms_mig_slices(slices), visible + sizeof head - 1,
                 strlen(slices) + 1);
}

static bool is_variable(const char *text, const char *name)
{
    size_t bytes = strlen(name);
    return strncmp(text, name, bytes) == 0 && text[bytes] == '=';
}

/* The environment of one rank: this one's, and the variables. Filled before fork: between fork
 * and exec nothing may allocate. Older values of its variables are left out: a launcher that is
 * itself a rank of another job, or has them set by mistake, would pass on the wrong job. */
static ms_status make_environment(ms_job *job, const char *rendezvous, char *slices, char *visible,
                                  char *rank, char ***out)
{
    size_t count = 0, kept = 0;
    while (environ[count]) count++;
    void *memory = NULL;
    static char queues[] = MS_QUEUES_VARIABLE "=" MS_QUEUES_MOST,
                open[] = MS_CORES_VARIABLE "=open";
    ms_status status = ms_allocate(&job->context, (count + 7) * sizeof(char *),
                                   "environment of the ranks", &memory);
    if (status) return status;
    char **made = memory;
    for (size_t i = 0; i < count; i++)
        if (!is_variable(environ[i], MS_RENDEZVOUS_VARIABLE)
            && !is_variable(environ[i], MS_CORES_VARIABLE)
            && !is_variable(environ[i], MS_SLICES_VARIABLE)
            && !is_variable(environ[i], "MOONSHARD_RANK")
            && !(slices && is_variable(environ[i], MS_VISIBLE_VARIABLE)))
            made[kept++] = environ[i];
    made[kept++] = (char *)(uintptr_t)rendezvous;
    const ms_os *os = job->context.os;
    if (slices) {
        made[kept++] = slices;
        made[kept++] = visible;
    }
    if ((job->share_gpu || slices) && !os->environment(os->user, MS_QUEUES_VARIABLE))
        made[kept++] = queues;
    if (leaves_cores(job)) made[kept++] = open;
    /* The table is zeroed, so the entry after the last is the NULL that execve needs. */
    made[kept] = rank;
    *out = made;
    return MS_OK;
}

/* The process that becomes a rank. It dies with the supervisor; if the supervisor has died before
 * prctl, getppid tells. Requests to stop come through the job, also those that a terminal sends to
 * all, so the signals are ignored here. Only functions that are safe between fork and exec are
 * called. Ranks other than 0 read an empty stdin. 7 is the exit code where a rank could not be
 * started. cores has this rank's share, so that the threads of two ranks do not compete for one
 * core; it is empty where the system is to choose. */
static _Noreturn void become_rank(const ms_job *job, pid_t supervisor, uint32_t rank,
                                  const ms_cores *cores, char **environment, int nothing)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != supervisor) _exit(7);
    int ignored[] = { SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 };
    for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++) signal(ignored[i], SIG_IGN);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    const ms_os *os = job->context.os;
    if (ms_cores_count(cores)) (void)os->keep_to(os->user, cores);
    if (rank > 0 && nothing >= 0) dup2(nothing, STDIN_FILENO);
    execve(job->program, job->arguments, environment);
    _exit(7);
}

/* This rank's share of the cores that this process may use; empty if there are fewer cores than
 * ranks. Where a rank is to run near its GPU it takes its cores itself: the supervisor, which
 * forks, must not ask the driver. */
static ms_cores cores_of(const ms_job *job, uint32_t rank)
{
    ms_cores none = { { 0 } }, allowed;
    ms_machine machine;
    const ms_os *os = job->context.os;
    if (leaves_cores(job)) return none;
    if (os->cores(os->user, &allowed) || os->machine(os->user, &machine)) return none;
    /* Where a quota allows less than the cores, the system chooses which ones are used. */
    if (machine.cores < ms_cores_count(&allowed)) return none;
    return ms_cores_share(&allowed, rank, job->ranks);
}

/* A process that cannot be watched is killed at once. The descriptor of a process becomes readable
 * when it ends; it is what poll waits for. The supervisor's number is taken before the fork, since
 * the child compares it with its parent's. */
static ms_status start_one(ms_job *job, uint32_t rank, char **environment, int nothing)
{
    ms_cores cores = cores_of(job, rank);
    pid_t supervisor = getpid(), process = fork();
    if (process == 0) become_rank(job, supervisor, rank, &cores, environment, nothing);
    if (process < 0)
        return ms_fail_os(&job->context, -errno, "a process for a rank cannot be started", NULL);
    job->outcomes[rank].process = process;
    job->ended[rank] = pidfd_open(process, 0);
    ms_status status = job->ended[rank] >= 0
                           ? ms_job_watch_end(job, rank)
                           : ms_fail_os(&job->context, -errno,
                                        "a process cannot be supervised (pidfd_open)", NULL);
    if (!status) {
        job->running++;
        return MS_OK;
    }
    kill(process, SIGKILL);
    reap(job, rank);
    if (job->ended[rank] >= 0) close(job->ended[rank]);
    job->ended[rank] = -1;
    return status;
}

/* What the variables of the ranks' environment say: one text names the rendezvous, the other, of
 * which *number points to the end, is filled for each rank. The sizes are those that
 * ms_rendezvous_share asks for, and one number more. Both texts are in one allocation. */
static ms_status make_variables(ms_job *job, char **rendezvous, char **number)
{
    static const char head[] = MS_RENDEZVOUS_VARIABLE "=";
    size_t room = 32 + 12 * ((size_t)job->ranks + 1);
    void *memory = NULL;
    ms_status status = ms_allocate(&job->context, sizeof head + room + MS_NUMBER_BYTES,
                                   "environment of the ranks", &memory);
    if (status) return status;
    *rendezvous = memory;
    *number = *rendezvous + sizeof head + room;
    memcpy(*rendezvous, head, sizeof head);
    status =
        ms_rendezvous_share(job->rendezvous, &job->context, *rendezvous + sizeof head - 1, room);
    if (status) ms_release(&job->context, memory);
    return status;
}

/* Kills and reaps the ranks that were started before a failure. No rank of a job that lacks others
 * may run on: it would wait for them until its timeout. */
static void stop_all(ms_job *job)
{
    for (uint32_t r = 0; r < job->ranks; r++) {
        /* Not started, or reaped by start_one. */
        if (job->ended[r] < 0) continue;
        kill_rank(job, r);
        reap(job, r);
        close(job->ended[r]);
        job->ended[r] = -1;
    }
}

/* The text of the rank's number is written before each fork into the one environment that all forks
 * copy. The program is found by /proc, not by argv[0], which need not be a path; a rank that runs
 * another version of the program could not read the rendezvous. */
ms_status ms_start_processes(ms_job *job)
{
    char *rendezvous = NULL, *number = NULL, *slices = NULL, *visible = NULL, **environment = NULL;
    job->reap = reap;
    job->kill = kill_rank;
    job->locate = locate;
    ms_status status = make_variables(job, &rendezvous, &number);
    if (status) return status;
    status = make_slices(job, &slices, &visible);
    if (!status) status = make_environment(job, rendezvous, slices, visible, number, &environment);
    ssize_t bytes = readlink("/proc/self/exe", job->program, sizeof job->program - 1);
    job->program[bytes > 0 ? bytes : 0] = '\0';
    /* Where it cannot be opened, ranks other than 0 keep this process' stdin. */
    int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    for (uint32_t r = 0; r < job->ranks && !status; r++) {
        snprintf(number, MS_NUMBER_BYTES, "MOONSHARD_RANK=%u", r);
        choose_slice(job, r, visible);
        status = start_one(job, r, environment, nothing);
    }
    if (status) stop_all(job);
    if (nothing >= 0) close(nothing);
    ms_release(&job->context, environment);
    ms_release(&job->context, slices);
    ms_release(&job->context, rendezvous);
    return status;
}
