/* acceptor.h: a port at which processes of a job on other nodes connect: rank 0's, the first
 * agent's, or that of the process that has started the job. A process that has connected is called
 * a caller. For comm/job/ and comm/control/cluster/ only.
 *
 * Invariants
 * - All callers are heard at once: none waits for another, even if another sends nothing.
 * - Before a caller has proven that it has the job's token (authentication.h), only its greeting
 *   and its answer are taken, which are MS_ACCEPTOR_STRANGER_BYTES. After that its introduction is
 *   taken: one frame of the kind that this port awaits, whose length is known.
 * - A caller has MS_ACCEPTOR_NS for all of that. There are at most `awaited` + MS_ACCEPTOR_MORE
 *   callers at once. For a further one, the oldest of those that have said least is disconnected.
 * - The connections of others are closed, which is logged, and nothing else happens. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_ACCEPTOR_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_ACCEPTOR_H

#include "comm/control/cluster/frame.h"
#include "comm/control/cluster/authentication.h"

#define MS_ACCEPTOR_NS ((uint64_t)10 * 1000000000)
#define MS_ACCEPTOR_MORE 64
#define MS_ACCEPTOR_STRANGER_BYTES (sizeof(ms_greeting) + MS_ANSWER_BYTES)

typedef struct ms_acceptor ms_acceptor;

typedef struct ms_acceptor_options {
    ms_file *listener; /* owned by the acceptor */
    ms_port_kind kind; /* of the port */
    uint8_t token[MS_TOKEN_BYTES];
    ms_frame_kind awaits; /* HELLO, CALL or COMING */
    uint32_t awaited;     /* how many processes are to come, at most MS_LOCAL_RANKS_MAX */
    char place[128];      /* "port 29501 of host node1", for the log */
} ms_acceptor_options;

/* A caller that has the token, and its introduction, checked as frames are. */
typedef struct ms_accepted {
    ms_file *socket;
    uint32_t number; /* of its greeting */
    union {
        ms_hello_body hello;
        ms_call_body call;
        ms_coming_body coming;
    } body;
} ms_accepted;

/* On failure, too, the listener is the acceptor's: it is closed. */
ms_status ms_acceptor_open(ms_context *context, const ms_acceptor_options *options,
                           ms_acceptor **out);
/* The next caller that has proven itself; its socket is out->socket and no longer the acceptor's. 0
 * or -errno; -ETIMEDOUT: none has come. */
int ms_acceptor_next(ms_acceptor *acceptor, uint64_t timeout_ns, ms_accepted *out);
/* Welcomes it, or refuses it: tells it and logs why. false: its socket is closed. */
bool ms_acceptor_answer(ms_acceptor *acceptor, ms_accepted *accepted, const char *refusal);
/* Closes the port, and the connections of callers that ms_acceptor_next has not given; NULL is
 * allowed. */
void ms_acceptor_close(ms_acceptor *acceptor);

#endif
