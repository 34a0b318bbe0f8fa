/* static_block.h: memory with a fixed address, which storages use one after the other (rooms). */
#ifndef MOONSHARD_EXEC_STATIC_BLOCK_H
#define MOONSHARD_EXEC_STATIC_BLOCK_H

#include "exec/state.h"

/* The dropped storage gets the static block's memory, which no storage may be using. The stream
 * waits for the last use of each stream by former storages, which uses[] returns. */
ms_status ms_static_block_enter(ms_static_block *fixed, ms_storage *storage, ms_stream *stream,
                                uint64_t uses[MS_STREAMS_MAX]);
/* The static block's storage was dropped or released; uses: its last use of each stream. */
void ms_static_block_leave(ms_static_block *fixed, const uint64_t uses[MS_STREAMS_MAX]);

#endif
