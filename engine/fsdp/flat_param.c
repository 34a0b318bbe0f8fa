/* flat_param.c: the memory of a flat parameter: where each parameter is, and whose part it is.
 *
 * layout = "flat": all parameters are end to end, and zeros follow the last one, so that N ranks
 * have N equal shards. A parameter may be in several shards; its piece is the part of it in this
 * rank's shard. layout = "rows": a shard has some rows of each parameter, and reserves the same
 * number of rows on all ranks. A gather writes the shards of all ranks, one after another, to a
 * buffer (`wire`). From there each parameter is copied to its place in the whole flat parameter.
 * Zeros follow it there, for reserved rows that it does not have.
 *
 * The shard's storage is cut into a part for each piece, whose version grows when an optimizer
 * steps the piece. One more element follows the shard, which no collective reads. Empty pieces are
 * windows on that element, so that the step of a parameter of which this rank has no numbers
 * changes a version too.
 *
 * The whole flat parameter is one storage, with a part for each parameter. The tensors of
 * parameters become windows on it while their unit is used (ms_tensor_reshape_onto), and windows on
 * the shard afterwards. After its use the storage is dropped. Before its next use it is refilled,
 * perhaps at another address. So handles and graphs stay valid.
 *
 * Precision: a flat parameter has two forms (ms_form), one in the dtype of computing and one in the
 * dtype of the shards, which summon and evaluation in full precision use. Gathers fill one of them
 * at a time. A gather of the first form casts the shard before it travels. There is one bucket, in
 * the dtype of the reduction, for the gradients of either form.
 *
 * Offload: shards, reduced gradients and the optimizer's states are in the engine's second pool
 * (ms_storage_new_offloaded). A gather copies the shard to the device's memory first (`cast`), and
 * that copy travels. The reduction's stream copies its result back. Reductions, steps and norms
 * are the same tasks as without offloading, so they give the same bits. */
#include "fsdp/flat_param.h"

#include <stdio.h>
#include <string.h>

#include "fsdp/fp8_gather.h"
#include "fsdp/gradients.h"
#include "fsdp/secondary_shard.h"
#include "ops/values.h"
#include "tensor/op.h"
#include "tensor/state.h"

/* ------------------------------------------------------------------- layout */

static int64_t elements_of(const ms_member *member)
{
    int64_t count = 1;
    for (uint32_t d = 0; d < member->dims; d++) count *= member->shape[d];
    return count;
}

/* What of a parameter of `count` elements is in the shard that has those from `begin` on. */
static void cut_anywhere(ms_member *member, int64_t count, int64_t begin, int64_t length)
{
    int64_t from = member->begin, to = member->begin + count;
    if (to > begin + length) to = begin + length;
    if (from < begin) from = begin;
    member->length = to > from ? to - from : 0;
    member->first = member->length ? from - member->begin : 0;
    member->at = member->length ? from - begin : length;
    member->piece_dims = 1;
    member->piece[0] = member->length;
}

static void lay_out_flat(ms_flat_param *flat, uint32_t ranks, uint32_t rank)
{
    for (uint32_t i = 0; i < flat->count; i++) flat->members[i].begin = flat->members[i].packed;
    flat->length = (flat->numbers + ranks - 1) / ranks;
    if (flat->length == 0) flat->length = 1;
    for (uint32_t i = 0; i < flat->count; i++)
        cut_anywhere(&flat->members[i], elements_of(&flat->members[i]), flat->length * rank,
                     flat->length);
}

/* A parameter without dimensions is one row. */
static void cut_rows(ms_member *member, uint32_t ranks, uint32_t rank)
{
    int64_t rows = member->dims ? member->shape[0] : 1, row = rows ? elements_of(member) / rows : 0;
    int64_t each = (rows + ranks - 1) / ranks, first = each * rank < rows ? each * rank : rows;
    int64_t own = rows - first < each ? rows - first : each;
    member->part = each * row;
    member->length = own * row;
    member->first = member->length ? first * row : 0;
    member->piece_dims = member->dims ? member->dims : 1;
    for (uint32_t d = 1; d < member->dims; d++) member->piece[d] = member->shape[d];
    member->piece[0] = own;
}

