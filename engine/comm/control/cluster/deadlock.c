/* deadlock.c: deadlock detection over nodes: how the agents find out that all ranks wait for each
 * other. comm/control/shm/deadlock.c says how a rank finds that it is still.
 *
 * The first agent asks all nodes twice. First, whether each of their ranks is still; each agent
 * notes `still` of its ranks as it answers. When all have said yes, it asks whether they have
 * stayed so. An agent answers that when each of its ranks has gone through MS_STILL_ROUNDS rounds
 * without a move since the second question came. Call T the moment when the last answer to the
 * first question came. All ranks were still at T, since they were still before and after it without
 * a move, and all have looked in vain after T.
 *
 * A message may be under way at T, though, that ends a wait. It belongs to a call that its sender
 * has entered. A call that all of its members have entered goes on by itself, so a rank that waits
 * in such a call says that there is no deadlock. Without one, every call in which a rank waits
 * lacks a member, which is still: no message can end it. So the second answer says in which calls
 * ranks are, and how many calls of each channel members have entered. */
#include "comm/control/cluster/deadlock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/control/cluster/peers.h"
#include "comm/control/shm/bell.h"
#include "comm/control/shm/job_end.h"

#define MS_STILL_ROUNDS 3
#define MS_STILL_PAUSE_NS ((uint64_t)200000000) /* between two attempts */

/* ------------------------------------------------------------- of this node */

/* Streams of a rank that has left have ended: it waits for nothing. */
static bool has_left(const ms_agent *agent, uint32_t rank)
{
    return atomic_load(&agent->control->lines[rank].phase) == MS_RANK_LEFT
           || atomic_load(&agent->control->lines[rank].gone);
}

/* Whether all ranks of this node are still; `still` of each in seen, 0 of those that have left. */
static bool all_still(const ms_agent *agent, uint64_t *seen)
{
    for (uint32_t r = 0; r < agent->ranks; r++) {
        if (!ms_shm_is_here(agent->control, r)) continue;
        seen[r] = has_left(agent, r) ? 0 : atomic_load(&agent->control->lines[r].still);
        if (!seen[r] && !has_left(agent, r)) return false;
    }
    return true;
}

/* Whether no rank of this node has moved since; the fewest rounds that one of them has had. */
static bool stay_still(const ms_agent *agent, const uint64_t *seen, uint32_t *rounds)
{
    *rounds = UINT32_MAX;
    for (uint32_t r = 0; r < agent->ranks; r++) {
        if (!ms_shm_is_here(agent->control, r) || !seen[r]) continue;
        uint64_t still = atomic_load(&agent->control->lines[r].still);
        if (!still || still >> 32 != seen[r] >> 32 || has_left(agent, r)) return false;
        if ((uint32_t)still - (uint32_t)seen[r] < *rounds)
            *rounds = (uint32_t)still - (uint32_t)seen[r];
    }
    return true;
}

/* ------------------------------------------------------------------- answers */

/* A body that grows up to what a frame carries. An answer that does not fit says that a rank moves:
 * a deadlock is then found by the time limit only, and none is reported where there is none. */
typedef struct answer {
    size_t bytes; /* of data */
    ms_seen_body head;
    char data[MS_FRAME_BODY_MOST - sizeof(ms_seen_body)];
} answer;

_Static_assert(offsetof(answer, data) == offsetof(answer, head) + sizeof(ms_seen_body),
               "head and data are one body");

/* false: there is no more room. */
static bool add(answer *to, const void *entry, size_t bytes, uint32_t *count)
{
    if (bytes > sizeof to->data - to->bytes) return false;
    memcpy(to->data + to->bytes, entry, bytes);
    to->bytes += bytes;
    ++*count;
    return true;
}

/* Calls that a rank has entered and not left. */
static bool add_calls(const ms_agent *agent, uint32_t rank, answer *to)
{
    uint64_t flights = atomic_load(&agent->control->lines[rank].flights);
    for (uint64_t i = flights < MS_FLIGHTS ? 0 : flights - MS_FLIGHTS; i < flights; i++) {
        ms_rank_in_call in_call = { .rank = rank };
        if (ms_shm_flight(agent->files, rank, i, &in_call.call) && !in_call.call.left_ns
            && !add(to, &in_call, sizeof in_call, &to->head.calls))
            return false;
    }
    return true;
}

/* The number of the last call in a pair of slots. */
static uint64_t last_of(const ms_ledger_entry *slots)
{
    uint64_t a = atomic_load(&slots[0].seq), b = atomic_load(&slots[1].seq);
    return a > b ? a : b;
}

/* How far each rank is in each number of a group, as far as this node knows: copies of what others
 * have entered are never ahead of them. */
