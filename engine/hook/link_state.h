/* link_state.h: what a link keeps from one iteration to the next, by parameter. */
#ifndef MOONSHARD_HOOK_LINK_STATE_H
#define MOONSHARD_HOOK_LINK_STATE_H

#include "hook/links.h"

/* Tensors that the link needs until the last bucket; not saved. Retained. */
ms_status ms_link_state_hold(ms_link_state *state, ms_tensor *tensor);
ms_tensor *const *ms_link_state_held(const ms_link_state *state, uint32_t *count);
void ms_link_state_let_go(ms_link_state *state);
/* Counts for ms_link_state_compression. is_due: whether to log it in this iteration, which is the
 * first, or `every` iterations after the last line. */
void ms_link_state_compressed(ms_link_state *state, int64_t before, int64_t after);
bool ms_link_state_is_due(ms_link_state *state, int64_t every);

#endif
