/* gather_codec.c: gathers in which something else travels than the shard (ms_gather_extension):
 * fewer bits, for example.
 *
 * What is sent, what arrives and what the functions make lives until this gather is enqueued: the
 * streams keep the memory for tasks that still read it. The whole flat parameter counts as restored
 * from the shard, as after any gather. */
#include "fsdp/gather_codec.h"

#include <stdio.h>

#include "fsdp/flat_param.h"
#include "hook/link_ops.h"
#include "tensor/op.h"

void ms_fsdp_extend(ms_fsdp *fsdp, ms_gather_extension extension) { fsdp->extension = extension; }

void ms_gather_codec_free(ms_fsdp *fsdp)
{
    if (fsdp->extension.free) fsdp->extension.free(fsdp->extension.user);
    fsdp->extension = (ms_gather_extension){ 0 };
}

bool ms_gather_codec_applies(const ms_flat_param *flat)
{
    const ms_gather_extension *extension = &flat->unit->fsdp->extension;
    /* A flat parameter of codes (u8) travels as it is: the functions take and give floats. */
    return (extension->before || extension->after) && !flat->unit->full
           && ms_dtype_is_float(flat->dtype) && ms_flat_param_is_sharded(flat);
}

static uint32_t part_of(const ms_flat_param *flat) { return (uint32_t)(flat - flat->unit->flats); }

/* What a function gave, as messages name it. */
static ms_status refuse(const ms_flat_param *flat, const char *what, const ms_tensor *given,
                        const char *expected)
{
    char text[160];
    return ms_engine_fail(flat->unit->fsdp->source.engine, MS_ERROR_ARGUMENT,
                          "%s of unit \"%s\": it gave %s; %s", what, ms_unit_called(flat->unit),
                          ms_tensor_describe(given, text, sizeof text), expected);
}

/* *sent: owned, 1-D and contiguous. */
static ms_status call_before(ms_flat_param *flat, ms_tensor *shard, ms_tensor **sent)
{
    const ms_gather_extension *extension = &flat->unit->fsdp->extension;
    ms_tensor *given = NULL;
    if (!extension->before) return ms_tensor_alias(shard, sent);
    ms_status status =
        extension->before(extension->user, flat->unit->index, part_of(flat), shard, &given);
    if (status) return status;
    if (ms_tensor_dims(given) != 1 || !ms_tensor_is_contiguous(given)
        || ms_tensor_count(given) == 0)
        status = refuse(flat, "before_gather", given,
                        "a 1-D, contiguous tensor with elements is expected");
    if (status) ms_tensor_release(given);
    else *sent = given;
    return status;
}

/* *whole: owned, with the elements of the flat parameter. */
static ms_status call_after(ms_flat_param *flat, ms_tensor *gathered, ms_tensor **whole)
{
    const ms_gather_extension *extension = &flat->unit->fsdp->extension;
    ms_tensor *given = NULL;
    const char *what = extension->after ? "after_gather" : "before_gather, without after_gather,";
    char expected[96];
    ms_status status = MS_OK;
    if (!extension->after) status = ms_tensor_alias(gathered, &given);
    else
        status =
            extension->after(extension->user, flat->unit->index, part_of(flat), gathered, &given);
    if (status) return status;
    snprintf(expected, sizeof expected, "a 1-D float tensor of %lld elements is expected",
             (long long)flat->padded);
    if (ms_tensor_dims(given) != 1 || ms_tensor_count(given) != flat->padded
        || !ms_dtype_is_float(ms_tensor_dtype(given)))
        status = refuse(flat, what, given, expected);
    if (status) ms_tensor_release(given);
    else *whole = given;
    return status;
}

/* What arrived goes to `to`, in its dtype. */
static ms_status unpack(ms_flat_param *flat, ms_tensor *gathered, ms_tensor *to)
{
    ms_engine *engine = flat->unit->fsdp->source.engine;
    ms_tensor *whole = NULL;
    ms_status status = call_after(flat, gathered, &whole);
    if (status) return status;
    if (to == flat->form.whole) ms_tensor_restoring(engine, to, flat->source);
    status = ms_copy_into(engine, whole, to);
    ms_tensor_restoring(engine, NULL, NULL);
    ms_tensor_release(whole);
    return status;
}

/* The messages of ranks that disagree in length or dtype come from the comparison of collectives,
 * before anything is sent. The label tells what has decided on both. */
static ms_status send(ms_flat_param *flat, ms_tensor *sent, ms_stream *stream, ms_tensor *to)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    int64_t count = ms_tensor_count(sent) * ms_group_size(flat->shards);
    ms_tensor *gathered = NULL;
    char label[64];
    snprintf(label, sizeof label, "%s%s", fsdp->extension.before ? "before_gather: " : "",
             ms_unit_called(flat->unit));
    ms_status status =
        ms_tensor_new(fsdp->source.engine, ms_tensor_dtype(sent), 1, &count, &gathered);
    ms_collective call = { .kind = MS_ALL_GATHER,
                           .in = sent,
                           .out = gathered,
                           .stream = stream,
                           .bucket = -2 - (int32_t)flat->unit->index,
                           .label = label };
    if (!status) status = ms_group_enqueue(flat->shards, 2, &call, &flat->gathered);
    if (!status) status = unpack(flat, gathered, to);
    ms_tensor_release(gathered);
    return status;
}

ms_status ms_gather_codec_gather(ms_flat_param *flat, ms_tensor *shard, ms_stream *stream,
                                 ms_tensor *to)
{
    ms_engine *engine = flat->unit->fsdp->source.engine;
    uint64_t version = ms_tensor_version(flat->source);
    flat->extended.is_fresh = !flat->extended.any || flat->extended.version != version;
    ms_stream *before = ms_engine_set_current(engine, stream);
    bool recording = ms_engine_set_recording(engine, false);
    ms_tensor *sent = NULL;
    ms_status status = ms_stream_wait_users(stream, to);
    if (!status) status = call_before(flat, shard, &sent);
    if (!status) status = send(flat, sent, stream, to);
    ms_tensor_release(sent);
    if (!status) {
        flat->extended.any = true;
        flat->extended.version = version;
    }
    flat->gathered = ms_stream_last(stream);
    ms_engine_set_recording(engine, recording);
    ms_engine_set_current(engine, before);
    return status;
}

static const ms_flat_param *get_part(const ms_fsdp *fsdp, uint32_t unit, uint32_t part)
{
    bool there = unit < fsdp->unit_count && part < fsdp->units[unit].count;
    return there ? &fsdp->units[unit].flats[part] : NULL;
}

bool ms_fsdp_part_is_fresh(const ms_fsdp *fsdp, uint32_t unit, uint32_t part)
{
    const ms_flat_param *flat = get_part(fsdp, unit, part);
    return flat && flat->extended.is_fresh;
}

int64_t ms_fsdp_part_length(const ms_fsdp *fsdp, uint32_t unit, uint32_t part)
{
    const ms_flat_param *flat = get_part(fsdp, unit, part);
    return flat ? flat->length : 0;
}

bool ms_fsdp_span_get(const ms_fsdp *fsdp, uint32_t unit, uint32_t part, uint32_t index,
                      ms_shard_span *out)
{
    const ms_flat_param *flat = get_part(fsdp, unit, part);
    if (!flat || index >= flat->count) return false;
    const ms_member *member = &flat->members[index];
    bool rows = fsdp->layout == MS_FSDP_ROWS;
    *out = (ms_shard_span){ .name = member->name,
                            .shape = member->shape,
                            .dims = member->dims,
                            .at = rows ? member->slot : member->at,
                            .count = rows ? member->part : member->length };
    return true;
}
