/* moonshard/cluster.h: a job over several nodes: its agents, and how a rank joins it.
 *
 * Invariants
 * - Each node has one agent, a process of its own, which lives longer than the node's ranks. It is
 *   also their supervisor (moonshard/control.h).
 * - Ranks of one node meet at their agent's local socket and work on the node's memory files, as in
 * a job of one node. Agents speak over TCP, the first one with each of the others. A random token
 * keeps strangers out: both sides of a connection prove that they have it, and it is not sent over
 * one. What they say is not encrypted.
 * - Between nodes tensors travel through MPI, never through agents.
 * - A process that has started the launcher (`moonshard run --hosts`) speaks to the first agent
 *   alone. It needs no MPI and may be on a node without ranks. */
#ifndef MOONSHARD_CLUSTER_H
#define MOONSHARD_CLUSTER_H

#include "moonshard/control.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MS_CLUSTER_TOKEN_BYTES 32
#define MS_CLUSTER_NAME_BYTES 64
#define MS_CLUSTER_ADDRESSES_MAX 16
#define MS_CLUSTER_ADDRESS_BYTES 64

typedef struct ms_agent ms_agent;

/* Where a process listens for those of other nodes, and how they find it. */
typedef struct ms_endpoint {
    uint16_t port;                         /* before it listens, 0: the system chooses */
    char interface[MS_CLUSTER_NAME_BYTES]; /* "": any; then that of the first address */
    uint32_t address_count;
    char addresses[MS_CLUSTER_ADDRESSES_MAX][MS_CLUSTER_ADDRESS_BYTES];
} ms_endpoint;

/* What an agent needs to know of its job. */
typedef struct ms_agent_options {
    ms_rendezvous_options rendezvous; /* ranks: of the whole job */
    uint32_t nodes, node;             /* 0: the first agent */
    uint16_t node_of[MS_LOCAL_RANKS_MAX];
    char names[MS_LOCAL_RANKS_MAX][MS_CLUSTER_NAME_BYTES]; /* of nodes */
    uint8_t token[MS_CLUSTER_TOKEN_BYTES];
    ms_endpoint endpoint; /* of the first agent */
    uint64_t init_ns;     /* to wait for other nodes, and for this node's ranks */
    uint64_t lost_ns;     /* without a sign of life a node is lost */
    bool alone;           /* this process is the agent and nothing else: ranks notice its death */
} ms_agent_options;

/* Makes the node's memory files, and the local socket, at which ranks wait until all nodes are
 * there. The first agent listens; options->endpoint receives its port and addresses.
 * MS_ERROR_ARGUMENT names an interface or a port that cannot be used. The context is used by all
 * later calls with this agent. */
MS_API ms_status ms_agent_open(ms_context *context, ms_agent_options *options, ms_agent **out);
/* The path of the local socket; borrowed. */
MS_API const char *ms_agent_socket_path(const ms_agent *agent);
/* Waits for the agents of all nodes, then for all ranks of this one. Then its threads run. Of
 * options, `endpoint` is read. MS_ERROR_TIMEOUT names the
 * nodes or ranks that have not come. */
MS_API ms_status ms_agent_gather(ms_agent *agent, const ms_agent_options *options);
/* The supervisor's side of the job; borrowed. */
MS_API ms_rendezvous *ms_agent_rendezvous(const ms_agent *agent);
/* The process of a rank of this node; -1: it is on another. */
MS_API int64_t ms_agent_process(const ms_agent *agent, uint32_t rank);
/* Which node a rank is on, and its name (borrowed); how many nodes there are, and the agent's. */
MS_API uint32_t ms_agent_node_of(const ms_agent *agent, uint32_t rank);
MS_API const char *ms_agent_node_name(const ms_agent *agent, uint32_t node);
MS_API uint32_t ms_agent_nodes(const ms_agent *agent);
MS_API uint32_t ms_agent_node(const ms_agent *agent);
/* Whether this agent reports the end of the job: the first one does, and one that has lost it. */
MS_API bool ms_agent_reports(const ms_agent *agent);
/* After the end of the job: tells the other nodes what a report needs. The first agent waits a
 * moment for what they tell. */
