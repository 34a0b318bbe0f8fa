/* requests.c: signals of this process as requests to stop and to save. */
#include "bindings/program/requests.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Requests to stop. Handlers only count; the loop of training looks at the end of a step. A second
 * request ends the process at once, unless it is a rank: the supervisor, which gets the same
 * signals from a terminal, decides then. They belong to the process: in a thread that is a rank
 * they are not read, because the supervisor of the same process handles the signals. */
static volatile sig_atomic_t stop_signal, save_signal, is_rank;

/* The job of a process that joined it under an MPI launcher: requests of every such process are
 * requests to all. NULL: it is no such process. */
static ms_rendezvous *volatile joined_job;

/* Of a process without a supervisor: the timer that a request starts, how long it runs (--grace),
 * and what is shown when it ends the process. A script may never come to the end of a step. */
#define MS_GRACE_SECONDS 60
static timer_t grace_timer;
static struct itimerspec grace;
static char grace_text[128];
static volatile sig_atomic_t has_timer;

/* A handler: the script has had its time. */
static void end_at_once(int number)
{
    (void)number;
    if (write(STDERR_FILENO, grace_text, strlen(grace_text)) < 0) _exit(128 + stop_signal);
    _exit(128 + stop_signal);
}

/* A handler: it only sets a number, and starts the timer. _exit is safe there. The first signal
 * stays: the exit code 128 + signal says what has stopped the run. */
static void request_stop(int number)
{
    if (stop_signal && !is_rank) _exit(128 + number);
    if (stop_signal) return;
    stop_signal = number;
    if (has_timer) timer_settime(grace_timer, 0, &grace, NULL);
}

/* Without a timer, which the system refuses when it lacks memory, a second signal ends the
 * process. */
static void make_timer(double seconds)
{
    struct sigaction action = { .sa_handler = end_at_once };
    struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM };
    sigemptyset(&action.sa_mask);
    if (has_timer || timer_create(CLOCK_MONOTONIC, &event, &grace_timer)) return;
    if (seconds > 1e9) seconds = 1e9;
    grace.it_value.tv_sec = (time_t)seconds;
    grace.it_value.tv_nsec = (long)((seconds - (double)grace.it_value.tv_sec) * 1e9);
    /* All zeros would stop the timer. */
    if (grace.it_value.tv_sec == 0 && grace.it_value.tv_nsec == 0) grace.it_value.tv_nsec = 1;
    snprintf(grace_text, sizeof grace_text,
             "moonshard: the run did not stop within %.6g s after a request to stop (--grace)\n",
             seconds);
    sigaction(SIGALRM, &action, NULL);
    has_timer = 1;
}

/* The same in a process that has joined a job over several nodes: the agents agree on the step. A
 * second signal of the same process ends the job at once; launchers send one when they clean up
 * after a job that has ended, and then nothing changes. */
static void request_for_all(int number)
{
    ms_abort_record cause;
    ms_rendezvous *job = joined_job;
    if (number == SIGUSR1) ms_rendezvous_request(job, MS_REQUEST_SAVE, SIGUSR1);
    else if (stop_signal) {
        if (!ms_rendezvous_cause(job, &cause))
            ms_rendezvous_abort(job, MS_ABORT_STOPPED, -1, "stopped at once by a second request");
    } else {
        stop_signal = number;
        ms_rendezvous_request(job, MS_REQUEST_STOP, (uint8_t)number);
    }
}

/* A handler for SIGUSR1: the training loop asks save_requested at the end of each step. */
static void request_save(int number) { save_signal = number; }

/* save_requested() -> whether SIGUSR1 came since the last call. Asking clears it, so that one
 * signal gives one checkpoint. Upvalue 1: whether this state is a rank's thread. */
static int save_requested(lua_State *L)
{
    bool thread = lua_toboolean(L, lua_upvalueindex(1));
    lua_pushboolean(L, !thread && save_signal != 0);
    if (!thread) save_signal = 0;
    return 1;
}

/* stop_requested() -> number of the signal, or nil. It is not cleared: every loop of the script,
 * also a nested one, sees the request. */
static int stop_requested(lua_State *L)
{
    if (!stop_signal || lua_toboolean(L, lua_upvalueindex(1))) {
        lua_pushnil(L);
        return 1;
    }
    lua_pushinteger(L, stop_signal);
    return 1;
}

/* SA_RESTART: calls that a signal interrupts go on, since the loop looks at the request by itself.
 * A rank leaves SIGUSR1 and SIGUSR2 alone: the supervisor reads the first, and the second asks the
 * rank where its script is. SIGPIPE is ignored everywhere, so that output into a closed pipe is an
 * error of the write and not the end of a run. */
static void catch_signals(void)
{
    struct sigaction action = { .sa_handler = joined_job ? request_for_all : request_stop,
                                .sa_flags = SA_RESTART };
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGHUP, &action, NULL);
    if (joined_job) sigaction(SIGUSR1, &action, NULL);
    if (!is_rank) {
        action.sa_handler = request_save;
        sigaction(SIGUSR1, &action, NULL);
        signal(SIGUSR2, SIG_IGN); /* flight records: there are none without other ranks */
    }
    signal(SIGPIPE, SIG_IGN);
}

/* watch_signals(grace): from now on SIGINT, SIGTERM, SIGHUP and SIGUSR1 are requests; before, and
 * in commands that never look, they end the process. `moonshard run` calls it. In a thread that is
 * a rank it does nothing, as the supervisor has the signals. grace: so many seconds after a request
 * to stop the process is ended, where no supervisor does so. */
static int watch_signals(lua_State *L)
{
    if (lua_toboolean(L, lua_upvalueindex(1))) return 0;
    if (!is_rank && !joined_job) make_timer(luaL_optnumber(L, 1, MS_GRACE_SECONDS));
    catch_signals();
    return 0;
}

const luaL_Reg ms_request_functions[] = { { "stop_requested", stop_requested },
                                          { "save_requested", save_requested },
                                          { "watch_signals", watch_signals },
                                          { NULL, NULL } };

void ms_requests_of_rank(void) { is_rank = 1; }

void ms_requests_join(ms_rendezvous *job)
{
    joined_job = job;
    is_rank = 1;
    catch_signals();
}

void ms_requests_leave(void) { joined_job = NULL; }
