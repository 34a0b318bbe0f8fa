/* coordinator.c: what the hosts of a job decide together, the first keeper for all: the cause of
 * its end, between which steps requests are met, numbers of new groups, and who is suspected. */
#include "comm/control/cluster/coordinator.h"

#include <string.h>

#include "comm/control/cluster/deadlock.h"
#include "comm/control/cluster/peers.h"
#include "comm/control/shm/bell.h"
#include "comm/control/shm/ids.h"
#include "comm/control/shm/job_end.h"

/* --------------------------------------------------------------------- cause */

/* The verdict is complete before the word shows it. A host that has no cause yet gets this one, so
 * that its ranks leave; one that has keeps its own record, and reports the verdict. */
static void settle(ms_keeper *keeper, const ms_abort_record *verdict)
{
    ms_control_file *control = keeper->control;
    if (atomic_load(&control->agreed)) return;
    control->verdict = *verdict;
    atomic_store(&control->agreed, 1);
    ms_futex_wake_shared(&control->agreed, UINT32_MAX);
    ms_host_end_job(keeper->files, verdict->reason, verdict->error.rank, verdict->error.message);
}

/* The first keeper: the first cause that it hears of is the job's. */
static void decide_cause(ms_keeper *keeper, const ms_abort_record *cause)
{
    if (keeper->decided) return;
    keeper->decided = true;
    settle(keeper, cause);
    ms_keeper_spread(keeper, 0, MS_FRAME_VERDICT, cause, sizeof *cause);
}

/* This host has a cause: the first keeper must hear of it. */
static void look_for_cause(ms_keeper *keeper)
{
    ms_abort_record cause;
    if (keeper->proposed || !ms_host_own_cause(keeper->files, &cause)) return;
    keeper->proposed = true;
    if (keeper->host == 0) decide_cause(keeper, &cause);
    else ms_keeper_send(keeper, 0, MS_FRAME_CAUSE, &cause, sizeof cause);
    /* The first keeper is lost and sends no verdict, so this host takes its own cause. */
    if (keeper->host != 0 && atomic_load(&keeper->peers[0].gone)) settle(keeper, &cause);
}

/* ------------------------------------------------------------------ requests */

/* The highest serial number that a rank of this host has written. */
static uint64_t highest_serial(const ms_keeper *keeper)
{
    uint64_t highest = 0;
    for (uint32_t r = 0; r < keeper->ranks; r++) {
        uint64_t serial = atomic_load(&keeper->control->lines[r].serial);
        if (ms_host_is_here(keeper->control, r) && serial > highest) highest = serial;
    }
    return highest;
}

/* All hosts know it now: the decision is there before ranks see the request. */
static void obey(ms_keeper *keeper, const ms_request_body *decision)
{
    ms_request_line *line = &keeper->control->requests[decision->kind];
    atomic_store(&line->decided, (uint64_t)decision->count << MS_SERIAL_BITS | (decision->serial));
    atomic_store(&line->raised, decision->count << 8 | decision->value);
    atomic_store(&line->gate, 0);
    ms_host_ring_all(keeper->control);
}

/* The first keeper: an answer has come. After the last one the request is met before the step that
 * no rank of any host had begun when its gate was closed. */
static void count_prepared(ms_keeper *keeper, uint32_t host, const ms_request_body *answer)
{
    ms_pending *pending = &keeper->pending[answer->kind];
    if (!pending->active || pending->prepared[host] || answer->count != pending->count) return;
    pending->prepared[host] = true;
    if (answer->serial > pending->highest) pending->highest = answer->serial;
    if (--pending->missing) return;
    ms_request_body decision = { .kind = answer->kind,
                                 .value = pending->value,
                                 .count = pending->count,
                                 .serial = pending->highest + 1 };
    pending->active = false;
    ms_keeper_spread(keeper, 0, MS_FRAME_DECIDED, &decision, sizeof decision);
    obey(keeper, &decision);
}

/* The gate is closed before the numbers are read: a rank whose number is not seen here sees the
 * gate. */
static void prepare(ms_keeper *keeper, const ms_request_body *request)
{
    ms_request_body answer = *request;
    atomic_store(&keeper->control->requests[request->kind].gate, 1);
    answer.serial = highest_serial(keeper);
    if (keeper->host == 0) count_prepared(keeper, 0, &answer);
    else ms_keeper_send(keeper, 0, MS_FRAME_PREPARED, &answer, sizeof answer);
}

