/* rest.c: what a backward in two parts keeps between them, and who waits for the second part.
 *
 * Zero-bubble schedules of pipelines (Qi et al. 2023) run the gradients of a stage's inputs first,
 * as other stages wait for them, and those of its weights where the device would idle. */
#include "grad/rest.h"

#include <string.h>

#include "grad/node.h"

/* ------------------------------------------------------------------- records */

/* Leaves are retained by the graph's accumulators, too; the record's own references make it safe to
 * be the last. */
void ms_rest_forget_leaves(ms_rest *rest)
{
    while (rest->leaf_count > 0) {
        ms_tensor *leaf = rest->leaves[--rest->leaf_count];
        ((ms_meta *)leaf->meta)->rests--;
        ms_tensor_release(leaf);
    }
}

void ms_rest_release(ms_rest *rest)
{
    if (!rest || --rest->references > 0) return;
    ms_context *context = ms_engine_context(rest->engine);
    ms_tape *tape = ms_engine_get(rest->engine, MS_SLOT_GRAD);
    ms_rest_forget_leaves(rest);
    tape->rests--;
    ms_release(context, rest->leaves);
    ms_release(context, rest->ends);
    ms_release(context, rest->roots);
    ms_release(context, rest);
}

ms_status ms_rest_new(ms_engine *engine, ms_tensor *const *roots, uint32_t count, ms_rest **out)
{
    void *memory = NULL, *origins = NULL;
    ms_context *context = ms_engine_context(engine);
    ms_status status = ms_allocate(context, sizeof(ms_rest), "backward", &memory);
    if (!status) status = ms_allocate(context, count * sizeof(ms_origin), "backward", &origins);
    if (status) {
        ms_release(context, memory);
        return status;
    }
    ms_rest *rest = memory;
    *rest = (ms_rest){ .engine = engine,
                       .references = 1,
                       .script = ms_engine_script(engine),
                       .roots = origins,
                       .root_count = count };
    for (uint32_t i = 0; i < count; i++) rest->roots[i] = ms_tensor_origin(roots[i]);
    ((ms_tape *)ms_engine_get(engine, MS_SLOT_GRAD))->rests++;
    *out = rest;
    return MS_OK;
}

ms_status ms_rest_add_leaf(ms_rest *rest, ms_tensor *leaf)
{
    ms_status status = ms_grow(ms_engine_context(rest->engine), (void **)&rest->leaves,
                               &rest->leaf_capacity, rest->leaf_count + 1, sizeof *rest->leaves);
    if (status) return status;
    ms_meta *meta = leaf->meta;
    meta->rests++;
    meta->rest_script = rest->script;
    rest->leaves[rest->leaf_count++] = ms_tensor_retain(leaf);
    return MS_OK;
}

/* The list itself changes hands, so nothing can fail. */
void ms_rest_take_ends(ms_rest *rest, ms_tape *tape)
{
    rest->ends = tape->ends;
    rest->end_count = tape->end_count;
    tape->ends = NULL;
    tape->end_count = tape->end_capacity = 0;
}

/* Nothing has been registered yet: the rest is about to run. */
ms_status ms_rest_give_ends(ms_rest *rest, ms_tape *tape)
{
    if (rest->end_count == 0) return MS_OK;
    ms_status status = ms_grow(ms_engine_context(rest->engine), (void **)&tape->ends,
                               &tape->end_capacity, rest->end_count, sizeof *tape->ends);
    if (status) return status;
    memcpy(tape->ends, rest->ends, rest->end_count * sizeof *rest->ends);
    tape->end_count = rest->end_count;
    rest->end_count = 0;
    return MS_OK;
}

static bool is_root(const ms_rest *rest, ms_origin origin)
{
    for (uint32_t i = 0; i < rest->root_count; i++)
        if (rest->roots[i].call == origin.call && rest->roots[i].result == origin.result)
            return true;
    return false;
}

