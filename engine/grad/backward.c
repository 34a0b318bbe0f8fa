/* backward.c: from roots to leaves, latest node first, without recursion. */
#include "grad/tape.h"

#include <string.h>

#include "tensor/values.h"

struct ms_pass { /* one backward */
    ms_engine *engine;
    const ms_pass *outer; /* the one that this runs inside of, or NULL */
    bool inside;          /* what it shares with an outer one is left to that */
    bool reads_homes;     /* something in it may read where gradients lie, as it was before */
    uint64_t visit;
    bool retain;
    ms_node **stack; /* nodes to look at; later all nodes that take part */
    size_t stack_count, stack_capacity;
    ms_node **ready; /* heap, latest first */
    size_t ready_count, ready_capacity;
    ms_node **seen;
    size_t seen_count, seen_capacity;
};

static const char *name_of(const ms_node *node)
{
    if (node->op) return node->op->name;
    return node->function ? node->function->name : "a leaf";
}

static const char *line_of(const ms_node *node, uint32_t script)
{
    const char *line = ms_strings_get(ms_engine_strings(node->engine), script);
    return *line ? line : "the engine";
}

/* ----------------------------------------------------------------- checking */

/* A tensor that the node reads and that was written after it was saved. */
static ms_status refuse_written(const ms_node *node, const ms_tensor *tensor)
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

static ms_status check_versions(const ms_node *node)
{
    ms_saved saved;
    for (uint32_t i = 0; ms_node_reads(node, i, &saved); i++)
        if (ms_tensor_version(saved.tensor) != saved.version)
            return refuse_written(node, saved.tensor);
    return MS_OK;
}

/* Casts that the node saved, and that were dropped with their weight, are computed again. */
static ms_status recast_saved(const ms_node *node)
{
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < node->saved_count && !status; i++)
        status = ms_storage_recast(node->saved[i].tensor->storage);
    return status;
}

static ms_status check_node(const ms_node *node)
{
    if (node->used)
        return ms_engine_fail(node->engine, MS_ERROR_STATE,
                              "backward: the graph of %s (made at %s) was freed by the backward at "
                              "%s: pass retain_graph = true there to go through it again",
                              name_of(node), line_of(node, node->script),
                              line_of(node, node->freed_script));
    return check_versions(node);
}

static ms_status push(ms_pass *pass, ms_node ***items, size_t *count, size_t *capacity,
                      ms_node *node)
{
    ms_status status = ms_grow(ms_engine_context(pass->engine), (void **)items, capacity,
                               *count + 1, sizeof **items);
    if (!status) (*items)[(*count)++] = node;
    return status;
}

/* Whether a backward that this one runs inside of goes through the node as well. */
static bool is_shared(const ms_pass *pass, const ms_node *node)
{
    for (const ms_pass *outer = pass->outer; outer; outer = outer->outer)
        if (node->visit == outer->visit) return true;
    return false;
}

/* Marks a node as part of this pass at its first sight. */
static ms_status see(ms_pass *pass, ms_node *node)
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
    /* Nodes in `seen` are released at the end, so nothing may fail between that and the reference.
     */
    if (!status) status = push(pass, &pass->stack, &pass->stack_count, &pass->stack_capacity, node);
    if (!status) status = push(pass, &pass->seen, &pass->seen_count, &pass->seen_capacity, node);
    if (status) return status;
    node->visit = pass->visit;
    node->pending = 0;
    node->references++; /* hooks may drop tensors while this runs */
    ms_node_expect(node);
    return MS_OK;
}

