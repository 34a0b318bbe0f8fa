/* pass.h: a forward and backward of a sharded model as a whole: begin, end, order of reductions. */
#ifndef MOONSHARD_FSDP_PASS_H
#define MOONSHARD_FSDP_PASS_H

#include "fsdp/state.h"

/* An error inside of a pass ends the job: the other ranks would wait for this one's collectives.
 * Returns status. */
ms_status ms_fsdp_end_job(ms_fsdp *fsdp, ms_status status);
/* Around each forward of a unit. */
ms_status ms_pass_enter_forward(ms_unit *unit);
ms_status ms_pass_leave_forward(ms_fsdp *fsdp);
/* Whether uses count as hits or misses now: those in backward, and, where something is gathered
 * ahead in forward, all of a pass. */
bool ms_pass_counts(const ms_fsdp *fsdp);
/* Before a unit's backward; before fsdp->now.in_backward becomes true. */
ms_status ms_pass_enter_backward(ms_unit *unit);
/* What was enqueued for a unit's backward that begins, or for one to come: whether there was
 * anything to gather. */
void ms_pass_note_gather(ms_unit *unit, bool any);
void ms_pass_note_prefetch(ms_unit *unit, bool any);
/* A unit that is held back is launched now: its gradients are about to be saved again. */
ms_status ms_pass_let_go(ms_unit *unit);
/* After a unit's backward: whether its gradients may be reduced now. Otherwise they stay whole, as
 * without synchronization, until backward ends. */
bool ms_pass_may_reduce(ms_unit *unit);
/* Its reductions are launched, now or later in this pass. */
ms_status ms_pass_reduce(ms_unit *unit);
/* After backward: the current stream waits for the results of this pass, if it reduces. */
ms_status ms_pass_end(ms_fsdp *fsdp);
void ms_pass_give_up(ms_fsdp *fsdp);

#endif
