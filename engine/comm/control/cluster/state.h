/* state.h: the process of each host that connects its ranks with those of other hosts. It makes
 * the host's memory files, hands them to the ranks at a socket (the door), and holds a connection
 * to the keeper of the first host, which passes on what one host has to tell the others. For
 * comm/job/ and comm/control/cluster/ only.
 *
 * Invariants
 * - Each word of a rank's line is written by that rank or its host's keeper; other hosts have
 *   copies. Copies of what one rank writes change in the order in which it wrote.
 * - The first keeper decides: which cause ends the job, between which steps a request is met, which
 *   numbers new groups get. The others ask it.
 * - No thread of a keeper waits for a rank, and for another host at most `lost_ns`. A host of which
 *   nothing is heard for that time is lost, and with it the job.
 * - After the job's end the keeper still tells what its ranks have left: a report needs it. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_STATE_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_STATE_H

#include "base/assert.h"
#include "comm/control/cluster/frame.h"
#include "comm/control/cluster/acceptor.h"
#include "comm/control/cluster/starter_wire.h"
#include "moonshard/hosts.h"

/* A thread that waits for the network looks this often whether the keeper is closing. */
#define MS_KEEPER_TURN_NS ((uint64_t)100000000)

/* The connection to another host's keeper. The first keeper has one for each host, the others one,
 * to the first. */
typedef struct ms_peer {
    ms_keeper *keeper;
    uint32_t host;
    ms_file *socket;
    ms_lock sending;
    ms_word gone;  /* it has said goodbye, or is lost */
    ms_word shown; /* after the job's end: what its ranks have left has come */
    ms_os_thread *thread;
} ms_peer;

/* The connection to a rank of this host, which lasts as long as the rank. */
typedef struct ms_visitor {
    ms_keeper *keeper;
    ms_file *socket; /* NULL: it has not come */
    int64_t process;
    ms_os_thread *thread;
} ms_visitor;

/* The first keeper's: a request that the hosts are deciding about. */
typedef struct ms_pending {
    bool active, prepared[MS_LOCAL_RANKS_MAX];
    uint32_t value, count, missing; /* hosts that have not answered */
    uint64_t highest;
} ms_pending;

/* Deadlock detection over hosts: deadlock.c. */
typedef struct ms_still_watch {
    /* The first keeper's */
    uint64_t round;
    uint32_t stage, missing; /* 0: no round is under way */
    bool answered[MS_LOCAL_RANKS_MAX], moving;
    uint64_t not_before_ns;
    ms_stand *stands;
    uint32_t stand_count, stand_room;
    ms_mark *marks;
    uint32_t mark_count, mark_room;
    /* Each keeper's: what it was asked, and `still` of its ranks when it was */
    bool asked;
    ms_look_body question;
    uint64_t seen[MS_LOCAL_RANKS_MAX];
} ms_still_watch;

/* What other hosts have been told of a rank's line. */
typedef struct ms_shown {
    uint64_t words[(sizeof(ms_rank_line) + 7) / 8];
} ms_shown;

struct ms_keeper {
    ms_mirror mirror; /* of this process: what it writes itself */
    ms_context *context;
    ms_host_files *files;
    ms_control_file *control;
    const ms_os *os;
    uint32_t host, hosts, ranks;
    uint64_t lost_ns, init_ns, beat_ns, told_ns; /* told_ns: when it last gave a sign of life */
    uint8_t token[MS_TOKEN_BYTES];
    uint16_t port;
    ms_porter *porter; /* the first keeper's, until all hosts have come */
    ms_file *door;
    char door_path[108];
    ms_word stirred, closing;
    ms_word orphaned; /* the first keeper is lost: this one reports by itself */
    ms_word flights;  /* the supervisor is to write the flight records of this host's ranks */
    /* The first keeper's: the connection to the process that has started the job. */
    ms_wire starter;
    ms_os_thread *starter_thread;
    ms_word starter_heard; /* it knows the exit code */
    ms_word starter_gone;  /* it is lost */
    ms_os_thread *looker;
    ms_lock deciding; /* what follows, up to shown */
    bool proposed, decided;
    ms_pending pending[MS_REQUESTS];
    ms_still_watch still;
    ms_shown *shown; /* the looker's; one for each rank */
    ms_peer peers[MS_LOCAL_RANKS_MAX];
    ms_visitor visitors[MS_LOCAL_RANKS_MAX];
};

static inline uint64_t ms_keeper_now(const ms_keeper *keeper)
{
    return keeper->os->monotonic_ns(keeper->os->user);
}

#endif
