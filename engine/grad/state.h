/* state.h: the inside of the tape. For grad/ only.
 *
 * Who holds whom: a tensor's meta holds the node that made it; a node holds the nodes of its inputs
 * through edges; a leaf's accumulator node holds the leaf, and the leaf's meta knows its
 * accumulator without holding it. So nothing forms a cycle.
 *
 * Numbers that order things: `orders` counts nodes as they are made, so the operators that made a
 * node's inputs have lower orders than the node, and running the highest order first is a
 * topological order. Accumulators, which have no inputs, have the greatest order instead. `visits`
 * gives each walk of the graph (a backward, or a search in reach.c) a number of its own: a node is
 * marked by writing that number into it, and no walk has to clear the marks of the one before.
 * `hook_ids` grows with each hook.
 *
 * Everything here belongs to the host thread. Tasks on streams never see a node or a meta. */
#ifndef MOONSHARD_GRAD_STATE_H
#define MOONSHARD_GRAD_STATE_H

#include "moonshard/grad.h"

#include "tensor/op.h"
#include "tensor/state.h"

typedef struct ms_tape_node ms_tape_node;

/* A function that backward calls: on one output of a node (the list is the node's), or on a leaf
 * (the list is its meta's). Exactly one of `gradient` and `accumulated` is set. Lists are in order
 * of registration, so the ids in a list ascend; hook_after in backward.c relies on that. */
typedef struct ms_hook {
    struct ms_hook *next;
    uint64_t id;
    uint32_t output;
    ms_gradient_function gradient;
    ms_accumulated_function accumulated;
    /* in_both: of ms_tensor_on_parts. called: the first part has called it, so the rest will. */
    bool in_both, called;
    void *user;
    void (*free_user)(void *);
} ms_hook;

/* Where the gradient of one input goes: the node that made the input, and which of its outputs the
 * input is. An edge holds a reference to its node. node NULL: no gradient is needed there. done:
 * the first part of a backward has delivered there. */
typedef struct ms_edge {
    ms_tape_node *node;
    uint32_t output;
    bool done;
} ms_edge;

/* A tensor that backward reads (an alias without history, owned), and the version of its memory
 * when it was saved. If the memory has another version when backward comes, backward stops with an
 * error instead of computing with values that forward has not seen. */
typedef struct ms_saved {
    ms_tensor *tensor;
    uint64_t version;
} ms_saved;

/* What fits into a node without memory of its own: enough for every operator but cat, stack and
 * split. A training step can record thousands of nodes, so the usual one costs no allocation. */
#define MS_NODE_INPUTS 4
#define MS_NODE_OUTPUTS 3

/* A first part of a backward whose rest is to come: rest.c. */
typedef struct ms_rest ms_rest;
/* What a node keeps between the two parts, and not at other times. */
typedef struct ms_kept {
    /* Of each output what has arrived, and of each input what the first part has made and not
     * delivered; tensor NULL: nothing. One array: results come after gradients. */
    ms_saved *gradients, *results;
    ms_tensor *tensors[MS_OP_KEPT_MAX];             /* the operator's: ms_op_gradient.kept */
    uint32_t unread;                                /* which of `saved` the rest does not read */
    struct ms_kept *next;                           /* list of unused ones */
    ms_saved own[MS_NODE_INPUTS + MS_NODE_OUTPUTS]; /* the array, unless it is larger */
} ms_kept;

/* One recorded call. It is an operator's (op), a function's (function and user), or the accumulator
 * of a leaf (leaf), which adds what arrives to the leaf's gradient. It is referenced by the metas
 * of its outputs, by edges, and by a backward that runs. Saved tensors and user go as soon as a
 * backward without retain_graph has run the node; the node itself stays while tensors or edges
 * refer to it, so that a second backward can name both lines. */