static bool add_marks(const ms_agent *agent, answer *to)
{
    uint32_t groups = atomic_load(&agent->control->groups);
    for (uint32_t g = 0; g < groups && g < MS_GROUPS_MAX; g++)
        for (uint32_t c = 0; c < MS_CHANNELS; c++)
            for (uint32_t m = 0; m < agent->ranks; m++) {
                ms_call_count count = {
                    .kind = MS_CALL_COUNT_MEMBER, .group = g, .channel = c, .member = m
                };
                count.entered = last_of(ms_member(agent->files, g, c, m)->slots);
                if (count.entered && !add(to, &count, sizeof count, &to->head.counts)) return false;
            }
    for (uint32_t a = 0; a < agent->ranks; a++)
        for (uint32_t b = 0; b < agent->ranks; b++) {
            const ms_pair_line *line = ms_pair(agent->files, a, b);
            ms_call_count sent = { .kind = MS_CALL_COUNT_SENT, .channel = a, .member = b },
                          received = { .kind = MS_CALL_COUNT_RECEIVED, .channel = a, .member = b };
            sent.entered = last_of(line->sent);
            received.entered = last_of(line->received);
            if (sent.entered && !add(to, &sent, sizeof sent, &to->head.counts)) return false;
            if (received.entered && !add(to, &received, sizeof received, &to->head.counts))
                return false;
        }
    return true;
}

/* The answer goes to the first agent, which is perhaps this one. An answer that does not fit says
 * that something moves. */
static void reply(ms_agent *agent, bool waits, bool with_places)
{
    answer *full = NULL;
    void *memory = NULL;
    agent->still.asked = false;
    if (ms_allocate(agent->context, sizeof *full, "deadlock detection", &memory)) return;
    full = memory;
    full->head.round = agent->still.question.round;
    full->head.stage = agent->still.question.stage;
    full->head.waits = waits;
    if (waits && with_places) {
        bool fits = true;
        for (uint32_t r = 0; r < agent->ranks && fits; r++)
            if (ms_shm_is_here(agent->control, r) && !has_left(agent, r))
                fits = add_calls(agent, r, full);
        if (!fits || !add_marks(agent, full))
            full->head.waits = full->head.calls = full->head.counts = full->bytes = 0;
    }
    if (agent->node == 0) ms_agent_answered(agent, 0, &full->head);
    else
        ms_agent_send_parts(agent, 0, agent->node, MS_FRAME_SEEN, &full->head, sizeof full->head,
                            full->data, full->bytes);
    ms_release(agent->context, memory);
}

/* The first question is answered at once. */
void ms_agent_asked(ms_agent *agent, const ms_look_body *question)
{
    ms_deadlock_rounds *watch = &agent->still;
    watch->asked = true;
    watch->question = *question;
    if (question->stage == 1) reply(agent, all_still(agent, watch->seen), false);
    else {
        uint64_t now[MS_LOCAL_RANKS_MAX];
        uint32_t rounds;
        /* Rounds count from this question on. */
        if (stay_still(agent, watch->seen, &rounds) && all_still(agent, now))
            memcpy(watch->seen, now, sizeof now);
        else reply(agent, false, false);
    }
}

/* ----------------------------------------------------------- the first agent */

/* How many members have entered this call. */
static uint32_t members_in(const ms_deadlock_rounds *watch, const ms_flight *call)
{
    uint64_t entered[MS_LOCAL_RANKS_MAX] = { 0 };
    uint32_t count = 0;
    for (uint32_t i = 0; i < watch->counts_used; i++) {
        const ms_call_count *entry = &watch->counts[i];
        if (entry->kind == MS_CALL_COUNT_MEMBER && entry->group == call->group
            && entry->channel == call->channel && entry->member < MS_LOCAL_RANKS_MAX
            && entry->entered > entered[entry->member])
            entered[entry->member] = entry->entered;
    }
    for (uint32_t m = 0; m < MS_LOCAL_RANKS_MAX; m++) count += entered[m] >= call->number;
    return count;
}

/* Whether the other side of a send or receive of this rank with this number is there, too. */
static bool pair_is_complete(const ms_deadlock_rounds *watch, const ms_rank_in_call *in_call)
{
    bool sends = in_call->call.kind == MS_SEND;
    for (uint32_t i = 0; i < watch->counts_used; i++) {
        const ms_call_count *count = &watch->counts[i];
        if (count->kind == (sends ? MS_CALL_COUNT_RECEIVED : MS_CALL_COUNT_SENT)
            && (sends ? count->channel : count->member) == in_call->rank
            && count->entered >= in_call->call.number)
            return true;
    }
    return false;
}

/* Whether a rank waits in a call that goes on by itself, or none waits at all: then all have left.
 */
static bool something_moves(const ms_deadlock_rounds *watch)
{
    if (!watch->calls_used) return true;
    for (uint32_t i = 0; i < watch->calls_used; i++) {
        const ms_rank_in_call *in_call = &watch->calls[i];
        if (ms_kind_is_pair(in_call->call.kind)
                ? pair_is_complete(watch, in_call)
                : members_in(watch, &in_call->call) >= in_call->call.size)
            return true;
    }
    return false;
}