/* Finds all nodes below the roots and counts the edges into each. */
static ms_status discover(ms_pass *pass, ms_node *const *roots, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        ms_status status = see(pass, roots[i]);
        if (status) return status;
    }
    while (pass->stack_count > 0) {
        ms_node *node = pass->stack[--pass->stack_count];
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

/* Latest first; accumulators share the greatest order and go in order of arrival at the top. */
static ms_status heap_push(ms_pass *pass, ms_node *node)
{
    ms_status status = push(pass, &pass->ready, &pass->ready_count, &pass->ready_capacity, node);
    if (status) return status;
    size_t at = pass->ready_count - 1;
    while (at > 0 && pass->ready[(at - 1) / 2]->order < pass->ready[at]->order) {
        ms_node *parent = pass->ready[(at - 1) / 2];
        pass->ready[(at - 1) / 2] = pass->ready[at];
        pass->ready[at] = parent;
        at = (at - 1) / 2;
    }
    return MS_OK;
}

static ms_node *heap_pop(ms_pass *pass)
{
    ms_node *top = pass->ready[0];
    pass->ready[0] = pass->ready[--pass->ready_count];
    for (size_t at = 0;;) {
        size_t best = at, left = 2 * at + 1;
        if (left < pass->ready_count && pass->ready[left]->order > pass->ready[best]->order)
            best = left;
        if (left + 1 < pass->ready_count && pass->ready[left + 1]->order > pass->ready[best]->order)
            best = left + 1;
        if (best == at) return top;
        ms_node *moved = pass->ready[at];
        pass->ready[at] = pass->ready[best];
        pass->ready[best] = moved;
        at = best;
    }
}

/* --------------------------------------------------------- adding gradients */

/* Whether nobody else can see this tensor's memory, so that it may be written or kept. */
static bool is_exclusive(const ms_tensor *tensor)
{
    return tensor->references == 1 && ms_storage_references(tensor->storage) == 1
           && tensor->contiguous && tensor->offset == 0
           && ms_storage_bytes(tensor->storage) == ms_tensor_bytes(tensor);
}

/* Whether it lies in the home of this node's leaf already, where an operator was let write it. */
static bool is_at_home(const ms_node *node, const ms_tensor *tensor)
{
    const ms_meta *meta = node->leaf ? node->leaf->meta : NULL;
    return meta && !meta->grad && meta->home == tensor;
}

/* What has arrived at an edge += gradient; takes over the gradient, also when it fails. */
static ms_status add_to(ms_edge edge, ms_tensor *gradient)
{
    ms_tensor **slot = &edge.node->gradients[edge.output];
    if (!*slot) {
        *slot = gradient;
        return MS_OK;
    }
    ms_tensor *inputs[] = { *slot, gradient }, *sum = NULL;
    bool fixed = is_at_home(edge.node, *slot);
    /* a + b and b + a have the same bits. */
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

/* The first hook behind the one with this id: hooks may remove themselves and each other, so none
 * is held over a call. */
static const ms_hook *hook_after(const ms_hook *hooks, uint64_t id)
{
    while (hooks && hooks->id <= id) hooks = hooks->next;
    return hooks;
}

/* hooks: where the list begins. */
static ms_status call_hooks(ms_engine *engine, ms_hook *const *hooks, uint32_t output,
                            ms_tensor **gradient)
{
    uint64_t id = 0;
    for (const ms_hook *hook; (hook = hook_after(*hooks, id)) != NULL;) {
        id = hook->id;
        if (!hook->gradient || hook->output != output) continue;
        ms_tensor *replacement = NULL;
        ms_status status = hook->gradient(hook->user, *gradient, &replacement);
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

/* The first gradient of a leaf, into *slot, which takes over (also when it fails): copied to its
 * home unless it lies there, else kept if nobody else sees it. */
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

static ms_status run_accumulator(ms_node *node)
{
    ms_engine *engine = node->engine;
    ms_tensor *leaf = node->leaf, *gradient = node->gradients[0];
    ms_meta *meta = leaf->meta;
    node->gradients[0] = NULL;
    if (!gradient) return MS_OK;
    ms_status status = call_hooks(engine, &meta->hooks, 0, &gradient);
    if (status) {
        ms_tensor_release(gradient);
        return status;
    }
    if (!meta->grad) {
        status = place_gradient(engine, meta->home, gradient, &meta->grad);
    } else { /* in place: buckets and scripts may hold this very tensor */
        ms_tensor *inputs[] = { meta->grad, gradient }, *sum = NULL;
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

/* Where the operator of this node may write its gradient for input i: the home of a leaf that has
 * none yet. Not where hooks are to see it before, and not where that memory is read: by the
 * operator itself, or, while other gradients of the leaf are to come, by what runs until then. What
 * an outer backward still reads is not known here. */
static ms_tensor *home_for(const ms_pass *pass, const ms_node *node, uint32_t i)
{
    const ms_node *to = node->edges[i].node;
    if (!to || !to->leaf || to->gradients[0]) return NULL;
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

static ms_status run_backward(ms_node *node, ms_tensor **results, const bool *needs,
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
    return node->op->backward(&gradient);
}

/* Hands the results on; takes them over. One that is the sum it was shown has been added there; the
 * same tensor without that is a gradient that goes on unchanged by a second way, as in x + x. */
static ms_status deliver(ms_pass *pass, ms_node *node, ms_tensor **results, ms_tensor *const *sums)
{
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < node->input_count; i++) {
        ms_edge edge = node->edges[i];
        if (!edge.node) continue;
        if (status || (sums[i] && results[i] == sums[i])) ms_tensor_release(results[i]);
        else if (results[i]) status = add_to(edge, results[i]);
        if (!status && edge.node->visit == pass->visit && --edge.node->pending == 0)
            status = heap_push(pass, edge.node);
    }
    return status;
}

/* Gradients are on "meta" together. */
static bool on_meta(const ms_node *node)
{
    for (uint32_t i = 0; i < node->output_count; i++)
        if (node->gradients[i]) return ms_tensor_is_meta(node->gradients[i]);
    return false;
}

static ms_status run_node(ms_pass *pass, ms_node *node)
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
    /* Hooks of this node and of those before it may have written what it saved. */
    if (any && !status) status = check_versions(node);
    if (status) goto done;
    /* A node that no gradient reached still lets its inputs know that nothing will come. */
    bool meta = ms_engine_set_meta(engine, any && on_meta(node));
    if (any) status = run_backward(node, results, needs, sums, homes, !pass->retain);
    ms_engine_set_meta(engine, meta);
    for (uint32_t i = 0; i < node->output_count; i++) {
        ms_tensor_release(node->gradients[i]);
        node->gradients[i] = NULL;
    }
    ms_node_unexpect(node);
    if (!pass->retain) {
        ms_node_drop_saved(node);
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

/* The gradient that enters at a root, owned. */
static ms_status root_gradient(ms_tensor *root, ms_tensor *given, ms_tensor **out)
{
    char have[160], want[160];
    ms_status status = ms_history_check(root->engine, "backward", root);
    if (status) return status;
    if (!ms_tensor_requires_grad(root))
        return ms_engine_fail(root->engine, MS_ERROR_ARGUMENT,
                              "backward: this tensor has no graph: nothing that it was computed "
                              "from requires a gradient (what is computed from gradients has none "
                              "either: gradients of gradients are not supported)");
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

static void pass_close(ms_pass *pass)
{
    ms_context *context = ms_engine_context(pass->engine);
    for (size_t i = 0; i < pass->seen_count; i++) {
        ms_node *node = pass->seen[i];
        for (uint32_t o = 0; o < node->output_count; o++) {
            ms_tensor_release(node->gradients[o]);
            node->gradients[o] = NULL;
        }
        ms_node_unexpect(node);
        ms_node_release(node);
    }
    ms_release(context, pass->stack);
    ms_release(context, pass->ready);
    ms_release(context, pass->seen);
}

/* Each node has run once all edges into it had delivered; only a recomputed function that did
 * something else than at first comes later. */
static ms_status check_delivered(const ms_node *node)
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

static ms_status run_pass(ms_tape *tape, ms_pass *pass, ms_tensor *const *roots,
                          ms_tensor *const *gradients, ms_edge *edges, uint32_t count)
{
    ms_node *nodes[MS_RECOMPUTE_OUTPUTS];
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

/* Behind the outermost backward. What one registers is called, too. */
static ms_status run_ends(ms_tape *tape, ms_status status)
{
    for (size_t i = 0; i < tape->end_count && !status; i++) {
        ms_at_end end = tape->ends[i];
        status = end.f(end.user);
    }
    tape->end_count = 0;
    return status;
}

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
    for (uint32_t i = 0; i < count; i++) ms_node_release(edges[i].node);
    return status;
}

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

ms_status ms_backward(ms_engine *engine, ms_tensor *const *roots, ms_tensor *const *gradients,
                      uint32_t count, bool retain_graph)
{
    return backward(engine, roots, gradients, count, retain_graph, false);
}

ms_status ms_backward_inside(ms_engine *engine, ms_tensor *const *roots,
                             ms_tensor *const *gradients, uint32_t count)
{
    return backward(engine, roots, gradients, count, false, true);
}