/* Roots are compared by the numbers of their calls, which are never used again. */
ms_status ms_rest_of(ms_engine *engine, ms_tensor *const *roots, uint32_t count, ms_rest **out)
{
    ms_rest *rest = NULL;
    for (uint32_t i = 0; i < count; i++) {
        const ms_meta *meta = roots[i]->meta;
        ms_rest *own = meta && meta->node ? meta->node->rest : NULL;
        if (!own)
            return ms_engine_fail(
                engine, MS_ERROR_STATE,
                "backward: rest: no backward with inputs came before that began at this tensor, "
                "or its rest has run: call backward { inputs = { ... } } first");
        if (i == 0) rest = own;
        if (own != rest || count != rest->root_count
            || !is_root(rest, ms_tensor_origin(roots[i]))) {
            const char *line = ms_strings_get(ms_engine_strings(engine), own->script);
            return ms_engine_fail(engine, MS_ERROR_STATE,
                                  "backward: rest: the backward with inputs (at %s) did not begin "
                                  "at this tensor: call rest on the tensor that it began at",
                                  *line ? line : "the engine");
        }
    }
    *out = rest;
    return MS_OK;
}

/* -------------------------------------------------------------------- leaves */

bool ms_tensor_awaits_rest(const ms_tensor *leaf)
{
    const ms_meta *meta = leaf->meta;
    return meta && meta->rests > 0;
}

bool ms_backward_awaits_rest(const ms_engine *engine)
{
    const ms_tape *tape = ms_engine_get(engine, MS_SLOT_GRAD);
    return tape && tape->rests > 0;
}

ms_status ms_check_rest(ms_engine *engine, const char *what, ms_tensor *const *leaves,
                        uint32_t count)
{
    char shape[160];
    /* Most programs never run a backward in two parts. */
    if (!ms_backward_awaits_rest(engine)) return MS_OK;
    for (uint32_t i = 0; i < count; i++) {
        const ms_meta *meta = leaves[i]->meta;
        if (!ms_tensor_awaits_rest(leaves[i])) continue;
        const char *line = ms_strings_get(ms_engine_strings(engine), meta->rest_script);
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "%s: rest is missing: the backward with inputs (at %s) leaves the "
                              "gradient of a parameter %s to backward { rest = true }: call it "
                              "before, or drop the graph",
                              what, *line ? line : "the engine",
                              ms_tensor_describe(leaves[i], shape, sizeof shape));
    }
    return MS_OK;
}

ms_status ms_rest_check_inputs(ms_engine *engine, ms_tensor *const *inputs, uint32_t count)
{
    char shape[160];
    if (count == 0)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "backward: inputs: name the tensors whose gradients are wanted; "
                              "without inputs, backward gives all");
    for (uint32_t i = 0; i < count; i++) {
        const ms_meta *meta = inputs[i]->meta;
        ms_tensor_describe(inputs[i], shape, sizeof shape);
        if (!ms_tensor_is_leaf(inputs[i]))
            return ms_engine_fail(
                engine, MS_ERROR_ARGUMENT,
                "backward: inputs[%u], %s, is not a leaf but the result of %s: "
                "detach it, call requires_grad_, and compute from that",
                i + 1, shape, meta->node->op ? meta->node->op->name : meta->node->function->name);
        if (!ms_tensor_requires_grad(inputs[i]))
            return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                  "backward: inputs[%u], %s, does not require a gradient: call "
                                  "requires_grad_ before it is used",
                                  i + 1, shape);
        if (meta->home || meta->sharded)
            return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                  "backward: inputs[%u], %s, is a parameter of a wrapped model, "
                                  "whose gradient belongs to the rest: name only what the model "
                                  "was called with",
                                  i + 1, shape);
    }
    return MS_OK;
}

/* ------------------------------------------------------------- between parts */

