/* deadlock.c: deadlock detection over hosts: how the keepers find out that all ranks wait for each
 * other. comm/control/shm/deadlock.c says how a rank finds that it is still.
 *
 * The first keeper asks all hosts twice. First, whether each of their ranks is still; each keeper
 * notes `still` of its ranks as it answers. When all have said yes, it asks whether they have
 * stayed so. A keeper answers that when each of its ranks has gone through MS_STILL_ROUNDS rounds
 * without a move since the second question came. Call T the moment when the last answer to the
 * first question came. All ranks were still at T, since they were still before and after it without
 * a move, and all have looked in vain after T.
 *
 * A message may be under way at T, though, that ends a wait. It belongs to a call that its sender
 * has entered. A call that all of its members have entered goes on by itself, so a rank that waits
 * in such a call says that there is no deadlock. Without one, every call in which a rank waits
 * lacks a member, which is still: no message can end it. So the second answer says in which calls
 * ranks stand, and how many calls of each channel members have entered. */
#include "comm/control/cluster/deadlock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/control/cluster/peers.h"
#include "comm/control/shm/bell.h"
#include "comm/control/shm/job_end.h"

#define MS_STILL_ROUNDS 3
#define MS_STILL_PAUSE_NS ((uint64_t)200000000) /* between two attempts */

/* ------------------------------------------------------------- of this host */

/* Streams of a rank that has left have ended: it waits for nothing. */
static bool has_left(const ms_keeper *keeper, uint32_t rank)
{
    return atomic_load(&keeper->control->lines[rank].phase) == MS_RANK_LEFT
           || atomic_load(&keeper->control->lines[rank].gone);
}

/* Whether all ranks of this host are still; `still` of each in seen, 0 of those that have left. */
static bool all_still(const ms_keeper *keeper, uint64_t *seen)
{
    for (uint32_t r = 0; r < keeper->ranks; r++) {
        if (!ms_host_is_here(keeper->control, r)) continue;
        seen[r] = has_left(keeper, r) ? 0 : atomic_load(&keeper->control->lines[r].still);
        if (!seen[r] && !has_left(keeper, r)) return false;
    }
    return true;
}

