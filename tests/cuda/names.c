/* names.c: the names under which exec/cuda/api.h seeks the driver's functions, found by the linker
 * in the stub that the toolkit has of the driver. Nothing here runs. */
#include "exec/cuda/api.h"

#define DECLARE(field, name, arguments) extern int field(void) __asm__(name);
MS_CUDA_FUNCTIONS(DECLARE)

int (*const cuda_names[])(void) = {
#define LIST(field, name, arguments) field,
    MS_CUDA_FUNCTIONS(LIST)
};