MS_API void ms_agent_show_end(ms_agent *agent);
/* An agent that reports has done so, or had nothing to report: ranks that wait for it may end.
 * await: a rank or another agent waits for that, at most so long. An agent that dies ends the
 * wait, so only one that hangs makes ranks wait for MS_REPORT_NS, which a busy machine must not
 * reach: launchers kill the agent, and with it the report, when the first rank has ended. */
#define MS_REPORT_NS ((uint64_t)60 * 1000000000)
MS_API void ms_agent_reported(ms_agent *agent);
MS_API void ms_cluster_await_report(ms_rendezvous *rendezvous, uint64_t timeout_ns);
/* This node's ranks have ended. Waits a moment for the other nodes, so that the report is complete;
 * the first agent waits until all have said goodbye or are lost. */
MS_API void ms_agent_finish(ms_agent *agent);
/* With which code the process of a rank was about to end (ms_cluster_set_code), after finish; -1:
 * it has not said so. */
MS_API int ms_agent_code(const ms_agent *agent, uint32_t rank);
/* The value of the last request to stop, which is the number of a signal; 0: there was none. */
MS_API uint8_t ms_agent_stop(const ms_agent *agent);
/* Whether the process that has started the job has asked for the flight records since the last
 * call: each agent's supervisor writes those of its own ranks. */
MS_API bool ms_agent_flights_wanted(ms_agent *agent);
/* Tells the process that has started the job, if there is one, how it has ended. */
MS_API void ms_agent_tell_code(ms_agent *agent, int code);
/* Before that: the report on the job, which that process shows, since a launcher that cleans up may
 * lose what this one writes. false: there is no such process, or it has not got all of it. */
MS_API bool ms_agent_tell_report(ms_agent *agent, const char *text, size_t bytes);
/* After finish, or after a failure. */
MS_API void ms_agent_close(ms_agent *agent);
/* Of a rank: waits until the ranks of all nodes have finished their work, or the job has ended. */
MS_API void ms_cluster_await_others(ms_rendezvous *rendezvous);
/* A rank is about to end its process with this code, 0 to 255. */
MS_API void ms_cluster_set_code(ms_rendezvous *rendezvous, uint32_t rank, int code);
/* The code with which this rank's process is to end, where `code` is its own: if another rank has
 * ended the job with an error, that rank's, once it has said so, at most so long after. */
MS_API int ms_cluster_code(ms_rendezvous *rendezvous, uint32_t rank, int code, uint64_t timeout_ns);

/* For a process that has been forked to become an agent if it is needed: waits at its end of a pair
 * of sockets (descriptor) for the rank that forked it to say so, opens the agent, answers, and
 * gathers. *out is NULL if it is not needed, or the rank has ended. An error has been told to the
 * rank. */
MS_API ms_status ms_agent_serve(ms_context *context, int descriptor, ms_agent **out);

/* A rank of this node goes to the local socket of its agent, and waits there until all nodes are
 * there. */
MS_API ms_status ms_cluster_enter(ms_context *context, const char *local_socket, uint32_t rank,
                                  uint32_t ranks, uint64_t timeout_ns, ms_rendezvous **out);

/* ------------------------------------------------- a process of an MPI launcher */

/* Which launcher started this process as one of several: mpirun, srun, torchrun. name: "" if none
 * did, or it started one process only and MS_STARTER_VARIABLE is not set. size 0: only MPI knows.
 */
typedef struct ms_launched {
    char name[64];
    uint32_t rank, size, local_rank; /* local_rank: among the processes of this node, or size */
    bool has_mpi; /* its ranks meet through MPI; not those of torchrun, or with MOONSHARD_MASTER */
} ms_launched;
/* MS_ERROR_ARGUMENT names a variable of the launcher that is wrong. */
MS_API ms_status ms_cluster_launched(ms_context *context, ms_launched *out);

typedef struct ms_cluster_options {
    ms_rendezvous_options rendezvous; /* ranks is not read: MPI says how many there are */
    const char *modules;              /* the folder in which modules for MPIs are */
    const char *mpi;                  /* the module's name; NULL: that of the launcher's MPI */
    const char *agree;   /* lines "name=value" that must be the same on all ranks, at most 4 KiB */
    const char *refused; /* why this process cannot be a rank: an error of the job; NULL: it can */
    const char *interface; /* of the agents' connections; NULL: any */
    uint16_t port; /* of the first agent; 0: the system chooses. Under torchrun also of rank 0 */
    uint64_t init_ns, lost_ns;
    /* Shows an error before other ranks hear of it and end; NULL: the caller of ms_cluster_join
     * does after it. */
    void (*report)(void *user, const char *message);
    void *user;
    int agent; /* end of the pair of sockets whose other end ms_agent_serve has */
} ms_cluster_options;

