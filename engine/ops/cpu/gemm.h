/* gemm.h: products of two matrices by a library (oneDNN, else a CBLAS), single-threaded, for tiles
 * of our own tasks.
 *
 * Invariants
 * - Plans are made on the host thread, when an operator is enqueued, and live as long as the
 *   engine. Any number of threads may run a plan at once.
 * - What computes a product (and so its bits) depends on its shape only: not on threads, nor on
 *   which plans exist.
 * - Matrices are row-major with a distance between rows; a transposed operand is stored as its
 *   transpose. Inner distance is 1.
 * - The libraries use slot MS_GEMM_SCRATCH of a thread's scratch; callers keep to the others. */
#ifndef MOONSHARD_OPS_CPU_GEMM_H
#define MOONSHARD_OPS_CPU_GEMM_H

#include "moonshard/cpu_task.h"
#include "ops/matmul.h"

enum { MS_GEMM_SCRATCH = 3 };

typedef struct ms_gemm ms_gemm; /* the library's state of an engine */
/* How to compute one shape, or one kind of shapes. Immutable once it is made, which is why threads
 * need no lock to share it. */
typedef struct ms_gemm_plan ms_gemm_plan;

/* The library's state of the engine, made at first use and freed with the engine. */
ms_status ms_gemm_get(ms_engine *engine, ms_gemm **out);
/* Whether the library computes these dtypes on this processor; f32 to f32 always. The caller
 * converts others to f32 and back. */
bool ms_gemm_supports(const ms_gemm *gemm, ms_dtype in, ms_dtype out);
/* A plan for a shape that is supported, m, n and k above 0. Borrowed. */
ms_status ms_gemm_prepare(ms_engine *engine, ms_gemm *gemm, const ms_gemm_shape *shape,
                          const ms_gemm_plan **out);
/* Runs a plan on any thread. `shape` is the one that the plan was made for. False when there is no
 * memory for scratch. bias is NULL unless the shape has one. */
bool ms_gemm_run(const ms_gemm_plan *plan, const ms_gemm_shape *shape, ms_thread *thread,
                 const void *a, const void *b, const float *bias, void *c);
/* f32 without a plan of its own, for blocks of a few hundred rows and columns and for long sums; k
 * above 0, and the shape has no bias. */
void ms_gemm_f32(const ms_gemm *gemm, const ms_gemm_shape *shape, const float *a, const float *b,
                 float *c);

/* ms_backend.plan_matmul of the CPU. */
ms_status ms_cpu_plan_matmul(ms_engine *engine, ms_matmul_args *args);

/* "oneDNN 2.6.3" or "CBLAS", for messages to the user. */
const char *ms_gemm_library(void);

#endif
