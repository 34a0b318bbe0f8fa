/* static_block.h: memory with a fixed address, which storages use one after the other (rooms). */
#ifndef MOONSHARD_EXEC_STATIC_BLOCK_H
#define MOONSHARD_EXEC_STATIC_BLOCK_H

#include "exec/state.h"

/* The dropped storage gets the room's memory, which no storage may be using. The stream waits for
 * the last use of each stream by former storages, which uses[] returns. */
ms_status ms_room_enter(ms_room *room, ms_storage *storage, ms_stream *stream,
                        uint64_t uses[MS_STREAMS_MAX]);
/* The room's storage was dropped or released; uses: its last use of each stream. */
void ms_room_leave(ms_room *room, const uint64_t uses[MS_STREAMS_MAX]);

#endif
