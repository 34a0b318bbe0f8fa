/* node.c: nodes, metas and hooks of the tape: making, holding, freeing.
 *
 * Nodes and metas come from chunks and go back to free lists: a step records about as many as the
 * step before, so after the first one the tape hardly allocates. The functions that make things
 * take all memory first and change the graph afterwards; when one fails, the graph is as it was. */
#include "grad/node.h"

#include <string.h>

#include "grad/rest.h"

/* Called when the engine goes. Nodes and metas are in the chunks, and the lists of waiting calls
 * are empty outside of a backward, so only memory is left to free. */
static void tape_free(ms_engine *engine, void *object)
{
    ms_tape *tape = object;
    ms_context *context = ms_engine_context(engine);
    for (size_t i = 0; i < tape->chunk_count; i++) ms_release(context, tape->chunks[i]);
    ms_release(context, tape->chunks);
    ms_release(context, tape->ends);
    ms_release(context, tape->unread);
    ms_release(context, tape);
}

/* Made at first use, since an engine that only evaluates needs no tape. The slot's destroy function
 * runs before the streams stop, and after that no tensor with a history may be left. */
ms_status ms_tape_of(ms_engine *engine, ms_tape **out)
{
    ms_tape *tape = ms_engine_get(engine, MS_SLOT_GRAD);
    if (!tape) {
        void *memory = NULL;
        ms_status status = ms_allocate(ms_engine_context(engine), sizeof *tape, "tape", &memory);
        if (status) return status;
        tape = memory;
        ms_engine_set(engine, MS_SLOT_GRAD, tape, tape_free);
    }
    *out = tape;
    return MS_OK;
}

/* Room in the list is made first: a chunk that is not in the list would never be freed. */
ms_status ms_tape_chunk(ms_tape *tape, ms_context *context, size_t size, void **out)
{
    ms_status status = ms_grow(context, (void **)&tape->chunks, &tape->chunk_capacity,
                               tape->chunk_count + 1, sizeof *tape->chunks);
    if (!status) status = ms_allocate(context, MS_TAPE_CHUNK * size, "tape", out);
    if (!status) tape->chunks[tape->chunk_count++] = *out;
    return status;
}

/* -------------------------------------------------------------------- nodes */

/* A node from the free list, with one reference and the next order; its fields up to the own arrays
 * are zero. The arrays are a large part of a node and are filled later, as far as they are used.
 * The order is that of the calls, and the nodes of a call's inputs were made before. */
static ms_status node_take(ms_engine *engine, ms_tape_node **out)
{
    ms_tape *tape = NULL;
    ms_status status = ms_tape_of(engine, &tape);
    if (status) return status;
    if (!tape->unused_nodes) {
        void *chunk = NULL;
        status = ms_tape_chunk(tape, ms_engine_context(engine), sizeof(ms_tape_node), &chunk);
        if (status) return status;
        /* Backwards, so that the nodes of a chunk are handed out in order of their addresses. */
        for (int i = MS_TAPE_CHUNK - 1; i >= 0; i--) {
            ms_tape_node *unused = (ms_tape_node *)chunk + i;
            unused->next = tape->unused_nodes;
            tape->unused_nodes = unused;
        }
    }
    ms_tape_node *node = tape->unused_nodes;
    tape->unused_nodes = node->next;
    /* The arrays at the end are not cleared here: ms_tape_node_new clears what it uses of them. */
    memset(node, 0, offsetof(ms_tape_node, own_edges));
    node->engine = engine;
    node->order = ++tape->orders;
    node->references = 1;
    *out = node;
    return MS_OK;
}

/* The node goes back to the free list; it owns nothing any more. Orders are not given back: a node
 * that is used again gets a new one, so an old order never names two nodes. */
static void node_give(ms_tape_node *node)
{
    ms_tape *tape = ms_engine_get(node->engine, MS_SLOT_GRAD);
    node->next = tape->unused_nodes;
    tape->unused_nodes = node;
}

