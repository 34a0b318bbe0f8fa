/* elementwise.c: the tasks of the elementwise kernels: tiles, chunks, and staging of operands that
 * are not contiguous f32 or i64.
 *
 * A kernel of another device computes floats in f32 and integers in i64, takes any strides (0
 * repeats an operand), and allows the result to be one of the operands. Exponentials and logarithms
 * of its own may differ in the last bits. */
#include "ops/cpu/elementwise.h"

#include "ops/cpu/convert.h"
#include "ops/cpu/strided.h"

/* One buffer of MS_CHUNK elements of the computing type: i64 for integers, f32 for floats (which
 * use half of it). It lives on the stack and stays in the first-level cache. */
typedef union stage {
    int64_t whole[MS_CHUNK];
    float real[MS_CHUNK];
} stage;

/* One elementwise task, constant while tiles run. `direct` says for each operand, and direct_out
 * for the result, whether kernels may use the tensor's own memory: it has the computing type and is
 * contiguous in the innermost dimension. The kernels see contiguous elements of one computing type
 * only: strides, dtypes and broadcasts are this file's concern. A device whose loads convert for
 * free needs none of the staging. */
typedef struct work {
    const ms_elementwise_args *args;
    const ms_elementwise_kernels *kernels;
    const ms_convert_kernels *convert;
    ms_elementwise_scalars scalars;
    int64_t count;
    uint32_t tiles;
    bool direct[3], direct_out; /* of the computing type, contiguous in the innermost dimension */
} work;

/* A number as i64, as the conversions do it: values beyond i64 become its bounds, and NaN becomes
 * 0. Operators refuse numbers for integer tensors that are not whole, so nothing is cut off
 * here. */
static int64_t whole_number(double value)
{
    if (value != value) return 0;
    if (value >= 9223372036854775808.0) return INT64_MAX;
    if (value < -9223372036854775808.0) return INT64_MIN;
    return (int64_t)value;
}

/* Copies n elements of operand k, from the cursor on, into contiguous memory. They may span several
 * rows. The cursor is passed by value, so the caller's stays where it is. Rows that are shorter
 * than a chunk are packed one after the other, so that a kernel is called for up to MS_CHUNK
 * elements whatever the shape. */
static void gather(const ms_loop *loop, ms_cursor cursor, uint32_t k, const void *from, size_t size,
                   void *to, int64_t n)
{
    uint32_t inner = loop->dims - 1;
    for (int64_t done = 0; done < n;) {
        int64_t run = ms_cursor_row(loop, &cursor);
        if (run > n - done) run = n - done;
        ms_copy_strided((char *)to + (size_t)done * size, 1,
                        (const char *)from + cursor.offset[k] * (int64_t)size,
                        loop->strides[k][inner], run, size);
        ms_cursor_advance(loop, &cursor, run);
        done += run;
    }
}

/* The reverse of gather, for the result. It writes only what n covers: the elements between those
 * of a strided result keep their values. */
static void scatter(const ms_loop *loop, ms_cursor cursor, void *to, size_t size, const void *from,
                    int64_t n)
{
    uint32_t inner = loop->dims - 1;
    for (int64_t done = 0; done < n;) {
        int64_t run = ms_cursor_row(loop, &cursor);
        if (run > n - done) run = n - done;
        ms_copy_strided((char *)to + cursor.offset[0] * (int64_t)size, loop->strides[0][inner],
                        (const char *)from + (size_t)done * size, 1, run, size);
        ms_cursor_advance(loop, &cursor, run);
        done += run;
    }
}

/* n elements of operand k (1 .. 3) in the computing type: in the tensor itself if it is direct and
 * the elements are in one row, else in `to`. Of another dtype: converted from the tensor's own
 * memory where the elements follow each other, else from a copy in `raw`. */
