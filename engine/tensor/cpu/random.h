/* random.h: inner loops that draw numbers. All give the same bits on every instruction set. */
#ifndef MOONSHARD_TENSOR_CPU_RANDOM_H
#define MOONSHARD_TENSOR_CPU_RANDOM_H

#include "tensor/cpu/isa.h"
#include "tensor/random.h"

/* elements drawn at once: 16 Philox blocks. Positions are multiples of it. */
#define MS_RANDOM_GROUP 64

/* The upper half of a draw's counter. */
static inline uint64_t ms_random_high(ms_random random) { return random.step << 32 ^ random.draw; }

typedef struct ms_random_kernels {
    void (*uniform)(float *out, size_t n, uint64_t position, const ms_random_args *args);
    void (*normal)(float *out, size_t n, uint64_t position, const ms_random_args *args);
    void (*dropout)(float *out, const float *in, size_t n, uint64_t position,
                    const ms_dropout_args *args);
} ms_random_kernels;

MS_ISA_TABLE(ms_random_kernels, ms_random_kernels)

#endif
