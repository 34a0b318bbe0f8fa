/* custom.c: a function whose gradient its caller computes.
 *
 * The function runs once, with recording off. One node represents it: it has edges to the inputs,
 * and keeps what backward reads, with the versions that it had when the function returned. Outputs
 * are windows of their own on what the function gave, so a function may return one of its inputs,
 * and the node's history is attached to no tensor of somebody else.
 *
 * What would be silently wrong is found when the function has run. Its operators are watched as
 * those of a recomputed function are (captures): a tensor that requires a gradient and is no input
 * would get none. A write of an input in place would leave that input with a history that does not
 * know of it, so the write is noted as that of an operator in place is. */
#include <string.h>

#include "grad/backward.h"
#include "grad/node.h"
#include "grad/record.h"
#include "ops/autocast.h"
#include "ops/values.h"

/* One call of ms_custom; the user of its node. One allocation holds the struct and its arrays. */
typedef struct ms_customized {
    ms_engine *engine;
    const ms_custom_function *f;
    void *user;
    bool owns_user;
    uint32_t script, input_count, output_count, saved_count;
    ms_tensor_info *inputs, *outputs;
    uint64_t *versions; /* of saved */
    ms_tensor **saved;  /* aliases without history */
} ms_customized;

static void customized_free(void *object)
{
    ms_customized *kept = object;
    for (uint32_t i = 0; i < kept->saved_count; i++) ms_tensor_release(kept->saved[i]);
    if (kept->owns_user && kept->f->free) kept->f->free(kept->user);
    ms_release(ms_engine_context(kept->engine), kept);
}

/* The tape checks these before backward runs, and optimizers' early steps wait for them. */
static bool customized_reads(void *object, uint32_t index, ms_tensor **tensor, uint64_t *version)
{
    const ms_customized *kept = object;
    if (index >= kept->saved_count) return false;
    *tensor = kept->saved[index];
    *version = kept->versions[index];
    return true;
}

/* The gradient of an output as backward gets it, owned. An operator such as add gives one gradient
 * to several nodes, and that of a sum is expanded: backward gets a copy of those. */
static ms_status own_gradient(ms_engine *engine, const ms_tensor_info *output, ms_tensor *arrived,
                              ms_tensor **out)
{
    if (!ms_dtype_is_float(output->dtype)) return MS_OK;
    if (!arrived) return ms_op_full(engine, output->dtype, output->dims, output->shape, 0.0, out);
    if (!ms_gradient_is_shared(arrived) && arrived->contiguous) {
        *out = ms_tensor_retain(arrived);
        return MS_OK;
    }
    return ms_op_unary(engine, &ms_op_clone, NULL, arrived, out);
}

/* What backward gave for one input. */
static ms_status check_result(const ms_customized *kept, uint32_t i, const ms_tensor *result)
{
    const ms_tensor_info *input = &kept->inputs[i];
    const char *line = ms_strings_get(ms_engine_strings(kept->engine), kept->script);
    char got[160], want[160];
    if (!*line) line = "the engine";
    if (!ms_dtype_is_float(input->dtype))
        return ms_engine_fail(kept->engine, MS_ERROR_ARGUMENT,
                              "custom (at %s): backward gave a gradient of input %u, which is of "
                              "%s and has none",
                              line, i + 1, ms_dtype_name(input->dtype));
    if (result->dtype == input->dtype
        && ms_shape_equal(result->dims, result->shape, input->dims, input->shape))
        return MS_OK;
    ms_tensor like = { .dtype = input->dtype, .dims = input->dims };
    memcpy(like.shape, input->shape, sizeof like.shape);
    return ms_engine_fail(kept->engine, MS_ERROR_ARGUMENT,
                          "custom (at %s): backward gave %s as the gradient of input %u, which is "
                          "%s",
                          line, ms_tensor_describe(result, got, sizeof got), i + 1,
                          ms_tensor_describe(&like, want, sizeof want));
}

/* The node's backward. Results that are not needed are checked as well: a mistake in their order
 * shows at once. The caller releases the results after an error. */
static ms_status customized_backward(void *object, ms_tensor *const *gradients, ms_tensor **results,
                                     const bool *needs)
{
    ms_customized *kept = object;
    ms_engine *engine = kept->engine;
    ms_tensor *own[MS_CUSTOM_OUTPUTS] = { NULL };
    ms_dtype autocast = ms_engine_autocast(engine);
    ms_status status = MS_OK;
    ms_engine_set_autocast(engine, MS_F32);
    for (uint32_t i = 0; i < kept->output_count && !status; i++)
        status = own_gradient(engine, &kept->outputs[i], gradients[i], &own[i]);
    if (!status) status = kept->f->backward(kept->user, own, kept->saved, results, needs);
    ms_engine_set_autocast(engine, autocast);
    for (uint32_t i = 0; i < kept->output_count; i++) ms_tensor_release(own[i]);
    for (uint32_t i = 0; i < kept->input_count && !status; i++) {
        if (results[i]) status = check_result(kept, i, results[i]);
        if (status || needs[i]) continue;
        ms_tensor_release(results[i]);
        results[i] = NULL;
    }
    return status;
}

