/* safetensors_read.c: reading safetensors: 8 bytes of header length, a JSON header, then the
 * tensors' bytes without gaps.
 *
 * The file is not trusted. Its header is scanned once, with memory for the tables alone, and
 * everything in it is checked against the file's size before it is used. */
#include "io/path.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "io/safetensors.h"
#include "io/scan.h"

/* The writer searches this table by the engine's dtype, the reader by the name in files. */
const ms_safetensors_dtype ms_safetensors_dtypes[] = {
    { "F32", "f32", 4, MS_F32 },
    { "F16", "f16", 2, MS_F16 },
    { "BF16", "bf16", 2, MS_BF16 },
    { "I64", "i64", 8, MS_I64 },
    { "I32", "i32", 4, MS_I32 },
    { "U16", "u16", 2, MS_U16 },
    { "U8", "u8", 1, MS_U8 },
    { "BOOL", "bool", 1, MS_BOOL },
    /* Dtypes that the engine lacks: a file that has such tensors can be opened for its other
     * ones. */
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

/* One pair of the metadata. Both strings are in the header's memory. Pairs are read in the file's
 * order and sorted at the end. */
typedef struct ms_pair {
    char *key, *value;
} ms_pair;

/* A reader. Once open has succeeded, everything in it is constant, so several threads may read
 * tensors at once, each with its own context for errors. Names, metadata and dtype names point into
 * `header`, and shapes into `sizes`; both live as long as the reader. */
#define MS_COPIED_MOST (UINT64_C(8) << 20) /* bytes of tensors between two waits */

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
    _Atomic uint64_t loaded; /* bytes of tensors */
};

/* MS_ERROR_CORRUPT with a message whose last conversion is the file's path. */
#define corrupt(context, file, ...) ms_fail(context, MS_ERROR_CORRUPT, __VA_ARGS__, (file)->path)

/* The scanner's problem as an error. The header begins at byte 8 of the file, so that is added to
 * the scanner's position. */
static ms_status malformed(ms_context *context, const ms_safetensors *file, const ms_scan *scan)
{
    return corrupt(context, file, "the header, byte %zu: %s: '%s'",
                   (size_t)(scan->at - scan->begin) + 8, scan->problem);
}

/* --------------------------------------------------------------- one tensor */

/* A tensor's entry as the header gives it, before any check. Members are NULL or -1 until they are
 * met, so that a missing one and a repeated one are both recognised. */
typedef struct ms_raw {
    char *dtype;
    int64_t dims, begin, end;
} ms_raw;

/* Appends the sizes to the common list, which may move as it grows; entries get their pointers only
 * in place_shapes. */
static ms_status scan_shape(ms_context *context, ms_safetensors *file, ms_scan *scan,
                            const char *name, ms_raw *raw)
{
    bool first = true;
    int64_t size;
    if (!ms_scan_character(scan, '[')) return malformed(context, file, scan);
    for (raw->dims = 0; ms_scan_more(scan, ']', &first); raw->dims++) {
        if (!ms_scan_size(scan, &size)) return malformed(context, file, scan);
        /* The limit bounds what a hostile shape can make the list of sizes take. */
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

/* Reads one member of an entry. Unknown members are skipped, as later versions of the format may
 * add some. A member that appears twice is an error: two readers could pick different ones. */
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
        /* A second shape is not read: its sizes would join those of the first. */
        ms_status status = twice ? MS_OK : scan_shape(context, file, scan, name, raw);
        if (status) return status;
    } else if (strcmp(key, "data_offsets") == 0) {
        twice = raw->begin >= 0;
        /* Problems are looked at once, at the end of this function. */
        (void)(ms_scan_character(scan, '[') && ms_scan_size(scan, &raw->begin)
               && ms_scan_character(scan, ',') && ms_scan_size(scan, &raw->end)
               && ms_scan_character(scan, ']'));
    } else {
        /* Skipping needs no memory, whatever the member holds. */
        (void)ms_scan_skip(scan);
    }
    if (twice) return corrupt(context, file, "tensor '%.200s' has '%s' twice: '%s'", name, key);
    return scan->problem ? malformed(context, file, scan) : MS_OK;
}

