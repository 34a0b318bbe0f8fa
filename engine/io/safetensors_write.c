/* safetensors_write.c: writing safetensors, tensor by tensor, into a file that appears as a
 * whole. */
#include "io/path.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io/safetensors.h"

/* Where a tensor goes in the file. Offsets count from the end of the header until write_header has
 * written it, and from the start of the file afterwards. */
typedef struct ms_place {
    uint64_t offset, bytes;
    bool written;
} ms_place;

/* A file being written. All places are fixed when it is made, so tensors can be written in any
 * order. The context is borrowed and must outlive the writer. Memory is one place for each tensor,
 * not their data. */
struct ms_safetensors_writer {
    ms_context *context;
    ms_writer *writer;
    uint32_t count;
    ms_place *places; /* by index of the specs */
};

/* A spec and its index among the caller's, which sorting would lose. */
typedef struct ms_ordered {
    const ms_safetensors_spec *spec;
    uint32_t index;
} ms_ordered;

/* Bytes of one element, by which tensors are ordered in the file. */
static size_t spec_width(const ms_safetensors_spec *spec) { return ms_dtype_bytes(spec->dtype); }

/* Order of the tensors in the file. Wide dtypes come first, so that every tensor is aligned to its
 * elements, as the header is padded to 8 bytes. Within a width the order is by name, so that the
 * caller's order does not change the file. */
static int compare_specs(const void *a, const void *b)
{
    const ms_safetensors_spec *x = ((const ms_ordered *)a)->spec,
                              *y = ((const ms_ordered *)b)->spec;
    if (spec_width(x) != spec_width(y)) return spec_width(x) > spec_width(y) ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* The search ends because the table has every dtype of the engine. */
static const char *file_dtype(ms_dtype dtype)
{
    const ms_safetensors_dtype *known = ms_safetensors_dtypes;
    while (known->dtype != dtype) known++;
    return known->name;
}

/* Refuses names that our own reader would refuse, while nothing has been written. */
static ms_status check_spec(ms_context *context, const char *path, const ms_safetensors_spec *spec)
{
    if (!ms_text_is_name(spec->name, MS_SAFETENSORS_NAME_MAX)
        || strcmp(spec->name, "__metadata__") == 0)
        return ms_fail(context, MS_ERROR_ARGUMENT,
                       "'%s': the tensor name '%.200s' is not possible: it must be UTF-8 of at "
                       "most 1,024 bytes, without control characters, and not __metadata__",
                       path, spec->name);
    return MS_OK;
}

/* ------------------------------------------------------------------- header */

/* The header's text while it grows. After a failure nothing is added, so that only the end must
 * look. */
typedef struct ms_header {
    ms_context *context;
    char *text;
    size_t count, capacity;
    ms_status status;
} ms_header;

/* Appends bytes. The header is built in memory as a whole: its length is before it in the file.
 */
static void put(ms_header *header, const char *text, size_t bytes)
{
    /* Growth is geometric, so building a header takes time in proportion to its length. */
    if (!header->status)
        header->status = ms_grow(header->context, (void **)&header->text, &header->capacity,
                                 header->count + bytes, 1);
    if (header->status) return;
    memcpy(header->text + header->count, text, bytes);
    header->count += bytes;
}

/* For constants of the format, which need no escapes. */
static void put_text(ms_header *header, const char *text) { put(header, text, strlen(text)); }

/* Decimal, as JSON has no other form. 24 characters hold any 64-bit number. */
static void put_number(ms_header *header, uint64_t number)
{
    char text[24];
    snprintf(text, sizeof text, "%" PRIu64, number);
    put_text(header, text);
}

/* A JSON string. Only quotes, backslashes and control characters need escapes; the rest is UTF-8
 * and is copied. */
static void put_string(ms_header *header, const char *text)
{
    char escape[8];
    put_text(header, "\"");
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') put(header, "\\", 1);
        /* Names have no control characters (check_spec), metadata may. */
        if ((unsigned char)*text >= 0x20) put(header, text, 1);
        else {
            /* Six characters for each, also where JSON has a shorter form: readers take both. */
            snprintf(escape, sizeof escape, "\\u%04x", (unsigned)*text);
            put_text(header, escape);
        }
    }
    put_text(header, "\"");
}

