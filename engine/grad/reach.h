/* reach.h: what backward asks of the walks over a graph. */
#ifndef MOONSHARD_GRAD_REACH_H
#define MOONSHARD_GRAD_REACH_H

#include "grad/state.h"

/* Marks the gradients of all leaves that the node leads to: see ms_tensor_mark_gradients. */
ms_status ms_mark_leaves(ms_tape_node *root);

#endif
