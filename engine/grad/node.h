/* node.h: nodes, metas and hooks of the tape. */
#ifndef MOONSHARD_GRAD_NODE_H
#define MOONSHARD_GRAD_NODE_H

#include "grad/state.h"

/* The engine's tape, made if there is none. Fails only for want of memory. */
ms_status ms_tape_of(ms_engine *engine, ms_tape **out);

/* Memory for MS_TAPE_CHUNK structs of this size, zeroed, which the tape frees at its end. */
ms_status ms_tape_chunk(ms_tape *tape, ms_context *context, size_t size, void **out);

/* A node with room for its arrays and one reference. */
ms_status ms_tape_node_new(ms_engine *engine, uint32_t inputs, uint32_t outputs,
                           ms_tape_node **out);
/* Drops one reference. Frees the node with the last one, and the nodes before it that nothing else
 * holds, without recursion: a graph may be deeper than the C stack. NULL is allowed. */
void ms_tape_node_release(ms_tape_node *node);

/* Releases what only backward needs: the saved tensors, and user of a function. */
void ms_tape_node_drop_saved(ms_tape_node *node);
/* The index-th tensor that the node's backward reads (borrowed), as it was when it was saved; false
 * past the last. */
bool ms_tape_node_reads(const ms_tape_node *node, uint32_t index, ms_saved *out);
/* Whether the rest of a backward does without saved[index], which the first part has read. */
bool ms_tape_node_is_unread(const ms_tape_node *node, uint32_t index);
/* Counts the node's reads in their storages until the node has run, or never will. Both may be
 * repeated: `expected` remembers whether they are counted. */
void ms_tape_node_expect(ms_tape_node *node);
void ms_tape_node_unexpect(ms_tape_node *node);
/* Marks the memory of a leaf as a parameter's: see ms_storage_mark_parameter. */
void ms_leaf_mark_parameter(const ms_tensor *leaf);
/* From now on, recorded uses of the leaf are outer ones, or not. The gradient of outer uses is kept
 * apart: a leaf whose shape changes has gradients of both shapes in one backward. Hooks run for
 * each of them; those for accumulated gradients take that of outer uses, which is there exactly
 * then: owned, or NULL. */
ms_status ms_leaf_set_outer(ms_tensor *leaf, bool yes);
ms_tensor *ms_leaf_take_outer(ms_tensor *leaf);
/* The leaf is a parameter of a sharded model, or not any more: its gradient belongs to the rest of
 * a backward in two parts. */
ms_status ms_leaf_set_sharded(ms_tensor *leaf, bool yes);
/* ms_tensor_set_grad of a gradient whose float dtype may differ from the leaf's, which no backward
 * adds to. */
ms_status ms_leaf_put_grad(ms_tensor *leaf, ms_tensor *gradient);
/* The meta of a tensor, made if there is none. */
ms_status ms_meta_of(ms_tensor *tensor, ms_meta **out);
/* Where the gradient of this tensor goes: fills edge with a retained node, or NULL if it needs
 * none. For a leaf this is its accumulator, which is made if it has none. */
ms_status ms_edge_of(ms_tensor *tensor, ms_edge *edge);
/* Frees a list of hooks, and the user of each. */
void ms_hooks_free(ms_context *context, ms_hook *hooks);

#endif