static const void *operand(const work *w, const ms_cursor *cursor, uint32_t k, int64_t n, stage *to)
{
    const ms_elementwise_args *args = w->args;
    const ms_loop *loop = &args->loop;
    ms_dtype dtype = (ms_dtype)args->in_dtype[k - 1];
    const void *base = args->in[k - 1];
    size_t size = ms_dtype_bytes(dtype), computing = args->integers ? 8 : 4;
    bool in_row = n <= ms_cursor_row(loop, cursor),
         plain = dtype == (args->integers ? MS_I64 : MS_F32);
    if (w->direct[k - 1] && in_row)
        return (const char *)base + cursor->offset[k] * (int64_t)computing;
    if (plain) {
        gather(loop, *cursor, k, base, size, to, n);
        return to;
    }
    uint64_t raw[MS_CHUNK];
    const void *from = (const char *)base + cursor->offset[k] * (int64_t)size;
    if (loop->strides[k][loop->dims - 1] != 1 || !in_row) {
        gather(loop, *cursor, k, base, size, raw, n);
        from = raw;
    }
    if (args->integers) w->convert->to_i64[dtype](to->whole, from, (size_t)n);
    else w->convert->to_f32[dtype](to->real, from, (size_t)n);
    return to;
}

/* Converts n results, which are in `from`, to the output's dtype and stores them. Where the output
 * is contiguous, the conversion writes it directly. 16-bit operands are widened exactly and the
 * function is computed in f32, so this is the only rounding to 16 bits. */
static void result(const work *w, const ms_cursor *cursor, const void *from, int64_t n)
{
    const ms_elementwise_args *args = w->args;
    const ms_loop *loop = &args->loop;
    ms_dtype dtype = (ms_dtype)args->out_dtype;
    size_t size = ms_dtype_bytes(dtype);
    uint64_t raw[MS_CHUNK];
    bool in_place = loop->strides[0][loop->dims - 1] == 1 && n <= ms_cursor_row(loop, cursor);
    void *to = in_place ? (void *)((char *)args->out + cursor->offset[0] * (int64_t)size) : raw;
    if (args->integers) w->convert->from_i64[dtype](to, from, (size_t)n);
    else w->convert->from_f32[dtype](to, from, (size_t)n);
    if (!in_place) scatter(loop, *cursor, args->out, size, raw, n);
}

/* Operands beyond the kernel's own number are NULL and not read. The operator has refused what
 * integers do not do, so the entry for i64 exists. */
static void compute(const work *w, void *out, const void *const in[3], int64_t n)
{
    const ms_elementwise_args *args = w->args;
    if (args->integers)
        w->kernels->i64[args->kernel](out, in[0], in[1], in[2], (size_t)n, &w->scalars);
    else w->kernels->f32[args->kernel](out, in[0], in[1], in[2], (size_t)n, &w->scalars);
}

/* Computes n elements, at most MS_CHUNK unless everything is direct. Inputs are staged before the
 * output is written, so an output that is also an input works in place. An operand that overlaps
 * the output in another window has been copied by the host (ms_elementwise_into). */
static void chunk(const work *w, const ms_cursor *cursor, const void *const splat[3], int64_t n)
{
    const ms_elementwise_args *args = w->args;
    stage stages[4];
    const void *in[3] = { NULL, NULL, NULL };
    bool out_direct = w->direct_out && n <= ms_cursor_row(&args->loop, cursor);
    void *out = &stages[3];
    if (out_direct) out = (char *)args->out + cursor->offset[0] * (args->integers ? 8 : 4);
    /* A cast needs no kernel between its two conversions. */
    bool bare = args->kernel == MS_KERNEL_cast && splat[0] == NULL && !out_direct;
    for (uint32_t k = 0; k < args->operands; k++)
        in[k] = splat[k] != NULL ? splat[k] : operand(w, cursor, k + 1, n, &stages[k]);
    if (!bare) compute(w, out, in, n);
    if (!out_direct) result(w, cursor, bare ? in[0] : out, n);
}

/* Fills a chunk with an operand that has one value everywhere, once per tile: kernels then need no
 * form for scalars. An operand that is a tensor is read here and not on the host: an earlier task
 * may have written it. */
static void spread(const work *w, uint32_t k, stage *to)
{
    const ms_elementwise_args *args = w->args;
    ms_dtype dtype = (ms_dtype)args->in_dtype[k];
    if (args->integers) {
        int64_t value = whole_number(args->number);
        if (dtype != MS_NUMBER) w->convert->to_i64[dtype](&value, args->in[k], 1);
        for (int i = 0; i < MS_CHUNK; i++) to->whole[i] = value;
    } else {
        float value = (float)args->number;
        if (dtype != MS_NUMBER) w->convert->to_f32[dtype](&value, args->in[k], 1);
        for (int i = 0; i < MS_CHUNK; i++) to->real[i] = value;
    }
}