/* Whether no rank of this host has moved since; the fewest rounds that one of them has had. */
static bool stay_still(const ms_keeper *keeper, const uint64_t *seen, uint32_t *rounds)
{
    *rounds = UINT32_MAX;
    for (uint32_t r = 0; r < keeper->ranks; r++) {
        if (!ms_host_is_here(keeper->control, r) || !seen[r]) continue;
        uint64_t still = atomic_load(&keeper->control->lines[r].still);
        if (!still || still >> 32 != seen[r] >> 32 || has_left(keeper, r)) return false;
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
static bool add_stands(const ms_keeper *keeper, uint32_t rank, answer *to)
{
    uint64_t flights = atomic_load(&keeper->control->lines[rank].flights);
    for (uint64_t i = flights < MS_FLIGHTS ? 0 : flights - MS_FLIGHTS; i < flights; i++) {
        ms_stand stand = { .rank = rank };
        if (ms_host_flight(keeper->files, rank, i, &stand.call) && !stand.call.left_ns
            && !add(to, &stand, sizeof stand, &to->head.stands))
            return false;
    }
    return true;
}

/* The number of the last call in a pair of slots. */
static uint64_t last_of(const ms_ledger_slot *slots)
{
    uint64_t a = atomic_load(&slots[0].seq), b = atomic_load(&slots[1].seq);
    return a > b ? a : b;
}

/* How far each rank is in each number of a group, as far as this host knows: copies of what others
 * have entered are never ahead of them. */
static bool add_marks(const ms_keeper *keeper, answer *to)
{
    uint32_t groups = atomic_load(&keeper->control->groups);
    for (uint32_t g = 0; g < groups && g < MS_GROUPS_MAX; g++)
        for (uint32_t c = 0; c < MS_CHANNELS; c++)
            for (uint32_t m = 0; m < keeper->ranks; m++) {
                ms_mark mark = { .kind = MS_MARK_MEMBER, .group = g, .channel = c, .member = m };
                mark.entered = last_of(ms_member(keeper->files, g, c, m)->slots);
                if (mark.entered && !add(to, &mark, sizeof mark, &to->head.marks)) return false;
            }
    for (uint32_t a = 0; a < keeper->ranks; a++)
        for (uint32_t b = 0; b < keeper->ranks; b++) {
            const ms_pair_line *line = ms_pair(keeper->files, a, b);
            ms_mark sent = { .kind = MS_MARK_SENT, .channel = a, .member = b },
                    received = { .kind = MS_MARK_RECEIVED, .channel = a, .member = b };
            sent.entered = last_of(line->sent);
            received.entered = last_of(line->received);
            if (sent.entered && !add(to, &sent, sizeof sent, &to->head.marks)) return false;
            if (received.entered && !add(to, &received, sizeof received, &to->head.marks))
                return false;
        }
    return true;
}

/* The answer goes to the first keeper, which is perhaps this one. An answer that does not fit says
 * that something moves. */
static void reply(ms_keeper *keeper, bool waits, bool with_places)
{
    answer *full = NULL;
    void *memory = NULL;
    keeper->still.asked = false;
    if (ms_allocate(keeper->context, sizeof *full, "deadlock detection", &memory)) return;
    full = memory;
    full->head.round = keeper->still.question.round;
    full->head.stage = keeper->still.question.stage;
    full->head.waits = waits;
    if (waits && with_places) {
        bool fits = true;
        for (uint32_t r = 0; r < keeper->ranks && fits; r++)
            if (ms_host_is_here(keeper->control, r) && !has_left(keeper, r))
                fits = add_stands(keeper, r, full);
        if (!fits || !add_marks(keeper, full))
            full->head.waits = full->head.stands = full->head.marks = full->bytes = 0;
    }
    if (keeper->host == 0) ms_keeper_answered(keeper, 0, &full->head);
    else
        ms_keeper_send_parts(keeper, 0, keeper->host, MS_FRAME_SEEN, &full->head, sizeof full->head,
                             full->data, full->bytes);
    ms_release(keeper->context, memory);
}

/* The first question is answered at once. */
void ms_keeper_asked(ms_keeper *keeper, const ms_look_body *question)
{
    ms_still_watch *watch = &keeper->still;
    watch->asked = true;
    watch->question = *question;
    if (question->stage == 1) reply(keeper, all_still(keeper, watch->seen), false);
    else {
        uint64_t now[MS_LOCAL_RANKS_MAX];
        uint32_t rounds;
        /* Rounds count from this question on. */
        if (stay_still(keeper, watch->seen, &rounds) && all_still(keeper, now))
            memcpy(watch->seen, now, sizeof now);
        else reply(keeper, false, false);
    }
}

/* ----------------------------------------------------------- the first keeper */

/* How many members have entered this call. */
static uint32_t members_in(const ms_still_watch *watch, const ms_flight *call)
{
    uint64_t entered[MS_LOCAL_RANKS_MAX] = { 0 };
    uint32_t count = 0;
    for (uint32_t i = 0; i < watch->mark_count; i++) {
        const ms_mark *mark = &watch->marks[i];
        if (mark->kind == MS_MARK_MEMBER && mark->group == call->group
            && mark->channel == call->channel && mark->member < MS_LOCAL_RANKS_MAX
            && mark->entered > entered[mark->member])
            entered[mark->member] = mark->entered;
    }
    for (uint32_t m = 0; m < MS_LOCAL_RANKS_MAX; m++) count += entered[m] >= call->number;
    return count;
}

/* Whether the other side of a send or receive of this rank with this number is there, too. */
static bool pair_is_complete(const ms_still_watch *watch, const ms_stand *stand)
{
    bool sends = stand->call.kind == MS_SEND;
    for (uint32_t i = 0; i < watch->mark_count; i++) {
        const ms_mark *mark = &watch->marks[i];
        if (mark->kind == (sends ? MS_MARK_RECEIVED : MS_MARK_SENT)
            && (sends ? mark->channel : mark->member) == stand->rank
            && mark->entered >= stand->call.number)
            return true;
    }
    return false;
}

/* Whether a rank waits in a call that goes on by itself, or none waits at all: then all have left.
 */
static bool something_moves(const ms_still_watch *watch)
{
    if (!watch->stand_count) return true;
    for (uint32_t i = 0; i < watch->stand_count; i++) {
        const ms_stand *stand = &watch->stands[i];
        if (ms_kind_is_pair(stand->call.kind) ? pair_is_complete(watch, stand)
                                              : members_in(watch, &stand->call) >= stand->call.size)
            return true;
    }
    return false;
}

/* Every rank may be innocent, so none is blamed (-1). */
static void end_job(const ms_keeper *keeper)
{
    const ms_still_watch *watch = &keeper->still;
    char text[MS_ERROR_MESSAGE_BYTES], call[256];
    size_t used = (size_t)snprintf(text, sizeof text,
                                   "the ranks wait for each other, and none can go on; a call that "
                                   "others wait for is missing, or comes after a wait:");
    for (uint32_t r = 0; r < keeper->ranks && used < sizeof text; r++) {
        const char *between = "";
        const ms_control_file *control = keeper->control;
        used += (size_t)snprintf(text + used, sizeof text - used, "\n  rank %u on host %s: %s", r,
                                 control->host_names[control->host_of[r]],
                                 has_left(keeper, r) ? "has left" : "");
        for (uint32_t i = 0; i < watch->stand_count && used < sizeof text; i++) {
            if (watch->stands[i].rank != r) continue;
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", between,
                                     ms_flight_describe(&watch->stands[i].call, call, sizeof call));
            between = "; ";
        }
    }
    ms_host_end_job(keeper->files, MS_ABORT_MISMATCH, -1, text);
}

/* A list of the first keeper's, longer by `more` entries; false: no memory. */
static bool extend(const ms_keeper *keeper, void **list, uint32_t count, uint32_t *room,
                   uint32_t more, size_t size)
{
    const ms_os *os = keeper->os;
    if (count + more <= *room) return true;
    void *longer = os->reallocate(os->user, *list, (size_t)(count + more) * size);
    if (!longer) return false;
    *list = longer;
    *room = count + more;
    return true;
}

/* The places that came with an answer to the second question. */
static bool collect(ms_keeper *keeper, const ms_seen_body *seen)
{
    ms_still_watch *watch = &keeper->still;
    void *stands = watch->stands, *marks = watch->marks;
    bool fits = extend(keeper, &stands, watch->stand_count, &watch->stand_room, seen->stands,
                       sizeof(ms_stand));
    watch->stands = stands;
    fits = fits
           && extend(keeper, &marks, watch->mark_count, &watch->mark_room, seen->marks,
                     sizeof(ms_mark));
    watch->marks = marks;
    if (!fits) return false;
    const ms_stand *first = (const ms_stand *)(const void *)(seen + 1);
    if (seen->stands)
        memcpy(watch->stands + watch->stand_count, first, seen->stands * sizeof *first);
    if (seen->marks)
        memcpy(watch->marks + watch->mark_count, first + seen->stands,
               seen->marks * sizeof(ms_mark));
    watch->stand_count += seen->stands;
    watch->mark_count += seen->marks;
    return true;
}

/* Asks all hosts, this one last: its own answer comes at once. */
static void ask(ms_keeper *keeper, uint32_t stage)
{
    ms_still_watch *watch = &keeper->still;
    ms_look_body question = { .round = watch->round, .stage = stage };
    watch->stage = stage;
    watch->missing = keeper->hosts;
    watch->moving = false;
    watch->stand_count = watch->mark_count = 0;
    memset(watch->answered, 0, sizeof watch->answered);
    ms_keeper_spread(keeper, 0, MS_FRAME_LOOK, &question, sizeof question);
    ms_keeper_asked(keeper, &question);
}

/* This attempt is over; the next one comes after a pause. */
static void give_up(ms_keeper *keeper)
{
    keeper->still.stage = 0;
    keeper->still.not_before_ns = ms_keeper_now(keeper) + MS_STILL_PAUSE_NS;
}

/* Answers to older questions are passed over. */
bool ms_keeper_answered(ms_keeper *keeper, uint32_t origin, const ms_seen_body *seen)
{
    ms_still_watch *watch = &keeper->still;
    if (seen->round != watch->round || seen->stage != watch->stage || watch->answered[origin])
        return true;
    watch->answered[origin] = true;
    watch->moving |= !seen->waits;
    if (seen->stage == 2 && seen->waits && !collect(keeper, seen)) watch->moving = true;
    if (--watch->missing) return true;
    if (watch->moving) give_up(keeper);
    else if (watch->stage == 1) ask(keeper, 2);
    else if (something_moves(watch)) give_up(keeper);
    else {
        watch->stage = 0;
        end_job(keeper);
    }
    return true;
}

/* Called at each look. Each keeper answers the second question once its ranks have had their
 * rounds. The first keeper begins an attempt when its own ranks are still. */
void ms_keeper_watch(ms_keeper *keeper)
{
    ms_still_watch *watch = &keeper->still;
    uint64_t now[MS_LOCAL_RANKS_MAX];
    uint32_t rounds;
    /* Ranks of one host find it themselves. */
    if (keeper->hosts == 1 || ms_host_ended(keeper->control)) return;
    if (watch->asked && watch->question.stage == 2) {
        if (!stay_still(keeper, watch->seen, &rounds)) reply(keeper, false, false);
        else if (rounds >= MS_STILL_ROUNDS) reply(keeper, true, true);
    } else if (keeper->host == 0 && !watch->stage && ms_keeper_now(keeper) >= watch->not_before_ns
               && all_still(keeper, now)) {
        watch->round++;
        ask(keeper, 1);
    }
}
