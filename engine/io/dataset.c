/* dataset.c: data sets: bytes of files and folders, token shards, parts of data sets. */
#include "io/dataset.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#define FOLDERS_DEEP 64 /* deeper can only be a link to a parent */

/* --------------------------------------------------------------- references */

/* The result has one reference, which the caller hands to ms_dataset_of or gives back. A width of 1
 * is right for bytes and images; token shards set their own. */
ms_status ms_data_new(ms_context *context, ms_data **out)
{
    ms_status status = ms_allocate(context, sizeof **out, "a data set", (void **)out);
    if (status) return status;
    /* A context of its own: the data may outlive the caller's, and go on any thread. */
    ms_context_init(&(*out)->context, context->os);
    /* Atomic, because a loader's thread and the host may release at the same time. */
    atomic_init(&(*out)->references, 1);
    (*out)->width = 1;
    return MS_OK;
}

/* The subtraction is sequentially consistent: whoever releases last sees all that other threads
 * have done with the data, and may free it. It runs on any thread, hence the data's own context. */
void ms_data_release(ms_data *data)
{
    if (data == NULL || atomic_fetch_sub(&data->references, 1) != 1) return;
    ms_context context = data->context;
    ms_release(&context, data->samples);
    ms_release(&context, data->labels);
    ms_release(&context, data->masks);
    ms_release(&context, data);
}

/* A part of data, with one reference of its own. The caller counts its reference to data. */
static ms_status dataset_new(ms_context *context, ms_data *data, uint64_t first, uint64_t count,
                             ms_dataset **out)
{
    ms_dataset *made = NULL;
    ms_status status = ms_allocate(context, sizeof *made, "a data set", (void **)&made);
    if (status) return status;
    made->data = data;
    made->first = first;
    made->count = count;
    atomic_init(&made->references, 1);
    *out = made;
    return MS_OK;
}

/* The whole of the data. The caller's reference to data becomes that of the data set. */
ms_status ms_dataset_of(ms_context *context, ms_data *data, ms_dataset **out)
{
    return dataset_new(context, data, 0, data->count, out);
}

/* Loaders, whose thread reads the data, hold a reference of their own. */
ms_dataset *ms_dataset_retain(ms_dataset *dataset)
{
    atomic_fetch_add(&dataset->references, 1);
    return dataset;
}

/* The data's context is used, as it is for ms_data_release: the last reference may go on any
 * thread. It is copied, since data may go with the next line. */
void ms_dataset_release(ms_dataset *dataset)
{
    if (dataset == NULL || atomic_fetch_sub(&dataset->references, 1) != 1) return;
    ms_context context = dataset->data->context;
    ms_data_release(dataset->data);
    ms_release(&context, dataset);
}

/* Of this part, not of the data that it shares. */
uint64_t ms_dataset_size(const ms_dataset *dataset) { return dataset->count; }
bool ms_dataset_has_tokens(const ms_dataset *dataset) { return dataset->data->labels == NULL; }
bool ms_dataset_is_masked(const ms_dataset *dataset) { return dataset->data->masks != NULL; }
ms_bare_shards ms_dataset_bare(const ms_dataset *dataset) { return dataset->data->bare; }

uint64_t ms_dataset_memory(const ms_dataset *dataset, const void **data)
{
    const ms_data *held = dataset->data;
    uint64_t sample = held->labels ? (uint64_t)held->rows * held->columns + 1 : held->width;
    *data = held;
    return held->count * sample + (held->masks ? (held->count + 7) / 8 : 0);
}

/* The two parts take their references to the data together and last, when nothing can fail any
 * more. That is why the error path releases `a` as plain memory: it holds no reference yet. */
ms_status ms_dataset_split(ms_context *context, ms_dataset *dataset, double fraction,
                           ms_dataset **first, ms_dataset **rest)
{
    ms_dataset *a = NULL, *b = NULL;
    /* Written so that NaN is refused, too. */
    if (!(fraction >= 0 && fraction <= 1))
        return ms_fail(context, MS_ERROR_ARGUMENT, "split: the fraction %g is not within 0 and 1",
                       fraction);
    /* A decimal fraction is stored up to 2^-54 too low, and the product is rounded: 0.29 of 100
     * would be 28. */
    uint64_t count =
        (uint64_t)((double)dataset->count * fraction + (double)dataset->count * 0x1p-52);
    if (count > dataset->count) count = dataset->count;
    ms_status status = dataset_new(context, dataset->data, dataset->first, count, &a);
    if (!status)
        status =
            dataset_new(context, dataset->data, dataset->first + count, dataset->count - count, &b);
    if (status) {
        ms_release(context, a);
        return status;
    }
    /* The source's own reference is still held, so the data cannot go before this. */
    atomic_fetch_add(&dataset->data->references, 2);
    *first = a;
    *rest = b;
    return MS_OK;
}

