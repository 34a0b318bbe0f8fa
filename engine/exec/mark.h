/* mark.h: lists of marks, which say when a stream passed them. */
#ifndef MOONSHARD_EXEC_MARK_H
#define MOONSHARD_EXEC_MARK_H

#include "exec/state.h"

/* Frees the lists that were given up; after all streams have finished. */
void ms_marks_close(ms_engine *engine);

#endif
