/* hash.h: the hash of bytes that come one piece after another. */
#ifndef MOONSHARD_BASE_HASH_H
#define MOONSHARD_BASE_HASH_H

#include "moonshard/base.h"

/* Gives the next piece, which stays the callee's until the next call; *bytes 0: there is none. */
typedef ms_status ms_next_piece(void *user, const void **piece, size_t *bytes);

/* hashes[0]: what ms_hash gives for all pieces end to end, with seed 0. If block is not 0, the
 * hashes of each `block` bytes of them follow; the last block may be shorter, and no piece may
 * cross the end of one. The first failure of `next` is returned. */
ms_status ms_hash_pieces(ms_next_piece *next, void *user, size_t block, uint64_t *hashes);

#endif
