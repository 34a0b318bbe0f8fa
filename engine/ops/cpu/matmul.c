/* matmul.c: products of matrices on the CPU: parts of the work as library calls, and dtypes that
 * the library does not know.
 *
 * A kernel of another device gets the shape of one part; along the dimension that is cut the whole
 * size is (parts - 1) times the part's size plus args->last. It adds products in f32 whatever the
 * dtype of the operands, adds the bias to every row, overwrites c or adds to it, and rounds once.
 * With k = 0 the result is the bias, or 0, or what c held. */
#include "ops/matmul.h"

#include <stdatomic.h>
#include <string.h>

#include "ops/cpu/convert.h"
#include "ops/cpu/gemm.h"

/* What the tiles of one product share. Tiles only read it, except for `failed`, which any of them
 * may set: the task reports the failure after the last tile. */
typedef struct job {
    const ms_matmul_args *args;
    const ms_convert_kernels *convert;
    atomic_bool failed;
} job;

/* ------------------------------------------------------------ by conversion */

/* Blocks of a product whose operands are converted to f32 first, small enough that the copies are
 * still in a cache when they are multiplied. Rows of a are converted once for all columns where
 * they are KEPT_DEPTH long at most: as many rows as take 1 MiB, in bounds. Longer ones are
 * converted once for each block of columns, so these are wider. The sum over k goes on in the f32
 * block of the result, so cutting k costs no precision.
 *
 * Measured with AVX2 on the shapes of gpt2, in caches: 0.96 to 0.97 of the speed in f32, against
 * 0.94 with 512 x 512 x 256 of which nothing is kept. */
enum {
    BLOCK_DEPTH = 256,
    KEPT_DEPTH = 3072,
    KEPT_NUMBERS = 256 * 1024,
    KEPT_LEAST_ROWS = 128,
    KEPT_COLUMNS = 96,
    BLOCK_ROWS = 512,
    BLOCK_COLUMNS = 256,
};

/* The blocks of one product, and a thread's scratch for them. */
typedef struct blocks {
    bool keeps; /* the rows of a that are converted */
    int64_t rows, columns;
    float *result, *left, *right;
} blocks;

/* Packs rows x columns of a stored matrix as f32. `row` is the distance between stored rows. Rows
 * are packed side by side, so the product of a block reads memory in order. */
static void widen(const job *j, ms_dtype dtype, const void *from, int64_t row, int64_t rows,
                  int64_t columns, float *to)
{
    size_t item = ms_dtype_bytes(dtype);
    for (int64_t i = 0; i < rows; i++)
        j->convert->to_f32[dtype](to + i * columns, (const char *)from + (size_t)(i * row) * item,
                                  (size_t)columns);
}

/* Packs rows x columns of an operand from [row, column] on, in the orientation in which it is
 * stored: the product then uses the same transposition as the caller asked for. */
static void widen_block(const job *j, const void *from, int64_t row_distance, bool transposed,
                        int64_t row, int64_t column, int64_t rows, int64_t columns, float *to)
{
    ms_dtype dtype = (ms_dtype)j->args->shape.in;
    int64_t at = transposed ? column * row_distance + row : row * row_distance + column;
    const char *first = (const char *)from + (size_t)at * ms_dtype_bytes(dtype);
    if (transposed) widen(j, dtype, first, row_distance, columns, rows, to);
    else widen(j, dtype, first, row_distance, rows, columns, to);
}

/* Blocks at the edge of a matrix are smaller. */
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Starts the f32 sums of a block of c, `row` numbers apart. False: there is nothing to start from,
 * so the first inner product writes them. A product that adds to c has no bias. */
static bool start_sums(const job *j, const ms_gemm_shape *s, const char *c, const float *bias,
                       int64_t rows, int64_t columns, float *sums, int64_t row)
{
    ms_dtype out = (ms_dtype)s->out;
    bool there = (const char *)sums == c;
    if (s->accumulate && there) return true;
    if (!s->accumulate && bias == NULL && s->k > 0) return false;
    for (int64_t i = 0; i < rows; i++, sums += row, c += (size_t)s->c_row * ms_dtype_bytes(out)) {
        if (s->accumulate) j->convert->to_f32[out](sums, c, (size_t)columns);
        else if (bias != NULL) memcpy(sums, bias, (size_t)columns * sizeof *sums);
        else memset(sums, 0, (size_t)columns * sizeof *sums);
    }
    return true;
}

