/* safetensors_read.c: reading safetensors: 8 bytes of header length, a JSON header, then the tensors' bytes without gaps.
 *
 * The header comes from anywhere. JSON is parsed by jansson, whose depth is limited and whose own memory is its own; everything else here
 * is checked against the file's size before it is used.
 */
#include "io/path.h"
#include "io/safetensors.h"
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

const ms_safetensors_dtype ms_safetensors_dtypes[] = {
    { "F32", "f32", 4, MS_F32 }, { "F16", "f16", 2, MS_F16 }, { "BF16", "bf16", 2, MS_BF16 }, { "I64", "i64", 8, MS_I64 },
    { "I32", "i32", 4, MS_I32 }, { "U16", "u16", 2, MS_U16 }, { "U8", "u8", 1, MS_U8 }, { "BOOL", "bool", 1, MS_BOOL },
    /* Known, so that the other tensors of such a file can be used. */
    { "F64", "f64", 8, MS_DTYPES }, { "I16", "i16", 2, MS_DTYPES }, { "I8", "i8", 1, MS_DTYPES }, { "U32", "u32", 4, MS_DTYPES },
    { "U64", "u64", 8, MS_DTYPES }, { "F8_E4M3", "f8_e4m3", 1, MS_DTYPES }, { "F8_E5M2", "f8_e5m2", 1, MS_DTYPES }, { NULL, NULL, 0, MS_DTYPES },
};

struct ms_safetensors {
    ms_context context;              /* for memory and for closing, whichever thread does it */
    ms_file *file;
    char *path;
    json_t *header;                  /* keeps the strings */
    json_t *metadata;                /* borrowed from header, NULL if there is none */
    ms_safetensors_entry *entries;   /* by name */
    int64_t *sizes;                  /* all shapes, one after the other */
    uint32_t count;
};

#define corrupt(context, file, ...) ms_fail(context, MS_ERROR_CORRUPT, __VA_ARGS__, (file)->path)

/* A non-negative JSON integer. */
static bool read_size(const json_t *value, int64_t *out)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0) return false;
    *out = json_integer_value(value);
    return true;
}

static ms_status read_dtype(ms_context *context, ms_safetensors *file, const json_t *value, ms_safetensors_entry *entry, uint64_t *width)
{
    const char *name = json_string_value(value);
    if (name == NULL) return corrupt(context, file, "tensor '%.200s' has no dtype: '%s'", entry->name);
    for (const ms_safetensors_dtype *known = ms_safetensors_dtypes; known->name; known++)
        if (strcmp(known->name, name) == 0) {
            entry->dtype = known->dtype;
            entry->dtype_name = known->word;
            *width = known->bytes;
            return MS_OK;
        }
    return ms_fail(context, MS_ERROR_UNSUPPORTED, "tensor '%.200s' has the unknown dtype '%.40s': '%s'", entry->name, name, file->path);
}

/* One tensor: {"dtype", "shape", "data_offsets"}. Its sizes go to *sizes, which moves on. */
static ms_status read_entry(ms_context *context, ms_safetensors *file, const json_t *value, uint64_t data, int64_t **sizes, ms_safetensors_entry *entry)
{
    const json_t *shape = json_object_get(value, "shape"), *offsets = json_object_get(value, "data_offsets");
    uint64_t bytes = 0;
    int64_t begin, end;
    if (!json_is_object(value)) return corrupt(context, file, "tensor '%.200s' is no JSON object: '%s'", entry->name);
    ms_status status = read_dtype(context, file, json_object_get(value, "dtype"), entry, &bytes);
    if (status) return status;
    if (!json_is_array(shape) || json_array_size(shape) > MS_SAFETENSORS_DIMS_MAX)
        return corrupt(context, file, "tensor '%.200s' has no shape, or one of more than 16 dimensions: '%s'", entry->name);
    entry->dims = (uint32_t)json_array_size(shape);
    entry->shape = *sizes;
    entry->supported = entry->dtype != MS_DTYPES && entry->dims <= MS_DIMS_MAX;
    bool overflow = false;
    for (uint32_t d = 0; d < entry->dims; d++) {
        if (!read_size(json_array_get(shape, d), &(*sizes)[d])) return corrupt(context, file, "tensor '%.200s' has a size that is no integer of 0 or more: '%s'", entry->name);
        overflow |= __builtin_mul_overflow(bytes, (uint64_t)(*sizes)[d], &bytes);
    }
    *sizes += entry->dims;
    /* Kept apart from the product: a size of 0 after an overflow would hide it. */
    if (overflow) return corrupt(context, file, "tensor '%.200s' is larger than any file: '%s'", entry->name);
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 || !read_size(json_array_get(offsets, 0), &begin) || !read_size(json_array_get(offsets, 1), &end) || begin > end)
        return corrupt(context, file, "tensor '%.200s' has no data_offsets [begin, end]: '%s'", entry->name);
    if ((uint64_t)(end - begin) != bytes)
        return corrupt(context, file, "tensor '%.200s' has %" PRIu64 " bytes by dtype and shape, %" PRIu64 " by data_offsets: '%s'", entry->name, bytes, (uint64_t)(end - begin));
    entry->offset = data + (uint64_t)begin;
    entry->bytes = bytes;
    return MS_OK;
}

