/* pool.h: stream-ordered memory pools. */
#ifndef MOONSHARD_EXEC_POOL_H
#define MOONSHARD_EXEC_POOL_H

#include "exec/state.h"

ms_status ms_pool_open(ms_engine *engine, uint64_t limit, uint32_t sharers);
void ms_pool_close(ms_engine *engine);
/* `bytes` of this pool are live; and are so no more. */
void ms_pool_count_new(ms_pool *pool, uint64_t bytes);
void ms_pool_count_gone(ms_pool *pool, uint64_t bytes);
/* uses: what its former owners did last. The stream is after all of it, other streams may not
 * be. */
ms_status ms_pool_take(ms_pool *pool, ms_stream *stream, size_t bytes, ms_block **out, char **data,
                       uint64_t uses[MS_STREAMS_MAX]);
void ms_pool_give(ms_pool *pool, ms_block *block, const uint64_t uses[MS_STREAMS_MAX], bool apart);

#endif
