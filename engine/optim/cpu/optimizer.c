/* optimizer.c: the step of one parameter on the CPU: tiles of elements, 16-bit parameters and
 * gradients through f32 chunks.
 *
 * Elements do not depend on each other, so any number of threads gives the same bits. Arithmetic is
 * in f32. A 16-bit parameter either has an f32 master, which is stepped and then rounded to the
 * nearest, or it is stepped itself and rounded stochastically: rounding to the nearest would lose
 * every change that is smaller than half of its last digit, and with small learning rates that is
 * most of them. */
#include "optim/cpu/kernels.h"

#include <math.h>

#include "ops/cpu/convert.h"

#define MS_TILE 65536 /* elements of a tile: fixed, so that results do not depend on threads */
#define MS_CHUNK 2048 /* elements that are converted at once */

/* What the tiles of one step share. */
typedef struct job {
    const ms_optimizer_args *args;
    ms_optimizer_scalars scalars;
    const ms_optimizer_kernels *kernels;
    const ms_convert_kernels *convert;
} job;

/* The numbers of step t (from 1), computed in f64 and rounded once. step_size holds the bias
 * correction of adam and adamax, or the decayed rate of adagrad; a kind that uses neither ignores
 * it. damped is 1 at the first step, since sgd's buffer then becomes the gradient itself. A device
 * that computes them in f32 gets other corrections: 1 - 0.999^t loses most of its digits for small
 * t. */
static ms_optimizer_scalars scalars_of(const ms_optimizer_args *args, int64_t t)
{
    const ms_hyperparameters *h = &args->hyper;
    bool lost = args->counted && !*args->counted;
    double lr = args->lr ? (double)*args->lr : lost ? args->lr_if_lost : h->lr;
    double first = args->kind == MS_RMSPROP ? h->alpha : h->beta1;
    if (args->kind == MS_ADADELTA) first = h->rho;
    float damped = t == 1 ? 1 : (float)(1 - h->dampening);
    ms_optimizer_scalars s = { .lr = (float)lr,
                               .weight_decay = (float)h->weight_decay,
                               .sign = h->maximize ? -1 : 1,
                               .beta1 = (float)first,
                               .beta2 = (float)h->beta2,
                               .rest1 = (float)(1 - first),
                               .rest2 = (float)(1 - h->beta2),
                               .eps = (float)h->eps,
                               .momentum = (float)h->momentum,
                               .damped = damped,
                               .eta_minus = (float)h->eta_minus,
                               .eta_plus = (float)h->eta_plus,
                               .step_min = (float)h->step_min,
                               .step_max = (float)h->step_max,
                               .nesterov = h->nesterov,
                               .has_max = h->amsgrad,
                               .centered = h->centered,
                               .has_momentum = h->momentum != 0,
                               .first = t == 1 };
    if (args->kind == MS_ADAGRAD) s.step_size = (float)(lr / (1 + (double)(t - 1) * h->lr_decay));
    else s.step_size = (float)(lr / (1 - pow(h->beta1, (double)t)));
    s.root_correction = (float)(1 / sqrt(1 - pow(h->beta2, (double)t)));
    return s;
}

/* Rounds to one of the two neighbours, to the nearer one with the greater probability, so that the
 * expected result is the value: bf16 is the upper half of f32, and adding a random number below the
 * last kept bit carries with just that probability. Infinity and NaN are converted as they are,
 * since a carry would change them. */
static uint16_t bf16_stochastic(float value, uint32_t draw)
{
    uint32_t bits = ms_bits_from_float(value);
    bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    return finite ? (uint16_t)((bits + (draw & 0xffffu)) >> 16) : ms_bf16_from_float(value);
}

/* f16 keeps 10 of 23 bits: adds a draw below the last kept one, then cuts. Subnormal numbers of f16
 * and those that would leave its range are rounded to the nearest. */
static uint16_t f16_stochastic(float value, uint32_t draw)
{
    uint32_t moved = ms_bits_from_float(value) + (draw & 0x1fffu);
    bool cut = fabsf(value) >= 6.2e-5f && fabsf(ms_float_from_bits(moved)) < 65504.0f;
    return ms_f16_from_float(cut ? ms_float_from_bits(moved & ~0x1fffu) : value);
}

