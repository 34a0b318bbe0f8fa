/* idx.c: MNIST's idx files (magic, sizes, bytes), plain or compressed by gzip. */
#include "io/dataset.h"

#include <inttypes.h>
#include <string.h>
#include <zlib.h>

/* Limit of a file and of its inflated size: deflate expands up to a thousandfold. */
#define IDX_BYTES_MAX (UINT64_C(1) << 31)

/* zlib's memory comes from the table, as all other memory does, so that tests can make each
 * allocation fail. */
static void *zlib_allocate(void *context, unsigned items, unsigned bytes)
{
    const ms_os *os = ((ms_context *)context)->os;
    size_t size;
    return ms_multiply(items, bytes, &size) ? os->allocate(os->user, size, 16) : NULL;
}

/* The counterpart of zlib_allocate. */
static void zlib_release(void *context, void *memory) { ms_release(context, memory); }

/* Expands into *data, which grows, until the data ends or zlib reports something; that code is
 * *result. The size is not known in advance: gzip stores it modulo 2^32 and a hostile file may be.
 * Therefore the limit is checked before every step. *data belongs to the caller, also after an
 * error. 64 KiB are the least room for each step, so zlib always can go on. */
static ms_status inflate_into(ms_context *context, const char *path, z_stream *stream,
                              uint8_t **data, int *result)
{
    /* The stream's own count of bytes is the position in *data, which may move as it grows. */
    size_t capacity = 0;
    for (*result = Z_OK; *result == Z_OK;) {
        if (stream->total_out >= IDX_BYTES_MAX)
            return ms_fail(context, MS_ERROR_CORRUPT, "'%s' expands to more than 2 GiB", path);
        ms_status status =
            ms_grow(context, (void **)data, &capacity, stream->total_out + (64u << 10), 1);
        if (status) return status;
        stream->next_out = *data + stream->total_out;
        stream->avail_out = (unsigned)(capacity - stream->total_out);
        *result = inflate(stream, Z_NO_FLUSH);
    }
    return MS_OK;
}

/* Accepts only a stream that is complete and fills the file. A checksum error arrives here as a
 * result other than Z_STREAM_END, with zlib's message. */
static ms_status check_end(ms_context *context, const char *path, const z_stream *stream,
                           int result)
{
    /* A lack of memory is not the file's fault and must not be reported as such. */
    if (result == Z_MEM_ERROR)
        return ms_fail(context, MS_ERROR_MEMORY, "'%s': no memory for zlib", path);
    if (result == Z_STREAM_END && !stream->avail_in) return MS_OK;
    const char *problem =
        result == Z_STREAM_END ? "something follows the gzip data" : "the gzip data ends too early";
    if (stream->msg) problem = stream->msg;
    return ms_fail(context, MS_ERROR_CORRUPT, "'%s', byte %lu: %s", path, stream->total_in,
                   problem);
}

/* Expands one gzip member. Bytes after it are refused: MNIST's files have none, and they would be
 * lost silently. */
static ms_status inflate_all(ms_context *context, const char *path, const uint8_t *packed,
                             size_t packed_bytes, uint8_t **out, size_t *bytes)
{
    z_stream stream = { .zalloc = zlib_allocate, .zfree = zlib_release, .opaque = context };
    uint8_t *data = NULL;
    int result;
    /* 16 + MAX_WBITS asks zlib for gzip's header and checksum. */
    if (inflateInit2(&stream, 16 + MAX_WBITS) != Z_OK)
        return ms_fail(context, MS_ERROR_MEMORY, "'%s': no memory for zlib", path);
    stream.next_in = (uint8_t *)(uintptr_t)packed; /* zlib only reads it */
    /* At most IDX_BYTES_MAX (read_expanded), so it fits. */
    stream.avail_in = (unsigned)packed_bytes;
    /* The stream ends on every path: zlib's own memory comes from the table, and tests count it. */
    ms_status status = inflate_into(context, path, &stream, &data, &result);
    if (!status) status = check_end(context, path, &stream, result);
    *bytes = stream.total_out;
    inflateEnd(&stream);
    if (!status) *out = data;
    else ms_release(context, data);
    return status;
}

