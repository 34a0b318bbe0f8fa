/* storage.h: storages: a piece of pool memory with its hazard cells and a count of its writes. */
#ifndef MOONSHARD_EXEC_STORAGE_H
#define MOONSHARD_EXEC_STORAGE_H

#include "exec/state.h"

/* Gives the memory of a storage back to its pool; apart: the storage will take as much again. */
void ms_storage_vacate(ms_storage *storage, bool apart);
/* Counts a write of a part, whose number storage->writes is already; and that something has
 * written there, whether that counts as a write or not. */
void ms_part_write(ms_storage *storage, ms_version_part *part, const char *task, uint32_t script);
void ms_part_settle(ms_storage *storage, ms_version_part *part);
/* The parts that bytes [begin, end) are in. */
ms_version_part_range ms_storage_parts(const ms_storage *storage, size_t begin, size_t end);
ms_status ms_storage_new_in(ms_pool *pool, ms_stream *stream, size_t bytes, ms_storage **out);
void ms_storages_close(ms_engine *engine);

#endif
