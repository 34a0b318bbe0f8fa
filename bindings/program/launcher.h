/* launcher.h: a job of several ranks on this machine, as seen by the process that starts and
 * supervises them.
 *
 * Invariants
 * - The supervisor never waits for a rank without a limit once the job is ending: ranks that do not
 *   leave by themselves are killed.
 * - It sleeps until a rank ends or a signal comes, and looks at the ranks' progress from time to
 *   time: often enough for the timeout, once a second at most.
 * - A rank does not give up waiting for another one by itself: it reports the other as a suspect.
 *   The supervisor judges whether the suspect still works.
 * - The abort record holds the first cause. The supervisor writes there like a rank when it finds
 *   that a rank was killed or has ended. */
#ifndef MOONSHARD_PROGRAM_LAUNCHER_H
#define MOONSHARD_PROGRAM_LAUNCHER_H

#include <lua.h>
#include <poll.h>

#include "moonshard/control.h"
#include "moonshard/hosts.h"

/* How a rank ended. */
typedef struct ms_outcome {
    bool ended, killed; /* killed: by the supervisor */
    bool elsewhere;     /* on another host, whose keeper supervises it */
    int code, signal;   /* signal 0: it ended by itself, with code */
    int64_t process;
    uint64_t ended_ns; /* monotonic */
    /* Process state (R, S, D, T as in ps) when the other ranks timed out waiting for it; 0
     * otherwise. */
    char state;
} ms_outcome;

/* What the supervisor has observed of a rank that runs. */
typedef struct ms_watched {
    uint64_t progress, changed_ns; /* when the rank's progress was seen to change last */
    uint64_t awaited_ns;           /* since when another has finished; 0: none has */
    uint64_t warned_ns, asked_ns;  /* of the last warning; when the rank was asked where it is */
    uint32_t question;             /* number of the question that it has to answer; 0: none */
} ms_watched;

/* The signals at which a rank says where its script is. A process-wide one would reach any
 * thread. */
#define MS_LOCATE_PROCESS SIGUSR2
#define MS_LOCATE_THREAD (SIGRTMIN + 3)

typedef struct ms_job ms_job;
struct ms_job {
    ms_context context;
    ms_rendezvous *rendezvous;
    ms_keeper *keeper; /* of a job over several hosts, of which this is one: NULL otherwise */
    uint32_t ranks, running;
    uint64_t timeout_ns; /* without progress, while others wait */
    uint64_t stuck_ns;   /* without progress, whoever waits; 0: no limit */
    uint64_t grace_ns;   /* from a request to stop until ranks are stopped without a checkpoint */
    bool share_gpu;      /* ranks may share GPUs */
    bool near_gpu;       /* they compute on GPUs, and run on the NUMA nodes of these */
    int count;           /* of the program's arguments */
    char **arguments;
    char program[4096]; /* its path */
    int signals;        /* descriptor that gives this process' signals */
    int ends;           /* descriptor of epoll that tells which ranks have ended, in their order */
    /* One for each rank, in one allocation that begins with outcomes. ended: descriptors, readable
     * when that rank has ended; -1: not running. */
    ms_outcome *outcomes;
    ms_watched *watched;
    int *ended;
    void *ranks_data;                           /* of processes or threads */
    void (*reap)(ms_job *job, uint32_t rank);   /* fills the outcome */
    void (*kill)(ms_job *job, uint32_t rank);   /* NULL: ranks cannot be killed one by one */
    void (*locate)(ms_job *job, uint32_t rank); /* asks a rank to tell where it is */
    void (*warn)(ms_job *job, const char *text);
    uint64_t watched_ns;  /* when ms_watch looked last */
    int stop_signal;      /* the first request to stop, or 0 */
    bool ending;          /* there is a cause, and ranks that stay are killed at the deadline */
    uint64_t deadline_ns; /* 0: none */
};

/* signals.c. A descriptor that gives the signals that are requests, or -errno. */
int ms_open_signals(void);

/* launcher.c: what a launcher and a keeper share. An empty job in a userdata, which it pushes. */
ms_job *ms_job_new(lua_State *L);
ms_status ms_job_make_room(ms_job *job, uint32_t ranks);
/* nil and the message of the job's error. */
int ms_job_refused(lua_State *L, const ms_job *job);
/* Number `name` of the options at 1; 0 if it is absent. */
double ms_job_option(lua_State *L, const char *name);
/* Calls on_start, which is at 2, with what tells of the job at 3; pushes its result. */
void ms_job_begin(lua_State *L);
ms_status ms_job_open_signals(ms_job *job);
/* The supervisor's loop: until no rank runs, or `done` (NULL: never) says that it is over. */
void ms_job_supervise(lua_State *L, ms_job *job, bool (*done)(ms_job *job));
void ms_job_push_outcome(lua_State *L, const ms_job *job);
void ms_job_warn(ms_job *job, const char *text);
/* After ended[rank] was set: ms_job_supervise looks after it. */
ms_status ms_job_watch_end(ms_job *job, uint32_t rank);
/* Judges the end of a rank, which may end the job. ended[rank] is -1 if nothing has watched it. */
void ms_job_rank_ended(ms_job *job, uint32_t rank);

/* The driver has 8 queues for all streams of a process unless this variable says otherwise, 32 at
 * most. A stream that waits for another one may hold up those of its queue meanwhile, which costs
 * time where ranks share a GPU, and most where they are threads of one process. */
#define MS_QUEUES_VARIABLE "CUDA_DEVICE_MAX_CONNECTIONS"
#define MS_QUEUES_MOST "32"

/* Start all ranks. On failure none is left. The calling thread must be the one that supervises. */
ms_status ms_start_processes(ms_job *job);
ms_status ms_start_threads(ms_job *job);

/* watch.c. Ends the job with this cause unless it has one, and sets the time until which ranks may
 * leave by themselves. */
void ms_end_job(ms_job *job, ms_abort_reason reason, int32_t rank, const char *message);
/* Looks at all ranks; how long it may be until the next look. */
void ms_watch(ms_job *job, uint64_t now);
uint64_t ms_watch_tick(const ms_job *job);

/* locate.c, for a rank. open: from now on its host thread answers a signal with the line at which
 * the script of L is; close ends that. coroutines wraps coroutine.resume and coroutine.wrap of L,
 * so that scripts in coroutines are found. */
void ms_locate_open(lua_State *L, ms_rendezvous *rendezvous, uint32_t rank, bool is_thread);
void ms_locate_close(void);
void ms_locate_coroutines(lua_State *L);

/* The text with which a line on stderr begins: on a terminal it clears the line that rank 0 may be
 * showing there. */
const char *ms_fresh_row(void);

/* The program in a Lua state of its own: as all of it (rendezvous NULL), or as one rank. Returns
 * the exit code. */
int ms_program(int count, char **arguments, ms_rendezvous *rendezvous, uint32_t rank,
               bool is_thread);

/* process.launch(options): see launcher.c; of a keeper: see keep.c. Upvalue of the second: the
 * keeper, as a light userdata. */
int ms_launch(lua_State *L);
int ms_keep(lua_State *L);
/* process.start(options): see start.c. */
int ms_start(lua_State *L);

#endif
