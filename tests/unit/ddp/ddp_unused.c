/* ddp_unused.c: parameters that get no gradient, and ranks that take part with zeros.
 * ctest: poisoned cuda-ranks cuda-local */
#include "ddp_support.h"

#include <stdatomic.h>

/* ----------------------------------------------------- who gets no gradient */

/* Rank r uses 5 - r weights, so that the last ones are used by some ranks or none; means are of
 * zeros and gradients. */
static void leave_out_some(rank *self)
{
    const bool static_graph = *(const bool *)self->job->argument;
    model m;
    ms_reducer *reducer = NULL;
    float got[1024], local[1024], old[31 * 5];
    OK(build(self, &m));
    OK(wrap(self, &m,
            (ms_reducer_options){ .cap_bytes = small_caps,
                                  .cap_count = 2,
                                  .find_unused = !static_graph,
                                  .static_graph = static_graph },
            &reducer));
    for (uint32_t iteration = 0; iteration < 4; iteration++) {
        ms_tensor *loss = NULL, *before = NULL;
        const uint32_t used = WEIGHTS - 1 - self->number;
        size_t records = 0;
        ms_comm_record(self->engine, true);
        if (iteration == 3) { /* a parameter that no rank uses keeps its gradient */
            OK(ms_tensor_new(self->engine, MS_F32, 2, ms_tensor_shape(m.weights[4]), &before));
            OK(fill(before, weight_value, &iteration));
            OK(ms_tensor_set_grad(m.weights[4], before));
            OK(ms_tensor_read(before, old, sizeof old));
            ms_tensor_release(before);
        }
        OK(ms_reducer_forward(reducer, true));
        bool known = false;
        ms_gradient_source_is_used(ms_reducer_source(reducer), 3, &known);
        CHECK(known == (static_graph && iteration > 0));
        if (known)
            CHECK(ms_gradient_source_is_used(ms_reducer_source(reducer), 3, &known)
                  && !ms_gradient_source_is_used(ms_reducer_source(reducer), 4, &known));
        records = ms_comm_record_count(self->engine);
        OK(forward(self, &m, self->number, iteration, used, &loss));
        OK(ms_reducer_outputs(reducer, &loss, 1));
        OK(ms_backward(self->engine, &loss, NULL, 1, false));
        ms_tensor_release(loss);
        /* One collective for each bucket; one more shares which parameters were used. */
        CHECK(ms_comm_record_count(self->engine) - records
              == ms_gradient_source_buckets(ms_reducer_source(reducer))
                     + (static_graph && iteration > 0 ? 0 : 1));
        OK(ms_tensor_read(ms_tensor_grad(m.weights[3]), got, ms_tensor_bytes(m.weights[3])));
        CHECK(got[0] != 0 && (ms_tensor_grad(m.weights[4]) != NULL) == (iteration == 3));
        CHECK(ms_gradient_source_is_used(ms_reducer_source(reducer), 3, &known) && known
              && !ms_gradient_source_is_used(ms_reducer_source(reducer), 4, &known) && known);
        if (iteration == 3) {
            OK(ms_tensor_read(ms_tensor_grad(m.weights[4]), local, sizeof old));
            CHECK(memcmp(local, old, sizeof old) == 0);
        }
        /* Rank 0 alone uses weight 3. */
        ms_reducer_set_no_sync(reducer, true);
        OK(clear(&m));
        OK(ms_reducer_forward(reducer, false));
        OK(pass(self, &m, 0, iteration, WEIGHTS - 1, false));
        OK(ms_tensor_read(ms_tensor_grad(m.weights[3]), local, ms_tensor_bytes(m.weights[3])));
        for (int64_t i = 0; i < ms_tensor_count(m.weights[3]); i++)
            CHECK(got[i] == local[i] * (1.0f / (float)self->ranks));
        ms_reducer_set_no_sync(reducer, false);
        OK(clear(&m)); /* with its gradient, a use is forgotten */
    }
    ms_reducer_free(reducer);
    drop(&m);
}

/* Opens by itself in the end, so that a host that waits for it fails instead of hanging. */
typedef struct standing_args {
    _Atomic int *open;
    const ms_os *os;
    uint64_t last_ns;
} standing_args;

static ms_task_result stand(ms_run *run, void *arguments)
{
    (void)run;
    const standing_args *args = arguments;
    return atomic_load(args->open) || args->os->monotonic_ns(args->os->user) > args->last_ns
               ? MS_TASK_DONE
               : MS_TASK_PENDING;
}

static const ms_task standing_task = { .name = "gate",
                                       .function = stand,
                                       .args_bytes = sizeof(standing_args) };

/* A whole pass while the model's stream is blocked: the answer whether another rank used a
 * parameter depends on the other hosts only. */
static void ask_ahead_of_the_device(rank *self)
{
    const ms_os *os = ms_engine_context(self->engine)->os;
    model m;
    ms_reducer *reducer = NULL;
    OK(build(self, &m));
    OK(wrap(self, &m, (ms_reducer_options){ .find_unused = true }, &reducer));
    for (int i = 0; i < 3; i++) {
        _Atomic int open = 0;
        ms_point gate = { 0 };
        ms_tensor *loss = NULL;
        standing_args args = { &open, os, os->monotonic_ns(os->user) + 10000000000u };
        /* The second one rebuilds buckets, which waits for the device. */
        OK(ms_reducer_forward(reducer, true));
        OK(ms_stream_enqueue(ms_engine_current(self->engine), &standing_task, &args, NULL, 0,
                             (ms_task_cost){ 0 }, &gate));
        ms_status status = forward(self, &m, self->number, 0, WEIGHTS - 1, &loss);
        if (!status) status = ms_reducer_outputs(reducer, &loss, 1);
        if (!status) status = ms_backward(self->engine, &loss, NULL, 1, false);
        ms_tensor_release(loss);
        bool stood = !ms_point_reached(self->engine, gate);
        atomic_store(&open, 1);
        OK(status);
        CHECK(stood && ms_tensor_grad(m.weights[3]) && !ms_tensor_grad(m.weights[4]));
        OK(ms_engine_sync(self->engine));
        OK(clear(&m));
    }
    ms_reducer_free(reducer);
    drop(&m);
}

static void nobody_waits_for_the_device_to_learn_who_is_used(void **state)
{
    (void)state;
    if (!device_runs_own_tasks()) skip();
    run_well(THREADS, 2, ask_ahead_of_the_device, NULL);
    run_well(PROCESSES, 3, ask_ahead_of_the_device, NULL);
}

static void who_gets_no_gradient_takes_part_with_zeros(void **state)
{
    (void)state;
    for (int static_graph = 0; static_graph < 2; static_graph++) {
        const bool argument = static_graph;
        run_well(THREADS, 2, leave_out_some, &argument);
        run_well(PROCESSES, 3, leave_out_some, &argument);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(who_gets_no_gradient_takes_part_with_zeros),
        cmocka_unit_test(nobody_waits_for_the_device_to_learn_who_is_used),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
