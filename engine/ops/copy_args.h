/* copy_args.h: arguments of the copying kernels. */
#ifndef MOONSHARD_OPS_COPY_ARGS_H
#define MOONSHARD_OPS_COPY_ARGS_H

#include "moonshard/tensor.h"
#include "ops/loop.h"

/* Operand 0 of the loop is the target, 1 the source; both have elements of `size` bytes. Elements
 * are not interpreted: a copy keeps every bit pattern. */
typedef struct ms_copy_args {
    ms_loop loop;
    void *to;
    const void *from;
    uint8_t size;
} ms_copy_args;

/* One bit pattern for all elements: the low `size` bytes of bits. The host has rounded the value,
 * so all devices fill with the same bits. */
typedef struct ms_fill_args {
    ms_loop loop;
    void *to;
    uint64_t bits;
    uint8_t size;
} ms_fill_args;

#endif