/* The content of a file, expanded if it is gzip's. */
static ms_status read_expanded(ms_context *context, const char *path, uint8_t **out, size_t *bytes)
{
    uint8_t *data = NULL;
    size_t size = 0;
    ms_status status = ms_file_read_all(context, path, IDX_BYTES_MAX, (void **)&data, &size);
    /* gzip's magic number. An idx file begins with two zero bytes, so the two cannot be confused.
     */
    if (!status && size >= 2 && data[0] == 0x1f && data[1] == 0x8b) {
        uint8_t *packed = data;
        data = NULL;
        status = inflate_all(context, path, packed, size, &data, &size);
        ms_release(context, packed);
    }
    if (status) return status;
    *out = data;
    *bytes = size;
    return MS_OK;
}

/* The header of an idx file: two zero bytes, the type (8: unsigned bytes), the number of
 * dimensions, then each size as 32 bits, big-endian. The product of the sizes must be the rest of
 * the file; it is computed with a check for overflow, as the sizes come from the file. The number
 * of dimensions is fixed by what is read: three for images, one for labels. */
static ms_status check_idx(ms_context *context, const char *path, const uint8_t *data, size_t bytes,
                           uint32_t dims, uint32_t sizes[3], size_t *values)
{
    size_t expected = 1, header = 4 + 4 * (size_t)dims;
    /* Only unsigned bytes are read; the format has floats and integers too, which MNIST does not
     * use. */
    if (bytes < header || data[0] || data[1] || data[2] != 8 || data[3] != dims)
        return ms_fail(context, MS_ERROR_CORRUPT,
                       "'%s', byte 0: not an idx file of bytes with %u dimension%s", path, dims,
                       dims == 1 ? "" : "s");
    bool fits = true;
    for (uint32_t d = 0; d < dims; d++) {
        const uint8_t *at = data + 4 + 4 * d;
        sizes[d] = (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
        /* A size of 0 makes the product 0; ms_dataset_images refuses it. */
        fits = fits && ms_multiply(expected, sizes[d], &expected);
    }
    if (!fits || expected != bytes - header)
        return ms_fail(context, MS_ERROR_CORRUPT,
                       "'%s', byte %zu: its sizes do not fit its %zu bytes", path, header, bytes);
    *values = expected;
    return MS_OK;
}

/* Reads the values of an idx file of unsigned bytes with `dims` dimensions. The values move to the
 * start of the memory, so that the data set can release it by the address that it has. */
static ms_status read_idx(ms_context *context, const char *path, uint32_t dims, uint32_t sizes[3],
                          uint8_t **out)
{
    uint8_t *data = NULL;
    size_t bytes = 0, values = 0;
    ms_status status = read_expanded(context, path, &data, &bytes);
    if (status) return status;
    status = check_idx(context, path, data, bytes, dims, sizes, &values);
    if (status) {
        ms_release(context, data);
        return status;
    }
    /* The header of a few bytes stays behind the values; it is freed with them. */
    memmove(data, data + bytes - values, values);
    *out = data;
    return MS_OK;
}

/* data->samples and data->labels belong to data from the moment they are set: one release undoes
 * every error. */
ms_status ms_dataset_images(ms_context *context, const char *images, const char *labels,
                            ms_dataset **out)
{
    uint32_t sizes[3] = { 0 }, label_sizes[3] = { 0 };
    ms_data *data = NULL;
    ms_status status = ms_data_new(context, &data);
    if (!status) status = read_idx(context, images, 3, sizes, &data->samples);
    if (!status) status = read_idx(context, labels, 1, label_sizes, &data->labels);
    /* Also files that are each valid may not belong together: training images with test labels. */
    if (!status && sizes[0] != label_sizes[0])
        status = ms_fail(context, MS_ERROR_MISMATCH, "'%s' has %u images, '%s' %u labels", images,
                         sizes[0], labels, label_sizes[0]);
    /* An empty image would give batches of no bytes, and divisions by 0 in models. */
    if (!status && (sizes[0] == 0 || sizes[1] == 0 || sizes[2] == 0))
        status = ms_fail(context, MS_ERROR_CORRUPT, "'%s' holds no image", images);
    if (!status) {
        data->count = sizes[0];
        data->rows = sizes[1];
        data->columns = sizes[2];
        status = ms_dataset_of(context, data, out);
    }
    if (status) ms_data_release(data);
    return status;
}
