/* backward.c: from roots to leaves, latest node first, without recursion.
 *
 * A pass has three steps. discover() walks from the roots over all edges, checks every node that
 * takes part before anything runs, and counts in `pending` how many edges lead into each. The
 * gradients of the roots are put into their nodes. Then the ready node of the highest order runs:
 * its results are added to the gradients of the nodes before it, and a node becomes ready when all
 * edges into it have delivered.
 *
 * A node's gradient is therefore complete when the node runs, each node runs once, and gradients
 * are added in an order that only the graph decides, so results repeat bit for bit. An edge
 * delivers even when it has no gradient to bring: otherwise a node with one such edge would never
 * become ready. Nothing recurses, since a graph of a recurrent model may be deeper than the C
 * stack.
 *
 * A backward may run inside another: a hook that goes through a graph of its own, or a recomputed
 * function (`inside`), whose inner graph leads to nodes of the outer pass. `outer` links the
 * passes.
 *
 * A backward in two parts is two passes. A node is on the way if an edge of it leads to an input,
 * however far. What leads to such a node is on the way itself, so its gradients are complete in the
 * first part, and those of all others come in the rest only. The first part runs the nodes on the
 * way, and delivers along edges that lead to others on the way; the rest delivers along all other
 * edges, from what the first part has kept. That is the result, or, for a matrix product that is
 * left to the rest, what the operator needs for it (MS_OP_SPLITS). Both run the latest node first,
 * so additions have the order of one pass. */
#include "grad/backward.h"

#include <string.h>

#include "grad/node.h"
#include "grad/reach.h"
#include "grad/recompute.h"
#include "grad/record.h"
#include "grad/rest.h"
#include "grad/unread.h"
#include "ops/autocast.h"
#include "ops/values.h"

/* One backward, on the C stack of backward(). `seen` holds a reference to each node that takes
 * part, so that hooks may drop tensors and graphs while it runs; pass_close gives all of them back,
 * whatever happened. */
struct ms_pass {
    ms_engine *engine;
    const ms_pass *outer; /* the one that this runs inside of, or NULL */
    ms_backward_part part;
    ms_tensor *const *inputs; /* of a first part */
    uint32_t input_count;
    ms_rest *rest;    /* of either part: its record, retained */
    bool started;     /* of either part: nodes are being run */
    bool inside;      /* what it shares with an outer one is left to that */
    bool reads_homes; /* a node in it may read what homes held before */
    uint64_t visit;
    bool retain;
    ms_tape_node **stack; /* nodes to look at; later all nodes that take part */
    size_t stack_count, stack_capacity;
    ms_tape_node **ready; /* heap, latest first */
    size_t ready_count, ready_capacity;
    ms_tape_node **seen;
    size_t seen_count, seen_capacity;
};

/* What a node and its script line are called in messages. */
static const char *name_of(const ms_tape_node *node)
{
    if (node->op) return node->op->name;
    return node->function ? node->function->name : "a leaf";
}

/* Work that no script line has enqueued is the engine's own. */
static const char *line_of(const ms_tape_node *node, uint32_t script)
{
    const char *line = ms_strings_get(ms_engine_strings(node->engine), script);
    return *line ? line : "the engine";
}

/* ----------------------------------------------------------------- checking */

/* The error for a saved tensor that was written after it was saved. It names the operator that
 * saved it and the task that wrote it, both with their script lines: without them the user has to
 * search the whole script. */
static ms_status refuse_written(const ms_tape_node *node, const ms_tensor *tensor)
{
    char shape[160];
    size_t begin, end;
    uint32_t script = 0;
    ms_tensor_span(tensor, &begin, &end);
    const char *task = ms_storage_written_by(tensor->storage, begin, end, &script);
    return ms_engine_fail(node->engine, MS_ERROR_STATE,
                          "backward: %s (at %s) saved a tensor %s that was written in place since, "
                          "by %s (at %s): use the form without _ there, or write it after backward",
                          name_of(node), line_of(node, node->script),
                          ms_tensor_describe(tensor, shape, sizeof shape), task ? task : "a task",
                          line_of(node, script));
}

/* The same for a gradient that the first part has kept: it may be a script's own tensor, such as
 * the one that backward was given, or that a hook has returned. */
static ms_status refuse_written_gradient(const ms_tape_node *node, const ms_tensor *gradient)
{
    char shape[160];
    size_t begin, end;
    uint32_t script = 0;
    ms_tensor_span(gradient, &begin, &end);
    const char *task = ms_storage_written_by(gradient->storage, begin, end, &script);
    return ms_engine_fail(
        node->engine, MS_ERROR_STATE,
        "backward: rest: a gradient %s that %s (at %s) has kept was written since "
        "the backward with inputs, by %s (at %s): leave the tensor that "
        "backward was given, or that a hook returned, as it is until rest",
        ms_tensor_describe(gradient, shape, sizeof shape), name_of(node),
        line_of(node, node->script), task ? task : "a task", line_of(node, script));
}

/* Whether all that the node reads is as it was when forward saved it. It is called twice for each
 * node: at discovery, so that nothing has changed if it fails, and right before the node runs,
 * since hooks run in between. */
static ms_status check_versions(const ms_tape_node *node)
{
    ms_saved saved;
    for (uint32_t i = 0; ms_tape_node_reads(node, i, &saved); i++)
        if (ms_tensor_version(saved.tensor) != saved.version)
            return refuse_written(node, saved.tensor);
    return MS_OK;
}

/* Computes casts again that the node saved and that were dropped together with their weight's
 * storage. Once the weight has been refilled with the same values, the cast has the same bits as
 * before. */
static ms_status recast_saved(const ms_tape_node *node)
{
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < node->saved_count && !status; i++)
        if (!ms_tape_node_is_unread(node, i))
            status = ms_storage_recast(node->saved[i].tensor->storage);
    return status;
}

/* A node whose saved tensors were freed cannot run again; it keeps the line of the backward that
 * freed them for this message. */
