/* static_memory.h: blocks for what a model takes and gives back in each step (ms_static_block), so
 * that what repeats finds the same memory in each step and may become graphs. */
#ifndef MOONSHARD_FSDP_STATIC_MEMORY_H
#define MOONSHARD_FSDP_STATIC_MEMORY_H

#include "fsdp/state.h"

/* How many whole flat parameters, and how many gradients, tasks may still use after they were
 * dropped. */
void ms_fsdp_limit_static_memory(ms_fsdp *fsdp, uint32_t gathers, uint32_t reductions);
/* As ms_storage_refill; in a block, where steps may become graphs. *number: that of the tensor's
 * last block, or 0; becomes that of its new one. */
ms_status ms_static_memory_refill(ms_static_memory *memory, ms_flat_param *flat, ms_tensor *tensor,
                                  ms_stream *stream, uint32_t *number);
/* As ms_storage_drop. */
ms_status ms_static_memory_drop(ms_static_memory *memory, ms_tensor *tensor, const char *owner);
/* The number of the block that the tensor is in (ms_collective.fixed_address), or 0; and that of
 * two such numbers together. */
uint32_t ms_static_memory_number(const ms_static_memory *memory, const ms_tensor *tensor);
uint32_t ms_static_memory_pair(uint32_t first, uint32_t second);
/* Frees all blocks. Tensors stay in what becomes ordinary memory. */
void ms_fsdp_clear_static_memory(ms_fsdp *fsdp);

#endif
