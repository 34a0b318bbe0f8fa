/* convolution.c: launches the convolution kernels. */
#include "ops/cuda/convolution.h"

#include "ops/cuda/kernels.h"

MS_CUDA_IMAGE(convolution)
MS_CUDA_KERNEL(convolution, convolution_forward)
MS_CUDA_KERNEL(convolution, convolution_data)
MS_CUDA_KERNEL(convolution, convolution_weight)
MS_CUDA_KERNEL(convolution, convolution_join)
MS_CUDA_KERNEL(convolution, convolution_bias)

/* Sums of a weight's gradient are cut into parts where there are fewer tiles than this; a part is
 * at least so long, and all partial sums have at most so many numbers. */
enum { TILES_WANTED = 256, PART_LEAST = 512, PARTIAL_MOST = 1 << 24 };

static int64_t quotient(int64_t n, int64_t by) { return (n + by - 1) / by; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static ms_cuda_convolution_call call_of(const ms_convolution_args *args, int64_t rows,
                                        int64_t columns, int64_t depth)
{
    return (ms_cuda_convolution_call){
        .x = args->x,
        .weight = args->weight,
        .g = args->g,
        .bias = args->bias,
        .out = args->out,
        .dbias = args->dbias,
        .window = args->window,
        .images = args->images,
        .groups = args->groups,
        .channels = args->channels,
        .results = args->results,
        .rows = rows,
        .columns = columns,
        .depth = depth,
        .row_tiles = quotient(rows, MS_CUDA_CONVOLUTION_TILE),
        .column_tiles = quotient(columns, MS_CUDA_CONVOLUTION_TILE),
        .parts = 1,
        .part = depth,
        .in_dtype = args->in_dtype,
        .out_dtype = args->out_dtype,
        .dbias_dtype = args->dbias_dtype,
    };
}

static void launch_tiles(ms_cuda_work *work, const ms_cuda_kernel *kernel,
                         const ms_cuda_convolution_call *call)
{
    int64_t blocks = call->groups * call->row_tiles * call->column_tiles * call->parts;
    if (blocks > INT32_MAX) {
        ms_cuda_work_fail(work, MS_ERROR_UNSUPPORTED, "conv2d: %lld tiles are too many",
                          (long long)blocks);
        return;
    }
    ms_cuda_launch(
        work, kernel,
        (ms_cuda_shape){ .blocks = { (uint32_t)blocks }, .threads = { MS_CUDA_THREADS } }, call,
        sizeof *call);
}

static void run_forward(ms_cuda_work *work, const void *arguments)
{
    const ms_convolution_args *args = arguments;
    ms_cuda_convolution_call call =
        call_of(args, args->results, args->images * ms_window_places(&args->window),
                args->channels * ms_window_elements(&args->window));
    launch_tiles(work, &convolution_forward, &call);
}

static void run_data(ms_cuda_work *work, const void *arguments)
{
    const ms_convolution_args *args = arguments;
    ms_cuda_convolution_call call =
        call_of(args, args->channels, args->images * args->window.in[0] * args->window.in[1],
                args->results * ms_window_elements(&args->window));
    launch_tiles(work, &convolution_data, &call);
}

/* The gradient of the weight: few tiles, whose sums are long. */
static void make_weight(ms_cuda_work *work, const ms_convolution_args *args)
{
    ms_cuda_convolution_call call =
        call_of(args, args->results, args->channels * ms_window_elements(&args->window),
                args->images * ms_window_places(&args->window));
    int64_t tiles = call.groups * call.row_tiles * call.column_tiles,
            size = call.groups * call.rows * call.columns;
    int64_t parts = least(TILES_WANTED / most(tiles, 1), call.depth / PART_LEAST);
    call.parts = most(least(parts, PARTIAL_MOST / most(size, 1)), 1);
    call.part = quotient(call.depth, call.parts);
    if (call.parts > 1) {
        call.partial = ms_cuda_scratch(work, (size_t)(call.parts * size) * sizeof(float));
        if (call.partial == NULL) return;
    }
    launch_tiles(work, &convolution_weight, &call);
    if (call.parts > 1)
        ms_cuda_launch(work, &convolution_join, ms_cuda_grid(size, 1), &call, sizeof call);
}

static void run_weight(ms_cuda_work *work, const void *arguments)
{
    const ms_convolution_args *args = arguments;
    if (args->out != NULL) make_weight(work, args);
    if (args->dbias == NULL) return;
    ms_cuda_convolution_call call = call_of(args, 0, 0, 0);
    ms_cuda_launch(work, &convolution_bias,
                   (ms_cuda_shape){ .blocks = { (uint32_t)(args->groups * args->results) },
                                    .threads = { MS_CUDA_THREADS } },
                   &call, sizeof call);
}

MS_CUDA_TASK(conv2d, "conv2d", ms_convolution_args, MS_KIND_COMPUTE, run_forward)
MS_CUDA_TASK(conv2d_data, "conv2d input gradient", ms_convolution_args, MS_KIND_COMPUTE, run_data)
MS_CUDA_TASK(conv2d_weight, "conv2d weight gradient", ms_convolution_args, MS_KIND_COMPUTE,
             run_weight)
