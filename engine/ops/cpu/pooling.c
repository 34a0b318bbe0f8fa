/* pooling.c: pooling on the CPU, plane by plane.
 *
 * A row of the output is computed at once: for each element of the window a pass over the places
 * whose element is in the input. Elements of one window are met in row-major order, so the first of
 * equal ones wins, and sums have a fixed order. Planes are independent: results do not depend on
 * how they are divided. */
#include "ops/pooling.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "moonshard/cpu_task.h"
#include "ops/cpu/convert.h"

/* What the tiles of a task share. Sizes are elements of a plane of `in` and `out`. */
typedef struct job {
    const ms_pool_args *args;
    const ms_convert_kernels *convert;
    /* One plane, in f32; line: scratch for a row of positions. */
    void (*plane)(const struct job *j, int64_t plane, const float *in, float *out, int32_t *line);
    int64_t in_size, out_size;
    uint32_t tiles;
    atomic_bool failed;
} job;

/* The places of a row whose window element `offset` (kernel column minus padding) is in the input,
 * and the input column of the first one. */
typedef struct reach {
    int64_t begin, end, column;
} reach;

static reach reach_of(const ms_window *w, int64_t offset)
{
    int64_t stride = w->stride[1], inside = w->in[1] - offset;
    reach r = { .begin = offset < 0 ? (-offset + stride - 1) / stride : 0,
                .end = inside > 0 ? (inside + stride - 1) / stride : 0 };
    if (r.end > w->out[1]) r.end = w->out[1];
    r.column = r.begin * stride + offset;
    return r;
}

/* The input rows *begin .. *end - 1 that the windows of output row `row` cover. */
static void rows_of(const ms_window *w, int64_t row, int64_t *begin, int64_t *end)
{
    int64_t first = row * w->stride[0] - w->padding[0], last = first + w->kernel[0];
    *begin = first > 0 ? first : 0;
    *end = last < w->in[0] ? last : w->in[0];
}

/* ------------------------------------------------------------------ maximum */

/* NaN wins over everything, as in PyTorch. -1 marks a place that has met no element yet: a window
 * may hold nothing above -infinity. */
static void take_greater(const float *from, int64_t position, int64_t stride, int64_t count,
                         float *best, int32_t *at)
{
    for (int64_t i = 0; i < count; i++) {
        float value = from[i * stride];
        bool wins = (value > best[i]) | (value != value) | (at[i] < 0);
        best[i] = wins ? value : best[i];
        at[i] = wins ? (int32_t)(position + i * stride) : at[i];
    }
}

static void max_plane(const job *j, int64_t plane, const float *in, float *out, int32_t *line)
{
    const ms_window *w = &j->args->window;
    int32_t *kept = j->args->index;
    for (int64_t row = 0; row < w->out[0]; row++, out += w->out[1]) {
        int32_t *at = kept != NULL ? kept + plane * j->out_size + row * w->out[1] : line;
        int64_t begin, end;
        for (int64_t i = 0; i < w->out[1]; i++) {
            out[i] = -INFINITY;
            at[i] = -1;
        }
        rows_of(w, row, &begin, &end);
        for (int64_t y = begin; y < end; y++)
            for (int64_t k = 0; k < w->kernel[1]; k++) {
                reach r = reach_of(w, k - w->padding[1]);
                int64_t first = y * w->in[1] + r.column;
                if (r.begin < r.end)
                    take_greater(in + first, first, w->stride[1], r.end - r.begin, out + r.begin,
                                 at + r.begin);
            }
    }
}

static void max_back(const job *j, int64_t plane, const float *g, float *out, int32_t *line)
{
    (void)line;
    const int32_t *index = j->args->index + plane * j->in_size;
    memset(out, 0, (size_t)j->out_size * sizeof *out);
    for (int64_t i = 0; i < j->in_size; i++) out[index[i]] += g[i];
}

/* ------------------------------------------------------------------ average */

/* What the sum of a place is divided by. */
static float divisor_of(const job *j, int64_t rows, int64_t place)
{
    const ms_window *w = &j->args->window;
    if (!j->args->skip_padding) return (float)ms_window_elements(w);
    int64_t first = place * w->stride[1] - w->padding[1], last = first + w->kernel[1];
    int64_t columns = (last < w->in[1] ? last : w->in[1]) - (first > 0 ? first : 0);
    return (float)(rows * columns);
}

static void avg_plane(const job *j, int64_t plane, const float *in, float *out, int32_t *line)
{
    (void)plane, (void)line;
    const ms_window *w = &j->args->window;
    for (int64_t row = 0; row < w->out[0]; row++, out += w->out[1]) {
        int64_t begin, end;
        memset(out, 0, (size_t)w->out[1] * sizeof *out);
        rows_of(w, row, &begin, &end);
        for (int64_t y = begin; y < end; y++)
            for (int64_t k = 0; k < w->kernel[1]; k++) {
                reach r = reach_of(w, k - w->padding[1]);
                const float *from = in + y * w->in[1] + r.column;
                for (int64_t i = r.begin; i < r.end; i++, from += w->stride[1]) out[i] += *from;
            }
        for (int64_t i = 0; i < w->out[1]; i++) out[i] /= divisor_of(j, end - begin, i);
    }
}

