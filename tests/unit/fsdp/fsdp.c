/* fsdp.c: sharded models below the scripts: layout of shards, handles, memory, waits (in strict
 * mode), what misuse is told, and failing the n-th allocation. A fake world reduces as if all ranks
 * had the same numbers, and gathers copies of this rank's shard: weights that are equal everywhere
 * keep their values. ctest: late cuda */
#include "fsdp_support.h"

#include "fault_engine.h"
#include "fsdp/flat_param.h"
#include "fsdp/secondary_shard.h"

/* ------------------------------------------------------------------- layout */

/* V3: numbers, ranks: numbers of a shard, padding; and rank 3 has padding only. */
static void shards_are_equal_parts(void **state)
{
    (void)state;
    static const int64_t cases[][4] = {
        { 10, 4, 3, 2 }, { 5, 4, 2, 3 }, { 3, 4, 1, 1 }, { 8, 4, 2, 0 }, { 0, 2, 1, 2 }
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        int64_t found = 0;
        for (uint32_t rank = 0; rank < cases[c][1]; rank++) {
            ms_member members[2] = { { .dims = 1, .shape = { cases[c][0] / 2 } },
                                     { .dims = 1, .shape = { cases[c][0] - cases[c][0] / 2 } } };
            ms_flat_param flat = { .members = members, .count = 2 };
            ms_flat_param_lay_out(&flat, MS_FSDP_FLAT, (uint32_t)cases[c][1], rank);
            assert_int_equal(flat.length, cases[c][2]);
            assert_int_equal(flat.padded - flat.numbers, cases[c][3]);
            for (int i = 0; i < 2; i++) {
                found += members[i].length;
                /* The piece is where the flat parameter has those elements. */
                if (members[i].length)
                    assert_int_equal(members[i].begin + members[i].first,
                                     rank * flat.length + members[i].at);
                else assert_int_equal(members[i].at, flat.length);
            }
        }
        assert_int_equal(found, cases[c][0]);
    }
}

