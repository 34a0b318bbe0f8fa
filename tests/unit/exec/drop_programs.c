/* drop_programs.c: random programs of drop, refill, forward, backward, recompute and steps on
 * several streams agree bit for bit with the same programs without a drop. ctest: late cuda
 *
 * A program trains a chain of layers. The weights of a layer are leaves of one flat storage, which
 * is restored from a shard before use; steps write the shard. The layers that are dropped or
 * gathered early, and the moments, are random; so is the memory that is allocated in between. The
 * engine is strict: a wait that the core relies on and that this program did not make is an
 * error. */
#include "grad_support.h"
#include "ranges.h"

#include <stdio.h>

#include "tensor/op.h"

enum { LAYERS_MAX = 5, WIDTH = 8, STEPS = 3, SCRATCH = 6 };

typedef struct layer {
    struct program *program;
    uint32_t index;
    ms_tensor *weight, *bias, *flat, *shard;
    bool present, stale, recomputed;
} layer;

typedef struct program {
    uint64_t seed, place; /* place: how many decisions about memory there have been */
    bool drops;
    ms_engine *engine;
    ms_stream *compute, *gather, *step;
    uint32_t layers;
    layer all[LAYERS_MAX];
    ms_storage *scratch[SCRATCH];
    int drop_count;
} program;

typedef struct outcome {
    float losses[STEPS], gradients[LAYERS_MAX][WIDTH * WIDTH + WIDTH],
        shards[LAYERS_MAX][WIDTH * WIDTH + WIDTH];
    ms_memory memory;
    ms_status status;
    int drops;
} outcome;

#define TRY(call)                 \
    do {                          \
        ms_status tried = (call); \
        if (tried) return tried;  \
    } while (0)

static uint32_t draw(uint64_t seed, uint64_t what, uint32_t below)
{
    uint32_t out[4];
    ms_philox(seed, 78, what, out);
    return out[0] % below;
}

/* Decisions about memory must not change the computation, so they have random numbers of their
 * own. */
static bool chance(program *p, uint32_t below) { return draw(~p->seed, p->place++, below) == 0; }

static ms_status after(ms_stream *stream, const ms_stream *of)
{
    return ms_stream_wait(stream, ms_stream_last(of));
}

/* ------------------------------------------------------------ dropping, refilling */

static ms_status drop_layer(layer *l)
{
    char owner[32];
    program *p = l->program;
    if (!p->drops || !l->present) return MS_OK;
    snprintf(owner, sizeof owner, "layer %u", l->index);
    l->present = false;
    p->drop_count++;
    return ms_storage_drop(ms_tensor_storage(l->flat), owner);
}

/* The layer's values are on their way on the stream `gather`. */
static ms_status gather_layer(layer *l)
{
    program *p = l->program;
    if (l->present && !l->stale) return MS_OK;
    /* The shard's last step, and, where the memory stays, its last use. */
    TRY(after(p->gather, p->step));
    TRY(after(p->gather, p->compute));
    if (!l->present) TRY(ms_storage_refill(ms_tensor_storage(l->flat), p->gather));
    l->present = true;
    ms_engine_set_current(p->engine, p->gather);
    ms_status status = ms_tensor_restore(l->flat, l->shard);
    ms_engine_set_current(p->engine, p->compute);
    l->stale = status != MS_OK;
    return status;
}

static ms_status use_layer(layer *l)
{
    TRY(gather_layer(l));
    return after(l->program->compute, l->program->gather);
}

/* Chance takes and gives memory on some stream, drops layers, and gathers others early. */
static ms_status stir(program *p, uint32_t spared)
{
    ms_stream *streams[] = { p->compute, p->gather, p->step };
    uint32_t i = draw(~p->seed, p->place++, SCRATCH), s = draw(~p->seed, p->place++, 3),
             bytes = 64 * draw(~p->seed, p->place++, 16), l = draw(~p->seed, p->place++, p->layers);
    bool keep = chance(p, 2), drop = chance(p, 2), early = chance(p, 4);
    ms_storage_release(p->scratch[i]);
    p->scratch[i] = NULL;
    if (keep) TRY(ms_storage_new(streams[s], bytes, &p->scratch[i]));
    if (l == spared) return MS_OK;
    if (drop) return drop_layer(&p->all[l]);
    return early && p->drops ? gather_layer(&p->all[l]) : MS_OK;
}

/* --------------------------------------------------------------------- the model */

static ms_status gather_before_backward(void *user, ms_tensor *gradient, ms_tensor **replacement)
{
    layer *l = user;
    (void)gradient;
    (void)replacement;
    for (uint32_t i = l->index + 1; i < l->program->layers; i++)
        if (chance(l->program, 2)) TRY(drop_layer(&l->program->all[i]));
    TRY(stir(l->program, l->index));
    return use_layer(l);
}

static ms_status run_layer(void *user, ms_tensor *const *inputs, uint32_t count,
                           ms_tensor **outputs, uint32_t *made)
{
    layer *l = user;
    ms_tensor *in[] = { inputs[0], l->weight, l->bias };
    (void)count;
    TRY(use_layer(l));
    ms_attributes attributes = { .linear = { .activation = MS_ACTIVATION_GELU } };
    *made = 1;
    return ms_apply(l->program->engine, &ms_op_linear, &attributes, false, in, 3, outputs, 1);
}