typedef struct ms_cluster_place {
    uint32_t rank, ranks, nodes;
    bool is_told; /* of an error: it was reported, or rank 0 or the node's first rank reports it */
    char mpi[32], library[256]; /* the module's name or "", and what connects the nodes */
    char node[MS_CLUSTER_NAME_BYTES];
    ms_agent_options plan; /* of the job's agents: which rank is on which node, where they meet */
    ms_rendezvous *rendezvous; /* owned */
} ms_cluster_place;

/* All processes of the launcher call it: they begin MPI, find out who is on which node, make one of
 * the forked processes of each node its agent, and enter by its local socket. Without MPI they meet
 * at rank 0's node by TCP: MOONSHARD_MASTER=HOST:PORT says where (under torchrun MASTER_ADDR and
 * `port` do), and MOONSHARD_TOKEN is their secret, which is not sent. Blocks. After an error the
 * process can only end, with _exit: MPI may still use its memory. */
MS_API ms_status ms_cluster_join(ms_context *context, const ms_cluster_options *options,
                                 ms_cluster_place *out);

/* ----------------------------------------- the process that starts a launcher (--hosts) */

/* A node of a list, and how many ranks it gets. */
#define MS_LISTED_NAME_MAX 255
typedef struct ms_listed_node {
    char name[MS_LISTED_NAME_MAX + 1]; /* a name or an address; of IPv6 without brackets */
    uint32_t ranks;
} ms_listed_node;
typedef struct ms_node_list {
    uint32_t count, ranks; /* nodes, and the ranks of all */
    ms_listed_node *nodes; /* in the order in which ranks count */
    size_t capacity;
} ms_node_list;
/* What `--hosts` is given: the name of a file if there is one of that name, else a list. Free with
 * ms_node_list_free. */
MS_API ms_status ms_node_list_read(ms_context *context, const char *argument, ms_node_list *out);
/* Also of one that is all zero. */
MS_API void ms_node_list_free(ms_context *context, ms_node_list *list);

/* The first agent connects to the process that has started the job: requests go one way, the
 * job's exit code the other. Each side notices when the other ends or is silent. The agent finds
 * the process by a variable of its environment, which has a random token. */
#define MS_STARTER_VARIABLE "MOONSHARD_STARTER"
#define MS_STARTER_BYTES 2048 /* of its value, at most */
typedef struct ms_starter ms_starter;

typedef enum ms_starter_phase {
    MS_STARTER_WAITS,     /* for the first agent */
    MS_STARTER_CONNECTED, /* to it */
    MS_STARTER_TOLD,      /* it has told the exit code */
    MS_STARTER_LOST       /* it is gone without that */
} ms_starter_phase;
typedef struct ms_starter_state {
    ms_starter_phase phase;
    int code;
    char why[256]; /* it is lost */
} ms_starter_state;

/* Listens from now on. interface: NULL: any. value: for the variable, MS_STARTER_BYTES. The context
 * is used by all later calls, and by a thread. */
MS_API ms_status ms_starter_open(ms_context *context, const char *interface, uint64_t lost_ns,
                                 char *value, ms_starter **out);
MS_API void ms_starter_look(const ms_starter *starter, ms_starter_state *out);
/* The agent's report on the job, once the code was told or the agent is lost; "": it has sent
 * none. Lives as long as the starter. */
MS_API const char *ms_starter_report(const ms_starter *starter);
/* As ms_rendezvous_request and ms_rendezvous_abort, of the agent's job. Without a connection they
 * do nothing. */
MS_API void ms_starter_request(ms_starter *starter, ms_request kind, uint8_t value);
MS_API void ms_starter_abort(ms_starter *starter, const char *message);
/* The supervisors of all nodes write the flight records of their ranks. */
MS_API void ms_starter_ask_flights(ms_starter *starter);
MS_API void ms_starter_close(ms_starter *starter); /* NULL is allowed */

#ifdef __cplusplus
}
#endif
#endif
