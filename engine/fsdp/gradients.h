/* gradients.h: whole gradients outside of passes, while whole parameters are summoned. */
#ifndef MOONSHARD_FSDP_GRADIENTS_H
#define MOONSHARD_FSDP_GRADIENTS_H

#include "fsdp/state.h"

/* With pieces as handles: gathers the gradients of the unit, and saves those of the pieces. */
ms_status ms_gradients_gather(ms_unit *unit, bool offload);
/* With whole parameters as handles: the whole gradients are theirs; and the end of that. */
ms_status ms_gradients_show(ms_unit *unit);
ms_status ms_gradients_take(ms_unit *unit);
/* With pieces as handles: they get their gradients again; with what was written, if `write`. */
ms_status ms_gradients_put_back(ms_unit *unit, bool write);
void ms_gradients_forget(ms_member *member);

#endif
