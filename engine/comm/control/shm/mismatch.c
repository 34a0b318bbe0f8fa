/* mismatch.c: what a rank reports when calls do not fit together: who differs, who has left, who
 * calls in another order. */
#include "comm/control/shm/mismatch.h"

#include <stdio.h>
#include <string.h>

#include "comm/control/shm/bell.h"
#include "comm/control/shm/job_end.h"
#include "comm/control/shm/call_record.h"
#include "comm/control/shm/wait.h"

/* How long a report waits for the call of another rank that it needs. */
#define MS_WITNESS_NS 500000000
#define MS_ELSEWHERE_NS 20000000 /* the same where it seems to be elsewhere */
#define MS_NAP_NS 1000000

const char *ms_rank_name(const ms_shm_rank *self, uint32_t rank, char text[MS_RANK_NAME_BYTES])
{
    const ms_control_file *control = self->control;
    if (control->nodes > 1)
        snprintf(text, MS_RANK_NAME_BYTES, "%u on host %s", rank,
                 control->node_names[control->node_of[rank]]);
    else snprintf(text, MS_RANK_NAME_BYTES, "%u", rank);
    return text;
}

/* What differs between two calls and is not in their description. */
typedef struct hidden {
    bool order; /* the place of the call among all calls around it */
    bool graph;
} hidden;

/* "rank 2" or "ranks 0, 1, 3", and the call. */
static size_t describe_side(char *text, size_t bytes, const ms_shm_rank *self,
                            const uint32_t *ranks, uint32_t count, const ms_ledger_entry *slot,
                            hidden differs)
{
    char what[256], name[MS_RANK_NAME_BYTES];
    int used = snprintf(text, bytes, "\n  rank%s", count > 1 ? "s" : "");
    for (uint32_t i = 0; i < count && (size_t)used < bytes; i++)
        used += snprintf(text + used, bytes - (size_t)used, "%s %s", i ? "," : "",
                         ms_rank_name(self, ranks[i], name));
    if ((size_t)used < bytes)
        used += snprintf(text + used, bytes - (size_t)used, ": %s",
                         ms_flight_describe(&slot->call, what, sizeof what));
    if (differs.order && (size_t)used < bytes)
        used += snprintf(text + used, bytes - (size_t)used,
                         ", as call %llu of this group and those around it",
                         (unsigned long long)slot->order + 1);
    if (differs.graph && (size_t)used < bytes)
        used += slot->graph ? snprintf(text + used, bytes - (size_t)used, ", as graph %llu",
                                       (unsigned long long)slot->graph)
                            : snprintf(text + used, bytes - (size_t)used, ", not as a graph");
    return (size_t)used < bytes ? (size_t)used : bytes;
}

/* Whether the other rank is in this group of the job, too. */
static bool is_shared(const ms_comm *comm, const ms_group *group, uint32_t other)
{
    return group && group->control == comm->control && ms_ledger_member(group, other) < group->size;
}

/* A call in which another rank waits, and which this rank has not made, or NULL. The other rank
 * cannot leave the call, so its slot stays. It is found by its number: one that this rank has not
 * issued, and that the other has entered. */
static const ms_ledger_entry *waits_in(ms_shm_rank *self, uint32_t other)
{
    ms_comm *comm = self->comm;
    const ms_ledger_entry *found = NULL;
    ms_groups_read(comm);
    uint32_t groups = atomic_load(&comm->group_count);
    for (uint32_t g = 0; g < groups && !found; g++) {
        const ms_group *group = comm->groups[g];
        bool has_both = is_shared(comm, group, other);
        for (uint32_t channel = 0; channel < MS_CHANNELS && has_both && !found; channel++) {
            uint64_t next = ms_ledger_issued(self, group, channel, self->rank) + 1;
            const ms_ledger_entry *slot =
                &ms_member(self->files, group->id, channel, other)->slots[next & 1];
            if (atomic_load(&slot->seq) == next) found = slot;
        }
    }
    ms_groups_read_end(comm);
    return found;
}

