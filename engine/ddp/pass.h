/* pass.h: one forward and backward of a ddp model: its gradients as they come. */
#ifndef MOONSHARD_DDP_PASS_H
#define MOONSHARD_DDP_PASS_H

#include "ddp/state.h"

/* Gradient hook of each parameter; user is its ms_ddp_parameter. */
ms_status ms_reducer_on_gradient(void *user, ms_tensor *leaf);
/* Gives back one reference; user is an ms_local_mark, or NULL. */
void ms_local_mark_drop(void *user);

#endif