static ms_status read_metadata(ms_context *context, ms_safetensors *file, json_t *value)
{
    if (!json_is_object(value)) return corrupt(context, file, "__metadata__ is no JSON object: '%s'");
    for (void *at = json_object_iter(value); at; at = json_object_iter_next(value, at))
        if (!json_is_string(json_object_iter_value(at))) return corrupt(context, file, "__metadata__ '%.200s' is no string: '%s'", json_object_iter_key(at));
    file->metadata = value;
    return MS_OK;
}

/* ------------------------------------------------------------------------------------------------------------------- whole header */

static int compare_offsets(const void *a, const void *b)
{
    const ms_safetensors_entry *x = a, *y = b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;         /* empty tensors stand before the one that begins there */
}

static int compare_entries(const void *a, const void *b)
{
    return strcmp(((const ms_safetensors_entry *)a)->name, ((const ms_safetensors_entry *)b)->name);
}

/* Tensors must fill the file from the header's end to its own without gap or overlap: nothing is hidden, and nothing counts twice. */
static ms_status check_ranges(ms_context *context, ms_safetensors *file, uint64_t data, uint64_t end)
{
    if (file->count > 1) qsort(file->entries, file->count, sizeof *file->entries, compare_offsets);
    uint64_t at = data;
    for (uint32_t i = 0; i < file->count; i++) {
        const ms_safetensors_entry *entry = &file->entries[i];
        if (entry->offset != at || entry->bytes > end - at)
            return corrupt(context, file, "tensor '%.200s' lies at byte %" PRIu64 " with %" PRIu64 " bytes; its place begins at %" PRIu64 " and the file has %" PRIu64 ": '%s'",
                           entry->name, entry->offset, entry->bytes, at, end);
        at += entry->bytes;
    }
    if (at != end) return corrupt(context, file, "%" PRIu64 " bytes at the end belong to no tensor: '%s'", end - at);
    if (file->count > 1) qsort(file->entries, file->count, sizeof *file->entries, compare_entries);
    return MS_OK;
}

/* How many tensors and how many sizes the header may have: what the tables need. */
static ms_status count_header(ms_context *context, ms_safetensors *file, size_t *sizes)
{
    size_t tensors = 0, total = 0;
    for (void *at = json_object_iter(file->header); at; at = json_object_iter_next(file->header, at)) {
        if (!ms_text_is_name(json_object_iter_key(at), MS_SAFETENSORS_NAME_MAX))
            return corrupt(context, file, "the name of tensor %zu is longer than 1,024 bytes or has control characters: '%s'", tensors + 1);
        tensors += strcmp(json_object_iter_key(at), "__metadata__") != 0;
        const json_t *shape = json_object_get(json_object_iter_value(at), "shape");
        if (json_array_size(shape) <= MS_SAFETENSORS_DIMS_MAX) total += json_array_size(shape);
    }
    if (tensors > MS_SAFETENSORS_COUNT_MAX) return corrupt(context, file, "%zu tensors; at most %u are read: '%s'", tensors, MS_SAFETENSORS_COUNT_MAX);
    ms_status status = ms_allocate(context, tensors * sizeof *file->entries, "a table of tensors", (void **)&file->entries);
    if (!status) status = ms_allocate(context, total * sizeof *file->sizes, "a table of shapes", (void **)&file->sizes);
    *sizes = total;
    return status;
}

static ms_status read_tables(ms_context *context, ms_safetensors *file, uint64_t data, uint64_t end)
{
    size_t total;
    ms_status status = count_header(context, file, &total);
    int64_t *sizes = file->sizes;
    for (void *at = status ? NULL : json_object_iter(file->header); at && !status; at = json_object_iter_next(file->header, at)) {
        const char *name = json_object_iter_key(at);
        if (strcmp(name, "__metadata__") == 0) {
            status = read_metadata(context, file, json_object_iter_value(at));
            continue;
        }
        ms_safetensors_entry *entry = &file->entries[file->count];
        entry->name = name;
        status = read_entry(context, file, json_object_iter_value(at), data, &sizes, entry);
        if (!status) file->count++;
    }
    return status ? status : check_ranges(context, file, data, end);
}

