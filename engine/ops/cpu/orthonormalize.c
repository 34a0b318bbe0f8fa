/* orthonormalize.c: columns of matrices made orthonormal on the CPU: a tile for each matrix, so
 * that results do not depend on threads.
 *
 * A kernel of another device must do the columns in order, subtract from the columns that are
 * changed already (the modified process), and compute in f32: PowerSGD runs it on every rank, and
 * all must get the same bits. */
#include "ops/cpu/orthonormalize.h"

#include <stdatomic.h>

#include "ops/cpu/convert.h"

/* What the tiles of one task share. Matrices are independent, and the work on one is serial. */
typedef struct job {
    const ms_orthonormalize_args *args;
    const ms_orthonormalize_kernels *kernels;
    const ms_convert_kernels *convert;
    _Atomic bool no_memory;
} job;

/* Rows that are turned at once: their cache lines stay in the first-level cache while every column
 * takes its element of each. */
#define ROWS 64 /* turned at once: their lines stay in the nearest cache */

/* Turns a matrix of n x r into r contiguous columns of f32, or back: the kernel's dot products then
 * run along memory. 16-bit matrices are computed in f32 and rounded once, on the way back. */
static void turn(const job *j, char *matrix, float *columns, float *rows, bool back)
{
    int64_t n = j->args->n, r = j->args->r;
    ms_dtype dtype = (ms_dtype)j->args->dtype;
    for (int64_t first = 0; first < n; first += ROWS) {
        int64_t count = n - first < ROWS ? n - first : ROWS;
        void *at = matrix + (size_t)(first * r) * ms_dtype_bytes(dtype);
        if (!back) j->convert->to_f32[dtype](rows, at, (size_t)(count * r));
        for (int64_t c = 0; c < r; c++)
            for (int64_t i = 0; i < count; i++) {
                if (back) rows[i * r + c] = columns[c * n + first + i];
                else columns[c * n + first + i] = rows[i * r + c];
            }
        if (back) j->convert->from_f32[dtype](at, rows, (size_t)(count * r));
    }
}

/* The scratch is the whole matrix in f32. A matrix is tall and narrow in its main use (the factors
 * of a low-rank gradient), so r is small, and the work of n r^2 multiply-adds is serial over
 * columns: every column needs all columns before it. */
static void orthonormalize_tile(void *context, uint32_t tile, ms_thread *thread)
{
    job *j = context;
    int64_t n = j->args->n, r = j->args->r;
    char *matrix =
        (char *)j->args->x + (size_t)(tile * n * r) * ms_dtype_bytes((ms_dtype)j->args->dtype);
    /* Two slots, since both are used at the same time. */
    float *columns = ms_thread_scratch(thread, 0, (size_t)(n * r) * sizeof *columns),
          *rows = ms_thread_scratch(thread, 1, (size_t)(ROWS * r) * sizeof *rows);
    if (columns == NULL || rows == NULL) {
        atomic_store(&j->no_memory, true);
        return;
    }
    turn(j, matrix, columns, rows, false);
    j->kernels->columns(columns, n, r, j->args->eps);
    turn(j, matrix, columns, rows, true);
}

/* One tile for each matrix: a single matrix runs on one thread, and a batch of them on several. */
static ms_task_result orthonormalize_run(ms_run *run, void *arguments)
{
    const ms_orthonormalize_args *args = arguments;
    job j = { .args = args,
              .kernels = ms_orthonormalize_kernels_for(ms_run_isa(run)),
              .convert = ms_convert_kernels_for(ms_run_isa(run)) };
    ms_run_tiles(run, (uint32_t)args->matrices, orthonormalize_tile, &j);
    if (!j.no_memory) return MS_TASK_DONE;
    ms_run_fail(run, MS_ERROR_MEMORY, "orthonormalize: no memory for a matrix of %lld x %lld",
                (long long)args->n, (long long)args->r);
    return MS_TASK_FAILED;
}

const ms_task ms_cpu_orthonormalize = { "orthonormalize", orthonormalize_run,
                                        sizeof(ms_orthonormalize_args), MS_KIND_COMPUTE };
