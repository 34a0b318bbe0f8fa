/* optimizer.c: what each kind of optimizer is called, keeps and allows, and its step as one
 * task.
 *
 * An optimizer has no object here. Its state is tensors that the caller owns, and a step is a
 * function of them: one task reads and writes parameter, states and count in a single pass over
 * memory, which is what an optimizer's time consists of. The formulas are in moonshard/optim.h, the
 * loops in optim/cpu/isa/optimizer.c. */
#include "optim/tasks.h"

#include <math.h>
#include <string.h>

#include "tensor/op.h"
#include "ops/autocast.h"
#include "ops/values.h"

/* What is known of a kind: its name, its states in the order in which kernels take them, and its
 * hyper-parameters unless the user gives others. Names and defaults are those of the peers, numbers
 * that are left out are 0. */
typedef struct kind_facts {
    const char *name;
    const char *states[MS_OPTIMIZER_STATES];
    ms_hyperparameters defaults;
} kind_facts;

/* Checkpoints hold the states under these names, so a name cannot change. */
static const kind_facts facts[MS_OPTIMIZER_KINDS] = {
    [MS_SGD] = { "sgd", { "momentum_buffer" }, { .lr = 0.01 } },
    [MS_ADAM] = { "adam",
                  { "exp_avg", "exp_avg_sq", "max_exp_avg_sq" },
                  { .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8 } },
    [MS_ADAMW] = { "adamw",
                   { "exp_avg", "exp_avg_sq", "max_exp_avg_sq" },
                   { .lr = 1e-3,
                     .beta1 = 0.9,
                     .beta2 = 0.999,
                     .eps = 1e-8,
                     .weight_decay = 0.01 } },
    [MS_ADAGRAD] = { "adagrad", { "sum" }, { .lr = 0.01, .eps = 1e-10 } },
    [MS_ADADELTA] = { "adadelta",
                      { "square_avg", "acc_delta" },
                      { .lr = 1, .rho = 0.9, .eps = 1e-6 } },
    [MS_RMSPROP] = { "rmsprop",
                     { "square_avg", "momentum_buffer", "grad_avg" },
                     { .lr = 0.01, .alpha = 0.99, .eps = 1e-8 } },
    [MS_RPROP] = { "rprop",
                   { "prev", "step_size" },
                   { .lr = 0.01,
                     .eta_minus = 0.5,
                     .eta_plus = 1.2,
                     .step_min = 1e-6,
                     .step_max = 50 } },
    [MS_ADAMAX] = { "adamax",
                    { "exp_avg", "exp_inf" },
                    { .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8 } },
};

#define ONE(kind, name) +1
_Static_assert(0 MS_OPTIMIZER_LIST(ONE) == MS_OPTIMIZER_KINDS, "every kind has its kernels");

/* The name of the Lua function, with which messages begin. */
const char *ms_optimizer_name(ms_optimizer_kind kind) { return facts[kind].name; }
ms_hyperparameters ms_optimizer_defaults(ms_optimizer_kind kind) { return facts[kind].defaults; }

/* Some states exist only with an option: the maximum of amsgrad, the momentum buffers, the mean of
 * centered rmsprop. A state that is not needed takes no memory and has no name in checkpoints. */
const char *ms_optimizer_state_name(ms_optimizer_kind kind, const ms_hyperparameters *hyper,
                                    uint32_t index)
{
    /* Both have the same states. */
    bool adam = kind == MS_ADAM || kind == MS_ADAMW;
    if (index >= MS_OPTIMIZER_STATES || (adam && index == 2 && !hyper->amsgrad)) return NULL;
    /* Without momentum a buffer would hold nothing that the next step reads. */
    if ((kind == MS_SGD && index == 0) || (kind == MS_RMSPROP && index == 1))
        if (hyper->momentum == 0) return NULL;
    if (kind == MS_RMSPROP && index == 2 && !hyper->centered) return NULL;
    return facts[kind].states[index];
}