/* Where rows [row, row + rows) of a are as f32, in the part of k from `depth` on. */
static float *left_part(const blocks *of, int64_t rows, int64_t depth)
{
    return of->left + (of->keeps ? rows * depth : 0);
}

static void widen_left(const job *j, const ms_gemm_shape *s, const void *a, const blocks *of,
                       int64_t row, int64_t rows, int64_t depth)
{
    widen_block(j, a, s->a_row, s->a_transposed, row, depth, rows, least(BLOCK_DEPTH, s->k - depth),
                left_part(of, rows, depth));
}

/* Adds up one block of the result in `sums`, whose rows are `row_distance` apart. */
static void sum_block(const job *j, const ms_gemm_shape *s, const void *a, const void *b,
                      const blocks *of, int64_t row, int64_t column, float *sums,
                      int64_t row_distance, bool started)
{
    int64_t rows = least(of->rows, s->m - row), columns = least(of->columns, s->n - column);
    for (int64_t depth = 0; depth < s->k; depth += BLOCK_DEPTH) {
        int64_t deep = least(BLOCK_DEPTH, s->k - depth);
        if (!of->keeps) widen_left(j, s, a, of, row, rows, depth);
        widen_block(j, b, s->b_row, s->b_transposed, depth, column, deep, columns, of->right);
        ms_gemm_shape inner = { .m = rows,
                                .n = columns,
                                .k = deep,
                                .a_transposed = s->a_transposed,
                                .b_transposed = s->b_transposed,
                                .a_row = s->a_transposed ? rows : deep,
                                .b_row = s->b_transposed ? deep : columns,
                                .c_row = row_distance,
                                .accumulate = started || depth > 0,
                                .in = MS_F32,
                                .out = MS_F32 };
        ms_gemm_f32(j->args->library, &inner, left_part(of, rows, depth), of->right, sums);
    }
}

/* Computes one block of the result. Its f32 sum starts as the bias, or as what c holds, and is
 * rounded to the output dtype once, after the last part of k. It is in scratch, or in c if c is
 * f32. */
static void convert_block(const job *j, const ms_gemm_shape *s, const void *a, const void *b,
                          const float *bias, char *c, const blocks *of, int64_t row, int64_t column)
{
    int64_t rows = least(of->rows, s->m - row), columns = least(of->columns, s->n - column);
    ms_dtype out = (ms_dtype)s->out;
    size_t item = ms_dtype_bytes(out);
    c += (size_t)(row * s->c_row + column) * item;
    float *sums = out == MS_F32 ? (float *)(void *)c : of->result;
    int64_t distance = out == MS_F32 ? s->c_row : columns;
    bool started =
        start_sums(j, s, c, bias != NULL ? bias + column : NULL, rows, columns, sums, distance);
    sum_block(j, s, a, b, of, row, column, sums, distance, started);
    for (int64_t i = 0; i < rows && out != MS_F32; i++)
        j->convert->from_f32[out](c + (size_t)(i * s->c_row) * item, sums + i * columns,
                                  (size_t)columns);
}

/* The blocks of a shape, and 1.75 MiB of scratch at most, which belongs to the thread and stays for
 * later products. False when there is no memory. */
static bool choose_blocks(const ms_gemm_shape *s, ms_thread *thread, blocks *of)
{
    bool keeps = s->k <= KEPT_DEPTH;
    int64_t rows = BLOCK_ROWS, columns = keeps ? KEPT_COLUMNS : BLOCK_COLUMNS;
    if (keeps && s->k * rows > KEPT_NUMBERS) {
        rows = KEPT_NUMBERS / s->k / 16 * 16;
        if (rows < KEPT_LEAST_ROWS) rows = KEPT_LEAST_ROWS;
    }
    int64_t left = rows * (keeps ? s->k : BLOCK_DEPTH);
    float *scratch = ms_thread_scratch(
        thread, 0, (size_t)(rows * columns + left + BLOCK_DEPTH * columns) * sizeof(float));
    if (scratch == NULL) return false;
    *of = (blocks){ .keeps = keeps,
                    .rows = rows,
                    .columns = columns,
                    .result = scratch,
                    .left = scratch + rows * columns,
                    .right = scratch + rows * columns + left };
    return true;
}

/* A product in a dtype that the library lacks. The blocks and the order of those of k depend on the
 * shape only, and so do the bits. False when there is no memory. Every block of b is converted once
 * for each block of rows. */