/* Whether all ranks have met the last request of this kind; see ms_host_request. */
static bool all_met(const ms_keeper *keeper, uint32_t kind, uint32_t count)
{
    for (uint32_t r = 0; r < keeper->ranks; r++) {
        const ms_rank_line *line = &keeper->control->lines[r];
        if (atomic_load(&line->met[kind]) != count && !atomic_load(&line->finished)) return false;
    }
    return true;
}

/* The first keeper: a request that comes while one of its kind is pending is dropped. */
static void begin_request(ms_keeper *keeper, const ms_request_body *wish)
{
    ms_pending *pending = &keeper->pending[wish->kind];
    uint32_t count = atomic_load(&keeper->control->requests[wish->kind].raised) >> 8;
    if (pending->active || !all_met(keeper, wish->kind, count)) return;
    *pending = (ms_pending){
        .active = true, .value = wish->value, .count = count + 1, .missing = keeper->hosts
    };
    ms_request_body request = { .kind = wish->kind, .value = wish->value, .count = count + 1 };
    ms_keeper_spread(keeper, 0, MS_FRAME_PREPARE, &request, sizeof request);
    prepare(keeper, &request);
}

/* After the end of the job nothing is requested any more: mpirun's signals when it cleans up must
 * not start a checkpoint. */
static void look_for_requests(ms_keeper *keeper)
{
    for (uint32_t kind = 0; kind < MS_REQUESTS; kind++) {
        uint32_t value = atomic_exchange(&keeper->control->requests[kind].wanted, 0);
        ms_request_body wish = { .kind = kind, .value = value };
        if (!value || ms_host_ended(keeper->control)) continue;
        if (keeper->host == 0) begin_request(keeper, &wish);
        else ms_keeper_send(keeper, 0, MS_FRAME_REQUEST, &wish, sizeof wish);
    }
}

/* ------------------------------------------------------------------- numbers */

/* The rank waits for it. */
static void give_ids(ms_keeper *keeper, uint32_t rank, const ms_ids *ids)
{
    ms_rank_line *line = &keeper->control->lines[rank];
    line->ids_given = *ids;
    atomic_store(&line->ids_answered, 1);
    ms_host_wake_line(line);
}

/* The first keeper: what comes back is free before numbers are taken. */
static ms_ids exchange_ids(ms_keeper *keeper, const ms_ids_body *wish)
{
    ms_ids taken = { { 0 } };
    ms_ids_remove(keeper->control->ids_used, &wish->ids);
    ms_host_take_ids(keeper->control, wish->parts, &taken);
    return taken;
}

/* The first keeper counts for all hosts. */
static void look_for_ids(ms_keeper *keeper)
{
    ms_control_file *control = keeper->control;
    for (uint32_t r = 0; r < keeper->ranks; r++) {
        if (!ms_host_is_here(control, r)) continue;
        ms_rank_line *line = &control->lines[r];
        ms_ids_body wish = { .rank = r, .parts = atomic_exchange(&line->ids_wanted, 0) };
        for (int w = 0; w < MS_GROUPS_MAX / 64; w++)
            wish.ids.words[w] = atomic_exchange(&line->ids_back[w], 0);
        if (!wish.parts && !ms_ids_count(&wish.ids)) continue;
        if (keeper->host > 0) ms_keeper_send(keeper, 0, MS_FRAME_IDS, &wish, sizeof wish);
        else {
            ms_ids taken = exchange_ids(keeper, &wish);
            if (wish.parts) give_ids(keeper, r, &taken);
        }
    }
}

/* ---------------------------------------------------------------- suspicions */

/* The keeper of a rank's host judges it. */
static void take_suspicion(ms_keeper *keeper, const ms_suspect_body *body)
{
    ms_suspicion *suspicion = &keeper->control->lines[body->rank].suspicion;
    uint32_t none = 0, host = keeper->control->host_of[body->rank];
    if (host != keeper->host) {
        ms_keeper_send(keeper, host, MS_FRAME_SUSPECT, body, sizeof *body);
        return;
    }
    if (!atomic_compare_exchange_strong(&suspicion->state, &none, 1)) return;
    suspicion->progress = body->progress;
    memcpy(suspicion->text, body->text, sizeof suspicion->text);
    atomic_store(&suspicion->state, 2);
}