static ms_status forward_layer(layer *l, ms_tensor *x, ms_tensor **y)
{
    program *p = l->program;
    uint32_t made = 0;
    uint64_t id = 0;
    if (l->recomputed) TRY(ms_recompute(p->engine, run_layer, l, NULL, NULL, &x, 1, y, &made));
    else TRY(run_layer(l, &x, 1, y, &made));
    TRY(ms_tensor_on_gradient(*y, gather_before_backward, l, NULL, &id));
    if (chance(p, 2)) TRY(drop_layer(l));
    return stir(p, p->layers);
}

static ms_status read_now(program *p, ms_tensor *tensor, float *values)
{
    return ms_engine_is_sim(p->engine) ? MS_OK
                                       : ms_tensor_read(tensor, values, ms_tensor_bytes(tensor));
}

static ms_status forward_backward(program *p, ms_tensor *x, float *value)
{
    ms_tensor *now = ms_tensor_retain(x), *square = NULL, *loss = NULL;
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < p->layers && !status; i++) {
        ms_tensor *next = NULL;
        status = forward_layer(&p->all[i], now, &next);
        ms_tensor_release(now);
        now = next;
    }
    if (!status) status = apply(p->engine, &ms_op_mul, now, now, &square);
    if (!status) status = total(p->engine, square, &loss);
    ms_tensor_release(square);
    ms_tensor_release(now);
    if (!status) status = ms_backward(p->engine, &loss, NULL, 1, false);
    if (!status) status = read_now(p, loss, value);
    ms_tensor_release(loss);
    return status;
}

/* shard -= 1/64 of the gradient, leaf by leaf, on the stream `step`. */
static ms_status step_layer(layer *l)
{
    program *p = l->program;
    ms_tensor *leaves[] = { l->weight, l->bias };
    int64_t at = 0, one = 1;
    for (int i = 0; i < 2; i++) {
        int64_t count = ms_tensor_count(leaves[i]);
        ms_tensor *gradient = ms_tensor_grad(leaves[i]), *line = NULL, *piece = NULL, *same = NULL;
        ms_attributes flat = { .shape = { .dims = 1, .sizes = { count } } },
                      rate = { .scalar = { .value = 1.0 / 64 } };
        TRY(ms_op_unary(p->engine, &ms_op_view, &flat, gradient, &line));
        ms_status status = ms_tensor_window(l->shard, 1, &count, &one, at, &piece);
        ms_tensor *inputs[] = { piece, line };
        if (!status) status = ms_op_apply(p->engine, &ms_op_sub, &rate, true, inputs, 2, &same, 1);
        ms_tensor_release(line);
        ms_tensor_release(piece);
        ms_tensor_release(same);
        if (status) return status;
        at += count;
    }
    l->stale = true;
    return MS_OK;
}

static ms_status step_all(program *p)
{
    TRY(after(p->step, p->compute));
    for (uint32_t i = 0; i < p->layers; i++) {
        TRY(after(p->step, p->gather)); /* it may have been gathered in this loop */
        ms_engine_set_current(p->engine, p->step);
        ms_status status = step_layer(&p->all[i]);
        ms_engine_set_current(p->engine, p->compute);
        if (!status) status = stir(p, p->layers);
        if (status) return status;
    }
    return MS_OK;
}

static ms_status fill(ms_tensor *tensor, uint64_t seed)
{
    float values[WIDTH * WIDTH + WIDTH];
    size_t count = (size_t)ms_tensor_count(tensor);
    for (size_t i = 0; i < count; i++)
        values[i] = ((float)draw(seed, i, 4096) - 2048.0f) * 0x1p-12f;
    return ms_tensor_write(tensor, values, count * sizeof *values);
}

static ms_status make_layer(program *p, uint32_t index)
{
    static const int64_t shape[] = { WIDTH, WIDTH }, flat = WIDTH * WIDTH + WIDTH;
    layer *l = &p->all[index];
    l->program = p;
    l->index = index;
    l->recomputed = draw(p->seed, 100 + index, 3) == 0;
    TRY(ms_tensor_new(p->engine, MS_F32, 2, shape, &l->weight));
    TRY(ms_tensor_new(p->engine, MS_F32, 1, shape, &l->bias));
    TRY(ms_tensor_set_requires_grad(l->weight, true));
    TRY(ms_tensor_set_requires_grad(l->bias, true));
    ms_tensor *leaves[] = { l->weight, l->bias };
    TRY(ms_flatten(p->engine, leaves, 2, &l->flat));
    TRY(ms_tensor_new(p->engine, MS_F32, 1, &flat, &l->shard));
    l->present = l->stale = true;
    return fill(l->shard, p->seed + index);
}

