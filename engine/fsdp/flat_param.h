/* flat_param.h: the memory of a flat parameter. */
#ifndef MOONSHARD_FSDP_FLAT_PARAM_H
#define MOONSHARD_FSDP_FLAT_PARAM_H

#include "fsdp/state.h"

/* Sets members' places and the lengths, for `ranks` shards of which this rank has number `rank`. */
void ms_flat_param_lay_out(ms_flat_param *flat, ms_fsdp_layout layout, uint32_t ranks,
                           uint32_t rank);
/* The elements of the parameter that the rank with that number has; none past the last rank. */
void ms_flat_param_cut(const ms_member *member, uint32_t rank, int64_t *first, int64_t *count);
/* Where what is encoded with a member's scale begins: its numbers, and the zeros after them. In the
 * shard, or in the whole, which by rows is a shard. */
int64_t ms_flat_param_span_begin(const ms_flat_param *flat, uint32_t member, bool whole);
/* Makes the memory, moves the values there, and turns the tensors into pieces. */
ms_status ms_flat_param_make(ms_flat_param *flat);
void ms_flat_param_free(ms_flat_param *flat);
/* The view of a tensor in the order of the flat gradient in the member's shape, owned. */
ms_status ms_flat_param_view(ms_tensor *gradient, const ms_member *member, ms_tensor **out);
/* The view of a tensor [length] that is the member's piece, in its shape. */
ms_status ms_member_piece_of(const ms_member *member, ms_tensor *shard, ms_tensor **out);
/* Cuts a storage of `length` elements of that dtype into parts as the shard. */
ms_status ms_flat_param_split_state(ms_flat_param *flat, ms_storage *storage, ms_dtype dtype);
/* Copies this rank's part of the whole to the shard. */
ms_status ms_flat_param_keep_own(ms_flat_param *flat);
/* After a gather to the wire, on that stream: the numbers go to their places in the whole. */
ms_status ms_flat_param_arrange(ms_flat_param *flat);
/* Whether its ranks have different parts of it. */
static inline bool ms_flat_param_is_sharded(const ms_flat_param *flat)
{
    return flat->padded != flat->length;
}
/* Whether whole parameters have memory of their own: they are sharded, cast or offloaded. */
static inline bool ms_flat_param_is_apart(const ms_flat_param *flat)
{
    return ms_tensor_storage(flat->form.whole) != ms_tensor_storage(flat->shard);
}
/* Whether the reduced gradient stays in the bucket: all ranks have all of it, in its dtype. */
bool ms_flat_param_is_in_bucket(const ms_flat_param *flat);
/* Gathers to come give the shard's dtype, or that of computing. The whole must be dropped. */
void ms_flat_param_set_full(ms_flat_param *flat, bool yes);
/* Copies the shard for a gather, on the current stream. */
ms_status ms_flat_param_cast(ms_flat_param *flat);
/* `outside`, for a gather to come, which puts rows in order there. Of a flat parameter that is not
 * sharded it is the shard. MS_OK where the whole has no memory of its own: then there is none. */
ms_status ms_flat_param_make_offloaded(ms_flat_param *flat);
/* `outside` takes the place of form.whole, and gives it back; nothing where it is not there. */
void ms_flat_param_offload(ms_flat_param *flat);
void ms_flat_param_unload(ms_flat_param *flat);
/* A contiguous copy in the second pool. */
ms_status ms_copy_offloaded(ms_engine *engine, ms_tensor *from, ms_tensor **out);
/* A new tensor [length] where shards are. */
ms_status ms_flat_param_new_beside(ms_flat_param *flat, ms_dtype dtype, ms_tensor **out);
/* Memory for the reduced gradient, and members' views of it, unless it is there. */
ms_status ms_flat_param_make_reduced(ms_flat_param *flat);
/* Adds one tensor to another of any float dtype, in place. */
ms_status ms_flat_param_add(ms_tensor *to, ms_tensor *from);
/* The bytes of the flat parameter as forward uses it, and of a shard. */
uint64_t ms_flat_param_bytes(const ms_flat_param *flat);
uint64_t ms_flat_param_shard_bytes(const ms_flat_param *flat);

#endif