/* All arrays of a large node (cat of a hundred tensors) are one allocation, `many`. Edges and
 * gradients begin as NULL, so that a node can be released at any moment of its making; infos are
 * filled by the caller. node->script is noted now, as the script line is that of the call that is
 * being recorded. */
ms_status ms_tape_node_new(ms_engine *engine, uint32_t inputs, uint32_t outputs, ms_tape_node **out)
{
    ms_tape_node *node = NULL;
    ms_status status = node_take(engine, &node);
    if (status) return status;
    if (inputs <= MS_NODE_INPUTS && outputs <= MS_NODE_OUTPUTS) {
        node->edges = node->own_edges;
        node->inputs = node->own_infos;
        node->outputs = node->own_infos + MS_NODE_INPUTS;
        node->gradients = node->own_gradients;
    } else {
        /* Types in order of decreasing alignment need no padding between them. */
        size_t edges = inputs * sizeof(ms_edge),
               infos = ((size_t)inputs + outputs) * sizeof(ms_tensor_info),
               gradients = outputs * sizeof(ms_tensor *);
        status =
            ms_allocate(ms_engine_context(engine), edges + infos + gradients, "tape", &node->many);
        if (status) {
            node_give(node);
            return status;
        }
        char *memory = node->many;
        node->edges = (ms_edge *)(void *)memory;
        node->inputs = (ms_tensor_info *)(void *)(memory + edges);
        node->outputs = node->inputs + inputs;
        node->gradients = (ms_tensor **)(void *)(memory + edges + infos);
    }
    memset(node->edges, 0, inputs * sizeof(ms_edge));
    memset(node->gradients, 0, outputs * sizeof(ms_tensor *));
    node->input_count = inputs;
    node->output_count = outputs;
    node->script = ms_engine_script(engine);
    *out = node;
    return MS_OK;
}

/* A function's user goes with its free function; afterwards the function has nothing to read. */
void ms_tape_node_drop_saved(ms_tape_node *node)
{
    for (uint32_t i = 0; i < node->saved_count; i++) ms_tensor_release(node->saved[i].tensor);
    node->saved_count = 0;
    if (node->function && node->user) {
        node->function->free(node->user);
        node->user = NULL;
    }
}

bool ms_tape_node_is_unread(const ms_tape_node *node, uint32_t index)
{
    return node->kept && node->kept->unread >> index & 1;
}

/* An operator reads what it saved; a function says itself what it reads, if it can say it. */
bool ms_tape_node_reads(const ms_tape_node *node, uint32_t index, ms_saved *out)
{
    if (node->function)
        return node->function->reads && node->user
               && node->function->reads(node->user, index, &out->tensor, &out->version);
    for (uint32_t k = 0; k < node->saved_count; k++) {
        if (ms_tape_node_is_unread(node, k) || index-- > 0) continue;
        *out = node->saved[k];
        return true;
    }
    return false;
}

/* Adds change to the counts of expected reads in the storages that the node reads. The reads must
 * be the same at both calls, so ms_tape_node_unexpect comes before ms_tape_node_drop_saved. */
static void change_expected(const ms_tape_node *node, int change)
{
    ms_saved saved;
    for (uint32_t i = 0; ms_tape_node_reads(node, i, &saved); i++) {
        size_t begin, end;
        ms_tensor_span(saved.tensor, &begin, &end);
        ms_storage_expect_reads(saved.tensor->storage, begin, end, change);
    }
}

/* The flag makes a second call harmless: the count in a storage must rise once for each node. */
void ms_tape_node_expect(ms_tape_node *node)
{
    if (!node->expected) change_expected(node, 1);
    node->expected = true;
}

/* Called when the node has run, and for all nodes of a pass that failed. It comes before the saved
 * tensors are dropped, since the reads are found through them. */
void ms_tape_node_unexpect(ms_tape_node *node)
{
    if (node->expected) change_expected(node, -1);
    node->expected = false;
}

