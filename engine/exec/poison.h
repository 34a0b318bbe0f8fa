/* poison.h: tasks checked for touching what they do not declare. For tests: slow. */
#ifndef MOONSHARD_EXEC_POISON_H
#define MOONSHARD_EXEC_POISON_H

#include "exec/engine.h"

/* From now on; nothing on the sim device. A violation is the error of the enqueue that made
 * it. */
void ms_engine_set_poison(ms_engine *engine, bool on);

/* For exec/: around one enqueue, and when memory changes hands. */
ms_status ms_poison_before(ms_engine *engine, const ms_access *accesses, uint32_t count,
                           void **aside);
ms_status ms_poison_after(ms_engine *engine, const char *task, const ms_access *accesses,
                          uint32_t count, void *aside);
void ms_poison_fill(ms_storage *storage);

#endif
