/* two_level_sums.h: reductions over several nodes, whose sums travel: how a tensor is cut, where
 * sums are, and how they are added. For comm/transport/mpi/ only.
 *
 * Invariants
 * - A sum is added in the order of ranks of its node, or in the order of nodes. It does not depend
 *   on pieces.
 * - Only the rank that adds a sum of a slice, and MPI, touch it: it is in the room of the channel.
 *   Sums of parts are in staging areas. */
#ifndef MOONSHARD_COMM_TRANSPORT_MPI_TWO_LEVEL_SUMS_H
#define MOONSHARD_COMM_TRANSPORT_MPI_TWO_LEVEL_SUMS_H

#include "comm/transport/mpi/state.h"

/* How a call is carried out. The way (in_place, direct) is one node's own, the rest all members
 * agree on. */
typedef struct ms_sum {
    ms_run *run;
    ms_mpi_channel *channel;
    const ms_comm_args *args;
    uint64_t width, longest; /* elements of a piece; of the longest unit or part */
    uint64_t phases;         /* so far */
    size_t item, sent;       /* bytes of an element in the tensor, and in a sum on its way */
    uint32_t depth;          /* pieces at once */
    uint32_t units;          /* of a slice */
    bool parts;              /* reduce_scatter */
    bool in_place;           /* this node's members read each other's tensors where they are */
    bool direct;             /* this node's results are written where they belong */
    bool headers;            /* the sums travel in header messages */
    bool gets;               /* this node has a rank that gets results */
} ms_sum;

/* One contiguous sum of a piece. at: its elements in the whole tensor; stage: its byte in staging
 * areas; unit: of the slice. */
typedef struct ms_span {
    uint64_t at, length;
    size_t stage;
    uint32_t unit;
} ms_span;

static inline uint32_t ms_sum_here(const ms_sum *r) { return r->channel->at->here; }
static inline uint32_t ms_sum_members(const ms_sum *r)
{
    return ms_topology_count(r->channel->at, ms_sum_here(r));
}
/* Where piece k has its messages and its memory. */
static inline uint64_t ms_sum_turn(const ms_sum *r, uint64_t k) { return k % r->depth; }

/* -------------------------------------------------------- two_level_sums.c */

ms_sum ms_sum_begin(ms_run *run, ms_mpi_channel *channel, const ms_comm_args *args);
/* The members of this node have entered; where pieces are longer than a staging area holds, all
 * have. */
void ms_sum_choose_way(ms_sum *r, bool all_entered);
uint64_t ms_sum_staged_piece(const ms_mpi_channel *channel, const ms_comm_args *args);
uint64_t ms_sum_steps(const ms_sum *r);
/* Piece k of a slice or part of `length` elements from `begin` on. */
ms_span ms_sum_piece(const ms_sum *r, uint64_t k, uint32_t index, uint64_t begin, uint64_t length);
/* Of a unit of the slice at this place: units do not depend on pieces. */
ms_span ms_sum_unit(const ms_sum *r, uint64_t k, uint32_t place, uint32_t unit);

char *ms_sum_stage(const ms_sum *r, uint32_t member, uint64_t half);
/* A member's tensor in this process, if it is in a heap of this node. */
char *ms_sum_tensor(const ms_sum *r, uint32_t member);
/* Whether the node's sum is the tensor of its only member, as it is. */
bool ms_sum_is_tensor(const ms_sum *r);
/* Where the sum of this node is, before and after it is added up; that of another node; and the
 * result of a unit, as it travels. */
char *ms_sum_at(const ms_sum *r, const ms_span *s, uint64_t k);
char *ms_sum_arrived(const ms_sum *r, const ms_span *s, uint32_t node, uint64_t k);
char *ms_sum_result_room(const ms_sum *r, uint32_t unit, uint64_t k);
/* The member of another node from which this rank gets the sum of its slice or part. */
uint32_t ms_sum_source(const ms_sum *r, uint32_t node);

/* The members of this node, in the order of ranks. The sum is rounded to the dtype in which it
 * travels: that of the tensor, or the 16-bit one to which the call rounds. */
void ms_sum_add_here(const ms_sum *r, const ms_span *s, uint64_t half);
/* The sums of all nodes, in their order, to numbers of the tensor or to what travels. */
void ms_sum_add_nodes(const ms_sum *r, const ms_span *s, uint64_t half, uint8_t result,
                      char *const *outputs, uint32_t output_count);
/* Waits until all members of this node have come to the next phase. needed false: the call returns
 * at once, since the members share no memory but tensors, for which entering and leaving the call
 * are enough. False: the job has ended. */
bool ms_sum_barrier(ms_sum *r, bool needed);

/* ------------------------------------------------------ two_level_scatter.c */

/* reduce_scatter: this node's sums for the parts of piece k; their exchange; this rank's part. */
bool ms_two_level_scatter_prepare(ms_sum *r, uint64_t k);
void ms_two_level_scatter_exchange(const ms_sum *r, uint64_t k);
bool ms_two_level_scatter_finish(const ms_sum *r, uint64_t k);

/* Bytes of room that the call may need. */
size_t ms_two_level_scratch_bytes(const ms_mpi_channel *channel, const ms_comm_args *args);

#endif
