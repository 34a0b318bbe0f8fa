/* safetensors_part.c: a part of one tensor, checked by the hashes of the blocks that it touches. */
#include "io/path.h"

#include <string.h>

#include "io/safetensors.h"

/* A part that is being read: bytes [begin, end) of the entry's, to `data` (NULL: nowhere). */
typedef struct ms_part {
    ms_context *context;
    ms_safetensors *file;
    const ms_safetensors_entry *entry;
    uint64_t begin, end;
    uint8_t *data;
} ms_part;

/* Reads block `index` of `size` bytes, compares its hash, and keeps what belongs to the part. */
static ms_status read_block(ms_part *part, uint64_t index, uint64_t size, uint64_t hash,
                            uint8_t *buffer)
{
    const ms_safetensors_entry *entry = part->entry;
    uint64_t at = index * size, length = entry->bytes - at < size ? entry->bytes - at : size;
    ms_status status =
        ms_safetensors_read_range(part->context, part->file, entry, at, length, buffer);
    if (status) return status;
    if (ms_hash(buffer, (size_t)length, 0) != hash)
        return ms_fail(part->context, MS_ERROR_CORRUPT,
                       "the bytes of tensor '%.200s' are not those that were saved", entry->name);
    uint64_t from = part->begin > at ? part->begin : at,
             to = part->end < at + length ? part->end : at + length;
    if (part->data && to > from)
        memcpy(part->data + (from - part->begin), buffer + (from - at), (size_t)(to - from));
    return MS_OK;
}

static ms_status read_checked(ms_part *part, const uint64_t *hashes, uint32_t count)
{
    uint64_t bytes = part->entry->bytes;
    uint64_t size = count == 1 ? bytes : MS_SAFETENSORS_BLOCK;
    void *buffer = NULL;
    if (bytes == 0 || part->begin == part->end) return MS_OK;
    if (count != (bytes + size - 1) / size)
        return ms_fail(part->context, MS_ERROR_CORRUPT,
                       "tensor '%.200s' has another number of hashes than blocks",
                       part->entry->name);
    ms_status status = ms_bytes_new(part->context, (size_t)size, part->entry->name, &buffer);
    for (uint64_t i = part->begin / size; i * size < part->end && !status; i++)
        status = read_block(part, i, size, hashes[i], buffer);
    ms_release(part->context, buffer);
    return status;
}

/* The bytes of the part, in host memory that the caller releases. */
static ms_status read_part(ms_part *part, const uint64_t *hashes, uint32_t hash_count)
{
    if (hashes) return read_checked(part, hashes, hash_count);
    if (!part->data || part->begin == part->end) return MS_OK;
    return ms_safetensors_read_range(part->context, part->file, part->entry, part->begin,
                                     part->end - part->begin, part->data);
}

/* An engine without values reads nothing. */
ms_status ms_safetensors_read_part(ms_engine *engine, ms_safetensors *file,
                                   const ms_safetensors_entry *entry, int64_t first, int64_t count,
                                   const uint64_t *hashes, uint32_t hash_count, ms_tensor *into)
{
    ms_context *context = ms_engine_context(engine);
    if (!entry->supported)
        return ms_fail(context, MS_ERROR_UNSUPPORTED,
                       "tensor '%.200s' is %s with %u dimensions, which cannot be loaded",
                       entry->name, entry->dtype_name, entry->dims);
    uint64_t width = ms_dtype_bytes(entry->dtype);
    ms_part part = { .context = context,
                     .file = file,
                     .entry = entry,
                     .begin = (uint64_t)first * width,
                     .end = (uint64_t)(first + count) * width };
    size_t bytes = (size_t)(part.end - part.begin);
    bool values = !ms_engine_is_sim(engine);
    ms_status status = MS_OK;
    if (values && into) status = ms_bytes_new(context, bytes, entry->name, (void **)&part.data);
    if (!status && values) status = read_part(&part, hashes, hash_count);
    for (size_t i = 0; !status && part.data && entry->dtype == MS_BOOL && i < bytes; i++)
        part.data[i] = part.data[i] != 0;
    if (!status && into && bytes) status = ms_tensor_write(into, part.data, bytes);
    ms_release(context, part.data);
    return status;
}

enum { SAMPLES = 3, SAMPLE_BYTES = 64 };

ms_status ms_safetensors_sample(ms_engine *engine, ms_safetensors *file,
                                const ms_safetensors_entry *entry, uint64_t *hash)
{
    uint8_t data[SAMPLE_BYTES];
    size_t bytes = entry->bytes < SAMPLE_BYTES ? (size_t)entry->bytes : SAMPLE_BYTES;
    ms_status status = MS_OK;
    *hash = ms_hash(entry->dtype_name, strlen(entry->dtype_name), 0);
    if (ms_engine_is_sim(engine)) return MS_OK;
    for (uint64_t i = 0; i < SAMPLES && bytes && !status; i++) {
        uint64_t begin = (entry->bytes - bytes) / (SAMPLES - 1) * i;
        status =
            ms_safetensors_read_range(ms_engine_context(engine), file, entry, begin, bytes, data);
        if (!status) *hash = ms_hash(data, bytes, *hash);
    }
    return status;
}
