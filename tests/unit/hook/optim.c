/* optim.c: optimizer steps against the formulas in f64, 16-bit parameters, flags, clipping and
 * unscaling, threads, failed allocations. ctest: each-isa late cuda */
#include "fault_os.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "../cuda/driver/driver.h"
#include "exec/poison.h"
#include "gate.h"
#include "late_device.h"
#include "moonshard/optim.h"
#include "ranges.h"
#include "ops/autocast.h"
#include "ops/values.h"
#include "tensor/op.h"
#include "tensor/state.h"

enum { N = 70001, STEPS = 5 }; /* more than one tile, and not a multiple of a vector */

/* The same for steps. On a GPU tiles are smaller, and its stand-in computes on the host. */
static int64_t elements(void) { return device_is_cuda() && !ranges_are_long() ? 20001 : N; }

static ms_engine *make_engine(const ms_os *os, uint32_t threads)
{
    ms_engine_options options = { .os = os,
                                  .own_device = late_device(NULL),
                                  .threads = threads,
                                  .strict = true,
                                  .memory_bytes = 512 << 20,
                                  .cpu = getenv("MOONSHARD_CPU") };
    ms_engine *engine = NULL;
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    return engine;
}

#define OK(call) assert_int_equal(call, MS_OK)

static ms_status full(ms_engine *engine, ms_dtype dtype, int64_t count, double value,
                      ms_tensor **out)
{
    return ms_op_full(engine, dtype, count ? 1 : 0, &count, value, out);
}

static float start_of(int64_t i) { return (float)((i * 131) % 997) / 500.0f - 1.0f; }
static float gradient_of(int64_t i, int step)
{
    return (float)((i * 37 + step * 101) % 211) / 100.0f - 1.05f;
}

/* ------------------------------------------ the formulas, written once more */

typedef struct model {
    double p, a, b, c;
} model;

static void reference(ms_optimizer_kind kind, const ms_hyperparameters *h, model *m, double g,
                      int t)
{
    if (h->maximize) g = -g;
    if (kind == MS_ADAMW) m->p *= 1 - h->lr * h->weight_decay;
    else g += h->weight_decay * m->p;
    double c1 = 1 - pow(h->beta1, t), c2 = 1 - pow(h->beta2, t), d;
    switch (kind) {
    case MS_SGD:
        if (h->momentum != 0) {
            m->a = t == 1 ? g : h->momentum * m->a + (1 - h->dampening) * g;
            g = h->nesterov ? g + h->momentum * m->a : m->a;
        }
        m->p -= h->lr * g;
        break;
    case MS_ADAM:
    case MS_ADAMW:
        m->a = h->beta1 * m->a + (1 - h->beta1) * g;
        m->b = h->beta2 * m->b + (1 - h->beta2) * g * g;
        m->c = fmax(m->c, m->b);
        m->p -= h->lr / c1 * m->a / (sqrt(h->amsgrad ? m->c : m->b) / sqrt(c2) + h->eps);
        break;
    case MS_ADAGRAD:
        if (t == 1) m->a = h->initial_accumulator_value;
        m->a += g * g;
        m->p -= h->lr / (1 + (t - 1) * h->lr_decay) * g / (sqrt(m->a) + h->eps);
        break;
    case MS_ADADELTA:
        m->a = h->rho * m->a + (1 - h->rho) * g * g;
        d = sqrt(m->b + h->eps) / sqrt(m->a + h->eps) * g;
        m->b = h->rho * m->b + (1 - h->rho) * d * d;
        m->p -= h->lr * d;
        break;
    case MS_RMSPROP:
        m->a = h->alpha * m->a + (1 - h->alpha) * g * g;
        m->c += (1 - h->alpha) * (g - m->c);
        d = sqrt(h->centered ? m->a - m->c * m->c : m->a) + h->eps;
        m->b = h->momentum * m->b + g / d;
        m->p -= h->lr * (h->momentum != 0 ? m->b : g / d);
        break;
    case MS_RPROP:
        if (t == 1) m->b = h->lr;
        if (g * m->a > 0) m->b *= h->eta_plus;
        else if (g * m->a < 0) m->b *= h->eta_minus;
        m->b = fmin(fmax(m->b, h->step_min), h->step_max);
        if (g * m->a < 0) g = 0;
        m->p -= (g > 0) * m->b - (g < 0) * m->b;
        m->a = g;
        break;
    default:
        m->a = h->beta1 * m->a + (1 - h->beta1) * g;
        m->b = fmax(h->beta2 * m->b, fabs(g) + h->eps);
        m->p -= h->lr / c1 * m->a / m->b;
    }
}

