/* hazard.h: which waits a task needs, from the last writer and readers of each cell and what each
 * stream is already after. */
#ifndef MOONSHARD_EXEC_HAZARD_H
#define MOONSHARD_EXEC_HAZARD_H

#include "exec/state.h"

/* before: inserts the waits that the accesses need (or MS_ERROR_HAZARD); after: remembers the
 * accesses of task `seq`. */
ms_status ms_hazard_before(ms_stream *stream, const char *task, const ms_access *accesses,
                           uint32_t count);
/* The error of a task that touches a dropped storage, or that reads a vacant part. */
ms_status ms_hazard_refuse(const ms_storage *storage, const char *task);
/* Whether a failure skipped that task. */
bool ms_hazard_spoiled(const ms_engine *engine, ms_point point);
void ms_hazard_after(ms_stream *stream, uint64_t seq, const ms_access *accesses, uint32_t count);
/* The clock of `of` when it had reached number seq, merged into the clock of `into` (a wait has
 * been enqueued there). */
void ms_hazard_merge(ms_stream *into, const ms_stream *of, uint64_t seq);
/* The last use of these cells by each stream in use. */
void ms_hazard_uses(const ms_storage *storage, uint16_t first, uint16_t cells,
                    uint64_t uses[MS_STREAMS_MAX]);

#endif