/* Element i takes lane i % 4 of the Philox block i / 4: a draw depends on the element's position
 * and the step only, not on tiles or threads. */
static void store_stochastic(const ms_optimizer_args *args, const float *values, int64_t first,
                             size_t n)
{
    uint16_t *out = (uint16_t *)args->parameter + first;
    for (size_t i = 0; i < n; i++) {
        uint32_t draws[4];
        uint64_t position = (uint64_t)first + i;
        ms_philox(args->random.seed, args->random.step << 32 | args->random.draw, position / 4,
                  draws);
        uint32_t draw = draws[position % 4];
        out[i] = args->dtype == MS_BF16 ? bf16_stochastic(values[i], draw)
                                        : f16_stochastic(values[i], draw);
    }
}

/* Steps n elements from `first` on. f32 parameters and gradients and all masters are used where
 * they are; other 16-bit values go through chunks on the stack. A master is stepped and the
 * parameter rounded from it, so the parameter's own digits are never read. */
static void step_chunk(const job *j, int64_t first, size_t n)
{
    const ms_optimizer_args *args = j->args;
    float p_chunk[MS_CHUNK], g_chunk[MS_CHUNK], *p = p_chunk;
    const float *g = g_chunk;
    size_t item = ms_dtype_bytes(args->dtype);
    char *stored = (char *)args->parameter + (size_t)first * item;
    if (args->dtype == MS_F32) p = (float *)args->parameter + first;
    else if (args->master) p = args->master + first;
    else j->convert->to_f32[args->dtype](p_chunk, stored, n);
    if (args->gradient_dtype == MS_F32) g = (const float *)args->gradient + first;
    else
        j->convert->to_f32[args->gradient_dtype](
            g_chunk, (const char *)args->gradient + (size_t)first * 2, n);
    float *states[MS_OPTIMIZER_STATES];
    for (int i = 0; i < MS_OPTIMIZER_STATES; i++)
        states[i] = args->states[i] ? args->states[i] + first : NULL;
    j->kernels->step[args->kind](&j->scalars, p, g, states[0], states[1], states[2], n);
    if (args->cast)
        j->convert->from_f32[args->cast_dtype]((char *)args->cast + (size_t)first * 2, p, n);
    if (args->dtype == MS_F32) return;
    if (args->master) j->convert->from_f32[args->dtype](stored, p, n);
    else store_stochastic(args, p, first, n);
}

/* Tiles of f32 go through the loop at once; where something is converted, chunk by chunk: what was
 * stepped is cast while it is in a cache. Bound by memory: adamw on f32 reads four arrays and
 * writes three, 28 bytes for each element. */
static void step_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    const job *j = context;
    int64_t first = (int64_t)tile * MS_TILE,
            end = first + MS_TILE < j->args->elements ? first + MS_TILE : j->args->elements;
    bool whole = j->args->dtype == MS_F32 && j->args->gradient_dtype == MS_F32 && !j->args->cast;
    for (int64_t at = first; at < end; at += whole ? MS_TILE : MS_CHUNK) {
        int64_t n = whole || end - at < MS_CHUNK ? end - at : MS_CHUNK;
        step_chunk(j, at, (size_t)n);
    }
}

/* only_if and count are read when the task runs, in stream order after the tasks that wrote them. A
 * step that is skipped leaves the count, so that bias corrections are those of the steps that
 * happened. */
static ms_task_result optimizer_run(ms_run *run, void *arguments)
{
    const ms_optimizer_args *args = arguments;
    if (args->only_if && !*args->only_if) return MS_TASK_DONE;
    int64_t t = ++*args->count;
    job j = { .args = args,
              .scalars = scalars_of(args, t),
              .kernels = ms_optimizer_kernels_for(ms_run_isa(run)),
              .convert = ms_convert_kernels_for(ms_run_isa(run)) };
    ms_run_tiles(run, (uint32_t)((args->elements + MS_TILE - 1) / MS_TILE), step_tile, &j);
    return MS_TASK_DONE;
}

const ms_task ms_cpu_optimizer = { .name = "optimizer",
                                   .function = optimizer_run,
                                   .args_bytes = sizeof(ms_optimizer_args),
                                   .kind = MS_KIND_OPTIMIZER };