static void lay_out_rows(ms_flat_param *flat, uint32_t ranks, uint32_t rank)
{
    int64_t slot = 0;
    for (uint32_t i = 0; i < flat->count; i++) {
        ms_member *member = &flat->members[i];
        cut_rows(member, ranks, rank);
        member->begin = slot * ranks;
        member->slot = slot;
        slot += member->part;
    }
    flat->length = slot ? slot : 1;
    for (uint32_t i = 0; i < flat->count; i++) {
        ms_member *member = &flat->members[i];
        member->at = member->length ? member->slot : flat->length;
    }
}

/* A shard has at least one element, so that all ranks take part in collectives. */
void ms_flat_param_lay_out(ms_flat_param *flat, ms_fsdp_layout layout, uint32_t ranks,
                           uint32_t rank)
{
    flat->numbers = 0;
    for (uint32_t i = 0; i < flat->count; i++) {
        flat->members[i].packed = flat->numbers;
        flat->numbers += elements_of(&flat->members[i]);
    }
    if (layout == MS_FSDP_ROWS) lay_out_rows(flat, ranks, rank);
    else lay_out_flat(flat, ranks, rank);
    flat->padded = flat->length * ranks;
}

void ms_flat_param_cut(const ms_member *member, uint32_t rank, int64_t *first, int64_t *count)
{
    const ms_flat_param *flat = member->flat;
    uint32_t ranks = (uint32_t)(flat->padded / flat->length);
    ms_member other = *member;
    if (flat->unit->fsdp->layout == MS_FSDP_ROWS) cut_rows(&other, ranks, rank);
    else cut_anywhere(&other, elements_of(&other), flat->length * rank, flat->length);
    *first = rank < ranks ? other.first : 0;
    *count = rank < ranks ? other.length : 0;
}

/* Whether this rank's rows are in places of their own; one parameter's are cut as a flat one. */
static bool is_by_rows(const ms_flat_param *flat)
{
    return flat->unit->fsdp->layout == MS_FSDP_ROWS && ms_flat_param_is_sharded(flat);
}

/* Where the place of a parameter ends in the whole, its zeros included. */
static int64_t end_of(const ms_flat_param *flat, const ms_member *member)
{
    return member->begin
           + (is_by_rows(flat) ? member->part * (flat->padded / flat->length)
                               : elements_of(member));
}

/* The piece of a member that this rank has no numbers of begins where the next one does. All of a
 * shard of zeros counts for the first. */
int64_t ms_flat_param_span_begin(const ms_flat_param *flat, uint32_t member, bool whole)
{
    if (member == 0) return 0;
    if (is_by_rows(flat)) return flat->members[member].slot;
    if (whole) return flat->members[member].begin;
    while (member < flat->count && flat->members[member].length == 0) member++;
    return member < flat->count ? flat->members[member].at : flat->length;
}

uint64_t ms_flat_param_bytes(const ms_flat_param *flat)
{
    return (uint64_t)flat->padded * ms_dtype_bytes(flat->computes);
}

uint64_t ms_flat_param_shard_bytes(const ms_flat_param *flat)
{
    return (uint64_t)flat->length * ms_dtype_bytes(flat->dtype);
}

/* ------------------------------------------------------------------- memory */

/* Cuts a storage into parts that end at these elements; equal and zero ends are left out. */
static ms_status split_at(ms_flat_param *flat, ms_storage *storage, const int64_t *ends,
                          uint32_t count, size_t item)
{
    ms_context *context = ms_engine_context(flat->unit->fsdp->source.engine);
    void *memory = NULL;
    uint32_t parts = 0;
    ms_status status = ms_allocate(context, (count + 1) * sizeof(size_t), "a shard", &memory);
    if (status) return status;
    size_t *bytes = memory;
    for (uint32_t i = 0; i < count; i++) {
        size_t end = (size_t)ends[i] * item;
        if (end > (parts ? bytes[parts - 1] : 0)) bytes[parts++] = end;
    }
    status = ms_storage_split(storage, bytes, parts);
    ms_release(context, memory);
    return status;
}

