/* filled.h: which parameters have a gradient after a pass. */
#ifndef MOONSHARD_FSDP_FILLED_H
#define MOONSHARD_FSDP_FILLED_H

#include "fsdp/state.h"

/* After a reduction: whether the member has a gradient, as far as this rank knows. If it does not
 * know, `unsure` is set. */
bool ms_member_has_gradient(ms_member *member);
/* After the reductions of a pass: gradients that other ranks alone have filled are put, and the
 * others stay nil. A rank that is sure of all its members does not wait. */
ms_status ms_filled_exchange(ms_fsdp *fsdp);
void ms_filled_forget(ms_fsdp *fsdp);

#endif
