/* recompute.c: a part of the graph that keeps its inputs only and is run again in backward. */
#include <string.h>

#include "grad/tape.h"

typedef struct ms_recomputed {
    ms_engine *engine;
    ms_recompute_function f;
    void *user;
    void (*done)(void *);
    void (*free_user)(void *);
    ms_random random;                          /* as it was when f ran first */
    ms_dtype autocast;
    uint32_t input_count, output_count;
    ms_tensor *inputs[];                       /* aliases without history */
} ms_recomputed;

static void recomputed_free(void *object)
{
    ms_recomputed *kept = object;
    for (uint32_t i = 0; i < kept->input_count; i++) ms_tensor_release(kept->inputs[i]);
    if (kept->free_user) kept->free_user(kept->user);
    ms_release(ms_engine_context(kept->engine), kept);
}

/* f with the tape on, with the random numbers and precision of the first time. */
static ms_status run_again(ms_recomputed *kept, ms_tensor **outputs, uint32_t *count)
{
    ms_engine *engine = kept->engine;
    ms_random now = ms_engine_random(engine);
    ms_dtype autocast = ms_engine_autocast(engine);
    bool recording = ms_engine_set_recording(engine, true);
    ms_engine_set_random(engine, kept->random);
    ms_engine_set_autocast(engine, kept->autocast);
    ms_status status = kept->f(kept->user, kept->inputs, kept->input_count, outputs, count);
    ms_engine_set_autocast(engine, autocast);
    ms_engine_set_random(engine, now);
    ms_engine_set_recording(engine, recording);
    if (!status && *count != kept->output_count)
        status = ms_engine_fail(engine, MS_ERROR_STATE, "recompute: the function gave %u tensors at first and %u now: it must do the same each time", kept->output_count, *count);
    return status;
}

static ms_status recomputed_backward(void *object, ms_tensor *const *gradients, ms_tensor **results, const bool *needs)
{
    ms_recomputed *kept = object;
    ms_tensor *outputs[MS_RECOMPUTE_OUTPUTS] = { NULL }, *roots[MS_RECOMPUTE_OUTPUTS], *entering[MS_RECOMPUTE_OUTPUTS];
    uint32_t count = 0, used = 0;
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < kept->input_count && !status; i++)
        if (needs[i]) status = ms_tensor_set_requires_grad(kept->inputs[i], true);
    if (!status) status = run_again(kept, outputs, &count);
    for (uint32_t i = 0; i < count; i++)
        if (gradients[i] && ms_tensor_requires_grad(outputs[i])) {
            roots[used] = outputs[i];
            entering[used++] = gradients[i];
        }
    if (!status && used) status = ms_backward(kept->engine, roots, entering, used, false);
    if (kept->done) kept->done(kept->user);
    for (uint32_t i = 0; i < count; i++) ms_tensor_release(outputs[i]);
    for (uint32_t i = 0; i < kept->input_count; i++) {
        ms_tensor *gradient = ms_tensor_grad(kept->inputs[i]);
        if (!status && needs[i] && gradient) results[i] = ms_tensor_retain(gradient);
        if (gradient) ms_tensor_set_grad(kept->inputs[i], NULL);      /* so that a retained graph can go again */
    }
    return status;
}

static const ms_function recompute_function = { .name = "recompute", .backward = recomputed_backward, .free = recomputed_free };

/* What f returned may be what it got, or a parameter: the history that is to come belongs to a tensor of its own. */
static ms_status own_window(ms_tensor **tensor)
{
    ms_tensor *given = *tensor;
    ms_status status = ms_tensor_alias(given, tensor);
    if (status) *tensor = given;
    else ms_tensor_release(given);
    return status;
}

ms_status ms_recompute(ms_engine *engine, ms_recompute_function f, void *user, void (*done)(void *user), void (*free_user)(void *),
                       ms_tensor *const *inputs, uint32_t input_count, ms_tensor **outputs, uint32_t *output_count)
{
    void *memory = NULL;
    ms_status status = ms_allocate(ms_engine_context(engine), sizeof(ms_recomputed) + input_count * sizeof(ms_tensor *), "recompute", &memory);
    if (status) return status;
    ms_recomputed *kept = memory;
    *kept = (ms_recomputed){ .engine = engine, .f = f, .random = ms_engine_random(engine), .autocast = ms_engine_autocast(engine) };
    for (; kept->input_count < input_count && !status; kept->input_count += !status) status = ms_tensor_alias(inputs[kept->input_count], &kept->inputs[kept->input_count]);
    bool recording = ms_engine_set_recording(engine, false);
    uint32_t count = 0;
    ms_tensor *made[MS_RECOMPUTE_OUTPUTS] = { NULL };
    if (!status) {
        status = f(user, kept->inputs, kept->input_count, made, &count);
        if (done) done(user);
    }
    ms_engine_set_recording(engine, recording);
    kept->output_count = count;
    for (uint32_t i = 0; i < count && !status; i++) status = own_window(&made[i]);
    if (!status && recording) {
        /* From here on the node owns user; before, the caller does. */
        kept->user = user;
        kept->done = done;
        kept->free_user = free_user;
        status = ms_record(engine, &recompute_function, kept, true, inputs, input_count, made, count);
        if (status) kept->free_user = NULL;
        else kept = NULL;
    } else if (!status && free_user) {
        free_user(user);
    }
    if (kept) recomputed_free(kept);
    if (status) for (uint32_t i = 0; i < count; i++) ms_tensor_release(made[i]);
    else {
        memcpy(outputs, made, count * sizeof *made);
        *output_count = count;
    }
    return status;
}