/* Runs STEPS steps; leaves the parameter in values. */
static ms_status run(ms_engine *engine, ms_optimizer_kind kind, const ms_hyperparameters *hyper,
                     ms_dtype dtype, ms_dtype gradient_dtype, bool master, float *values)
{
    ms_optimizer_step step = { .kind = kind, .hyper = *hyper };
    ms_tensor *wide = NULL, *source = NULL, *cast = NULL;
    ms_attributes to = { .cast = { .dtype = dtype } },
                  to_gradient = { .cast = { .dtype = gradient_dtype } },
                  to_f32 = { .cast = { .dtype = MS_F32 } };
    const int64_t n = elements();
    const size_t bytes = (size_t)n * sizeof *values;
    ms_status status = full(engine, MS_F32, n, 0, &wide);
    for (int64_t i = 0; i < n; i++) values[i] = start_of(i);
    if (!status) status = ms_tensor_write(wide, values, bytes);
    if (!status) status = ms_op_unary(engine, &ms_op_cast, &to, wide, &step.parameter);
    if (!status && master)
        status = ms_op_unary(engine, &ms_op_cast, &to_f32, step.parameter, &step.master);
    if (!status) status = full(engine, MS_I64, 0, 0, &step.count);
    for (uint32_t i = 0; i < MS_OPTIMIZER_STATES && !status; i++)
        if (ms_optimizer_state_name(kind, hyper, i))
            status =
                full(engine, MS_F32, n, ms_optimizer_state_start(kind, hyper, i), &step.states[i]);
    for (int t = 1; t <= STEPS && !status; t++) {
        for (int64_t i = 0; i < n; i++) values[i] = gradient_of(i, t);
        status = full(engine, MS_F32, n, 0, &source);
        if (!status) status = ms_tensor_write(source, values, bytes);
        if (!status)
            status = ms_op_unary(engine, &ms_op_cast, &to_gradient, source, &step.gradient);
        step.random = (ms_random){ .seed = 9, .step = (uint64_t)t };
        if (!status) status = ms_optimizer_step_param(engine, &step);
        ms_tensor_release(source);
        ms_tensor_release(step.gradient);
        source = step.gradient = NULL;
    }
    if (!status) status = ms_op_unary(engine, &ms_op_cast, &to_f32, step.parameter, &cast);
    if (!status) status = ms_tensor_read(cast, values, bytes);
    ms_tensor *made[] = { wide,       cast,           step.parameter, step.master,
                          step.count, step.states[0], step.states[1], step.states[2] };
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) ms_tensor_release(made[i]);
    return status;
}

static const struct {
    ms_optimizer_kind kind;
    double lr, momentum, decay;
    bool flag, maximize;
} cases[] = {
    { MS_SGD, 0.1, 0, 0.1, false, false },     { MS_SGD, 0.1, 0.9, 0, true, false },
    { MS_ADAM, 0.01, 0, 0.1, false, true },    { MS_ADAM, 0.01, 0, 0, true, false },
    { MS_ADAMW, 0.01, 0, 0.3, false, false },  { MS_ADAMW, 0.01, 0, 0.3, true, false },
    { MS_ADAGRAD, 0.1, 0, 0.1, false, false }, { MS_ADADELTA, 1, 0, 0, false, false },
    { MS_RMSPROP, 0.01, 0.9, 0, true, false }, { MS_RMSPROP, 0.01, 0, 0, false, false },
    { MS_RPROP, 0.01, 0, 0, false, false },    { MS_ADAMAX, 0.01, 0, 0.1, false, false },
};

static ms_hyperparameters hyper_of(size_t i)
{
    ms_hyperparameters h = ms_optimizer_defaults(cases[i].kind);
    h.lr = cases[i].lr;
    h.momentum = cases[i].momentum;
    h.weight_decay = cases[i].decay;
    h.maximize = cases[i].maximize;
    h.nesterov = cases[i].kind == MS_SGD && cases[i].flag;
    h.amsgrad = cases[i].flag && (cases[i].kind == MS_ADAM || cases[i].kind == MS_ADAMW);
    h.centered = cases[i].kind == MS_RMSPROP && cases[i].flag;
    h.lr_decay = cases[i].kind == MS_ADAGRAD ? 0.1 : 0;
    h.initial_accumulator_value = cases[i].kind == MS_ADAGRAD ? 0.2 : 0;
    return h;
}

/* f32 against f64 after five steps: a few roundings each, 1e-5 of the largest value is far above
 * them. With 16-bit gradients, the reference gets the rounded ones. */
