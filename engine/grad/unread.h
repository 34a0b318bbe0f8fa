/* unread.h: writes of parameters that wait until the running backward has no use for the old values
 * any more. */
#ifndef MOONSHARD_GRAD_UNREAD_H
#define MOONSHARD_GRAD_UNREAD_H

#include "grad/state.h"

/* Calls the waiting writes whose tensors no node has to read any more, in order of registration;
 * the first error ends it. */
ms_status ms_unread_run(ms_tape *tape);

/* Frees all waiting writes without calling them: at the end of the outermost backward. */
void ms_unread_drop(ms_tape *tape, ms_engine *engine);

#endif