/* Those that ranks of this host have of ranks elsewhere. The place is free again at once: whether
 * the other moves shows in its progress. */
static void look_for_suspicions(ms_keeper *keeper)
{
    for (uint32_t r = 0; r < keeper->ranks; r++) {
        ms_suspicion *suspicion = &keeper->control->lines[r].suspicion;
        ms_suspect_body body = { .rank = r };
        if (ms_host_is_here(keeper->control, r) || atomic_load(&suspicion->state) != 2) continue;
        body.progress = suspicion->progress;
        memcpy(body.text, suspicion->text, sizeof body.text);
        atomic_store(&suspicion->state, 0);
        take_suspicion(keeper, &body);
    }
}

/* ---------------------------------------------------------------------- both */

void ms_keeper_propose(ms_keeper *keeper)
{
    ms_lock_take(&keeper->deciding);
    look_for_cause(keeper);
    ms_lock_give(&keeper->deciding);
}

void ms_keeper_look(ms_keeper *keeper)
{
    ms_lock_take(&keeper->deciding);
    look_for_cause(keeper);
    look_for_requests(keeper);
    look_for_ids(keeper);
    look_for_suspicions(keeper);
    ms_keeper_watch(keeper);
    ms_lock_give(&keeper->deciding);
}

/* Frames that only the first keeper gets, or only the others. */
static bool is_for_me(const ms_keeper *keeper, uint16_t kind)
{
    switch (kind) {
    case MS_FRAME_CAUSE:
    case MS_FRAME_REQUEST:
    case MS_FRAME_PREPARED:
    case MS_FRAME_IDS:
    case MS_FRAME_SEEN: return keeper->host == 0;
    case MS_FRAME_VERDICT:
    case MS_FRAME_PREPARE:
    case MS_FRAME_DECIDED:
    case MS_FRAME_GIVEN:
    case MS_FRAME_LOOK: return keeper->host != 0;
    default: return kind == MS_FRAME_SUSPECT;
    }
}

/* With `deciding` taken. */
static bool agree(ms_keeper *keeper, uint32_t origin, const ms_frame_head *head, const void *body)
{
    const ms_ids_body *ids = body;
    switch (head->kind) {
    case MS_FRAME_CAUSE: decide_cause(keeper, body); return true;
    case MS_FRAME_VERDICT: settle(keeper, body); return true;
    case MS_FRAME_REQUEST: begin_request(keeper, body); return true;
    case MS_FRAME_PREPARE: prepare(keeper, body); return true;
    case MS_FRAME_PREPARED: count_prepared(keeper, origin, body); return true;
    case MS_FRAME_DECIDED: obey(keeper, body); return true;
    case MS_FRAME_IDS: {
        if (ids->rank >= keeper->ranks || ids->parts > MS_GROUPS_MAX) return false;
        ms_ids_body answer = *ids;
        answer.ids = exchange_ids(keeper, ids);
        if (ids->parts) ms_keeper_send(keeper, origin, MS_FRAME_GIVEN, &answer, sizeof answer);
        return true;
    }
    case MS_FRAME_GIVEN:
        if (ids->rank >= keeper->ranks) return false;
        give_ids(keeper, ids->rank, &ids->ids);
        return true;
    case MS_FRAME_SUSPECT:
        if (((const ms_suspect_body *)body)->rank >= keeper->ranks) return false;
        take_suspicion(keeper, body);
        return true;
    case MS_FRAME_LOOK: ms_keeper_asked(keeper, body); return true;
    default: return ms_keeper_answered(keeper, origin, body);
    }
}

/* WELCOME and the like belong to the beginning: later they make no sense. */
bool ms_keeper_agree(ms_keeper *keeper, uint32_t origin, const ms_frame_head *head,
                     const void *body)
{
    if (!is_for_me(keeper, head->kind)) return false;
    ms_lock_take(&keeper->deciding);
    bool right = agree(keeper, origin, head, body);
    ms_lock_give(&keeper->deciding);
    return right;
}