/* Finds the dtype by its name in files. An unknown name is an error for the whole file, since
 * without its size the ranges cannot be checked. */
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

/* The bytes of an entry's tensor; false if the product overflows 63 bits, which no file can have.
 * As in ms_tensor_new, sizes of 0 are left out of the product at first: they would hide that the
 * other sizes are too large for strides. */
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

/* Turns a raw entry into one that can be trusted; `data` is the byte at which the header ends. Its
 * shape is still the last of file->sizes. That the range is inside the file is left to
 * check_ranges, which sees all entries. */
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
    /* An entry that cannot be loaded is still listed, and its range is checked. */
    entry->supported = entry->dtype != MS_DTYPES && entry->dims <= MS_DIMS_MAX;
    if (!count_bytes(entry, file->sizes + file->size_count - entry->dims, width, &bytes))
        return corrupt(context, file, "tensor '%.200s' is larger than any file: '%s'", entry->name);
    /* Both offsets are below 2^63, so the difference is exact. */
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

/* Reads one tensor's entry after its name. The count is raised only at the end, so file->count
 * never includes an entry that was not checked. */
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
    /* Before the entry is read: its members could not be kept. */
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
    /* The name is in the header's memory, where the scanner has decoded it. */
    file->entries[file->count].name = name;
    status = check_entry(context, file, &raw, data, &file->entries[file->count]);
    if (!status) file->count++;
    return status;
}

/* Reads the member __metadata__: pairs of strings and nothing else, by the format's rules. */
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

/* Order of the tensors' bytes in the file. An empty tensor precedes the tensor that begins at the
 * same byte; the other order would look like an overlap. */
static int compare_offsets(const void *a, const void *b)
{
    const ms_safetensors_entry *x = a, *y = b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    /* Empty tensors are before the one that begins there. */
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

/* By bytes, as strcmp compares: the same order in every locale, and the one that bsearch uses
 * later. */
static int compare_entries(const void *a, const void *b)
{
    return strcmp(((const ms_safetensors_entry *)a)->name, ((const ms_safetensors_entry *)b)->name);
}

/* Metadata are sorted as well, so that duplicates are neighbours. */
static int compare_pairs(const void *a, const void *b)
{
    return strcmp(((const ms_pair *)a)->key, ((const ms_pair *)b)->key);
}

/* Requires that the tensors fill the file from the header's end to the file's end without gap or
 * overlap: a gap could hide data, and an overlap would make a small file claim more memory than it
 * has. In order of offsets, one pass shows both. */
static ms_status check_ranges(ms_context *context, ms_safetensors *file, uint64_t data,
                              uint64_t end)
{
    if (file->count > 1) qsort(file->entries, file->count, sizeof *file->entries, compare_offsets);
    uint64_t at = data;
    for (uint32_t i = 0; i < file->count; i++) {
        const ms_safetensors_entry *entry = &file->entries[i];
        /* at never exceeds end, so the subtraction cannot wrap. */
        if (entry->offset != at || entry->bytes > end - at)
            return corrupt(context, file,
                           "tensor '%.200s' lies at byte %" PRIu64 " with %" PRIu64
                           " bytes; its place begins at %" PRIu64 " and the file has %" PRIu64
                           ": '%s'",
                           entry->name, entry->offset, entry->bytes, at, end);
        at += entry->bytes;
    }
    /* Bytes that belong to no tensor could be anything, and another reader may see them as data. */
    if (at != end)
        return corrupt(context, file, "%" PRIu64 " bytes at the end belong to no tensor: '%s'",
                       end - at);
    return MS_OK;
}

/* Sorts entries and metadata by name, where names that occur twice are neighbours.
 * ms_safetensors_find needs the order of the entries. It runs after check_ranges, which sorts by
 * offset. */
static ms_status check_names(ms_context *context, ms_safetensors *file)
{
    if (file->count > 1) qsort(file->entries, file->count, sizeof *file->entries, compare_entries);
    for (uint32_t i = 1; i < file->count; i++)
        if (compare_entries(&file->entries[i - 1], &file->entries[i]) == 0)
            return corrupt(context, file, "the name '%.200s' occurs twice: '%s'",
                           file->entries[i].name);
    if (file->pair_count > 1)
        qsort(file->metadata, file->pair_count, sizeof *file->metadata, compare_pairs);
    for (size_t i = 1; i < file->pair_count; i++)
        if (compare_pairs(&file->metadata[i - 1], &file->metadata[i]) == 0)
            return corrupt(context, file, "the metadata '%.200s' stand twice: '%s'",
                           file->metadata[i].key);
    return MS_OK;
}

/* Gives the entries their shapes. It runs once all sizes were read, as the list may move until
 * then, and before the entries are sorted, while they are in the order of the sizes. */
static void place_shapes(ms_safetensors *file)
{
    const int64_t *sizes = file->sizes;
    for (uint32_t i = 0; i < file->count; i++) {
        file->entries[i].shape = sizes;
        sizes += file->entries[i].dims;
    }
}

/* Scans the text in file->header. `data` is the byte of the file at which the header ends, and
 * `end` the size of the file. The first byte must be '{' without white space before it, as the
 * format demands. */
static ms_status scan_header(ms_context *context, ms_safetensors *file, size_t length,
                             uint64_t data, uint64_t end)
{
    ms_scan scan = { .begin = file->header, .at = file->header, .end = file->header + length };
    /* __metadata__ may be anywhere among the tensors. */
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
            return corrupt(context, file, "__metadata__ occurs twice: '%s'");
        has_metadata |= is_metadata;
        ms_status status = is_metadata ? scan_metadata(context, file, &scan)
                                       : scan_entry(context, file, &scan, name, data);
        if (status) return status;
    }
    if (scan.problem || !ms_scan_end(&scan)) return malformed(context, file, &scan);
    /* Before the sorts below, see there. */
    place_shapes(file);
    ms_status status = check_ranges(context, file, data, end);
    return status ? status : check_names(context, file);
}