static const ms_function custom_function = { .name = "custom",
                                             .backward = customized_backward,
                                             .free = customized_free,
                                             .reads = customized_reads };

static const ms_function custom_view = { .name = "custom",
                                         .backward = customized_backward,
                                         .free = customized_free,
                                         .reads = customized_reads,
                                         .gives_views = true };

static void describe(ms_tensor_info *info, const ms_tensor *tensor)
{
    *info = (ms_tensor_info){ .dtype = tensor->dtype, .dims = tensor->dims };
    memcpy(info->shape, tensor->shape, sizeof info->shape);
}

/* What the node keeps, and the outputs. On failure the caller releases what outputs has. */
static ms_status keep(ms_engine *engine, const ms_custom_function *f, ms_tensor *const *inputs,
                      uint32_t input_count, const ms_custom_results *results, ms_tensor **outputs,
                      ms_customized **out)
{
    size_t infos = ((size_t)input_count + results->output_count) * sizeof(ms_tensor_info),
           each = sizeof(uint64_t) + sizeof(ms_tensor *);
    void *memory = NULL;
    ms_status status =
        ms_allocate(ms_engine_context(engine),
                    sizeof(ms_customized) + infos + results->saved_count * each, "custom", &memory);
    if (status) return status;
    ms_customized *kept = memory;
    *kept = (ms_customized){ .engine = engine,
                             .f = f,
                             .script = ms_engine_script(engine),
                             .input_count = input_count,
                             .output_count = results->output_count };
    kept->inputs = (ms_tensor_info *)(void *)(kept + 1);
    kept->outputs = kept->inputs + input_count;
    kept->versions = (uint64_t *)(void *)(kept->outputs + results->output_count);
    kept->saved = (ms_tensor **)(void *)(kept->versions + results->saved_count);
    for (uint32_t i = 0; i < input_count; i++) describe(&kept->inputs[i], inputs[i]);
    for (uint32_t i = 0; i < results->output_count && !status; i++) {
        describe(&kept->outputs[i], results->outputs[i]);
        status = ms_tensor_alias(results->outputs[i], &outputs[i]);
    }
    for (uint32_t i = 0; i < results->saved_count && !status; i++) {
        kept->versions[i] = ms_tensor_version(results->saved[i]);
        status = ms_tensor_alias(results->saved[i], &kept->saved[i]);
        kept->saved_count += !status;
    }
    if (status) customized_free(kept);
    else *out = kept;
    return status;
}

/* ------------------------------------------------- what would be silently wrong */

/* Whether the tensor's gradient goes where that of an input goes. */
static bool is_of_input(const ms_tape_node *node, ms_tensor *const *inputs, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        const ms_meta *meta = inputs[i]->meta;
        if (meta && (meta->node ? meta->node : ms_meta_accumulator(meta)) == node) return true;
    }
    return false;
}

/* Of what forward has used, all that requires a gradient must be inputs. */
static ms_status check_captures(ms_engine *engine, const ms_captures *captures,
                                ms_tensor *const *inputs, uint32_t count)
{
    char text[160];
    for (size_t i = 0; i < captures->count; i++) {
        const ms_capture_item *item = &captures->items[i];
        if (!item->node || is_of_input(item->node, inputs, count)) continue;
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "custom: forward used a tensor %s that requires a gradient and is no "
                              "argument, so it would get none: pass it as an argument, or detach "
                              "it",
                              ms_tensor_describe(item->saved.tensor, text, sizeof text));
    }
    return MS_OK;
}

static void release_captures(ms_engine *engine, ms_captures *captures)
{
    for (size_t i = 0; i < captures->count; i++) {
        ms_tensor_release(captures->items[i].saved.tensor);
        ms_tape_node_release(captures->items[i].node);
    }
    ms_release(ms_engine_context(engine), captures->items);
}

/* Whether forward has written this input, whose history the call uses. */
static bool was_written(const ms_tensor *input, uint64_t version)
{
    return ms_tensor_requires_grad(input) && ms_tensor_version(input) != version;
}

/* The rules of operators in place hold for inputs that forward has written. */
static ms_status check_inputs(ms_engine *engine, ms_tensor *const *inputs, uint32_t count,
                              const uint64_t *versions)
{
    for (uint32_t i = 0; i < count; i++) {
        ms_status status = ms_tensor_check_whole(inputs[i]);
        if (status) return status;
        if (!was_written(inputs[i], versions[i])) continue;
        size_t begin, end;
        ms_tensor_span(inputs[i], &begin, &end);
        const ms_tape_node *node = ((const ms_meta *)inputs[i]->meta)->node;
        bool is_view = node && node->op && (node->op->flags & MS_OP_VIEW);
        if (node && !is_view && !ms_storage_is_parameter(inputs[i]->storage, begin, end)) continue;
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "custom: forward has written input %u in place, which is %s: write a "
                              "copy (clone it first)",
                              i + 1,
                              is_view ? "a view of a tensor whose gradient is recorded"
                                      : "a parameter, or a leaf that requires a gradient");
    }
    return MS_OK;
}

