/* poison.h: tasks checked for touching what they do not declare. For tests: slow. */
#ifndef MOONSHARD_EXEC_POISON_H
#define MOONSHARD_EXEC_POISON_H

#include "exec/state.h"

/* From now on; nothing on a device that cannot check it. A violation is the error of the enqueue
 * that made it. */
void ms_engine_set_poison(ms_engine *engine, bool on);

#endif