/* Every rank may be innocent, so none is blamed (-1). */
static void end_job(const ms_agent *agent)
{
    const ms_deadlock_rounds *watch = &agent->still;
    char text[MS_ERROR_MESSAGE_BYTES], call[256];
    size_t used = (size_t)snprintf(text, sizeof text,
                                   "the ranks wait for each other, and none can go on; a call that "
                                   "others wait for is missing, or comes after a wait:");
    for (uint32_t r = 0; r < agent->ranks && used < sizeof text; r++) {
        const char *between = "";
        const ms_control_file *control = agent->control;
        used += (size_t)snprintf(text + used, sizeof text - used, "\n  rank %u on host %s: %s", r,
                                 control->node_names[control->node_of[r]],
                                 has_left(agent, r) ? "has left" : "");
        for (uint32_t i = 0; i < watch->calls_used && used < sizeof text; i++) {
            if (watch->calls[i].rank != r) continue;
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", between,
                                     ms_flight_describe(&watch->calls[i].call, call, sizeof call));
            between = "; ";
        }
    }
    ms_shm_end_job(agent->files, MS_ABORT_MISMATCH, -1, text);
}

/* A list of the first agent's, longer by `more` entries; false: no memory. */
static bool extend(const ms_agent *agent, void **list, uint32_t count, uint32_t *room,
                   uint32_t more, size_t size)
{
    const ms_os *os = agent->os;
    if (count + more <= *room) return true;
    void *longer = os->reallocate(os->user, *list, (size_t)(count + more) * size);
    if (!longer) return false;
    *list = longer;
    *room = count + more;
    return true;
}

/* The places that came with an answer to the second question. */
static bool collect(ms_agent *agent, const ms_seen_body *seen)
{
    ms_deadlock_rounds *watch = &agent->still;
    void *calls = watch->calls, *counts = watch->counts;
    bool fits = extend(agent, &calls, watch->calls_used, &watch->calls_capacity, seen->calls,
                       sizeof(ms_rank_in_call));
    watch->calls = calls;
    fits = fits
           && extend(agent, &counts, watch->counts_used, &watch->counts_capacity, seen->counts,
                     sizeof(ms_call_count));
    watch->counts = counts;
    if (!fits) return false;
    const ms_rank_in_call *first = (const ms_rank_in_call *)(const void *)(seen + 1);
    if (seen->calls) memcpy(watch->calls + watch->calls_used, first, seen->calls * sizeof *first);
    if (seen->counts)
        memcpy(watch->counts + watch->counts_used, first + seen->calls,
               seen->counts * sizeof(ms_call_count));
    watch->calls_used += seen->calls;
    watch->counts_used += seen->counts;
    return true;
}

/* Asks all nodes, this one last: its own answer comes at once. */
static void ask(ms_agent *agent, uint32_t stage)
{
    ms_deadlock_rounds *watch = &agent->still;
    ms_look_body question = { .round = watch->round, .stage = stage };
    watch->stage = stage;
    watch->missing = agent->nodes;
    watch->moving = false;
    watch->calls_used = watch->counts_used = 0;
    memset(watch->answered, 0, sizeof watch->answered);
    ms_agent_spread(agent, 0, MS_FRAME_LOOK, &question, sizeof question);
    ms_agent_asked(agent, &question);
}

/* This attempt is over; the next one comes after a pause. */
static void give_up(ms_agent *agent)
{
    agent->still.stage = 0;
    agent->still.not_before_ns = ms_agent_now(agent) + MS_STILL_PAUSE_NS;
}

/* Answers to older questions are passed over. */
bool ms_agent_answered(ms_agent *agent, uint32_t origin, const ms_seen_body *seen)
{
    ms_deadlock_rounds *watch = &agent->still;
    if (seen->round != watch->round || seen->stage != watch->stage || watch->answered[origin])
        return true;
    watch->answered[origin] = true;
    watch->moving |= !seen->waits;
    if (seen->stage == 2 && seen->waits && !collect(agent, seen)) watch->moving = true;
    if (--watch->missing) return true;
    if (watch->moving) give_up(agent);
    else if (watch->stage == 1) ask(agent, 2);
    else if (something_moves(watch)) give_up(agent);
    else {
        watch->stage = 0;
        end_job(agent);
    }
    return true;
}

/* Called at each look. Each agent answers the second question once its ranks have had their
 * rounds. The first agent begins an attempt when its own ranks are still. */
void ms_agent_watch(ms_agent *agent)
{
    ms_deadlock_rounds *watch = &agent->still;
    uint64_t now[MS_LOCAL_RANKS_MAX];
    uint32_t rounds;
    /* Ranks of one node find it themselves. */
    if (agent->nodes == 1 || ms_shm_ended(agent->control)) return;
    if (watch->asked && watch->question.stage == 2) {
        if (!stay_still(agent, watch->seen, &rounds)) reply(agent, false, false);
        else if (rounds >= MS_STILL_ROUNDS) reply(agent, true, true);
    } else if (agent->node == 0 && !watch->stage && ms_agent_now(agent) >= watch->not_before_ns
               && all_still(agent, now)) {
        watch->round++;
        ask(agent, 1);
    }
}