/* Tensors that were made before such a write are too old to be used from now on; outputs were made
 * after it. */
static void note_writes(ms_tensor *const *inputs, uint32_t count, const uint64_t *versions)
{
    for (uint32_t i = 0; i < count; i++) {
        size_t begin, end;
        if (!was_written(inputs[i], versions[i])) continue;
        ms_tensor_span(inputs[i], &begin, &end);
        ms_storage_record(inputs[i]->storage, begin, end);
    }
}

static bool any_requires_grad(ms_tensor *const *inputs, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (ms_tensor_requires_grad(inputs[i])) return true;
    return false;
}

/* Whether an output shares the memory of an input that was not written. */
static bool gives_view(ms_tensor *const *inputs, uint32_t count, const uint64_t *versions,
                       ms_tensor *const *outputs, uint32_t output_count)
{
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t o = 0; o < output_count; o++)
            if (inputs[i]->storage == outputs[o]->storage && !was_written(inputs[i], versions[i]))
                return true;
    return false;
}

/* Runs forward with recording off. Where recording was on, what it uses is noted in captures; where
 * the first run of a recomputed function is on, for that one. */
static ms_status run_forward(ms_engine *engine, const ms_custom_function *f, void *user,
                             ms_tensor *const *inputs, uint32_t count, ms_custom_results *results,
                             ms_captures *captures)
{
    ms_tape *tape = NULL;
    ms_status status = ms_tape_of(engine, &tape);
    if (status) return status;
    ms_captures *outer = tape->captures;
    /* The call's own line, which the record has, and not one of forward's. */
    uint32_t script = ms_engine_script(engine);
    bool recording = ms_engine_set_recording(engine, false);
    if (recording) tape->captures = captures;
    status = f->forward(user, inputs, count, results);
    if (!status && (results->output_count < 1 || results->output_count > MS_CUSTOM_OUTPUTS))
        status = ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                "custom: forward gave %u tensors; 1 to %d are allowed",
                                results->output_count, MS_CUSTOM_OUTPUTS);
    if (!status) status = ms_capture(engine, results->outputs, results->output_count, true);
    tape->captures = outer;
    ms_engine_set_recording(engine, recording);
    ms_engine_set_script(engine, script);
    return status;
}

/* forward has run: the rest of the call. On failure the caller still owns user. */
static ms_status record(ms_engine *engine, const ms_custom_function *f, void *user,
                        ms_tensor *const *inputs, uint32_t count, const uint64_t *versions,
                        const ms_custom_results *results, const ms_captures *captures,
                        ms_tensor **outputs)
{
    ms_customized *kept = NULL;
    bool recorded = ms_engine_is_recording(engine) && any_requires_grad(inputs, count);
    ms_status status = check_captures(engine, captures, inputs, count);
    if (!status && recorded) status = check_inputs(engine, inputs, count, versions);
    if (!status) status = keep(engine, f, inputs, count, results, outputs, &kept);
    if (status) return status;
    const ms_function *function = &custom_function;
    if (gives_view(inputs, count, versions, outputs, results->output_count))
        function = &custom_view;
    /* The tape may free kept, and user with it, within the call. */
    kept->user = user;
    kept->owns_user = true;
    status = ms_record(engine, function, kept, inputs, count, outputs, results->output_count);
    if (status) {
        kept->owns_user = false;
        customized_free(kept);
    } else if (recorded) note_writes(inputs, count, versions);
    return status;
}

ms_status ms_custom(ms_engine *engine, const ms_custom_function *f, void *user,
                    ms_tensor *const *inputs, uint32_t input_count, ms_tensor **outputs,
                    uint32_t *output_count)
{
    ms_custom_results results = { 0 };
    ms_captures captures = { 0 };
    ms_tensor *made[MS_CUSTOM_OUTPUTS] = { NULL };
    void *memory = NULL;
    ms_status status = ms_allocate(ms_engine_context(engine),
                                   ((size_t)input_count + 1) * sizeof(uint64_t), "custom", &memory);
    if (status) return status;
    uint64_t *versions = memory;
    /* forward may drop what its caller holds. */
    for (uint32_t i = 0; i < input_count; i++)
        versions[i] = ms_tensor_version(ms_tensor_retain(inputs[i]));
    status = run_forward(engine, f, user, inputs, input_count, &results, &captures);
    if (!status)
        status = record(engine, f, user, inputs, input_count, versions, &results, &captures, made);
    release_captures(engine, &captures);
    for (uint32_t i = 0; i < input_count; i++) ms_tensor_release(inputs[i]);
    ms_release(ms_engine_context(engine), memory);
    if (status) {
        for (uint32_t i = 0; i < MS_CUSTOM_OUTPUTS; i++) ms_tensor_release(made[i]);
        return status;
    }
    memcpy(outputs, made, results.output_count * sizeof *made);
    *output_count = results.output_count;
    return MS_OK;
}
