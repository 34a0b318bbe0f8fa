/* claim.c: agreement before a call is launched: each host publishes its calls and compares them
 * with those of its peers.
 *
 * A host writes its claim first and reads those of the others second, all sequentially consistent:
 * of two hosts that claim one number, at least one sees the other's claim. */
#include "comm/host/host.h"

#include <string.h>

_Static_assert(MS_CALLS_AHEAD >= MS_STREAM_DEPTH,
               "a stream holds no more calls than there are claims kept");
_Static_assert(sizeof(ms_ledger_slot) % 8 == 0, "the fields of a call are published as words");

/* Claims of other laps of the ring are no claims to this number. */
#define MS_LAP_BITS 16
#define MS_LAP_MASK (((uint64_t)1 << MS_LAP_BITS) - 1)

static uint64_t claim_of(const ms_comm_args *args)
{
    uint64_t lap = args->number / MS_CALLS_AHEAD + 1;
    return ms_ledger_hash(args) << MS_LAP_BITS | (lap & MS_LAP_MASK);
}

static bool disagrees(uint64_t mine, uint64_t theirs)
{
    return theirs != mine && (theirs & MS_LAP_MASK) == (mine & MS_LAP_MASK);
}

static void publish(ms_host *host, const ms_comm_args *args, ms_member_line *line)
{
    ms_ledger_slot slot;
    uint64_t words[MS_CALL_WORDS];
    ms_published *to = &line->published[args->number % MS_CALLS_SHOWN];
    memset(&slot, 0, sizeof slot);
    ms_ledger_write(host, args, &slot);
    memcpy(words, &slot, sizeof slot);
    atomic_store(&to->seq, 0);
    for (size_t i = 0; i < MS_CALL_WORDS; i++)
        atomic_store_explicit(&to->words[i], words[i], memory_order_release);
    atomic_store(&to->seq, args->number);
}

ms_status ms_host_claim(ms_comm *comm, const ms_comm_args *args)
{
    ms_host *host = comm->control_state;
    const ms_group *group = args->group;
    if (ms_kind_is_pair(args->kind)) return MS_OK;
    ms_member_line *own = ms_ledger_line(host, args, group->rank);
    uint64_t mine = claim_of(args), at = args->number % MS_CALLS_AHEAD;
    publish(host, args, own);
    atomic_store(&own->claims[at], mine);
    for (uint32_t m = 0; m < group->size; m++) {
        if (!disagrees(mine, atomic_load(&ms_ledger_line(host, args, m)->claims[at]))) continue;
        ms_ledger_disagree(host, args, m);
        return comm->control->check(comm);
    }
    return MS_OK;
}

void ms_host_retract(ms_comm *comm, const ms_comm_args *args)
{
    ms_host *host = comm->control_state;
    if (ms_kind_is_pair(args->kind)) return;
    ms_member_line *own = ms_ledger_line(host, args, args->group->rank);
    atomic_store(&own->claims[args->number % MS_CALLS_AHEAD], 0);
    atomic_store(&own->published[args->number % MS_CALLS_SHOWN].seq, 0);
}
