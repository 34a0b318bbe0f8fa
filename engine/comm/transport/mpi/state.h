/* state.h: the transport between the ranks of several hosts: within a host the local
 * transport, between hosts MPI, which only moves bytes. For comm/transport/mpi/ only.
 *
 * Invariants
 * - The control file of every host has the lines of all ranks, and of each rank on another host
 *   there are staging areas here. What such a member brings to a call arrives by MPI and is put
 *   there, so the code for one host goes on with it.
 * - For each member on another host one member of this host is its relay: it receives what that
 *   member sends here, in its own task of the same call, each time that it looks for its peers.
 * - The first message of a call between two ranks is a letter: the sender's slot of the order
 *   ledger, and the data where they are few. Pieces follow only after all have entered the same
 *   call. So no message meets a receive of another call.
 * - Messages of a lane between two ranks keep their order: each lane has a tag of its own.
 * - Memory of a message is left alone until it has ended. A call is left when its messages have. */
#ifndef MOONSHARD_COMM_TRANSPORT_MPI_STATE_H
#define MOONSHARD_COMM_TRANSPORT_MPI_STATE_H

#include "comm/topology.h"

#include "comm/control/shm/wait.h"
#include "comm/mpi/progress_thread.h"
#include "comm/transport/shm/state.h"

/* Pieces of a reduction that may be on their way. */
#define MS_DEPTH 4
/* Data of a call that travel with its first message, and how much of them in it: the rest is a
 * message of its own, because MPIs send messages above some length (Open MPI 64 KiB over TCP) only
 * once the receiver has answered. */
#define MS_LETTER_BYTES ((size_t)64 << 10)
#define MS_LETTER_FIRST ((size_t)32 << 10)
/* Tags: one for each lane, one for what senders and one for what receivers of pairs send. */
#define MS_TAG_SENDERS (MS_GROUPS_MAX * MS_CHANNELS)
#define MS_TAG_RECEIVERS (MS_TAG_SENDERS + 1)
_Static_assert(MS_TAG_RECEIVERS < MS_MPI_TAG_MAX, "every lane has a tag");
/* Messages of a call, in the most uneven layout: the two of a letter from and of a letter to each
 * other member, and in each half of a staging area a piece from and a piece to each. A stream runs
 * one call at a time; sends and receives have two letters and a piece each. */
#define MS_CALL_MESSAGES (8 * MS_LOCAL_RANKS_MAX)
_Static_assert(MS_STREAMS_MAX *MS_CALL_MESSAGES + 6 <= MS_MPI_REQUESTS, "no message waits");

typedef struct ms_hosts ms_hosts;

typedef struct ms_letter {
    ms_ledger_slot slot;
    uint64_t bytes; /* of data that are in it; UINT64_MAX: they follow as pieces */
    char data[MS_LETTER_BYTES];
} ms_letter;
#define MS_LETTER_HEAD offsetof(ms_letter, data)

/* A message with what is needed to start, to await and to explain it. */
typedef struct ms_parcel ms_parcel;
struct ms_parcel {
    ms_mpi_message message;
    ms_parcel *next; /* that waits for the simulated link, too */
    uint64_t due_ns; /* when the link lets it go */
    uint32_t member; /* at the other end */
    bool busy;       /* it has not been found to have ended */
};

/* Messages of one direction and of one piece: of one half of the staging areas, or of one part of
 * the room. */
typedef struct ms_batch {
    ms_parcel *parcels;
    uint32_t used, capacity;
} ms_batch;

/* The messages of one thing that calls one after the other: a channel of a group, or the sends or
 * receives of a rank. */
typedef struct ms_post {
    ms_helper helper;
    ms_hosts *hosts;
    const ms_comm_args *args; /* of the call under way */
    int32_t tag;
    ms_parcel *delayed, *last_delayed;
} ms_post;

/* A channel of a group over several hosts. Its tasks own it: they run one after the other. Made at
 * the first call. */
typedef struct ms_lane ms_lane;
struct ms_lane {
    ms_post post;          /* first: its helper's turn finds the lane */
    const ms_topology *at; /* of the group */
    ms_staging pass;       /* of the call under way */
    uint32_t relayed_count;
    uint16_t relayed[MS_LOCAL_RANKS_MAX]; /* members on other hosts whose relay this rank is */
    ms_letter *letters_out, *letters_in;  /* by host; by place in relayed */
    ms_batch out_letters, in_letters, in_rests; /* in_rests: by place in relayed */
    ms_batch out[MS_DEPTH], in[MS_DEPTH];       /* by piece; of steps, by half */
    char *room; /* of sums that no other rank of this host reads; NULL until it is needed */
    size_t room_bytes;
    /* Pieces of the members that this rank relays: they are there when the phase begins. */
    ms_batch *arriving;
    uint64_t arriving_phase;
    bool awaited[MS_LOCAL_RANKS_MAX]; /* whose phases a step waits for */
    /* Takes the data of a letter whose call agrees with this rank's; NULL: they stay in it. */
    void (*unpack)(ms_lane *lane, uint32_t member, const ms_letter *letter);
    bool populated;
};

/* Sends a letter to the relay on each other host. fill writes the data for one host and returns
 * their bytes, or MS_AS_PIECES. */
#define MS_AS_PIECES UINT64_MAX
typedef uint64_t ms_letter_fill(ms_lane *lane, uint32_t host, char *data);
static inline ms_host *ms_lane_host(const ms_lane *lane);
static inline uint32_t ms_lane_place(const ms_lane *lane)
{
    return lane->at->place[lane->post.args->group->rank];
}

/* --------------------------------------------------------- what calls do */

/* A send or recv between two hosts. */
typedef struct ms_hosts_pair {
    ms_post post;
    ms_letter mine, theirs;
    ms_parcel to, from, data;
    bool made;
} ms_hosts_pair;

/* ms_comm.transport_state. The local transport's comes first: its tasks find it there. */
struct ms_hosts {
    ms_local local;
    ms_mpi *mpi;
    ms_lane *lanes[MS_GROUPS_MAX * MS_CHANNELS];
    ms_hosts_pair pairs[2]; /* tasks of sends, and of recvs */
};

static inline ms_host *ms_lane_host(const ms_lane *lane) { return lane->post.hosts->local.host; }

/* Counts bytes that go to another host. */
static inline void ms_hosts_count(const ms_comm_args *args, uint64_t bytes)
{
    atomic_fetch_add_explicit(&args->group->between, bytes, memory_order_relaxed);
}

#endif
