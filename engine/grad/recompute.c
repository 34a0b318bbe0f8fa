/* recompute.c: a part of the graph that keeps its inputs only and is run again in backward.
 *
 * Activation checkpointing (Chen et al. 2016). The first run of the function records nothing, so
 * the memory of its intermediate results is free as soon as they are used. One node represents the
 * whole function. When backward comes to it, the function runs again with the tape on, and a
 * backward inside of the running one goes through what that run recorded.
 *
 * The second run must compute the same values as the first. So the node keeps the state of the
 * random numbers and the precision, and the versions of all that the function read: its
 * inputs, and the tensors that it holds beside them (captures). What it holds is found by watching
 * which tensors its operators take that require a gradient or are parameters. Those that require
 * one become edges of the node, so that backward does not run their nodes before this one has
 * delivered. */
#include "grad/recompute.h"

#include <string.h>

#include "grad/backward.h"
#include "grad/node.h"
#include "grad/record.h"
#include "tensor/products.h"

/* One call of ms_recompute; the user of its node. One allocation holds the struct, the inputs and
 * the versions. */
typedef struct ms_recomputed {
    ms_engine *engine;
    ms_recompute_function f;
    void *user;
    void (*done)(void *);
    void (*free_user)(void *);
    ms_random random; /* as it was when f ran first */
    ms_dtype autocast;
    ms_fp8 fp8;
    bool fast_attention;
    uint32_t script, input_count, output_count;
    uint64_t *versions;   /* of the inputs before f ran first; stored after the inputs */
    ms_captures captures; /* what else it used then */
    bool keeps;           /* results of products, in `products` */
    ms_kept_products products;
    ms_tensor *inputs[]; /* aliases without history */
} ms_recomputed;

/* Also called for a call that failed half way: free_user is NULL until the node owns user. Nodes of
 * captures were handed over to edges if the node was made, and are NULL then. */
static void recomputed_free(void *object)
{
    ms_recomputed *kept = object;
    ms_context *context = ms_engine_context(kept->engine);
    for (uint32_t i = 0; i < kept->input_count; i++) ms_tensor_release(kept->inputs[i]);
    for (size_t i = 0; i < kept->captures.count; i++) {
        ms_tensor_release(kept->captures.items[i].saved.tensor);
        ms_tape_node_release(kept->captures.items[i].node);
    }
    ms_release(context, kept->captures.items);
    ms_products_free(context, &kept->products);
    if (kept->free_user) kept->free_user(kept->user);
    ms_release(context, kept);
}

/* Runs f with the tape on, with the random numbers and the precision of the first run, and puts
 * back the state that the engine has now. A different number of outputs is an error: gradients
 * could not be matched with outputs. */
static ms_status run_again(ms_recomputed *kept, ms_tensor **outputs, uint32_t *count)
{
    ms_engine *engine = kept->engine;
    ms_random now = ms_engine_random(engine);
    ms_dtype autocast = ms_engine_autocast(engine);
    ms_fp8 fp8 = ms_engine_fp8(engine);
    bool fast = ms_engine_fast_attention(engine);
    bool recording = ms_engine_set_recording(engine, true);
    ms_engine_set_random(engine, kept->random);
    ms_engine_set_autocast(engine, kept->autocast);
    ms_engine_set_fp8(engine, kept->fp8);
    ms_engine_set_fast_attention(engine, kept->fast_attention);
    kept->products.again = true;
    kept->products.next = 0;
    ms_kept_products *outer = ms_products_set(engine, kept->keeps ? &kept->products : NULL);
    ms_status status = kept->f(kept->user, kept->inputs, kept->input_count, outputs, count);
    ms_products_set(engine, outer);
    ms_engine_set_fast_attention(engine, fast);
    ms_engine_set_fp8(engine, fp8);
    ms_engine_set_autocast(engine, autocast);
    ms_engine_set_random(engine, now);
    ms_engine_set_recording(engine, recording);
    if (status) *count = 0;
    else if (*count != kept->output_count)
        status = ms_engine_fail(engine, MS_ERROR_STATE,
                                "recompute: the function gave %u tensors at first and %u now: it "
                                "must do the same each time",
                                kept->output_count, *count);
    return status;
}

