/* safetensors_read.c: reading safetensors: 8 bytes of header length, a JSON header, then the
 * tensors' bytes without gaps.
 *
 * The header comes from anywhere. It is scanned once, with memory for the tables alone, and
 * everything in it is checked against the file's size before it is used. */
#include "io/path.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "io/safetensors.h"
#include "io/scan.h"

const ms_safetensors_dtype ms_safetensors_dtypes[] = {
    { "F32", "f32", 4, MS_F32 },
    { "F16", "f16", 2, MS_F16 },
    { "BF16", "bf16", 2, MS_BF16 },
    { "I64", "i64", 8, MS_I64 },
    { "I32", "i32", 4, MS_I32 },
    { "U16", "u16", 2, MS_U16 },
    { "U8", "u8", 1, MS_U8 },
    { "BOOL", "bool", 1, MS_BOOL },
    /* Known, so that the other tensors of such a file can be used. */
    { "F64", "f64", 8, MS_DTYPES },
    { "I16", "i16", 2, MS_DTYPES },
    { "I8", "i8", 1, MS_DTYPES },
    { "U32", "u32", 4, MS_DTYPES },
    { "U64", "u64", 8, MS_DTYPES },
    { "F8_E4M3", "f8_e4m3", 1, MS_DTYPES },
    { "F8_E5M2", "f8_e5m2", 1, MS_DTYPES },
    { "F8_E8M0", "f8_e8m0", 1, MS_DTYPES },
    { "C64", "c64", 8, MS_DTYPES },
    { NULL, NULL, 0, MS_DTYPES },
};

typedef struct ms_pair {
    char *key, *value;
} ms_pair;

struct ms_safetensors {
    ms_context context; /* for memory and for closing, whichever thread does it */
    ms_file *file;
    char *path;
    char *header;                  /* keeps the strings, decoded where they stood */
    ms_safetensors_entry *entries; /* in the header's order while it is read, then by name */
    int64_t *sizes;                /* all shapes, one after the other */
    ms_pair *metadata;             /* by key */
    size_t entry_capacity, size_count, size_capacity, pair_count, pair_capacity;
    uint32_t count;
};

#define corrupt(context, file, ...) ms_fail(context, MS_ERROR_CORRUPT, __VA_ARGS__, (file)->path)

/* What the scanner met, with the byte of the file. */
static ms_status malformed(ms_context *context, const ms_safetensors *file, const ms_scan *scan)
{
    return corrupt(context, file, "the header, byte %zu: %s: '%s'",
                   (size_t)(scan->at - scan->begin) + 8, scan->problem);
}

/* --------------------------------------------------------------- one tensor */

/* An entry as it stands in the header; members are NULL or -1 until they were met. */
typedef struct ms_raw {
    char *dtype;
    int64_t dims, begin, end;
} ms_raw;

static ms_status scan_shape(ms_context *context, ms_safetensors *file, ms_scan *scan,
                            const char *name, ms_raw *raw)
{
    bool first = true;
    int64_t size;
    if (!ms_scan_character(scan, '[')) return malformed(context, file, scan);
    for (raw->dims = 0; ms_scan_more(scan, ']', &first); raw->dims++) {
        if (!ms_scan_size(scan, &size)) return malformed(context, file, scan);
        if (raw->dims == MS_SAFETENSORS_DIMS_MAX)
            return corrupt(context, file, "tensor '%.200s' has more than 16 dimensions: '%s'",
                           name);
        ms_status status = ms_grow(context, (void **)&file->sizes, &file->size_capacity,
                                   file->size_count + 1, sizeof *file->sizes);
        if (status) return status;
        file->sizes[file->size_count++] = size;
    }
    return scan->problem ? malformed(context, file, scan) : MS_OK;
}

