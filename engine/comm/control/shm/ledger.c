/* ledger.c: the order ledger, as tasks run through it: a rank enters a call, waits until all
 * members have entered it, and compares; then it moves through phases with them. */
#include "comm/control/shm/ledger.h"

#include "comm/control/shm/bell.h"
#include "comm/control/shm/mismatch.h"
#include "comm/control/shm/call_record.h"
#include "comm/control/shm/wait.h"

/* Lines of members on other nodes are copies: no thread sleeps on their bells. */
void ms_ledger_wake(ms_shm_rank *self, const ms_group *group)
{
    for (uint32_t m = 0; m < group->size; m++)
        if (m != group->rank) ms_shm_wake(self, group->members[m]);
}

/* ----------------------------------------------------------------- entering */

/* Looks from the cursor on, so that members that have come are not read again. A member whose call
 * differs ends the job here, before bytes move. It is called from a spin, so it reads one cache
 * line of one member in the usual case. */
static bool all_entered(ms_wait *wait)
{
    const ms_group *group = wait->args->group;
    ms_wait_turn(wait);
    for (; wait->cursor < group->size; wait->cursor++) {
        if (!ms_wait_is_for(wait, wait->cursor)) continue;
        const ms_ledger_entry *slot = ms_ledger_entry_of(wait->self, wait->args, wait->cursor);
        if (atomic_load(&slot->seq) < wait->target) return false;
        if (ms_ledger_agree(slot, ms_ledger_entry_of(wait->self, wait->args, group->rank)))
            continue;
        ms_ledger_disagree(wait->self, wait->args, wait->cursor, wait->helper);
        return false;
    }
    return true;
}

/* The missing rank may have finished, or have called in another order; a different call of this
 * number was found before it was launched (claim.c). `finished` and `gone` are read before the
 * counts: what such a rank has not done by then, it will not do. A rank on another node tells its
 * counts when it finishes, one after the other; before that they say nothing. */
static void look_for_the_missing(ms_wait *wait)
{
    ms_shm_rank *self = wait->self;
    const ms_comm_args *args = wait->args;
    if (wait->cursor >= args->group->size) return;
    uint32_t other = args->group->members[wait->cursor];
    ms_member_line *line = ms_ledger_line(self, args, wait->cursor);
    bool finished = atomic_load(&self->control->lines[other].finished) != 0,
         gone = atomic_load(&self->control->lines[other].gone) != 0;
    if (!finished && !ms_shm_is_here(self->control, other)) return;
    uint64_t issued = ms_ledger_issued(self, args->group, args->channel, other),
             entered = atomic_load(&line->slots[args->number & 1].seq);
    if (issued >= args->number) {
        if (gone && entered < args->number) ms_ledger_ended(self, args, other, false);
        return;
    }
    /* Its last call, to be named in the report. */
    const ms_ledger_entry *last = &line->slots[issued & 1];
    if (ms_ledger_check_order(self, args, other, wait->cursor) || !finished) return;
    ms_ledger_gone(self, args, other, issued,
                   issued && atomic_load(&last->seq) == issued ? last : NULL);
}

/* The first member that has not come, as a world rank; this rank itself if all have. */
static uint32_t missing_member(ms_wait *wait)
{
    const ms_group *group = wait->args->group;
    return group->members[wait->cursor < group->size ? wait->cursor : group->rank];
}

static const ms_wait_kind for_entry = { all_entered, look_for_the_missing, missing_member };

/* Of a call that control carries, other nodes are told by the replication; of others, by the
 * transport, since the fields travel in front of the bytes. */
static void tell_entered(ms_shm_rank *self, const ms_comm_args *args, const ms_ledger_entry *slot)
{
    const char *fields = (const char *)slot + sizeof slot->seq;
    if (!args->out_of_band || !self->files->replication) return;
    ms_shm_tell(self, fields, sizeof *slot - sizeof slot->seq);
    ms_shm_tell(self, &slot->seq, sizeof slot->seq);
}

/* The slot is complete before its seq is stored: peers read the slot only after they have seen that
 * number. */
const ms_ledger_entry *ms_ledger_post(ms_shm_rank *self, const ms_comm_args *args)
{
    ms_ledger_entry *slot = &ms_ledger_line(self, args, args->group->rank)->slots[args->number & 1];
    ms_ledger_write(self, args, slot);
    args->group->channels[args->channel].flight = ms_ledger_flight(self, &slot->call);
    atomic_store(&slot->seq, args->number);
    tell_entered(self, args, slot);
    ms_ledger_wake(self, args->group);
    return slot;
}

/* It may be asked for some members first, and for all later. */
bool ms_ledger_await(ms_shm_rank *self, const ms_comm_args *args, ms_helper *helper)
{
    ms_wait wait = {
        .kind = &for_entry, .self = self, .args = args, .helper = helper, .target = args->number
    };
    return ms_shm_wait(&wait);
}

bool ms_ledger_enter(ms_shm_rank *self, const ms_comm_args *args)
{
    if (ms_shm_aborted(self)) return false;
    ms_ledger_post(self, args);
    return ms_ledger_await(self, args, NULL);
}

/* ------------------------------------------------------------------- phases */

/* Phase counters only grow, so a member that has reached the target stays there. */
static bool all_in_phase(ms_wait *wait)
{
    ms_wait_turn(wait);
    for (; wait->cursor < wait->args->group->size; wait->cursor++)
        if (ms_wait_is_for(wait, wait->cursor)
            && atomic_load(&ms_ledger_line(wait->self, wait->args, wait->cursor)->phase)
                   < wait->target)
            return false;
    return true;
}

/* A rank inside the collective arrives, unless its process has ended. */
static void look_for_ended(ms_wait *wait)
{
    const ms_group *group = wait->args->group;
    if (wait->cursor >= group->size) return;
    uint32_t other = group->members[wait->cursor];
    /* After the end of its process nothing of it changes: so `gone` is read first. */
    bool gone = atomic_load(&wait->self->control->lines[other].gone) != 0;
    if (gone
        && atomic_load(&ms_ledger_line(wait->self, wait->args, wait->cursor)->phase) < wait->target)
        ms_ledger_ended(wait->self, wait->args, other, true);
}

static const ms_wait_kind for_phase = { all_in_phase, look_for_ended, missing_member };

/* A barrier of the members. What this rank wrote before the store is visible to every rank that has
 * passed it. A group of one passes at once. */
bool ms_ledger_phase(ms_shm_rank *self, const ms_comm_args *args, uint64_t phases,
                     ms_helper *helper)
{
    const ms_group *group = args->group;
    uint64_t target = group->channels[args->channel].phase + phases;
    _Atomic uint64_t *phase = &ms_ledger_line(self, args, group->rank)->phase;
    atomic_store(phase, target);
    if (args->out_of_band) ms_shm_tell(self, phase, sizeof *phase);
    ms_ledger_wake(self, group);
    ms_wait wait = {
        .kind = &for_phase, .self = self, .args = args, .helper = helper, .target = target
    };
    return ms_shm_wait(&wait);
}

/* The counter advances on a failure too, but the job has ended then and no rank waits for it. */
bool ms_ledger_leave(ms_shm_rank *self, const ms_comm_args *args, uint64_t phases,
                     ms_helper *helper)
{
    ms_channel *channel = &args->group->channels[args->channel];
    bool left = ms_ledger_phase(self, args, phases, helper);
    channel->phase += phases;
    if (left) ms_ledger_landed(self, channel->flight);
    return left;
}