/* Makes the alias of an input a leaf, whose gradient the inner backward collects.
 * ms_tensor_set_requires_grad would also mark the memory as a parameter's, which it need not be. */
static ms_status require_gradient(ms_tensor *input)
{
    ms_meta *meta = NULL;
    ms_status status = ms_meta_of(input, &meta);
    if (!status) meta->requires_grad = true;
    return status;
}

/* The node's backward. The inputs that need a gradient become leaves, f runs again, and the outputs
 * that received gradients are the roots of a backward inside the running one. The leaves' gradients
 * are the results; they are removed from the leaves, so that a retained graph can do this again.
 * Gradients of captured tensors go straight to their nodes in the outer pass. */
static ms_status recomputed_backward(void *object, ms_tensor *const *gradients, ms_tensor **results,
                                     const bool *needs)
{
    ms_recomputed *kept = object;
    ms_tensor *outputs[MS_RECOMPUTE_OUTPUTS] = { NULL }, *roots[MS_RECOMPUTE_OUTPUTS],
              *entering[MS_RECOMPUTE_OUTPUTS];
    uint32_t count = 0, used = 0;
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < kept->input_count && !status; i++)
        if (needs[i]) status = require_gradient(kept->inputs[i]);
    if (!status) status = run_again(kept, outputs, &count);
    for (uint32_t i = 0; i < count; i++)
        if (!status && gradients[i] && ms_tensor_requires_grad(outputs[i])) {
            roots[used] = outputs[i];
            entering[used++] = gradients[i];
        }
    if (!status && used) status = ms_backward_inside(kept->engine, roots, entering, used);
    if (kept->done) kept->done(kept->user);
    for (uint32_t i = 0; i < count; i++) ms_tensor_release(outputs[i]);
    for (uint32_t i = 0; i < kept->input_count; i++) {
        ms_tensor *gradient = ms_tensor_grad(kept->inputs[i]);
        if (!status && needs[i] && gradient) results[i] = ms_tensor_retain(gradient);
        if (gradient) ms_tensor_set_grad(kept->inputs[i], NULL);
    }
    return status;
}

/* Inputs first, then captures: the tape checks the versions of both before it runs the node, and
 * optimizers' early steps wait for it. */
static bool recomputed_reads(void *object, uint32_t index, ms_tensor **tensor, uint64_t *version)
{
    const ms_recomputed *kept = object;
    if (index >= kept->input_count + kept->captures.count) return false;
    const ms_saved *captured =
        index < kept->input_count ? NULL : &kept->captures.items[index - kept->input_count].saved;
    *tensor = captured ? captured->tensor : kept->inputs[index];
    *version = captured ? captured->version : kept->versions[index];
    return true;
}

static const ms_function recompute_function = { .name = "recompute",
                                                .backward = recomputed_backward,
                                                .free = recomputed_free,
                                                .reads = recomputed_reads };

bool ms_is_recomputed(const ms_tape_node *node) { return node->function == &recompute_function; }

/* Replaces an output by an alias of it. f may return one of its inputs, or a parameter; the history
 * that the call gets must not be attached to that tensor. */
static ms_status own_window(ms_tensor **tensor)
{
    ms_tensor *given = *tensor;
    ms_status status = ms_tensor_alias(given, tensor);
    if (status) *tensor = given;
    else ms_tensor_release(given);
    return status;
}

/* Versions are taken before f runs: f may write its inputs in place, and such a function cannot be
 * run again on them. Its backward then refuses. */
static ms_status keep_inputs(ms_engine *engine, ms_tensor *const *inputs, uint32_t count,
                             ms_recomputed **out)
{
    void *memory = NULL;
    ms_status status =
        ms_allocate(ms_engine_context(engine),
                    sizeof(ms_recomputed) + count * (sizeof(ms_tensor *) + sizeof(uint64_t)),
                    "recompute", &memory);
    if (status) return status;
    ms_recomputed *kept = memory;
    *kept = (ms_recomputed){ .engine = engine,
                             .random = ms_engine_random(engine),
                             .autocast = ms_engine_autocast(engine),
                             .fp8 = ms_engine_fp8(engine),
                             .fast_attention = ms_engine_fast_attention(engine),
                             .script = ms_engine_script(engine),
                             .versions = (uint64_t *)(void *)(kept->inputs + count) };
    for (; kept->input_count < count && !status; kept->input_count += !status) {
        kept->versions[kept->input_count] = ms_tensor_version(inputs[kept->input_count]);
        status = ms_tensor_alias(inputs[kept->input_count], &kept->inputs[kept->input_count]);
    }
    if (status) recomputed_free(kept);
    else *out = kept;
    return status;
}