/* A plain number, or a tensor that is broadcast along every dimension. A tensor of one element may
 * belong to another float dtype than the other operands; it is converted once. */
static bool is_constant(const ms_elementwise_args *args, uint32_t k)
{
    if (args->in_dtype[k] == MS_NUMBER) return true;
    for (uint32_t d = 0; d < args->loop.dims; d++)
        if (args->loop.strides[k + 1][d] != 0) return false;
    return true;
}

/* Without staging a chunk can be as long as the row, which spares the overhead of cutting it. A
 * tile writes a range of positions that no other tile writes, and the loop is in the order of the
 * result's memory, so writes run forward. */
static void tile(void *context, uint32_t index, ms_thread *thread)
{
    (void)thread;
    const work *w = context;
    const ms_loop *loop = &w->args->loop;
    int64_t at = ms_tile_begin(w->count, w->tiles, index),
            end = ms_tile_begin(w->count, w->tiles, index + 1);
    stage spreads[3];
    const void *splat[3] = { NULL, NULL, NULL };
    bool staged = !w->direct_out;
    for (uint32_t k = 0; k < w->args->operands; k++) {
        if (is_constant(w->args, k)) {
            spread(w, k, &spreads[k]);
            splat[k] = &spreads[k];
        }
        staged = staged || splat[k] != NULL || !w->direct[k];
    }
    ms_cursor cursor;
    ms_cursor_set(loop, at, &cursor);
    /* Long rows are cut into chunks that end with the row; short ones are packed together into full
     * chunks. */
    bool by_row = loop->dims == 1 || loop->shape[loop->dims - 1] >= 128;
    while (at < end) {
        int64_t n = end - at, row = ms_cursor_row(loop, &cursor);
        if ((staged || !by_row) && n > MS_CHUNK) n = MS_CHUNK;
        if (by_row && n > row) n = row;
        chunk(w, &cursor, splat, n);
        at += n;
        /* A packed chunk may have crossed several rows; the cursor moves one row at a time. */
        for (int64_t left = n; left > 0;) {
            int64_t step =
                ms_cursor_row(loop, &cursor) < left ? ms_cursor_row(loop, &cursor) : left;
            ms_cursor_advance(loop, &cursor, step);
            left -= step;
        }
    }
}

/* The bytes that decide the number of tiles leave out constants, which are read once. Each result
 * depends on its own position alone, so the number of tiles shows nowhere. */
static ms_task_result elementwise_run(ms_run *run, void *arguments)
{
    const ms_elementwise_args *args = arguments;
    work w = { .args = args,
               .kernels = ms_elementwise_kernels_for(ms_run_isa(run)),
               .convert = ms_convert_kernels_for(ms_run_isa(run)),
               .scalars = { (float)args->value, (float)args->high, whole_number(args->value),
                            whole_number(args->high) },
               .count = ms_loop_count(&args->loop) };
    uint32_t inner = args->loop.dims - 1;
    uint8_t computing = args->integers ? MS_I64 : MS_F32;
    uint64_t bytes = ms_dtype_bytes((ms_dtype)args->out_dtype);
    w.direct_out = args->out_dtype == computing && args->loop.strides[0][inner] == 1;
    for (uint32_t k = 0; k < args->operands; k++) {
        w.direct[k] = args->in_dtype[k] == computing && args->loop.strides[k + 1][inner] == 1;
        if (!is_constant(args, k)) bytes += ms_dtype_bytes((ms_dtype)args->in_dtype[k]);
    }
    w.tiles = ms_tiles(w.count, (uint64_t)w.count * bytes);
    ms_run_tiles(run, w.tiles, tile, &w);
    return MS_TASK_DONE;
}

/* One function runs all kernels, and args->kernel chooses the loop: a task of its own only gives
 * each kernel its name in traces and messages. */
#define TASK(name)                                                                       \
    const ms_task ms_cpu_##name = { #name, elementwise_run, sizeof(ms_elementwise_args), \
                                    MS_KIND_COMPUTE };
MS_ELEMENTWISE_KERNELS(TASK)