static ms_status check_node(const ms_pass *pass, const ms_tape_node *node)
{
    if (node->rest && node->rest != pass->rest)
        return ms_engine_fail(node->engine, MS_ERROR_STATE,
                              "backward: %s (made at %s) is part of the graph of the backward with "
                              "inputs (at %s), which waits for its rest: call backward { rest = "
                              "true } on the tensor that it began at first",
                              name_of(node), line_of(node, node->script),
                              line_of(node, node->rest->script));
    /* The first part has freed it. It delivers nothing more, but leads to nodes that do. */
    if (node->rest && node->used) return MS_OK;
    if (node->used)
        return ms_engine_fail(node->engine, MS_ERROR_STATE,
                              "backward: the graph of %s (made at %s) was freed by the backward at "
                              "%s: pass retain_graph = true there to go through it again",
                              name_of(node), line_of(node, node->script),
                              line_of(node, node->freed_script));
    const ms_tensor *written = node->rest ? ms_kept_written(node) : NULL;
    return written ? refuse_written_gradient(node, written) : check_versions(node);
}

/* Appends a node to one of the pass's lists. The lists live for one pass. They grow geometrically,
 * so discovery takes linear time. */
static ms_status push(ms_pass *pass, ms_tape_node ***items, size_t *count, size_t *capacity,
                      ms_tape_node *node)
{
    ms_status status = ms_grow(ms_engine_context(pass->engine), (void **)items, capacity,
                               *count + 1, sizeof **items);
    if (!status) (*items)[(*count)++] = node;
    return status;
}

/* Whether one of the backwards that this one runs inside of goes through the node as well. */
static bool is_shared(const ms_pass *pass, const ms_tape_node *node)
{
    for (const ms_pass *outer = pass->outer; outer; outer = outer->outer)
        if (node->visit == outer->visit) return true;
    return false;
}

static bool is_home(const ms_tensor *tensor)
{
    return tensor && ms_storage_is_home(tensor->storage);
}

/* Whether the node may read what homes held before. */
static bool reads_homes(const ms_tape_node *node)
{
    bool any = node->function != NULL;
    const ms_kept *kept = node->kept;
    for (uint32_t i = 0; i < node->saved_count; i++) any |= is_home(node->saved[i].tensor);
    for (uint32_t o = 0; kept && o < node->output_count; o++)
        any |= is_home(kept->gradients[o].tensor);
    for (uint32_t i = 0; kept && i < node->input_count; i++)
        any |= is_home(kept->results[i].tensor);
    return any;
}

static bool is_input(const ms_pass *pass, const ms_tensor *leaf)
{
    for (uint32_t i = 0; i < pass->input_count; i++)
        if (pass->inputs[i] == leaf) return true;
    return false;
}

/* Makes a node part of this pass when it is met first. A node that an outer pass goes through is
 * left to it if this pass runs for a recomputed function; for a hook it is an error, since the
 * node's list of gradients can serve one pass only. */
static ms_status see(ms_pass *pass, ms_tape_node *node)
{
    if (node->visit == pass->visit) return MS_OK;
    if (is_shared(pass, node)) {
        if (pass->inside) return MS_OK;
        return ms_engine_fail(pass->engine, MS_ERROR_STATE,
                              "backward: %s (made at %s) is part of the graph of the backward that "
                              "is running: a hook cannot go through it, too",
                              name_of(node), line_of(node, node->script));
    }
    ms_status status = check_node(pass, node);
    pass->reads_homes |= reads_homes(node);
    /* pass_close releases each node in `seen`: nothing may fail between the push and the reference.
     */
    if (!status) status = push(pass, &pass->stack, &pass->stack_count, &pass->stack_capacity, node);
    if (!status) status = push(pass, &pass->seen, &pass->seen_count, &pass->seen_capacity, node);
    if (status) return status;
    node->visit = pass->visit;
    node->pending = 0;
    node->on_way = node->leaf && is_input(pass, node->leaf);
    node->references++; /* hooks may drop tensors while this runs */
    ms_tape_node_expect(node);
    return MS_OK;
}

/* Finds all nodes below the roots and counts the edges into each. Edges into nodes of an outer pass
 * are not counted: that pass counts its own, and the recomputed node has an edge to each of them
 * that it used in its first run, so they have not run yet. */
static ms_status discover(ms_pass *pass, ms_tape_node *const *roots, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        ms_status status = see(pass, roots[i]);
        if (status) return status;
    }
    while (pass->stack_count > 0) {
        ms_tape_node *node = pass->stack[--pass->stack_count];
        for (uint32_t i = 0; i < node->input_count; i++) {
            const ms_edge *edge = &node->edges[i];
            /* The rest has nothing to do with inputs, but goes on from other nodes on the way. */
            if (!edge->node || (edge->done && edge->node->leaf)) continue;
            ms_status status = see(pass, edge->node);
            if (status) return status;
            if (edge->node->visit == pass->visit && !edge->done) edge->node->pending++;
        }
    }
    return MS_OK;
}

/* What is recomputed frees its inner graph, so it cannot give its gradients in two parts. */
static ms_status refuse_recomputed(const ms_tape_node *node)
{
    if (!node->on_way || !ms_is_recomputed(node)) return MS_OK;
    return ms_engine_fail(node->engine, MS_ERROR_STATE,
                          "backward: inputs: recompute (at %s) is between this tensor and the "
                          "inputs, and what it recomputes serves one backward: call backward "
                          "without inputs, or compute that part without recompute",
                          line_of(node, node->script));
}

/* For a first part: finds all nodes below the roots, so that all are checked before anything runs,
 * and which of them are on the way. Depth first: a node is left once all that it leads to is known.
 * `pending` is the number of the edge that is followed next, and then, as in discover, that of
 * edges into the node that will deliver in this part. */
static ms_status discover_way(ms_pass *pass, ms_tape_node *const *roots, uint32_t count)
{
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < count && !status; i++) {
        status = see(pass, roots[i]);
        while (!status && pass->stack_count > 0) {
            ms_tape_node *node = pass->stack[pass->stack_count - 1];
            if (node->pending < node->input_count) {
                ms_tape_node *next = node->edges[node->pending++].node;
                if (next) status = see(pass, next);
                continue;
            }
            for (uint32_t e = 0; e < node->input_count; e++)
                node->on_way |= node->edges[e].node && node->edges[e].node->on_way;
            pass->stack_count--;
            status = refuse_recomputed(node);
        }
    }
    for (size_t i = 0; i < pass->seen_count; i++) pass->seen[i]->pending = 0;
    for (size_t i = 0; i < pass->seen_count; i++) {
        const ms_tape_node *node = pass->seen[i];
        for (uint32_t e = 0; e < node->input_count; e++)
            if (node->edges[e].node) node->edges[e].node->pending += node->edges[e].node->on_way;
    }
    return status;
}