/* One member of an entry; ones that nobody knows are passed over. */
static ms_status scan_member(ms_context *context, ms_safetensors *file, ms_scan *scan,
                             const char *name, ms_raw *raw)
{
    char *key;
    bool twice = false;
    if (!ms_scan_string(scan, &key) || !ms_scan_character(scan, ':'))
        return malformed(context, file, scan);
    if (strcmp(key, "dtype") == 0) {
        twice = raw->dtype != NULL;
        (void)ms_scan_string(scan, &raw->dtype);
    } else if (strcmp(key, "shape") == 0) {
        twice = raw->dims >= 0;
        ms_status status = twice ? MS_OK : scan_shape(context, file, scan, name, raw);
        if (status) return status;
    } else if (strcmp(key, "data_offsets") == 0) {
        twice = raw->begin >= 0;
        (void)(ms_scan_character(scan, '[') && ms_scan_size(scan, &raw->begin)
               && ms_scan_character(scan, ',') && ms_scan_size(scan, &raw->end)
               && ms_scan_character(scan, ']'));
    } else {
        (void)ms_scan_skip(scan);
    }
    if (twice) return corrupt(context, file, "tensor '%.200s' has '%s' twice: '%s'", name, key);
    return scan->problem ? malformed(context, file, scan) : MS_OK;
}

static ms_status find_dtype(ms_context *context, const ms_safetensors *file, const char *name,
                            ms_safetensors_entry *entry, uint64_t *width)
{
    for (const ms_safetensors_dtype *known = ms_safetensors_dtypes; known->name; known++)
        if (strcmp(known->name, name) == 0) {
            entry->dtype = known->dtype;
            entry->dtype_name = known->word;
            *width = known->bytes;
            return MS_OK;
        }
    return ms_fail(context, MS_ERROR_UNSUPPORTED,
                   "tensor '%.200s' has the unknown dtype '%.40s': '%s'", entry->name, name,
                   file->path);
}

/* The bytes of an entry's tensor; false if no file can have as many. As in ms_tensor_new, sizes of
 * 0 are left out of the product at first: they would hide that the others are too large for
 * strides. */
static bool count_bytes(const ms_safetensors_entry *entry, const int64_t *sizes, uint64_t width,
                        uint64_t *bytes)
{
    bool empty = false;
    *bytes = width;
    for (uint32_t d = 0; d < entry->dims; d++) {
        if (sizes[d] == 0) empty = true;
        else if (__builtin_mul_overflow(*bytes, (uint64_t)sizes[d], bytes) || *bytes > INT64_MAX)
            return false;
    }
    if (empty) *bytes = 0;
    return true;
}

/* Turns what stands in the header into an entry; data: where the header ends. */
static ms_status check_entry(ms_context *context, const ms_safetensors *file, const ms_raw *raw,
                             uint64_t data, ms_safetensors_entry *entry)
{
    uint64_t width = 0, bytes = 0;
    const char *missing = NULL;
    if (!raw->dtype) missing = "dtype";
    else if (raw->dims < 0) missing = "shape";
    else if (raw->begin < 0 || raw->end < 0) missing = "data_offsets";
    if (missing)
        return corrupt(context, file, "tensor '%.200s' has no %s: '%s'", entry->name, missing);
    ms_status status = find_dtype(context, file, raw->dtype, entry, &width);
    if (status) return status;
    entry->dims = (uint32_t)raw->dims;
    entry->supported = entry->dtype != MS_DTYPES && entry->dims <= MS_DIMS_MAX;
    if (!count_bytes(entry, file->sizes + file->size_count - entry->dims, width, &bytes))
        return corrupt(context, file, "tensor '%.200s' is larger than any file: '%s'", entry->name);
    if (raw->begin > raw->end || (uint64_t)(raw->end - raw->begin) != bytes)
        return corrupt(context, file,
                       "tensor '%.200s' has %" PRIu64
                       " bytes by dtype and shape, but data_offsets %" PRId64 " to %" PRId64
                       ": '%s'",
                       entry->name, bytes, raw->begin, raw->end);
    entry->offset = data + (uint64_t)raw->begin;
    entry->bytes = bytes;
    return MS_OK;
}