typedef enum kind { WHOLE, SHARD, GRADIENT, STATE } kind;

/* Where the part of a member ends; `last` is the end of the one before. */
static int64_t part_end(const ms_flat_param *flat, const ms_member *member, kind what, int64_t last)
{
    if (what == WHOLE) return end_of(flat, member);
    if (what == GRADIENT) return member->packed + elements_of(member);
    if (is_by_rows(flat)) return member->slot + member->part;
    return member->length ? member->at + member->length : last;
}

/* A part for each parameter, or piece, and one for the padding; of a shard also one for empty
 * pieces. */
static ms_status split(ms_flat_param *flat, ms_storage *storage, kind what, ms_dtype dtype)
{
    bool whole = what == WHOLE || what == GRADIENT;
    ms_context *context = ms_engine_context(flat->unit->fsdp->source.engine);
    void *memory = NULL;
    ms_status status =
        ms_allocate(context, (flat->count + 2) * sizeof(int64_t), "a flat parameter", &memory);
    if (status) return status;
    int64_t *ends = memory, last = 0;
    for (uint32_t i = 0; i < flat->count; i++)
        ends[i] = last = part_end(flat, &flat->members[i], what, last);
    ends[flat->count] = whole ? flat->padded : flat->length;
    ends[flat->count + 1] = ends[flat->count] + (what == SHARD ? 1 : 0);
    status = split_at(flat, storage, ends, flat->count + 2, ms_dtype_bytes(dtype));
    ms_release(context, memory);
    return status;
}

ms_status ms_flat_param_split_state(ms_flat_param *flat, ms_storage *storage, ms_dtype dtype)
{
    return split(flat, storage, STATE, dtype);
}

static ms_status whole_on(ms_flat_param *flat, ms_storage *storage, ms_dtype dtype, ms_tensor **out)
{
    ms_status status = split(flat, storage, WHOLE, dtype);
    if (!status) status = ms_tensor_on(storage, dtype, 1, &flat->padded, out);
    if (!status) ms_storage_mark_parameter(storage, 0, ms_storage_bytes(storage));
    return status;
}

/* Where nothing is to be copied there it takes no memory yet. */
static ms_status new_whole(ms_flat_param *flat, ms_dtype dtype, ms_form *form)
{
    ms_engine *engine = flat->unit->fsdp->source.engine;
    ms_storage *storage = NULL;
    size_t bytes = (size_t)flat->padded * ms_dtype_bytes(dtype);
    bool later = flat->blank && ms_flat_param_is_sharded(flat) && form == &flat->form;
    ms_status status = later ? ms_storage_new_meta(engine, bytes, &storage)
                             : ms_storage_new(ms_engine_current(engine), bytes, &storage);
    if (!status) status = whole_on(flat, storage, dtype, &form->whole);
    ms_storage_release(storage);
    return status;
}

/* A gather of one parameter alone needs none: its shards are in the order of its rows. */
static ms_status new_wire(ms_flat_param *flat, ms_dtype dtype, ms_form *form)
{
    ms_engine *engine = flat->unit->fsdp->source.engine;
    ms_storage *storage = NULL;
    size_t bytes = (size_t)flat->padded * ms_dtype_bytes(dtype);
    if (!is_by_rows(flat) || flat->count == 1 || flat->numbers == 0) return MS_OK;
    ms_status status = ms_storage_new(ms_engine_current(engine), bytes, &storage);
    if (!status) status = ms_tensor_on(storage, dtype, 1, &flat->padded, &form->wire);
    if (!status) status = ms_storage_drop(storage, flat->unit->name);
    ms_storage_release(storage);
    return status;
}