/* -------------------------------------------------------------------- bytes */

/* Appends bytes [offset, end) of a file to the samples. data->width divides their number: callers
 * have checked it. */
static ms_status append_file(ms_context *context, ms_data *data, ms_file *file, const char *path,
                             uint64_t offset, uint64_t end)
{
    /* The array grows geometrically, so many small files cost a few copies of each byte. */
    size_t used = (size_t)data->count * data->width, more = (size_t)(end - offset);
    ms_status status = ms_grow(context, (void **)&data->samples, &data->capacity, used + more, 1);
    if (!status) status = ms_file_read(context, file, path, data->samples + used, more, offset);
    if (!status) data->count += more / data->width;
    return status;
}

/* Opens a file for reading and gives its size. On failure *file is NULL, which ms_file_close
 * accepts. */
static ms_status open_sized(ms_context *context, const char *path, ms_file **file, uint64_t *bytes)
{
    ms_status status = ms_file_open(context, path, MS_FILE_READ, file);
    if (status) return status;
    /* Of the open file: another file may get the path's name meanwhile. */
    int error = context->os->size(context->os->user, *file, bytes);
    if (!error) return MS_OK;
    ms_file_close(context, *file);
    *file = NULL;
    return ms_fail_os(context, error, "cannot tell the size of", path);
}

/* For bytes, where a file has no header: its size is what is read. */
static ms_status append_whole_file(ms_context *context, ms_data *data, const char *path)
{
    ms_file *file = NULL;
    uint64_t bytes = 0;
    ms_status status = open_sized(context, path, &file, &bytes);
    if (!status) status = append_file(context, data, file, path, 0, bytes);
    ms_file_close(context, file);
    return status;
}

static ms_status append_path(ms_context *context, ms_data *data, const char *path, int depth);

/* Names are sorted within each folder, so the order of the bytes does not depend on the file
 * system. Hidden names are left out: editors and version control keep their own files there. */
static ms_status append_folder(ms_context *context, ms_data *data, const char *path, int depth)
{
    ms_names names = { 0 };
    ms_status status = ms_folder_list(context, path, &names);
    for (size_t i = 0; i < names.count && !status; i++) {
        char *inner = NULL;
        /* Hidden files are those of editors and version control, not data. */
        if (names.items[i][0] == '.') continue;
        status = ms_path_join(context, path, names.items[i], &inner);
        if (!status) status = append_path(context, data, inner, depth + 1);
        ms_release(context, inner);
    }
    ms_names_free(context, &names);
    return status;
}

/* Appends all files below a path, each once. A link to a parent would recurse for ever; the depth
 * limit turns that into an error. */
static ms_status append_path(ms_context *context, ms_data *data, const char *path, int depth)
{
    ms_file_info info;
    /* Links are followed: one to a file or a folder counts as that. */
    int error = context->os->info(context->os->user, path, &info);
    if (error) return ms_fail_os(context, error, "cannot open", path);
    if (!info.is_directory) return append_whole_file(context, data, path);
    if (depth >= FOLDERS_DEEP)
        return ms_fail(context, MS_ERROR_IO,
                       "'%s' is more than %d folders deep; does a link lead back to a parent?",
                       path, FOLDERS_DEEP);
    return append_folder(context, data, path, depth);
}

/* No byte at all is an error: an empty data set would fail later, in the loader, without the
 * path. */
ms_status ms_dataset_bytes(ms_context *context, const char *const *paths, uint32_t count,
                           ms_dataset **out)
{
    ms_data *data = NULL;
    ms_status status = ms_data_new(context, &data);
    for (uint32_t i = 0; i < count && !status; i++)
        status = append_path(context, data, paths[i], 0);
    if (!status && data->count == 0) {
        /* The first path represents all: a list of them may be long. */
        if (count)
            status = ms_fail(context, MS_ERROR_NOT_FOUND, "there is not one byte of data in '%s'",
                             paths[0]);
        else
            status =
                ms_fail(context, MS_ERROR_NOT_FOUND, "there is not one byte of data in no path");
    }
    if (!status) status = ms_dataset_of(context, data, out);
    if (status) ms_data_release(data);
    return status;
}