/* Whether the pass runs this node, which it has seen. One that the first part has freed has a turn
 * in the rest for hooks that want it. */
static bool takes_part(const ms_pass *pass, const ms_tape_node *node)
{
    if (pass->part == MS_BACKWARD_INPUTS) return node->on_way;
    return !(node->rest && node->used) || node->hooks;
}

/* After discover_way: that each root leads to an input, and to each input some root. */
static ms_status check_way(const ms_pass *pass, ms_tape_node *const *roots, uint32_t count)
{
    char shape[160];
    for (uint32_t i = 0; i < pass->input_count; i++) {
        const ms_meta *meta = pass->inputs[i]->meta;
        bool reached = false;
        for (int k = 0; k < 2; k++)
            reached |= meta->accumulators[k] && meta->accumulators[k]->visit == pass->visit;
        if (!reached)
            return ms_engine_fail(pass->engine, MS_ERROR_ARGUMENT,
                                  "backward: the tensor does not depend on inputs[%u], %s: name "
                                  "what it was computed from",
                                  i + 1, ms_tensor_describe(pass->inputs[i], shape, sizeof shape));
    }
    for (uint32_t i = 0; i < count; i++)
        if (!roots[i]->on_way)
            return ms_engine_fail(pass->engine, MS_ERROR_ARGUMENT,
                                  "backward: tensor %u depends on none of the inputs: call "
                                  "backward without inputs for it",
                                  i + 1);
    return MS_OK;
}

/* Once nothing can be refused any more: the nodes on the way belong to the first part from now on,
 * and the leaves that the rest will come to wait for it. */
static ms_status begin_way(ms_pass *pass)
{
    ms_status status = MS_OK;
    for (size_t i = 0; i < pass->seen_count && !status; i++) {
        ms_tape_node *node = pass->seen[i];
        if (node->leaf && !node->on_way) status = ms_rest_add_leaf(pass->rest, node->leaf);
    }
    for (size_t i = 0; i < pass->seen_count && !status; i++) {
        ms_tape_node *node = pass->seen[i];
        if (!node->on_way || node->leaf) continue;
        node->rest = pass->rest;
        pass->rest->references++;
    }
    return status;
}

/* --------------------------------------------------------------------- heap */

/* The ready nodes as a binary heap, the highest order at the top. Running the latest first frees
 * saved tensors in the reverse order of forward. Accumulators share the greatest order: each runs
 * as soon as its gradient is complete, which lets a reducer launch its bucket while backward still
 * computes. */
static ms_status heap_push(ms_pass *pass, ms_tape_node *node)
{
    ms_status status = push(pass, &pass->ready, &pass->ready_count, &pass->ready_capacity, node);
    if (status) return status;
    size_t at = pass->ready_count - 1;
    while (at > 0 && pass->ready[(at - 1) / 2]->order < pass->ready[at]->order) {
        ms_tape_node *parent = pass->ready[(at - 1) / 2];
        pass->ready[(at - 1) / 2] = pass->ready[at];
        pass->ready[at] = parent;
        at = (at - 1) / 2;
    }
    return MS_OK;
}

/* Takes the ready node of the highest order; there must be one. */
static ms_tape_node *heap_pop(ms_pass *pass)
{
    ms_tape_node *top = pass->ready[0];
    pass->ready[0] = pass->ready[--pass->ready_count];
    for (size_t at = 0;;) {
        size_t best = at, left = 2 * at + 1;
        if (left < pass->ready_count && pass->ready[left]->order > pass->ready[best]->order)
            best = left;
        if (left + 1 < pass->ready_count && pass->ready[left + 1]->order > pass->ready[best]->order)
            best = left + 1;
        if (best == at) return top;
        ms_tape_node *moved = pass->ready[at];
        pass->ready[at] = pass->ready[best];
        pass->ready[best] = moved;
        at = best;
    }
}

/* --------------------------------------------------------- adding gradients */

/* Whether this reference is the only way to the tensor's memory, and the tensor covers all of it.
 * Then it may be added to in place, or kept as a leaf's gradient without a copy. */
static bool is_exclusive(const ms_tensor *tensor)
{
    return tensor->references == 1 && ms_storage_references(tensor->storage) == 1
           && tensor->contiguous && tensor->offset == 0
           && ms_storage_bytes(tensor->storage) == ms_tensor_bytes(tensor);
}

/* Whether the tensor is the home of this node's leaf, to which an operator was allowed to write its
 * gradient. The home is then added to in place, although the reducer holds it as well. */
static bool is_at_home(const ms_tape_node *node, const ms_tensor *tensor)
{
    const ms_meta *meta = node->leaf ? node->leaf->meta : NULL;
    return meta && !node->outer && !meta->grad && meta->home == tensor;
}

/* Adds a gradient to what has arrived at an edge; takes over the gradient, also when it fails. The
 * first one is kept as it is, without a copy. The next one is added in place where the memory of
 * one of the two is exclusive, so that a chain of additions allocates at most one tensor. */
static ms_status add_to(ms_edge edge, ms_tensor *gradient)
{
    ms_tensor **slot = &edge.node->gradients[edge.output];
    if (!*slot) {
        *slot = gradient;
        return MS_OK;
    }
    ms_tensor *inputs[] = { *slot, gradient }, *sum = NULL;
    bool fixed = is_at_home(edge.node, *slot);
    /* a + b and b + a have the same bits, so the choice of the target does not show in results. */
    bool swap = !fixed && !is_exclusive(*slot) && is_exclusive(gradient);
    if (swap) {
        inputs[0] = gradient;
        inputs[1] = *slot;
    }
    ms_status status = ms_op_apply(edge.node->engine, &ms_op_add, NULL,
                                   fixed || is_exclusive(inputs[0]), inputs, 2, &sum, 1);
    if (!status) {
        ms_tensor *before = *slot;
        *slot = sum;
        ms_tensor_release(before);
    }
    ms_tensor_release(gradient);
    return status;
}

/* The first hook after the one with this id. Hooks may remove themselves and each other while they
 * run, so the walk remembers an id, not a pointer. */
static ms_hook *hook_after(ms_hook *hooks, uint64_t id)
{
    while (hooks && hooks->id <= id) hooks = hooks->next;
    return hooks;
}

/* Whether others than the holder of this reference may read the memory: an operator such as add
 * gives one gradient to several nodes. */
bool ms_gradient_is_shared(const ms_tensor *gradient)
{
    return gradient->references > 1 || ms_storage_references(gradient->storage) > 1;
}