static ms_status read_header(ms_context *context, ms_safetensors *file)
{
    uint8_t prefix[8];
    uint64_t end, length = 0;
    char *text = NULL;
    int error = context->os->size(context->os->user, file->file, &end);
    if (error) return ms_fail_os(context, error, "cannot tell the size of", file->path);
    if (end < sizeof prefix) return corrupt(context, file, "%" PRIu64 " bytes are too few for a safetensors file: '%s'", end);
    ms_status status = ms_file_read(context, file->file, file->path, prefix, sizeof prefix, 0);
    if (status) return status;
    for (int i = 7; i >= 0; i--) length = length << 8 | prefix[i];
    if (length > end - sizeof prefix) return corrupt(context, file, "the header should have %" PRIu64 " bytes, the file has %" PRIu64 ": '%s'", length, end);
    if (length > MS_SAFETENSORS_HEADER_MAX) return corrupt(context, file, "the header has %" PRIu64 " bytes; at most 32 MiB are read: '%s'", length);
    status = ms_bytes_new(context, (size_t)length, "a safetensors header", (void **)&text);
    if (!status) status = ms_file_read(context, file->file, file->path, text, (size_t)length, sizeof prefix);
    json_error_t why;
    if (!status && (length == 0 || text[0] != '{')) status = corrupt(context, file, "the header does not begin with '{': '%s'");
    if (!status && (file->header = json_loadb(text, (size_t)length, JSON_REJECT_DUPLICATES, &why)) == NULL)
        status = corrupt(context, file, "the header is not JSON: %s at byte %d: '%s'", why.text, why.position + 8);
    ms_release(context, text);
    return status ? status : read_tables(context, file, sizeof prefix + length, end);
}

/* ------------------------------------------------------------------------------------------------------------------------- public */

ms_status ms_safetensors_open(ms_context *context, const char *path, ms_safetensors **out)
{
    ms_safetensors *file = NULL;
    ms_status status = ms_allocate(context, sizeof *file, "a safetensors reader", (void **)&file);
    if (status) return status;
    ms_context_init(&file->context, context->os);
    status = ms_text_join(context, path, "", &file->path);
    if (!status) status = ms_file_open(context, path, MS_FILE_READ, &file->file);
    if (!status) status = read_header(context, file);
    if (status) { ms_safetensors_close(file); return status; }
    *out = file;
    return MS_OK;
}

void ms_safetensors_close(ms_safetensors *file)
{
    if (file == NULL) return;
    ms_context context = file->context;
    ms_file_close(&context, file->file);
    json_decref(file->header);
    ms_release(&context, file->entries);
    ms_release(&context, file->sizes);
    ms_release(&context, file->path);
    ms_release(&context, file);
}

uint32_t ms_safetensors_count(const ms_safetensors *file) { return file->count; }
const ms_safetensors_entry *ms_safetensors_at(const ms_safetensors *file, uint32_t index) { return &file->entries[index]; }

const ms_safetensors_entry *ms_safetensors_find(const ms_safetensors *file, const char *name)
{
    ms_safetensors_entry key = { .name = name };
    return file->count ? bsearch(&key, file->entries, file->count, sizeof key, compare_entries) : NULL;
}

bool ms_safetensors_metadata(const ms_safetensors *file, uint32_t index, const char **key, const char **value)
{
    void *at = file->metadata ? json_object_iter(file->metadata) : NULL;
    for (uint32_t i = 0; at && i < index; i++) at = json_object_iter_next(file->metadata, at);
    if (!at) return false;
    *key = json_object_iter_key(at);
    *value = json_string_value(json_object_iter_value(at));
    return true;
}

ms_status ms_safetensors_read(ms_context *context, ms_safetensors *file, const ms_safetensors_entry *entry, void *buffer)
{
    return ms_file_read(context, file->file, file->path, buffer, (size_t)entry->bytes, entry->offset);
}

ms_status ms_safetensors_load(ms_engine *engine, ms_safetensors *file, const ms_safetensors_entry *entry, uint64_t *hash, ms_tensor **out)
{
    ms_context *context = ms_engine_context(engine);
    uint8_t *data = NULL;
    ms_tensor *tensor = NULL;
    if (!entry->supported)
        return ms_fail(context, MS_ERROR_UNSUPPORTED, "tensor '%.200s' is %s with %u dimensions, which cannot be loaded: '%s'", entry->name, entry->dtype_name, entry->dims, file->path);
    ms_status status = ms_bytes_new(context, (size_t)entry->bytes, entry->name, (void **)&data);
    if (!status) status = ms_safetensors_read(context, file, entry, data);
    if (!status && hash) *hash = ms_hash(data, (size_t)entry->bytes, 0);
    /* Kernels count on booleans being 0 or 1. */
    for (uint64_t i = 0; !status && entry->dtype == MS_BOOL && i < entry->bytes; i++) data[i] = data[i] != 0;
    if (!status) status = ms_tensor_new(engine, entry->dtype, entry->dims, entry->shape, &tensor);
    if (!status && entry->bytes) status = ms_tensor_write(tensor, data, (size_t)entry->bytes);
    ms_release(context, data);
    if (status) { ms_tensor_release(tensor); return status; }
    *out = tensor;
    return MS_OK;
}