/* next is read before the hook is released. free_user may run code of the application, which must
 * find the hook's tensor without this hook: callers have taken the list out before. */
void ms_hooks_free(ms_context *context, ms_hook *hooks)
{
    while (hooks) {
        ms_hook *next = hooks->next;
        if (hooks->free_user) hooks->free_user(hooks->user);
        ms_release(context, hooks);
        hooks = next;
    }
}

/* Frees one node. The nodes of its edges that lose their last reference go onto the list instead of
 * being freed here: freeing them by recursion would use stack in proportion to the depth of the
 * graph. Saved tensors are aliases without history, so releasing them frees no node. */
static void node_free(ms_tape_node *node, ms_tape_node **list)
{
    for (uint32_t i = 0; i < node->input_count; i++) {
        ms_tape_node *input = node->edges[i].node;
        MS_ASSERT(!input || input->references > 0);
        if (!input || --input->references > 0) continue;
        input->next = *list;
        *list = input;
    }
    ms_tape_node_drop_saved(node);
    ms_rest_leave(node);
    for (uint32_t i = 0; i < node->output_count; i++) ms_tensor_release(node->gradients[i]);
    ms_context *context = ms_engine_context(node->engine);
    ms_hooks_free(context, node->hooks);
    /* The leaf's meta must not point to a node that goes back to the list. */
    if (node->leaf) {
        ((ms_meta *)node->leaf->meta)->accumulators[node->outer] = NULL;
        ms_tensor_release(node->leaf);
    }
    ms_release(context, node->many);
    node_give(node);
}

/* The list is of nodes without references: each is freed once, and what it alone has held joins the
 * list. */
void ms_tape_node_release(ms_tape_node *node)
{
    MS_ASSERT(!node || node->references > 0);
    if (!node || --node->references > 0) return;
    ms_tape_node *list = node;
    node->next = NULL;
    while (list) {
        ms_tape_node *now = list;
        list = now->next;
        node_free(now, &list);
    }
}

/* -------------------------------------------------------------------- metas */

/* Called by the tensor layer when the tensor goes. A result's node may go with it, and with the
 * node the whole graph before it. */
static void meta_free(void *object)
{
    ms_meta *meta = object;
    ms_engine *engine = meta->engine;
    ms_tape *tape = ms_engine_get(engine, MS_SLOT_GRAD);
    ms_tape_node_release(meta->node);
    ms_tensor_release(meta->grad);
    ms_tensor_release(meta->outer_grad);
    ms_tensor_release(meta->home);
    ms_hooks_free(ms_engine_context(engine), meta->hooks);
    meta->next = tape->unused_metas;
    tape->unused_metas = meta;
}

/* The meta is the tensor's from now on and goes with it (free_meta). Most tensors never get one:
 * without a gradient there is nothing to know. */
ms_status ms_meta_of(ms_tensor *tensor, ms_meta **out)
{
    if (tensor->meta) {
        *out = tensor->meta;
        return MS_OK;
    }
    ms_tape *tape = NULL;
    ms_status status = ms_tape_of(tensor->engine, &tape);
    if (status) return status;
    if (!tape->unused_metas) {
        void *chunk = NULL;
        status = ms_tape_chunk(tape, ms_engine_context(tensor->engine), sizeof(ms_meta), &chunk);
        if (status) return status;
        for (int i = MS_TAPE_CHUNK - 1; i >= 0; i--) {
            ms_meta *unused = (ms_meta *)chunk + i;
            unused->next = tape->unused_metas;
            tape->unused_metas = unused;
        }
    }
    ms_meta *meta = tape->unused_metas;
    tape->unused_metas = meta->next;
    *meta = (ms_meta){ .engine = tensor->engine };
    tensor->meta = meta;
    tensor->free_meta = meta_free;
    *out = meta;
    return MS_OK;
}

/* The accumulator is not retained by the meta, only by edges: it goes with the last graph that uses
 * the leaf, and it retains the leaf, so that a graph keeps its parameters. Its order is the
 * greatest, see heap_push in backward.c. A leaf whose flag was turned off gets no edge, so later
 * graphs treat it as a constant. */