/* One tensor's entry in the header: its name has been read, its members follow. */
static ms_status scan_entry(ms_context *context, ms_safetensors *file, ms_scan *scan,
                            const char *name, uint64_t data)
{
    ms_raw raw = { .dims = -1, .begin = -1, .end = -1 };
    bool first = true;
    if (!ms_text_is_name(name, MS_SAFETENSORS_NAME_MAX))
        return corrupt(
            context, file,
            "the name of tensor %u is longer than 1,024 bytes or has control characters: '%s'",
            file->count + 1);
    if (file->count == MS_SAFETENSORS_COUNT_MAX)
        return corrupt(context, file, "more than %u tensors: '%s'", MS_SAFETENSORS_COUNT_MAX);
    if (!ms_scan_character(scan, '{')) return malformed(context, file, scan);
    while (ms_scan_more(scan, '}', &first)) {
        ms_status status = scan_member(context, file, scan, name, &raw);
        if (status) return status;
    }
    if (scan->problem) return malformed(context, file, scan);
    ms_status status = ms_grow(context, (void **)&file->entries, &file->entry_capacity,
                               (size_t)file->count + 1, sizeof *file->entries);
    if (status) return status;
    file->entries[file->count].name = name;
    status = check_entry(context, file, &raw, data, &file->entries[file->count]);
    if (!status) file->count++;
    return status;
}

static ms_status scan_metadata(ms_context *context, ms_safetensors *file, ms_scan *scan)
{
    bool first = true;
    ms_pair pair;
    if (!ms_scan_character(scan, '{')) return malformed(context, file, scan);
    while (ms_scan_more(scan, '}', &first)) {
        if (!ms_scan_string(scan, &pair.key) || !ms_scan_character(scan, ':')
            || !ms_scan_string(scan, &pair.value))
            return malformed(context, file, scan);
        ms_status status = ms_grow(context, (void **)&file->metadata, &file->pair_capacity,
                                   file->pair_count + 1, sizeof *file->metadata);
        if (status) return status;
        file->metadata[file->pair_count++] = pair;
    }
    return scan->problem ? malformed(context, file, scan) : MS_OK;
}

/* ------------------------------------------------------------- whole header */