/* The side of a rank whose call cannot be shown. */
static size_t describe_unseen(char *text, size_t bytes, ms_shm_rank *self, uint32_t other)
{
    const ms_ledger_entry *waiting = waits_in(self, other);
    char what[256] = "another call, which waits for results before it", name[MS_RANK_NAME_BYTES];
    if (waiting) ms_flight_describe(&waiting->call, what, sizeof what);
    int used = snprintf(text, bytes, "\n  rank %s: %s", ms_rank_name(self, other, name), what);
    return (size_t)used < bytes ? (size_t)used : bytes;
}

/* Waits a moment for `other` to make this call, so that a report can show it: hosts enqueue ahead
 * of their streams, so the call is often on its way. The moment is shorter where the rank has
 * finished or waits in another call, or is on another node while no task of this rank takes its
 * header messages. False: there is nothing to show. begun_ns is shared by several calls of one
 * report, so that all of them together wait for one moment. helper: may be NULL. */
static bool await_call(ms_shm_rank *self, uint32_t other, ms_member_line *line, uint64_t number,
                       uint64_t begun_ns, ms_helper *helper, ms_ledger_entry *out)
{
    const ms_os *os = self->files->base.os;
    while (!ms_ledger_call(line, number, out)) {
        uint64_t waited = os->monotonic_ns(os->user) - begun_ns;
        if (ms_shm_aborted(self) || waited >= MS_WITNESS_NS) return false;
        /* A host that has finished issues nothing more. */
        bool ends_before = atomic_load(&self->control->lines[other].finished)
                           && atomic_load(&line->issued) < number;
        bool is_far = !helper && !ms_shm_is_here(self->control, other);
        if (waited >= MS_ELSEWHERE_NS && (is_far || ends_before || waits_in(self, other)))
            return false;
        ms_shm_nap(self, MS_NAP_NS);
        if (helper) helper->turn(helper);
    }
    return true;
}

/* Who made which of two calls: side 0 this rank's, side 1 the other. The ranks of each side are in
 * order of the group. */
typedef struct call_sides {
    uint32_t ranks[2][MS_LOCAL_RANKS_MAX], counts[2];
} call_sides;

/* Waits a moment for all members, so that a rank that differs from many is found to be the one that
 * differs. The moment is short, since a member may never come. */
static void take_sides(ms_shm_rank *self, const ms_comm_args *args, uint32_t member,
                       const ms_ledger_entry calls[2], ms_helper *helper, call_sides *out)
{
    const ms_group *group = args->group;
    const ms_os *os = self->files->base.os;
    uint64_t begun = os->monotonic_ns(os->user);
    for (uint32_t m = 0; m < group->size; m++) {
        ms_ledger_entry slot = { .value = 0 };
        bool known = await_call(self, group->members[m], ms_ledger_line(self, args, m),
                                args->number, begun, helper, &slot);
        int side =
            m != group->rank && (m == member || (known && !ms_ledger_agree(&slot, &calls[0])));
        if (m == group->rank || m == member || (known && ms_ledger_agree(&slot, &calls[side])))
            out->ranks[side][out->counts[side]++] = group->members[m];
    }
}

/* What may be the reason, by the lines of the script that have called. */
static void describe_causes(char *text, size_t bytes, const ms_ledger_entry calls[2], bool shown)
{
    const char *line = calls[0].call.script;
    if (shown && *line && strcmp(line, calls[1].call.script) == 0)
        snprintf(
            text, bytes,
            "\nBoth calls are at %.64s. If it is in a loop of pairs, its order differs between "
            "ranks: that of ms.sorted_pairs does not",
            line);
    else
        snprintf(
            text, bytes,
            "\nUsual causes: a call that not all ranks make (under if rank == 0), or calls in a "
            "loop of pairs, whose order differs (ms.sorted_pairs has one order)");
}

/* The smaller side is blamed; of equal ones, the one without rank 0, or the higher rank. shown: the
 * fields of the other side's call are known. Both sides are shown in one error, because each user
 * sees the output of one rank. */