static ms_status run_steps(program *p, outcome *out)
{
    static const int64_t shape[] = { 4, WIDTH };
    ms_tensor *x = NULL;
    for (uint32_t i = 0; i < p->layers; i++) TRY(make_layer(p, i));
    TRY(after(p->step, p->compute));
    TRY(ms_tensor_new(p->engine, MS_F32, 2, shape, &x));
    ms_status status = fill(x, p->seed + 50);
    for (int s = 0; s < STEPS && !status; s++) {
        uint32_t passes = 1 + draw(p->seed, 200 + (uint64_t)s, 2);
        for (uint32_t i = 0; i < p->layers && !status; i++) {
            status = ms_tensor_set_grad(p->all[i].weight, NULL);
            if (!status) status = ms_tensor_set_grad(p->all[i].bias, NULL);
        }
        for (uint32_t i = 0; i < passes && !status; i++)
            status = forward_backward(p, x, &out->losses[s]);
        if (!status) status = step_all(p);
        if (draw(p->seed, 300 + (uint64_t)s, 2)) ms_engine_drop_casts(p->engine);
        if (!status) status = ms_engine_step_end(p->engine, 1);
    }
    ms_tensor_release(x);
    for (uint32_t i = 0; i < p->layers && !status; i++) {
        status = read_now(p, ms_tensor_grad(p->all[i].weight), out->gradients[i]);
        if (!status)
            status = read_now(p, ms_tensor_grad(p->all[i].bias), out->gradients[i] + WIDTH * WIDTH);
        if (!status) status = read_now(p, p->all[i].shard, out->shards[i]);
    }
    return status;
}

static outcome run(uint64_t seed, const char *device, bool drops, uint64_t bytes)
{
    outcome out = { 0 };
    program p = { .seed = seed, .drops = drops, .layers = 2 + draw(seed, 1, LAYERS_MAX - 1) };
    ms_engine_options options = { .device = device,
                                  .own_device = late_device(device),
                                  .threads = 1,
                                  .strict = true,
                                  .for_gpu = device_is_cuda(),
                                  .memory_bytes = bytes };
    OK(ms_engine_new(&options, NULL, &p.engine));
    OK(ms_engine_stream(p.engine, "gather", &p.gather));
    OK(ms_engine_stream(p.engine, "step", &p.step));
    p.compute = ms_engine_current(p.engine);
    if (draw(seed, 2, 2)) ms_engine_set_autocast(p.engine, MS_BF16);
    out.status = run_steps(&p, &out);
    if (out.status && out.status != MS_ERROR_MEMORY)
        fail_msg("seed %llu on %s: %s", (unsigned long long)seed, device,
                 ms_engine_error(p.engine)->message);
    out.memory = ms_engine_memory(p.engine);
    out.drops = p.drop_count;
    for (uint32_t i = 0; i < p.layers; i++) {
        ms_tensor *owned[] = { p.all[i].weight, p.all[i].bias, p.all[i].flat, p.all[i].shard };
        for (int k = 0; k < 4; k++) ms_tensor_release(owned[k]);
    }
    for (int i = 0; i < SCRATCH; i++) ms_storage_release(p.scratch[i]);
    ms_engine_drop_casts(p.engine);
    assert_int_equal(ms_engine_memory(p.engine).live, 0);
    ms_engine_free(p.engine);
    return out;
}

static void assert_same_memory(const outcome *a, const outcome *b)
{
    assert_int_equal(a->status, b->status);
    assert_int_equal(a->memory.peak, b->memory.peak);
    assert_int_equal(a->memory.reserved, b->memory.reserved);
    assert_int_equal(a->memory.waits, b->memory.waits);
}

static void assert_same_bits(uint64_t seed, const outcome *a, const outcome *b)
{
    if (memcmp(a->losses, b->losses, sizeof a->losses) != 0
        || memcmp(a->gradients, b->gradients, sizeof a->gradients) != 0
        || memcmp(a->shards, b->shards, sizeof a->shards) != 0)
        fail_msg("seed %llu: other bits than without a drop", (unsigned long long)seed);
}

static void programs_that_drop_agree_with_those_that_never_do(void **state)
{
    (void)state;
    uint64_t programs = ranges_are_long() ? 2000 : 60;
    int drops = 0, smaller = 0, finished = 0;
    uint64_t waits = 0;
    for (uint64_t seed = 1; seed <= programs; seed++) {
        outcome never = run(seed, "cpu", false, 0), free = run(seed, "cpu", true, 0),
                model = run(seed, "sim", true, 0);
        assert_same_bits(seed, &never, &free);
        assert_same_memory(&free, &model);
        /* With less memory, blocks are handed over between streams, or there is too little. */
        uint64_t less = free.memory.reserved * (15 + draw(seed, 3, 5)) / 20;
        outcome tight = run(seed, "cpu", true, less), tight_model = run(seed, "sim", true, less);
        assert_same_memory(&tight, &tight_model);
        if (!tight.status) assert_same_bits(seed, &never, &tight);
        finished += !tight.status;
        waits += tight.memory.waits;
        drops += free.drops;
        smaller += free.memory.peak < never.memory.peak;
    }
    /* Checks that the programs have dropped and refilled storages. */
    assert_true(drops > (int)programs * 5);
    assert_true(smaller > 0 && finished > (int)programs / 5 && waits > programs / 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(programs_that_drop_agree_with_those_that_never_do),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
