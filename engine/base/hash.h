/* hash.h: the hash of bytes that come one block after another. */
#ifndef MOONSHARD_BASE_HASH_H
#define MOONSHARD_BASE_HASH_H

#include "moonshard/base.h"

/* Gives the next block, which stays the callee's until the next call; *bytes 0: there is none. */
typedef ms_status ms_next_block(void *user, const void **block, size_t *bytes);

/* What ms_hash gives for all blocks end to end, with seed 0. The first failure of `next` is
 * returned. */
ms_status ms_hash_blocks(ms_next_block *next, void *user, uint64_t *out);

#endif
