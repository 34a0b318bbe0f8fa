/* unused.h: parameters that get no gradient in a pass. */
#ifndef MOONSHARD_DDP_UNUSED_H
#define MOONSHARD_DDP_UNUSED_H

#include "ddp/state.h"

ms_status ms_unused_open(ms_reducer *reducer);
void ms_unused_close(ms_reducer *reducer);
/* Fills the bucket's view of a parameter that gets no gradient in this pass: with zeros, or with
 * what passes without synchronization have left. */
ms_status ms_unused_contribute(ms_ddp_parameter *parameter);
/* After all buckets were launched: which parameters were used by any rank, and what becomes of the
 * gradients of the others. */
ms_status ms_unused_settle(ms_reducer *reducer);
/* See ms_gradient_source_is_used. */
bool ms_reducer_is_used(const ms_reducer *reducer, uint32_t position, bool *known);

#endif