/* Reads the first 8 bytes: the header's length, little-endian. It must fit the file and our limit
 * before memory is taken for it. */
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
    /* Little-endian: the last byte is the highest. */
    for (int i = 7; i >= 0; i--) *length = *length << 8 | prefix[i];
    /* Compared with what is left of the file, so the sum 8 + length cannot overflow. */
    if (*length > end - sizeof prefix)
        return corrupt(context, file,
                       "the header should have %" PRIu64 " bytes, the file has %" PRIu64 ": '%s'",
                       *length, end);
    if (*length > MS_SAFETENSORS_HEADER_MAX)
        return corrupt(context, file,
                       "the header has %" PRIu64 " bytes; at most 32 MiB are read: '%s'", *length);
    return MS_OK;
}

/* The header gets one more byte for a zero at its end: the scanner stops there without comparing
 * positions. */
static ms_status read_header(ms_context *context, ms_safetensors *file)
{
    /* The header begins after the 8 bytes of its length. */
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

/* One close undoes every error: it accepts a reader of which only a part was made. */
ms_status ms_safetensors_open(ms_context *context, const char *path, ms_safetensors **out)
{
    ms_safetensors *file = NULL;
    ms_status status = ms_allocate(context, sizeof *file, "a safetensors reader", (void **)&file);
    if (status) return status;
    ms_context_init(&file->context, context->os);
    /* The path is kept for the messages of later reads. */
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

/* The context is copied first, since it goes with the reader. Everything may be NULL: open calls
 * this after a failure half way. */
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

/* Constant once the file is open, as is all that follows. */
uint32_t ms_safetensors_count(const ms_safetensors *file) { return file->count; }
/* index must be below the count; entries do not move, so the pointer is good until close. */
const ms_safetensors_entry *ms_safetensors_at(const ms_safetensors *file, uint32_t index)
{
    return &file->entries[index];
}

/* A binary search: entries are sorted by name once the file is open. */
const ms_safetensors_entry *ms_safetensors_find(const ms_safetensors *file, const char *name)
{
    /* compare_entries looks at the name alone. */
    ms_safetensors_entry key = { .name = name };
    return file->count ? bsearch(&key, file->entries, file->count, sizeof key, compare_entries)
                       : NULL;
}

/* By key, in the order of check_names. */
bool ms_safetensors_metadata(const ms_safetensors *file, uint32_t index, const char **key,
                             const char **value)
{
    if (index >= file->pair_count) return false;
    *key = file->metadata[index].key;
    *value = file->metadata[index].value;
    return true;
}

/* As ms_safetensors_read, of some of the bytes. */
ms_status ms_safetensors_read_range(ms_context *context, ms_safetensors *file,
                                    const ms_safetensors_entry *entry, uint64_t begin,
                                    uint64_t bytes, void *buffer)
{
    return ms_file_read(context, file->file, file->path, buffer, (size_t)bytes,
                        entry->offset + begin);
}

/* The range was checked at open. A file that was truncated since then gives MS_ERROR_CORRUPT, since
 * it is read and not mapped. */
ms_status ms_safetensors_read(ms_context *context, ms_safetensors *file,
                              const ms_safetensors_entry *entry, void *buffer)
{
    return ms_file_read(context, file->file, file->path, buffer, (size_t)entry->bytes,
                        entry->offset);
}

/* The engine copies what is written, and keeps the copy until the stream has used it. A host that
 * reads faster than that would have the whole file in copies, so it waits now and then; not where
 * waiting is refused. */
static ms_status limit_copies(ms_engine *engine, ms_safetensors *file, uint64_t bytes)
{
    uint64_t loaded = atomic_fetch_add(&file->loaded, bytes) + bytes;
    if (loaded / MS_COPIED_MOST == (loaded - bytes) / MS_COPIED_MOST) return MS_OK;
    return ms_engine_check_sync(engine) ? MS_OK : ms_stream_sync(ms_engine_current(engine));
}

/* The values pass through host memory, because a device may have its own. The hash covers the
 * file's bytes, so it is taken before booleans are normalised. */
ms_status ms_safetensors_load(ms_engine *engine, ms_safetensors *file,
                              const ms_safetensors_entry *entry, uint64_t *hash, ms_tensor **out)
{
    ms_context *context = ms_engine_context(engine);
    uint8_t *data = NULL;
    ms_tensor *tensor = NULL;
    /* Such a tensor is refused here and not at open, so that the file's other tensors can be
     * loaded. */
    if (!entry->supported)
        return ms_fail(context, MS_ERROR_UNSUPPORTED,
                       "tensor '%.200s' is %s with %u dimensions, which cannot be loaded: '%s'",
                       entry->name, entry->dtype_name, entry->dims, file->path);
    /* An engine without values needs only the shape; the file's data are not read. */
    bool values = !ms_engine_is_sim(engine);
    ms_status status =
        values ? ms_bytes_new(context, (size_t)entry->bytes, entry->name, (void **)&data) : MS_OK;
    if (!status && values) status = ms_safetensors_read(context, file, entry, data);
    if (!status && values && hash) *hash = ms_hash(data, (size_t)entry->bytes, 0);
    /* A file may hold any byte for true; kernels count on 0 or 1. */
    for (uint64_t i = 0; !status && values && entry->dtype == MS_BOOL && i < entry->bytes; i++)
        data[i] = data[i] != 0;
    if (!status) status = ms_tensor_new(engine, entry->dtype, entry->dims, entry->shape, &tensor);
    /* ms_tensor_write copies, so `data` may go right after it. On the sim device data is NULL and
     * only the order counts. */
    if (!status && entry->bytes) status = ms_tensor_write(tensor, data, (size_t)entry->bytes);
    ms_release(context, data);
    if (!status && values) status = limit_copies(engine, file, entry->bytes);
    if (status) {
        ms_tensor_release(tensor);
        return status;
    }
    *out = tensor;
    return MS_OK;
}
