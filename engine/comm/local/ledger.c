/* ledger.c: the order ledger: every rank writes what it calls, waits until all members have, and
 * compares. */
#include "comm/local/control.h"

#include <stdio.h>
#include <string.h>

/* How long a report waits for the call of another rank that it needs. */
#define MS_WITNESS_NS 500000000
#define MS_ELSEWHERE_NS 20000000 /* the same where it seems to stand elsewhere */
#define MS_NAP_NS 1000000

static ms_member_line *line_of(const ms_local *local, const ms_comm_args *args, uint32_t member)
{
    return ms_member(local->rendezvous, args->group->id, args->channel, member);
}

const ms_ledger_slot *ms_ledger_slot_of(const ms_local *local, const ms_comm_args *args,
                                        uint32_t member)
{
    return &line_of(local, args, member)->slots[args->number & 1];
}

static void wake_members(ms_local *local, const ms_group *group)
{
    for (uint32_t m = 0; m < group->size; m++)
        if (m != group->rank) ms_local_wake(local, group->members[m]);
}

/* ------------------------------------------------------------------ records */

void ms_ledger_write(ms_local *local, const ms_comm_args *args, ms_ledger_slot *slot)
{
    const ms_os *os = local->rendezvous->os;
    const ms_group *group = args->group;
    const char *heap = local->rendezvous->heaps[local->rank].memory;
    bool in_heap = args->in && args->in >= heap && args->in < heap + local->rendezvous->heap_bytes;
    slot->heap_offset = in_heap ? (uint64_t)(args->in - heap) + 1 : 0;
    slot->counts_hash = args->counts_hash;
    slot->order = args->order;
    slot->value = args->value;
    slot->factor = args->factor;
    slot->call = (ms_flight){ .number = args->number,
                              .count = args->count,
                              .entered_ns = os->monotonic_ns(os->user),
                              .group = group->id,
                              .root = args->rooted ? (int32_t)args->root : -1,
                              .bucket = args->bucket,
                              .kind = args->kind,
                              .op = args->op,
                              .dtype = args->dtype,
                              .channel = args->channel };
    ms_copy_tail(slot->call.group_name, sizeof slot->call.group_name, group->name);
    memcpy(slot->call.label, args->label, sizeof slot->call.label);
    memcpy(slot->call.script, args->script, sizeof slot->call.script);
}

uint64_t ms_ledger_flight(ms_local *local, const ms_flight *call)
{
    ms_rank_line *line = &local->control->lines[local->rank];
    uint64_t place = atomic_fetch_add(&line->flights, 1);
    line->flight[place % MS_FLIGHTS] = *call;
    ms_activity_done(&line->activity);
    return place;
}

void ms_ledger_landed(ms_local *local, uint64_t flight)
{
    const ms_os *os = local->rendezvous->os;
    ms_rank_line *line = &local->control->lines[local->rank];
    line->flight[flight % MS_FLIGHTS].left_ns = os->monotonic_ns(os->user);
    ms_activity_done(&line->activity);
}

/* ----------------------------------------------------------------- verdicts */

bool ms_ledger_agree(const ms_ledger_slot *a, const ms_ledger_slot *b)
{
    const ms_flight *x = &a->call, *y = &b->call;
    if (x->kind != y->kind || x->op != y->op || x->dtype != y->dtype || x->channel != y->channel
        || x->root != y->root || x->bucket != y->bucket || x->group != y->group
        || x->number != y->number || a->counts_hash != b->counts_hash || a->order != b->order)
        return false;
    /* With counts, the ranks may send different amounts. */
    return x->count == y->count || (x->kind == MS_ALL_TO_ALL && a->counts_hash);
}

uint64_t ms_ledger_hash(const ms_comm_args *args)
{
    bool free_count = args->kind == MS_ALL_TO_ALL && args->by_counts;
    uint64_t root = args->rooted ? args->root : UINT64_MAX;
    uint64_t count = free_count ? 0 : args->count;
    uint64_t fields[] = { args->kind,      args->op,     args->dtype,
                          args->channel,   root,         (uint64_t)(int64_t)args->bucket,
                          args->group->id, args->number, args->counts_hash,
                          args->order,     count };
    return ms_hash(fields, sizeof fields, 0);
}

/* "rank 2" or "ranks 0, 1, 3", and the call. */
static size_t describe_side(char *text, size_t bytes, const uint32_t *ranks, uint32_t count,
                            const ms_ledger_slot *slot, bool order)
{
    char what[256];
    int used = snprintf(text, bytes, "\n  rank%s", count > 1 ? "s" : "");
    for (uint32_t i = 0; i < count && (size_t)used < bytes; i++)
        used += snprintf(text + used, bytes - (size_t)used, "%s %u", i ? "," : "", ranks[i]);
    if ((size_t)used < bytes)
        used += snprintf(text + used, bytes - (size_t)used, ": %s",
                         ms_flight_describe(&slot->call, what, sizeof what));
    if (order && (size_t)used < bytes)
        used += snprintf(text + used, bytes - (size_t)used,
                         ", as call %llu of this group and those around it",
                         (unsigned long long)slot->order + 1);
    return (size_t)used < bytes ? (size_t)used : bytes;
}

