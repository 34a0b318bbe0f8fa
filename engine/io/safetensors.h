/* safetensors.h: the dtypes of safetensors files, for their reader and writer. */
#ifndef MOONSHARD_IO_SAFETENSORS_H
#define MOONSHARD_IO_SAFETENSORS_H

#include "moonshard/io.h"

/* One dtype of the format: its name in files ("F32"), its name in messages and Lua ("f32"), the
 * bytes of an element, and the engine's dtype. MS_DTYPES marks one that cannot be loaded; its size
 * must be known all the same, as the ranges of all tensors in a file are checked. */
typedef struct ms_safetensors_dtype {
    const char *name, *word; /* in files; in ours */
    uint32_t bytes;
    ms_dtype dtype; /* MS_DTYPES: cannot be loaded */
} ms_safetensors_dtype;

extern const ms_safetensors_dtype ms_safetensors_dtypes[]; /* ends with a name of NULL */

/* Bytes [begin, begin + bytes) of an entry's; they must be within it. */
ms_status ms_safetensors_read_range(ms_context *context, ms_safetensors *file,
                                    const ms_safetensors_entry *entry, uint64_t begin,
                                    uint64_t bytes, void *buffer);

/* Writes tensors one after the other through a buffer of the size of the largest. metadata and
 * hashes may be NULL; hashes are as ms_checkpoint_write_part gives them. */
ms_status ms_safetensors_stream(ms_context *context, const char *path, const char *const *names,
                                ms_tensor *const *tensors, uint32_t count,
                                const char *const *metadata, uint32_t pairs, uint64_t *hashes);

#endif