/* Calls the gradient hooks of one output, in order of registration. A hook sees what the hooks
 * before it made of the gradient. *gradient is owned and may be replaced. hooks points to the head
 * of the list, since a hook may remove the first one. A hook may write a gradient in place that is
 * this tensor's alone. */
static ms_status call_hooks(ms_engine *engine, ms_hook *const *hooks, uint32_t output,
                            ms_tensor **gradient)
{
    uint64_t id = 0;
    for (ms_hook *hook; (hook = hook_after(*hooks, id)) != NULL;) {
        id = hook->id;
        if (!hook->gradient || hook->output != output) continue;
        hook->called = true;
        ms_tensor *replacement = NULL;
        bool shared = ms_gradient_is_shared(*gradient);
        uint64_t version = ms_tensor_version(*gradient);
        ms_status status = hook->gradient(hook->user, *gradient, &replacement);
        if (!status && shared && ms_tensor_version(*gradient) != version)
            status =
                ms_engine_fail(engine, MS_ERROR_STATE,
                               "on_grad: the hook wrote its gradient in place, which is also "
                               "that of other tensors: return a changed copy (clone it first)");
        if (status) {
            ms_tensor_release(replacement);
            return status;
        }
        if (!replacement) continue;
        char got[160], want[160];
        if (replacement->dtype != (*gradient)->dtype
            || !ms_shape_equal(replacement->dims, replacement->shape, (*gradient)->dims,
                               (*gradient)->shape)) {
            status = ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                    "on_grad: the hook returned %s for a gradient %s",
                                    ms_tensor_describe(replacement, got, sizeof got),
                                    ms_tensor_describe(*gradient, want, sizeof want));
            ms_tensor_release(replacement);
            return status;
        }
        ms_tensor_release(*gradient);
        *gradient = replacement;
    }
    return MS_OK;
}

/* Puts the first gradient of a leaf into *slot; takes it over, also when it fails. It is copied to
 * the home unless it was written there. Without a home it is kept if it is exclusive, else cloned:
 * a gradient that was passed on unchanged may also be that of another leaf, and adding to one must
 * not change the other. */
static ms_status place_gradient(ms_engine *engine, ms_tensor *home, ms_tensor *gradient,
                                ms_tensor **slot)
{
    ms_tensor *placed = NULL;
    if (home ? gradient == home : is_exclusive(gradient)) {
        *slot = gradient;
        return MS_OK;
    }
    ms_status status = home ? ms_copy_into(engine, gradient, home)
                            : ms_op_unary(engine, &ms_op_clone, NULL, gradient, &placed);
    ms_tensor_release(gradient);
    if (!status) *slot = home ? ms_tensor_retain(home) : placed;
    return status;
}

/* The sum over ranks would have this rank's new gradient once, and the old ones as often as there
 * are ranks. */
static ms_status refuse_summed(const ms_tensor *leaf)
{
    char shape[160];
    return ms_engine_fail(
        leaf->engine, MS_ERROR_STATE,
        "backward: the gradient of a shared parameter %s was summed over its ranks "
        "by clipping or a step, and cannot be added to: call zero_grad() before",
        ms_tensor_describe(leaf, shape, sizeof shape));
}

/* The end of a path: the hooks of the leaf see the whole gradient of this backward, it is added to
 * the leaf's grad, then the hooks for accumulated gradients run (a reducer's among them). The node
 * gives its gradient away first, so that a failing hook cannot leave it to be used twice. */
static ms_status run_accumulator(ms_tape_node *node)
{
    ms_engine *engine = node->engine;
    ms_tensor *leaf = node->leaf, *gradient = node->gradients[0];
    ms_meta *meta = leaf->meta;
    ms_tensor **slot = node->outer ? &meta->outer_grad : &meta->grad;
    node->gradients[0] = NULL;
    if (!gradient) return MS_OK;
    ms_status status = *slot && meta->summed && !node->outer ? refuse_summed(leaf) : MS_OK;
    if (!status) status = call_hooks(engine, &meta->hooks, 0, &gradient);
    if (status) {
        ms_tensor_release(gradient);
        return status;
    }
    if (!*slot) {
        status = place_gradient(engine, node->outer ? NULL : meta->home, gradient, slot);
    } else { /* in place: buckets and scripts may hold this very tensor */
        ms_tensor *inputs[] = { *slot, gradient }, *sum = NULL;
        status = ms_op_apply(engine, &ms_op_add, NULL, true, inputs, 2, &sum, 1);
        ms_tensor_release(sum);
        ms_tensor_release(gradient);
    }
    uint64_t id = 0;
    for (const ms_hook *hook; !status && (hook = hook_after(meta->hooks, id)) != NULL;) {
        id = hook->id;
        if (hook->accumulated) status = hook->accumulated(hook->user, leaf);
    }
    return status;
}

/* ------------------------------------------------------------------ running */

/* The home that the operator of this node may write its gradient for input i to, or NULL. It exists
 * for a leaf with a home that has no gradient yet and to which nothing has arrived. The result is
 * NULL in three cases. The same leaf is an earlier input of the node: its gradient would be
 * overwritten. The leaf has gradient hooks: they may replace the gradient, and must see it first.
 * The memory is still read: by this operator (it saved a tensor there, or its incoming gradient is
 * there), or, while other gradients of the leaf are to come, by something else that runs until then
 * (reads_homes). What an outer backward reads is unknown here, so a leaf of an outer pass has no
 * home in this one. */
static ms_tensor *home_for(const ms_pass *pass, const ms_tape_node *node, uint32_t i)
{
    const ms_tape_node *to = node->edges[i].node;
    if (!to || !to->leaf || to->outer || to->gradients[0]) return NULL;
    const ms_meta *meta = to->leaf->meta;
    if (!meta->home || meta->grad) return NULL;
    for (uint32_t k = 0; k < i; k++)
        if (node->edges[k].node == to) return NULL;
    for (const ms_hook *hook = meta->hooks; hook; hook = hook->next)
        if (hook->gradient) return NULL;
    if (to->visit != pass->visit || (to->pending > 1 && pass->reads_homes)) return NULL;
    for (uint32_t k = 0; k < node->saved_count; k++)
        if (node->saved[k].tensor->storage == meta->home->storage) return NULL;
    for (uint32_t k = 0; k < node->output_count; k++)
        if (node->gradients[k] && node->gradients[k]->storage == meta->home->storage) return NULL;
    return meta->home;
}