uint32_t ms_ledger_member(const ms_group *group, uint32_t rank)
{
    uint32_t at = 0;
    while (at < group->size && group->members[at] != rank) at++;
    return at;
}

/* A call in which another rank waits for one that this rank has not made, if there is one: it
 * cannot go on, so the slot stays. */
static const ms_ledger_slot *waits_in(ms_local *local, uint32_t other)
{
    const ms_comm *comm = local->comm;
    uint32_t groups = atomic_load(&comm->group_count);
    for (uint32_t g = 0; g < groups; g++) {
        const ms_group *group = comm->groups[g];
        uint32_t at = ms_ledger_member(group, other);
        for (uint32_t channel = 0; channel < MS_CHANNELS && at < group->size; channel++) {
            uint64_t next =
                atomic_load(&ms_member(local->rendezvous, group->id, channel, group->rank)->issued)
                + 1;
            const ms_ledger_slot *slot =
                &ms_member(local->rendezvous, group->id, channel, at)->slots[next & 1];
            if (atomic_load(&slot->seq) == next) return slot;
        }
    }
    return NULL;
}

/* Gives `other` a moment to enter this call, so that a report can show it; less where it will not
 * make it or stands in another one. */
static bool await_entry(ms_local *local, uint32_t other, ms_member_line *line, uint64_t number,
                        uint64_t begun_ns)
{
    const ms_os *os = local->rendezvous->os;
    while (atomic_load(&line->slots[number & 1].seq) < number) {
        uint64_t waited = os->monotonic_ns(os->user) - begun_ns;
        if (ms_local_aborted(local) || waited >= MS_WITNESS_NS) return false;
        bool ends_before = atomic_load(&local->control->lines[other].finished)
                           && atomic_load(&line->issued) < number;
        if (waited >= MS_ELSEWHERE_NS && (ends_before || waits_in(local, other))) return false;
        ms_local_nap(local, MS_NAP_NS);
    }
    return true;
}

/* Gives the others a moment to come, so that the one who differs can be told from the many; not
 * long, since one may be missing. */
static void await_witnesses(ms_local *local, const ms_comm_args *args)
{
    const ms_os *os = local->rendezvous->os;
    uint64_t begun = os->monotonic_ns(os->user);
    for (uint32_t m = 0; m < args->group->size; m++)
        await_entry(local, args->group->members[m], line_of(local, args, m), args->number, begun);
}

/* One error with both sides: all who made my call, and all who made theirs. The smaller side is
 * blamed. */
static void disagree(ms_local *local, const ms_comm_args *args, const ms_ledger_slot *theirs)
{
    const ms_group *group = args->group;
    const ms_ledger_slot *mine = ms_ledger_slot_of(local, args, group->rank);
    uint32_t sides[2][MS_LOCAL_RANKS_MAX], counts[2] = { 0, 0 };
    await_witnesses(local, args);
    for (uint32_t m = 0; m < group->size; m++) {
        const ms_ledger_slot *slot = ms_ledger_slot_of(local, args, m);
        if (atomic_load(&slot->seq) != args->number) continue;
        if (ms_ledger_agree(slot, mine)) sides[0][counts[0]++] = group->members[m];
        else if (ms_ledger_agree(slot, theirs)) sides[1][counts[1]++] = group->members[m];
    }
    char text[MS_ERROR_MESSAGE_BYTES];
    size_t used = (size_t)snprintf(text, sizeof text, "ranks disagree in call #%llu of %s:",
                                   (unsigned long long)args->number, group->name);
    bool mine_first = sides[0][0] < sides[1][0];
    for (int side = 0; side < 2; side++) {
        int which = mine_first ? side : 1 - side;
        used += describe_side(text + used, sizeof text - used, sides[which], counts[which],
                              which ? theirs : mine, mine->order != theirs->order);
    }
    int blamed = counts[1] < counts[0] || (counts[0] == counts[1] && mine_first) ? 1 : 0;
    ms_rendezvous_abort(local->rendezvous, MS_ABORT_MISMATCH, (int32_t)sides[blamed][0], text);
}

