/* safetensors.h: the dtypes of safetensors files, for their reader and writer. */
#ifndef MOONSHARD_IO_SAFETENSORS_H
#define MOONSHARD_IO_SAFETENSORS_H

#include "moonshard/io.h"

typedef struct ms_safetensors_dtype {
    const char *name, *word; /* in files; in ours */
    uint32_t bytes;
    ms_dtype dtype; /* MS_DTYPES: cannot be loaded */
} ms_safetensors_dtype;

extern const ms_safetensors_dtype ms_safetensors_dtypes[]; /* ends with a name of NULL */

#endif