/* Arrays for one call of a node's backward, each with an entry for each input. All begin as NULLs.
 * later: of a first part, what is left to the rest. */
typedef struct ms_call {
    ms_tensor **results, **sums, **homes;
    bool *needs, *later, any_needs, any_later;
    bool once;       /* of two parts only the first one calls it, for all results */
    uint32_t unread; /* what an operator has said of the rest: ms_op_gradient.unread */
} ms_call;

/* Calls the backward of an operator or a function. Dtypes of gradients are those of the tensors, so
 * operators run outside of autocast; a function, as that of recompute, sees what its caller set.
 */
static ms_status run_backward(ms_tape_node *node, ms_call *call, bool last)
{
    bool splits = call->any_later && !call->once;
    if (node->function)
        return node->function->backward(node->user, node->gradients, call->results, call->needs);
    ms_tensor *saved[MS_OP_SAVED_MAX];
    for (uint32_t i = 0; i < node->saved_count; i++) saved[i] = node->saved[i].tensor;
    ms_op_gradient gradient = { .engine = node->engine,
                                .op = node->op,
                                .attributes = node->attributes,
                                .saved = saved,
                                .saved_count = node->saved_count,
                                .inputs = node->inputs,
                                .input_count = node->input_count,
                                .outputs = node->outputs,
                                .gradients = node->gradients,
                                .output_count = node->output_count,
                                .results = call->results,
                                .needs = call->needs,
                                .sums = call->sums,
                                .homes = call->homes,
                                .later = splits ? call->later : NULL,
                                .kept = node->kept && !call->once ? node->kept->tensors : NULL,
                                .unread = splits ? &call->unread : NULL,
                                .last = last };
    ms_dtype autocast = ms_engine_autocast(node->engine);
    if (autocast != MS_F32) ms_engine_set_autocast(node->engine, MS_F32);
    ms_status status = node->op->backward(&gradient);
    if (autocast != MS_F32) ms_engine_set_autocast(node->engine, autocast);
    return status;
}

/* Hands the results on to the nodes before, and takes them over, also when status is an error. A
 * result that is the same tensor as the sum that was offered has been added there already. If no
 * sum was offered, two inputs may have the same tensor as their result, as in x + x: each counts.
 * Each edge of this part counts down `pending`, also one without a result. */
static ms_status deliver(ms_pass *pass, ms_tape_node *node, const ms_call *call)
{
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < node->input_count; i++) {
        ms_edge edge = node->edges[i];
        ms_tensor *result = call->results[i];
        if (!edge.node || edge.done || call->later[i]) continue;
        node->edges[i].done = pass->part == MS_BACKWARD_INPUTS;
        /* The operator has added to the sum, so the second reference goes. */
        if (status || (call->sums[i] && result == call->sums[i])) ms_tensor_release(result);
        else if (result) status = add_to(edge, result);
        if (!status && edge.node->visit == pass->visit && --edge.node->pending == 0)
            status = heap_push(pass, edge.node);
    }
    return status;
}

/* Whether the node's gradients have no memory. Of one node they either all have memory or are all
 * on "meta", as its outputs are. */
static bool on_meta(const ms_tape_node *node)
{
    for (uint32_t i = 0; i < node->output_count; i++)
        if (node->gradients[i]) return ms_tensor_is_meta(node->gradients[i]);
    return false;
}

/* Arrays for a call: those of the caller where they fit, else allocated, to be released with
 * *memory. */
static ms_status make_call(const ms_tape_node *node, ms_tensor **few, bool *few_flags,
                           ms_call *call, void **memory)
{
    uint32_t count = MS_NODE_INPUTS;
    ms_tensor **tensors = few;
    bool *flags = few_flags;
    if (node->input_count > count) {
        count = node->input_count;
        ms_status status =
            ms_allocate(ms_engine_context(node->engine),
                        count * (3 * sizeof(ms_tensor *) + 2 * sizeof(bool)), "backward", memory);
        if (status) return status;
        tensors = *memory;
        flags = (bool *)(tensors + 3 * (size_t)count);
    }
    *call = (ms_call){ .results = tensors,
                       .sums = tensors + count,
                       .homes = tensors + 2 * (size_t)count,
                       .needs = flags,
                       .later = flags + count };
    return MS_OK;
}

/* What this call is asked for: in the first part the results that lead to inputs, in the rest those
 * that the first part has not made. What is called once makes all in the first part. */
static void plan_call(ms_pass *pass, ms_tape_node *node, ms_call *call)
{
    bool is_first = pass->part == MS_BACKWARD_INPUTS;
    call->once = node->function || !(node->op->flags & MS_OP_SPLITS);
    for (uint32_t i = 0; i < node->input_count; i++) {
        const ms_edge *edge = &node->edges[i];
        if (!edge->node || edge->done) continue;
        call->later[i] = is_first && !edge->node->on_way;
        call->needs[i] = call->once ? !node->kept : !call->later[i];
        if (node->kept && node->kept->results[i].tensor) {
            call->results[i] = node->kept->results[i].tensor;
            node->kept->results[i].tensor = NULL;
            call->needs[i] = false;
        }
        call->any_later |= call->later[i];
        call->any_needs |= call->needs[i];
        if (call->later[i]) continue;
        ms_tensor *sum = edge->node->gradients[edge->output];
        if (sum && (is_exclusive(sum) || is_at_home(edge->node, sum))) call->sums[i] = sum;
        if (node->op && call->needs[i]) call->homes[i] = home_for(pass, node, i);
    }
}

/* Frees the hooks, which have run; after a first part, but for those that the rest calls. */
static void free_hooks(ms_tape_node *node, bool is_first)
{
    ms_hook *list = node->hooks, *gone = NULL, **last = &gone, **stays = &node->hooks;
    node->hooks = NULL;
    for (ms_hook *hook = list; hook; hook = list) {
        list = hook->next;
        hook->next = NULL;
        ms_hook ***to = is_first && hook->in_both && hook->called ? &stays : &last;
        **to = hook;
        *to = &hook->next;
    }
    ms_hooks_free(ms_engine_context(node->engine), gone);
}

/* In the rest, at the turn of a node that the first part has run. */
static ms_status call_hooks_again(ms_tape_node *node)
{
    ms_status status = MS_OK;
    uint64_t id = 0;
    for (const ms_hook *hook; !status && (hook = hook_after(node->hooks, id)) != NULL;) {
        ms_tensor *replacement = NULL;
        id = hook->id;
        status = hook->gradient(hook->user, NULL, &replacement);
        ms_tensor_release(replacement);
    }
    return status;
}

