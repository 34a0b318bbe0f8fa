/* codec.c: rows of floats to bytes and back on the CPU: tiles of whole blocks.
 *
 * A kernel of another device must write the same bytes for the same numbers, since payloads travel
 * between ranks: the scale is an f32, rounding is to the nearest or by the draws at the same
 * positions, and unused bits are 0. How blocks are divided among threads is free. */
#include "ops/cpu/codec.h"

#include <stdatomic.h>
#include <string.h>

#include "ops/cpu/random.h"

/* What the tiles of one task share. A unit is one block of one row; where decoding adds up all
 * rows, a unit is one block of every row, so that one thread writes each output. `error` of encode
 * has the rows of x, so tiles of encode write disjoint parts of three arrays. */
typedef struct job {
    const ms_codec_args *args;
    const ms_codec_kernels *kernels;
    const ms_random_kernels *random;
    int64_t blocks, units; /* blocks of a row; of all rows that are cut into tiles */
    uint32_t tiles;
    _Atomic bool no_memory;
} job;

/* Tiles of at least 16384 numbers, at most 64, by shape alone. The bytes do not depend on the
 * number of tiles, since every block is coded alone; ranks with different processors still write
 * the same payload. */
static uint32_t tiles_for(int64_t units, int64_t numbers)
{
    int64_t tiles = numbers / 16384;
    tiles = tiles > 64 ? 64 : tiles;
    if (tiles > units) return (uint32_t)units;
    return (uint32_t)(tiles < 1 ? 1 : tiles);
}

/* Where a block begins in its row, its length, and where its scale and codes are in the payload. A
 * row's payload has all scales first, then all codes; bare codecs have no scales. Units of one row
 * write different bytes of its payload, so tiles may be cut between them. */
typedef struct place {
    int64_t first, n;
    uint8_t *scale, *codes;
} place;

/* A block begins at a whole byte: the operator refuses block lengths whose codes would not fill
 * whole bytes. Only the last block of a row may be shorter. */
static place place_of(const job *j, int64_t row, int64_t block)
{
    const ms_codec_args *args = j->args;
    place p = { .first = block * args->codec.block };
    p.n = args->n - p.first < args->codec.block ? args->n - p.first : args->codec.block;
    p.scale = (uint8_t *)args->payload + row * args->bytes
              + (args->codec.bare ? 0 : block * (int64_t)sizeof(float));
    p.codes = (uint8_t *)args->payload + row * args->bytes
              + (args->codec.bare ? 0 : j->blocks * (int64_t)sizeof(float))
              + p.first * ms_codec_bits(args->codec.kind) / 8;
    return p;
}

/* One number from [0, 1) for each element of a block. Whole groups of random numbers are drawn, so
 * that a block's numbers depend on its place alone and not on the tile that codes it. NULL when
 * there is no memory. The position counts in whole groups for each unit, so two blocks never share
 * a number even where the length of a block is no multiple of the group. */
static float *draw(const job *j, ms_thread *thread, int64_t unit)
{
    size_t group =
        (size_t)(j->args->codec.block + MS_RANDOM_GROUP - 1) / MS_RANDOM_GROUP * MS_RANDOM_GROUP;
    float *u = ms_thread_scratch(thread, 0, group * sizeof *u);
    ms_random_args uniform = { .random = j->args->random,
                               .a = 0,
                               .b = 1,
                               .least = 0,
                               /* The greatest f32 below 1: with u = 1 the stochastic rounding would
                                * round a whole number up. */
                               .greatest = 0x1.fffffep-1f,
                               .kind = MS_RANDOM_UNIFORM };
    if (u != NULL) j->random->uniform(u, group, (uint64_t)unit * group, &uniform);
    return u;
}

/* The scale is copied by bytes, since a payload's address need not be aligned to a float. A block
 * is read twice, once for its scale and once for its codes; blocks are short, so the second read is
 * from a cache. */
