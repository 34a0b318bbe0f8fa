/* softmax.c: softmax, cross entropy and squared error on the CPU: rows in tiles, sums of rows in
 * their order.
 *
 * A kernel of another device must subtract the maximum before the exponentials, add the losses of
 * rows in an order of their own that does not depend on timing, leave out rows with ignore_index,
 * and fail for a bad target. It writes log_sum and share where they are asked for, which backward
 * reads. */
#include "ops/cpu/softmax.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "ops/cpu/convert.h"

/* Tiles of at least 8192 elements (32 KiB of f32), at most 16: an exponential costs enough that so
 * few already pay for waking a helper. The number depends on the shape alone. The results do not
 * depend on the number: rows are independent, and losses are added in order afterwards. */
static uint32_t tiles_for(int64_t rows, int64_t width)
{
    int64_t tiles = rows * width / 8192;
    tiles = tiles > 16 ? 16 : tiles;
    if (tiles > rows) return (uint32_t)rows;
    return (uint32_t)(tiles < 1 ? 1 : tiles);
}

/* What the tiles of one task share. bad_row is the lowest row with a bad target, kept by compare
 * and exchange, so that the error does not depend on threads. `body` and `rows` belong to softmax,
 * `losses` and `bad_row` to cross entropy, which both use the struct. */
typedef struct job {
    const void *args;
    const ms_softmax_kernels *kernels;
    const ms_convert_kernels *convert;
    uint32_t tiles;
    float *losses;           /* [rows] */
    _Atomic int64_t bad_row; /* the first whose target is no class; INT64_MAX: none */
    void (*body)(const struct job *job, int64_t begin, int64_t end);
    int64_t rows;
} job;

/* ------------------------------------------------------------------ softmax */

/* A tile of either direction: a range of outer positions. */
static void softmax_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    const job *j = context;
    j->body(j, j->rows * tile / j->tiles, j->rows * (tile + 1) / j->tiles);
}

/* The kernels of both directions have other arguments than a tile function, hence these two. */
static void softmax_forward_rows(const job *j, int64_t begin, int64_t end)
{
    j->kernels->forward(j->args, begin, end);
}
static void softmax_backward_rows(const job *j, int64_t begin, int64_t end)
{
    j->kernels->backward(j->args, begin, end);
}

/* Rows are independent, so a tile takes a range of outer positions, for every dimension of the
 * softmax. A softmax over the first dimension has a single outer position and runs on one
 * thread. */
static ms_task_result softmax_run(ms_run *run, const ms_softmax_args *args,
                                  void (*body)(const job *, int64_t, int64_t))
{
    job j = { .args = args,
              .kernels = ms_softmax_kernels_for(ms_run_isa(run)),
              .tiles = tiles_for(args->outer, args->n * args->inner),
              .body = body,
              .rows = args->outer };
    ms_run_tiles(run, j.tiles, softmax_tile, &j);
    return MS_TASK_DONE;
}

static ms_task_result forward_run(ms_run *run, void *arguments)
{
    return softmax_run(run, arguments, softmax_forward_rows);
}
static ms_task_result backward_run(ms_run *run, void *arguments)
{
    return softmax_run(run, arguments, softmax_backward_rows);
}

/* ------------------------------------------------------------ cross entropy */

/* The operator admits targets of i64, i32 and u16. */
static int64_t target_at(const ms_cross_entropy_args *args, int64_t row)
{
    if (args->target_dtype == MS_I64) return ((const int64_t *)args->target)[row];
    return args->target_dtype == MS_I32 ? ((const int32_t *)args->target)[row]
                                        : ((const uint16_t *)args->target)[row];
}

/* One logit as f32, exactly as the kernels widen it. The loss subtracts it from log_sum, in which
 * the same logit was one of the terms. */
static float logit_at(const ms_cross_entropy_args *args, const void *row, int64_t at)
{
    if (args->dtype == MS_F32) return ((const float *)row)[at];
    uint16_t half = ((const uint16_t *)row)[at];
    return args->dtype == MS_BF16 ? ms_float_from_bf16(half) : ms_float_from_f16(half);
}

