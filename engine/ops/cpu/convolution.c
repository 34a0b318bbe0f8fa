/* convolution.c: convolutions on the CPU: products with the windows of a block of places.
 *
 * A block of the output's places is unfolded into columns that fit into a cache (unfold.h), and
 * multiplied by gemm.h's products:
 *
 *   y block        = weight [results, k] * columns [k, places]
 *   columns of dx  = weight^T * g block, added to the padded planes of dx
 *   dweight       += g block * columns^T
 *
 * with k = channels * kernel of one group. A kernel of another device adds in f32 and rounds once.
 *
 * oneDNN has convolutions of its own, for layouts in which channels are in blocks. With the copies
 * to and from these they are 1.1 to 1.4 times as fast with 64 channels and more, and 1.7 times with
 * few (f32, a core of an EPYC): not enough for a second path, which would give other bits.
 *
 * Whatever the dtype of the operands, products give f32. Operands that the library does not
 * multiply in their dtype are converted to f32 where they are unfolded. A tile of y and dx computes
 * its elements alone; dweight is the sum of partial sums over ranges of blocks, whose number
 * depends on shapes only. */
#include "ops/cpu/convolution.h"

#include <stdatomic.h>
#include <string.h>

#include "ops/cpu/unfold.h"

/* Floats of columns: half a MiB, which fits into the second cache of most processors; and places
 * below which products get slow. */
enum { COLUMN_FLOATS = 1 << 17, BLOCK_LEAST = 128 };
/* Partial sums of dweight: their number, and the floats that they may take together. */
enum { PARTIALS_MOST = 8, PARTIAL_FLOATS = 1 << 24 };
/* Floats of partial sums from which several threads add them up. */
enum { COMBINE_LEAST = 1 << 17 };