/* All states begin as zeros but the sum of adagrad, whose start is a hyper-parameter. The caller
 * makes the states, so it asks here what to fill them with. */
double ms_optimizer_state_start(ms_optimizer_kind kind, const ms_hyperparameters *hyper,
                                uint32_t index)
{
    return kind == MS_ADAGRAD && index == 0 ? hyper->initial_accumulator_value : 0;
}

/* The error for a hyper-parameter: kind, name, value, and what is allowed. */
static ms_status refuse(ms_engine *engine, ms_optimizer_kind kind, const char *name, double value,
                        const char *range)
{
    return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "%s: %s = %g; %s is allowed", facts[kind].name,
                          name, value, range);
}

/* Each number by itself. A number that the kind does not use has its default, so it passes. The
 * conditions are written so that NaN is refused. */
static ms_status check_ranges(ms_engine *engine, ms_optimizer_kind kind,
                              const ms_hyperparameters *hyper)
{
    const struct {
        const char *name;
        double value;
        bool below_one;
    } rules[] = {
        { "lr", hyper->lr, false },
        { "weight_decay", hyper->weight_decay, false },
        { "betas[1]", hyper->beta1, true },
        { "betas[2]", hyper->beta2, true },
        { "eps", hyper->eps, false },
        { "momentum", hyper->momentum, false },
        { "lr_decay", hyper->lr_decay, false },
        { "initial_accumulator_value", hyper->initial_accumulator_value, false },
        { "alpha", hyper->alpha, false },
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        /* NaN fails the first comparison. */
        if (!(rules[i].value >= 0) || isinf(rules[i].value))
            return refuse(engine, kind, rules[i].name, rules[i].value,
                          "a finite number of 0 or more");
        /* At 1 a running mean would never take anything in, and its correction would divide by
         * 0. */
        if (rules[i].below_one && rules[i].value >= 1)
            return refuse(engine, kind, rules[i].name, rules[i].value, "0 or more and below 1");
    }
    if (!(hyper->rho >= 0 && hyper->rho <= 1))
        return refuse(engine, kind, "rho", hyper->rho, "0 to 1");
    return MS_OK;
}

/* A first eta of 1 or more would never shrink a step that has passed a minimum. The second must be
 * above 1, or a step could never grow. */
static ms_status check_rprop(ms_engine *engine, const ms_hyperparameters *hyper)
{
    if (!(hyper->eta_minus > 0 && hyper->eta_minus < 1 && hyper->eta_plus > 1))
        return ms_engine_fail(
            engine, MS_ERROR_ARGUMENT,
            "rprop: etas = { %g, %g }; the first must lie between 0 and 1, the second above 1",
            hyper->eta_minus, hyper->eta_plus);
    if (!(hyper->step_min > 0 && hyper->step_min <= hyper->step_max))
        return ms_engine_fail(
            engine, MS_ERROR_ARGUMENT,
            "rprop: step_sizes = { %g, %g }; both must be above 0, in ascending order",
            hyper->step_min, hyper->step_max);
    return MS_OK;
}

/* The restrictions on nesterov are the peers'. Called when an optimizer is made and at each step,
 * since scripts may change a learning rate in between. */
ms_status ms_optimizer_check(ms_engine *engine, ms_optimizer_kind kind,
                             const ms_hyperparameters *hyper)
{
    ms_status status = check_ranges(engine, kind, hyper);
    if (status) return status;
    if (hyper->nesterov && (hyper->momentum <= 0 || hyper->dampening != 0))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "%s: nesterov needs a momentum above 0 and no dampening",
                              facts[kind].name);
    return kind == MS_RPROP ? check_rprop(engine, hyper) : MS_OK;
}

/* --------------------------------------------------------------------- step */

/* States and master are f32 whatever the parameter's dtype: 16 bits lose the small terms of running
 * means. The shape may differ where the count of elements agrees: the task sees flat memory. */