/* Runs f without recording, and notes what it uses that requires a gradient. The outputs count as
 * used, since f may return a tensor that it holds. Where recording was off before, nothing is noted
 * for this call: it gets no node. If it is itself part of the first run of another recomputed
 * function, its uses are noted for that one. *count is 0 after a failure. */
static ms_status run_first(ms_recomputed *kept, void *user, void (*done)(void *), ms_tensor **made,
                           uint32_t *count)
{
    ms_engine *engine = kept->engine;
    ms_tape *tape = NULL;
    ms_status status = ms_tape_of(engine, &tape);
    if (status) return status;
    ms_captures *outer = tape->captures;
    bool recording = ms_engine_set_recording(engine, false);
    /* Only the outermost recording call watches: an inner one has recording off here. */
    if (recording) tape->captures = &kept->captures;
    /* Another function that is running keeps what this one makes, unless this one does. */
    ms_kept_products *others = ms_products_set(engine, NULL);
    ms_products_set(engine, kept->keeps ? &kept->products : others);
    status = kept->f(user, kept->inputs, kept->input_count, made, count);
    ms_products_set(engine, others);
    if (status) *count = 0;
    else status = ms_capture(engine, made, *count, true);
    if (done) done(user);
    tape->captures = outer;
    ms_engine_set_recording(engine, recording);
    for (uint32_t i = 0; i < *count && !status; i++) status = own_window(&made[i]);
    return status;
}

bool ms_is_recomputed_later(const ms_engine *engine)
{
    const ms_tape *tape = ms_engine_get(engine, MS_SLOT_GRAD);
    return tape && tape->captures;
}

/* On failure the caller still owns user, and no output is set. */
static ms_status recompute(ms_engine *engine, bool keeps, ms_recompute_function f, void *user,
                           void (*done)(void *user), void (*free_user)(void *),
                           ms_tensor *const *inputs, uint32_t input_count, ms_tensor **outputs,
                           uint32_t *output_count)
{
    ms_recomputed *kept = NULL;
    ms_tensor *made[MS_RECOMPUTE_OUTPUTS] = { NULL };
    uint32_t count = 0;
    ms_status status = keep_inputs(engine, inputs, input_count, &kept);
    if (status) return status;
    kept->f = f;
    kept->keeps = keeps && ms_engine_is_recording(engine);
    status = run_first(kept, user, done, made, &count);
    if (!status) {
        /* From here on the node owns user; before, the caller does. */
        kept->user = user;
        kept->done = done;
        kept->free_user = free_user;
        kept->output_count = count;
        status = ms_record_captured(engine, &recompute_function, kept, inputs, input_count,
                                    &kept->captures, made, count);
        if (status) kept->free_user = NULL;
    }
    if (status) recomputed_free(kept);
    for (uint32_t i = 0; i < count && status; i++) ms_tensor_release(made[i]);
    if (!status) {
        memcpy(outputs, made, count * sizeof *made);
        *output_count = count;
    }
    return status;
}

ms_status ms_recompute(ms_engine *engine, ms_recompute_function f, void *user,
                       void (*done)(void *user), void (*free_user)(void *),
                       ms_tensor *const *inputs, uint32_t input_count, ms_tensor **outputs,
                       uint32_t *output_count)
{
    return recompute(engine, false, f, user, done, free_user, inputs, input_count, outputs,
                     output_count);
}

ms_status ms_recompute_rest(ms_engine *engine, ms_recompute_function f, void *user,
                            void (*done)(void *user), void (*free_user)(void *),
                            ms_tensor *const *inputs, uint32_t input_count, ms_tensor **outputs,
                            uint32_t *output_count)
{
    return recompute(engine, true, f, user, done, free_user, inputs, input_count, outputs,
                     output_count);
}
