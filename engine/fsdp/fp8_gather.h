/* fp8_gather.h: gathers in which weights travel as 8-bit floats (ms_fsdp_parameter.coded). */
#ifndef MOONSHARD_FSDP_FP8_GATHER_H
#define MOONSHARD_FSDP_FP8_GATHER_H

#include "fsdp/state.h"

/* Memory for the codes and the greatest sizes, where the flat parameter is coded and sharded. */
ms_status ms_fp8_gather_make(ms_flat_param *flat);
void ms_fp8_gather_free(ms_flat_param *flat);
/* Whether gathers send codes; and such a gather, from the shard as gathers take it to the whole or
 * to the wire, on this stream. */
bool ms_fp8_gather_applies(const ms_flat_param *flat);
ms_status ms_fp8_gather(ms_flat_param *flat, ms_tensor *shard, ms_stream *stream, ms_tensor *to);

#endif
