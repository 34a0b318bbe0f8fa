/* sharded_model.h: a sharded model as a gradient source (hook/source.h). */
#ifndef MOONSHARD_FSDP_SHARDED_MODEL_H
#define MOONSHARD_FSDP_SHARDED_MODEL_H

#include "fsdp/state.h"

/* stats.c */
extern const ms_source_kind ms_fsdp_source_kind;
/* sharded_model.c: frees a model that has left the engine's list. */
void ms_fsdp_destroy(ms_gradient_source *source);

#endif
