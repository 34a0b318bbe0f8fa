/* module_hooks.h: the moments at which a unit's use begins and ends, in forward and in backward. */
#ifndef MOONSHARD_FSDP_MODULE_HOOKS_H
#define MOONSHARD_FSDP_MODULE_HOOKS_H

#include "fsdp/state.h"

/* Gradient hook of each trainable member; user is its ms_member. */
ms_status ms_member_on_gradient(void *user, ms_tensor *leaf);
void ms_fsdp_let_go(ms_fsdp *fsdp); /* one reference */

#endif
