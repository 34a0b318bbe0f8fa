/* fp8_gather.c: gathers in which weights travel as 8-bit floats (E4M3), a byte for each number,
 * with a power of two as scale for each weight. ops/fp8.h has what codes, spans and scales are.
 *
 * A gather has these steps, all on the stream of gathers: each rank finds the greatest |x| of its
 * piece of each weight; the maximum over the ranks follows, by which all ranks know the scale of
 * the whole weight; each casts its shard; the codes are gathered; all are decoded to the whole.
 *
 * Invariants
 * - Codes do not depend on how many ranks there are, nor on the layout: a scale is that of a whole
 *   weight. A product in 8 bits of what is decoded has the terms that it has without this.
 * - The greatest sizes are reduced as integers: their bits as i32, which order as the sizes do. A
 *   NaN of any rank is the greatest, also by NCCL, whose maximum of floats may drop it. All numbers
 *   of that weight are NaN then, on all ranks.
 * - The greatest sizes that a forward's gather has found are kept for its backward, before which no
 *   shard may change. Whether they are is the same on all ranks, as the order of uses is. Ranks
 *   that agree on each gather (lockstep.c) find them each time.
 * - Zeros between and after parameters belong to the span before them, and are decoded to zeros. */
#include "fsdp/fp8_gather.h"

#include "fsdp/flat_param.h"
#include "fsdp/static_memory.h"
#include "hook/link_ops.h"
#include "ops/fp8.h"
#include "ops/values.h"
#include "tensor/op.h"
#include "tensor/tensor.h"

/* ------------------------------------------------------------------- memory */

/* Codes of the shard, in memory that other ranks read without a copy, or of all shards. */
static ms_status new_codes(ms_flat_param *flat, bool all, ms_tensor **out)
{
    ms_stream *current = ms_engine_current(flat->unit->fsdp->source.engine);
    int64_t bytes = all ? flat->padded : flat->length;
    ms_storage *storage = NULL;
    ms_status status = all ? ms_storage_new(current, (size_t)bytes, &storage)
                           : ms_group_storage(flat->shards, current, (size_t)bytes, &storage);
    if (!status) status = ms_tensor_on(storage, MS_U8, 1, &bytes, out);
    if (!status) status = ms_storage_drop(storage, flat->unit->name);
    ms_storage_release(storage);
    return status;
}

ms_status ms_fp8_gather_make(ms_flat_param *flat)
{
    ms_engine *engine = flat->unit->fsdp->source.engine;
    ms_fp8_form *fp8 = &flat->fp8;
    int64_t count = flat->count;
    if (!flat->coded || !ms_flat_param_is_sharded(flat)) return MS_OK;
    ms_status status = ms_tensor_new(engine, MS_I32, 1, &count, &fp8->most);
    if (!status) status = new_codes(flat, false, &fp8->codes);
    if (!status) status = new_codes(flat, true, &fp8->arrived);
    if (!status && !flat->own) fp8->most_number = ms_group_fixed_address(flat->shards);
    return status;
}

void ms_fp8_gather_free(ms_flat_param *flat)
{
    ms_tensor_release(flat->fp8.most);
    ms_tensor_release(flat->fp8.codes);
    ms_tensor_release(flat->fp8.arrived);
}

/* -------------------------------------------------------------------- tasks */

/* The spans of the members from `first` on, as many as one task takes, in a shard or in the whole
 * as gathers write it. By rows all shards are alike, one after another. */
static ms_fp8_span_args spans_of(const ms_flat_param *flat, uint32_t first, bool whole)
{
    bool rows = flat->unit->fsdp->layout == MS_FSDP_ROWS;
    uint32_t left = flat->count - first, spans = left < MS_FP8_SPANS ? left : MS_FP8_SPANS;
    ms_fp8_span_args args = { .most = (uint32_t *)ms_tensor_data(flat->fp8.most) + first,
                              .period = whole && !rows ? flat->padded : flat->length,
                              .repeats = whole && rows ? flat->padded / flat->length : 1,
                              .dtype = (uint8_t)flat->computes,
                              .spans = (uint8_t)spans };
    for (uint32_t i = 0; i < spans; i++) {
        bool last = first + i + 1 == flat->count;
        args.bounds[i] = ms_flat_param_span_begin(flat, first + i, whole);
        args.bounds[i + 1] =
            last ? args.period : ms_flat_param_span_begin(flat, first + i + 1, whole);
    }
    return args;
}

