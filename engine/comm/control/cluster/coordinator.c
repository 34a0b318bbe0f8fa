/* coordinator.c: what the nodes of a job decide together, the first agent for all: the cause of
 * its end, between which steps requests are met, and numbers of new groups. It also passes hang
 * reports to the agent of the rank that they are about, and looks for deadlocks (deadlock.c). */
#include "comm/control/cluster/coordinator.h"

#include <string.h>

#include "comm/control/cluster/deadlock.h"
#include "comm/control/cluster/peers.h"
#include "comm/control/shm/bell.h"
#include "comm/control/shm/ids.h"
#include "comm/control/shm/job_end.h"

/* --------------------------------------------------------------------- cause */

/* The agreed cause is complete before the word shows it. A node that has no cause yet gets this
 * one, so that its ranks leave; one that has keeps its own record, and reports the agreed cause. */
static void settle(ms_agent *agent, const ms_abort_record *agreed_record)
{
    ms_control_file *control = agent->control;
    if (atomic_load(&control->agreed)) return;
    control->agreed_record = *agreed_record;
    atomic_store(&control->agreed, 1);
    ms_futex_wake_shared(&control->agreed, UINT32_MAX);
    ms_shm_end_job(agent->files, agreed_record->reason, agreed_record->error.rank,
                   agreed_record->error.message);
}

/* The first agent: the first cause that it hears of is the job's. */
static void decide_cause(ms_agent *agent, const ms_abort_record *cause)
{
    if (agent->decided) return;
    agent->decided = true;
    settle(agent, cause);
    ms_agent_spread(agent, 0, MS_FRAME_JOB_END, cause, sizeof *cause);
}

/* This node has a cause: the first agent must hear of it. */
static void look_for_cause(ms_agent *agent)
{
    ms_abort_record cause;
    if (agent->proposed || !ms_shm_own_cause(agent->files, &cause)) return;
    agent->proposed = true;
    if (agent->node == 0) decide_cause(agent, &cause);
    else ms_agent_send(agent, 0, MS_FRAME_CAUSE, &cause, sizeof cause);
    /* The first agent is lost and sends no agreed cause, so this node takes its own cause. */
    if (agent->node != 0 && atomic_load(&agent->peers[0].gone)) settle(agent, &cause);
}

/* ------------------------------------------------------------------ requests */

/* The highest serial number that a rank of this node has written. */
static uint64_t highest_serial(const ms_agent *agent)
{
    uint64_t highest = 0;
    for (uint32_t r = 0; r < agent->ranks; r++) {
        uint64_t serial = atomic_load(&agent->control->lines[r].serial);
        if (ms_shm_is_here(agent->control, r) && serial > highest) highest = serial;
    }
    return highest;
}

/* All nodes know it now: the decision is there before ranks see the request. */
static void obey(ms_agent *agent, const ms_request_body *decision)
{
    ms_request_line *line = &agent->control->requests[decision->kind];
    atomic_store(&line->decided, (uint64_t)decision->count << MS_SERIAL_BITS | (decision->serial));
    atomic_store(&line->raised, decision->count << 8 | decision->value);
    atomic_store(&line->gate, 0);
    ms_shm_ring_all(agent->control);
}

/* The first agent: an answer has come. After the last one the request is met before the step that
 * no rank of any node had begun when its gate was closed. */
static void count_prepared(ms_agent *agent, uint32_t node, const ms_request_body *answer)
{
    ms_pending *pending = &agent->pending[answer->kind];
    if (!pending->active || pending->prepared[node] || answer->count != pending->count) return;
    pending->prepared[node] = true;
    if (answer->serial > pending->highest) pending->highest = answer->serial;
    if (--pending->missing) return;
    ms_request_body decision = { .kind = answer->kind,
                                 .value = pending->value,
                                 .count = pending->count,
                                 .serial = pending->highest + 1 };
    pending->active = false;
    ms_agent_spread(agent, 0, MS_FRAME_DECIDED, &decision, sizeof decision);
    obey(agent, &decision);
}

/* The gate is closed before the numbers are read: a rank whose number is not seen here sees the
 * gate. */
