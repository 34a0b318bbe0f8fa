/* reduce.h: a unit's gradients: their memory during its backward, and their reduction to shards. */
#ifndef MOONSHARD_FSDP_REDUCE_H
#define MOONSHARD_FSDP_REDUCE_H

#include "fsdp/state.h"

/* Before a unit's backward, with pieces as handles: saves gradients of earlier passes. */
ms_status ms_unit_hold_gradients(ms_unit *unit);
/* With whole parameters as handles: memory for the unit's gradients, which backward then writes. */
ms_status ms_unit_expect_gradients(ms_unit *unit);
/* The gradient of a member was added up: it goes to its place, if it is not there. */
ms_status ms_member_collect(ms_member *member);
/* Backward writes the unit's gradients no more. Handles become pieces. */
ms_status ms_unit_detach_gradients(ms_unit *unit);
/* Instead of a reduction: gradients of earlier passes, which were saved, are the pieces' again.
 */
ms_status ms_unit_restore_gradients(ms_unit *unit);
/* Enqueues the reduction of what was detached. The pieces' gradients are then the reduced ones.
 * index, is_last: its place among the reductions of the pass. */
ms_status ms_flat_param_reduce(ms_flat_param *flat, uint32_t index, bool is_last);

/* Before ms_pass_reduce, of a unit that had no backward: its gradients are zeros, or what passes
 * without synchronization have left. marked: those of other ranks are multiplied by a loss scale.
 */
ms_status ms_unit_prepare_reduction(ms_unit *unit, bool scaled);
/* Whether earlier passes have left gradients that no reduction between all ranks has taken. */
bool ms_unit_has_leftover(const ms_unit *unit);

#endif
