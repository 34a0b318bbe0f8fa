/* fsdp_support.h: for tests of fsdp: a model of two units in a fake world, which reduces as if all
 * ranks had the same numbers, and gathers copies of this rank's shard. */
#ifndef MOONSHARD_TESTS_FSDP_SUPPORT_H
#define MOONSHARD_TESTS_FSDP_SUPPORT_H

#include "grad_support.h"

#include "fsdp/state.h"
#include "late_device.h"
#include "moonshard/fsdp.h"

enum { W1, B1, W2, PARAMETERS };

typedef struct net {
    ms_engine *engine;
    ms_group *world;
    ms_tensor *x, *parameters[PARAMETERS];
    ms_fsdp *fsdp;
} net;

static inline ms_status constant(ms_engine *engine, int64_t rows, int64_t columns, double value,
                                 bool leaf, ms_tensor **out)
{
    const int64_t shape[] = { rows, columns };
    ms_tensor *same = NULL;
    ms_attributes attributes = { .scalar = { .value = value } };
    ms_status status = ms_tensor_new(engine, MS_F32, 2, shape, out);
    if (!status) status = ms_op_apply(engine, &ms_op_fill, &attributes, true, out, 1, &same, 1);
    ms_tensor_release(same);
    if (!status && leaf) status = ms_tensor_set_requires_grad(*out, true);
    return status;
}

/* How `build` wraps. */
static ms_fsdp_layout layout;
static ms_link chain[2]; /* the last one reduces */
static uint32_t chain_length;
static ms_comm_hook chain_hook;
static bool by_pairs; /* of 4 ranks: pairs keep unit 1 after forward, and share b1 alone */

/* Unit 1 has w1 [4, 4] and b1 [1, 4], the root has w2 [4, 3]. */
static inline ms_status build(const ms_os *os, uint32_t ranks, bool reshard, net *out)
{
    ms_engine_options options = { .os = os,
                                  .own_device = late_device(NULL),
                                  .threads = 1,
                                  .strict = true,
                                  .memory_bytes = 64 << 20 };
    *out = (net){ 0 };
    ms_status status = ms_engine_new(&options, NULL, &out->engine);
    if (!status) status = ms_comm_open_fake(out->engine, 0, ranks, &out->world);
    if (!status) status = constant(out->engine, 2, 4, 1, false, &out->x);
    if (!status) status = constant(out->engine, 4, 4, 0.5, true, &out->parameters[W1]);
    if (!status) status = constant(out->engine, 1, 4, 0.5, true, &out->parameters[B1]);
    if (!status) status = constant(out->engine, 4, 3, 0.25, true, &out->parameters[W2]);
    const uint32_t sizes[] = { 2, 2 }, members[] = { 0, 1, 2, 3 };
    ms_group *pair = NULL;
    if (!status && by_pairs) status = ms_group_split(out->world, 2, sizes, members, &pair);
    if (status) return status;
    ms_fsdp_parameter parameters[] = { { out->parameters[W1], "w1", 1, false, NULL, false },
                                       { out->parameters[B1], "b1", 1, false, pair, false },
                                       { out->parameters[W2], "w2", 0, false, NULL, false } };
    ms_fsdp_unit_options units[] = { { .name = "" },
                                     { .name = "first", .reshard_after_forward = reshard } };
    ms_fsdp_options model = { .layout = layout,
                              .group = out->world,
                              .near = pair,
                              .units = units,
                              .unit_count = 2,
                              .prefetch = true,
                              .links = chain,
                              .link_count = chain_length,
                              .hook = chain_hook,
                              .hook_user = out };
    return ms_fsdp_new(out->engine, &model, parameters, PARAMETERS, &out->fsdp);
}

static inline void drop(net *n)
{
    ms_tensor_release(n->x);
    for (int i = 0; i < PARAMETERS; i++) ms_tensor_release(n->parameters[i]);
}

/* sum((x w1 + b1) w2): every gradient of w2 is 2 (2 + 0.5), those of w1 and b1 are 2 x 0.75. */
static inline ms_status forward(net *n, ms_tensor **loss)
{
    ms_tensor *h = NULL, *sum = NULL, *y = NULL;
    ms_status status = ms_fsdp_before_forward(n->fsdp, 0, &n->x, 1);
    if (!status) status = ms_fsdp_before_forward(n->fsdp, 1, &n->x, 1);
    if (!status) status = apply(n->engine, &ms_op_matmul, n->x, n->parameters[W1], &h);
    if (!status) status = apply(n->engine, &ms_op_add, h, n->parameters[B1], &sum);
    if (!status) status = ms_fsdp_after_forward(n->fsdp, 1, &sum, 1);
    if (!status) status = apply(n->engine, &ms_op_matmul, sum, n->parameters[W2], &y);
    if (!status) status = ms_fsdp_after_forward(n->fsdp, 0, &y, 1);
    if (!status) status = total(n->engine, y, loss);
    ms_tensor_release(h);
    ms_tensor_release(sum);
    ms_tensor_release(y);
    return status;
}

static inline ms_status pass(net *n)
{
    ms_tensor *loss = NULL;
    ms_status status = forward(n, &loss);
    if (!status) status = ms_backward(n->engine, &loss, NULL, 1, false);
    ms_tensor_release(loss);
    return status;
}

/* Every number of the gradient of this rank's piece. */
static inline void check_gradient(net *n, int parameter, float expected)
{
    ms_tensor *gradient = ms_tensor_grad(n->parameters[parameter]);
    float values[16];
    assert_non_null(gradient);
    assert_int_equal(ms_tensor_count(gradient), ms_tensor_count(n->parameters[parameter]));
    OK(ms_tensor_read(gradient, values, ms_tensor_bytes(gradient)));
    for (int64_t i = 0; i < ms_tensor_count(gradient); i++) assert_true(values[i] == expected);
}

/* An optimizer's step: writes the pieces. */
static inline ms_status step(net *n)
{
    ms_status status = MS_OK;
    bool recording = ms_engine_set_recording(n->engine, false);
    for (int i = 0; i < PARAMETERS && !status; i++) {
        ms_tensor *same = NULL;
        ms_attributes attributes = { .scalar = { .value = 0.125 } };
        status =
            ms_op_apply(n->engine, &ms_op_fill, &attributes, true, &n->parameters[i], 1, &same, 1);
        ms_tensor_release(same);
        if (!status) status = ms_tensor_set_grad(n->parameters[i], NULL);
    }
    ms_engine_set_recording(n->engine, recording);
    return status;
}

#endif