static void steps_follow_the_formulas(void **state)
{
    (void)state;
    float *values = malloc(N * sizeof *values);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            ms_engine *engine = make_engine(NULL, 2);
            ms_hyperparameters hyper = hyper_of(i);
            OK(run(engine, cases[i].kind, &hyper, MS_F32, bf16 ? MS_BF16 : MS_F32, false, values));
            for (int64_t e = 0; e < elements(); e += 97) {
                model m = { .p = start_of(e) };
                for (int t = 1; t <= STEPS; t++) {
                    float g = gradient_of(e, t);
                    reference(cases[i].kind, &hyper, &m,
                              (double)(bf16 ? ms_float_from_bf16(ms_bf16_from_float(g)) : g), t);
                }
                if (!(fabs((double)values[e] - m.p) < 1e-5 * 3))
                    fail_msg("%s case %zu element %lld: %.8g, not %.8g",
                             ms_optimizer_name(cases[i].kind), i, (long long)e, (double)values[e],
                             m.p);
            }
            ms_engine_free(engine);
        }
    free(values);
}

static void bits_do_not_depend_on_threads_or_what_is_around(void **state)
{
    (void)state;
    float *first = malloc(N * sizeof *first), *values = malloc(N * sizeof *values);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (uint32_t variant = 1; variant <= 4; variant++) {
            /* Threads of the host compute nothing for a GPU. */
            if (device_is_cuda() && !ranges_are_long() && (variant == 2 || variant == 3)) continue;
            if (ranges_are_short() && i % 3 != 0) continue;
            ms_engine *engine = make_engine(NULL, variant);
            ms_engine_set_poison(engine, variant == 4);
            ms_hyperparameters hyper = hyper_of(i);
            OK(run(engine, cases[i].kind, &hyper, MS_F32, MS_F32, false,
                   variant == 1 ? first : values));
            if (variant > 1)
                assert_memory_equal(first, values, (size_t)elements() * sizeof *values);
            ms_engine_free(engine);
        }
    free(first);
    free(values);
}

/* A master copy makes a 16-bit parameter the rounded f32 one; without it the mean over many
 * elements still moves as it should, although each step is far below half a unit in the last
 * place. */
static void sixteen_bit_parameters_do_not_lose_small_steps(void **state)
{
    (void)state;
    const int64_t n = elements();
    float *exact = malloc(N * sizeof *exact), *values = malloc(N * sizeof *values);
    const ms_dtype dtypes[] = { MS_BF16, MS_F16 };
    for (int d = 0; d < 2; d++) {
        ms_engine *engine = make_engine(NULL, 2);
        ms_hyperparameters hyper = ms_optimizer_defaults(MS_SGD);
        hyper.lr = d == 0 ? 1e-3 : 1e-4;
        OK(run(engine, MS_SGD, &hyper, dtypes[d], MS_F32, true, values));
        double master = 0, stochastic = 0, expected = 0;
        for (int64_t i = 0; i < n; i++) master += (double)values[i];
        OK(run(engine, MS_SGD, &hyper, dtypes[d], MS_F32, false, values));
        for (int64_t i = 0; i < n; i++) {
            stochastic += (double)values[i];
            float p = start_of(i);
            p = d == 0 ? ms_float_from_bf16(ms_bf16_from_float(p))
                       : ms_float_from_f16(ms_f16_from_float(p));
            expected += (double)p;
            for (int t = 1; t <= STEPS; t++) expected -= hyper.lr * (double)gradient_of(i, t);
        }
        /* The mean of n roundings of at most one unit (2^-8 or 2^-11 of values up to 1) scatters by
         * unit / sqrt(n): six of those. */
        double scatter = 6 * (d == 0 ? 0.00390625 : 0.00048828125) / sqrt((double)n);
        assert_true(fabs(master - expected) / (double)n < scatter);
        assert_true(fabs(stochastic - expected) / (double)n < scatter);
        ms_engine_free(engine);
    }
    free(exact);
    free(values);
}

static void a_false_flag_changes_nothing(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL, 1);
    ms_optimizer_step step = { .kind = MS_ADAM, .hyper = ms_optimizer_defaults(MS_ADAM) };
    OK(full(engine, MS_F32, 8, 1, &step.parameter));
    OK(full(engine, MS_F32, 8, 1, &step.gradient));
    OK(full(engine, MS_F32, 8, 0, &step.states[0]));
    OK(full(engine, MS_F32, 8, 0, &step.states[1]));
    OK(full(engine, MS_I64, 0, 0, &step.count));
    OK(full(engine, MS_BOOL, 0, 0, &step.only_if));
    OK(ms_optimizer_step_param(engine, &step));
    float p[8], m[8];
    int64_t count;
    OK(ms_tensor_read(step.parameter, p, sizeof p));
    OK(ms_tensor_read(step.states[0], m, sizeof m));
    OK(ms_tensor_read(step.count, &count, 8));
    assert_true(p[0] == 1 && m[0] == 0 && count == 0);
    ms_tensor *wrong = NULL;
    OK(full(engine, MS_F32, 7, 0, &wrong));
    ms_tensor *right = step.gradient;
    step.gradient = wrong;
    assert_int_equal(ms_optimizer_step_param(engine, &step), MS_ERROR_ARGUMENT);
    assert_string_equal(ms_engine_error(engine)->message,
                        "adam: the gradient is [7] f32, the parameter [8] f32");
    step.gradient = right;
    step.hyper.beta2 = 1;
    assert_int_equal(ms_optimizer_step_param(engine, &step), MS_ERROR_ARGUMENT);
    assert_string_equal(ms_engine_error(engine)->message,
                        "adam: betas[2] = 1; 0 or more and below 1 is allowed");
    ms_tensor *made[] = { step.parameter, step.gradient, step.states[0], step.states[1],
                          step.count,     step.only_if,  wrong };
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) ms_tensor_release(made[i]);
    ms_engine_free(engine);
}

