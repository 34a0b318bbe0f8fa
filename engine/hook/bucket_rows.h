/* bucket_rows.h: buckets whose shards are cut by rows. */
#ifndef MOONSHARD_HOOK_BUCKET_ROWS_H
#define MOONSHARD_HOOK_BUCKET_ROWS_H

#include "hook/links.h"

ms_status ms_link_each_rows(const ms_bucket *bucket, ms_link_rows *f, void *user);
/* MS_ERROR_ARGUMENT if t has another length than the gradients. */
ms_status ms_link_check_rows(const ms_bucket *bucket, ms_tensor *t);
/* Copies this rank's shard of a contiguous tensor, which begins with the buffer's numbers. */
ms_status ms_link_copy_shard(const ms_bucket *bucket, ms_tensor *full, ms_tensor *to);
/* t with all shards end to end, as a collective over them takes it: a copy in the group's memory if
 * they are cut by rows, else t itself, retained. */
ms_status ms_link_by_shards(const ms_bucket *bucket, ms_group *group, ms_tensor *t,
                            ms_tensor **out);

#endif
