/* rotary.c: rotary position embedding on the CPU: the angles of a moment are made once for all
 * batches and heads.
 *
 * A kernel of another device may compute angles in another way, if their error stays as far below
 * that of f32: the product of position and frequency must not be rounded to f32 before it is
 * reduced to one turn. */
#include "ops/cpu/attention.h"

#include <math.h>
#include <stdatomic.h>

#include "ops/attention.h"

/* What the tiles of one task share. A tile is a range of moments, for all batches and heads. Every
 * tile writes other moments of y, so tiles share nothing that changes but no_memory. */
typedef struct job {
    const ms_rotary_args *args;
    const ms_attention_kernels *kernels;
    uint32_t tiles;
    atomic_bool no_memory;
} job;

/* Cosines and sines of the current moment in f64, and of one step. Each moment follows from the one
 * before by a rotation, which costs four products in place of two transcendental functions. Its
 * error grows by about 1e-16 a step, far below what f32 shows. The state is f64 because an angle in
 * f32 is too coarse: at position 100000 its rounding error is several thousandths of a radian. */
typedef struct angles {
    double *cosine, *sine, *step_cosine, *step_sine;
    float *cosine_f32, *sine_f32;
} angles;

/* The angle by which pair k turns from one position to the next. ms_rotary_scaling in
 * moonshard/tensor.h gives the formulas and their sources. `turns` says how often the pair turns
 * within the context that the model was trained with. Pairs that turn less often than `low` are
 * stretched, those that turn more often than `high` stay as they are, and the others are
 * interpolated. */
static double frequency(const ms_rotary_args *args, int64_t k)
{
    const ms_rotary_scaling *scaling = &args->scaling;
    double plain = pow(args->base, -2.0 * (double)k / (double)args->width);
    if (scaling->kind == MS_ROTARY_PLAIN) return plain;
    double stretched = plain / scaling->factor;
    if (scaling->kind == MS_ROTARY_LINEAR) return stretched;
    double turns = scaling->original_context * plain / (2.0 * acos(-1.0));
    double smooth = (turns - scaling->low) / (scaling->high - scaling->low);
    if (smooth <= 0.0) return stretched;
    return smooth >= 1.0 ? plain : (1.0 - smooth) * stretched + smooth * plain;
}

/* The angles of the first moment of a tile, computed directly. The number of tiles depends on the
 * shape alone, and so does where the rotations start. These are the only transcendental functions
 * of the task: pow, two cosines and two sines for each pair and tile, however many moments the tile
 * has. */
static void start(const ms_rotary_args *args, const angles *a, int64_t time)
{
    for (int64_t k = 0; k < args->width / 2; k++) {
        double step = frequency(args, k), angle = (double)(args->first + time) * step;
        a->cosine[k] = cos(angle);
        a->sine[k] = sin(angle);
        a->step_cosine[k] = cos(step);
        a->step_sine[k] = sin(step);
    }
}

/* Rounds the current moment's values to f32 and rotates to the next moment. It keeps the rotation
 * of the same pair in f64; only what the kernel reads is rounded. */
static void advance(const angles *a, int64_t half)
{
    for (int64_t k = 0; k < half; k++) {
        double c = a->cosine[k], s = a->sine[k];
        a->cosine_f32[k] = (float)c;
        a->sine_f32[k] = (float)s;
        a->cosine[k] = c * a->step_cosine[k] - s * a->step_sine[k];
        a->sine[k] = s * a->step_cosine[k] + c * a->step_sine[k];
    }
}

/* Offsets are in elements and the address is in bytes: x and y share one dtype, but each has its
 * own strides. */
static const void *element(const ms_heads *h, int64_t at, uint8_t dtype)
{
    return (const char *)h->data + (size_t)at * ms_dtype_bytes((ms_dtype)dtype);
}

/* The angles of a moment are computed once and used for all batches and heads. The moment is the
 * outer loop, so cosines and sines stay in the first-level cache while all heads of that moment are
 * turned. The kernel is bound by memory: each element is read and written once. */
static void tile(void *context, uint32_t index, ms_thread *thread)
{
    job *j = context;
    const ms_rotary_args *args = j->args;
    int64_t half = args->width / 2, begin = args->times * index / j->tiles,
            end = args->times * (index + 1) / j->tiles;
    double *scratch = ms_thread_scratch(thread, 0, (size_t)half * 4 * sizeof(double));
    float *narrow = ms_thread_scratch(thread, 1, (size_t)half * 2 * sizeof(float));
    if (scratch == NULL || narrow == NULL) {
        atomic_store(&j->no_memory, true);
        return;
    }
    angles a = { scratch, scratch + half, scratch + 2 * half, scratch + 3 * half,
                 narrow,  narrow + half };
    start(args, &a, begin);
    for (int64_t time = begin; time < end; time++) {
        /* After the call cosine_f32 and sine_f32 are those of `time`, and the f64 values are
         * already those of the moment after it. */
        advance(&a, half);
        for (int64_t batch = 0; batch < args->batches; batch++)
            for (int64_t head = 0; head < args->heads; head++) {
                int64_t from = batch * args->x.batch + head * args->x.head + time * args->x.time;
                int64_t to = batch * args->y.batch + head * args->y.head + time * args->y.time;
                char *y = (char *)args->y.data + (size_t)to * ms_dtype_bytes((ms_dtype)args->dtype);
                j->kernels->rotate((ms_dtype)args->dtype, element(&args->x, from, args->dtype), y,
                                   a.cosine_f32, a.sine_f32, args->width, args->back);
            }
    }
}

/* A tile has at least 32768 elements, and there are at most 8 tiles: each of them starts with pow,
 * cos and sin in f64 for every pair, which must stay little work next to the rotations. The number
 * of tiles shows in the last bit of a result, since each tile starts its rotations again; it must
 * depend on the shape only. */
static ms_task_result rotary_run(ms_run *run, void *arguments)
{
    const ms_rotary_args *args = arguments;
    int64_t tiles = args->batches * args->heads * args->times * args->width / 32768,
            most = args->times < 8 ? args->times : 8;
    if (tiles > most) tiles = most;
    else if (tiles < 1) tiles = 1;
    job j = { .args = args,
              .kernels = ms_attention_kernels_for(ms_run_isa(run)),
              .tiles = (uint32_t)tiles };
    ms_run_tiles(run, j.tiles, tile, &j);
    if (!atomic_load(&j.no_memory)) return MS_TASK_DONE;
    ms_run_fail(run, MS_ERROR_MEMORY, "rotary: no memory for the angles of width %lld",
                (long long)args->width);
    return MS_TASK_FAILED;
}

const ms_task ms_cpu_rotary = { .name = "rotary",
                                .function = rotary_run,
                                .args_bytes = sizeof(ms_rotary_args),
                                .kind = MS_KIND_COMPUTE };
