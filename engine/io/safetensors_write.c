/* safetensors_write.c: writing safetensors, tensor by tensor, into a file that appears as a whole. */
#include "io/path.h"
#include "io/safetensors.h"
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

typedef struct ms_slot_place { uint64_t offset, bytes; bool written; } ms_slot_place;

struct ms_safetensors_writer {
    ms_context *context;
    ms_writer *writer;
    uint32_t count;
    ms_slot_place *places;           /* by index of the specs */
    uint64_t end;
};

typedef struct ms_ordered { const ms_safetensors_spec *spec; uint32_t index; } ms_ordered;

static size_t spec_width(const ms_safetensors_spec *spec) { return ms_dtype_bytes(spec->dtype); }

/* Wide dtypes first, so that every tensor is aligned to its elements; then by name, so that the file depends on nothing else. */
static int compare_specs(const void *a, const void *b)
{
    const ms_safetensors_spec *x = ((const ms_ordered *)a)->spec, *y = ((const ms_ordered *)b)->spec;
    if (spec_width(x) != spec_width(y)) return spec_width(x) > spec_width(y) ? -1 : 1;
    return strcmp(x->name, y->name);
}

static const char *file_dtype(ms_dtype dtype)
{
    const ms_safetensors_dtype *known = ms_safetensors_dtypes;
    while (known->dtype != dtype) known++;
    return known->name;
}

static ms_status check_spec(ms_context *context, const char *path, const ms_safetensors_spec *spec)
{
    if (!ms_text_is_name(spec->name, MS_SAFETENSORS_NAME_MAX) || strcmp(spec->name, "__metadata__") == 0)
        return ms_fail(context, MS_ERROR_ARGUMENT, "'%s': the tensor name '%.200s' is not possible: it must be UTF-8 of at most 1,024 bytes, without control characters, and not __metadata__", path, spec->name);
    return MS_OK;
}

/* Where each tensor goes, and its entry in the header. */
static ms_status place_all(ms_safetensors_writer *writer, const char *path, const ms_ordered *order, json_t *header)
{
    ms_context *context = writer->context;
    uint64_t at = 0;
    for (uint32_t i = 0; i < writer->count; i++) {
        const ms_safetensors_spec *spec = order[i].spec;
        ms_status status = check_spec(context, path, spec);
        if (status) return status;
        uint64_t bytes = spec_width(spec);
        json_t *shape = json_array();
        for (uint32_t d = 0; d < spec->dims; d++) {
            bytes *= (uint64_t)spec->shape[d];
            json_array_append_new(shape, json_integer(spec->shape[d]));
        }
        if (json_object_get(header, spec->name)) {
            json_decref(shape);
            return ms_fail(context, MS_ERROR_ARGUMENT, "'%s': two tensors have the name '%.200s'", path, spec->name);
        }
        json_t *entry = json_pack("{s:s, s:o, s:[I, I]}", "dtype", file_dtype(spec->dtype), "shape", shape, "data_offsets", (json_int_t)at, (json_int_t)(at + bytes));
        if (!entry || json_object_set_new(header, spec->name, entry)) return ms_fail(context, MS_ERROR_MEMORY, "'%s': no memory for the header", path);
        writer->places[order[i].index] = (ms_slot_place){ .offset = at, .bytes = bytes };
        at += bytes;
    }
    writer->end = at;
    return MS_OK;
}

static ms_status add_metadata(ms_context *context, const char *path, json_t *header, const char *const *metadata, uint32_t pairs)
{
    if (pairs == 0) return MS_OK;
    json_t *object = json_object();
    if (json_object_set_new(header, "__metadata__", object)) return ms_fail(context, MS_ERROR_MEMORY, "'%s': no memory for the header", path);
    for (uint32_t i = 0; i < pairs; i++)
        if (json_object_set_new(object, metadata[2 * i], json_string(metadata[2 * i + 1])))
            return ms_fail(context, MS_ERROR_ARGUMENT, "'%s': metadata '%.200s' is not text in UTF-8", path, metadata[2 * i]);
    return MS_OK;
}

/* Writes the header, padded with spaces to 8 bytes, and moves the tensors behind it. */
static ms_status write_header(ms_safetensors_writer *writer, const char *path, const json_t *header)
{
    ms_context *context = writer->context;
    char *text = NULL;
    size_t bytes = json_dumpb(header, NULL, 0, JSON_COMPACT), padded = (bytes + 7) / 8 * 8;
    if (bytes == 0) return ms_fail(context, MS_ERROR_MEMORY, "'%s': no memory for the header", path);
    if (padded > MS_SAFETENSORS_HEADER_MAX || writer->count > MS_SAFETENSORS_COUNT_MAX)
        return ms_fail(context, MS_ERROR_ARGUMENT, "'%s': a header of %zu bytes with %u tensors is more than readers take", path, padded, writer->count);
    ms_status status = ms_allocate(context, padded + 8, "a safetensors header", (void **)&text);
    if (status) return status;
    for (int i = 0; i < 8; i++) text[i] = (char)(padded >> 8 * i & 0xff);
    json_dumpb(header, text + 8, bytes, JSON_COMPACT);
    memset(text + 8 + bytes, ' ', padded - bytes);
    status = ms_writer_write(writer->writer, text, padded + 8, 0);
    ms_release(context, text);
    for (uint32_t i = 0; i < writer->count; i++) writer->places[i].offset += padded + 8;
    return status;
}

