/* reach.c: which leaves a graph goes back to, and marks on their gradients.
 *
 * Both walks visit each node once and without recursion, by a list that grows while it is read.
 * They mark nodes with a visit number of the tape, as backward does, and put back the old numbers
 * at the end, since a walk may run inside a hook of a backward that still needs its marks. */
#include "grad/reach.h"

#include "grad/node.h"

/* A node that the walk has met, and the visit number that it had before. Not retained: nothing is
 * freed during a walk. */
typedef struct met {
    ms_tape_node *node;
    uint64_t visit;
} met;

/* The nodes in the order in which they were met; those after the one being read are still to be
 * followed. */
typedef struct walk {
    ms_context *context;
    met *nodes;
    size_t count, capacity;
    uint64_t visit;
} walk;

/* Adds a node to the walk at its first sight; NULL and nodes that were met are passed over. */
static ms_status meet(walk *w, ms_tape_node *node)
{
    if (!node || node->visit == w->visit) return MS_OK;
    ms_status status =
        ms_grow(w->context, (void **)&w->nodes, &w->capacity, w->count + 1, sizeof *w->nodes);
    if (status) return status;
    w->nodes[w->count++] = (met){ node, node->visit };
    /* Noted only after there is room for it, so that `end` can put it back. */
    node->visit = w->visit;
    return MS_OK;
}

/* Meets all nodes that a backward can come to from the nodes that were met. */
static ms_status go_on(walk *w)
{
    ms_status status = MS_OK;
    for (size_t i = 0; i < w->count && !status; i++) {
        const ms_tape_node *node = w->nodes[i].node;
        for (uint32_t e = 0; e < node->input_count && !status; e++)
            status = meet(w, node->edges[e].node);
    }
    return status;
}

/* Puts the visit numbers back, also after an error. */
static void end(walk *w)
{
    for (size_t i = 0; i < w->count; i++) w->nodes[i].node->visit = w->nodes[i].visit;
    ms_release(w->context, w->nodes);
}

/* A leaf that no graph uses has no accumulator, so it is not reached. A root may be a leaf itself:
 * then the walk begins at its accumulator. */
ms_status ms_graph_reaches(ms_engine *engine, ms_tensor *const *roots, uint32_t count,
                           ms_tensor *const *leaves, uint32_t leaf_count, bool *reached)
{
    ms_tape *tape = NULL;
    ms_status status = ms_tape_of(engine, &tape);
    if (status) return status;
    walk w = { .context = ms_engine_context(engine), .visit = ++tape->visits };
    for (uint32_t i = 0; i < count && !status; i++) {
        const ms_meta *meta = roots[i]->meta;
        if (meta) status = meet(&w, meta->node ? meta->node : ms_meta_accumulator(meta));
    }
    if (!status) status = go_on(&w);
    for (uint32_t i = 0; i < leaf_count && !status; i++) {
        const ms_meta *meta = leaves[i]->meta;
        reached[i] = false;
        for (int k = 0; meta && k < 2; k++)
            reached[i] |= meta->accumulators[k] && meta->accumulators[k]->visit == w.visit;
    }
    end(&w);
    return status;
}

/* --------------------------------------------------------- marked gradients */

ms_status ms_mark_leaves(ms_tape_node *root)
{
    ms_tape *tape = NULL;
    ms_status status = ms_tape_of(root->engine, &tape);
    if (status) return status;
    walk w = { .context = ms_engine_context(root->engine), .visit = ++tape->visits };
    status = meet(&w, root);
    if (!status) status = go_on(&w);
    for (size_t i = 0; i < w.count && !status; i++) {
        const ms_tensor *leaf = w.nodes[i].node->leaf;
        if (leaf) ((ms_meta *)leaf->meta)->marked = true;
    }
    end(&w);
    return status;
}

/* A gradient hook of the scaled loss; user is the loss's node. It runs before backward goes on to
 * the nodes before, so all marks are set before the gradients that come through the loss arrive at
 * leaves. Leaves are marked even if no gradient reaches them in the end. */
static ms_status mark_leaves(void *user, ms_tensor *gradient, ms_tensor **replacement)
{
    (void)gradient, (void)replacement;
    ms_tape_node *root = user;
    root->marks = root->rest != NULL;
    return ms_mark_leaves(root);
}

/* The hook is never removed: it goes with the graph. */
ms_status ms_tensor_mark_gradients(ms_tensor *tensor)
{
    const ms_meta *meta = tensor->meta;
    uint64_t id = 0;
    if (!meta || !meta->node) return MS_OK;
    return ms_tensor_on_gradient(tensor, mark_leaves, meta->node, NULL, &id);
}

/* Clipping and optimizers ask this and refuse, since a norm or a step of scaled gradients would be
 * wrong by the scale. */
bool ms_tensor_grad_is_marked(const ms_tensor *leaf)
{
    const ms_meta *meta = leaf->meta;
    return meta && meta->marked;
}

/* Called when the gradient has been divided by the scale, or was replaced by one of the script's
 * own. */
void ms_tensor_grad_unmark(ms_tensor *leaf)
{
    ms_meta *meta = leaf->meta;
    if (meta) meta->marked = false;
}

/* Without a gradient there is nothing to mark. */
void ms_tensor_grad_mark_summed(ms_tensor *leaf)
{
    ms_meta *meta = leaf->meta;
    if (meta) meta->summed = meta->grad != NULL;
}

bool ms_tensor_grad_is_summed(const ms_tensor *leaf)
{
    const ms_meta *meta = leaf->meta;
    return meta && meta->summed;
}

/* A leaf without a meta has no gradient that could be marked. */
void ms_tensor_grad_mark(ms_tensor *leaf)
{
    ms_meta *meta = leaf->meta;
    if (meta) meta->marked = meta->grad != NULL;
}