static ms_status check_state(const ms_optimizer_step *step, const char *name,
                             const ms_tensor *state)
{
    ms_engine *engine = ms_tensor_engine(step->parameter);
    char have[160], want[160];
    if (!state)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "%s: the state %s is missing",
                              facts[step->kind].name, name);
    if (ms_tensor_dtype(state) != MS_F32
        || ms_tensor_count(state) != ms_tensor_count(step->parameter)
        || !ms_tensor_is_contiguous(state))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "%s: the state %s is %s, the parameter %s; a contiguous f32 tensor "
                              "of its shape is expected",
                              facts[step->kind].name, name,
                              ms_tensor_describe(state, have, sizeof have),
                              ms_tensor_describe(step->parameter, want, sizeof want));
    return MS_OK;
}

/* The parameter must be contiguous, since it is written in place; a gradient with other strides is
 * copied before the step. Parameter and gradient may differ in dtype: under a 16-bit model the
 * gradient may be f32. */
static ms_status check_gradient(ms_engine *engine, const ms_optimizer_step *step)
{
    char have[160], want[160];
    const ms_tensor *p = step->parameter, *g = step->gradient;
    if (!ms_dtype_is_float(ms_tensor_dtype(p)) || !ms_tensor_is_contiguous(p))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "%s: the parameter %s must be contiguous and of a float dtype",
                              facts[step->kind].name, ms_tensor_describe(p, have, sizeof have));
    if (!ms_dtype_is_float(ms_tensor_dtype(g))
        || !ms_shape_equal(ms_tensor_dims(p), ms_tensor_shape(p), ms_tensor_dims(g),
                           ms_tensor_shape(g)))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "%s: the gradient is %s, the parameter %s",
                              facts[step->kind].name, ms_tensor_describe(g, have, sizeof have),
                              ms_tensor_describe(p, want, sizeof want));
    return MS_OK;
}

/* Whether a tensor is one number of this dtype. NULL passes: what must be given is checked apart.
 */
static bool is_number(const ms_tensor *tensor, ms_dtype dtype)
{
    return !tensor || (ms_tensor_dtype(tensor) == dtype && ms_tensor_count(tensor) == 1);
}

/* The numbers that the step reads on the device: count must be given, lr and only_if may be. The
 * count is a tensor and no number of the host, because a skipped step must not raise it, and only
 * the device knows of that. */
static ms_status check_numbers(ms_engine *engine, const ms_optimizer_step *step)
{
    char have[160];
    const char *name = facts[step->kind].name;
    if (!step->count || !is_number(step->count, MS_I64))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "%s: the count of steps must be one i64",
                              name);
    if (!is_number(step->lr, MS_F32))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "%s: lr is %s; a number or one f32 is expected", name,
                              ms_tensor_describe(step->lr, have, sizeof have));
    if (!is_number(step->only_if, MS_BOOL))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "%s: only_if is %s; one bool is expected",
                              name, ms_tensor_describe(step->only_if, have, sizeof have));
    if (!is_number(step->counted, MS_BOOL))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "%s: counted is %s; one bool is expected",
                              name, ms_tensor_describe(step->counted, have, sizeof have));
    return MS_OK;
}

/* All checks of a step come before anything is enqueued, so a step that is refused changes nothing.
 */
static ms_status check_step(ms_engine *engine, const ms_optimizer_step *step)
{
    ms_status status = check_gradient(engine, step);
    if (!status) status = check_numbers(engine, step);
    if (!status && step->master) status = check_state(step, "master", step->master);
    for (uint32_t i = 0; i < MS_OPTIMIZER_STATES && !status; i++) {
        /* A state that the options leave out may be NULL, or be there: it is not looked at. */
        const char *name = ms_optimizer_state_name(step->kind, &step->hyper, i);
        if (name) status = check_state(step, name, step->states[i]);
    }
    return status ? status : ms_optimizer_check(engine, step->kind, &step->hyper);
}

