/* kernels.h: the inner loops of reductions, built once for each instruction set. */
#ifndef MOONSHARD_COMM_CPU_KERNELS_H
#define MOONSHARD_COMM_CPU_KERNELS_H

#include "moonshard/comm.h"
#include "ops/cpu/isa.h"

/* Elements from first up to end: inputs[0] op inputs[1] op ... in this order, to every output (each
 * of which may be one of the inputs). An avg is divided by `divisor`. 16-bit floats are added up in
 * f32. memory: dtype of inputs; result: of outputs; where one is f32 and dtype a 16-bit float,
 * numbers are rounded to that. factors: of premul_sum. The result is the same on every
 * instruction set. */
typedef struct ms_reduce_task {
    ms_dtype dtype, memory, result;
    ms_reduce_op op;
    uint32_t input_count, output_count, divisor;
    const char *const *inputs;
    char *const *outputs;
    const float *factors;
    size_t first, end;
} ms_reduce_task;

typedef struct ms_comm_kernels {
    void (*reduce)(const ms_reduce_task *task);
} ms_comm_kernels;

MS_ISA_TABLE(ms_comm_kernels, ms_comm_kernels)

#endif