/* ---------------------------------------------------------------- next casts */

/* Whether the cast is the parameter, rounded. */
static void assert_cast(ms_tensor *parameter, ms_tensor *cast)
{
    const int64_t n = elements();
    float *values = malloc((size_t)n * sizeof *values);
    uint16_t *narrow = malloc((size_t)n * sizeof *narrow);
    OK(ms_tensor_read(parameter, values, (size_t)n * sizeof *values));
    OK(ms_tensor_read(cast, narrow, (size_t)n * sizeof *narrow));
    bool is_bf16 = ms_tensor_dtype(cast) == MS_BF16;
    for (int64_t i = 0; i < n; i++)
        assert_int_equal(narrow[i],
                         is_bf16 ? ms_bf16_from_float(values[i]) : ms_f16_from_float(values[i]));
    free(values);
    free(narrow);
}

/* What a product would take of the parameter. */
static void use_cast(ms_engine *engine, ms_tensor *parameter, ms_dtype dtype)
{
    ms_tensor *cast = NULL;
    OK(ms_tensor_cast_cached(engine, parameter, dtype, true, &cast));
    assert_cast(parameter, cast);
    ms_tensor_release(cast);
    ms_engine_drop_casts(engine); /* the end of a forward */
    assert_null(parameter->cast);
}

static void steps_make_the_next_cast(void **state)
{
    (void)state;
    const int64_t n = elements();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            ms_engine *engine = make_engine(NULL, 2);
            ms_dtype dtype = bf16 ? MS_BF16 : MS_F16;
            ms_optimizer_step step = { .kind = cases[i].kind, .hyper = hyper_of(i) };
            OK(full(engine, MS_F32, n, 0.3, &step.parameter));
            OK(full(engine, dtype, n, 0.7, &step.gradient));
            OK(full(engine, MS_I64, 0, 0, &step.count));
            for (uint32_t s = 0; s < MS_OPTIMIZER_STATES; s++)
                if (ms_optimizer_state_name(step.kind, &step.hyper, s))
                    OK(full(engine, MS_F32, n, ms_optimizer_state_start(step.kind, &step.hyper, s),
                            &step.states[s]));
            /* Memory that others have had before, so that casts do not raise the peak. */
            ms_tensor *other = NULL;
            OK(full(engine, MS_F32, 4 * n, 0, &other));
            ms_tensor_release(other);
            /* The parameter has not been cast yet, so the step makes no cast. */
            OK(ms_optimizer_step_param(engine, &step));
            assert_null(step.parameter->cast);
            use_cast(engine, step.parameter, dtype);
            OK(ms_optimizer_step_param(engine, &step));
            ms_engine_drop_casts(engine); /* the end of a step */
            assert_non_null(step.parameter->cast);
            assert_true(step.parameter->cast_is_new);
            assert_cast(step.parameter, step.parameter->cast);
            use_cast(engine, step.parameter, dtype);
            /* What else is written makes it invalid. */
            OK(ms_optimizer_step_param(engine, &step));
            OK(full(engine, MS_F32, n, 0.1, &other));
            OK(ms_copy_into(engine, other, step.parameter));
            use_cast(engine, step.parameter, dtype);
            /* After a cast that no product has used, steps make no more. */
            OK(ms_optimizer_step_param(engine, &step));
            assert_non_null(step.parameter->cast);
            OK(ms_optimizer_step_param(engine, &step));
            assert_null(step.parameter->cast);
            /* A step that may be skipped makes none. */
            use_cast(engine, step.parameter, dtype);
            OK(full(engine, MS_BOOL, 0, 0, &step.only_if));
            OK(ms_optimizer_step_param(engine, &step));
            assert_null(step.parameter->cast);
            use_cast(engine, step.parameter, dtype);
            /* A step whose cast would raise the peak of memory makes none. */
            ms_tensor_release(step.only_if);
            step.only_if = NULL;
            ms_tensor *full_up = NULL;
            OK(full(engine, MS_F32, 8 * n, 0, &full_up));
            OK(ms_optimizer_step_param(engine, &step));
            assert_null(step.parameter->cast);
            ms_tensor_release(full_up);
            OK(ms_optimizer_step_param(engine, &step));
            assert_non_null(step.parameter->cast);
            ms_tensor *made[] = { step.parameter, step.gradient,  step.count,     step.only_if,
                                  step.states[0], step.states[1], step.states[2], other };
            for (size_t k = 0; k < sizeof made / sizeof *made; k++) ms_tensor_release(made[k]);
            ms_engine_free(engine);
        }
}

