/* schedule.h: in which order a pass uses units, and what is gathered ahead at each use. */
#ifndef MOONSHARD_FSDP_SCHEDULE_H
#define MOONSHARD_FSDP_SCHEDULE_H

#include "fsdp/state.h"

/* Around a pass, or an evaluation; and giving up all of them. */
void ms_schedule_begin(ms_fsdp *fsdp, ms_schedule_kind kind);
ms_status ms_schedule_end(ms_fsdp *fsdp, ms_schedule_kind kind);
void ms_schedule_give_up(ms_fsdp *fsdp);
/* Entries for the modes that follow the recorded order. */
ms_status ms_schedule_fill(ms_fsdp *fsdp, ms_schedule *schedule);
void ms_schedule_free(ms_schedule *schedule, ms_context *context);
/* A use begins; its gathers ahead, once its own gather is enqueued; and it has ended, and the unit
 * is resharded if it is to be. */
ms_status ms_schedule_enter(ms_unit *unit, bool backward);
ms_status ms_schedule_gather(ms_unit *unit, bool backward);
ms_status ms_schedule_leave(ms_unit *unit, bool backward);
/* Whether a planner's entries say what is gathered ahead now. */
bool ms_schedule_is_planned(const ms_fsdp *fsdp);

#endif
