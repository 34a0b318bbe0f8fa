/* open.c: making and freeing an engine: its device, its instruction set, its memory. Nothing else
 * in exec/ calls this file, so it may name every device. */
#include "exec/mark.h"

#include <string.h>

#include "exec/pool.h"
#include "exec/storage.h"
#include "exec/stream.h"
#include "exec/trace.h"

#if defined(MS_WITH_AVX2)
#include <cpuid.h>

/* Files for avx2 and above are compiled for f16c too. Not every compiler can ask for it by name, so
 * this reads its bit: a virtual machine may hide it while it shows avx2. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

/* The best instruction set of this machine for which kernels are built. Each set is asked for with
 * the extensions that its files are compiled with (settings.cmake). */
static ms_isa best_isa(void)
{
#if defined(MS_WITH_AVX2)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")
        || !__builtin_cpu_supports("bmi2") || !has_f16c())
        return MS_ISA_PORTABLE;
#if defined(MS_WITH_AVX512)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return __builtin_cpu_supports("avx512bf16") ? MS_ISA_AVX512BF16 : MS_ISA_AVX512;
#endif
    return MS_ISA_AVX2;
#else
    return MS_ISA_PORTABLE;
#endif
}

/* A cap lowers the instruction set and never raises it above what the machine has. That a cap was
 * given is kept, since libraries with a setting for the whole process are touched only then. With a
 * cap, tests run the kernels of every lower set on one machine. */
static ms_status choose_isa(ms_engine *engine, const char *cap)
{
    engine->isa = best_isa();
    if (!cap || !*cap) return MS_OK;
    for (ms_isa isa = MS_ISA_PORTABLE; isa <= MS_ISA_AVX512BF16; isa++)
        if (strcmp(cap, ms_isa_name(isa)) == 0) {
            if (isa < engine->isa) engine->isa = isa;
            engine->isa_is_capped = true;
            return MS_OK;
        }
    return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                          "cpu \"%.40s\" is none of portable, avx2, avx512, avx512bf16", cap);
}

/* "cuda:3" is what others call the fourth GPU; here the environment chooses. */
static ms_status refuse_name(ms_engine *engine, const ms_device *const *devices, size_t count,
                             const char *name)
{
    for (size_t i = 0; i < count; i++) {
        size_t length = strlen(devices[i]->name);
        const char *number = name + length + 1, *variable = devices[i]->variable;
        if (variable && strncmp(name, devices[i]->name, length) == 0 && name[length] == ':'
            && *number >= '0' && *number <= '9')
            return ms_engine_fail(
                engine, MS_ERROR_ARGUMENT,
                "device \"%.40s\": a process computes on the first one that it is "
                "shown: set %s=%.20s in its environment, and name \"%s\"",
                name, variable, number, devices[i]->name);
    }
    return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "device \"%.40s\" is none of cpu, cuda, sim",
                          name);
}

/* own_device goes before the name: tests bring a device that no list has. The index is checked
 * against the machine before anything is opened. */
static ms_status choose_device(ms_engine *engine, const ms_engine_options *options)
{
    const ms_os *os = engine->context.os;
    static const ms_device *const devices[] = { &ms_device_cpu, &ms_device_cuda, &ms_device_sim };
    const char *name = options->device ? options->device : "cpu";
    engine->device = options->own_device;
    const size_t known = sizeof devices / sizeof *devices;
    for (size_t i = 0; i < known && !engine->device; i++)
        if (strcmp(name, devices[i]->name) == 0) engine->device = devices[i];
    if (!engine->device) return refuse_name(engine, devices, known, name);
    uint32_t count = engine->device->count ? engine->device->count(engine) : 1;
    if (options->device_index < count) return MS_OK;
    const char *variable = engine->device->variable,
               *shown = variable ? os->environment(os->user, variable) : NULL;
    if (count == 0 && shown)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "device \"%s\": this machine shows none: %s=%s hides all, or names "
                              "some that are not there: unset it, or name what nvidia-smi -L lists",
                              engine->device->name, variable, shown);
    if (count == 0)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "device \"%s\": this machine has a driver and shows no device of "
                              "that kind: if nvidia-smi -L lists none either, the machine or its "
                              "container has none to give; device \"cpu\" needs none",
                              engine->device->name);
    return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                          "device_index = %u: of device \"%s\" this machine has %u, counted from 0",
                          options->device_index, engine->device->name, count);
}