/* ------------------------------------------------------------------ batches */

/* Elements of each parameter: more than a block's share, less, none, and one that begins where no
 * access of 16 bytes is allowed. */
static const int64_t batch_sizes[] = { N, 1, 0, 768, 16385, 8192, 7 };
enum { PARAMETERS = sizeof batch_sizes / sizeof *batch_sizes, BATCH_STEPS = 3 };
typedef struct batch_case {
    ms_optimizer_kind kind;
    ms_dtype dtype;
    bool master;
} batch_case;
typedef struct many {
    ms_optimizer_step steps[PARAMETERS];
    ms_tensor *lr, *flags[2];
} many;

/* A tensor of so many elements; the last parameter's begins at the second element of a storage. */
static ms_tensor *part(ms_engine *engine, ms_dtype dtype, int which, double start)
{
    ms_tensor *whole = NULL, *out = NULL;
    OK(full(engine, MS_F32, batch_sizes[which] + 1, 0, &whole));
    float *values = malloc((size_t)(batch_sizes[which] + 1) * sizeof *values);
    for (int64_t i = 0; i <= batch_sizes[which]; i++)
        values[i] = start != 0 ? (float)start * start_of(i + which) : 0;
    OK(ms_tensor_write(whole, values, (size_t)(batch_sizes[which] + 1) * sizeof *values));
    free(values);
    ms_tensor *cast = NULL;
    ms_attributes to = { .cast = { .dtype = dtype } },
                  cut = { .dim = { .start = which == PARAMETERS - 1,
                                   .length = batch_sizes[which] } };
    OK(ms_op_unary(engine, &ms_op_cast, &to, whole, &cast));
    OK(ms_op_unary(engine, &ms_op_narrow, &cut, cast, &out));
    ms_tensor_release(whole);
    ms_tensor_release(cast);
    return out;
}

static void make_many(ms_engine *engine, const batch_case *c, many *m)
{
    memset(m, 0, sizeof *m);
    OK(full(engine, MS_F32, 0, 0.02, &m->lr));
    OK(full(engine, MS_BOOL, 0, 1, &m->flags[1]));
    OK(full(engine, MS_BOOL, 0, 0, &m->flags[0]));
    for (int i = 0; i < PARAMETERS; i++) {
        ms_optimizer_step *step = &m->steps[i];
        *step = (ms_optimizer_step){ .kind = c->kind, .hyper = ms_optimizer_defaults(c->kind) };
        /* Groups differ; some learn at a rate of the device, and some of those only if told to. */
        step->hyper.weight_decay = i % 2 ? 0.1 : 0;
        step->parameter = part(engine, c->dtype, i, 1);
        if (c->master) step->master = part(engine, MS_F32, i, 1);
        for (uint32_t s = 0; s < MS_OPTIMIZER_STATES; s++)
            if (ms_optimizer_state_name(c->kind, &step->hyper, s))
                step->states[s] = part(engine, MS_F32, i, 0);
        OK(full(engine, MS_I64, 0, i, &step->count));
        step->lr = i % 3 ? NULL : m->lr;
        step->only_if = i == 1 || i == 3 ? m->flags[i == 1] : NULL;
    }
}

static void free_many(many *m)
{
    for (int i = 0; i < PARAMETERS; i++) {
        ms_optimizer_step *step = &m->steps[i];
        ms_tensor *all[] = { step->parameter, step->master,    step->count,
                             step->states[0], step->states[1], step->states[2] };
        for (size_t t = 0; t < sizeof all / sizeof *all; t++) ms_tensor_release(all[t]);
    }
    ms_tensor_release(m->lr);
    ms_tensor_release(m->flags[0]);
    ms_tensor_release(m->flags[1]);
}

/* Kernels that were launched on the stand-in for a GPU; 0 elsewhere. */
static unsigned launches(void)
{
    const char *device = getenv("MOONSHARD_TEST_DEVICE"), *path = getenv("MOONSHARD_STAND_IN");
    if (!device || strncmp(device, "cuda", 4) != 0 || !path) return 0;
    const ms_os *os = ms_os_posix();
    char why[256];
    void *library = os->library_load(os->user, path, why, sizeof why);
    if (!library) fail_msg("%s", why);
    return ((stand_in_calls_function *)os->library_symbol(os->user, library, "stand_in_calls"))(
        "cuLaunchKernel");
}
/* A group of steps takes two: their numbers, and the steps. */
static void groups_were(unsigned before, unsigned groups)
{
    unsigned now = launches();
    if (now) assert_int_equal(now - before, 2 * groups);
}