static void avg_back(const job *j, int64_t plane, const float *g, float *out, int32_t *line)
{
    (void)plane, (void)line;
    const ms_window *w = &j->args->window;
    memset(out, 0, (size_t)j->out_size * sizeof *out);
    for (int64_t row = 0; row < w->out[0]; row++, g += w->out[1]) {
        int64_t begin, end;
        rows_of(w, row, &begin, &end);
        for (int64_t i = 0; i < w->out[1]; i++) {
            float share = g[i] / divisor_of(j, end - begin, i);
            int64_t first = i * w->stride[1] - w->padding[1], last = first + w->kernel[1];
            if (first < 0) first = 0;
            if (last > w->in[1]) last = w->in[1];
            for (int64_t y = begin; y < end; y++)
                for (int64_t x = first; x < last; x++) out[y * w->in[1] + x] += share;
        }
    }
}

/* -------------------------------------------------------------------- tasks */

/* Planes of f32 are read and written in place, others through scratch. */
static void tile(void *context, uint32_t index, ms_thread *thread)
{
    job *j = context;
    const ms_pool_args *args = j->args;
    ms_dtype dtype = (ms_dtype)args->dtype;
    size_t item = ms_dtype_bytes(dtype);
    bool wide = dtype == MS_F32;
    int64_t kept = wide ? 0 : j->in_size + j->out_size;
    float *scratch =
        ms_thread_scratch(thread, 0, (size_t)(kept + args->window.out[1]) * sizeof(float));
    if (scratch == NULL) {
        atomic_store(&j->failed, true);
        return;
    }
    int32_t *line = (int32_t *)(void *)(scratch + kept);
    for (int64_t p = args->planes * index / j->tiles; p < args->planes * (index + 1) / j->tiles;
         p++) {
        const char *in = (const char *)args->in + (size_t)(p * j->in_size) * item;
        char *out = (char *)args->out + (size_t)(p * j->out_size) * item;
        if (wide) {
            j->plane(j, p, (const float *)(const void *)in, (float *)(void *)out, line);
            continue;
        }
        j->convert->to_f32[dtype](scratch, in, (size_t)j->in_size);
        j->plane(j, p, scratch, scratch + j->in_size, line);
        j->convert->from_f32[dtype](out, scratch + j->in_size, (size_t)j->out_size);
    }
}

/* Tiles of at least 32768 elements of windows: below that waking a helper costs more than it
 * saves. */
static ms_task_result run_planes(ms_run *run, job *j)
{
    const ms_window *w = &j->args->window;
    int64_t tiles = j->args->planes * ms_window_places(w) * ms_window_elements(w) / 32768;
    if (tiles > 16) tiles = 16;
    if (tiles > j->args->planes) tiles = j->args->planes;
    j->tiles = (uint32_t)(tiles < 1 ? 1 : tiles);
    j->convert = ms_convert_kernels_for(ms_run_isa(run));
    ms_run_tiles(run, j->tiles, tile, j);
    if (!atomic_load(&j->failed)) return MS_TASK_DONE;
    ms_run_fail(run, MS_ERROR_MEMORY, "pooling: no memory for planes of %lld x %lld",
                (long long)w->in[0], (long long)w->in[1]);
    return MS_TASK_FAILED;
}

static int64_t input_size(const ms_pool_args *args)
{
    return args->window.in[0] * args->window.in[1];
}

/* From planes of x to planes of y. */
static ms_task_result forward(ms_run *run, const ms_pool_args *args,
                              void (*plane)(const job *, int64_t, const float *, float *,
                                            int32_t *))
{
    job j = { .args = args,
              .plane = plane,
              .in_size = input_size(args),
              .out_size = ms_window_places(&args->window) };
    return run_planes(run, &j);
}

/* From planes of g to planes of dx. */
static ms_task_result backward(ms_run *run, const ms_pool_args *args,
                               void (*plane)(const job *, int64_t, const float *, float *,
                                             int32_t *))
{
    job j = { .args = args,
              .plane = plane,
              .in_size = ms_window_places(&args->window),
              .out_size = input_size(args) };
    return run_planes(run, &j);
}

static ms_task_result max_run(ms_run *run, void *args) { return forward(run, args, max_plane); }
static ms_task_result avg_run(ms_run *run, void *args) { return forward(run, args, avg_plane); }
static ms_task_result max_back_run(ms_run *run, void *args)
{
    return backward(run, args, max_back);
}
static ms_task_result avg_back_run(ms_run *run, void *args)
{
    return backward(run, args, avg_back);
}

const ms_task ms_cpu_max_pool2d = { .name = "max_pool2d",
                                    .function = max_run,
                                    .args_bytes = sizeof(ms_pool_args),
                                    .kind = MS_KIND_COMPUTE };
const ms_task ms_cpu_max_pool2d_backward = { .name = "max_pool2d gradient",
                                             .function = max_back_run,
                                             .args_bytes = sizeof(ms_pool_args),
                                             .kind = MS_KIND_COMPUTE };
const ms_task ms_cpu_avg_pool2d = { .name = "avg_pool2d",
                                    .function = avg_run,
                                    .args_bytes = sizeof(ms_pool_args),
                                    .kind = MS_KIND_COMPUTE };
const ms_task ms_cpu_avg_pool2d_backward = { .name = "avg_pool2d gradient",
                                             .function = avg_back_run,
                                             .args_bytes = sizeof(ms_pool_args),
                                             .kind = MS_KIND_COMPUTE };