ms_status ms_edge_of(ms_tensor *tensor, ms_edge *edge)
{
    ms_meta *meta = tensor ? tensor->meta : NULL;
    *edge = (ms_edge){ 0 };
    if (!meta) return MS_OK;
    if (meta->node) {
        meta->node->references++;
        *edge = (ms_edge){ .node = meta->node, .output = meta->output };
        return MS_OK;
    }
    if (!meta->requires_grad) return MS_OK;
    if (ms_meta_accumulator(meta)) {
        ms_meta_accumulator(meta)->references++;
    } else {
        ms_tape_node *node = NULL;
        ms_status status = ms_tape_node_new(tensor->engine, 0, 1, &node);
        if (status) return status;
        node->leaf = ms_tensor_retain(tensor);
        node->order = UINT64_MAX; /* runs as soon as its gradient is complete */
        node->outputs[0] = (ms_tensor_info){ .dtype = tensor->dtype, .dims = tensor->dims };
        memcpy(node->outputs[0].shape, tensor->shape, sizeof tensor->shape);
        node->outer = meta->outer;
        meta->accumulators[meta->outer] = node;
    }
    edge->node = ms_meta_accumulator(meta);
    return MS_OK;
}

/* ------------------------------------------------------- what users may ask */

/* A tape that cannot be made for want of memory counts as one that records. */
bool ms_engine_set_recording(ms_engine *engine, bool on)
{
    ms_tape *tape = NULL;
    if (ms_tape_of(engine, &tape)) return true;
    bool before = !tape->paused;
    tape->paused = !on;
    return before;
}

/* Without a tape nothing was ever switched off. */
bool ms_engine_is_recording(const ms_engine *engine)
{
    const ms_tape *tape = ms_engine_get(engine, MS_SLOT_GRAD);
    return !tape || !tape->paused;
}

/* A result requires a gradient if it has a node, since only calls with such an input are recorded;
 * a leaf requires one if its flag is set. */
bool ms_tensor_requires_grad(const ms_tensor *tensor)
{
    const ms_meta *meta = tensor->meta;
    return meta && (meta->node || meta->requires_grad);
}

/* A tensor without a meta is one: nothing recorded has made it. */
bool ms_tensor_is_leaf(const ms_tensor *tensor)
{
    return !tensor->meta || !((const ms_meta *)tensor->meta)->node;
}

ms_origin ms_tensor_origin(const ms_tensor *tensor)
{
    const ms_meta *meta = tensor->meta;
    return meta && meta->node ? (ms_origin){ meta->node->order, meta->output } : (ms_origin){ 0 };
}

/* Only leaves can be told: the history of a result decides. The leaf's memory is marked as a
 * parameter's, so that recomputed functions that read it check its version. Turning the flag off
 * leaves graphs that were recorded before as they are. */
ms_status ms_tensor_set_requires_grad(ms_tensor *tensor, bool yes)
{
    if (!ms_tensor_is_leaf(tensor))
        return ms_engine_fail(
            tensor->engine, MS_ERROR_ARGUMENT,
            "requires_grad_: the tensor is not a leaf but the result of %s (use detach)",
            ((ms_meta *)tensor->meta)->node->op ? ((ms_meta *)tensor->meta)->node->op->name
                                                : "a recorded function");
    if (yes && !ms_dtype_is_float(tensor->dtype))
        return ms_engine_fail(tensor->engine, MS_ERROR_ARGUMENT,
                              "requires_grad_: a tensor of %s has no gradient; use a float dtype",
                              ms_dtype_name(tensor->dtype));
    /* Turning off what was never on makes no meta. */
    if (!yes && !tensor->meta) return MS_OK;
    ms_meta *meta = NULL;
    ms_status status = ms_meta_of(tensor, &meta);
    if (status) return status;
    meta->requires_grad = yes;
    if (yes) ms_leaf_mark_parameter(tensor);
    return MS_OK;
}