static void prepare(ms_agent *agent, const ms_request_body *request)
{
    ms_request_body answer = *request;
    atomic_store(&agent->control->requests[request->kind].gate, 1);
    answer.serial = highest_serial(agent);
    if (agent->node == 0) count_prepared(agent, 0, &answer);
    else ms_agent_send(agent, 0, MS_FRAME_PREPARED, &answer, sizeof answer);
}

/* Whether all ranks have met the last request of this kind; see ms_shm_request. */
static bool all_met(const ms_agent *agent, uint32_t kind, uint32_t count)
{
    for (uint32_t r = 0; r < agent->ranks; r++) {
        const ms_rank_line *line = &agent->control->lines[r];
        if (atomic_load(&line->met[kind]) != count && !atomic_load(&line->finished)) return false;
    }
    return true;
}

/* The first agent: a request that comes while one of its kind is pending is dropped. */
static void begin_request(ms_agent *agent, const ms_request_body *wish)
{
    ms_pending *pending = &agent->pending[wish->kind];
    uint32_t count = atomic_load(&agent->control->requests[wish->kind].raised) >> 8;
    if (pending->active || !all_met(agent, wish->kind, count)) return;
    *pending = (ms_pending){
        .active = true, .value = wish->value, .count = count + 1, .missing = agent->nodes
    };
    ms_request_body request = { .kind = wish->kind, .value = wish->value, .count = count + 1 };
    ms_agent_spread(agent, 0, MS_FRAME_PREPARE, &request, sizeof request);
    prepare(agent, &request);
}

/* After the end of the job nothing is requested any more: mpirun's signals when it cleans up must
 * not start a checkpoint. */
static void look_for_requests(ms_agent *agent)
{
    for (uint32_t kind = 0; kind < MS_REQUESTS; kind++) {
        uint32_t value = atomic_exchange(&agent->control->requests[kind].wanted, 0);
        ms_request_body wish = { .kind = kind, .value = value };
        if (!value || ms_shm_ended(agent->control)) continue;
        if (agent->node == 0) begin_request(agent, &wish);
        else ms_agent_send(agent, 0, MS_FRAME_REQUEST, &wish, sizeof wish);
    }
}

/* ------------------------------------------------------------------- numbers */

/* The rank waits for it. */
static void give_ids(ms_agent *agent, uint32_t rank, const ms_ids *ids)
{
    ms_rank_line *line = &agent->control->lines[rank];
    line->ids_given = *ids;
    atomic_store(&line->ids_answered, 1);
    ms_shm_wake_line(line);
}

/* The first agent: what comes back is free before numbers are taken. */
static ms_ids exchange_ids(ms_agent *agent, const ms_ids_body *wish)
{
    ms_ids taken = { { 0 } };
    ms_ids_remove(agent->control->ids_used, &wish->ids);
    ms_ids_take(agent->control, wish->parts, &taken);
    return taken;
}

/* The first agent counts for all nodes. */
static void look_for_ids(ms_agent *agent)
{
    ms_control_file *control = agent->control;
    for (uint32_t r = 0; r < agent->ranks; r++) {
        if (!ms_shm_is_here(control, r)) continue;
        ms_rank_line *line = &control->lines[r];
        ms_ids_body wish = { .rank = r, .parts = atomic_exchange(&line->ids_wanted, 0) };
        for (int w = 0; w < MS_GROUPS_MAX / 64; w++)
            wish.ids.words[w] = atomic_exchange(&line->ids_back[w], 0);
        if (!wish.parts && !ms_ids_count(&wish.ids)) continue;
        if (agent->node > 0) ms_agent_send(agent, 0, MS_FRAME_IDS, &wish, sizeof wish);
        else {
            ms_ids taken = exchange_ids(agent, &wish);
            if (wish.parts) give_ids(agent, r, &taken);
        }
    }
}

/* ---------------------------------------------------------------- hang reports */

