/* state.h: a job of several ranks on this machine, as seen by the process that starts and
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
#ifndef MOONSHARD_BINDINGS_PROGRAM_STATE_H
#define MOONSHARD_BINDINGS_PROGRAM_STATE_H

#include <lua.h>
#include <poll.h>

#include "moonshard/control.h"
#include "moonshard/cluster.h"

/* How a rank ended. */
typedef struct ms_outcome {
    bool ended, killed; /* killed: by the supervisor */
    bool elsewhere;     /* on another node, whose agent supervises it */
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
    ms_agent *agent; /* of a job over several nodes, of which this is one: NULL otherwise */
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

/* The driver has 8 queues for all streams of a process unless this variable says otherwise, 32 at
 * most. A stream that waits for another one may hold up those of its queue meanwhile, which costs
 * time where ranks share a GPU, and most where they are threads of one process. */
#define MS_QUEUES_VARIABLE "CUDA_DEVICE_MAX_CONNECTIONS"
#define MS_QUEUES_MOST "32"

#endif
