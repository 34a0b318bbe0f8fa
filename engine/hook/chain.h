/* chain.h: chains of native links. */
#ifndef MOONSHARD_HOOK_CHAIN_H
#define MOONSHARD_HOOK_CHAIN_H

#include "hook/links.h"

/* ms_chain_run without the preparation of the bucket. */
ms_status ms_chain_run_links(const ms_link *links, uint32_t count, ms_bucket *bucket,
                             ms_tensor **result);

#endif