/* In the group's memory, where the ranks that gather it read it without a copy. */
static ms_status new_shard(ms_flat_param *flat)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    size_t bytes = (size_t)ms_flat_param_shard_bytes(flat) + ms_dtype_bytes(flat->dtype);
    ms_stream *current = ms_engine_current(fsdp->source.engine);
    ms_storage *storage = NULL;
    int64_t all = flat->length + 1;
    if (!ms_flat_param_is_sharded(flat) && !fsdp->offload) {
        flat->shard = ms_tensor_retain(flat->form.whole);
        flat->source = ms_tensor_retain(flat->form.whole);
        return MS_OK;
    }
    ms_status status = fsdp->offload ? ms_storage_new_offloaded(current, bytes, &storage)
                                     : ms_group_storage(flat->shards, current, bytes, &storage);
    if (!status) status = split(flat, storage, SHARD, flat->dtype);
    if (!status) status = ms_tensor_on(storage, flat->dtype, 1, &flat->length, &flat->shard);
    if (!status) status = ms_tensor_on(storage, flat->dtype, 1, &all, &flat->source);
    ms_storage_release(storage);
    return status;
}

/* What travels in place of the shard, in the group's memory. */
static ms_status new_cast(ms_flat_param *flat, ms_dtype dtype, ms_form *form)
{
    ms_stream *current = ms_engine_current(flat->unit->fsdp->source.engine);
    size_t bytes = (size_t)flat->length * ms_dtype_bytes(dtype);
    ms_storage *storage = NULL;
    if (!ms_flat_param_is_sharded(flat)) return MS_OK;
    ms_status status = ms_group_storage(flat->shards, current, bytes, &storage);
    if (!status) status = ms_tensor_on(storage, dtype, 1, &flat->length, &form->cast);
    if (!status) status = ms_storage_drop(storage, flat->unit->name);
    ms_storage_release(storage);
    return status;
}

/* What gathers give from now on, if it is not in the shard's dtype. */
static ms_status make_low(ms_flat_param *flat)
{
    ms_form *low = &flat->other;
    flat->full = true;
    if (flat->computes == flat->dtype) return MS_OK;
    ms_status status = new_whole(flat, flat->computes, low);
    if (!status) status = ms_storage_drop(ms_tensor_storage(low->whole), flat->unit->name);
    if (!status) status = new_wire(flat, flat->computes, low);
    if (!status) status = new_cast(flat, flat->computes, low);
    if (!status) ms_flat_param_set_full(flat, false);
    return status;
}

static void natural_strides(uint32_t dims, const int64_t *shape, int64_t *strides)
{
    int64_t step = 1;
    for (uint32_t d = dims; d-- > 0;) {
        strides[d] = step;
        step *= shape[d];
    }
}

ms_status ms_member_piece_of(const ms_member *member, ms_tensor *shard, ms_tensor **out)
{
    int64_t strides[MS_DIMS_MAX];
    natural_strides(member->piece_dims, member->piece, strides);
    return ms_tensor_window(shard, member->piece_dims, member->piece, strides,
                            member->length ? member->at : 0, out);
}

/* The view of the flat tensor in the member's shape, which begins there. */
static ms_status view_of(ms_tensor *flat, const ms_member *member, int64_t begin, ms_tensor **out)
{
    int64_t strides[MS_DIMS_MAX];
    natural_strides(member->dims, member->shape, strides);
    return ms_tensor_window(flat, member->dims, member->shape, strides,
                            elements_of(member) ? begin : 0, out);
}

ms_status ms_flat_param_view(ms_tensor *gradient, const ms_member *member, ms_tensor **out)
{
    return view_of(gradient, member, member->packed, out);
}

static ms_status zero(ms_tensor *flat, int64_t begin, int64_t end)
{
    int64_t count = end - begin, one = 1;
    ms_tensor *view = NULL;
    if (count == 0) return MS_OK;
    ms_status status = ms_tensor_window(flat, 1, &count, &one, begin, &view);
    if (!status) status = ms_fill_into(ms_tensor_engine(flat), view, 0);
    ms_tensor_release(view);
    return status;
}