/* The device opens after the strings, which it may use, and before the pool, whose memory it has.
 * is_open tells ms_engine_free whether there is a device to close after an error. After an error
 * the engine is freed by ms_engine_free, which copes with any part that is missing. */
static ms_status configure(ms_engine *engine, const ms_engine_options *options)
{
    const ms_os *os = engine->context.os;
    ms_machine machine;
    int failed = os->machine(os->user, &machine);
    if (failed)
        return ms_fail_os(&engine->context, failed, "cannot read what this machine has", "/proc");
    /* The device comes first, as the limit of memory may be its capacity. */
    ms_status status = choose_device(engine, options);
    if (status) return status;
    status = choose_isa(engine, options->cpu);
    if (status) return status;
    if (options->threads > 1024)
        return ms_engine_fail(
            engine, MS_ERROR_ARGUMENT,
            "threads = %u: 1 to 1024 are allowed, 0 for the cores of this machine",
            options->threads);
    if (!options->threads) engine->options.threads = machine.cores;
    engine->process = os->process_id(os->user);
    engine->owner = ms_thread_mark();
    if (engine->options.threads > machine.cores) engine->options.crowded = true;
    engine->is_for_gpu = strcmp(engine->device->kernels, "cuda") == 0
                         || (options->for_gpu && !engine->device->values);
    engine->random.seed = options->seed;
    engine->rates = options->rates ? *options->rates : *ms_rates_default();
    status = ms_strings_new(&engine->context, &engine->strings);
    if (!status) status = engine->device->open(engine, &engine->device_state);
    engine->is_open = !status;
    uint32_t sharers = options->sharers ? options->sharers : 1;
    if (!status) status = ms_pool_open(engine, options->memory_bytes, sharers);
    if (!status) status = ms_engine_stream(engine, "compute", &engine->current);
    if (!status)
        ms_log(&engine->context, MS_LOG_INFO, "engine on %s: %s, %u threads, %s kernels%s",
               engine->device->name, machine.cpu, engine->options.threads, ms_isa_name(engine->isa),
               engine->options.strict ? ", strict" : "");
    return status;
}

/* An error is returned through `error`, as there is no engine whose context could hold it. The
 * context is copied into the engine, so options need not outlive the call. */
ms_status ms_engine_new(const ms_engine_options *options, ms_error *error, ms_engine **out)
{
    ms_engine_options defaults = { 0 };
    if (!options) options = &defaults;
    ms_context context;
    ms_context_init(&context, options->os);
    context.log = options->log;
    context.log_user = options->log_user;
    context.log_level = options->log_level;
    void *memory = NULL;
    ms_status status = ms_allocate(&context, sizeof(ms_engine), "engine", &memory);
    if (!status) {
        ms_engine *engine = memory;
        engine->context = context;
        engine->options = *options;
        engine->options.device = engine->options.cpu = NULL;
        engine->options.rates = NULL;
        status = configure(engine, options);
        context.error = engine->context.error;
        if (status) ms_engine_free(engine);
        else *out = engine;
    }
    if (status && error) *error = context.error;
    return status;
}

/* The order matters. First all work ends, so that nothing touches what is freed. Then the layers'
 * objects go, from the highest slot to the lowest, as upper layers use lower ones. Then streams and
 * their threads, and marks. Storages close before the pool that their blocks are in, and the device
 * last, since the pool's memory is its own. The context is copied to the stack for the last
 * release, since it is in the engine. */
void ms_engine_free(ms_engine *engine)
{
    if (!engine) return;
    /* Without a check for errors: nobody is left to hear of them. */
    for (uint16_t i = 0; i < engine->stream_count; i++)
        ms_engine_await(engine->streams[i], engine->streams[i]->enqueued);
    for (int slot = MS_SLOTS - 1; slot >= 0; slot--)
        if (engine->slots[slot].destroy)
            engine->slots[slot].destroy(engine, engine->slots[slot].object);
    for (uint16_t i = 0; i < engine->stream_count; i++) {
        engine->device->stream_close(engine->streams[i], engine->streams[i]->device_state);
        ms_release(&engine->context, engine->streams[i]->spoiled);
        ms_release(&engine->context, engine->streams[i]);
    }
    ms_marks_close(engine);
    ms_storages_close(engine);
    if (engine->device) ms_pool_close(engine);
    if (engine->is_open) engine->device->close(engine, engine->device_state);
    ms_trace_close(engine);
    ms_strings_free(engine->strings);
    ms_context context = engine->context;
    ms_release(&context, engine);
}
