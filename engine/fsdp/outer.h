/* outer.h: gradients of uses outside of units. */
#ifndef MOONSHARD_FSDP_OUTER_H
#define MOONSHARD_FSDP_OUTER_H

#include "fsdp/state.h"

/* Takes over a gradient of the piece, or of an unsharded parameter, from a use outside of its unit.
 */
ms_status ms_outer_take(ms_member *member, ms_tensor *gradient);
/* Before a reduction, and on the communication stream after one: those that wait are added. */
ms_status ms_outer_add_before(ms_flat_param *flat);
ms_status ms_outer_add_after(ms_flat_param *flat);
/* Whether another reduction must take some of them. */
bool ms_outer_is_left(const ms_flat_param *flat);
/* At the end of a backward: the rest becomes, or is added to, the gradients of pieces. */
ms_status ms_outer_end(ms_fsdp *fsdp);

#endif
