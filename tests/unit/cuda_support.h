/* cuda_support.h: engines on the cuda device over the stand-in for NVIDIA's driver, which has one
 * kernel. */
#ifndef MOONSHARD_TESTS_CUDA_SUPPORT_H
#define MOONSHARD_TESTS_CUDA_SUPPORT_H

#include "device_support.h"

#include <stdlib.h>

#include "../cuda/driver/driver.h"
#include "exec/cuda/api.h"
#include "exec/cuda/task.h"
#include "exec/state.h"

/* ---------------------------------------------------------------- the stand-in */

static inline void *stand_in(const char *name)
{
    const ms_os *os = ms_os_posix();
    char why[256];
    void *library = os->library_load(os->user, getenv("MOONSHARD_STAND_IN"), why, sizeof why);
    if (!library) fail_msg("%s", why);
    return os->library_symbol(os->user, library, name);
}
static inline unsigned calls(const char *name)
{
    return ((stand_in_calls_function *)stand_in("stand_in_calls"))(name);
}
static inline unsigned left(void)
{
    return ((stand_in_left_function *)stand_in("stand_in_left"))();
}
static inline void fails(const char *call, int result)
{
    ((stand_in_fails_function *)stand_in("stand_in_fails"))(call, result);
}
static inline void stops(int result)
{
    ((stand_in_stops_function *)stand_in("stand_in_stops"))(result);
}
/* to[i] = from[i] * factor + term, in `count` numbers. */
typedef struct scale_args {
    float *to;
    const float *from;
    float factor, term;
    uint32_t count, unused; /* no padding: arguments are compared */
} scale_args;

static inline void scale(const void *arguments, const unsigned blocks[3], const unsigned threads[3],
                         unsigned shared_bytes)
{
    (void)shared_bytes;
    const scale_args *args = arguments;
    for (uint32_t i = 0; i < blocks[0] * threads[0]; i++)
        if (i < args->count) args->to[i] = args->from[i] * args->factor + args->term;
}

static const unsigned char image[] = "scale";
static const ms_cuda_kernel scale_kernel = { .image = image, .name = "scale" };
static inline void run_scale(ms_cuda_work *work, const void *arguments)
{
    const scale_args *args = arguments;
    ms_cuda_shape shape = { .blocks = { ms_cuda_blocks(args->count, 128, 1, 1 << 20) },
                            .threads = { 128 } };
    ms_cuda_launch(work, &scale_kernel, shape, args, sizeof *args);
}
static const ms_cuda_task scales = { .task = { .name = "scale", .args_bytes = sizeof(scale_args) },
                                     .function = run_scale };
static inline ms_status try_engine(ms_error *error, ms_engine **out)
{
    ms_engine_options options = { .own_device = &ms_device_cuda, .threads = 1 };
    setenv("MOONSHARD_CUDA_DRIVER", getenv("MOONSHARD_STAND_IN"), 1);
    ((stand_in_has_function *)stand_in("stand_in_has"))("scale", scale, sizeof(scale_args));
    return ms_engine_new(&options, error, out);
}

static inline ms_engine *make_engine(void)
{
    ms_error error;
    ms_engine *engine = NULL;
    if (try_engine(&error, &engine)) fail_msg("%s", error.message);
    return engine;
}

static inline void run(ms_stream *on, const ms_cuda_task *task, ms_storage *to, ms_storage *from,
                       float factor, float term)
{
    scale_args args = { .to = ms_storage_data(to),
                        .from = ms_storage_data(from),
                        .factor = factor,
                        .term = term,
                        .count = (uint32_t)(ms_storage_bytes(to) / sizeof(float)) };
    ms_access accesses[2] = { { .storage = to, .cells = 1, .mode = MS_READ | MS_WRITE },
                              { .storage = from, .cells = 1, .mode = MS_READ } };
    assert_int_equal(
        ms_stream_enqueue(on, &task->task, &args, accesses, 2, (ms_task_cost){ 0 }, NULL), MS_OK);
}

static inline void fill(ms_stream *on, ms_storage *to, float value)
{
    float values[300];
    for (int i = 0; i < 300; i++) values[i] = value;
    assert_int_equal(ms_stream_copy_in(on, to, 0, values, ms_storage_bytes(to), NULL), MS_OK);
}

static inline float value_of(ms_storage *storage)
{
    float value = 0;
    assert_int_equal(
        ms_storage_read(storage, ms_storage_bytes(storage) - sizeof value, &value, sizeof value),
        MS_OK);
    return value;
}

#endif