/* Copies all values to the whole flat parameter: zeros for parameters on "meta", which get theirs
 * from ms_fsdp_begin_values on. */
static ms_status fill_whole(ms_flat_param *flat)
{
    ms_status status = MS_OK;
    int64_t end = 0;
    if (flat->blank)
        return ms_flat_param_is_sharded(flat)
                   ? MS_OK
                   : ms_fill_into(flat->unit->fsdp->source.engine, flat->form.whole, 0);
    for (uint32_t i = 0; i < flat->count && !status; i++) {
        ms_member *member = &flat->members[i];
        ms_tensor *view = NULL;
        end = end_of(flat, member);
        status = view_of(flat->form.whole, member, member->begin, &view);
        if (!status && ms_tensor_is_meta(member->tensor))
            status = ms_fill_into(flat->unit->fsdp->source.engine, view, 0);
        else if (!status && elements_of(member))
            status = ms_copy_into(flat->unit->fsdp->source.engine, member->tensor, view);
        if (!status) status = zero(flat->form.whole, member->begin + elements_of(member), end);
        ms_tensor_release(view);
    }
    return status ? status : zero(flat->form.whole, end, flat->padded);
}

/* count elements of one tensor to another. */
static ms_status copy_span(ms_tensor *from, int64_t first, ms_tensor *to, int64_t at, int64_t count)
{
    int64_t one = 1;
    ms_tensor *source = NULL, *place = NULL;
    if (count == 0) return MS_OK;
    ms_status status = ms_tensor_window(from, 1, &count, &one, first, &source);
    if (!status) status = ms_tensor_window(to, 1, &count, &one, at, &place);
    if (!status) status = ms_copy_into(ms_tensor_engine(to), source, place);
    ms_tensor_release(source);
    ms_tensor_release(place);
    return status;
}

void ms_flat_param_set_full(ms_flat_param *flat, bool yes)
{
    ms_form before = flat->form;
    if (!flat->other.whole || flat->full == yes) return;
    flat->form = flat->other;
    flat->other = before;
    flat->full = yes;
}

/* An unsharded parameter is cast to its whole at once. What forward saved of that stays right while
 * the parameter is unchanged. */
ms_status ms_flat_param_cast(ms_flat_param *flat)
{
    ms_engine *engine = flat->unit->fsdp->source.engine;
    ms_tensor *to = flat->form.cast ? flat->form.cast : flat->form.whole;
    if (!flat->form.cast) ms_tensor_restoring(engine, to, flat->source);
    ms_status status = ms_copy_into(engine, flat->shard, to);
    if (!flat->form.cast) ms_tensor_restoring(engine, NULL, NULL);
    return status;
}

ms_status ms_flat_param_keep_own(ms_flat_param *flat)
{
    uint32_t rank = ms_group_rank(flat->shards);
    ms_status status = MS_OK;
    if (!flat->form.wire)
        return copy_span(flat->form.whole, flat->length * rank, flat->shard, 0, flat->length);
    for (uint32_t i = 0; i < flat->count && !status; i++) {
        const ms_member *member = &flat->members[i];
        status = copy_span(flat->form.whole, member->begin + member->part * rank, flat->shard,
                           member->slot, member->part);
    }
    return status;
}

/* The element for empty pieces gets a value, as all memory that may be read. */
static ms_status fill_shard(ms_flat_param *flat)
{
    int64_t one = 1;
    ms_tensor *last = NULL;
    if (!ms_flat_param_is_apart(flat)) return MS_OK;
    if (flat->blank) return ms_fill_into(flat->unit->fsdp->source.engine, flat->source, 0);
    ms_status status = ms_flat_param_keep_own(flat);
    if (!status) status = ms_tensor_window(flat->shard, 1, &one, &one, flat->length, &last);
    if (!status) status = ms_fill_into(flat->unit->fsdp->source.engine, last, 0);
    ms_tensor_release(last);
    return status;
}