ms_status ms_safetensors_create(ms_context *context, const char *path, const ms_safetensors_spec *specs, uint32_t count,
                                const char *const *metadata, uint32_t pairs, ms_safetensors_writer **out)
{
    ms_safetensors_writer *writer = NULL;
    ms_ordered *order = NULL;
    json_t *header = json_object();
    ms_status status = header ? MS_OK : ms_fail(context, MS_ERROR_MEMORY, "'%s': no memory for the header", path);
    if (!status) status = ms_allocate(context, sizeof *writer, "a safetensors writer", (void **)&writer);
    if (status) goto done;
    writer->context = context;
    writer->count = count;
    status = ms_allocate(context, count * sizeof *writer->places, "a table of tensors", (void **)&writer->places);
    if (!status) status = ms_allocate(context, count * sizeof *order, "a table of tensors", (void **)&order);
    if (status) goto done;
    for (uint32_t i = 0; i < count; i++) order[i] = (ms_ordered){ .spec = &specs[i], .index = i };
    if (count > 1) qsort(order, count, sizeof *order, compare_specs);
    status = add_metadata(context, path, header, metadata, pairs);
    if (!status) status = place_all(writer, path, order, header);
    if (!status) status = ms_writer_new(context, path, &writer->writer);
    if (!status) status = write_header(writer, path, header);
done:
    json_decref(header);
    ms_release(context, order);
    if (status) { ms_safetensors_free(writer); return status; }
    *out = writer;
    return MS_OK;
}

ms_status ms_safetensors_write(ms_safetensors_writer *writer, uint32_t index, const void *data, size_t bytes)
{
    if (index >= writer->count || writer->places[index].bytes != bytes)
        return ms_fail(writer->context, MS_ERROR_ARGUMENT, "safetensors: tensor %u of %u does not have %zu bytes", index, writer->count, bytes);
    ms_status status = ms_writer_write(writer->writer, data, bytes, writer->places[index].offset);
    if (!status) writer->places[index].written = true;
    return status;
}

ms_status ms_safetensors_commit(ms_safetensors_writer *writer)
{
    for (uint32_t i = 0; i < writer->count; i++)
        if (!writer->places[i].written && writer->places[i].bytes)
            return ms_fail(writer->context, MS_ERROR_STATE, "safetensors: tensor %u of %u was never written", i, writer->count);
    return ms_writer_commit(writer->writer);
}

void ms_safetensors_free(ms_safetensors_writer *writer)
{
    if (writer == NULL) return;
    ms_context *context = writer->context;
    ms_writer_free(writer->writer);
    ms_release(context, writer->places);
    ms_release(context, writer);
}

ms_status ms_safetensors_save(ms_engine *engine, const char *path, const char *const *names, ms_tensor *const *tensors, uint32_t count,
                              const char *const *metadata, uint32_t pairs)
{
    ms_context *context = ms_engine_context(engine);
    ms_safetensors_writer *writer = NULL;
    ms_safetensors_spec *specs = NULL;
    void *buffer = NULL;
    size_t largest = 0;
    ms_status status = ms_allocate(context, count * sizeof *specs, "a table of tensors", (void **)&specs);
    for (uint32_t i = 0; i < count && !status; i++) {
        const ms_tensor *tensor = tensors[i];
        specs[i] = (ms_safetensors_spec){ .name = names[i], .dtype = ms_tensor_dtype(tensor), .dims = ms_tensor_dims(tensor), .shape = ms_tensor_shape(tensor) };
        if (ms_tensor_bytes(tensor) > largest) largest = ms_tensor_bytes(tensor);
    }
    if (!status) status = ms_bytes_new(context, largest, "a buffer for tensors", &buffer);
    if (!status) status = ms_safetensors_create(context, path, specs, count, metadata, pairs, &writer);
    for (uint32_t i = 0; i < count && !status; i++) {
        size_t bytes = ms_tensor_bytes(tensors[i]);
        if (bytes) status = ms_tensor_read(tensors[i], buffer, bytes);
        if (!status) status = ms_safetensors_write(writer, i, buffer, bytes);
    }
    if (!status) status = ms_safetensors_commit(writer);
    ms_safetensors_free(writer);
    ms_release(context, specs);
    ms_release(context, buffer);
    return status;
}