/* After the first part's call: what the rest needs stays, the hooks have run. If the call has made
 * all results, the rest only delivers them, and neither gradients nor saved tensors stay. Reads are
 * counted again, as those of the rest may be fewer. */
static void keep_for_rest(ms_tape_node *node, const ms_call *call)
{
    bool calls_again = false;
    ms_tape_node_unexpect(node);
    for (uint32_t i = 0; i < node->input_count; i++)
        if (call->later[i]) {
            calls_again |= !call->once && !call->results[i];
            ms_kept_put_result(node, i, call->results[i]);
            call->results[i] = NULL;
        }
    node->kept->unread = call->unread;
    if (calls_again) ms_kept_put_gradients(node);
    else ms_tape_node_drop_saved(node);
    ms_tape_node_expect(node);
    free_hooks(node, true);
}

/* After the only call, or the last one. script: the line of the backward. */
static void free_what_it_used(ms_tape_node *node, uint32_t script, bool is_first)
{
    ms_tape_node_drop_saved(node);
    ms_kept_free(node);
    free_hooks(node, is_first);
    node->used = true;
    node->freed_script = script;
}

/* A gradient that is left in a node arrived after the node had run. Only a recomputed function can
 * do that, by using in its second run a tensor that it had not used in its first: no edge made the
 * node wait. */
static ms_status check_delivered(const ms_tape_node *node)
{
    for (uint32_t o = 0; o < node->output_count; o++)
        if (node->gradients[o])
            return ms_engine_fail(
                node->engine, MS_ERROR_STATE,
                "backward: the gradient of %s (made at %s) was complete when a recomputed function "
                "used it, which it had not at first: it must do the same each time",
                name_of(node), line_of(node, node->script));
    return MS_OK;
}

/* Calls the hooks of the outputs, in the part in which their gradients are complete. *any: whether
 * a gradient has arrived. In the rest of a node that the first part has run, these are what it has
 * kept. */
static ms_status begin_node(ms_tape_node *node, bool *any)
{
    bool again = node->kept != NULL;
    ms_status status = again ? check_delivered(node) : MS_OK;
    if (again && !status) ms_kept_take_gradients(node);
    if (again && !status) status = call_hooks_again(node);
    for (uint32_t i = 0; i < node->output_count && !status; i++) {
        *any |= node->gradients[i] != NULL;
        if (node->gradients[i] && node->hooks && !again)
            status = call_hooks(node->engine, &node->hooks, i, &node->gradients[i]);
    }
    return status;
}

/* Runs the operator's backward as far as this part asks for it, and delivers. While it runs, tasks
 * carry the script line of the forward call, so that an error of a backward task names the line
 * that the user wrote. Unless the graph is retained, what the node saved is freed here, not at the
 * end of the pass: memory falls while backward goes on. */
static ms_status run_call(ms_pass *pass, ms_tape_node *node, ms_call *call, uint32_t script)
{
    ms_engine *engine = pass->engine;
    bool any = false;
    ms_status status = begin_node(node, &any);
    if (status) return status;
    plan_call(pass, node, call);
    if (call->any_later) status = ms_kept_new(node);
    /* A node that no gradient reached is not run, but still delivers: its inputs count on it. */
    bool runs = any && call->any_needs;
    if (runs && !status) status = recast_saved(node);
    /* Hooks of this node, and of nodes that have run, may have written what it saved. */
    if (runs && !status) status = check_versions(node);
    /* What backward makes is on "meta" exactly if its gradients are. */
    bool meta = ms_engine_set_meta(engine, any && on_meta(node));
    if (runs && !status)
        status = run_backward(node, call, !pass->retain && (!call->any_later || call->once));
    ms_engine_set_meta(engine, meta);
    if (status) {
        for (uint32_t i = 0; i < node->input_count; i++) ms_tensor_release(call->results[i]);
        return status;
    }
    if (call->any_later) keep_for_rest(node, call);
    for (uint32_t i = 0; i < node->output_count; i++) {
        ms_tensor_release(node->gradients[i]);
        node->gradients[i] = NULL;
    }
    /* The rest reads what this node has saved. */
    if (!call->any_later) ms_tape_node_unexpect(node);
    if (!pass->retain && !call->any_later)
        free_what_it_used(node, script, pass->part == MS_BACKWARD_INPUTS);
    return deliver(pass, node, call);
}

/* Runs one ready node. */
static ms_status run_node(ms_pass *pass, ms_tape_node *node)
{
    ms_engine *engine = pass->engine;
    uint32_t script = ms_engine_script(engine);
    ms_tensor *few[3 * MS_NODE_INPUTS] = { NULL };
    bool few_flags[2 * MS_NODE_INPUTS] = { false };
    ms_call call = { 0 };
    void *memory = NULL;
    if (script && node->script) ms_engine_set_script(engine, node->script);
    ms_status status = MS_OK;
    if (node->leaf) status = run_accumulator(node);
    else if (node->used) {
        status = call_hooks_again(node);
        free_hooks(node, false);
    } else {
        status = make_call(node, few, few_flags, &call, &memory);
        if (!status) status = run_call(pass, node, &call, script);
    }
    ms_release(ms_engine_context(engine), memory);
    ms_engine_set_script(engine, script);
    return status;
}

/* The gradient that enters at a root, owned: an alias of the given one, which must have the root's
 * dtype and shape, or 1 for a root of one element. */
static ms_status root_gradient(ms_tensor *root, ms_tensor *given, ms_tensor **out)
{
    char have[160], want[160];
    ms_status status = ms_history_check(root->engine, "backward", root);
    if (status) return status;
    if (!ms_tensor_requires_grad(root))
        return ms_engine_fail(root->engine, MS_ERROR_ARGUMENT,
                              "backward: this tensor has no graph: nothing that it was computed "
                              "from requires a gradient (a tensor computed from gradients has no "
                              "graph either: gradients of gradients are not supported)");
    if (!given) {
        if (root->count != 1)
            return ms_engine_fail(root->engine, MS_ERROR_ARGUMENT,
                                  "backward: the tensor is %s; pass { gradient = t } of that "
                                  "shape, or reduce it to one element",
                                  ms_tensor_describe(root, have, sizeof have));
        bool meta = ms_engine_set_meta(root->engine, ms_tensor_is_meta(root));
        status = ms_op_full(root->engine, root->dtype, root->dims, root->shape, 1.0, out);
        ms_engine_set_meta(root->engine, meta);
        return status;
    }
    if (given->dtype != root->dtype
        || !ms_shape_equal(given->dims, given->shape, root->dims, root->shape))
        return ms_engine_fail(root->engine, MS_ERROR_ARGUMENT,
                              "backward: the gradient is %s, the tensor %s",
                              ms_tensor_describe(given, have, sizeof have),
                              ms_tensor_describe(root, want, sizeof want));
    return ms_tensor_alias(given, out);
}

