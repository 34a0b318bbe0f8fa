/* static_memory.h: rooms for what a model takes and gives back in each step (ms_room), so that what
 * repeats finds the same memory in each step and may become graphs. */
#ifndef MOONSHARD_FSDP_STATIC_MEMORY_H
#define MOONSHARD_FSDP_STATIC_MEMORY_H

#include "fsdp/state.h"

/* How many whole flat parameters, and how many gradients, tasks may still use after they were
 * dropped. */
void ms_fsdp_limit_rooms(ms_fsdp *fsdp, uint32_t gathers, uint32_t reductions);
/* As ms_storage_refill; in a room, where steps may become graphs. *number: that of the tensor's
 * last room, or 0; becomes that of its new one. */
ms_status ms_rooms_refill(ms_rooms *rooms, ms_flat *flat, ms_tensor *tensor, ms_stream *stream,
                          uint32_t *number);
/* As ms_storage_drop. */
ms_status ms_rooms_drop(ms_rooms *rooms, ms_tensor *tensor, const char *owner);
/* The number of the room that the tensor is in (ms_collective.standing), or 0; and that of two such
 * numbers together. */
uint32_t ms_rooms_number(const ms_rooms *rooms, const ms_tensor *tensor);
uint32_t ms_rooms_pair(uint32_t first, uint32_t second);
/* Frees all rooms. Tensors stay in what becomes ordinary memory. */
void ms_fsdp_clear_rooms(ms_fsdp *fsdp);

#endif