void ms_ledger_gone(ms_local *local, const ms_comm_args *args, uint32_t other, uint64_t calls,
                    const ms_ledger_slot *last)
{
    char text[MS_ERROR_MESSAGE_BYTES], what[256];
    ms_ledger_slot mine;
    ms_ledger_write(local, args, &mine);
    int used;
    if (last)
        used = snprintf(text, sizeof text, "rank %u left after %s", other,
                        ms_flight_describe(&last->call, what, sizeof what));
    else
        used = snprintf(text, sizeof text, "rank %u left after %llu calls of this group", other,
                        (unsigned long long)calls);
    snprintf(text + used, sizeof text - (size_t)used,
             ", while rank %u waits for it at %s: every rank must make the same calls", local->rank,
             ms_flight_describe(&mine.call, what, sizeof what));
    ms_rendezvous_abort(local->rendezvous, MS_ABORT_LEFT, (int32_t)other, text);
}

void ms_ledger_ended(ms_local *local, const ms_comm_args *args, uint32_t other, bool begun)
{
    char text[MS_ERROR_MESSAGE_BYTES], what[256];
    ms_ledger_slot mine;
    ms_ledger_write(local, args, &mine);
    snprintf(text, sizeof text,
             "rank %u ended %s %s, which it had enqueued, while rank %u waits for it there: call "
             "ms.synchronize() before os.exit, or return from the script",
             other, begun ? "in the middle of" : "before its part of",
             ms_flight_describe(&mine.call, what, sizeof what), local->rank);
    ms_rendezvous_abort(local->rendezvous, MS_ABORT_LEFT, (int32_t)other, text);
}

/* number: the first call there that this rank has not made. The other's task waits in it, or soon
 * will, if what comes before goes well. */
static void wrong_order(ms_local *local, const ms_comm_args *args, uint32_t other,
                        const ms_group *group, uint32_t channel, uint64_t number,
                        uint32_t other_member)
{
    char text[MS_ERROR_MESSAGE_BYTES], what[256];
    const ms_os *os = local->rendezvous->os;
    ms_member_line *line = ms_member(local->rendezvous, group->id, channel, other_member);
    const ms_ledger_slot *mine = ms_ledger_slot_of(local, args, args->group->rank),
                         *theirs = &line->slots[number & 1];
    await_entry(local, other, line, number, os->monotonic_ns(os->user));
    int used =
        snprintf(text, sizeof text,
                 "ranks call in a different order:\n  rank %u: %s, which rank %u had not called "
                 "when it called\n  rank %u: ",
                 local->rank, ms_flight_describe(&mine->call, what, sizeof what), other, other);
    if (atomic_load(&theirs->seq) == number)
        snprintf(text + used, sizeof text - (size_t)used, "%s",
                 ms_flight_describe(&theirs->call, what, sizeof what));
    else
        snprintf(text + used, sizeof text - (size_t)used, "call #%llu of %s, channel %s",
                 (unsigned long long)number, group->name, ms_channel_name(channel + 1));
    ms_rendezvous_abort(local->rendezvous, MS_ABORT_MISMATCH, (int32_t)other, text);
}

/* Whether `other` has called something that this rank has not, before what this rank waits for:
 * then they differ in order, and none would ever go on. What the other has issued there is read
 * first, what it has issued here second: so it issued the one without the other. */
static bool check_order(ms_local *local, const ms_comm_args *args, uint32_t other, uint32_t member)
{
    const ms_comm *comm = local->comm;
    uint32_t groups = atomic_load(&comm->group_count);
    for (uint32_t g = 0; g < groups; g++) {
        const ms_group *group = comm->groups[g];
        uint32_t at = ms_ledger_member(group, other);
        for (uint32_t channel = 0; channel < MS_CHANNELS && at < group->size; channel++) {
            uint64_t theirs =
                atomic_load(&ms_member(local->rendezvous, group->id, channel, at)->issued);
            if (atomic_load(&line_of(local, args, member)->issued) >= args->number) return false;
            uint64_t mine =
                atomic_load(&ms_member(local->rendezvous, group->id, channel, group->rank)->issued);
            if (theirs <= mine) continue;
            wrong_order(local, args, other, group, channel, mine + 1, at);
            return true;
        }
    }
    return false;
}

/* ----------------------------------------------------------------- entering */

static bool all_entered(ms_wait *wait)
{
    const ms_group *group = wait->args->group;
    for (; wait->cursor < group->size; wait->cursor++) {
        const ms_ledger_slot *slot = ms_ledger_slot_of(wait->local, wait->args, wait->cursor);
        if (atomic_load(&slot->seq) < wait->target) return false;
        if (ms_ledger_agree(slot, ms_ledger_slot_of(wait->local, wait->args, group->rank)))
            continue;
        disagree(wait->local, wait->args, slot);
        return false;
    }
    return true;
}

/* The missing rank has called something else, which may never begin: it can depend on a result that
 * this rank's call would have to give. */
