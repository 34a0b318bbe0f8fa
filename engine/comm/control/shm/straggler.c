/* straggler.c: a warning about a rank for which others wait unusually long, long before they give
 * up. */
#include "comm/control/shm/straggler.h"

#include <stdio.h>
#include <string.h>

#include "comm/control/shm/call_record.h"

#define MS_PATIENCE_NS ((uint64_t)5 * 1000000000)
#define MS_PATIENCE_STEPS 10

/* The limit is ten steps as long as the median of the last few, but not less than 5 s. The median
 * is not moved by one slow step (a checkpoint). Runs on the host thread; waiting tasks read the
 * limit relaxed, since a limit that is one step old does no harm. The list has 15 numbers, so
 * sorting by insertion is cheap enough for every step. */
void ms_straggler_step(ms_shm_rank *self, uint64_t now)
{
    uint64_t sorted[MS_STEPS_TIMED];
    uint32_t timed =
        self->steps_timed < MS_STEPS_TIMED ? (uint32_t)self->steps_timed : MS_STEPS_TIMED;
    /* The first step has no beginning to measure from. */
    if (self->step_began_ns) {
        self->step_ns[self->steps_timed++ % MS_STEPS_TIMED] = now - self->step_began_ns;
        if (timed < MS_STEPS_TIMED) timed++;
    }
    self->step_began_ns = now;
    for (uint32_t i = 0; i < timed; i++) {
        uint32_t at = i;
        for (; at > 0 && sorted[at - 1] > self->step_ns[i]; at--) sorted[at] = sorted[at - 1];
        sorted[at] = self->step_ns[i];
    }
    uint64_t steps = timed ? MS_PATIENCE_STEPS * sorted[timed / 2] : 0;
    atomic_store_explicit(&self->patience_ns, steps > MS_PATIENCE_NS ? steps : MS_PATIENCE_NS,
                          memory_order_relaxed);
}

/* Where the missing rank is, as far as this rank can see. The call that it entered before stays in
 * its slot as long as this rank waits. The slots are read without a check of their seq afterwards:
 * it is a hint in a warning. */
static void locate(const ms_shm_rank *self, const ms_comm_args *args, uint32_t missing, char *text,
                   size_t bytes)
{
    char call[256];
    const ms_group *group = args->group;
    int64_t step = atomic_load(&self->control->lines[missing].step) - 1;
    int used = step >= 0 ? snprintf(text, bytes, "; it is at step %lld", (long long)step)
                         : snprintf(text, bytes, "; it has begun no step");
    /* The slots below are of a group's members; sends and receives have lines of their own. */
    if (ms_kind_is_pair(args->kind)) return;
    ms_member_line *line = ms_member(self->files, group->id, args->channel, missing);
    const ms_ledger_entry *here = &line->slots[args->number & 1],
                          *before = &line->slots[(args->number - 1) & 1];
    const char *where = " and has not called it";
    if (atomic_load(&here->seq) == args->number) where = " and has entered it";
    else if (atomic_load(&line->issued) >= args->number)
        where = " and has called it, but its stream is not there yet";
    used += snprintf(text + used, bytes - (size_t)used, "%s", where);
    if (args->number > 1 && atomic_load(&here->seq) != args->number
        && atomic_load(&before->seq) == args->number - 1)
        snprintf(text + used, bytes - (size_t)used, "; before, it was in %s",
                 ms_flight_describe(&before->call, call, sizeof call));
}

/* `warned` holds the missing rank's progress at the last warning, so a rank that has moved since
 * may be warned of again. */
void ms_straggler_warn(ms_shm_rank *self, const ms_comm_args *args, uint32_t missing,
                       uint64_t progress, uint64_t waited_ns, uint64_t limit_ns)
{
    char call[256], where[400];
    ms_rank_line *line = &self->control->lines[missing];
    uint64_t warned = atomic_load(&line->warned);
    /* Many ranks may wait for it: one of them warns. */
    if (warned == progress + 1
        || !atomic_compare_exchange_strong(&line->warned, &warned, progress + 1))
        return;
    ms_ledger_entry mine;
    ms_ledger_write(self, args, &mine);
    locate(self, args, missing, where, sizeof where);
    ms_log(ms_engine_context(self->comm->engine), MS_LOG_WARN,
           "rank %u has waited %.1f s for rank %u in %s, and gives up after %.0f s%s", self->rank,
           (double)waited_ns / 1e9, missing, ms_flight_describe(&mine.call, call, sizeof call),
           (double)limit_ns / 1e9, where);
}
