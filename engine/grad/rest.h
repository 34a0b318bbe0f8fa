/* rest.h: what a backward in two parts keeps between them.
 *
 * The nodes that the first part goes through hold one record of it (ms_rest), so a later backward
 * knows them. Those with edges that are left hold a ms_kept as well. The record knows the leaves
 * whose gradients are still to come. All of this goes with the graph: the record with the last of
 * its nodes. */
#ifndef MOONSHARD_GRAD_REST_H
#define MOONSHARD_GRAD_REST_H

#include "grad/state.h"

struct ms_rest {
    ms_engine *engine;
    uint32_t references, script; /* the line of the first part */
    ms_origin *roots;
    uint32_t root_count;
    ms_tensor **leaves; /* retained: those to which the rest may come */
    size_t leaf_count, leaf_capacity;
    ms_at_end *ends; /* what the first part has registered for the end of its rest */
    size_t end_count;
};

/* A record with one reference. roots: where the first part begins, none of which is a leaf. */
ms_status ms_rest_new(ms_engine *engine, ms_tensor *const *roots, uint32_t count, ms_rest **out);
/* Drops one reference; NULL is allowed. */
void ms_rest_release(ms_rest *rest);
/* The leaf will get a gradient from the rest. */
ms_status ms_rest_add_leaf(ms_rest *rest, ms_tensor *leaf);
/* The leaves do not wait any more: the rest has run, or its graph is lost. */
void ms_rest_forget_leaves(ms_rest *rest);
/* Moves the tape's calls for the end into the record, and back to the tape. */
void ms_rest_take_ends(ms_rest *rest, ms_tape *tape);
ms_status ms_rest_give_ends(ms_rest *rest, ms_tape *tape);
/* The record of the first part that began at exactly these roots, or an error. */
ms_status ms_rest_of(ms_engine *engine, ms_tensor *const *roots, uint32_t count, ms_rest **out);

/* Room for what a node keeps, empty. */
ms_status ms_kept_new(ms_tape_node *node);
/* Puts the gradient of an input there; takes it over. */
void ms_kept_put_result(ms_tape_node *node, uint32_t index, ms_tensor *result);
/* Moves the node's gradients there, with their versions, and back. */
void ms_kept_put_gradients(ms_tape_node *node);
void ms_kept_take_gradients(ms_tape_node *node);
/* What was written since it was kept, or NULL. */
const ms_tensor *ms_kept_written(const ms_tape_node *node);
/* Releases all that the node keeps; nothing if it keeps nothing. */
void ms_kept_free(ms_tape_node *node);

/* The node leaves its record: its rest has run, or is lost. */
void ms_rest_leave(ms_tape_node *node);
/* Why the leaves cannot be inputs, or MS_OK. */
ms_status ms_rest_check_inputs(ms_engine *engine, ms_tensor *const *inputs, uint32_t count);

#endif
