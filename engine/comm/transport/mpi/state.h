/* state.h: the transport between the ranks of several nodes, which moves host memory: within a node
 * the local transport, between nodes MPI, which only moves bytes. For comm/transport/mpi/ only.
 *
 * Invariants
 * - The functions of comm/cpu/ add, in a fixed order, and never MPI. So results repeat.
 * - The control file of every node has the lines of all ranks, and of each rank on another node
 *   there are staging areas here, in a heap file for that rank. What such a member brings to a call
 *   arrives by MPI and is put there, so the code for one node goes on with it.
 * - For each member on another node one member of this node is its relay: it receives what that
 *   member sends here, in its own task of the same call, each time that it looks for its peers.
 * - The first message of a call between two ranks is a header message: the sender's slot of the
 *   order ledger, and the data where they are few. Pieces follow only after all have entered the
 *   same call. So no message meets a receive of another call.
 * - Messages of a channel between two ranks keep their order: each channel has a tag of its own.
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
#define MS_HEADER_DATA_BYTES ((size_t)64 << 10)
#define MS_HEADER_FIRST_BYTES ((size_t)32 << 10)
/* Tags: one for each channel, one for what senders and one for what receivers of pairs send. */
#define MS_TAG_SENDERS (MS_GROUPS_MAX * MS_CHANNELS)
#define MS_TAG_RECEIVERS (MS_TAG_SENDERS + 1)
_Static_assert(MS_TAG_RECEIVERS < MS_MPI_TAG_MAX, "every channel has a tag");
/* Messages of a call, in the most uneven layout. With each other member there are a header message
 * in each direction, of two messages, and a piece in each direction for each half of a staging
 * area. A stream runs one call at a time. A send or a receive has two header messages and a
 * piece. */
#define MS_CALL_MESSAGES (8 * MS_LOCAL_RANKS_MAX)
_Static_assert(MS_STREAMS_MAX *MS_CALL_MESSAGES + 6 <= MS_MPI_REQUESTS, "no message waits");

typedef struct ms_mpi_transport ms_mpi_transport;

typedef struct ms_header_message {
    ms_ledger_entry slot;
    uint64_t bytes; /* of data that are in it; UINT64_MAX: they follow as pieces */
    char data[MS_HEADER_DATA_BYTES];
} ms_header_message;
#define MS_HEADER_FIXED_BYTES offsetof(ms_header_message, data)

/* A message with what is needed to start, to await and to explain it. */
typedef struct ms_tracked_message ms_tracked_message;
struct ms_tracked_message {
    ms_mpi_message message;
    ms_tracked_message *next; /* that waits for the simulated link, too */
    uint64_t due_ns;          /* when the link lets it go */
    uint32_t member;          /* at the other end */
    bool busy;                /* it has not been found to have ended */
};

/* Messages of one direction and of one piece: of one half of the staging areas, or of one part of
 * the room. */
typedef struct ms_batch {
    ms_tracked_message *messages;
    uint32_t used, capacity;
} ms_batch;

/* The messages of calls that run one after the other: of a channel of a group, of the sends of a
 * rank, or of its receives. */
typedef struct ms_post {
    ms_helper helper;
    ms_mpi_transport *transport;
    const ms_comm_args *args; /* of the call under way */
    int32_t tag;
    ms_tracked_message *delayed, *last_delayed;
} ms_post;

/* A channel of a group over several nodes. Its tasks own it: they run one after the other. Made at
 * the first call. */
typedef struct ms_mpi_channel ms_mpi_channel;
struct ms_mpi_channel {
    ms_post post;          /* first: its helper's turn finds the channel */
    const ms_topology *at; /* of the group */
    ms_staging pass;       /* of the call under way */
    uint32_t relayed_count;
    uint16_t relayed[MS_LOCAL_RANKS_MAX]; /* members on other nodes whose relay this rank is */
    ms_header_message *headers_out, *headers_in; /* by node; by place in relayed */
    ms_batch out_headers, in_headers, in_rests;  /* in_rests: by place in relayed */
    ms_batch out[MS_DEPTH], in[MS_DEPTH];        /* by piece; of steps, by half */
    char *room; /* of sums that no other rank of this node reads; NULL until it is needed */
    size_t room_bytes;
    /* Pieces of the members that this rank relays: they are there when the phase begins. */
    ms_batch *arriving;
    uint64_t arriving_phase;
    bool awaited[MS_LOCAL_RANKS_MAX]; /* whose phases a step waits for */
    /* Takes the data of a header message whose call agrees with this rank's; NULL: they stay in it.
     */
    void (*unpack)(ms_mpi_channel *channel, uint32_t member, const ms_header_message *header);
    bool populated;
};

/* Writes the data of a header message for one node. Returns their bytes, or MS_AS_PIECES: they
 * follow as pieces. */
#define MS_AS_PIECES UINT64_MAX
typedef uint64_t ms_header_fill(ms_mpi_channel *channel, uint32_t node, char *data);
static inline ms_shm_rank *ms_mpi_channel_self(const ms_mpi_channel *channel);
static inline uint32_t ms_mpi_channel_place(const ms_mpi_channel *channel)
{
    return channel->at->place[channel->post.args->group->rank];
}

/* --------------------------------------------------------- what calls do */

/* A send or recv between two nodes. */
typedef struct ms_mpi_p2p {
    ms_post post;
    ms_header_message mine, theirs;
    ms_tracked_message to, from, data;
    bool made;
} ms_mpi_p2p;

/* ms_comm.transport_state. The local transport's comes first: its tasks find it there. */
struct ms_mpi_transport {
    ms_local local;
    ms_mpi *mpi;
    ms_mpi_channel *channels[MS_GROUPS_MAX * MS_CHANNELS];
    ms_mpi_p2p pairs[2]; /* tasks of sends, and of recvs */
};

static inline ms_shm_rank *ms_mpi_channel_self(const ms_mpi_channel *channel)
{
    return channel->post.transport->local.self;
}

/* Counts bytes that go to another node. */
static inline void ms_mpi_count_sent(const ms_comm_args *args, uint64_t bytes)
{
    atomic_fetch_add_explicit(&args->group->between, bytes, memory_order_relaxed);
}

#endif