/* One copy for each parameter, so that each restores a part as a whole. */
ms_status ms_flat_param_arrange(ms_flat_param *flat)
{
    ms_engine *engine = flat->unit->fsdp->source.engine;
    ms_tensor *whole = flat->offloaded ? flat->offloaded : flat->form.whole;
    ms_status status = MS_OK;
    ms_tensor_restoring(engine, whole, flat->source);
    for (uint32_t i = 0; i < flat->count && !status; i++) {
        const ms_member *member = &flat->members[i];
        const int64_t shape[] = { flat->padded / flat->length, member->part };
        const int64_t apart[] = { flat->length, 1 }, dense[] = { member->part, 1 };
        ms_tensor *from = NULL, *to = NULL;
        if (member->part == 0) continue;
        status = ms_tensor_window(flat->form.wire, 2, shape, apart, member->slot, &from);
        if (!status) status = ms_tensor_window(whole, 2, shape, dense, member->begin, &to);
        if (!status) status = ms_copy_into(engine, from, to);
        ms_tensor_release(from);
        ms_tensor_release(to);
    }
    ms_tensor_restoring(engine, NULL, NULL);
    return status;
}

/* ------------------------------------------------------- in the second pool */

ms_status ms_flat_param_make_offloaded(ms_flat_param *flat)
{
    ms_engine *engine = flat->unit->fsdp->source.engine;
    ms_dtype dtype = ms_tensor_dtype(flat->form.whole);
    size_t bytes = (size_t)flat->padded * ms_dtype_bytes(dtype);
    ms_storage *storage = NULL;
    if (!ms_flat_param_is_apart(flat)) return MS_OK;
    if (!ms_flat_param_is_sharded(flat)) {
        flat->offloaded = ms_tensor_retain(flat->shard);
        return MS_OK;
    }
    ms_status status = ms_storage_new_offloaded(ms_engine_current(engine), bytes, &storage);
    if (!status) status = whole_on(flat, storage, dtype, &flat->offloaded);
    ms_storage_release(storage);
    return status;
}

void ms_flat_param_offload(ms_flat_param *flat)
{
    if (!flat->offloaded || flat->resident) return;
    flat->resident = flat->form.whole;
    flat->form.whole = ms_tensor_retain(flat->offloaded);
    flat->form.whole_version = ms_tensor_version(flat->form.whole);
}

void ms_flat_param_unload(ms_flat_param *flat)
{
    if (flat->resident) {
        ms_tensor_release(flat->form.whole);
        flat->form.whole = flat->resident;
        flat->form.whole_version = ms_tensor_version(flat->form.whole);
        flat->resident = NULL;
    }
    ms_tensor_release(flat->offloaded);
    flat->offloaded = NULL;
}

ms_status ms_copy_offloaded(ms_engine *engine, ms_tensor *from, ms_tensor **out)
{
    ms_storage *storage = NULL;
    ms_tensor *made = NULL;
    ms_status status = ms_storage_new_offloaded(ms_engine_current(engine),
                                                (size_t)ms_tensor_bytes(from), &storage);
    if (!status)
        status = ms_tensor_on(storage, ms_tensor_dtype(from), ms_tensor_dims(from),
                              ms_tensor_shape(from), &made);
    if (!status) status = ms_copy_into(engine, from, made);
    ms_storage_release(storage);
    if (status) ms_tensor_release(made);
    else *out = made;
    return status;
}

/* ----------------------------------------------------------------- gradients */

bool ms_flat_param_is_in_bucket(const ms_flat_param *flat)
{
    return !ms_flat_param_is_sharded(flat) && flat->reduces == flat->gradient_dtype
           && !flat->unit->fsdp->offload;
}

