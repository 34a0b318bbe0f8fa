/* async_calls.c: calls that a transport has launched, and whose tasks do not wait in the order
 * ledger: what reports show of them, and whether their peers will come. */
#include "comm/control/shm/async_calls.h"

#include <stdio.h>

#include "comm/control/shm/hang_report.h"
#include "comm/control/shm/job_end.h"
#include "comm/control/shm/liveness.h"
#include "comm/control/shm/mismatch.h"
#include "comm/control/shm/call_record.h"
#include "comm/control/shm/straggler.h"
#include "comm/control/shm/wait.h"
#include "comm/flight.h"
#include "comm/transport_table.h"

/* As ms_ledger_enter does for calls of the ledger. */
uint64_t ms_shm_entered(ms_comm *comm, const ms_comm_args *args)
{
    ms_shm_rank *self = comm->control_state;
    ms_flight flight = ms_flight_of(args);
    flight.entered_ns = ms_shm_now(self);
    return ms_ledger_flight(self, &flight);
}

void ms_shm_landed(ms_comm *comm, uint64_t place) { ms_ledger_landed(comm->control_state, place); }

/* How many calls a member's host has launched in this channel, or of its side of this pair. */
static uint64_t launched_by(const ms_shm_rank *self, const ms_comm_args *args, uint32_t member)
{
    uint32_t other = args->group->members[member];
    if (args->kind == MS_SEND)
        return atomic_load(&ms_pair(self->files, self->rank, other)->receives);
    if (args->kind == MS_RECV) return atomic_load(&ms_pair(self->files, other, self->rank)->sends);
    return ms_ledger_issued(self, args->group, args->channel, other);
}

/* One that has not come may have finished, or have called in another order; then the job ends.
 * `finished` is read before the count, as such a rank launches nothing more. */
static bool has_come(ms_shm_rank *self, const ms_comm_args *args, uint32_t member)
{
    ms_ledger_entry last;
    uint32_t other = args->group->members[member];
    bool finished = atomic_load(&self->control->lines[other].finished) != 0,
         is_pair = ms_kind_is_pair(args->kind);
    uint64_t calls = launched_by(self, args, member);
    if (calls >= args->number) return true;
    if (!is_pair && ms_ledger_check_order(self, args, other, member)) return false;
    if (!finished) return false;
    bool shown =
        !is_pair && calls && ms_ledger_call(ms_ledger_line(self, args, member), calls, &last);
    ms_ledger_gone(self, args, other, calls, shown ? &last : NULL);
    return false;
}

/* The first member that has not launched the call; this rank if all have. */
static uint32_t find_missing(ms_shm_rank *self, const ms_comm_args *args)
{
    const ms_group *group = args->group;
    if (ms_kind_is_pair(args->kind))
        return has_come(self, args, args->root) ? self->rank : group->members[args->root];
    for (uint32_t m = 0; m < group->size; m++)
        if (m != group->rank && !has_come(self, args, m)) return group->members[m];
    return self->rank;
}

/* The limit has passed. Where all have come, no rank is to blame but the network. */
static void give_up(ms_shm_rank *self, const ms_comm_args *args, const ms_awaited *awaited,
                    uint64_t waited_ns)
{
    char call[256], text[512];
    if (awaited->missing != self->rank) {
        ms_shm_give_up(self, args, awaited->missing, awaited->progress, waited_ns);
        return;
    }
    ms_flight flight = ms_flight_of(args);
    snprintf(
        text, sizeof text,
        "%s has not ended on rank %u in %.1f s by \"%s\", though all its ranks have come to it",
        ms_flight_describe(&flight, call, sizeof call), self->rank, (double)waited_ns / 1e9,
        args->group->transport->name);
    ms_shm_end_job(self->files, MS_ABORT_TIMEOUT, (int32_t)self->rank, text);
}

/* The time runs again when the missing rank makes progress, or another one is missing, as in
 * ms_shm_wait. */
uint64_t ms_shm_look(ms_comm *comm, const ms_comm_args *args, ms_awaited *awaited)
{
    ms_shm_rank *self = comm->control_state;
    uint64_t limit = args->timeout_ns ? args->timeout_ns : self->control->timeout_ns;
    uint32_t missing = find_missing(self, args);
    ms_liveness_look(self, missing);
    ms_liveness_look_agent(self);
    uint64_t progress =
                 missing == self->rank ? 0 : ms_rank_progress(&self->control->lines[missing]),
             now = ms_shm_now(self);
    if (awaited->is_known && (missing != awaited->missing || progress != awaited->progress))
        awaited->since_ns = now;
    awaited->is_known = true;
    awaited->missing = missing;
    awaited->progress = progress;
    uint64_t waited = now - awaited->since_ns;
    if (waited >= limit) {
        give_up(self, args, awaited, waited);
        awaited->since_ns = now;
    } else if (missing != self->rank
               && waited >= atomic_load_explicit(&self->patience_ns, memory_order_relaxed))
        ms_straggler_warn(self, args, missing, progress, waited, limit);
    return awaited->since_ns + limit;
}