static void compare_unbegun(ms_local *local, const ms_comm_args *args, uint32_t other,
                            ms_member_line *line)
{
    const ms_os *os = local->rendezvous->os;
    uint64_t theirs = atomic_load(&line->calls[args->number % MS_CALLS_AHEAD]);
    if (theirs == ms_ledger_hash(args)
        || atomic_load(&line->issuing) - args->number >= MS_CALLS_AHEAD)
        return;
    /* If it does begin, it can be shown. */
    if (await_entry(local, other, line, args->number, os->monotonic_ns(os->user))
        || ms_local_aborted(local))
        return;
    const ms_ledger_slot *waiting = waits_in(local, other);
    char text[MS_ERROR_MESSAGE_BYTES], mine[256],
        what[256] = "another call, which waits for results before it";
    if (waiting) ms_flight_describe(&waiting->call, what, sizeof what);
    snprintf(text, sizeof text, "ranks disagree in call #%llu of %s:\n  rank %u: %s\n  rank %u: %s",
             (unsigned long long)args->number, args->group->name, local->rank,
             ms_flight_describe(&ms_ledger_slot_of(local, args, args->group->rank)->call, mine,
                                sizeof mine),
             other, what);
    ms_rendezvous_abort(local->rendezvous, MS_ABORT_MISMATCH, (int32_t)other, text);
}

/* The missing rank may have finished, or have called something else or in another order. */
static void look_for_the_missing(ms_wait *wait)
{
    ms_local *local = wait->local;
    const ms_comm_args *args = wait->args;
    if (wait->cursor >= args->group->size) return;
    uint32_t other = args->group->members[wait->cursor];
    ms_member_line *line = line_of(local, args, wait->cursor);
    bool finished = atomic_load(&local->control->lines[other].finished) != 0,
         gone = atomic_load(&local->control->lines[other].gone) != 0;
    uint64_t issued = atomic_load(&line->issued),
             entered = atomic_load(&line->slots[args->number & 1].seq);
    if (issued >= args->number) {
        if (!gone) compare_unbegun(local, args, other, line);
        else if (entered < args->number) ms_ledger_ended(local, args, other, false);
        return;
    }
    const ms_ledger_slot *last = &line->slots[issued & 1];
    if (check_order(local, args, other, wait->cursor) || !finished) return;
    ms_ledger_gone(local, args, other, issued,
                   issued && atomic_load(&last->seq) == issued ? last : NULL);
}

static uint32_t missing_member(ms_wait *wait)
{
    const ms_group *group = wait->args->group;
    return group->members[wait->cursor < group->size ? wait->cursor : group->rank];
}

bool ms_ledger_enter(ms_local *local, const ms_comm_args *args)
{
    ms_ledger_slot *slot = &line_of(local, args, args->group->rank)->slots[args->number & 1];
    if (ms_local_aborted(local)) return false;
    ms_ledger_write(local, args, slot);
    args->group->channels[args->channel].flight = ms_ledger_flight(local, &slot->call);
    atomic_store(&slot->seq, args->number);
    wake_members(local, args->group);
    ms_wait wait = { .reached = all_entered,
                     .hopeless = look_for_the_missing,
                     .missing = missing_member,
                     .local = local,
                     .args = args,
                     .target = args->number };
    return ms_local_wait(&wait);
}

/* ------------------------------------------------------------------- phases */

static bool all_in_phase(ms_wait *wait)
{
    for (; wait->cursor < wait->args->group->size; wait->cursor++)
        if (atomic_load(&line_of(wait->local, wait->args, wait->cursor)->phase) < wait->target)
            return false;
    return true;
}

/* A rank inside the collective comes, unless its process has ended. */
static void look_for_ended(ms_wait *wait)
{
    const ms_group *group = wait->args->group;
    if (wait->cursor >= group->size) return;
    uint32_t other = group->members[wait->cursor];
    /* After its end nothing of it changes: so that is read first. */
    bool gone = atomic_load(&wait->local->control->lines[other].gone) != 0;
    if (gone && atomic_load(&line_of(wait->local, wait->args, wait->cursor)->phase) < wait->target)
        ms_ledger_ended(wait->local, wait->args, other, true);
}

bool ms_ledger_phase(ms_local *local, const ms_comm_args *args, uint64_t phases)
{
    const ms_group *group = args->group;
    uint64_t target = group->channels[args->channel].phase + phases;
    atomic_store(&line_of(local, args, group->rank)->phase, target);
    wake_members(local, group);
    ms_wait wait = { .reached = all_in_phase,
                     .hopeless = look_for_ended,
                     .missing = missing_member,
                     .local = local,
                     .args = args,
                     .target = target };
    return ms_local_wait(&wait);
}

bool ms_ledger_leave(ms_local *local, const ms_comm_args *args, uint64_t phases)
{
    ms_channel *channel = &args->group->channels[args->channel];
    bool left = ms_ledger_phase(local, args, phases);
    channel->phase += phases;
    if (left) ms_ledger_landed(local, channel->flight);
    return left;
}