/* Writes the member __metadata__; the comma after it is put_entry's. metadata has 2 * pairs
 * strings: keys at even indices, values at odd ones. Text that is not UTF-8 would make the file
 * invalid JSON. */
static ms_status put_metadata(ms_header *header, const char *path, const char *const *metadata,
                              uint32_t pairs)
{
    if (pairs) put_text(header, "\"__metadata__\":{");
    /* Keys and values take turns, so an even index is a key; i & ~1u is the key of value i. */
    for (uint32_t i = 0; i < 2 * pairs; i++) {
        for (const char *at = metadata[i]; *at; at += ms_text_character(at))
            if (!ms_text_character(at))
                return ms_fail(header->context, MS_ERROR_ARGUMENT,
                               "'%s': metadata '%.200s' is not text in UTF-8", path,
                               metadata[i & ~1u]);
        put_string(header, metadata[i]);
        if (i % 2 == 0) put_text(header, ":");
        else put_text(header, i + 1 < 2 * pairs ? "," : "}");
    }
    return MS_OK;
}

/* One tensor's member of the header: "name":{"dtype":...,"shape":[...],"data_offsets":[begin,end]}.
 * Offsets count from the end of the header, as the format demands. */
static void put_entry(ms_header *header, const ms_safetensors_spec *spec, uint64_t begin,
                      uint64_t end)
{
    if (header->count > 1) put_text(header, ","); /* '{' is there already */
    put_string(header, spec->name);
    put_text(header, ":{\"dtype\":");
    put_string(header, file_dtype(spec->dtype));
    put_text(header, ",\"shape\":[");
    for (uint32_t d = 0; d < spec->dims; d++) {
        if (d) put_text(header, ",");
        put_number(header, (uint64_t)spec->shape[d]);
    }
    put_text(header, "],\"data_offsets\":[");
    put_number(header, begin);
    put_text(header, ",");
    put_number(header, end);
    put_text(header, "]}");
}

/* Gives each tensor its place, in the order of `order`, and adds its entry to the header. The
 * product of the sizes is not checked for overflow: the shapes must be ones that tensors can
 * have. */
static ms_status place_all(ms_safetensors_writer *writer, const ms_ordered *order, const char *path,
                           ms_header *header)
{
    uint64_t at = 0;
    for (uint32_t i = 0; i < writer->count; i++) {
        const ms_safetensors_spec *spec = order[i].spec;
        ms_status status = check_spec(writer->context, path, spec);
        if (status) return status;
        uint64_t bytes = spec_width(spec);
        for (uint32_t d = 0; d < spec->dims; d++) bytes *= (uint64_t)spec->shape[d];
        put_entry(header, spec, at, at + bytes);
        /* By the caller's index, since the caller writes tensors by it. */
        writer->places[order[i].index] = (ms_place){ .offset = at, .bytes = bytes };
        at += bytes;
    }
    return MS_OK;
}

/* Writes the length and the header, padded with spaces to a multiple of 8 so that the data are
 * aligned, and adds both to the tensors' offsets. The limits are those of our reader: a file that
 * it would refuse is never begun. */
static ms_status write_header(ms_safetensors_writer *writer, const char *path, ms_header *header)
{
    put_text(header, "}");
    /* The length before the header has 8 bytes itself, so the data begin at a multiple of 8. */
    while (header->count % 8 && !header->status) put_text(header, " ");
    if (header->status) return header->status;
    /* Nothing is on disk yet but an empty temporary file. */
    if (header->count > MS_SAFETENSORS_HEADER_MAX || writer->count > MS_SAFETENSORS_COUNT_MAX)
        return ms_fail(writer->context, MS_ERROR_ARGUMENT,
                       "'%s': a header of %zu bytes with %u tensors is more than readers take",
                       path, header->count, writer->count);
    uint8_t length[8];
    /* Little-endian by the format, whatever the machine is. */
    for (int i = 0; i < 8; i++) length[i] = (uint8_t)(header->count >> 8 * i);
    ms_status status = ms_writer_write(writer->writer, length, sizeof length, 0);
    if (!status)
        status = ms_writer_write(writer->writer, header->text, header->count, sizeof length);
    for (uint32_t i = 0; i < writer->count; i++)
        writer->places[i].offset += sizeof length + header->count;
    return status;
}