/* The agent of a rank's node judges it. */
static void take_hang_report(ms_agent *agent, const ms_hang_body *body)
{
    ms_hang_report *hang_report = &agent->control->lines[body->rank].hang_report;
    uint32_t none = 0, node = agent->control->node_of[body->rank];
    if (node != agent->node) {
        ms_agent_send(agent, node, MS_FRAME_HANG, body, sizeof *body);
        return;
    }
    if (!atomic_compare_exchange_strong(&hang_report->state, &none, 1)) return;
    hang_report->progress = body->progress;
    memcpy(hang_report->text, body->text, sizeof hang_report->text);
    atomic_store(&hang_report->state, 2);
}

/* Those that ranks of this node have of ranks elsewhere. The place is free again at once: whether
 * the other moves shows in its progress. */
static void look_for_hang_reports(ms_agent *agent)
{
    for (uint32_t r = 0; r < agent->ranks; r++) {
        ms_hang_report *hang_report = &agent->control->lines[r].hang_report;
        ms_hang_body body = { .rank = r };
        if (ms_shm_is_here(agent->control, r) || atomic_load(&hang_report->state) != 2) continue;
        body.progress = hang_report->progress;
        memcpy(body.text, hang_report->text, sizeof body.text);
        atomic_store(&hang_report->state, 0);
        take_hang_report(agent, &body);
    }
}

/* ---------------------------------------------------------------------- both */

void ms_agent_propose(ms_agent *agent)
{
    ms_lock_take(&agent->deciding);
    look_for_cause(agent);
    ms_lock_give(&agent->deciding);
}

void ms_agent_look(ms_agent *agent)
{
    ms_lock_take(&agent->deciding);
    look_for_cause(agent);
    look_for_requests(agent);
    look_for_ids(agent);
    look_for_hang_reports(agent);
    ms_agent_watch(agent);
    ms_lock_give(&agent->deciding);
}

/* Frames that only the first agent gets, or only the others. */
static bool is_for_me(const ms_agent *agent, uint16_t kind)
{
    switch (kind) {
    case MS_FRAME_CAUSE:
    case MS_FRAME_REQUEST:
    case MS_FRAME_PREPARED:
    case MS_FRAME_IDS:
    case MS_FRAME_SEEN: return agent->node == 0;
    case MS_FRAME_JOB_END:
    case MS_FRAME_PREPARE:
    case MS_FRAME_DECIDED:
    case MS_FRAME_GIVEN:
    case MS_FRAME_LOOK: return agent->node != 0;
    default: return kind == MS_FRAME_HANG;
    }
}

/* With `deciding` taken. */
static bool agree(ms_agent *agent, uint32_t origin, const ms_frame_head *head, const void *body)
{
    const ms_ids_body *ids = body;
    switch (head->kind) {
    case MS_FRAME_CAUSE: decide_cause(agent, body); return true;
    case MS_FRAME_JOB_END: settle(agent, body); return true;
    case MS_FRAME_REQUEST: begin_request(agent, body); return true;
    case MS_FRAME_PREPARE: prepare(agent, body); return true;
    case MS_FRAME_PREPARED: count_prepared(agent, origin, body); return true;
    case MS_FRAME_DECIDED: obey(agent, body); return true;
    case MS_FRAME_IDS: {
        if (ids->rank >= agent->ranks || ids->parts > MS_GROUPS_MAX) return false;
        ms_ids_body answer = *ids;
        answer.ids = exchange_ids(agent, ids);
        if (ids->parts) ms_agent_send(agent, origin, MS_FRAME_GIVEN, &answer, sizeof answer);
        return true;
    }
    case MS_FRAME_GIVEN:
        if (ids->rank >= agent->ranks) return false;
        give_ids(agent, ids->rank, &ids->ids);
        return true;
    case MS_FRAME_HANG:
        if (((const ms_hang_body *)body)->rank >= agent->ranks) return false;
        take_hang_report(agent, body);
        return true;
    case MS_FRAME_LOOK: ms_agent_asked(agent, body); return true;
    default: return ms_agent_answered(agent, origin, body);
    }
}

/* WELCOME and the like belong to the beginning: later they make no sense. */
bool ms_agent_agree(ms_agent *agent, uint32_t origin, const ms_frame_head *head, const void *body)
{
    if (!is_for_me(agent, head->kind)) return false;
    ms_lock_take(&agent->deciding);
    bool right = agree(agent, origin, head, body);
    ms_lock_give(&agent->deciding);
    return right;
}