/* The mark is on the memory and not on the tensor, so a detached view of a parameter is recognised
 * as well. */
void ms_leaf_mark_parameter(const ms_tensor *leaf)
{
    size_t begin, end;
    ms_tensor_span(leaf, &begin, &end);
    ms_storage_mark_parameter(leaf->storage, begin, end);
}

/* NULL where no backward has reached the leaf since its gradient was removed. It is only borrowed:
 * removing the gradient ends it. */
ms_tensor *ms_tensor_grad(const ms_tensor *tensor)
{
    return tensor->meta ? ((const ms_meta *)tensor->meta)->grad : NULL;
}

/* The old gradient is released last: it may be the same tensor. The mark of a scaled gradient goes
 * with the gradient. A home stays: the next backward writes there again. */
ms_status ms_tensor_set_grad(ms_tensor *tensor, ms_tensor *gradient)
{
    char have[160], want[160];
    if (gradient
        && (gradient->dtype != tensor->dtype
            || !ms_shape_equal(gradient->dims, gradient->shape, tensor->dims, tensor->shape)))
        return ms_engine_fail(tensor->engine, MS_ERROR_ARGUMENT,
                              "set_grad: the gradient is %s, the tensor %s",
                              ms_tensor_describe(gradient, have, sizeof have),
                              ms_tensor_describe(tensor, want, sizeof want));
    return ms_leaf_put_grad(tensor, gradient);
}

ms_status ms_leaf_put_grad(ms_tensor *tensor, ms_tensor *gradient)
{
    if (!gradient && !tensor->meta) return MS_OK;
    ms_meta *meta = NULL;
    ms_status status = ms_meta_of(tensor, &meta);
    if (status) return status;
    ms_tensor *before = meta->grad;
    meta->grad = gradient ? ms_tensor_retain(gradient) : NULL;
    if (!gradient) meta->marked = meta->summed = false;
    ms_tensor_release(before);
    return MS_OK;
}

/* Graphs that were recorded before keep the accumulator that they have. */
ms_status ms_leaf_set_outer(ms_tensor *leaf, bool yes)
{
    ms_meta *meta = NULL;
    if (!yes && !leaf->meta) return MS_OK;
    ms_status status = ms_meta_of(leaf, &meta);
    if (!status) meta->outer = yes;
    return status;
}

ms_status ms_leaf_set_sharded(ms_tensor *leaf, bool yes)
{
    ms_meta *meta = NULL;
    ms_status status = ms_meta_of(leaf, &meta);
    if (!status) meta->sharded = yes;
    return status;
}

ms_tensor *ms_leaf_take_outer(ms_tensor *leaf)
{
    ms_meta *meta = leaf->meta;
    ms_tensor *gradient = meta ? meta->outer_grad : NULL;
    if (gradient) meta->outer_grad = NULL;
    return gradient;
}

/* A home has the leaf's dtype and shape, and is contiguous, since operators write it with kernels
 * that take contiguous results. The storage is marked, so that backward knows which reads may be
 * reads of a home. */
ms_status ms_tensor_set_grad_home(ms_tensor *leaf, ms_tensor *home)
{
    char have[160], want[160];
    if (home
        && (home->dtype != leaf->dtype || !home->contiguous
            || !ms_shape_equal(home->dims, home->shape, leaf->dims, leaf->shape)))
        return ms_engine_fail(
            leaf->engine, MS_ERROR_ARGUMENT,
            "set_grad_home: the home is %s, the tensor %s; it must be contiguous and alike",
            ms_tensor_describe(home, have, sizeof have),
            ms_tensor_describe(leaf, want, sizeof want));
    if (!ms_tensor_is_leaf(leaf))
        return ms_engine_fail(leaf->engine, MS_ERROR_ARGUMENT,
                              "set_grad_home: only a leaf's gradient is kept");
    if (!home && !leaf->meta) return MS_OK;
    ms_meta *meta = NULL;
    ms_status status = ms_meta_of(leaf, &meta);
    if (status) return status;
    ms_tensor *before = meta->home;
    meta->home = home ? ms_tensor_retain(home) : NULL;
    if (home) ms_storage_set_home(home->storage);
    ms_tensor_release(before);
    return MS_OK;
}