/* Finds the greatest sizes of this rank's pieces (to: NULL), or encodes them. */
static ms_status pass_shard(ms_flat_param *flat, ms_kernel kernel, ms_tensor *shard, ms_tensor *to)
{
    ms_engine *engine = flat->unit->fsdp->source.engine;
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < flat->count && !status; i += MS_FP8_SPANS) {
        ms_fp8_span_args args = spans_of(flat, i, false);
        args.from = ms_tensor_data(shard);
        args.to = to ? ms_tensor_data(to) : NULL;
        status = ms_fp8_run_spans(engine, kernel, &args, shard, flat->fp8.most, to);
    }
    return status;
}

/* What is written is the members' part of `to`, so that each is restored as a whole. */
static ms_status decode_spans(ms_flat_param *flat, uint32_t first, ms_tensor *to)
{
    ms_fp8_span_args args = spans_of(flat, first, true);
    const int64_t shape[] = { args.repeats, args.bounds[args.spans] - args.bounds[0] },
                  strides[] = { args.period, 1 };
    ms_tensor *part = NULL;
    args.from = ms_tensor_data(flat->fp8.arrived);
    args.to = ms_tensor_data(to);
    ms_status status = ms_tensor_window(to, 2, shape, strides, args.bounds[0], &part);
    if (!status)
        status = ms_fp8_run_spans(flat->unit->fsdp->source.engine, MS_KERNEL_fp8_span_decode, &args,
                                  flat->fp8.arrived, flat->fp8.most, part);
    ms_tensor_release(part);
    return status;
}

static ms_status decode(ms_flat_param *flat, ms_tensor *to)
{
    ms_engine *engine = flat->unit->fsdp->source.engine;
    ms_status status = MS_OK;
    if (to == flat->form.whole) ms_tensor_restoring(engine, to, flat->source);
    for (uint32_t i = 0; i < flat->count && !status; i += MS_FP8_SPANS)
        status = decode_spans(flat, i, to);
    ms_tensor_restoring(engine, NULL, NULL);
    return status;
}

/* ------------------------------------------------------------------- gathers */

static ms_collective call_of(const ms_flat_param *flat, ms_stream *stream)
{
    return (ms_collective){ .stream = stream,
                            .bucket = -2 - (int32_t)flat->unit->index,
                            .label = ms_unit_called(flat->unit) };
}

/* Whether a forward of this pass has gathered the unit, on all ranks. */
static bool is_for_backward(const ms_unit *unit)
{
    bool agrees = unit->fsdp->same.find_unused || unit->fsdp->same.joining;
    return !agrees
           && (unit->phase == MS_UNIT_AWAITING || unit->phase == MS_UNIT_INPUTS
               || unit->phase == MS_UNIT_BACKWARD);
}

/* Of whole weights, on all ranks. */
static ms_status agree_on_most(ms_flat_param *flat, ms_tensor *shard, ms_stream *stream)
{
    ms_fp8_form *fp8 = &flat->fp8;
    uint64_t version = ms_tensor_version(flat->source);
    ms_collective call = call_of(flat, stream);
    if (is_for_backward(flat->unit) && fp8->known && fp8->most_version == version) return MS_OK;
    call.kind = MS_ALL_REDUCE;
    call.op = MS_REDUCE_OP_MAX;
    call.in = fp8->most;
    call.fixed_address = fp8->most_number;
    ms_status status = pass_shard(flat, MS_KERNEL_fp8_span_most, shard, NULL);
    if (!status) status = ms_group_enqueue(flat->shards, 2, &call, &flat->gathered);
    fp8->known = !status;
    fp8->most_version = version;
    return status;
}

static ms_status take(ms_static_memory *memory, ms_flat_param *flat, ms_tensor *tensor,
                      ms_stream *stream, uint32_t *block)
{
    if (!ms_storage_is_dropped(ms_tensor_storage(tensor))) return MS_OK;
    return ms_static_memory_refill(memory, flat, tensor, stream, block);
}

/* Both are in memory for this gather alone. */
static ms_status take_codes(ms_flat_param *flat, ms_stream *stream)
{
    ms_fsdp_memory *memory = &flat->unit->fsdp->memory;
    ms_fp8_form *fp8 = &flat->fp8;
    ms_status status = take(&memory->code_blocks, flat, fp8->codes, stream, &fp8->codes_block);
    if (status) return status;
    return take(&memory->arrived_blocks, flat, fp8->arrived, stream, &fp8->arrived_block);
}