/* ------------------------------------------------------------- token shards */

#define SHARD_HEADER 1024 /* llm.c: 256 numbers of 32 bits: magic, version, count of tokens */

/* Where the tokens of a shard are in its file, in bytes, and the bytes of one token. */
typedef struct ms_shard {
    uint64_t begin, end;
    uint32_t width;
} ms_shard;

/* Byte by byte, because the header need not be aligned, nor the machine little-endian. */
static uint32_t little_endian(const uint8_t *at)
{
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* A format of token shards with a header, recognised by its first four bytes. Both known ones are
 * llm.c's: tokens of 16 bits for GPT-2's vocabulary, of 32 bits for larger ones. SHARD_HEADER bytes
 * come before the tokens. */
typedef struct ms_shard_format {
    uint32_t magic, version, width;
} ms_shard_format;

/* NULL if no format has this magic number. */
static const ms_shard_format *find_format(uint32_t magic)
{
    static const ms_shard_format known[] = { { 20240520, 1, 2 }, { 20240801, 7, 4 } };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].magic == magic) return &known[i];
    return NULL;
}

/* A shard with a header must have the format's version and exactly the size that its number of
 * tokens needs: a truncated download is an error here, not a shorter data set. */
static ms_status check_shard(ms_context *context, const char *path, uint64_t bytes,
                             const ms_shard_format *format, const uint8_t *header, ms_shard *out)
{
    uint32_t version = little_endian(header + 4), tokens = little_endian(header + 8);
    /* 32 bits of count times 4 bytes cannot overflow 64. */
    uint64_t end = SHARD_HEADER + (uint64_t)tokens * format->width;
    if (version != format->version)
        return ms_fail(context, MS_ERROR_CORRUPT,
                       "'%s', byte 4: a token shard of version %u; its magic number has version %u",
                       path, version, format->version);
    if (bytes != end)
        return ms_fail(context, MS_ERROR_CORRUPT,
                       "'%s', byte 8: a token shard of %u tokens has %" PRIu64
                       " bytes, this one has %" PRIu64,
                       path, tokens, end, bytes);
    *out = (ms_shard){ .begin = SHARD_HEADER, .end = end, .width = format->width };
    return MS_OK;
}

/* Finds the tokens of a shard. A file without one of the magic numbers is taken for nanoGPT's
 * format, which has no header: tokens of two bytes. Such a file of fewer than 12 bytes is legal;
 * its header stays zero, which is no magic number. A file of text that happens to begin with a
 * magic number fails the check of its size. */
static ms_status read_shard_header(ms_context *context, ms_file *file, const char *path,
                                   uint64_t bytes, ms_shard *out)
{
    uint8_t header[12] = { 0 };
    /* Magic, version and count are all that is used of the header. */
    if (bytes >= sizeof header) {
        ms_status status = ms_file_read(context, file, path, header, sizeof header, 0);
        if (status) return status;
    }
    const ms_shard_format *format = find_format(little_endian(header));
    if (format) return check_shard(context, path, bytes, format, header, out);
    /* Half a token means that the file is something else, or was cut off. */
    if (bytes % 2)
        return ms_fail(
            context, MS_ERROR_CORRUPT,
            "'%s', byte %" PRIu64
            ": a shard without a header has two bytes a token, and this one an odd number",
            path, bytes - 1);
    *out = (ms_shard){ .begin = 0, .end = bytes, .width = 2 };
    return MS_OK;
}

/* Tokens of two bytes that were just read. They are in memory, so looking at each costs little
 * beside reading them. */
static void note_bare(ms_bare_shards *bare, const uint8_t *at, uint64_t count)
{
    uint32_t largest = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t id = at[2 * i] | (uint32_t)at[2 * i + 1] << 8;
        largest = id > largest ? id : largest;
    }
    if (largest > bare->largest) bare->largest = largest;
    bare->tokens += count;
    bare->files++;
}

