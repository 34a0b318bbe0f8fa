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
 * still in a cache when they are multiplied: the result takes 1 MiB, the copies of a and b 512 KiB
 * each. How often operands are converted follows from rows and columns: with 256 x 512 x 512 gpt2's
 * products take 3 to 6% longer with AVX2. The sum over k goes on in the f32 block of the result, so
 * cutting k costs no precision. */
enum { BLOCK_ROWS = 512, BLOCK_COLUMNS = 512, BLOCK_DEPTH = 256 };

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

/* Computes one block of the result. `block` holds its f32 sum, which starts as the bias, or as what
 * c holds, and is rounded to the output dtype once, after the last part of k. Without either, the
 * first inner product writes the block, and the others add to it. A product that adds to c has no
 * bias. */
static void convert_block(const job *j, const ms_gemm_shape *s, const void *a, const void *b,
                          const float *bias, char *c, int64_t row, int64_t column, float *block,
                          float *a_wide, float *b_wide)
{
    int64_t rows = least(BLOCK_ROWS, s->m - row), columns = least(BLOCK_COLUMNS, s->n - column);
    ms_dtype out = (ms_dtype)s->out;
    size_t item = ms_dtype_bytes(out);
    bool starts = s->accumulate || bias != NULL || s->k == 0;
    c += (size_t)(row * s->c_row + column) * item;
    for (int64_t i = 0; i < rows && starts; i++) {
        float *sums = block + i * columns;
        if (s->accumulate)
            j->convert->to_f32[out](sums, c + (size_t)(i * s->c_row) * item, (size_t)columns);
        else
            for (int64_t k = 0; k < columns; k++) sums[k] = bias != NULL ? bias[column + k] : 0.0f;
    }
    for (int64_t depth = 0; depth < s->k; depth += BLOCK_DEPTH) {
        int64_t deep = least(BLOCK_DEPTH, s->k - depth);
        widen_block(j, a, s->a_row, s->a_transposed, row, depth, rows, deep, a_wide);
        widen_block(j, b, s->b_row, s->b_transposed, depth, column, deep, columns, b_wide);
        int64_t a_row = s->a_transposed ? rows : deep;
        int64_t b_row = s->b_transposed ? deep : columns;
        ms_gemm_shape inner = { .m = rows,
                                .n = columns,
                                .k = deep,
                                .a_transposed = s->a_transposed,
                                .b_transposed = s->b_transposed,
                                .a_row = a_row,
                                .b_row = b_row,
                                .c_row = columns,
                                .accumulate = starts || depth > 0,
                                .in = MS_F32,
                                .out = MS_F32 };
        ms_gemm_f32(j->args->library, &inner, a_wide, b_wide, block);
    }
    for (int64_t i = 0; i < rows; i++)
        j->convert->from_f32[out](c + (size_t)(i * s->c_row) * item, block + i * columns,
                                  (size_t)columns);
}

/* A product in a dtype that the library lacks. The order of the blocks of k depends on the shape
 * only, and so do the bits. False when there is no memory. The scratch of 2 MiB belongs to the
 * thread and stays for later products. Every block of a is converted once for each block of
 * columns, and b once for each block of rows, which blocks of this size make a small part of the
 * work. */
static bool convert_part(const job *j, const ms_gemm_shape *s, ms_thread *thread, const void *a,
                         const void *b, const float *bias, char *c)
{
    enum {
        RESULT = BLOCK_ROWS * BLOCK_COLUMNS,
        LEFT = BLOCK_ROWS * BLOCK_DEPTH,
        RIGHT = BLOCK_DEPTH * BLOCK_COLUMNS
    };
    float *block = ms_thread_scratch(thread, 0, (RESULT + LEFT + RIGHT) * sizeof(float));
    if (block == NULL) return false;
    for (int64_t row = 0; row < s->m; row += BLOCK_ROWS)
        for (int64_t column = 0; column < s->n; column += BLOCK_COLUMNS)
            convert_block(j, s, a, b, bias, c, row, column, block, block + RESULT,
                          block + RESULT + LEFT);
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