static void encode_tile(void *context, uint32_t tile, ms_thread *thread)
{
    job *j = context;
    const ms_codec_args *args = j->args;
    size_t item = ms_dtype_bytes((ms_dtype)args->dtype);
    for (int64_t unit = j->units * tile / j->tiles; unit < j->units * (tile + 1) / j->tiles;
         unit++) {
        place p = place_of(j, unit / j->blocks, unit % j->blocks);
        size_t at = (size_t)(unit / j->blocks * args->n + p.first) * item;
        float scale = 0, *u = args->codec.stochastic ? draw(j, thread, unit) : NULL;
        if (args->codec.stochastic && u == NULL) {
            atomic_store(&j->no_memory, true);
            return;
        }
        j->kernels->encode[args->codec.kind](&args->codec, (ms_dtype)args->dtype,
                                             (const char *)args->x + at, p.n, u, &scale, p.codes,
                                             args->error ? (char *)args->error + at : NULL);
        if (!args->codec.bare) memcpy(p.scale, &scale, sizeof scale);
    }
}

/* Decodes one block of one row; with `add` it is added to what `out` holds. A bare codec has no
 * scale in its payload: its codes count as they are. */
static void decode_one(const job *j, int64_t row, int64_t block, bool add, float *out)
{
    place p = place_of(j, row, block);
    float scale = 1;
    if (!j->args->codec.bare) memcpy(&scale, p.scale, sizeof scale);
    j->kernels->decode[j->args->codec.kind](p.codes, p.n, scale, add, out + p.first);
}

/* With `sum` the rows are added in order of row for each block, so the order of additions is the
 * same on every rank. Ranks that decode the same payloads must get the same bits, or their models
 * would drift apart. */
static void decode_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    const job *j = context;
    float *out = j->args->x;
    for (int64_t unit = j->units * tile / j->tiles; unit < j->units * (tile + 1) / j->tiles;
         unit++) {
        if (!j->args->sum)
            decode_one(j, unit / j->blocks, unit % j->blocks, false,
                       out + unit / j->blocks * j->args->n);
        else
            for (int64_t row = 0; row < j->args->rows; row++)
                decode_one(j, row, unit, row > 0, out);
    }
}

/* Both directions use the same units but where decoding adds up: then a unit takes one block of
 * every row, and `units` does not count rows. */
static ms_task_result run_tiles(ms_run *run, const ms_codec_args *args, ms_tile_function tile)
{
    job j = { .args = args,
              .kernels = ms_codec_kernels_for(ms_run_isa(run)),
              .random = ms_random_kernels_for(ms_run_isa(run)),
              .blocks = ms_codec_blocks(&args->codec, args->n) };
    j.units = args->sum ? j.blocks : j.blocks * args->rows;
    j.tiles = tiles_for(j.units, args->rows * args->n);
    ms_run_tiles(run, j.tiles, tile, &j);
    if (!j.no_memory) return MS_TASK_DONE;
    ms_run_fail(run, MS_ERROR_MEMORY, "codec: no memory for the random numbers of a block of %lld",
                (long long)args->codec.block);
    return MS_TASK_FAILED;
}

/* The payload is written whole, so it may hold anything before. */
static ms_task_result encode_run(ms_run *run, void *arguments)
{
    return run_tiles(run, arguments, encode_tile);
}

/* The sum of no rows is 0; no tile would write it. */
static ms_task_result decode_run(ms_run *run, void *arguments)
{
    const ms_codec_args *args = arguments;
    if (args->sum && args->rows == 0) memset(args->x, 0, (size_t)args->n * sizeof(float));
    else return run_tiles(run, args, decode_tile);
    return MS_TASK_DONE;
}

const ms_task ms_cpu_codec_encode = { "codec_encode", encode_run, sizeof(ms_codec_args),
                                      MS_KIND_COMPUTE };
const ms_task ms_cpu_codec_decode = { "codec_decode", decode_run, sizeof(ms_codec_args),
                                      MS_KIND_COMPUTE };