static void report_sides(ms_shm_rank *self, const ms_comm_args *args,
                         const ms_ledger_entry calls[2], const call_sides *sides, bool shown)
{
    char text[MS_ERROR_MESSAGE_BYTES];
    size_t used = (size_t)snprintf(text, sizeof text, "ranks disagree in call #%llu of %s:",
                                   (unsigned long long)args->number, args->group->name);
    /* The side with the lowest rank is shown first, so all ranks write the same text. */
    bool mine_first = sides->ranks[0][0] < sides->ranks[1][0];
    hidden differs = { .order = shown && calls[0].order != calls[1].order,
                       .graph = shown && calls[0].graph != calls[1].graph };
    for (int side = 0; side < 2; side++) {
        int which = mine_first ? side : 1 - side;
        const uint32_t *ranks = sides->ranks[which];
        if (which && !shown)
            used += describe_unseen(text + used, sizeof text - used, self, ranks[0]);
        else
            used += describe_side(text + used, sizeof text - used, self, ranks,
                                  sides->counts[which], &calls[which], differs);
    }
    if (differs.graph && !differs.order && used < sizeof text)
        snprintf(text + used, sizeof text - used,
                 "\nWith graph = true ranks make the same calls with the same "
                 "memory; " MS_COMM_GRAPHS_VARIABLE "=off launches each call by itself");
    else if (used < sizeof text) describe_causes(text + used, sizeof text - used, calls, shown);
    bool equal = sides->counts[0] == sides->counts[1];
    int blamed = equal ? mine_first : sides->counts[1] < sides->counts[0];
    ms_shm_end_job(self->files, MS_ABORT_MISMATCH, (int32_t)sides->ranks[blamed][0], text);
}

/* A member's call that cannot be shown depends on a result that this rank's call would have to
 * give. */
void ms_ledger_disagree(ms_shm_rank *self, const ms_comm_args *args, uint32_t member,
                        ms_helper *helper)
{
    const ms_os *os = self->files->base.os;
    ms_ledger_entry calls[2] = { { .value = 0 }, { .value = 0 } };
    call_sides sides = { .counts = { 0, 0 } };
    ms_ledger_write(self, args, &calls[0]);
    bool shown = await_call(self, args->group->members[member], ms_ledger_line(self, args, member),
                            args->number, os->monotonic_ns(os->user), helper, &calls[1]);
    /* Another rank has reported meanwhile. */
    if (ms_shm_aborted(self)) return;
    take_sides(self, args, member, calls, helper, &sides);
    report_sides(self, args, calls, &sides, shown);
}

/* Pairs have no majority: the error names both sides, and the peer as the rank at fault. `theirs`
 * may be NULL: the ring of published fields is short. */
void ms_ledger_disagree_pair(ms_shm_rank *self, const ms_comm_args *args,
                             const ms_ledger_entry *theirs)
{
    char text[MS_ERROR_MESSAGE_BYTES], a[256], b[256] = "another call",
                                               names[2][MS_RANK_NAME_BYTES];
    uint32_t other = args->group->members[args->root];
    ms_ledger_entry mine;
    ms_ledger_write(self, args, &mine);
    if (theirs) ms_flight_describe(&theirs->call, b, sizeof b);
    snprintf(text, sizeof text, "ranks disagree:\n  rank %s: %s to or from rank %u\n  rank %s: %s",
             ms_rank_name(self, self->rank, names[0]), ms_flight_describe(&mine.call, a, sizeof a),
             other, ms_rank_name(self, other, names[1]), b);
    ms_shm_end_job(self->files, MS_ABORT_MISMATCH, (int32_t)other, text);
}

/* The peer's script ended before the call that this rank waits for. `last` shows what it did last,
 * if its slot still holds it. */
void ms_ledger_gone(ms_shm_rank *self, const ms_comm_args *args, uint32_t other, uint64_t calls,
                    const ms_ledger_entry *last)
{
    char text[MS_ERROR_MESSAGE_BYTES], what[256], name[MS_RANK_NAME_BYTES];
    ms_ledger_entry mine;
    ms_ledger_write(self, args, &mine);
    int used;
    if (last)
        used = snprintf(text, sizeof text, "rank %s left after %s", ms_rank_name(self, other, name),
                        ms_flight_describe(&last->call, what, sizeof what));
    else
        used = snprintf(text, sizeof text, "rank %s left after %llu calls of this group",
                        ms_rank_name(self, other, name), (unsigned long long)calls);
    snprintf(text + used, sizeof text - (size_t)used,
             ", while rank %s waits for it at %s: every rank must make the same calls",
             ms_rank_name(self, self->rank, name),
             ms_flight_describe(&mine.call, what, sizeof what));
    ms_shm_end_job(self->files, MS_ABORT_LEFT, (int32_t)other, text);
}

