/* random.h: inner loops that draw numbers. All give the same bits on every instruction set. */
#ifndef MOONSHARD_OPS_CPU_RANDOM_H
#define MOONSHARD_OPS_CPU_RANDOM_H

#include "ops/cpu/isa.h"
#include "ops/random.h"

/* Elements drawn at once: 16 Philox blocks of four words. Kernels start at multiples of it only, so
 * an element's number does not depend on where a tile or chunk begins. */
#define MS_RANDOM_GROUP 64

/* n need not be a multiple of the group: the last group is drawn whole and its rest dropped. */
typedef struct ms_random_kernels {
    void (*uniform)(float *out, size_t n, uint64_t position, const ms_random_args *args);
    void (*normal)(float *out, size_t n, uint64_t position, const ms_random_args *args);
    void (*dropout)(float *out, const float *in, size_t n, uint64_t position,
                    const ms_dropout_args *args);
} ms_random_kernels;

MS_ISA_TABLE(ms_random_kernels, ms_random_kernels)

#endif