/* Order by name alone. compare_specs separates equal names of different widths, so duplicates are
 * searched in this order. */
static int compare_names(const void *a, const void *b)
{
    return strcmp(((const ms_ordered *)a)->spec->name, ((const ms_ordered *)b)->spec->name);
}

/* Refuses duplicate names, then leaves the specs in the file's order. */
static ms_status sort_specs(ms_context *context, const char *path, ms_ordered *order,
                            uint32_t count)
{
    if (count < 2) return MS_OK;
    qsort(order, count, sizeof *order, compare_names);
    for (uint32_t i = 1; i < count; i++)
        if (compare_names(&order[i - 1], &order[i]) == 0)
            return ms_fail(context, MS_ERROR_ARGUMENT, "'%s': two tensors have the name '%.200s'",
                           path, order[i].spec->name);
    /* No two names are equal any more, so there is only one such order. */
    qsort(order, count, sizeof *order, compare_specs);
    return MS_OK;
}

/* Sorts the tensors, places them, and writes the header to a new file. The file is made last, so
 * that wrong arguments leave nothing on disk. */
static ms_status begin_file(ms_safetensors_writer *writer, const char *path, ms_ordered *order,
                            const char *const *metadata, uint32_t pairs)
{
    ms_context *context = writer->context;
    ms_header header = { .context = context };
    ms_status status = sort_specs(context, path, order, writer->count);
    put_text(&header, "{");
    if (!status) status = put_metadata(&header, path, metadata, pairs);
    if (!status) status = place_all(writer, order, path, &header);
    if (!status) status = ms_writer_new(context, path, &writer->writer);
    if (!status) status = write_header(writer, path, &header);
    /* The writer keeps places alone; the text is in the file, or of no use. */
    ms_release(context, header.text);
    return status;
}

/* The specs are read during this call only. `order` is scratch: it goes before the return, and the
 * places stay. */
ms_status ms_safetensors_create(ms_context *context, const char *path,
                                const ms_safetensors_spec *specs, uint32_t count,
                                const char *const *metadata, uint32_t pairs,
                                ms_safetensors_writer **out)
{
    ms_safetensors_writer *writer = NULL;
    ms_ordered *order = NULL;
    ms_status status =
        ms_allocate(context, sizeof *writer, "a safetensors writer", (void **)&writer);
    if (status) return status;
    writer->context = context;
    writer->count = count;
    /* count may be 0: such a file has metadata at most. */
    status = ms_allocate(context, count * sizeof *writer->places, "a table of tensors",
                         (void **)&writer->places);
    if (!status)
        status = ms_allocate(context, count * sizeof *order, "a table of tensors", (void **)&order);
    if (status) goto done;
    for (uint32_t i = 0; i < count; i++) order[i] = (ms_ordered){ .spec = &specs[i], .index = i };
    /* On a failure the free below also removes the temporary file, if there is one. */
    status = begin_file(writer, path, order, metadata, pairs);
done:
    ms_release(context, order);
    if (!status) *out = writer;
    else ms_safetensors_free(writer);
    return status;
}

/* ------------------------------------------------------------------ tensors */

/* A tensor comes as a whole, in one call: a checkpoint has all of its bytes in host memory anyway.
 * Writing one twice replaces it. */
ms_status ms_safetensors_write(ms_safetensors_writer *writer, uint32_t index, const void *data,
                               size_t bytes)
{
    /* A wrong length would write over the next tensor. */
    if (index >= writer->count || writer->places[index].bytes != bytes)
        return ms_fail(writer->context, MS_ERROR_ARGUMENT,
                       "safetensors: tensor %u of %u does not have %zu bytes", index, writer->count,
                       bytes);
    ms_status status = ms_writer_write(writer->writer, data, bytes, writer->places[index].offset);
    if (!status) writer->places[index].written = true;
    return status;
}

