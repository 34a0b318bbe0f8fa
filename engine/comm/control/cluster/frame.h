/* frame.h: what agents of different nodes say to each other: a head and a body, over one TCP
 * connection.
 *
 * Invariants
 * - A frame is at most MS_FRAME_BODY_MOST bytes and its head. The head is checked before a byte of
 *   the body is read, and the body before it is used: a peer of another version, or another program
 *   that has found the port, is refused and can do nothing.
 * - Texts in bodies end within their fields after ms_frame_check_body.
 * - Numbers are in the byte order of the nodes; the magic differs where theirs do. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_FRAME_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_FRAME_H

#include "comm/control/shm/state.h"

#define MS_FRAME_MAGIC 0x3246534du /* "MSF2" */
#define MS_FRAME_BODY_MOST ((size_t)64 << 10)

typedef enum ms_frame_kind {
    MS_FRAME_HELLO = 1, /* an agent to the first one: ms_hello_body */
    MS_FRAME_WELCOME,   /* the answer */
    MS_FRAME_REFUSED,   /* or this: why, as text */
    MS_FRAME_READY,     /* the first agent: all nodes are there */
    MS_FRAME_BEAT,      /* this node lives */
    MS_FRAME_WRITE,     /* a part of the control file has changed: ms_write_body and the bytes */
    MS_FRAME_CAUSE,     /* a node's cause of the job's end: ms_abort_record */
    MS_FRAME_JOB_END,   /* the job's, from the first agent */
    MS_FRAME_REQUEST,   /* a node was asked for something: ms_request_body */
    MS_FRAME_PREPARE,   /* close the gate, and say how far your ranks are */
    MS_FRAME_PREPARED,
    MS_FRAME_DECIDED,
    MS_FRAME_IDS,      /* a rank needs numbers of groups, and gives some back: ms_ids_body */
    MS_FRAME_GIVEN,    /* those that it gets */
    MS_FRAME_HANG,     /* a rank waits too long for another: ms_hang_body */
    MS_FRAME_LOOK,     /* do all of your ranks wait?: ms_look_body */
    MS_FRAME_SEEN,     /* the answer: ms_seen_body, and the calls they are in */
    MS_FRAME_BYE,      /* the ranks of this node have gone */
    MS_FRAME_CALL,     /* the first agent to the process that started the job: ms_call_body */
    MS_FRAME_CODE,     /* the same, at the end: ms_code_body */
    MS_FRAME_COMING,   /* before there are agents: a rank to rank 0, ms_coming_body */
    MS_FRAME_EXCHANGE, /* and what they say then: any bytes */
    MS_FRAME_SHOWN,    /* the job has ended, and all that the node's ranks have left was told */
    MS_FRAME_FLIGHTS,  /* write the flight records of your ranks */
    MS_FRAME_REPORT,   /* the first agent to the process that started the job, before the code: the
                        * next bytes of the report's text */
    MS_FRAME_KINDS
} ms_frame_kind;

typedef struct ms_frame_head {
    uint32_t magic;
    uint16_t kind;
    uint16_t node;  /* whose frame it is; the first agent passes on those of others */
    uint32_t bytes; /* of the body */
} ms_frame_head;

/* A hello, a call and a coming are sent where both sides have proven that they have the job's
 * token: authentication.h. */
typedef struct ms_hello_body {
    char version[16];
    uint32_t node, nodes, ranks, zero;
    uint64_t control_bytes;
} ms_hello_body;

typedef struct ms_call_body {
    char version[16];
    char node[MS_NODE_NAME_BYTES];
} ms_call_body;

/* How the job has ended, as an exit code. */
typedef struct ms_code_body {
    uint32_t code;
} ms_code_body;

/* Versions are compared when all have come: see ms_introduction. */
typedef struct ms_coming_body {
    uint32_t rank, ranks;
} ms_coming_body;

typedef struct ms_write_body {
    uint64_t offset; /* in the control file */
} ms_write_body;

typedef struct ms_request_body {
    uint32_t kind, value, count, zero;
    uint64_t serial;
} ms_request_body;

typedef struct ms_ids_body {
    uint32_t rank, parts; /* how many it needs */
    ms_ids ids;
} ms_ids_body;

typedef struct ms_hang_body {
    uint32_t rank, zero;
    uint64_t progress;
    char text[MS_HANG_REPORT_BYTES];
} ms_hang_body;

/* stage 1: whether all ranks of the node wait; 2: whether they still do after some rounds of
 * looking. */
typedef struct ms_look_body {
    uint64_t round;
    uint32_t stage, zero;
} ms_look_body;

/* Of stage 2 with all waiting: followed by `calls` times ms_rank_in_call and `counts` times
 * ms_call_count. */
typedef struct ms_seen_body {
    uint64_t round;
    uint32_t stage, waits, calls, counts;
} ms_seen_body;

/* A call in which a rank is. */
typedef struct ms_rank_in_call {
    uint32_t rank, zero;
    ms_flight call;
} ms_rank_in_call;

/* How many calls a member has entered: of a channel, or (pair) of sends from rank `channel` to rank
 * `member`, or of receives. */
typedef enum ms_call_count_kind {
    MS_CALL_COUNT_MEMBER,
    MS_CALL_COUNT_SENT,
    MS_CALL_COUNT_RECEIVED
} ms_call_count_kind;
typedef struct ms_call_count {
    uint32_t kind, group, channel, member;
    uint64_t entered;
} ms_call_count;

/* Whether a head may be followed by its body: magic, kind and length are right. */
bool ms_frame_check_head(const ms_frame_head *head);
/* Whether a body of a checked head is one of its kind. Ends its texts. */
bool ms_frame_check_body(const ms_frame_head *head, void *body);

#endif
