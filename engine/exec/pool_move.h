/* pool_move.h: what a pool does when it has memory for a request, but in pieces that are too small:
 * it takes the memory away from free places, and gives it to addresses that are in one piece.
 *
 * Invariants
 * - It is the last resort before an error: nothing that is free is large enough, and the limit
 *   allows no more memory. So it costs nothing while memory suffices.
 * - What is moved, and to where, follows from the blocks alone: not from how far the device is, and
 *   not from the pieces in which it has committed memory. Devices move granules of 2 MiB
 *   (MS_POOL_GRANULE), all of them the same ones, so a simulated run predicts a real one.
 * - The host waits for all work that is enqueued before the first granule is moved: that may use
 *   the places, and the device may have to copy values that are beside them. No decision follows
 *   from that wait, and it ends, as it is only for work that is enqueued already.
 * - Storages keep their addresses and values. Only whole free granules lose their memory. Their
 *   block is `bare` then: for all other parts of the pool it is as if it were in use.
 * - Bare blocks may get memory again, here only. So programs that move memory in every step need no
 *   more addresses in later ones.
 * - Memory that is handed out (top - bare) stays within the limit. */
#ifndef MOONSHARD_EXEC_POOL_MOVE_H
#define MOONSHARD_EXEC_POOL_MOVE_H

#include "exec/state.h"

/* A free block of `size` bytes or a little more, off the free lists. NULL: the limit does not allow
 * it, too little is free in whole granules, or the memory cannot be moved. It may have been moved
 * in part then. The host waits unless the limit does not allow it. */
ms_block *ms_pool_move(ms_pool *pool, uint64_t size);

#endif