static int compare_offsets(const void *a, const void *b)
{
    const ms_safetensors_entry *x = a, *y = b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    /* Empty tensors stand before the one that begins there. */
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static int compare_entries(const void *a, const void *b)
{
    return strcmp(((const ms_safetensors_entry *)a)->name, ((const ms_safetensors_entry *)b)->name);
}

static int compare_pairs(const void *a, const void *b)
{
    return strcmp(((const ms_pair *)a)->key, ((const ms_pair *)b)->key);
}

/* Tensors must fill the file from the header's end to its own without gap or overlap: nothing is
 * hidden, and nothing counts twice. */
static ms_status check_ranges(ms_context *context, ms_safetensors *file, uint64_t data,
                              uint64_t end)
{
    if (file->count > 1) qsort(file->entries, file->count, sizeof *file->entries, compare_offsets);
    uint64_t at = data;
    for (uint32_t i = 0; i < file->count; i++) {
        const ms_safetensors_entry *entry = &file->entries[i];
        if (entry->offset != at || entry->bytes > end - at)
            return corrupt(context, file,
                           "tensor '%.200s' lies at byte %" PRIu64 " with %" PRIu64
                           " bytes; its place begins at %" PRIu64 " and the file has %" PRIu64
                           ": '%s'",
                           entry->name, entry->offset, entry->bytes, at, end);
        at += entry->bytes;
    }
    if (at != end)
        return corrupt(context, file, "%" PRIu64 " bytes at the end belong to no tensor: '%s'",
                       end - at);
    return MS_OK;
}

/* Sorts by name, where names that stand twice lie side by side. */
static ms_status check_names(ms_context *context, ms_safetensors *file)
{
    if (file->count > 1) qsort(file->entries, file->count, sizeof *file->entries, compare_entries);
    for (uint32_t i = 1; i < file->count; i++)
        if (compare_entries(&file->entries[i - 1], &file->entries[i]) == 0)
            return corrupt(context, file, "the name '%.200s' stands twice: '%s'",
                           file->entries[i].name);
    if (file->pair_count > 1)
        qsort(file->metadata, file->pair_count, sizeof *file->metadata, compare_pairs);
    for (size_t i = 1; i < file->pair_count; i++)
        if (compare_pairs(&file->metadata[i - 1], &file->metadata[i]) == 0)
            return corrupt(context, file, "the metadata '%.200s' stand twice: '%s'",
                           file->metadata[i].key);
    return MS_OK;
}

/* Gives the entries their shapes. Until all were read the list of sizes may move. */
static void place_shapes(ms_safetensors *file)
{
    const int64_t *sizes = file->sizes;
    for (uint32_t i = 0; i < file->count; i++) {
        file->entries[i].shape = sizes;
        sizes += file->entries[i].dims;
    }
}

/* Scans the header's text, which lies in file->header. data and end: where it ends in the file, and
 * where the file does. */
static ms_status scan_header(ms_context *context, ms_safetensors *file, size_t length,
                             uint64_t data, uint64_t end)
{
    ms_scan scan = { .begin = file->header, .at = file->header, .end = file->header + length };
    bool first = true, has_metadata = false;
    char *name;
    if (length == 0 || file->header[0] != '{')
        return corrupt(context, file, "the header does not begin with '{': '%s'");
    (void)ms_scan_character(&scan, '{');
    while (ms_scan_more(&scan, '}', &first)) {
        if (!ms_scan_string(&scan, &name) || !ms_scan_character(&scan, ':'))
            return malformed(context, file, &scan);
        bool is_metadata = strcmp(name, "__metadata__") == 0;
        if (is_metadata && has_metadata)
            return corrupt(context, file, "__metadata__ stands twice: '%s'");
        has_metadata |= is_metadata;
        ms_status status = is_metadata ? scan_metadata(context, file, &scan)
                                       : scan_entry(context, file, &scan, name, data);
        if (status) return status;
    }
    if (scan.problem || !ms_scan_end(&scan)) return malformed(context, file, &scan);
    place_shapes(file);
    ms_status status = check_ranges(context, file, data, end);
    return status ? status : check_names(context, file);
}

/* The first 8 bytes: the length of the header, which must fit the file and our limit. */
static ms_status read_length(ms_context *context, ms_safetensors *file, uint64_t end,
                             uint64_t *length)
{
    uint8_t prefix[8];
    if (end < sizeof prefix)
        return corrupt(context, file, "%" PRIu64 " bytes are too few for a safetensors file: '%s'",
                       end);
    ms_status status = ms_file_read(context, file->file, file->path, prefix, sizeof prefix, 0);
    if (status) return status;
    *length = 0;
    for (int i = 7; i >= 0; i--) *length = *length << 8 | prefix[i];
    if (*length > end - sizeof prefix)
        return corrupt(context, file,
                       "the header should have %" PRIu64 " bytes, the file has %" PRIu64 ": '%s'",
                       *length, end);
    if (*length > MS_SAFETENSORS_HEADER_MAX)
        return corrupt(context, file,
                       "the header has %" PRIu64 " bytes; at most 32 MiB are read: '%s'", *length);
    return MS_OK;
}

static ms_status read_header(ms_context *context, ms_safetensors *file)
{
    uint64_t end, length = 0, begin = 8;
    int error = context->os->size(context->os->user, file->file, &end);
    if (error) return ms_fail_os(context, error, "cannot tell the size of", file->path);
    ms_status status = read_length(context, file, end, &length);
    if (status) return status;
    status =
        ms_bytes_new(context, (size_t)length + 1, "a safetensors header", (void **)&file->header);
    if (!status)
        status = ms_file_read(context, file->file, file->path, file->header, (size_t)length, begin);
    if (status) return status;
    file->header[length] = 0;
    return scan_header(context, file, (size_t)length, begin + length, end);
}

/* ------------------------------------------------------------------- public */

ms_status ms_safetensors_open(ms_context *context, const char *path, ms_safetensors **out)
{
    ms_safetensors *file = NULL;
    ms_status status = ms_allocate(context, sizeof *file, "a safetensors reader", (void **)&file);
    if (status) return status;
    ms_context_init(&file->context, context->os);
    status = ms_text_join(context, path, "", &file->path);
    if (!status) status = ms_file_open(context, path, MS_FILE_READ, &file->file);
    if (!status) status = read_header(context, file);
    if (status) {
        ms_safetensors_close(file);
        return status;
    }
    *out = file;
    return MS_OK;
}

void ms_safetensors_close(ms_safetensors *file)
{
    if (file == NULL) return;
    ms_context context = file->context;
    ms_file_close(&context, file->file);
    ms_release(&context, file->header);
    ms_release(&context, file->metadata);
    ms_release(&context, file->entries);
    ms_release(&context, file->sizes);
    ms_release(&context, file->path);
    ms_release(&context, file);
}

uint32_t ms_safetensors_count(const ms_safetensors *file) { return file->count; }
const ms_safetensors_entry *ms_safetensors_at(const ms_safetensors *file, uint32_t index)
{
    return &file->entries[index];
}

const ms_safetensors_entry *ms_safetensors_find(const ms_safetensors *file, const char *name)
{
    ms_safetensors_entry key = { .name = name };
    return file->count ? bsearch(&key, file->entries, file->count, sizeof key, compare_entries)
                       : NULL;
}

bool ms_safetensors_metadata(const ms_safetensors *file, uint32_t index, const char **key,
                             const char **value)
{
    if (index >= file->pair_count) return false;
    *key = file->metadata[index].key;
    *value = file->metadata[index].value;
    return true;
}

ms_status ms_safetensors_read(ms_context *context, ms_safetensors *file,
                              const ms_safetensors_entry *entry, void *buffer)
{
    return ms_file_read(context, file->file, file->path, buffer, (size_t)entry->bytes,
                        entry->offset);
}

ms_status ms_safetensors_load(ms_engine *engine, ms_safetensors *file,
                              const ms_safetensors_entry *entry, uint64_t *hash, ms_tensor **out)
{
    ms_context *context = ms_engine_context(engine);
    uint8_t *data = NULL;
    ms_tensor *tensor = NULL;
    if (!entry->supported)
        return ms_fail(context, MS_ERROR_UNSUPPORTED,
                       "tensor '%.200s' is %s with %u dimensions, which cannot be loaded: '%s'",
                       entry->name, entry->dtype_name, entry->dims, file->path);
    /* Without data only the shape counts, and nothing is read. */
    bool values = !ms_engine_is_sim(engine);
    ms_status status =
        values ? ms_bytes_new(context, (size_t)entry->bytes, entry->name, (void **)&data) : MS_OK;
    if (!status && values) status = ms_safetensors_read(context, file, entry, data);
    if (!status && values && hash) *hash = ms_hash(data, (size_t)entry->bytes, 0);
    /* Kernels count on booleans being 0 or 1. */
    for (uint64_t i = 0; !status && values && entry->dtype == MS_BOOL && i < entry->bytes; i++)
        data[i] = data[i] != 0;
    if (!status) status = ms_tensor_new(engine, entry->dtype, entry->dims, entry->shape, &tensor);
    if (!status && entry->bytes) status = ms_tensor_write(tensor, data, (size_t)entry->bytes);
    ms_release(context, data);
    if (status) {
        ms_tensor_release(tensor);
        return status;
    }
    *out = tensor;
    return MS_OK;
}