/* Whether the row counts. A target that is no class is noted, the lowest such row. */
static bool counts(job *j, int64_t row)
{
    const ms_cross_entropy_args *args = j->args;
    int64_t target = target_at(args, row);
    if (target == args->ignore_index) return false;
    if (target >= 0 && target < args->classes) return true;
    int64_t first = atomic_load(&j->bad_row);
    while (row < first && !atomic_compare_exchange_weak(&j->bad_row, &first, row)) {}
    return false;
}

/* Whether a target was bad: then the task has failed. */
static bool fails(ms_run *run, job *j)
{
    const ms_cross_entropy_args *args = j->args;
    int64_t bad = atomic_load(&j->bad_row);
    if (bad == INT64_MAX) return false;
    ms_run_fail(run, MS_ERROR_ARGUMENT,
                "cross_entropy: the target of row %lld is %lld, but there are %lld classes, "
                "counted from 0 (and ignore_index is %lld)",
                (long long)bad, (long long)target_at(args, bad), (long long)args->classes,
                (long long)args->ignore_index);
    return true;
}

/* The gradient of a row that counts: (softmax - one at the target) * factor. The row is read before
 * it is written, so that `out` may be the logits. In f32 up to the end, also at the target: there
 * the two terms nearly cancel when the model is sure. */
static void write_slopes(const job *j, const void *logits, int64_t target, float log_sum,
                         float factor, char *out)
{
    const ms_cross_entropy_args *args = j->args;
    ms_dtype dtype = (ms_dtype)args->dtype;
    float at_target = (expf(logit_at(args, logits, target) - log_sum) - 1.0f) * factor;
    j->kernels->spread(dtype, logits, args->classes, log_sum, factor, out);
    j->convert->from_f32[dtype](out + (size_t)target * ms_dtype_bytes(dtype), &at_target, 1);
}

/* loss = log(sum(exp(x))) - x[target]. Ignored rows have a loss of 0, and log_sum 0, which backward
 * does not read. With dlogits, which may be the logits, it writes the gradient of each row, too.
 * The pass over the logits is the cost: they are often the largest tensor of a step, and each is
 * read twice (maximum, then sum), the second time from a cache while a row fits one. */
static void forward_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    job *j = context;
    const ms_cross_entropy_args *args = j->args;
    size_t bytes = (size_t)args->classes * ms_dtype_bytes((ms_dtype)args->dtype);
    for (int64_t row = args->rows * tile / j->tiles; row < args->rows * (tile + 1) / j->tiles;
         row++) {
        const char *logits = (const char *)args->logits + (size_t)row * bytes;
        char *out = args->dlogits == NULL ? NULL : (char *)args->dlogits + (size_t)row * bytes;
        j->losses[row] = 0.0f;
        if (args->log_sum != NULL) args->log_sum[row] = 0.0f;
        if (!counts(j, row)) {
            if (out != NULL) memset(out, 0, bytes);
            continue;
        }
        int64_t target = target_at(args, row);
        float log_sum = j->kernels->log_sum((ms_dtype)args->dtype, logits, args->classes);
        if (args->log_sum != NULL) args->log_sum[row] = log_sum;
        j->losses[row] = log_sum - logit_at(args, logits, target);
        if (out != NULL) write_slopes(j, logits, target, log_sum, *args->share, out);
    }
}

/* Adds the losses of the rows in their order, in f64, so the result does not depend on threads. The
 * mean is over the rows that are not ignored; args->share keeps what backward multiplies with. The
 * targets are read once more to count the rows; they are small next to the logits. */
static void reduce_losses(const ms_cross_entropy_args *args, const float *losses)
{
    double sum = 0.0, counted = 0.0;
    for (int64_t row = 0; row < args->rows; row++) {
        sum += losses[row];
        counted += target_at(args, row) != args->ignore_index;
    }
    bool mean = args->reduction == MS_REDUCE_MEAN;
    if (args->share != NULL) *args->share = mean ? (float)(1.0 / counted) : 1.0f;
    /* No row counts: 0 / 0 is NaN, as elsewhere in the field. */
    if (args->reduction != MS_REDUCE_NONE) *args->loss = (float)(mean ? sum / counted : sum);
}

/* Without a reduction the losses are the output itself. With one they are scratch, one number per
 * row, so that they can be added in order. The task fails before the loss is written if a target is
 * bad. */