/* NULL for a tensor that is not given. */
static void *data_of(ms_tensor *tensor) { return tensor ? ms_tensor_data(tensor) : NULL; }

/* Enqueues the checked step; the gradient is contiguous. The cost is estimated as 12 FLOPs an
 * element for every kind: a step is bound by the bytes it moves. lr and only_if are declared as
 * reads, so the step waits for the tasks that compute them. */
static ms_status enqueue_step(ms_engine *engine, const ms_optimizer_step *step, ms_tensor *gradient,
                              ms_tensor *cast)
{
    ms_optimizer_args args = { .kind = step->kind,
                               .dtype = ms_tensor_dtype(step->parameter),
                               .gradient_dtype = ms_tensor_dtype(gradient),
                               .hyper = step->hyper,
                               .cast_dtype = cast ? ms_tensor_dtype(cast) : MS_F32,
                               .parameter = ms_tensor_data(step->parameter),
                               .cast = data_of(cast),
                               .gradient = ms_tensor_data(gradient),
                               .count = ms_tensor_data(step->count),
                               .master = data_of(step->master),
                               .lr = data_of(step->lr),
                               .only_if = data_of(step->only_if),
                               .counted = data_of(step->counted),
                               .lr_if_lost = step->lr_if_lost,
                               .elements = ms_tensor_count(step->parameter),
                               /* Only a 16-bit parameter without a master draws from it. */
                               .random = step->random };
    /* What is updated is read as well. It comes first in `used`. */
    ms_tensor *used[MS_OPTIMIZER_STATES + 7] = { step->parameter, step->count, step->master };
    uint32_t updated = 3;
    /* What is updated counts twice: it is read and written. Where there is a master, that is
     * updated, and the parameter is only written. */
    uint64_t bytes = (step->master ? 1 : 2) * ms_tensor_bytes(step->parameter)
                     + (step->master ? 2 * ms_tensor_bytes(step->master) : 0)
                     + ms_tensor_bytes(gradient);
    for (uint32_t i = 0; i < MS_OPTIMIZER_STATES; i++)
        if (ms_optimizer_state_name(step->kind, &step->hyper, i)) {
            /* Kernels find a state by its index, so one that is left out keeps its NULL. */
            args.states[i] = ms_tensor_data(step->states[i]);
            used[updated++] = step->states[i];
            bytes += 2 * ms_tensor_bytes(step->states[i]);
        }
    ms_tensor *written[MS_OPTIMIZER_STATES + 4];
    memcpy(written, used, updated * sizeof *used);
    written[updated] = cast;
    if (cast) bytes += ms_tensor_bytes(cast);
    used[updated] = gradient;
    used[updated + 1] = step->lr;
    used[updated + 2] = step->only_if;
    used[updated + 3] = step->counted;
    return ms_tensor_enqueue(
        engine, ms_optim_task_of(engine, MS_OPTIM_STEP), &args, used, updated + 4, written,
        updated + 1, (ms_task_cost){ .flops = 12.0 * (double)args.elements, .bytes = bytes });
}

/* Under autocast the step makes the next step's cast of the parameter as well, which saves a pass
 * over it. A gradient with gaps is copied; it is not written, so the copy serves. The copy may be
 * released at once: stream order keeps its memory until the step has read it. */
ms_status ms_optimizer_step_param(ms_engine *engine, const ms_optimizer_step *step)
{
    ms_tensor *gradient = NULL, *cast = NULL;
    ms_status status = check_step(engine, step);
    if (!status) status = ms_op_as_contiguous(engine, step->gradient, &gradient);
    /* A step that may be skipped would leave the cast without values. */
    if (!status && !step->only_if) status = ms_tensor_next_cast(engine, step->parameter, &cast);
    if (!status) status = enqueue_step(engine, step, gradient, cast);
    if (!status) status = ms_tensor_keep_next_cast(step->parameter, cast);
    ms_tensor_release(gradient);
    ms_tensor_release(cast);
    return status;
}