/* The peer's host had enqueued the call, but its process ended before its stream got there. */
void ms_ledger_ended(ms_shm_rank *self, const ms_comm_args *args, uint32_t other, bool begun)
{
    char text[MS_ERROR_MESSAGE_BYTES], what[256], name[MS_RANK_NAME_BYTES];
    ms_ledger_entry mine;
    ms_ledger_write(self, args, &mine);
    snprintf(text, sizeof text,
             "rank %s ended %s %s, which it had enqueued, while rank %u waits for it there: call "
             "ms.synchronize() before os.exit, or return from the script",
             ms_rank_name(self, other, name), begun ? "in the middle of" : "before its part of",
             ms_flight_describe(&mine.call, what, sizeof what), self->rank);
    ms_shm_end_job(self->files, MS_ABORT_LEFT, (int32_t)other, text);
}

/* number: the first call of that group and channel that this rank has not made. This is the
 * deadlock of two ranks that issue two collectives in opposite orders, found without a time limit.
 */
static void wrong_order(ms_shm_rank *self, const ms_comm_args *args, uint32_t other,
                        const ms_group *group, uint32_t channel, uint64_t number)
{
    char text[MS_ERROR_MESSAGE_BYTES], what[256], names[2][MS_RANK_NAME_BYTES];
    const ms_os *os = self->files->base.os;
    ms_member_line *line = ms_member(self->files, group->id, channel, other);
    ms_ledger_entry mine, theirs;
    ms_ledger_write(self, args, &mine);
    int used = snprintf(
        text, sizeof text,
        "ranks call in a different order:\n  rank %s: %s, which rank %u had not called "
        "when it called\n  rank %s: ",
        ms_rank_name(self, self->rank, names[0]), ms_flight_describe(&mine.call, what, sizeof what),
        other, ms_rank_name(self, other, names[1]));
    if (await_call(self, other, line, number, os->monotonic_ns(os->user), NULL, &theirs))
        snprintf(text + used, sizeof text - (size_t)used, "%s",
                 ms_flight_describe(&theirs.call, what, sizeof what));
    else
        snprintf(text + used, sizeof text - (size_t)used, "call #%llu of %s, channel %s",
                 (unsigned long long)number, group->name, ms_channel_name(channel + 1));
    ms_shm_end_job(self->files, MS_ABORT_MISMATCH, (int32_t)other, text);
}

/* Whether the other rank has issued a call that this rank has not, in any group and channel of
 * both, before the call that this rank waits for. Then the ranks differ in order, and neither can
 * go on. The calls that the other has issued there are read first, those here second: so it had
 * issued that call before the awaited one. It looks at all groups that both are in, so it runs only
 * while a rank sleeps. */
bool ms_ledger_check_order(ms_shm_rank *self, const ms_comm_args *args, uint32_t other,
                           uint32_t member)
{
    ms_comm *comm = self->comm;
    bool differs = false, has_come = false;
    ms_groups_read(comm);
    uint32_t groups = atomic_load(&comm->group_count);
    for (uint32_t g = 0; g < groups && !differs && !has_come; g++) {
        const ms_group *group = comm->groups[g];
        bool has_both = is_shared(comm, group, other);
        for (uint32_t channel = 0; channel < MS_CHANNELS && has_both && !differs && !has_come;
             channel++) {
            uint64_t theirs = ms_ledger_issued(self, group, channel, other);
            has_come = atomic_load(&ms_ledger_line(self, args, member)->issued) >= args->number;
            uint64_t mine = ms_ledger_issued(self, group, channel, self->rank);
            /* This rank has made all calls of that group that the other has. */
            differs = !has_come && theirs > mine;
            if (differs) wrong_order(self, args, other, group, channel, mine + 1);
        }
    }
    ms_groups_read_end(comm);
    return differs;
}
