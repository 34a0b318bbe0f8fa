/* claim.c: agreement before a call is launched: each host publishes its calls and compares them
 * with those of its peers.
 *
 * A host writes its claim first and reads those of the others second, all sequentially consistent:
 * of two hosts that claim one number, at least one sees the other's claim. */
#include "comm/control/shm/claim.h"

#include <string.h>

#include "comm/control/shm/mismatch.h"
#include "comm/control/shm/call_record.h"

_Static_assert(MS_CALLS_AHEAD >= MS_STREAM_DEPTH,
               "a stream holds no more calls than there are claims kept");
_Static_assert(sizeof(ms_ledger_entry) % 8 == 0, "the fields of a call are published as words");

/* Where a host publishes its calls: of one channel, or to one peer. A ring of claims is long, as
 * hosts run ahead; a ring of fields is short, as it serves reports only. */
typedef struct call_rings {
    _Atomic uint64_t *claims;
    ms_published *published;
    uint32_t ahead, shown;
} call_rings;

/* The rings of one member in the call's channel. */
static call_rings rings_of_member(const ms_shm_rank *self, const ms_comm_args *args,
                                  uint32_t member)
{
    ms_member_line *line = ms_ledger_line(self, args, member);
    return (call_rings){ .claims = line->claims,
                         .published = line->published,
                         .ahead = MS_CALLS_AHEAD,
                         .shown = MS_CALLS_SHOWN };
}

/* The rings of the sender, or of the receiver, of this pair. */
static call_rings rings_of_pair(const ms_shm_rank *self, const ms_comm_args *args, bool sender)
{
    uint32_t other = args->group->members[args->root];
    ms_pair_line *line = args->kind == MS_SEND ? ms_pair(self->files, self->rank, other)
                                               : ms_pair(self->files, other, self->rank);
    ms_pair_calls *calls = &line->calls[sender ? 0 : 1];
    return (call_rings){ .claims = calls->claims,
                         .published = calls->published,
                         .ahead = MS_PAIR_CALLS_AHEAD,
                         .shown = MS_PAIR_CALLS_SHOWN };
}

/* Where this rank publishes, which its peers read. */
static call_rings own_rings(const ms_shm_rank *self, const ms_comm_args *args)
{
    return ms_kind_is_pair(args->kind) ? rings_of_pair(self, args, args->kind == MS_SEND)
                                       : rings_of_member(self, args, args->group->rank);
}

/* Claims of other laps of the ring are no claims to this number. */
#define MS_LAP_BITS 16
#define MS_LAP_MASK (((uint64_t)1 << MS_LAP_BITS) - 1)

/* A claim of the same lap that has another hash. An empty place has lap 0; laps count from 1. The
 * hash has 48 bits beside the lap, so two different calls agree by chance once in 2^48; the ledger
 * compares the fields again. */
static bool disagrees(uint64_t mine, uint64_t theirs)
{
    return theirs != mine && (theirs & MS_LAP_MASK) == (mine & MS_LAP_MASK);
}

/* Publishes the call, and returns the claim to its number. The fields come before the claim: a rank
 * that sees the claim can show the fields. seq is 0 while they are written, so that a reader does
 * not take half of them. */
static uint64_t publish(ms_shm_rank *self, const ms_comm_args *args)
{
    ms_ledger_entry slot;
    uint64_t words[MS_CALL_WORDS];
    call_rings own = own_rings(self, args);
    ms_published *to = &own.published[args->number % own.shown];
    memset(&slot, 0, sizeof slot);
    ms_ledger_write(self, args, &slot);
    memcpy(words, &slot, sizeof slot);
    atomic_store(&to->seq, 0);
    for (size_t i = 0; i < MS_CALL_WORDS; i++)
        atomic_store_explicit(&to->words[i], words[i], memory_order_release);
    atomic_store(&to->seq, args->number);
    uint64_t lap = args->number / own.ahead + 1;
    uint64_t claim = ms_ledger_hash(args) << MS_LAP_BITS | (lap & MS_LAP_MASK);
    atomic_store(&own.claims[args->number % own.ahead], claim);
    return claim;
}

/* The own member is compared too, which never disagrees. A peer that has not claimed yet has 0
 * there, or the claim of another lap, and will compare itself. It costs a publication and a load
 * for each member, and no waiting. */
ms_status ms_shm_claim(ms_comm *comm, const ms_comm_args *args)
{
    ms_shm_rank *self = comm->control_state;
    uint64_t mine = publish(self, args), number = args->number;
    if (ms_kind_is_pair(args->kind)) {
        ms_ledger_entry slot;
        call_rings peer = rings_of_pair(self, args, args->kind != MS_SEND);
        if (!disagrees(mine, atomic_load(&peer.claims[number % peer.ahead]))) return MS_OK;
        bool shown = ms_ledger_read(&peer.published[number % peer.shown], number, &slot);
        ms_ledger_disagree_pair(self, args, shown ? &slot : NULL);
        return comm->control->check(comm);
    }
    for (uint32_t m = 0; m < args->group->size; m++) {
        call_rings peer = rings_of_member(self, args, m);
        if (!disagrees(mine, atomic_load(&peer.claims[number % peer.ahead]))) continue;
        ms_ledger_disagree(self, args, m, NULL);
        return comm->control->check(comm);
    }
    return MS_OK;
}

/* Peers that look later find no claim, and so do not compare with a call that was never launched.
 */
void ms_shm_retract(ms_comm *comm, const ms_comm_args *args)
{
    call_rings own = own_rings(comm->control_state, args);
    atomic_store(&own.claims[args->number % own.ahead], 0);
    atomic_store(&own.published[args->number % own.shown].seq, 0);
}