struct ms_tape_node {
    ms_engine *engine;
    const ms_op *op;             /* operator, or NULL */
    const ms_function *function; /* or this, with user */
    void *user;
    ms_tensor *leaf; /* or this: an accumulator (retained) */
    uint64_t order;
    /* script: the line that recorded it; freed_script: that of the backward that freed it. */
    uint32_t references, script, freed_script, saved_count;
    uint32_t input_count, output_count;
    bool used;      /* backward has freed what it needs */
    bool expected;  /* its reads are counted in the storages, until it has run */
    ms_edge *edges; /* input_count; the own array unless there are many */
    ms_tensor_info *inputs, *outputs;
    ms_tensor **gradients; /* output_count: those that have arrived in this backward */
    ms_saved saved[MS_OP_SAVED_MAX];
    ms_attributes attributes;
    ms_hook *hooks;
    bool outer;         /* an accumulator of the leaf's outer uses */
    bool on_way;        /* in a first part: some edge leads to an input, or it is that itself */
    bool marks;         /* the first part went through it, and it marks gradients: reach.c */
    ms_rest *rest;      /* the first part went through it (retained); no accumulator has one */
    ms_kept *kept;      /* some of its edges are left to the rest */
    uint64_t visit;     /* the backward that has seen it */
    uint32_t pending;   /* edges into it that have not delivered yet */
    ms_tape_node *next; /* list of nodes to be freed, or of unused ones */
    void *many;         /* memory of the arrays where they do not fit */
    ms_edge own_edges[MS_NODE_INPUTS];
    ms_tensor_info own_infos[MS_NODE_INPUTS + MS_NODE_OUTPUTS];
    ms_tensor *own_gradients[MS_NODE_OUTPUTS];
};

/* What the tape knows of a tensor; made when first needed, freed with the tensor. Either `node` is
 * set (a result) or the tensor is a leaf. The accumulator pointers of a leaf are cleared when those
 * nodes are freed. */
typedef struct ms_meta {
    bool requires_grad; /* of a leaf */
    bool marked;        /* its gradient: see ms_tensor_mark_gradients */
    bool summed;        /* its gradient: see ms_tensor_grad_mark_summed */
    bool outer;         /* of a leaf: uses that are recorded now are outer ones */
    bool sharded;       /* of a leaf: a parameter of a sharded model */
    /* Of a leaf: how many rests will give it a gradient, and the line of the last first part. */
    uint32_t rests, rest_script;
    uint32_t output;    /* of node */
    ms_tape_node *node; /* retained; NULL for leaves */
    /* Of uses and of outer uses; not retained. */
    ms_tape_node *accumulators[2];
    ms_tensor *grad, *outer_grad;
    ms_tensor *home; /* destination buffer of the gradient (retained), or NULL: allocate one */
    ms_hook *hooks;  /* of a leaf */
    ms_engine *engine;
    struct ms_meta *next; /* unused ones */
} ms_meta;

/* What a recomputed function uses beside its inputs: each tensor as it was, and its node (retained;
 * NULL for a parameter whose gradient is not needed there). The nodes become edges of the
 * recomputed node, so that a backward waits for it. */
typedef struct ms_capture_item {
    ms_saved saved;
    ms_tape_node *node;
} ms_capture_item;

/* The list of what a recomputed function used; owned by that function (recompute.c). */
typedef struct ms_captures {
    ms_capture_item *items;
    size_t count, capacity;
} ms_captures;

typedef struct ms_pass ms_pass; /* one backward: backward.c */

/* A write that waits until nothing reads these tensors (retained) any more: see
 * ms_backward_when_unread. */
typedef struct ms_unread {
    ms_status (*f)(void *user);
    void *user;
    void (*free_user)(void *user);
    uint32_t count;
    ms_tensor **tensors;
} ms_unread;

/* A call that a hook has asked for at the end of the outermost backward. of_part: also of a first
 * part, at its own end. */
typedef struct ms_at_end {
    ms_status (*f)(void *user);
    void *user;
    bool of_part;
} ms_at_end;

/* The tape of an engine (MS_SLOT_GRAD), made at first use. Nodes, metas and what nodes keep are
 * taken from chunks of MS_TAPE_CHUNK and given back to lists of unused ones; the chunks are freed
 * with the engine only. */
#define MS_TAPE_CHUNK 64
typedef struct ms_tape {
    bool paused;           /* recording is off */
    ms_captures *captures; /* of the recomputed function whose first run is on, or NULL */
    const ms_pass *pass;   /* the innermost backward that is running, or NULL */
    ms_at_end *ends;       /* what is to be called when the outermost backward has finished */
    size_t end_count, end_capacity;
    ms_unread *unread; /* in order of registration */
    size_t unread_count, unread_capacity;
    uint64_t orders, visits, hook_ids;
    uint64_t rests; /* first parts whose rest is to come */
    ms_tape_node *unused_nodes;
    ms_meta *unused_metas;
    ms_kept *unused_kept;
    void **chunks;
    size_t chunk_count, chunk_capacity;
} ms_tape;

/* The accumulator of uses that are recorded now, or NULL. */
static inline ms_tape_node *ms_meta_accumulator(const ms_meta *meta)
{
    return meta->accumulators[meta->outer];
}

#endif