/* A part that has failed has used up some of the graph: the nodes that it shares with the other
 * part serve no backward any more. */
static void lose_parts(const ms_pass *pass)
{
    ms_rest_forget_leaves(pass->rest);
    for (size_t i = 0; i < pass->seen_count; i++) {
        ms_tape_node *node = pass->seen[i];
        if (node->rest != pass->rest || node->used) continue;
        ms_tape_node_unexpect(node);
        free_what_it_used(node, ms_engine_script(pass->engine), false);
    }
}

/* At the end of a part. After a rest, and after a failure, the nodes know of no record any more. */
static void close_parts(const ms_pass *pass, bool failed)
{
    if (!pass->rest) return;
    if (failed && pass->started) lose_parts(pass);
    bool leaves = pass->started && (failed || pass->part == MS_BACKWARD_REST);
    for (size_t i = 0; i < pass->seen_count && leaves; i++)
        if (pass->seen[i]->rest == pass->rest) ms_rest_leave(pass->seen[i]);
    ms_rest_release(pass->rest);
}

/* Gives back all that the pass holds. After an error nodes still have gradients that arrived and
 * reads that are counted; both would spoil the next backward through a retained graph. */
static void pass_close(ms_pass *pass, bool failed)
{
    ms_context *context = ms_engine_context(pass->engine);
    close_parts(pass, failed);
    for (size_t i = 0; i < pass->seen_count; i++) {
        ms_tape_node *node = pass->seen[i];
        for (uint32_t o = 0; o < node->output_count; o++) {
            ms_tensor_release(node->gradients[o]);
            node->gradients[o] = NULL;
        }
        ms_tape_node_unexpect(node);
        ms_tape_node_release(node);
    }
    ms_release(context, pass->stack);
    ms_release(context, pass->ready);
    ms_release(context, pass->seen);
}

/* The gradients of the roots enter. The rest has kept them. */
static ms_status enter(ms_pass *pass, ms_tensor *const *roots, ms_tensor *const *gradients,
                       ms_edge *edges, uint32_t count)
{
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < count && !status && pass->part != MS_BACKWARD_REST; i++) {
        ms_tensor *gradient = NULL;
        status = root_gradient(roots[i], gradients ? gradients[i] : NULL, &gradient);
        if (!status) pass->reads_homes |= ms_storage_is_home(gradient->storage);
        if (!status) status = add_to((ms_edge){ edges[i].node, edges[i].output, false }, gradient);
    }
    return status;
}

/* The gradients of leaves that the first part has marked as scaled are marked again: they may have
 * been consumed since. */
static ms_status mark_again(const ms_pass *pass)
{
    ms_status status = MS_OK;
    for (size_t i = 0; i < pass->seen_count && !status; i++)
        if (pass->seen[i]->marks) status = ms_mark_leaves(pass->seen[i]);
    return status;
}

/* Finds and checks what takes part; nothing has changed if it fails. */
static ms_status prepare(ms_pass *pass, ms_edge *edges, uint32_t count)
{
    ms_tape_node *nodes[MS_RECOMPUTE_OUTPUTS];
    for (uint32_t i = 0; i < count; i++) nodes[i] = edges[i].node;
    if (pass->part != MS_BACKWARD_INPUTS) return discover(pass, nodes, count);
    ms_status status = discover_way(pass, nodes, count);
    return status ? status : check_way(pass, nodes, count);
}

/* The three steps of a pass. Writes that waited for reads of a node are called right after that
 * node: see unread.c. */
static ms_status run_pass(ms_tape *tape, ms_pass *pass, ms_tensor *const *roots,
                          ms_tensor *const *gradients, ms_edge *edges, uint32_t count)
{
    ms_status status = prepare(pass, edges, count);
    if (!status) status = enter(pass, roots, gradients, edges, count);
    if (status) return status;
    pass->started = true;
    if (pass->part == MS_BACKWARD_INPUTS) status = begin_way(pass);
    if (pass->part == MS_BACKWARD_REST) {
        ms_rest_forget_leaves(pass->rest);
        status = ms_rest_give_ends(pass->rest, tape);
        if (!status) status = mark_again(pass);
    }
    for (size_t i = 0; i < pass->seen_count && !status; i++)
        if (pass->seen[i]->pending == 0 && takes_part(pass, pass->seen[i]))
            status = heap_push(pass, pass->seen[i]);
    while (!status && pass->ready_count > 0) {
        status = run_node(pass, heap_pop(pass));
        if (!status && tape->unread_count > 0) status = ms_unread_run(tape);
    }
    for (size_t i = 0; i < pass->seen_count && !status; i++)
        status = check_delivered(pass->seen[i]);
    return status;
}

/* Calls what hooks registered for the end, after the outermost backward. The loop reads the count
 * each time, since a call may register another one; it is called as well. After an error the list
 * is only emptied. */
static ms_status run_ends(ms_tape *tape, ms_status status)
{
    for (size_t i = 0; i < tape->end_count && !status; i++) {
        ms_at_end end = tape->ends[i];
        status = end.f(end.user);
    }
    tape->end_count = 0;
    return status;
}

/* The end of a first part. A write that still waits would have to wait for the rest, and between
 * the parts the script may write what it wants to: it would run too late to be seen. */
static ms_status end_first(const ms_pass *pass, ms_tape *tape, ms_status status)
{
    if (!status && tape->unread_count > 0)
        status = ms_engine_fail(
            pass->engine, MS_ERROR_STATE,
            "backward: inputs: a step in backward of an input waits until the rest has read it: "
            "leave out tensors that are stepped in backward: their gradients belong to the rest");
    size_t left = 0;
    for (size_t i = 0; i < tape->end_count && !status; i++) {
        ms_at_end end = tape->ends[i];
        if (end.of_part) status = end.f(end.user);
        else tape->ends[left++] = end;
    }
    tape->end_count = status ? 0 : left;
    if (left > 0 && !status) ms_rest_take_ends(pass->rest, tape);
    return status;
}

