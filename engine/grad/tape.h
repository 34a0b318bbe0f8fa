/* tape.h: the inside of the tape. For grad/ only.
 *
 * Who holds whom: a tensor's meta holds the node that made it; a node holds the nodes of its inputs
 * through edges; a leaf's accumulator node holds the leaf, and the leaf's meta knows its
 * accumulator without holding it. So nothing forms a cycle. */
#ifndef MOONSHARD_GRAD_TAPE_H
#define MOONSHARD_GRAD_TAPE_H

#include "moonshard/grad.h"
#include "tensor/op.h"
#include "tensor/state.h"

typedef struct ms_node ms_node;

typedef struct ms_hook { /* on one output of a node, or on a leaf */
    struct ms_hook *next;
    uint64_t id;
    uint32_t output;
    ms_gradient_function gradient;
    ms_accumulated_function accumulated;
    void *user;
    void (*free_user)(void *);
} ms_hook;

/* node NULL: no gradient is needed there */
typedef struct ms_edge {
    ms_node *node;
    uint32_t output;
} ms_edge;

typedef struct ms_saved {
    ms_tensor *tensor;
    uint64_t version;
} ms_saved;

#define MS_NODE_INPUTS 4
#define MS_NODE_OUTPUTS 3

struct ms_node {
    ms_engine *engine;
    const ms_op *op;             /* operator, or NULL */
    const ms_function *function; /* or this, with user */
    void *user;
    ms_tensor *leaf; /* or this: an accumulator (retained) */
    uint64_t order;
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
    uint64_t visit;   /* the backward that has seen it */
    uint32_t pending; /* edges into it that have not delivered yet */
    ms_node *next;    /* list of nodes to be freed, or of unused ones */
    void *many;       /* memory of the arrays where they do not fit */
    ms_edge own_edges[MS_NODE_INPUTS];
    ms_tensor_info own_infos[MS_NODE_INPUTS + MS_NODE_OUTPUTS];
    ms_tensor *own_gradients[MS_NODE_OUTPUTS];
};

typedef struct ms_meta {
    bool requires_grad;   /* of a leaf */
    bool marked;          /* its gradient: see ms_tensor_mark_gradients */
    uint32_t output;      /* of node */
    ms_node *node;        /* retained; NULL for leaves */
    ms_node *accumulator; /* not retained */
    ms_tensor *grad;
    ms_tensor *home; /* where the gradient is to lie, or NULL */
    ms_hook *hooks;  /* of a leaf */
    ms_engine *engine;
    struct ms_meta *next; /* unused ones */
} ms_meta;

/* What a recomputed function uses beside its inputs: each tensor as it was, and its node (retained;
 * NULL for a parameter whose gradient is not needed there). The nodes become edges of the
 * recomputed node, so that a backward waits for it. */
typedef struct ms_capture_item {
    ms_saved saved;
    ms_node *node;
} ms_capture_item;

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

typedef struct ms_at_end {
    ms_status (*f)(void *user);
    void *user;
} ms_at_end;

typedef struct ms_tape {
    bool paused;           /* recording is off */
    ms_captures *captures; /* of the recomputed function whose first run is on, or NULL */
    const ms_pass *pass;   /* the innermost backward that is running, or NULL */
    ms_at_end *ends;       /* what is to be called when the outermost backward has finished */
    size_t end_count, end_capacity;
    ms_unread *unread; /* in order of registration */
    size_t unread_count, unread_capacity;
    uint64_t orders, visits, hook_ids;
    ms_node *unused_nodes;
    ms_meta *unused_metas;
    void **chunks; /* memory of nodes and metas */
    size_t chunk_count, chunk_capacity;
} ms_tape;

ms_status ms_tape_of(ms_engine *engine, ms_tape **out);

/* A node with room for its arrays and one reference. */
ms_status ms_node_new(ms_engine *engine, uint32_t inputs, uint32_t outputs, ms_node **out);
void ms_node_release(ms_node *node); /* frees what follows from it without recursion */
void ms_node_drop_saved(ms_node *node);
/* The index-th tensor that the node's backward reads (borrowed), as it was when it was saved; false
 * past the last. */
bool ms_node_reads(const ms_node *node, uint32_t index, ms_saved *out);
/* Counts the node's reads in their storages until it has run (or never will); both may be
 * repeated. */
void ms_node_expect(ms_node *node);
void ms_node_unexpect(ms_node *node);
/* unread.c: calls those whose tensors nothing reads any more; drops all of them, uncalled. */
ms_status ms_unread_run(ms_tape *tape);
void ms_unread_drop(ms_tape *tape, ms_engine *engine);
/* Marks the memory of a leaf as a parameter's: see ms_storage_mark_parameter. */
void ms_leaf_mark_parameter(const ms_tensor *leaf);
/* The meta of a tensor, made if there is none. */
ms_status ms_meta_of(ms_tensor *tensor, ms_meta **out);
/* MS_ERROR_STATE if a recorded write has changed this tensor's memory (NULL: fine) behind its
 * history. */
ms_status ms_history_check(ms_engine *engine, const char *what, const ms_tensor *tensor);
/* Where the gradient of this tensor goes: fills edge with a retained node, or NULL if it needs
 * none. */
ms_status ms_edge_of(ms_tensor *tensor, ms_edge *edge);
/* If the first run of a recomputed function is on, notes those of the tensors (NULL: none) that
 * require a gradient or are a parameter's values. differentiable: whether what uses them can give
 * them a gradient. */
ms_status ms_capture(ms_engine *engine, ms_tensor *const *tensors, uint32_t count,
                     bool differentiable);
/* As ms_record, with edges to what was captured (handed over) behind those to the inputs; f has no
 * results for them. */
ms_status ms_record_captured(ms_engine *engine, const ms_function *f, void *user,
                             ms_tensor *const *inputs, uint32_t input_count, ms_captures *captures,
                             ms_tensor *const *outputs, uint32_t output_count);
/* A backward inside of the one that is running: what both go through gets its gradient here, and is
 * run there. Frees what it has used. */
ms_status ms_backward_inside(ms_engine *engine, ms_tensor *const *roots,
                             ms_tensor *const *gradients, uint32_t count);
void ms_hooks_free(ms_context *context, ms_hook *hooks);

#endif