/* A tensor that was not written would be a hole of zeros in a valid file, so it is an error. Empty
 * tensors have no bytes to write. */
ms_status ms_safetensors_commit(ms_safetensors_writer *writer)
{
    for (uint32_t i = 0; i < writer->count; i++)
        /* Found before the sync, so the temporary file never gets its final name. */
        if (!writer->places[i].written && writer->places[i].bytes)
            return ms_fail(writer->context, MS_ERROR_STATE,
                           "safetensors: tensor %u of %u was never written", i, writer->count);
    return ms_writer_commit(writer->writer);
}

/* Without a commit, ms_writer_free removes the temporary file. */
void ms_safetensors_free(ms_safetensors_writer *writer)
{
    if (writer == NULL) return;
    ms_context *context = writer->context;
    ms_writer_free(writer->writer);
    ms_release(context, writer->places);
    ms_release(context, writer);
}

/* Fills the specs of tensors. Returns the bytes of the largest. */
static size_t describe(const char *const *names, ms_tensor *const *tensors, uint32_t count,
                       ms_safetensors_spec *specs)
{
    size_t largest = 0;
    for (uint32_t i = 0; i < count; i++) {
        const ms_tensor *tensor = tensors[i];
        specs[i] = (ms_safetensors_spec){ .name = names[i],
                                          .dtype = ms_tensor_dtype(tensor),
                                          .dims = ms_tensor_dims(tensor),
                                          .shape = ms_tensor_shape(tensor) };
        if (ms_tensor_bytes(tensor) > largest) largest = ms_tensor_bytes(tensor);
    }
    return largest;
}

/* Reads each tensor into `buffer`, which has room for the largest, and writes it. Each read blocks
 * until the tensor has its value. The order is the caller's; that of the file is another one. */
static ms_status write_through(ms_safetensors_writer *writer, ms_tensor *const *tensors,
                               uint32_t count, void *buffer, uint64_t *hashes)
{
    for (uint32_t i = 0; i < count; i++) {
        size_t bytes = ms_tensor_bytes(tensors[i]);
        ms_status status = MS_OK;
        if (hashes) {
            status = ms_tensor_hash(tensors[i], buffer, MS_SAFETENSORS_BLOCK, hashes);
            hashes += 1 + ms_safetensors_blocks(bytes);
        } else if (bytes) status = ms_tensor_read(tensors[i], buffer, bytes);
        if (!status) status = ms_safetensors_write(writer, i, buffer, bytes);
        if (status) return status;
    }
    return ms_safetensors_commit(writer);
}

/* Host memory is one buffer of the size of the largest tensor, not the sum of all. */
ms_status ms_safetensors_stream(ms_context *context, const char *path, const char *const *names,
                                ms_tensor *const *tensors, uint32_t count,
                                const char *const *metadata, uint32_t pairs, uint64_t *hashes)
{
    ms_safetensors_writer *writer = NULL;
    ms_safetensors_spec *specs = NULL;
    void *buffer = NULL;
    ms_status status =
        ms_allocate(context, count * sizeof *specs, "a table of tensors", (void **)&specs);
    if (status) return status;
    /* One buffer serves all tensors in turn. */
    size_t largest = describe(names, tensors, count, specs);
    status = ms_bytes_new(context, largest, "a buffer for tensors", &buffer);
    if (!status)
        status = ms_safetensors_create(context, path, specs, count, metadata, pairs, &writer);
    if (!status) status = write_through(writer, tensors, count, buffer, hashes);
    ms_safetensors_free(writer);
    ms_release(context, specs);
    ms_release(context, buffer);
    return status;
}

/* Without hashes: who reads a model's file has no manifest to compare them with. */
ms_status ms_safetensors_save(ms_engine *engine, const char *path, const char *const *names,
                              ms_tensor *const *tensors, uint32_t count,
                              const char *const *metadata, uint32_t pairs)
{
    return ms_safetensors_stream(ms_engine_context(engine), path, names, tensors, count, metadata,
                                 pairs, NULL);
}
