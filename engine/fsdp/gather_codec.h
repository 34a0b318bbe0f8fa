/* gather_codec.h: gathers in which something else travels than the shard (ms_gather_extension). */
#ifndef MOONSHARD_FSDP_GATHER_CODEC_H
#define MOONSHARD_FSDP_GATHER_CODEC_H

#include "fsdp/state.h"

/* Whether gathers send what an extension makes; and such a gather, from the shard as gathers take
 * it to the whole or to the wire, on this stream. */
bool ms_gather_codec_applies(const ms_flat_param *flat);
ms_status ms_gather_codec_gather(ms_flat_param *flat, ms_tensor *shard, ms_stream *stream,
                                 ms_tensor *to);
void ms_gather_codec_free(ms_fsdp *fsdp);

#endif