/* Some steps of all parameters, together as far as the device can, or apart. */
static void step_many(ms_engine *engine, many *m, bool together)
{
    for (int t = 0; t < BATCH_STEPS; t++) {
        ms_tensor *gradients[PARAMETERS];
        for (int i = 0; i < PARAMETERS; i++)
            gradients[i] = part(engine, i == 4 ? MS_BF16 : MS_F32, i, 0.1 * (t + 1));
        unsigned before = launches();
        if (together) ms_engine_batch(engine, 1);
        for (int i = 0; i < PARAMETERS; i++) {
            m->steps[i].gradient = gradients[i];
            m->steps[i].random = (ms_random){ .seed = 3 + (uint64_t)i, .step = (uint64_t)t };
            OK(ms_optimizer_step_param(engine, &m->steps[i]));
        }
        if (together) ms_engine_batch(engine, -1);
        if (together) groups_were(before, 1);
        for (int i = 0; i < PARAMETERS; i++) ms_tensor_release(gradients[i]);
    }
}

static void same_values(ms_tensor *a, ms_tensor *b)
{
    size_t bytes = a ? (size_t)ms_tensor_bytes(a) : 0;
    if (bytes == 0) return;
    char *x = malloc(bytes), *y = malloc(bytes);
    OK(ms_tensor_read(a, x, bytes));
    OK(ms_tensor_read(b, y, bytes));
    assert_memory_equal(x, y, bytes);
    free(x);
    free(y);
}

static void steps_together_have_the_bits_of_steps_apart(void **state)
{
    (void)state;
    for (int k = 0; k < MS_OPTIMIZER_KINDS + 3; k++) {
        const batch_case more[] = { { MS_ADAMW, MS_BF16, true },
                                    { MS_ADAMW, MS_BF16, false },
                                    { MS_SGD, MS_F16, false } };
        batch_case c = k < MS_OPTIMIZER_KINDS ? (batch_case){ (ms_optimizer_kind)k, MS_F32, false }
                                              : more[k - MS_OPTIMIZER_KINDS];
        ms_engine *engine = make_engine(NULL, 2);
        many apart, together;
        make_many(engine, &c, &apart);
        make_many(engine, &c, &together);
        step_many(engine, &apart, false);
        step_many(engine, &together, true);
        for (int i = 0; i < PARAMETERS; i++) {
            ms_optimizer_step *a = &apart.steps[i], *b = &together.steps[i];
            int64_t count = 0;
            same_values(a->parameter, b->parameter);
            same_values(a->master, b->master);
            for (int s = 0; s < MS_OPTIMIZER_STATES; s++) same_values(a->states[s], b->states[s]);
            OK(ms_tensor_read(b->count, &count, sizeof count));
            assert_int_equal(count, i == 3 ? i : i + BATCH_STEPS);
        }
        free_many(&apart);
        free_many(&together);
        ms_engine_free(engine);
    }
}

/* A parameter that is stepped twice, or with another's values as its gradient, sees the step
 * before.
 */
static void steps_that_depend_on_each_other_have_an_order(void **state)
{
    (void)state;
    const float expected[] = { 1 - 0.5f * 2 - 0.5f * 2, 4 - 0.5f * (1 - 2) };
    ms_engine *engine = make_engine(NULL, 1);
    ms_tensor *p = NULL, *q = NULL, *g = NULL, *counts[2] = { NULL };
    OK(full(engine, MS_F32, 3, 1, &p));
    OK(full(engine, MS_F32, 3, 4, &q));
    OK(full(engine, MS_F32, 3, 2, &g));
    for (int i = 0; i < 2; i++) OK(full(engine, MS_I64, 0, 0, &counts[i]));
    ms_optimizer_step step = { .kind = MS_SGD,
                               .hyper = ms_optimizer_defaults(MS_SGD),
                               .parameter = p,
                               .gradient = g,
                               .count = counts[0] };
    step.hyper.lr = 0.5;
    unsigned before = launches();
    ms_engine_batch(engine, 1);
    OK(ms_optimizer_step_param(engine, &step));
    OK(ms_optimizer_step_param(engine, &step));
    step.parameter = q;
    step.gradient = p;
    step.count = counts[1];
    OK(ms_optimizer_step_param(engine, &step));
    ms_engine_batch(engine, -1);
    groups_were(before, 3);
    ms_tensor *results[] = { p, q };
    for (int i = 0; i < 2; i++) {
        float values[3];
        OK(ms_tensor_read(results[i], values, sizeof values));
        for (int e = 0; e < 3; e++) assert_true(values[e] == expected[i]);
    }
    ms_tensor *all[] = { p, q, g, counts[0], counts[1] };
    for (int i = 0; i < 5; i++) ms_tensor_release(all[i]);
    ms_engine_free(engine);
}