/* One backward, or a part of one. Nothing is recorded while it runs: gradients of gradients are not
 * supported. The tape's state (recording, the innermost pass) is put back whatever happened, since
 * a script may catch the error and go on. */
static ms_status run(ms_tape *tape, ms_pass *pass, ms_tensor *const *roots,
                     ms_tensor *const *gradients, uint32_t count)
{
    ms_edge edges[MS_RECOMPUTE_OUTPUTS] = { { 0 } };
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < count && !status; i++) status = ms_edge_of(roots[i], &edges[i]);
    pass->outer = tape->pass;
    pass->visit = ++tape->visits;
    bool recording = ms_engine_set_recording(pass->engine, false);
    tape->pass = pass;
    if (!status) status = run_pass(tape, pass, roots, gradients, edges, count);
    if (pass->part == MS_BACKWARD_INPUTS) status = end_first(pass, tape, status);
    else if (!pass->outer) status = run_ends(tape, status);
    tape->pass = pass->outer;
    ms_engine_set_recording(pass->engine, recording);
    pass_close(pass, status != MS_OK);
    if (!pass->outer) ms_unread_drop(tape, pass->engine);
    for (uint32_t i = 0; i < count; i++) ms_tape_node_release(edges[i].node);
    return status;
}

/* What is checked of the roots before anything else. */
static ms_status check_roots(ms_engine *engine, ms_tensor *const *roots, uint32_t count)
{
    if (count == 0 || count > MS_RECOMPUTE_OUTPUTS)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "backward: 1 to %d tensors, not %u",
                              MS_RECOMPUTE_OUTPUTS, count);
    for (uint32_t i = 0; i < count; i++)
        if (!ms_tensor_requires_grad(roots[i])) {
            ms_tensor *unused = NULL;
            return root_gradient(roots[i], NULL, &unused);
        }
    return MS_OK;
}

static ms_status backward(ms_engine *engine, ms_tensor *const *roots, ms_tensor *const *gradients,
                          uint32_t count, bool retain_graph, bool inside)
{
    ms_tape *tape = NULL;
    ms_status status = ms_tape_of(engine, &tape);
    if (!status) status = check_roots(engine, roots, count);
    if (status) return status;
    ms_pass pass = { .engine = engine, .inside = inside, .retain = retain_graph };
    return run(tape, &pass, roots, gradients, count);
}

/* A hook's backward has a graph of its own, of which the second part would have no use. */
static ms_status refuse_inside(ms_engine *engine, const ms_tape *tape, const char *what)
{
    if (!tape->pass) return MS_OK;
    return ms_engine_fail(engine, MS_ERROR_STATE,
                          "backward: %s: not inside of a backward: call it after that", what);
}

ms_status ms_backward_inputs(ms_engine *engine, ms_tensor *const *roots,
                             ms_tensor *const *gradients, uint32_t count, ms_tensor *const *inputs,
                             uint32_t input_count)
{
    ms_tape *tape = NULL;
    ms_status status = ms_tape_of(engine, &tape);
    if (!status) status = check_roots(engine, roots, count);
    if (!status) status = refuse_inside(engine, tape, "inputs");
    if (!status) status = ms_rest_check_inputs(engine, inputs, input_count);
    for (uint32_t i = 0; i < count && !status; i++)
        if (ms_tensor_is_leaf(roots[i]))
            status = ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                    "backward: inputs: the tensor is a leaf, and has no graph of "
                                    "which a rest could be left: call backward without inputs");
    if (status) return status;
    ms_pass pass = {
        .engine = engine, .part = MS_BACKWARD_INPUTS, .inputs = inputs, .input_count = input_count
    };
    status = ms_rest_new(engine, roots, count, &pass.rest);
    return status ? status : run(tape, &pass, roots, gradients, count);
}

ms_status ms_backward_rest(ms_engine *engine, ms_tensor *const *roots, uint32_t count)
{
    ms_tape *tape = NULL;
    ms_pass pass = { .engine = engine, .part = MS_BACKWARD_REST };
    ms_status status = ms_tape_of(engine, &tape);
    if (!status) status = check_roots(engine, roots, count);
    if (!status) status = refuse_inside(engine, tape, "rest");
    if (!status) status = ms_rest_of(engine, roots, count, &pass.rest);
    if (status) return status;
    pass.rest->references++;
    return run(tape, &pass, roots, NULL, count);
}

ms_backward_part ms_backward_running(const ms_engine *engine)
{
    const ms_tape *tape = ms_engine_get(engine, MS_SLOT_GRAD);
    const ms_pass *pass = tape ? tape->pass : NULL;
    while (pass && pass->outer) pass = pass->outer;
    return pass ? pass->part : MS_BACKWARD_WHOLE;
}

/* Reducers use it for the parameters that backward has not reached. A call that is registered
 * inside of an inner backward waits for the outermost one as well. */
static ms_status add_end(ms_engine *engine, ms_at_end end)
{
    ms_tape *tape = ms_engine_get(engine, MS_SLOT_GRAD);
    if (!tape || !tape->pass)
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "at the end of which backward? None is running");
    ms_status status = ms_grow(ms_engine_context(engine), (void **)&tape->ends, &tape->end_capacity,
                               tape->end_count + 1, sizeof *tape->ends);
    if (!status) tape->ends[tape->end_count++] = end;
    return status;
}

ms_status ms_backward_at_end(ms_engine *engine, ms_status (*f)(void *user), void *user)
{
    return add_end(engine, (ms_at_end){ .f = f, .user = user });
}

ms_status ms_backward_at_part_end(ms_engine *engine, ms_status (*f)(void *user), void *user)
{
    return add_end(engine, (ms_at_end){ .f = f, .user = user, .of_part = true });
}

/* Called by the host, also by a hook that goes through a graph of its own. */
ms_status ms_backward(ms_engine *engine, ms_tensor *const *roots, ms_tensor *const *gradients,
                      uint32_t count, bool retain_graph)
{
    return backward(engine, roots, gradients, count, retain_graph, false);
}

/* The inner graph is never retained: it was recorded for this one use. */
ms_status ms_backward_inside(ms_engine *engine, ms_tensor *const *roots,
                             ms_tensor *const *gradients, uint32_t count)
{
    return backward(engine, roots, gradients, count, false, true);
}