/* Unused structs for the tape. */
static ms_status more_kept(ms_engine *engine, ms_tape *tape)
{
    void *chunk = NULL;
    ms_status status = ms_tape_chunk(tape, ms_engine_context(engine), sizeof(ms_kept), &chunk);
    for (size_t i = 0; i < MS_TAPE_CHUNK && !status; i++) {
        ms_kept *unused = (ms_kept *)chunk + i;
        unused->next = tape->unused_kept;
        tape->unused_kept = unused;
    }
    return status;
}

ms_status ms_kept_new(ms_tape_node *node)
{
    ms_tape *tape = ms_engine_get(node->engine, MS_SLOT_GRAD);
    size_t count = (size_t)node->output_count + node->input_count;
    void *many = NULL;
    ms_status status = tape->unused_kept ? MS_OK : more_kept(node->engine, tape);
    if (!status && count > sizeof tape->unused_kept->own / sizeof *tape->unused_kept->own)
        status = ms_allocate(ms_engine_context(node->engine), count * sizeof(ms_saved), "backward",
                             &many);
    if (status) return status;
    ms_kept *kept = tape->unused_kept;
    tape->unused_kept = kept->next;
    memset(kept, 0, sizeof *kept);
    kept->gradients = many ? many : kept->own;
    kept->results = kept->gradients + node->output_count;
    node->kept = kept;
    return MS_OK;
}

void ms_kept_put_gradients(ms_tape_node *node)
{
    for (uint32_t o = 0; o < node->output_count; o++) {
        ms_tensor *gradient = node->gradients[o];
        if (!gradient) continue;
        node->kept->gradients[o] =
            (ms_saved){ .tensor = gradient, .version = ms_tensor_version(gradient) };
        node->gradients[o] = NULL;
    }
}

void ms_kept_take_gradients(ms_tape_node *node)
{
    for (uint32_t o = 0; o < node->output_count; o++) {
        node->gradients[o] = node->kept->gradients[o].tensor;
        node->kept->gradients[o].tensor = NULL;
    }
}

void ms_kept_put_result(ms_tape_node *node, uint32_t index, ms_tensor *result)
{
    if (!result) return;
    node->kept->results[index] =
        (ms_saved){ .tensor = result, .version = ms_tensor_version(result) };
}

/* A result may be the incoming gradient itself, and another node's as well. */
const ms_tensor *ms_kept_written(const ms_tape_node *node)
{
    const ms_kept *kept = node->kept;
    for (uint32_t i = 0; kept && i < node->output_count + node->input_count; i++) {
        const ms_saved *saved = &kept->gradients[i];
        if (saved->tensor && ms_tensor_version(saved->tensor) != saved->version)
            return saved->tensor;
    }
    return NULL;
}

void ms_kept_free(ms_tape_node *node)
{
    ms_kept *kept = node->kept;
    if (!kept) return;
    for (uint32_t o = 0; o < node->output_count; o++) ms_tensor_release(kept->gradients[o].tensor);
    for (uint32_t i = 0; i < node->input_count; i++) ms_tensor_release(kept->results[i].tensor);
    for (uint32_t i = 0; i < MS_OP_KEPT_MAX; i++) ms_tensor_release(kept->tensors[i]);
    if (kept->gradients != kept->own) ms_release(ms_engine_context(node->engine), kept->gradients);
    ms_tape *tape = ms_engine_get(node->engine, MS_SLOT_GRAD);
    kept->next = tape->unused_kept;
    tape->unused_kept = kept;
    node->kept = NULL;
}

/* Without a root no rest can be called any more, also where other results hold the graph. */
void ms_rest_leave(ms_tape_node *node)
{
    ms_rest *rest = node->rest;
    ms_kept_free(node);
    for (uint32_t i = 0; rest && i < rest->root_count; i++)
        if (rest->roots[i].call == node->order) ms_rest_forget_leaves(rest);
    node->rest = NULL;
    node->marks = false;
    ms_rest_release(rest);
}