/* ------------------------------------------------------ clipping, unscaling */

enum { GRADIENTS = 30 }; /* more than one task holds */

static ms_status make_gradients(ms_engine *engine, ms_tensor *gradients[GRADIENTS], float bad)
{
    ms_status status = MS_OK;
    for (int i = 0; i < GRADIENTS && !status; i++) {
        int64_t count = i == 3 ? N : 5 + i;
        float *values = malloc((size_t)count * sizeof *values);
        for (int64_t e = 0; e < count; e++) values[e] = gradient_of(e, i);
        if (i == 17) values[2] = bad == 0 ? values[2] : bad;
        status = full(engine, MS_F32, count, 0, &gradients[i]);
        if (!status) status = ms_tensor_write(gradients[i], values, (size_t)count * 4);
        free(values);
    }
    return status;
}

static void release_all(ms_tensor *tensors[GRADIENTS])
{
    for (int i = 0; i < GRADIENTS; i++) ms_tensor_release(tensors[i]);
}

static void clipping_scales_to_the_common_norm(void **state)
{
    (void)state;
    const double orders[] = { 2, 1, 3, INFINITY };
    for (int o = 0; o < 4; o++)
        for (int over = 0; over < 2; over++) {
            ms_engine *engine = make_engine(NULL, 2);
            ms_tensor *gradients[GRADIENTS] = { NULL }, *norm = NULL, *bad = NULL;
            OK(make_gradients(engine, gradients, 0));
            double p = orders[o], expected = 0;
            for (int i = 0; i < GRADIENTS; i++)
                for (int64_t e = 0; e < (i == 3 ? N : 5 + i); e++) {
                    double size = fabs((double)gradient_of(e, i));
                    expected = isinf(p) ? fmax(expected, size) : expected + pow(size, p);
                }
            if (!isinf(p)) expected = pow(expected, 1 / p);
            double max = over ? expected / 4 : expected * 2;
            OK(ms_clip_norm(engine, gradients, GRADIENTS, max, p, &norm, &bad));
            float got, value[5];
            int64_t position;
            OK(ms_tensor_read(norm, &got, 4));
            OK(ms_tensor_read(bad, &position, 8));
            OK(ms_tensor_read(gradients[0], value, sizeof value));
            assert_true(fabs((double)got - expected) < 1e-6 * expected);
            assert_int_equal(position, -1);
            double factor = over ? max / (expected + 1e-6) : 1;
            assert_true(fabs((double)value[1] - factor * (double)gradient_of(1, 0)) < 1e-6);
            ms_tensor_release(norm);
            ms_tensor_release(bad);
            release_all(gradients);
            ms_engine_free(engine);
        }
}

static void what_is_not_finite_is_found(void **state)
{
    (void)state;
    const float values[] = { NAN, INFINITY, -INFINITY };
    for (int v = 0; v < 3; v++) {
        ms_engine *engine = make_engine(NULL, 2);
        ms_tensor *gradients[GRADIENTS] = { NULL }, *norm = NULL, *bad = NULL, *factor = NULL,
                  *finite = NULL;
        int64_t position;
        uint8_t flag;
        OK(make_gradients(engine, gradients, values[v]));
        OK(ms_clip_norm(engine, gradients, GRADIENTS, INFINITY, 2, &norm, &bad));
        OK(ms_tensor_read(bad, &position, 8));
        assert_int_equal(position, 17);
        OK(full(engine, MS_F32, 0, 0.5, &factor));
        OK(ms_unscale(engine, gradients, GRADIENTS, factor, &finite));
        OK(ms_tensor_read(finite, &flag, 1));
        assert_int_equal(flag, 0);
        float value[5];
        OK(ms_tensor_read(gradients[0], value, sizeof value));
        assert_true(value[1] == 0.5f * gradient_of(1, 0));
        ms_tensor *all[] = { norm, bad, factor, finite };
        for (int i = 0; i < 4; i++) ms_tensor_release(all[i]);
        release_all(gradients);
        ms_engine_free(engine);
    }
}

/* --------------------------------------------------------- failing the n-th */