ms_status ms_flat_param_new_beside(ms_flat_param *flat, ms_dtype dtype, ms_tensor **out)
{
    const ms_fsdp *fsdp = flat->unit->fsdp;
    ms_storage *storage = NULL;
    size_t bytes = (size_t)flat->length * ms_dtype_bytes(dtype);
    if (!fsdp->offload) return ms_tensor_new(fsdp->source.engine, dtype, 1, &flat->length, out);
    ms_status status =
        ms_storage_new_offloaded(ms_engine_current(fsdp->source.engine), bytes, &storage);
    if (!status) status = ms_tensor_on(storage, dtype, 1, &flat->length, out);
    ms_storage_release(storage);
    return status;
}

ms_status ms_flat_param_add(ms_tensor *to, ms_tensor *from)
{
    ms_engine *engine = ms_tensor_engine(to);
    ms_tensor *alike = NULL, *same = NULL;
    ms_status status = ms_op_as_dtype(engine, from, ms_tensor_dtype(to), &alike);
    ms_tensor *inputs[] = { to, alike };
    if (!status) status = ms_op_apply(engine, &ms_op_add, NULL, true, inputs, 2, &same, 1);
    ms_tensor_release(same);
    ms_tensor_release(alike);
    return status;
}

/* At the first reduction. Pieces' gradients are these views from then on. */
ms_status ms_flat_param_make_reduced(ms_flat_param *flat)
{
    if (flat->reduced) return MS_OK;
    ms_tensor *made = NULL;
    ms_status status = ms_flat_param_new_beside(flat, flat->gradient_dtype, &made);
    for (uint32_t i = 0; i < flat->count && !status; i++) {
        ms_member *member = &flat->members[i];
        status = ms_flat_param_is_sharded(flat)
                     ? ms_member_piece_of(member, made, &member->reduced)
                     : ms_flat_param_view(made, member, &member->reduced);
    }
    if (!status) {
        flat->reduced = made;
        return MS_OK;
    }
    for (uint32_t i = 0; i < flat->count; i++) {
        ms_tensor_release(flat->members[i].reduced);
        flat->members[i].reduced = NULL;
    }
    ms_tensor_release(made);
    return status;
}

/* The bucket's lists, in one allocation that starts with `gradients`. */
static ms_status make_lists(ms_flat_param *flat)
{
    ms_bucket *bucket = &flat->bucket;
    void *memory = NULL;
    ms_status status = ms_allocate(
        ms_engine_context(bucket->engine),
        flat->count * (3 * sizeof(void *) + sizeof(int64_t) + sizeof(uint32_t)), "a unit", &memory);
    if (status) return status;
    bucket->gradients = memory;
    bucket->parameters = bucket->gradients + flat->count;
    const char **names = (const char **)(void *)(bucket->parameters + flat->count);
    int64_t *parts = (int64_t *)(void *)(names + flat->count);
    uint32_t *positions = (uint32_t *)(void *)(parts + flat->count);
    for (uint32_t i = 0; i < flat->count; i++) {
        bucket->parameters[i] = flat->members[i].tensor;
        names[i] = flat->members[i].name;
        positions[i] = flat->members[i].position;
        parts[i] = flat->members[i].part;
    }
    bucket->names = names;
    bucket->positions = positions;
    bucket->parts = is_by_rows(flat) ? parts : NULL;
    bucket->count = flat->count;
    return MS_OK;
}

/* Parameters of fewer ranks have no replicas. */
static ms_status choose_groups(ms_flat_param *flat, ms_bucket *bucket)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    *bucket = (ms_bucket){ .engine = fsdp->source.engine,
                           .group = fsdp->group,
                           .shards = fsdp->shards,
                           .replicas = fsdp->replicas,
                           .kind = fsdp->kind };
    if (!flat->own) return MS_OK;
    bucket->group = bucket->shards = flat->shards;
    bucket->kind =
        ms_group_size(flat->shards) == 1 ? MS_BUCKET_ALL_REDUCE : MS_BUCKET_REDUCE_SCATTER;
    return ms_comm_alone(fsdp->source.engine, &bucket->replicas);
}

