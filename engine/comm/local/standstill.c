/* standstill.c: how ranks find out that all of them wait for each other, so that nothing will ever go on: which calls stand in the way needs no rule.
 *
 * A rank stands still while its host blocks, and each of its streams is empty, stands at another one or runs a task that waits for a peer in vain. Its tasks that
 * wait look around in rounds, in each of which all of them have looked; a rank that was still at the end of two rounds, with nothing enqueued, done or waited
 * for anew in between (moves), did nothing in between. What is waited for never goes away once it is there.
 *
 * So, when all ranks were still at a moment (seen), and each of them stays still, without a move, for rounds that begin behind it, then at that moment nobody did anything
 * and nobody had anything to do: what they wait for could only come from each other. Three rounds: at the moment, a task may have looked for the next
 * round already, and may be about to for the one behind it.
 *
 * A rank whose host is busy with something else, whose link paces it, who is stopped or has not joined makes no rounds, and is waited for as ever.
 */
#include <stdio.h>

#include "comm/local/control.h"

#define MS_STILL_ROUNDS 3
#define MS_TELL_NS 20000000            /* who has been still for so long lets the others look around at once, a few times: short waits disturb nobody */
#define MS_TELLS 8

static uint32_t rounds_of(uint64_t still) { return (uint32_t)still; }

static void lock(ms_standstill *s)
{
    uint32_t open = 0;
    while (!atomic_compare_exchange_weak(&s->lock, &open, 1)) {
        open = 0;
        ms_yield();
    }
}

static void unlock(ms_standstill *s) { atomic_store(&s->lock, 0); }

static bool has_left(const ms_control *control, uint32_t rank) { return atomic_load(&control->lines[rank].phase) == MS_RANK_LEFT; }

/* ------------------------------------------------------------------------------------------------------------------------- verdict */

/* The calls in which a rank stands: those of its flight record that it has entered and not left. Returns how long the text is, or would be. */
static size_t describe(const ms_local *local, uint32_t rank, char *text, size_t bytes)
{
    char call[256];
    ms_flight flight;
    const char *between = "";
    uint64_t flights = atomic_load(&local->control->lines[rank].flights);
    bool left = has_left(local->control, rank);
    size_t used = (size_t)snprintf(text, bytes, "\n  rank %u: %s", rank, left ? "has left" : "");
    for (uint64_t i = flights < MS_FLIGHTS ? 0 : flights - MS_FLIGHTS; i < flights && used < bytes && !left; i++) {
        if (!ms_rendezvous_flight(local->rendezvous, rank, i, &flight) || flight.left_ns) continue;
        used += (size_t)snprintf(text + used, bytes - used, "%s%s", between, ms_flight_describe(&flight, call, sizeof call));
        between = "; ";
    }
    return used;
}

static void end_job(const ms_local *local)
{
    char text[MS_ERROR_MESSAGE_BYTES];
    size_t used = (size_t)snprintf(text, sizeof text, "the ranks wait for each other, and none can go on; a call that others wait for is missing, or comes behind a wait:");
    for (uint32_t r = 0; r < local->control->ranks && used < sizeof text; r++) used += describe(local, r, text + used, sizeof text - used);
    ms_rendezvous_abort(local->rendezvous, MS_ABORT_MISMATCH, -1, text);
}

/* Ranks that have left will not move either. */
static bool all_still(const ms_local *local, uint64_t *still)
{
    for (uint32_t r = 0; r < local->control->ranks; r++) {
        still[r] = atomic_load(&local->control->lines[r].still);
        if (!still[r] && !has_left(local->control, r)) return false;
    }
    return true;
}

/* Whether each rank is still as it was when seen was taken, since MS_STILL_ROUNDS rounds. */
static bool judge(const ms_local *local, const uint64_t *seen, bool *same)
{
    bool over = *same = true;
    for (uint32_t r = 0; r < local->control->ranks && *same; r++) {
        if (has_left(local->control, r)) continue;
        uint64_t still = atomic_load(&local->control->lines[r].still);
        *same = seen[r] >> 32 == still >> 32 && still;
        over &= rounds_of(still) >= rounds_of(seen[r]) + MS_STILL_ROUNDS;
    }
    return over && *same;
}

/* -------------------------------------------------------------------------------------------------------------------------- rounds */

static void tell_others(ms_local *local)
{
    for (uint32_t r = 0; r < local->control->ranks; r++)
        if (r != local->rank) ms_local_wake(local, r);
}

static void move(ms_local *local)
{
    atomic_store(&local->control->lines[local->rank].still, 0);
    local->standstill.watching = false;
}

static void end_round(ms_local *local)
{
    ms_standstill *s = &local->standstill;
    _Atomic uint64_t *still = &local->control->lines[local->rank].still;
    uint64_t moves = s->begun;
    bool is_still = ms_engine_is_still(local->comm->engine, s->waiting, &moves), as_before = moves == s->moves;
    s->looked = 0;
    s->round++;
    s->moves = moves;
    if (!is_still) {
        move(local);
        return;
    }
    uint64_t so_far = atomic_load(still);
    if (so_far && as_before) atomic_store(still, so_far + (rounds_of(so_far) < UINT32_MAX));
    else {
        atomic_store(still, ++s->times << 32 | 1);
        s->since_ns = ms_local_now(local);
        s->tells = 0;
    }
    if (s->tells < MS_TELLS && ms_local_now(local) - s->since_ns >= MS_TELL_NS) {
        s->tells++;
        tell_others(local);
    }
    bool same = true;
    if (!s->watching) s->watching = all_still(local, s->seen);
    else if (judge(local, s->seen, &same)) end_job(local);
    s->watching &= same;
}

void ms_standstill_begin(ms_local *local, ms_wait *wait)
{
    ms_standstill *s = &local->standstill;
    lock(s);
    s->waiting++;
    s->begun++;
    wait->looked = s->round;
    unlock(s);
}

void ms_standstill_look(ms_local *local, ms_wait *wait)
{
    ms_standstill *s = &local->standstill;
    lock(s);
    if (wait->looked == s->round) {
        wait->looked++;
        s->looked++;
    }
    if (s->looked == s->waiting) end_round(local);
    unlock(s);
}

void ms_standstill_end(ms_local *local, ms_wait *wait)
{
    ms_standstill *s = &local->standstill;
    lock(s);
    s->waiting--;
    if (wait->looked > s->round) s->looked--;
    move(local);
    unlock(s);
}