/* The masks of `count` tokens that come after `before` others; bits NULL: all are targets. */
static ms_status append_mask(ms_context *context, ms_data *data, uint64_t before, uint64_t count,
                             const uint8_t *bits)
{
    size_t bytes = (size_t)((before + count + 7) / 8);
    bool is_first = data->masks == NULL;
    ms_status status = ms_grow(context, (void **)&data->masks, &data->mask_capacity, bytes, 1);
    if (status) return status;
    if (is_first) memset(data->masks, 0xff, (size_t)(before + 7) / 8);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t at = before + i;
        uint8_t bit = (uint8_t)(1 << at % 8);
        bool learned = !bits || bits[i / 8] >> i % 8 & 1;
        data->masks[at / 8] =
            (uint8_t)(learned ? data->masks[at / 8] | bit : data->masks[at / 8] & ~bit);
    }
    return MS_OK;
}

/* Reads NAME.mask beside NAME.bin, if it is there: a bit for each of the shard's `count` tokens,
 * and nothing else. Shards without one have targets only. */
static ms_status read_mask(ms_context *context, ms_data *data, const char *path, uint64_t before,
                           uint64_t count)
{
    size_t length = strlen(path);
    char *name = NULL;
    void *bits = NULL;
    size_t bytes = 0;
    ms_file_info info;
    if (length < 4 || strcmp(path + length - 4, ".bin") != 0)
        return data->masks ? append_mask(context, data, before, count, NULL) : MS_OK;
    ms_status status = ms_bytes_new(context, length + 2, "a path", (void **)&name);
    if (status) return status;
    memcpy(name, path, length - 4);
    memcpy(name + length - 4, ".mask", 6);
    int error = context->os->info(context->os->user, name, &info);
    if (error && error != -ENOENT) status = ms_fail_os(context, error, "cannot open", name);
    else if (!error) status = ms_file_read_all(context, name, (count + 7) / 8, &bits, &bytes);
    if (!status && !error && bytes != (count + 7) / 8)
        status = ms_fail(context, MS_ERROR_CORRUPT,
                         "'%s' has %zu bytes, and the mask of the %" PRIu64
                         " tokens of '%s' has %" PRIu64,
                         name, bytes, count, path, (count + 7) / 8);
    if (!status && (!error || data->masks))
        status = append_mask(context, data, before, count, bits);
    ms_release(context, bits);
    ms_release(context, name);
    return status;
}

/* All shards of a data set have one width: the samples are a single array that the loader
 * indexes. */
static ms_status append_shard(ms_context *context, ms_data *data, const char *path)
{
    ms_file *file = NULL;
    uint64_t bytes = 0;
    ms_shard shard = { 0 };
    ms_status status = open_sized(context, path, &file, &bytes);
    if (!status) status = read_shard_header(context, file, path, bytes, &shard);
    /* The width is that of the first shard that had tokens. */
    if (!status && data->count > 0 && data->width != shard.width)
        status = ms_fail(
            context, MS_ERROR_MISMATCH,
            "'%s' has tokens of %u bytes, the shards before it of %u: they are not of one data set",
            path, shard.width, data->width);
    if (!status) {
        /* Before append_file, which divides by it. */
        data->width = shard.width;
        uint64_t before = data->count;
        status = append_file(context, data, file, path, shard.begin, shard.end);
        if (!status && shard.begin == 0 && data->count > before)
            note_bare(&data->bare, data->samples + before * shard.width, data->count - before);
        if (!status) status = read_mask(context, data, path, before, data->count - before);
    }
    ms_file_close(context, file);
    return status;
}

/* Shards are appended in the order of the paths, which is the order of the text. */
ms_status ms_dataset_tokens(ms_context *context, const char *const *paths, uint32_t count,
                            ms_dataset **out)
{
    ms_data *data = NULL;
    ms_status status = ms_data_new(context, &data);
    for (uint32_t i = 0; i < count && !status; i++) status = append_shard(context, data, paths[i]);
    if (!status && data->count == 0) {
        if (count)
            status =
                ms_fail(context, MS_ERROR_NOT_FOUND, "there is not one token in '%s'", paths[0]);
        else status = ms_fail(context, MS_ERROR_NOT_FOUND, "there is not one token in no path");
    }
    if (!status) status = ms_dataset_of(context, data, out);
    if (status) ms_data_release(data);
    return status;
}