static bool convert_part(const job *j, const ms_gemm_shape *s, ms_thread *thread, const void *a,
                         const void *b, const float *bias, char *c)
{
    blocks of;
    if (!choose_blocks(s, thread, &of)) return false;
    for (int64_t row = 0; row < s->m; row += of.rows) {
        for (int64_t depth = 0; depth < s->k && of.keeps; depth += BLOCK_DEPTH)
            widen_left(j, s, a, &of, row, least(of.rows, s->m - row), depth);
        for (int64_t column = 0; column < s->n; column += of.columns)
            convert_block(j, s, a, b, bias, c, &of, row, column);
    }
    return true;
}

/* -------------------------------------------------------------------- tiles */

/* Computes part `part` of one batch: some of its rows, or some of its columns where
 * args->split_columns is set. All parts but the last have the size in args->shape; the last has a
 * plan of its own, as plans may depend on the size. Without a plan the product is computed by
 * conversion. Neither way cuts k, so each element of c is computed by one tile. */
static bool run_part(const job *j, uint32_t part, ms_thread *thread, const char *a, const char *b,
                     char *c)
{
    const ms_matmul_args *args = j->args;
    ms_gemm_shape s = args->shape;
    bool last = part + 1 == args->parts;
    int64_t begin = part * (args->split_columns ? s.n : s.m);
    size_t in = ms_dtype_bytes((ms_dtype)s.in), out = ms_dtype_bytes((ms_dtype)s.out);
    const float *bias = args->bias;
    if (args->split_columns) {
        b += (size_t)(begin * (s.b_transposed ? s.b_row : 1)) * in;
        c += (size_t)begin * out;
        if (bias != NULL) bias += begin;
        if (last) s.n = args->last;
    } else {
        a += (size_t)(begin * (s.a_transposed ? 1 : s.a_row)) * in;
        c += (size_t)(begin * s.c_row) * out;
        if (last) s.m = args->last;
    }
    const ms_gemm_plan *plan = last ? args->last_plan : args->plan;
    if (plan == NULL) return convert_part(j, &s, thread, a, b, bias, c);
    return ms_gemm_run(plan, &s, thread, a, b, bias, c);
}

/* A tile is one part of a group of batches. The batch index is decomposed into coordinates, since
 * broadcast operands have stride 0 in some batch dimensions and no single stride would do. Tiles
 * write different parts of c. A failure is remembered and the other batches go on; the task fails
 * at the end. */
static void tile(void *context, uint32_t index, ms_thread *thread)
{
    job *j = context;
    const ms_matmul_args *args = j->args;
    uint32_t group = index / args->parts, part = index % args->parts;
    int64_t begin = args->batches * group / args->groups,
            end = args->batches * (group + 1) / args->groups;
    size_t in = ms_dtype_bytes((ms_dtype)args->shape.in),
           out = ms_dtype_bytes((ms_dtype)args->shape.out);
    for (int64_t batch = begin; batch < end; batch++) {
        int64_t a = 0, b = 0, c = 0, rest = batch;
        for (uint32_t d = args->batch_dims; d-- > 0;) {
            int64_t at = rest % args->batch_shape[d];
            rest /= args->batch_shape[d];
            a += at * args->a_batch[d];
            b += at * args->b_batch[d];
            c += at * args->c_batch[d];
        }
        const char *a_data = (const char *)args->a + (size_t)a * in,
                   *b_data = (const char *)args->b + (size_t)b * in;
        if (!run_part(j, part, thread, a_data, b_data, (char *)args->c + (size_t)c * out))
            atomic_store(&j->failed, true);
    }
}

/* The number of tiles comes with the arguments, made on the host from the shape alone, so the bits
 * do not depend on the number of threads. Large products are bound by arithmetic, 2 m n k FLOPs;
 * those of few rows (a decoder's single token) by reading the weight. */
static ms_task_result matmul_run(ms_run *run, void *arguments)
{
    const ms_matmul_args *args = arguments;
    job j = { .args = args, .convert = ms_convert_kernels_for(ms_run_isa(run)) };
    ms_run_tiles(run, args->groups * args->parts, tile, &j);
    if (!atomic_load(&j.failed)) return MS_TASK_DONE;
    ms_run_fail(run, MS_ERROR_MEMORY,
                "matmul: no memory for the scratch space of a product [%lld, %lld] x [%lld, %lld]",
                (long long)args->shape.m, (long long)args->shape.k, (long long)args->shape.k,
                (long long)args->shape.n);
    return MS_TASK_FAILED;
}

const ms_task ms_cpu_matmul = { .name = "matmul",
                                .function = matmul_run,
                                .args_bytes = sizeof(ms_matmul_args),
                                .kind = MS_KIND_COMPUTE };