static ms_task_result cross_entropy_run(ms_run *run, void *arguments)
{
    const ms_cross_entropy_args *args = arguments;
    job j = { .args = args,
              .kernels = ms_softmax_kernels_for(ms_run_isa(run)),
              .tiles = tiles_for(args->rows, args->classes),
              .bad_row = INT64_MAX };
    /* One byte more, so that a loss over no rows also gets an address; NULL means that there is no
     * memory. */
    j.losses =
        args->reduction == MS_REDUCE_NONE
            ? args->loss
            : ms_thread_scratch(ms_run_thread(run), 0, (size_t)args->rows * sizeof(float) + 1);
    if (j.losses == NULL) {
        ms_run_fail(run, MS_ERROR_MEMORY, "cross_entropy: no memory for %lld losses",
                    (long long)args->rows);
        return MS_TASK_FAILED;
    }
    ms_run_tiles(run, j.tiles, forward_tile, &j);
    if (fails(run, &j)) return MS_TASK_FAILED;
    reduce_losses(args, j.losses);
    return MS_TASK_DONE;
}

/* The targets were checked by forward, whose failure skips this task. For each row: one read and
 * one write of the logits and an exponential for each of them. */
static void backward_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    const job *j = context;
    const ms_cross_entropy_args *args = j->args;
    size_t bytes = (size_t)args->classes * ms_dtype_bytes((ms_dtype)args->dtype);
    for (int64_t row = args->rows * tile / j->tiles; row < args->rows * (tile + 1) / j->tiles;
         row++) {
        int64_t target = target_at(args, row);
        char *out = (char *)args->dlogits + (size_t)row * bytes;
        if (target == args->ignore_index) {
            memset(out, 0, bytes);
            continue;
        }
        const char *logits = (const char *)args->logits + (size_t)row * bytes;
        float factor = args->gradient[args->reduction == MS_REDUCE_NONE ? row : 0] * *args->share;
        write_slopes(j, logits, target, args->log_sum[row], factor, out);
    }
}

static ms_task_result cross_entropy_backward_run(ms_run *run, void *arguments)
{
    const ms_cross_entropy_args *args = arguments;
    job j = { .args = args,
              .kernels = ms_softmax_kernels_for(ms_run_isa(run)),
              .convert = ms_convert_kernels_for(ms_run_isa(run)),
              .tiles = tiles_for(args->rows, args->classes) };
    ms_run_tiles(run, j.tiles, backward_tile, &j);
    return MS_TASK_DONE;
}

/* ------------------------------------- loss and gradient of logits in place */

/* On one thread: there is one target for each row of logits. In f16 a row's slope times 1 / counted
 * could be too small, so it is multiplied by a power of two of at least `counted` as well. */
static ms_task_result share_run(ms_run *run, void *arguments)
{
    const ms_cross_entropy_args *args = arguments;
    job j = { .args = args, .bad_row = INT64_MAX };
    int64_t counted = 0;
    for (int64_t row = 0; row < args->rows; row++) counted += counts(&j, row);
    if (fails(run, &j)) return MS_TASK_FAILED;
    double power = 1.0, share = args->reduction == MS_REDUCE_MEAN ? 1.0 / (double)counted : 1.0;
    while (args->dtype == MS_F16 && power * share < 1.0) power *= 2.0;
    args->share[0] = (float)(power * share);
    args->share[1] = (float)(1.0 / power);
    return MS_TASK_DONE;
}

static ms_task_result in_place_run(ms_run *run, void *arguments)
{
    const ms_cross_entropy_args *args = arguments;
    job j = { .args = args,
              .kernels = ms_softmax_kernels_for(ms_run_isa(run)),
              .convert = ms_convert_kernels_for(ms_run_isa(run)),
              .losses = args->loss,
              .tiles = tiles_for(args->rows, args->classes),
              .bad_row = INT64_MAX };
    ms_run_tiles(run, j.tiles, forward_tile, &j);
    return MS_TASK_DONE;
}

static ms_task_result total_run(ms_run *run, void *arguments)
{
    const ms_cross_entropy_args *args = arguments;
    (void)run;
    reduce_losses(args, args->losses);
    return MS_TASK_DONE;
}

