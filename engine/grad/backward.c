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
 * passes. */
#include "grad/backward.h"

#include <string.h>

#include "grad/node.h"
#include "grad/record.h"
#include "grad/unread.h"
#include "ops/autocast.h"
#include "ops/values.h"

/* One backward, on the C stack of backward(). `seen` holds a reference to each node that takes
 * part, so that hooks may drop tensors and graphs while it runs; pass_close gives all of them back,
 * whatever happened. */
struct ms_pass {
    ms_engine *engine;
    const ms_pass *outer; /* the one that this runs inside of, or NULL */
    bool inside;          /* what it shares with an outer one is left to that */
    bool reads_homes;     /* a node in it may read what homes held before */
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
        status = ms_storage_recast(node->saved[i].tensor->storage);
    return status;
}

/* A node whose saved tensors were freed cannot run again; it keeps the line of the backward that
 * freed them for this message. */
static ms_status check_node(const ms_tape_node *node)
{
    if (node->used)
        return ms_engine_fail(node->engine, MS_ERROR_STATE,
                              "backward: the graph of %s (made at %s) was freed by the backward at "
                              "%s: pass retain_graph = true there to go through it again",
                              name_of(node), line_of(node, node->script),
                              line_of(node, node->freed_script));
    return check_versions(node);
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
    ms_status status = check_node(node);
    pass->reads_homes |= node->function != NULL;
    for (uint32_t i = 0; i < node->saved_count; i++)
        pass->reads_homes |= ms_storage_is_home(node->saved[i].tensor->storage);
    /* pass_close releases each node in `seen`: nothing may fail between the push and the reference.
     */
    if (!status) status = push(pass, &pass->stack, &pass->stack_count, &pass->stack_capacity, node);
    if (!status) status = push(pass, &pass->seen, &pass->seen_count, &pass->seen_capacity, node);
    if (status) return status;
    node->visit = pass->visit;
    node->pending = 0;
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
            if (!node->edges[i].node) continue;
            ms_status status = see(pass, node->edges[i].node);
            if (status) return status;
            if (node->edges[i].node->visit == pass->visit) node->edges[i].node->pending++;
        }
    }
    return MS_OK;
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
static const ms_hook *hook_after(const ms_hook *hooks, uint64_t id)
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
    for (const ms_hook *hook; (hook = hook_after(*hooks, id)) != NULL;) {
        id = hook->id;
        if (!hook->gradient || hook->output != output) continue;
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

/* Calls the backward of an operator or a function. Dtypes of gradients are those of the tensors, so
 * operators run outside of autocast; a function, as that of recompute, sees what its caller set.
 * results has input_count entries, all NULL
 * before; sums and homes are what an operator may add to or write (see op.h). */
static ms_status run_backward(ms_tape_node *node, ms_tensor **results, const bool *needs,
                              ms_tensor *const *sums, ms_tensor *const *homes, bool last)
{
    if (node->function)
        return node->function->backward(node->user, node->gradients, results, needs);
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
                                .results = results,
                                .needs = needs,
                                .sums = sums,
                                .homes = homes,
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
 * Each edge counts down `pending`, also one without a result. */
static ms_status deliver(ms_pass *pass, ms_tape_node *node, ms_tensor **results,
                         ms_tensor *const *sums)
{
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < node->input_count; i++) {
        ms_edge edge = node->edges[i];
        if (!edge.node) continue;
        /* The operator has added to the sum, so the second reference goes. */
        if (status || (sums[i] && results[i] == sums[i])) ms_tensor_release(results[i]);
        else if (results[i]) status = add_to(edge, results[i]);
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

/* Runs one ready node: hooks of its outputs, checks, the operator's backward, delivery. While it
 * runs, tasks carry the script line of the forward call, so that an error of a backward task names
 * the line that the user wrote. Unless the graph is retained, what the node saved is freed here,
 * not at the end of the pass: memory falls while backward goes on. */
static ms_status run_node(ms_pass *pass, ms_tape_node *node)
{
    ms_engine *engine = pass->engine;
    uint32_t script = ms_engine_script(engine);
    if (script && node->script) ms_engine_set_script(engine, node->script);
    ms_status status = MS_OK;
    bool any = false;
    ms_tensor *few[3 * MS_NODE_INPUTS] = { NULL }, **results = few, **sums = few + MS_NODE_INPUTS,
                       **homes = few + 2 * MS_NODE_INPUTS;
    bool few_needs[MS_NODE_INPUTS], *needs = few_needs;
    void *memory = NULL;
    if (node->leaf) {
        status = run_accumulator(node);
        goto done;
    }
    for (uint32_t i = 0; i < node->output_count && !status; i++) {
        any |= node->gradients[i] != NULL;
        if (node->gradients[i] && node->hooks)
            status = call_hooks(engine, &node->hooks, i, &node->gradients[i]);
    }
    if (!status && node->input_count > MS_NODE_INPUTS) {
        status = ms_allocate(ms_engine_context(engine),
                             node->input_count * (3 * sizeof(ms_tensor *) + sizeof(bool)),
                             "backward", &memory);
        results = memory;
        sums = results + node->input_count;
        homes = sums + node->input_count;
        needs = (bool *)(homes + node->input_count);
    }
    if (status) goto done;
    for (uint32_t i = 0; i < node->input_count; i++) {
        ms_edge edge = node->edges[i];
        needs[i] = edge.node != NULL;
        ms_tensor *sum = edge.node ? edge.node->gradients[edge.output] : NULL;
        if (sum && (is_exclusive(sum) || is_at_home(edge.node, sum))) sums[i] = sum;
        if (node->op) homes[i] = home_for(pass, node, i);
    }
    if (any) status = recast_saved(node);
    /* Hooks of this node, and of nodes that have run, may have written what it saved. */
    if (any && !status) status = check_versions(node);
    if (status) goto done;
    /* A node that no gradient reached is not run, but still delivers: its inputs count on it. */
    /* What backward makes is on "meta" exactly if its gradients are. */
    bool meta = ms_engine_set_meta(engine, any && on_meta(node));
    if (any) status = run_backward(node, results, needs, sums, homes, !pass->retain);
    ms_engine_set_meta(engine, meta);
    for (uint32_t i = 0; i < node->output_count; i++) {
        ms_tensor_release(node->gradients[i]);
        node->gradients[i] = NULL;
    }
    ms_tape_node_unexpect(node);
    if (!pass->retain) {
        ms_tape_node_drop_saved(node);
        ms_hooks_free(ms_engine_context(engine), node->hooks);
        node->hooks = NULL;
        node->used = true;
        node->freed_script = script;
    }
    if (status)
        for (uint32_t i = 0; i < node->input_count; i++) ms_tensor_release(results[i]);
    else status = deliver(pass, node, results, sums);
done:
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

/* Gives back all that the pass holds. After an error nodes still have gradients that arrived and
 * reads that are counted; both would spoil the next backward through a retained graph. */
static void pass_close(ms_pass *pass)
{
    ms_context *context = ms_engine_context(pass->engine);
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

/* The three steps of a pass. Writes that waited for reads of a node are called right after that
 * node: see unread.c. */
static ms_status run_pass(ms_tape *tape, ms_pass *pass, ms_tensor *const *roots,
                          ms_tensor *const *gradients, ms_edge *edges, uint32_t count)
{
    ms_tape_node *nodes[MS_RECOMPUTE_OUTPUTS];
    for (uint32_t i = 0; i < count; i++) nodes[i] = edges[i].node;
    ms_status status = discover(pass, nodes, count);
    for (uint32_t i = 0; i < count && !status; i++) {
        ms_tensor *gradient = NULL;
        status = root_gradient(roots[i], gradients ? gradients[i] : NULL, &gradient);
        if (!status) pass->reads_homes |= ms_storage_is_home(gradient->storage);
        if (!status) status = add_to((ms_edge){ nodes[i], edges[i].output }, gradient);
    }
    for (size_t i = 0; i < pass->seen_count && !status; i++)
        if (pass->seen[i]->pending == 0) status = heap_push(pass, pass->seen[i]);
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

/* One backward. Nothing is recorded while it runs: gradients of gradients are not supported. The
 * tape's state (recording, the innermost pass) is put back whatever happened, since a script may
 * catch the error and go on. */
static ms_status backward(ms_engine *engine, ms_tensor *const *roots, ms_tensor *const *gradients,
                          uint32_t count, bool retain_graph, bool inside)
{
    ms_tape *tape = NULL;
    ms_edge edges[MS_RECOMPUTE_OUTPUTS] = { { 0 } };
    ms_status status = ms_tape_of(engine, &tape);
    if (status) return status;
    if (count == 0 || count > MS_RECOMPUTE_OUTPUTS)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "backward: 1 to %d tensors, not %u",
                              MS_RECOMPUTE_OUTPUTS, count);
    for (uint32_t i = 0; i < count; i++)
        if (!ms_tensor_requires_grad(roots[i])) {
            ms_tensor *unused = NULL;
            return root_gradient(roots[i], NULL, &unused);
        }
    for (uint32_t i = 0; i < count && !status; i++) status = ms_edge_of(roots[i], &edges[i]);
    ms_pass pass = { .engine = engine,
                     .outer = tape->pass,
                     .inside = inside,
                     .visit = ++tape->visits,
                     .retain = retain_graph };
    bool recording = ms_engine_set_recording(engine, false);
    tape->pass = &pass;
    if (!status) status = run_pass(tape, &pass, roots, gradients, edges, count);
    if (!pass.outer) status = run_ends(tape, status);
    tape->pass = pass.outer;
    ms_engine_set_recording(engine, recording);
    pass_close(&pass);
    if (!pass.outer) ms_unread_drop(tape, engine);
    for (uint32_t i = 0; i < count; i++) ms_tape_node_release(edges[i].node);
    return status;
}

/* Reducers use it for the parameters that backward has not reached. A call that is registered
 * inside of an inner backward waits for the outermost one as well. */
ms_status ms_backward_at_end(ms_engine *engine, ms_status (*f)(void *user), void *user)
{
    ms_tape *tape = ms_engine_get(engine, MS_SLOT_GRAD);
    if (!tape || !tape->pass)
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "at the end of which backward? None is running");
    ms_status status = ms_grow(ms_engine_context(engine), (void **)&tape->ends, &tape->end_capacity,
                               tape->end_count + 1, sizeof *tape->ends);
    if (!status) tape->ends[tape->end_count++] = (ms_at_end){ f, user };
    return status;
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