static ms_status drop_codes(ms_flat_param *flat)
{
    ms_fsdp_memory *memory = &flat->unit->fsdp->memory;
    ms_status status =
        ms_static_memory_drop(&memory->code_blocks, flat->fp8.codes, flat->unit->name);
    if (status) return status;
    return ms_static_memory_drop(&memory->arrived_blocks, flat->fp8.arrived, flat->unit->name);
}

static ms_status gather_codes(ms_flat_param *flat, ms_stream *stream)
{
    const ms_fsdp_memory *memory = &flat->unit->fsdp->memory;
    ms_collective call = call_of(flat, stream);
    call.kind = MS_ALL_GATHER;
    call.in = flat->fp8.codes;
    call.out = flat->fp8.arrived;
    call.fixed_address =
        ms_static_memory_pair(ms_static_memory_number(&memory->code_blocks, flat->fp8.codes),
                              ms_static_memory_number(&memory->arrived_blocks, flat->fp8.arrived));
    return ms_group_enqueue(flat->shards, 2, &call, &flat->gathered);
}

bool ms_fp8_gather_applies(const ms_flat_param *flat)
{
    return flat->fp8.most && !flat->unit->full;
}

ms_status ms_fp8_gather(ms_flat_param *flat, ms_tensor *shard, ms_stream *stream, ms_tensor *to)
{
    ms_engine *engine = flat->unit->fsdp->source.engine;
    ms_stream *before = ms_engine_set_current(engine, stream);
    ms_status status = ms_stream_wait_users(stream, to);
    if (!status) status = agree_on_most(flat, shard, stream);
    if (!status) status = take_codes(flat, stream);
    if (!status) status = pass_shard(flat, MS_KERNEL_fp8_span_encode, shard, flat->fp8.codes);
    if (!status) status = gather_codes(flat, stream);
    if (!status) status = decode(flat, to);
    if (!status) status = drop_codes(flat);
    flat->gathered = ms_stream_last(stream);
    ms_engine_set_current(engine, before);
    return status;
}

/* ------------------------------------------------------------ outside of gathers */

/* All of x is one span. */
static ms_status round_span(ms_engine *engine, ms_tensor *x, ms_tensor *most, ms_tensor *codes,
                            ms_tensor *out)
{
    ms_fp8_span_args args = { .from = ms_tensor_data(x),
                              .to = ms_tensor_data(codes),
                              .most = ms_tensor_data(most),
                              .bounds = { 0, ms_tensor_count(x) },
                              .period = ms_tensor_count(x),
                              .repeats = 1,
                              .dtype = (uint8_t)ms_tensor_dtype(x),
                              .spans = 1 };
    ms_status status = ms_fp8_run_spans(engine, MS_KERNEL_fp8_span_most, &args, x, most, NULL);
    if (!status)
        status = ms_fp8_run_spans(engine, MS_KERNEL_fp8_span_encode, &args, x, most, codes);
    args.from = ms_tensor_data(codes);
    args.to = ms_tensor_data(out);
    if (!status)
        status = ms_fp8_run_spans(engine, MS_KERNEL_fp8_span_decode, &args, codes, most, out);
    return status;
}

ms_status ms_fp8_round(ms_engine *engine, ms_tensor *x, ms_tensor **out)
{
    int64_t one = 1, count = ms_tensor_count(x);
    ms_tensor *from = NULL, *most = NULL, *codes = NULL, *made = NULL;
    if (ms_tensor_dtype(x) != MS_F32 && ms_tensor_dtype(x) != MS_BF16)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "fp8_round: a tensor of f32 or bf16 is expected, not of %s",
                              ms_dtype_name(ms_tensor_dtype(x)));
    ms_status status = ms_op_as_contiguous(engine, x, &from);
    if (!status) status = ms_tensor_new(engine, MS_I32, 1, &one, &most);
    if (!status) status = ms_tensor_new(engine, MS_U8, 1, &count, &codes);
    if (!status)
        status =
            ms_tensor_new(engine, ms_tensor_dtype(x), ms_tensor_dims(x), ms_tensor_shape(x), &made);
    if (!status && count > 0) status = round_span(engine, from, most, codes, made);
    ms_tensor_release(from);
    ms_tensor_release(most);
    ms_tensor_release(codes);
    if (status) ms_tensor_release(made);
    else *out = made;
    return status;
}