/* What the tiles of a task share. Only `failed` is written by several of them. */
typedef struct job {
    const ms_convolution_args *args;
    const ms_convert_kernels *convert;
    bool widen; /* operands are converted to f32 */
    ms_dtype inner;
    int64_t k, places, blocks, parts, items;
    uint32_t tiles;
    float *partial; /* of conv2d_weight: [groups][tiles][results, k], then sums for the bias */
    double *sums;   /* [groups][tiles][results] */
    atomic_bool failed;
} job;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t quotient(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Elements of a weight's row: one group's channels times the window. */
static int64_t depth_of(const ms_convolution_args *args)
{
    return args->channels * ms_window_elements(&args->window);
}

/* -------------------------------------------------------------------- plans */

/* The product of a block of `places` places; of conv2d_data with `channels` channels. `widen`:
 * operands that were converted are side by side. */
static ms_gemm_shape shape_of(const ms_convolution_args *args, int64_t channels, int64_t places,
                              bool widen)
{
    int64_t k = depth_of(args), all = ms_window_places(&args->window);
    int64_t part = channels * ms_window_elements(&args->window);
    ms_gemm_shape s = { .in = widen ? MS_F32 : args->in_dtype, .out = MS_F32 };
    if (args->kind == MS_KERNEL_conv2d) {
        s.m = args->results;
        s.n = places;
        s.k = k;
        s.a_row = k;
        s.b_row = places;
        s.c_row = args->out_dtype == MS_F32 ? all : places;
        s.accumulate = args->bias != NULL;
    } else if (args->kind == MS_KERNEL_conv2d_data) {
        s.m = part;
        s.n = places;
        s.k = args->results;
        s.a_transposed = true;
        s.a_row = widen ? part : k;
        s.b_row = widen ? places : all;
        s.c_row = places;
    } else {
        s.m = args->results;
        s.n = k;
        s.k = places;
        s.a_row = widen ? places : all;
        s.b_row = places;
        s.b_transposed = true;
        s.c_row = k;
        s.accumulate = true;
    }
    return s;
}

/* The size of the last of several parts. */
static int64_t last_of(int64_t whole, int64_t part) { return whole - (whole - 1) / part * part; }

/* Blocks of equal size as far as they go, multiples of 16. Few images are cut along the channels of
 * dx, so that there are parts for several threads. Plans are made for the four combinations of
 * usual and last sizes. */
ms_status ms_cpu_plan_convolution(ms_engine *engine, ms_convolution_args *args)
{
    ms_gemm *gemm = NULL;
    ms_status status = ms_gemm_get(engine, &gemm);
    if (status) return status;
    int64_t all = ms_window_places(&args->window), most = COLUMN_FLOATS / depth_of(args);
    if (most < BLOCK_LEAST) most = BLOCK_LEAST;
    args->library = gemm;
    args->block = least(all, quotient(quotient(all, quotient(all, most)), 16) * 16);
    int64_t images = args->images * args->groups;
    args->part = images > 0 && images < 16
                     ? quotient(args->channels, least(args->channels, quotient(16, images)))
                     : args->channels;
    bool widen = !ms_gemm_supports(gemm, args->in_dtype, MS_F32);
    for (int i = 0; i < 4 && !status; i++) {
        const ms_gemm_plan *plan = NULL;
        ms_gemm_shape shape =
            shape_of(args, i & 2 ? last_of(args->channels, args->part) : args->part,
                     i & 1 ? last_of(all, args->block) : args->block, widen);
        status = ms_gemm_prepare(engine, gemm, &shape, &plan);
        args->plans[i >> 1][i & 1] = plan;
    }
    return status;
}

/* ------------------------------------------------------------------- blocks */

/* One block of places of one group of one image, and one part of its channels. */
typedef struct block {
    int64_t image, group, begin, end; /* places */
    int64_t first_channel, channels;
} block;

/* Scratch of a tile. */
typedef struct room {
    char *at;
} room;

static void *take(room *r, size_t bytes)
{
    void *taken = r->at;
    r->at += (bytes + 63) / 64 * 64;
    return taken;
}

static bool multiply(const job *j, const block *b, ms_thread *thread, const void *left,
                     const void *right, float *out)
{
    const ms_convolution_args *args = j->args;
    ms_gemm_shape shape = shape_of(args, b->channels, b->end - b->begin, j->widen);
    const ms_gemm_plan *plan =
        args->plans[b->channels != args->part][b->end - b->begin != args->block];
    return ms_gemm_run(plan, &shape, thread, left, right, NULL, out);
}

/* Rows [rows, columns] of f32 side by side, from rows `distance` elements apart. */
static void widen_rows(const job *j, const void *from, int64_t distance, int64_t rows,
                       int64_t columns, float *to)
{
    ms_dtype dtype = (ms_dtype)j->args->in_dtype;
    size_t step = (size_t)distance * ms_dtype_bytes(dtype);
    for (int64_t i = 0; i < rows; i++)
        j->convert->to_f32[dtype](to + i * columns, (const char *)from + (size_t)i * step,
                                  (size_t)columns);
}

/* The columns of a block, in scratch that `r` gives. */
static void *unfolded(const job *j, const block *b, room *r)
{
    const ms_convolution_args *args = j->args;
    const ms_window *w = &args->window;
    ms_dtype dtype = (ms_dtype)args->in_dtype;
    ms_unfold u = ms_unfold_of(w, args->channels, ms_dtype_bytes(j->inner));
    int64_t first = b->begin / w->out[1], last = (b->end - 1) / w->out[1];
    int64_t rows = ms_unfold_rows(w, last - first + 1);
    int64_t plane = (b->image * args->groups + b->group) * args->channels;
    const char *x =
        (const char *)args->x + (size_t)(plane * w->in[0] * w->in[1]) * ms_dtype_bytes(dtype);
    float *line = take(r, (size_t)w->in[1] * sizeof(float));
    void *padded = take(r, (size_t)(args->channels * rows * u.row) * u.item + MS_UNFOLD_MARGIN);
    void *columns = take(r, (size_t)(j->k * (b->end - b->begin)) * u.item + MS_UNFOLD_MARGIN);
    ms_unfold_pad(&u, j->widen ? j->convert : NULL, dtype, x, first * w->stride[0], rows, line,
                  padded);
    ms_unfold_gather(&u, padded, rows, b->begin, b->end, columns);
    return columns;
}

/* Bytes that `unfolded` takes for the largest block. */
static size_t unfolded_bytes(const job *j)
{
    const ms_window *w = &j->args->window;
    ms_unfold u = ms_unfold_of(w, j->args->channels, ms_dtype_bytes(j->inner));
    int64_t output_rows = least(w->out[0], j->args->block / w->out[1] + 2);
    size_t padded = (size_t)(j->args->channels * ms_unfold_rows(w, output_rows) * u.row) * u.item;
    return padded + (size_t)(j->k * j->args->block) * u.item + (size_t)w->in[1] * sizeof(float)
           + 2 * MS_UNFOLD_MARGIN + 3 * 64;
}

/* ------------------------------------------------------------------ forward */

/* The result of a block begins as the bias, to which the product is added. f32 is written in place,
 * other dtypes are rounded from scratch. */
static bool forward_block(const job *j, const block *b, ms_thread *thread)
{
    const ms_convolution_args *args = j->args;
    int64_t results = args->results, places = b->end - b->begin;
    bool direct = args->out_dtype == MS_F32;
    size_t item = ms_dtype_bytes((ms_dtype)args->in_dtype);
    size_t weight_bytes = j->widen ? (size_t)(results * j->k) * sizeof(float) + 64 : 0;
    size_t out_bytes = direct ? 0 : (size_t)(results * places) * sizeof(float) + 64;
    room r = { ms_thread_scratch(thread, 0, unfolded_bytes(j) + weight_bytes + out_bytes) };
    if (r.at == NULL) return false;
    const void *columns = unfolded(j, b, &r);
    const void *weight = (const char *)args->weight + (size_t)(b->group * results * j->k) * item;
    if (j->widen) {
        float *wide = take(&r, weight_bytes - 64);
        widen_rows(j, weight, j->k, results, j->k, wide);
        weight = wide;
    }
    int64_t row = (b->image * args->groups + b->group) * results,
            step = direct ? j->places : places;
    float *out =
        direct ? (float *)args->out + row * j->places + b->begin : take(&r, out_bytes - 64);
    for (int64_t o = 0; o < results && args->bias != NULL; o++)
        for (int64_t i = 0; i < places; i++) out[o * step + i] = args->bias[b->group * results + o];
    if (!multiply(j, b, thread, weight, columns, out)) return false;
    ms_dtype dtype = (ms_dtype)args->out_dtype;
    for (int64_t o = 0; o < results && !direct; o++)
        j->convert->from_f32[dtype](
            (char *)args->out + (size_t)((row + o) * j->places + b->begin) * ms_dtype_bytes(dtype),
            out + o * places, (size_t)places);
    return true;
}

static void set_places(const job *j, int64_t index, block *b)
{
    b->begin = index * j->args->block;
    b->end = least(b->begin + j->args->block, j->places);
}

static void forward_tile(void *context, uint32_t tile, ms_thread *thread)
{
    job *j = context;
    for (int64_t i = j->items * tile / j->tiles; i < j->items * (tile + 1) / j->tiles; i++) {
        int64_t plane = i / j->blocks;
        block b = { .image = plane / j->args->groups,
                    .group = plane % j->args->groups,
                    .channels = j->args->part };
        set_places(j, i % j->blocks, &b);
        if (!forward_block(j, &b, thread)) atomic_store(&j->failed, true);
    }
}

/* --------------------------------------------------------- gradient of input */

/* Scratch of conv2d_data. */
typedef struct data_room {
    float *padded, *columns, *line, *weight, *g;
} data_room;

static bool data_room_of(const job *j, const ms_unfold *u, ms_thread *thread, data_room *out)
{
    const ms_convolution_args *args = j->args;
    int64_t k = u->channels * ms_window_elements(&args->window);
    int64_t sizes[] = { u->channels * ms_unfold_all_rows(&args->window) * u->row, k * args->block,
                        args->window.in[1], j->widen ? args->results * k : 0,
                        j->widen ? args->results * args->block : 0 };
    float **places[] = { &out->padded, &out->columns, &out->line, &out->weight, &out->g };
    size_t bytes = 0;
    for (int i = 0; i < 5; i++) bytes += (size_t)sizes[i] * sizeof(float) + 64;
    room r = { ms_thread_scratch(thread, 0, bytes) };
    if (r.at == NULL) return false;
    for (int i = 0; i < 5; i++) *places[i] = take(&r, (size_t)sizes[i] * sizeof(float));
    memset(out->padded, 0, (size_t)sizes[0] * sizeof(float));
    return true;
}

/* The gradient of some channels of one group of one image: all blocks, one after the other. */
static bool data_item(const job *j, block *b, ms_thread *thread)
{
    const ms_convolution_args *args = j->args;
    const ms_window *w = &args->window;
    ms_unfold u = ms_unfold_of(w, b->channels, sizeof(float));
    data_room r;
    if (!data_room_of(j, &u, thread, &r)) return false;
    size_t item = ms_dtype_bytes((ms_dtype)args->in_dtype);
    int64_t kernel = ms_window_elements(w), part = b->channels * kernel;
    const char *weight =
        (const char *)args->weight
        + (size_t)(b->group * args->results * j->k + b->first_channel * kernel) * item;
    if (j->widen) widen_rows(j, weight, j->k, args->results, part, r.weight);
    int64_t plane = b->image * args->groups + b->group;
    const char *g = (const char *)args->g + (size_t)(plane * args->results * j->places) * item;
    for (int64_t i = 0; i < j->blocks; i++) {
        set_places(j, i, b);
        const char *now = g + (size_t)b->begin * item;
        if (j->widen) widen_rows(j, now, j->places, args->results, b->end - b->begin, r.g);
        if (!multiply(j, b, thread, j->widen ? (const void *)r.weight : weight,
                      j->widen ? (const void *)r.g : now, r.columns))
            return false;
        ms_unfold_scatter(&u, r.columns, b->begin, b->end, r.padded);
    }
    int64_t channel = plane * args->channels + b->first_channel;
    ms_dtype dtype = (ms_dtype)args->out_dtype;
    ms_unfold_crop(&u, j->convert, r.padded, r.line, dtype,
                   (char *)args->out
                       + (size_t)(channel * w->in[0] * w->in[1]) * ms_dtype_bytes(dtype));
    return true;
}

static void data_tile(void *context, uint32_t tile, ms_thread *thread)
{
    job *j = context;
    for (int64_t i = j->items * tile / j->tiles; i < j->items * (tile + 1) / j->tiles; i++) {
        int64_t plane = i / j->parts;
        block b = { .image = plane / j->args->groups,
                    .group = plane % j->args->groups,
                    .first_channel = i % j->parts * j->args->part };
        b.channels = least(j->args->part, j->args->channels - b.first_channel);
        if (!data_item(j, &b, thread)) atomic_store(&j->failed, true);
    }
}

/* -------------------------------------------------------- gradient of weight */

/* A sum of n numbers: 16 sums side by side in f32 for 512 numbers, then f64. */
static double sum_of(const float *x, int64_t n)
{
    double total = 0;
    for (int64_t begin = 0; begin < n; begin += 512) {
        int64_t end = least(begin + 512, n), i = begin;
        float sums[16] = { 0 };
        for (; i + 16 <= end; i += 16)
            for (int k = 0; k < 16; k++) sums[k] += x[i + k];
        for (; i < end; i++) sums[0] += x[i];
        for (int k = 0; k < 16; k++) total += (double)sums[k];
    }
    return total;
}

/* Adds one block to a tile's sums. */
static bool weight_block(const job *j, const block *b, ms_thread *thread, float *partial,
                         double *sums)
{
    const ms_convolution_args *args = j->args;
    ms_dtype dtype = (ms_dtype)args->in_dtype;
    int64_t results = args->results, places = b->end - b->begin;
    size_t g_bytes = (size_t)(results * args->block) * sizeof(float);
    room r = { ms_thread_scratch(thread, 0, unfolded_bytes(j) + g_bytes + 64) };
    if (r.at == NULL) return false;
    int64_t row = (b->image * args->groups + b->group) * results;
    const char *g =
        (const char *)args->g + (size_t)(row * j->places + b->begin) * ms_dtype_bytes(dtype);
    float *wide = take(&r, g_bytes);
    /* The sums for the bias need f32, also where the product does not. */
    bool convert = j->widen || (args->dbias != NULL && dtype != MS_F32);
    if (convert) widen_rows(j, g, j->places, results, places, wide);
    const float *rows = convert ? wide : (const float *)(const void *)g;
    for (int64_t o = 0; o < results && args->dbias != NULL; o++)
        sums[o] += sum_of(rows + o * (convert ? places : j->places), places);
    if (args->out == NULL) return true;
    const void *columns = unfolded(j, b, &r);
    return multiply(j, b, thread, j->widen ? (const void *)wide : g, columns, partial);
}

/* A tile is a range of blocks of all images, of one group. */
static void weight_tile(void *context, uint32_t tile, ms_thread *thread)
{
    job *j = context;
    const ms_convolution_args *args = j->args;
    int64_t part = tile % j->tiles, size = args->results * j->k;
    float *partial = args->out != NULL ? j->partial + tile * size : NULL;
    double *sums = args->dbias != NULL ? j->sums + tile * args->results : NULL;
    if (partial != NULL) memset(partial, 0, (size_t)size * sizeof *partial);
    if (sums != NULL) memset(sums, 0, (size_t)args->results * sizeof *sums);
    for (int64_t i = j->items * part / j->tiles; i < j->items * (part + 1) / j->tiles; i++) {
        block b = { .image = i / j->blocks, .group = tile / j->tiles, .channels = args->part };
        set_places(j, i % j->blocks, &b);
        if (!weight_block(j, &b, thread, partial, sums)) atomic_store(&j->failed, true);
    }
}

/* Adds the tiles' sums of one output channel, in their order, and rounds once. */
static void combine_tile(void *context, uint32_t row, ms_thread *thread)
{
    (void)thread;
    job *j = context;
    const ms_convolution_args *args = j->args;
    int64_t group = row / args->results, o = row % args->results;
    ms_dtype dtype = (ms_dtype)args->out_dtype;
    if (args->out != NULL) {
        float *total = j->partial + (group * j->tiles * args->results + o) * j->k;
        for (uint32_t t = 1; t < j->tiles; t++) {
            const float *part = total + (int64_t)t * args->results * j->k;
            for (int64_t i = 0; i < j->k; i++) total[i] += part[i];
        }
        j->convert->from_f32[dtype](
            (char *)args->out + (size_t)(row * j->k) * ms_dtype_bytes(dtype), total, (size_t)j->k);
    }
    if (args->dbias == NULL) return;
    double sum = 0;
    for (uint32_t t = 0; t < j->tiles; t++)
        sum += j->sums[(group * j->tiles + t) * args->results + o];
    float rounded = (float)sum;
    dtype = (ms_dtype)args->dbias_dtype;
    j->convert->from_f32[dtype]((char *)args->dbias + row * ms_dtype_bytes(dtype), &rounded, 1);
}

/* -------------------------------------------------------------------- tasks */

static job job_of(ms_run *run, const ms_convolution_args *args)
{
    job j = { .args = args,
              .convert = ms_convert_kernels_for(ms_run_isa(run)),
              .k = depth_of(args),
              .places = ms_window_places(&args->window) };
    j.widen = !ms_gemm_supports(args->library, (ms_dtype)args->in_dtype, MS_F32);
    j.inner = j.widen ? MS_F32 : (ms_dtype)args->in_dtype;
    j.blocks = quotient(j.places, args->block);
    j.parts = quotient(args->channels, args->part);
    return j;
}

/* Tiles of about 50 microseconds or more: below that waking a helper costs more than it saves. */
static uint32_t tiles_for(const job *j, int64_t most)
{
    const ms_convolution_args *args = j->args;
    double flops = 2.0 * (double)(args->images * args->groups * args->results) * (double)j->places
                   * (double)j->k;
    int64_t tiles = flops < 16 * 4e6 ? (int64_t)(flops / 4e6) : 16;
    tiles = least(tiles, most);
    return (uint32_t)(tiles < 1 ? 1 : tiles);
}

static ms_task_result finish(ms_run *run, job *j)
{
    const ms_convolution_args *args = j->args;
    if (!atomic_load(&j->failed)) return MS_TASK_DONE;
    ms_run_fail(run, MS_ERROR_MEMORY,
                "conv2d: no memory for the scratch space of %lld channels of %lld x %lld",
                (long long)args->channels, (long long)args->window.in[0],
                (long long)args->window.in[1]);
    return MS_TASK_FAILED;
}

/* Each group of each image is `pieces` items, which do not depend on each other. */
static ms_task_result run_pieces(ms_run *run, job *j, int64_t pieces, ms_tile_function tile)
{
    j->items = j->args->images * j->args->groups * pieces;
    j->tiles = tiles_for(j, j->items);
    ms_run_tiles(run, j->tiles, tile, j);
    return finish(run, j);
}

static ms_task_result forward_run(ms_run *run, void *arguments)
{
    job j = job_of(run, arguments);
    return run_pieces(run, &j, j.blocks, forward_tile);
}

static ms_task_result data_run(ms_run *run, void *arguments)
{
    job j = job_of(run, arguments);
    return run_pieces(run, &j, j.parts, data_tile);
}

/* The number of tiles decides the order of additions: it follows from the shape, and is kept small
 * where the weight is large. */
static ms_task_result weight_run(ms_run *run, void *arguments)
{
    job j = job_of(run, arguments);
    const ms_convolution_args *args = j.args;
    ms_thread *thread = ms_run_thread(run);
    int64_t rows = args->groups * args->results, fit = PARTIAL_FLOATS / (rows * j.k);
    j.items = args->images * j.blocks;
    int64_t most = least(least(PARTIALS_MOST, fit < 2 ? 2 : fit), j.items < 1 ? 1 : j.items);
    j.tiles = tiles_for(&j, most);
    size_t tiles = (size_t)args->groups * j.tiles, sums = tiles * (size_t)args->results;
    if (args->out != NULL)
        j.partial = ms_thread_scratch(thread, 1, sums * (size_t)j.k * sizeof(float));
    if (args->dbias != NULL) j.sums = ms_thread_scratch(thread, 2, sums * sizeof(double));
    if ((args->out != NULL && j.partial == NULL) || (args->dbias != NULL && j.sums == NULL)) {
        atomic_store(&j.failed, true);
        return finish(run, &j);
    }
    ms_run_tiles(run, (uint32_t)tiles, weight_tile, &j);
    /* Small sums are added here: waking a helper takes longer. */
    if ((int64_t)j.tiles * rows * j.k >= COMBINE_LEAST)
        ms_run_tiles(run, (uint32_t)rows, combine_tile, &j);
    else
        for (int64_t row = 0; row < rows; row++) combine_tile(&j, (uint32_t)row, thread);
    return finish(run, &j);
}

const ms_task ms_cpu_conv2d = { .name = "conv2d",
                                .function = forward_run,
                                .args_bytes = sizeof(ms_convolution_args),
                                .kind = MS_KIND_COMPUTE };
const ms_task ms_cpu_conv2d_data = { .name = "conv2d input gradient",
                                     .function = data_run,
                                     .args_bytes = sizeof(ms_convolution_args),
                                     .kind = MS_KIND_COMPUTE };
const ms_task ms_cpu_conv2d_weight = { .name = "conv2d weight gradient",
                                       .function = weight_run,
                                       .args_bytes = sizeof(ms_convolution_args),
                                       .kind = MS_KIND_COMPUTE };