/* Rows of a parameter, ranks, rows of each rank in order. */
static void rows_are_cut_by_ranks(void **state)
{
    (void)state;
    static const int64_t cases[][6] = {
        { 5, 4, 2, 2, 1, 0 }, { 1, 3, 1, 0, 0 }, { 6, 3, 2, 2, 2 }, { 0, 2, 0, 0 }, { 4, 1, 4 }
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (uint32_t rank = 0; rank < cases[c][1]; rank++) {
            /* A scalar, a matrix and a vector. */
            ms_member members[3] = { { .dims = 0 },
                                     { .dims = 2, .shape = { cases[c][0], 3 } },
                                     { .dims = 1, .shape = { cases[c][0] } } };
            ms_flat_param flat = { .members = members, .count = 3 };
            int64_t ranks = cases[c][1], each = (cases[c][0] + ranks - 1) / ranks;
            int64_t own = cases[c][2 + rank];
            ms_flat_param_lay_out(&flat, MS_FSDP_ROWS, (uint32_t)ranks, rank);
            assert_int_equal(flat.numbers, 1 + 4 * cases[c][0]);
            assert_int_equal(flat.length, 1 + 4 * each);
            assert_int_equal(flat.padded, flat.length * ranks);
            assert_int_equal(members[0].length, rank == 0 ? 1 : 0);
            for (int i = 1; i < 3; i++) {
                int64_t row = i == 1 ? 3 : 1;
                const ms_member *m = &members[i];
                assert_int_equal(m->length, own * row);
                assert_int_equal(m->first, own ? each * rank * row : 0);
                assert_int_equal(m->piece_dims, m->dims);
                assert_int_equal(m->piece[0], own);
                assert_true(i == 2 || m->piece[1] == 3);
                assert_int_equal(m->part, each * row);
                assert_int_equal(m->at, own ? m->slot : flat.length);
            }
            assert_int_equal(members[1].begin, ranks);
            assert_int_equal(members[2].begin, ranks * (1 + 3 * each));
            assert_int_equal(members[2].packed, 1 + 3 * cases[c][0]);
        }
}

/* -------------------------------------------------------------------- passes */

static void handles_are_pieces_but_while_they_are_used(void **state)
{
    (void)state;
    net n;
    OK(build(NULL, 2, true, &n));
    ms_fsdp_piece piece;
    ms_fsdp_unit_info info;
    /* Flat parameters: w2 of 12 numbers, then w1 and b1 of 20. Rank 0 has the first half. */
    assert_int_equal(ms_tensor_dims(n.parameters[W1]), 1);
    assert_int_equal(ms_tensor_count(n.parameters[W1]), 10);
    assert_int_equal(ms_tensor_count(n.parameters[B1]), 0);
    assert_int_equal(ms_tensor_count(n.parameters[W2]), 6);
    assert_true(ms_fsdp_piece_get(n.fsdp, 1, &piece));
    assert_string_equal(piece.name, "w1");
    assert_true(piece.dims == 2 && piece.shape[0] == 4 && piece.first == 0 && piece.count == 10);
    assert_false(ms_fsdp_piece_get(n.fsdp, 3, &piece));
    assert_true(ms_fsdp_unit_get(n.fsdp, 1, &info) && !info.gathered);
    assert_true(info.bytes == 80 && info.shard_bytes == 40);
    ms_fsdp_show_whole(n.fsdp, true);
    assert_int_equal(ms_tensor_dims(n.parameters[W1]), 2);
    ms_fsdp_show_whole(n.fsdp, false);
    OK(ms_fsdp_before_forward(n.fsdp, 1, &n.x, 1));
    assert_int_equal(ms_tensor_dims(n.parameters[W1]), 2);
    assert_true(ms_fsdp_unit_get(n.fsdp, 1, &info) && info.gathered);
    OK(ms_fsdp_after_forward(n.fsdp, 1, NULL, 0));
    assert_int_equal(ms_tensor_dims(n.parameters[W1]), 1);
    assert_true(ms_fsdp_unit_get(n.fsdp, 1, &info) && !info.gathered);
    ms_fsdp_free(n.fsdp);
    drop(&n);
    ms_engine_free(n.engine);
}

/* Gathers and reductions, and copies around gathers, have a high priority. */
static void check_priorities(const ms_engine *engine, const char *copies)
{
    const ms_stream *stream;
    bool has_copies = false;
    for (uint16_t i = 0; (stream = ms_engine_stream_at(engine, i)); i++) {
        const char *name = ms_stream_name(stream);
        bool is_compute = strcmp(name, "compute") == 0 || strcmp(name, "optimizer") == 0;
        if (copies && strcmp(name, copies) == 0) has_copies = true;
        assert_int_equal(ms_stream_priority(stream),
                         is_compute ? MS_PRIORITY_NORMAL : MS_PRIORITY_HIGH);
    }
    assert_int_equal(has_copies, copies != NULL);
}

static void gradients_are_shards_and_add_up(void **state)
{
    (void)state;
    for (uint32_t ranks = 1; ranks <= 3; ranks++)
        for (int variant = 0; variant < 4; variant++) {
            net n;
            layout = variant < 2 ? MS_FSDP_FLAT : MS_FSDP_ROWS;
            OK(build(NULL, ranks, variant % 2, &n));
            layout = MS_FSDP_FLAT;
            OK(pass(&n));
            check_gradient(&n, W1, 1.5f);
            check_gradient(&n, B1, 1.5f);
            check_gradient(&n, W2, 5);
            OK(pass(&n)); /* shards add up */
            check_gradient(&n, W2, 10);
            /* Without synchronization gradients stay whole; the next pass reduces the sum. */
            ms_fsdp_set_sync(n.fsdp, false);
            OK(pass(&n));
            ms_fsdp_set_sync(n.fsdp, true);
            OK(pass(&n));
            check_gradient(&n, W1, 6);
            check_gradient(&n, W2, 20);
            OK(step(&n));
            OK(pass(&n)); /* with new values: 2 (0.5 + 0.125) and 2 x 0.375 */
            check_gradient(&n, W1, 0.75f);
            check_gradient(&n, W2, 1.25f);
            OK(ms_engine_sync(n.engine));
            check_priorities(n.engine, variant < 2 || ranks == 1 ? NULL : "gather.out");
            ms_fsdp_free(n.fsdp);
            drop(&n);
            assert_int_equal(ms_engine_memory(n.engine).live, 0);
            ms_engine_free(n.engine);
        }
}

/* The memory of whole parameters and gradients is there only while a unit is used. */
static void memory_is_given_back(void **state)
{
    (void)state;
    net n;
    OK(build(NULL, 2, true, &n));
    OK(pass(&n));
    uint64_t live = ms_engine_memory(n.engine).live;
    OK(pass(&n));
    assert_int_equal(ms_engine_memory(n.engine).live, live);
    for (uint32_t f = 0; f < n.fsdp->flat_count; f++) {
        const ms_flat_param *flat = &n.fsdp->flats[f];
        assert_true(ms_storage_is_dropped(ms_tensor_storage(flat->bucket.flat)));
        assert_true(ms_storage_is_dropped(ms_tensor_storage(flat->form.whole)));
    }
    ms_fsdp_free(n.fsdp);
    drop(&n);
    ms_engine_free(n.engine);
}

/* Pairs of 4 ranks keep a unit between its forward and its backward, and share a parameter alone:
 * its mean is over 4 ranks, and 2 have numbers of it. */
static void few_ranks_keep_and_share(void **state)
{
    (void)state;
    for (int variant = 0; variant < 2; variant++) {
        net n;
        ms_tensor *loss = NULL;
        layout = variant ? MS_FSDP_ROWS : MS_FSDP_FLAT;
        by_pairs = true;
        OK(build(NULL, 4, true, &n));
        layout = MS_FSDP_FLAT;
        by_pairs = false;
        /* w1 is in one shard of four, b1 in one of two. */
        assert_int_equal(ms_tensor_count(n.parameters[W1]), 4);
        assert_int_equal(ms_tensor_count(n.parameters[B1]), variant ? 4 : 2);
        assert_int_equal(n.fsdp->units[1].count, 2);
        const ms_flat_param *shared = &n.fsdp->units[1].flats[0], *own = &n.fsdp->units[1].flats[1];
        assert_true(own->own && !own->near && !shared->own && shared->near);
        assert_int_equal(ms_tensor_count(shared->near), shared->padded / 2);
        for (int i = 0; i < 2; i++) {
            OK(forward(&n, &loss));
            assert_true(ms_secondary_shard_is_usable(shared));
            OK(ms_backward(n.engine, &loss, NULL, 1, false));
            ms_tensor_release(loss);
            assert_true(ms_storage_is_dropped(ms_tensor_storage(shared->near)));
        }
        check_gradient(&n, W1, 3);
        check_gradient(&n, B1, 1.5f);
        check_gradient(&n, W2, 10);
        /* What was kept is of no use after a step. */
        OK(forward(&n, &loss));
        ms_tensor_release(loss);
        OK(step(&n));
        assert_false(ms_secondary_shard_is_usable(shared));
        OK(pass(&n));
        check_gradient(&n, W1, 0.75f);
        OK(ms_engine_sync(n.engine));
        ms_fsdp_free(n.fsdp);
        drop(&n);
        assert_int_equal(ms_engine_memory(n.engine).live, 0);
        ms_engine_free(n.engine);
    }
}

static ms_status states(const ms_os *os, ms_engine **engine)
{
    net n;
    ms_tensor *shard = NULL, *state = NULL, *piece = NULL;
    ms_status status = build(os, 2, true, &n);
    *engine = n.engine;
    /* Of w1 and b1 rank 0 has ten numbers of w1, and none of b1. */
    if (!status) status = ms_fsdp_shard(n.fsdp, n.parameters, 2, &shard);
    if (!status) assert_true(ms_tensor_count(shard) == 10);
    if (!status) status = ms_fsdp_state_new(n.fsdp, n.parameters[B1], &state);
    if (!status) status = ms_fsdp_state_piece(n.fsdp, n.parameters[W1], state, &piece);
    if (!status) assert_true(ms_tensor_count(state) == 10 && ms_tensor_count(piece) == 10);
    ms_tensor_release(piece);
    ms_tensor_release(state);
    ms_tensor_release(shard);
    ms_fsdp_free(n.fsdp);
    drop(&n);
    return status;
}

static void shards_and_states_are_of_one_size(void **state)
{
    (void)state;
    ms_engine *engine = NULL;
    OK(states(NULL, &engine));
    ms_engine_free(engine);
    fail_each_call(states, false);
}

/* -------------------------------------------------------------------- misuse */

static void a_step_between_forward_and_backward_is_noticed(void **state)
{
    (void)state;
    net n;
    ms_tensor *loss = NULL;
    OK(build(NULL, 2, true, &n));
    OK(forward(&n, &loss));
    OK(step(&n));
    assert_int_equal(ms_backward(n.engine, &loss, NULL, 1, false), MS_ERROR_STATE);
    assert_non_null(strstr(ms_engine_error(n.engine)->message, "written in place since"));
    ms_tensor_release(loss);
    ms_fsdp_free(n.fsdp);
    drop(&n);
    ms_engine_free(n.engine);
}

static void a_write_to_whole_parameters_is_refused_but_in_summon(void **state)
{
    (void)state;
    const uint32_t unit = 1;
    net n;
    OK(build(NULL, 2, true, &n));
    OK(ms_fsdp_summon(n.fsdp, &unit, 1, (ms_summon_options){ 0 }));
    assert_int_equal(ms_fsdp_summon(n.fsdp, &unit, 1, (ms_summon_options){ 0 }), MS_ERROR_STATE);
    OK(step(&n));
    OK(ms_fsdp_summon_end(n.fsdp, true));
    float values[10];
    OK(ms_tensor_read(n.parameters[W1], values, sizeof values));
    assert_true(values[0] == 0.125f && values[9] == 0.125f);
    OK(ms_fsdp_before_forward(n.fsdp, 1, &n.x, 1));
    OK(step(&n));
    assert_int_equal(ms_fsdp_after_forward(n.fsdp, 1, NULL, 0), MS_ERROR_STATE);
    assert_non_null(strstr(ms_engine_error(n.engine)->message, "'w1' was written while its unit"));
    ms_fsdp_reset(n.fsdp);
    ms_fsdp_free(n.fsdp);
    drop(&n);
    ms_engine_free(n.engine);
}

/* Of what its unit computes in, not of its own dtype. */
static void codes_are_of_numbers_in_f32_or_bf16(void **state)
{
    (void)state;
    net n;
    ms_fsdp *second = NULL;
    ms_tensor *w = NULL;
    OK(build(NULL, 2, true, &n));
    OK(constant(n.engine, 16, 16, 1, true, &w));
    ms_fsdp_parameter parameter = { .tensor = w, .name = "w", .coded = true };
    ms_fsdp_unit_options unit = { .name = "", .has_computes = true, .computes = MS_F16 };
    ms_fsdp_options options = { .group = n.world, .units = &unit, .unit_count = 1 };
    assert_int_equal(ms_fsdp_new(n.engine, &options, &parameter, 1, &second), MS_ERROR_ARGUMENT);
    assert_non_null(strstr(ms_engine_error(n.engine)->message,
                           "'w' travels as 8-bit floats, and computes in neither f32 nor bf16"));
    assert_null(second);
    parameter.keeps_dtype = true;
    OK(ms_fsdp_new(n.engine, &options, &parameter, 1, &second));
    ms_fsdp_free(second);
    ms_tensor_release(w);
    ms_fsdp_free(n.fsdp);
    drop(&n);
    ms_engine_free(n.engine);
}

static void a_parameter_belongs_to_one_unit_and_one_model(void **state)
{
    (void)state;
    net n;
    ms_fsdp *second = NULL;
    OK(build(NULL, 2, true, &n));
    ms_fsdp_parameter parameters[] = { { n.parameters[W1], "w1", 0, false, NULL, false } };
    ms_fsdp_unit_options units[] = { { .name = "" },
                                     { .name = "other", .reshard_after_forward = true } };
    ms_fsdp_options options = { .group = n.world, .units = units, .unit_count = 2 };
    assert_int_equal(ms_fsdp_new(n.engine, &options, parameters, 1, &second), MS_ERROR_STATE);
    assert_non_null(strstr(ms_engine_error(n.engine)->message, "'w1' is sharded already"));
    ms_tensor *tied = NULL;
    OK(constant(n.engine, 2, 2, 1, true, &tied));
    ms_fsdp_parameter twice[] = { { tied, "a", 0, false, NULL, false },
                                  { tied, "b", 1, false, NULL, false } };
    assert_int_equal(ms_fsdp_new(n.engine, &options, twice, 2, &second), MS_ERROR_ARGUMENT);
    assert_non_null(strstr(ms_engine_error(n.engine)->message, "are one parameter"));
    ms_tensor *integers = NULL;
    OK(ms_tensor_new(n.engine, MS_I64, 1, (const int64_t[]){ 4 }, &integers));
    ms_fsdp_parameter counts[] = { { tied, "a", 0, false, NULL, false },
                                   { integers, "counts", 1, false, NULL, false } };
    assert_int_equal(ms_fsdp_new(n.engine, &options, counts, 2, &second), MS_ERROR_ARGUMENT);
    assert_non_null(strstr(ms_engine_error(n.engine)->message, "fsdp: 'counts' is of i64"));
    assert_null(second);
    ms_tensor_release(integers);
    ms_tensor_release(tied);
    ms_fsdp_free(n.fsdp);
    drop(&n);
    ms_engine_free(n.engine);
}

/* ---------------------------------------------------------- failing the n-th */

static ms_status program(const ms_os *os, ms_engine **engine)
{
    net n;
    ms_status status = build(os, by_pairs ? 4 : 2, true, &n);
    *engine = n.engine;
    if (!status) status = pass(&n);
    if (!status) status = step(&n);
    if (!status) status = pass(&n);
    if (!status) status = ms_engine_sync(n.engine);
    ms_fsdp_free(n.fsdp);
    drop(&n);
    return status;
}

static void any_failed_allocation_is_an_error_and_no_leak(void **state)
{
    (void)state;
    fail_each_call(program, false);
    layout = MS_FSDP_ROWS;
    by_pairs = true;
    fail_each_call(program, false);
    layout = MS_FSDP_FLAT;
    by_pairs = false;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shards_are_equal_parts),
        cmocka_unit_test(rows_are_cut_by_ranks),
        cmocka_unit_test(handles_are_pieces_but_while_they_are_used),
        cmocka_unit_test(gradients_are_shards_and_add_up),
        cmocka_unit_test(memory_is_given_back),
        cmocka_unit_test(few_ranks_keep_and_share),
        cmocka_unit_test(shards_and_states_are_of_one_size),
        cmocka_unit_test(a_step_between_forward_and_backward_is_noticed),
        cmocka_unit_test(a_write_to_whole_parameters_is_refused_but_in_summon),
        cmocka_unit_test(codes_are_of_numbers_in_f32_or_bf16),
        cmocka_unit_test(a_parameter_belongs_to_one_unit_and_one_model),
        cmocka_unit_test(any_failed_allocation_is_an_error_and_no_leak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