static void any_failed_allocation_is_an_error_and_no_leak(void **state)
{
    (void)state;
    float *values = malloc(N * sizeof *values);
    ms_hyperparameters hyper = ms_optimizer_defaults(MS_ADAM);
    for (long n = 1;; n++) {
        fault_os fault;
        fault_os_init(&fault);
        ms_engine *engine = make_engine(&fault.table, 2);
        ms_tensor *gradients[GRADIENTS] = { NULL }, *norm = NULL, *bad = NULL, *factor = NULL,
                  *finite = NULL;
        /* A GPU keeps events for later, and can do without: the room for them is made here. */
        OK(full(engine, MS_F32, 0, 0.5, &factor));
        OK(ms_engine_sync(engine));
        ms_tensor_release(factor);
        factor = NULL;
        long limit = atomic_load(&fault.calls) + n;
        atomic_store(&fault.fail_at, limit);
        ms_status status = run(engine, MS_ADAM, &hyper, MS_BF16, MS_F32, true, values);
        if (!status) status = make_gradients(engine, gradients, 0);
        if (!status) status = ms_clip_norm(engine, gradients, GRADIENTS, 1, 2, &norm, &bad);
        if (!status) status = full(engine, MS_F32, 0, 0.5, &factor);
        if (!status) status = ms_unscale(engine, gradients, GRADIENTS, factor, &finite);
        if (!status) status = ms_engine_sync(engine);
        bool reached = atomic_load(&fault.calls) >= limit;
        atomic_store(&fault.fail_at, 0);
        ms_tensor *all[] = { norm, bad, factor, finite };
        for (int i = 0; i < 4; i++) ms_tensor_release(all[i]);
        release_all(gradients);
        assert_int_equal(status, reached ? MS_ERROR_MEMORY : MS_OK);
        assert_int_equal(ms_engine_memory(engine).live, 0);
        ms_engine_free(engine);
        assert_int_equal(atomic_load(&fault.live), 0);
        if (!reached) break;
        assert_true(n < 200);
    }
    free(values);
}

/* ------------------------------------------------------ after a failed task */

/* A task that fails when the gate opens. On a GPU it has failed when the host looks. */
static void enqueue_failure(ms_engine *engine, _Atomic int *open)
{
    const ms_device *device = late_device(NULL);
    if (!device || strcmp(device->name, "cuda") != 0) {
        OK(ms_stream_enqueue(ms_engine_current(engine), &bad_task, &(gate_args){ open }, NULL, 0,
                             (ms_task_cost){ 0 }, NULL));
        return;
    }
    ms_tensor *in[2] = { NULL }, *out = NULL;
    OK(full(engine, MS_I64, 2, 7, &in[0]));
    OK(ms_op_full(engine, MS_F32, 2, (int64_t[]){ 3, 3 }, 0, &in[1]));
    OK(ms_op_apply(engine, &ms_op_embedding, NULL, false, in, 2, &out, 1));
    ms_tensor_release(in[0]);
    ms_tensor_release(in[1]);
    ms_tensor_release(out);
}

/* A state, count or gradient that a failed task should have written must not be used. */
static void what_was_never_written_is_not_updated(void **state)
{
    (void)state;
    enum { TENSORS = 5 };
    for (int lost = 0; lost < TENSORS; lost++) {
        ms_engine *engine = make_engine(NULL, 1);
        ms_tensor *t[TENSORS] = { NULL }, *factor = NULL, *finite = NULL;
        ms_attributes zero = { .scalar = { .value = 0 } };
        _Atomic int open = 0;
        for (int i = 0; i < TENSORS - 1; i++) OK(full(engine, MS_F32, 3, 1, &t[i]));
        OK(full(engine, MS_I64, 0, 1, &t[TENSORS - 1]));
        OK(full(engine, MS_F32, 0, 1, &factor));
        enqueue_failure(engine, &open);
        ms_tensor *same = NULL;
        OK(ms_op_apply(engine, &ms_op_fill, &zero, true, &t[lost], 1, &same, 1));
        ms_tensor_release(same);
        atomic_store(&open, 1);
        assert_int_equal(ms_engine_sync(engine), MS_ERROR_ARGUMENT);
        ms_optimizer_step step = { .kind = MS_ADAM,
                                   .hyper = ms_optimizer_defaults(MS_ADAM),
                                   .parameter = t[0],
                                   .gradient = t[1],
                                   .states = { t[2], t[3] },
                                   .count = t[4] };
        assert_int_equal(ms_optimizer_step_param(engine, &step), MS_ERROR_TASK);
        if (lost == 1)
            assert_int_equal(ms_unscale(engine, &t[1], 1, factor, &finite), MS_ERROR_TASK);
        for (int i = 0; i < TENSORS; i++) ms_tensor_release(t[i]);
        ms_tensor_release(factor);
        ms_engine_free(engine);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_follow_the_formulas),
        cmocka_unit_test(bits_do_not_depend_on_threads_or_what_is_around),
        cmocka_unit_test(sixteen_bit_parameters_do_not_lose_small_steps),
        cmocka_unit_test(a_false_flag_changes_nothing),
        cmocka_unit_test(steps_make_the_next_cast),
        cmocka_unit_test(steps_together_have_the_bits_of_steps_apart),
        cmocka_unit_test(steps_that_depend_on_each_other_have_an_order),
        cmocka_unit_test(clipping_scales_to_the_common_norm),
        cmocka_unit_test(what_is_not_finite_is_found),
        cmocka_unit_test(what_was_never_written_is_not_updated),
        cmocka_unit_test(any_failed_allocation_is_an_error_and_no_leak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