/* The gradient buffer, in the group's memory. It begins dropped: backward takes its memory. */
static ms_status make_bucket(ms_flat_param *flat)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    ms_bucket *bucket = &flat->bucket;
    ms_storage *storage = NULL;
    size_t bytes = (size_t)flat->padded * ms_dtype_bytes(flat->reduces);
    ms_status status = choose_groups(flat, bucket);
    snprintf(bucket->label, sizeof bucket->label, "%.31s", flat->members[0].name);
    if (!status) status = make_lists(flat);
    if (!status)
        status = ms_group_storage(bucket->group, ms_engine_current(fsdp->source.engine), bytes,
                                  &storage);
    if (!status) status = split(flat, storage, GRADIENT, flat->reduces);
    if (!status) status = ms_tensor_on(storage, flat->reduces, 1, &flat->padded, &bucket->flat);
    for (uint32_t i = 0; i < flat->count && !status; i++) {
        status = ms_flat_param_view(bucket->flat, &flat->members[i], &bucket->gradients[i]);
        flat->members[i].gradient = bucket->gradients[i];
    }
    if (!status) bucket->buffer = ms_tensor_retain(bucket->flat);
    if (!status) status = ms_storage_drop(storage, ms_unit_called(flat->unit));
    ms_storage_release(storage);
    return status;
}

/* --------------------------------------------------------------- life of one */

/* The tensors become pieces last, when nothing can fail any more. Graphs that were recorded before
 * keep the old memory. */
ms_status ms_flat_param_make(ms_flat_param *flat)
{
    flat->blank = true;
    for (uint32_t i = 0; i < flat->count; i++)
        flat->blank &= ms_tensor_is_meta(flat->members[i].tensor);
    ms_status status = new_whole(flat, flat->dtype, &flat->form);
    if (!status) status = new_wire(flat, flat->dtype, &flat->form);
    if (!status) status = new_shard(flat);
    if (!status) status = ms_secondary_shard_make(flat);
    if (!status) status = ms_fp8_gather_make(flat);
    if (!status) status = fill_whole(flat);
    if (!status) status = fill_shard(flat);
    if (!status && flat->trainable) status = make_bucket(flat);
    if (!status && ms_flat_param_is_apart(flat)
        && !ms_storage_is_dropped(ms_tensor_storage(flat->form.whole)))
        status = ms_storage_drop(ms_tensor_storage(flat->form.whole), ms_unit_called(flat->unit));
    if (!status && flat->unit->fsdp->offload) status = new_cast(flat, flat->dtype, &flat->form);
    return status ? status : make_low(flat);
}

static void free_form(ms_form *form)
{
    ms_tensor_release(form->whole);
    ms_tensor_release(form->wire);
    ms_tensor_release(form->cast);
}

void ms_flat_param_free(ms_flat_param *flat)
{
    ms_bucket *bucket = &flat->bucket;
    for (uint32_t i = 0; i < flat->count; i++) {
        ms_tensor_release(flat->members[i].reduced);
        ms_gradients_forget(&flat->members[i]);
        ms_outer_forget(&flat->members[i]);
        if (bucket->gradients) ms_tensor_release(bucket->gradients[i]);
    }
    ms_group_release(flat->shards);
    ms_tensor_release(bucket->buffer);
    ms_tensor_release(bucket->flat);
    if (bucket->gradients) ms_release(ms_engine_context(bucket->engine), bucket->gradients);
    ms_tensor_release(flat->reduced);
    ms_tensor_release(flat->carried);
    ms_tensor_release(flat->summon_copy);
    ms_tensor_release(flat->offloaded);
    ms_tensor_release(flat->resident);
    ms_tensor_release(flat->shard);
    ms_tensor_release(flat->source);
    ms_tensor_release(flat->near);
    ms_fp8_gather_free(flat);
    free_form(&flat->form);
    free_form(&flat->other);
}