/* ------------------------------------------------------------ squared error */

enum { MSE_BLOCK = 4096 }; /* elements whose sum is made in f32 before it joins the f64 total */

/* On one thread: two reads and a subtraction per element are bound by memory. Blocks are summed in
 * f32 and joined in f64, in order. The sum is in f64 between blocks, so the error does not grow
 * with the number of elements. */
static ms_task_result mse_run(ms_run *run, void *arguments)
{
    const ms_mse_args *args = arguments;
    const ms_softmax_kernels *kernels = ms_softmax_kernels_for(ms_run_isa(run));
    ms_dtype dtype = (ms_dtype)args->dtype;
    size_t item = ms_dtype_bytes(dtype);
    double sum = 0.0;
    for (int64_t at = 0; at < args->count; at += MSE_BLOCK) {
        int64_t n = args->count - at < MSE_BLOCK ? args->count - at : MSE_BLOCK;
        sum += kernels->squares(dtype, (const char *)args->a + (size_t)at * item,
                                (const char *)args->b + (size_t)at * item, n);
    }
    float loss = (float)(sum / (double)args->count);
    ms_convert_kernels_for(ms_run_isa(run))->from_f32[args->loss_dtype](args->loss, &loss, 1);
    return MS_TASK_DONE;
}

/* d(mean of (a - b)^2) = 2 (a - b) / count, with the opposite sign for b. The factor is made in
 * f64. The incoming gradient is a value on the device, read here and not on the host. */
static ms_task_result mse_backward_run(ms_run *run, void *arguments)
{
    const ms_mse_args *args = arguments;
    ms_dtype dtype = (ms_dtype)args->dtype;
    float gradient;
    ms_convert_kernels_for(ms_run_isa(run))->to_f32[args->loss_dtype](&gradient, args->gradient, 1);
    float factor = (float)(2.0 * gradient / (double)args->count);
    ms_softmax_kernels_for(ms_run_isa(run))
        ->difference(dtype, args->a, args->b, args->count, factor, args->da, args->db);
    return MS_TASK_DONE;
}

const ms_task ms_cpu_softmax_forward = { .name = "softmax",
                                         .function = forward_run,
                                         .args_bytes = sizeof(ms_softmax_args),
                                         .kind = MS_KIND_COMPUTE };
const ms_task ms_cpu_softmax_backward = { .name = "softmax gradient",
                                          .function = backward_run,
                                          .args_bytes = sizeof(ms_softmax_args),
                                          .kind = MS_KIND_COMPUTE };
const ms_task ms_cpu_cross_entropy = { .name = "cross_entropy",
                                       .function = cross_entropy_run,
                                       .args_bytes = sizeof(ms_cross_entropy_args),
                                       .kind = MS_KIND_COMPUTE };
const ms_task ms_cpu_cross_entropy_backward = { .name = "cross_entropy gradient",
                                                .function = cross_entropy_backward_run,
                                                .args_bytes = sizeof(ms_cross_entropy_args),
                                                .kind = MS_KIND_COMPUTE };
const ms_task ms_cpu_mse = { .name = "mse_loss",
                             .function = mse_run,
                             .args_bytes = sizeof(ms_mse_args),
                             .kind = MS_KIND_COMPUTE };
const ms_task ms_cpu_mse_backward = { .name = "mse_loss gradient",
                                      .function = mse_backward_run,
                                      .args_bytes = sizeof(ms_mse_args),
                                      .kind = MS_KIND_COMPUTE };
const ms_task ms_cpu_cross_entropy_share = { .name = "cross_entropy share",
                                             .function = share_run,
                                             .args_bytes = sizeof(ms_cross_entropy_args),
                                             .kind = MS_KIND_COMPUTE };
const ms_task ms_cpu_cross_entropy_in_place = { .name = "cross_entropy in place",
                                                .function = in_place_run,
                                                .args_bytes = sizeof(ms_cross_entropy_args),
                                                .kind = MS_KIND_COMPUTE };
const ms_task ms_cpu_cross_entropy_total = { .name = "cross_entropy total",
                                             .function = total_run,
                                             .args_bytes = sizeof(ms_cross_entropy_args),
                                             .kind = MS_KIND_COMPUTE };