/* -------------------------------------------------------------------- hooks */

/* Appends a hook to the list of the tensor's node, or of the leaf. A result's hook therefore
 * belongs to the graph and goes with it, whether or not the tensor is still held; a leaf's stays
 * until it is removed. */
static ms_status hook_add(ms_tensor *tensor, ms_hook hook, uint64_t *id)
{
    ms_engine *engine = tensor->engine;
    ms_meta *meta = NULL;
    void *memory = NULL;
    ms_status status = ms_meta_of(tensor, &meta);
    if (!status && !ms_tensor_requires_grad(tensor))
        status =
            ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                           "on_grad: this tensor needs no gradient; call requires_grad_ first");
    if (!status && meta->node && meta->node->rest)
        status = ms_engine_fail(engine, MS_ERROR_STATE,
                                "on_grad: the backward with inputs has gone through this tensor "
                                "already: register the hook before it");
    if (!status)
        status = ms_allocate(ms_engine_context(engine), sizeof(ms_hook), "gradient hook", &memory);
    if (status) return status;
    /* A walk to the end: lists of hooks are short. */
    ms_hook *made = memory, **last = meta->node ? &meta->node->hooks : &meta->hooks;
    *made = hook;
    made->id = *id = ++((ms_tape *)ms_engine_get(engine, MS_SLOT_GRAD))->hook_ids;
    made->output = meta->output;
    while (*last) last = &(*last)->next; /* they run in order of registration */
    *last = made;
    return MS_OK;
}

/* Hooks of a result see its gradient before its node runs, hooks of a leaf before it is added up.
 * hook_add finds the list: the node's or the leaf's own. */
ms_status ms_tensor_on_gradient(ms_tensor *tensor, ms_gradient_function f, void *user,
                                void (*free_user)(void *), uint64_t *id)
{
    return hook_add(tensor, (ms_hook){ .gradient = f, .user = user, .free_user = free_user }, id);
}

ms_status ms_tensor_on_parts(ms_tensor *tensor, ms_gradient_function f, void *user,
                             void (*free_user)(void *))
{
    uint64_t id;
    return hook_add(
        tensor, (ms_hook){ .gradient = f, .in_both = true, .user = user, .free_user = free_user },
        &id);
}

/* A reducer learns here that a parameter's gradient is complete, and launches the bucket when it
 * was the last one. */
ms_status ms_tensor_on_accumulated(ms_tensor *leaf, ms_accumulated_function f, void *user,
                                   void (*free_user)(void *), uint64_t *id)
{
    if (!ms_tensor_is_leaf(leaf))
        return ms_engine_fail(leaf->engine, MS_ERROR_ARGUMENT,
                              "on_grad_ready: only a leaf's gradient is added up");
    return hook_add(leaf, (ms_hook){ .accumulated = f, .user = user, .free_user = free_user }, id);
}

/* The hook may be the one that is running: backward holds no pointer to it over a call. */
void ms_tensor_remove_hook(ms_tensor *tensor, uint64_t id)
{
    ms_meta *meta = tensor->meta;
    if (!meta) return;
    for (ms_hook **link = meta->node ? &meta->node->hooks : &meta->hooks; *link;
         link = &(*link)->next)
        if ((*link)->id == id) {
            ms_hook *gone = *link;
            *link = gone->next;
            gone->next = NULL;
            ms_hooks_free(ms_engine_context(tensor->engine), gone);
            return;
        }
}

bool ms_tensor_has_hooks(const ms_tensor *leaf)
{
    const ms_meta *meta = leaf->meta;
    return meta && meta->hooks;
}
