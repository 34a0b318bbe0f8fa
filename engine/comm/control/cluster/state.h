/* state.h: the agent: the process of each node that connects its ranks with those of other nodes,
 * and that is their supervisor (bindings/program/keep.c). It makes the node's memory files, which
 * have the lines of the ranks of all nodes. It hands them to the node's ranks at its local socket,
 * a unix socket. It holds a connection to the agent of the first node, which passes on what one
 * node has to tell the others. For comm/job/ and comm/control/cluster/ only.
 *
 * Agents speak over TCP and not over MPI, so that they can report the end of a job in which MPI
 * hangs.
 *
 * Invariants
 * - Each word of a rank's line is written by that rank or its node's agent; other nodes have
 *   copies. Copies of what one rank writes change in the order in which it wrote. What a rank tells
 *   of its calls is passed on before it is shown that it has finished; all that it has told, before
 *   it is shown that its process has ended.
 * - The first agent decides: which cause ends the job, between which steps a request is met, which
 *   numbers new groups get. The others ask it.
 * - No thread of an agent waits for a rank, and for another node at most `lost_ns`. A node of which
 *   nothing is heard for that time is lost, and with it the job.
 * - After the job's end the agent still tells what its ranks have left: a report needs it. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_STATE_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_STATE_H

#include "base/assert.h"
#include "comm/control/cluster/frame.h"
#include "comm/control/cluster/acceptor.h"
#include "comm/control/cluster/starter_wire.h"
#include "moonshard/cluster.h"

/* A thread that waits for the network looks this often whether the agent is closing. */
#define MS_AGENT_TURN_NS ((uint64_t)100000000)

/* The connection to another node's agent. The first agent has one for each node, the others one,
 * to the first. */
typedef struct ms_peer {
    ms_agent *agent;
    uint32_t node;
    ms_file *socket;
    ms_lock sending;
    ms_word gone;  /* it has said goodbye, or is lost */
    ms_word shown; /* after the job's end: what its ranks have left has come */
    ms_os_thread *thread;
} ms_peer;

/* What a rank of this node may have told that is not passed on yet. */
typedef enum ms_unheard {
    MS_ALL_HEARD,   /* nothing, or the rank has not come */
    MS_CALLS_HEARD, /* nothing about calls that its host issues: it has finished */
    MS_CALLS_UNHEARD
} ms_unheard;

/* The connection to a rank of this node, which lasts as long as the rank. */
typedef struct ms_rank_connection {
    ms_agent *agent;
    ms_file *socket; /* NULL: it has not come */
    int64_t process;
    ms_word unheard; /* ms_unheard */
    ms_os_thread *thread;
} ms_rank_connection;

/* The first agent's: a request that the nodes are deciding about. */
typedef struct ms_pending {
    bool active, prepared[MS_LOCAL_RANKS_MAX];
    uint32_t value, count, missing; /* nodes that have not answered */
    uint64_t highest;
} ms_pending;

/* Deadlock detection over nodes: deadlock.c. */
typedef struct ms_deadlock_rounds {
    /* The first agent's */
    uint64_t round;
    uint32_t stage, missing; /* 0: no round is under way */
    bool answered[MS_LOCAL_RANKS_MAX], moving;
    uint64_t not_before_ns;
    ms_rank_in_call *calls;
    uint32_t calls_used, calls_capacity;
    ms_call_count *counts;
    uint32_t counts_used, counts_capacity;
    /* Each agent's: what it was asked, and `still` of its ranks when it was */
    bool asked;
    ms_look_body question;
    uint64_t seen[MS_LOCAL_RANKS_MAX];
} ms_deadlock_rounds;

/* What other nodes have been told of a rank's line. */
typedef struct ms_shown {
    uint64_t words[(sizeof(ms_rank_line) + 7) / 8];
} ms_shown;

struct ms_agent {
    ms_replication replication; /* of this process: what it writes itself */
    ms_context *context;
    ms_shm_files *files;
    ms_control_file *control;
    const ms_os *os;
    uint32_t node, nodes, ranks;
    uint64_t lost_ns, init_ns, beat_ns, told_ns; /* told_ns: when it last gave a sign of life */
    uint8_t token[MS_TOKEN_BYTES];
    uint16_t port;
    ms_acceptor *acceptor; /* the first agent's, until all nodes have come */
    ms_file *requester; /* to the rank that has asked for this process: it sees the socket close */
    ms_file *local_socket;
    char socket_path[108];
    ms_word stirred, closing;
    ms_word orphaned; /* the first agent is lost: this one reports by itself */
    ms_word flights;  /* the supervisor is to write the flight records of this node's ranks */
    /* The first agent's: the connection to the process that has started the job. */
    ms_wire starter;
    ms_os_thread *starter_thread;
    ms_word starter_heard; /* it knows the exit code */
    ms_word starter_gone;  /* it is lost */
    ms_os_thread *looker;
    ms_lock deciding; /* what follows, up to showing; taken after `showing` */
    bool proposed, decided;
    ms_pending pending[MS_REQUESTS];
    ms_deadlock_rounds still;
    ms_lock showing; /* what other nodes see of the lines of ranks; held while they are told */
    ms_shown *shown; /* one for each rank */
    ms_peer peers[MS_LOCAL_RANKS_MAX];
    ms_rank_connection connections[MS_LOCAL_RANKS_MAX];
};

static inline uint64_t ms_agent_now(const ms_agent *agent)
{
    return agent->os->monotonic_ns(agent->os->user);
}

#endif
