/* engine.c: making and freeing an engine, and its plain settings. */
#include "exec/engine.h"

#include <string.h>

const char *ms_isa_name(ms_isa isa)
{
    static const char *const names[] = { "portable", "avx2", "avx512", "avx512bf16" };
    return names[isa];
}

/* The best instruction set of this machine for which kernels are built. */
static ms_isa best_isa(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")
        || !__builtin_cpu_supports("bmi2"))
        return MS_ISA_PORTABLE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw")
        || !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return MS_ISA_AVX2;
    return __builtin_cpu_supports("avx512bf16") ? MS_ISA_AVX512BF16 : MS_ISA_AVX512;
#else
    return MS_ISA_PORTABLE;
#endif
}

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

static ms_status configure(ms_engine *engine, const ms_engine_options *options)
{
    const ms_os *os = engine->context.os;
    ms_machine machine;
    int failed = os->machine(os->user, &machine);
    if (failed)
        return ms_fail_os(&engine->context, failed, "cannot read what this machine has", "/proc");
    const char *device = options->device ? options->device : "cpu";
    if (strcmp(device, "cpu") == 0) engine->executor = &ms_executor_cpu;
    else if (strcmp(device, "sim") == 0) engine->executor = &ms_executor_sim;
    else
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "device \"%.40s\" is none of cpu, sim",
                              device);
    ms_status status = choose_isa(engine, options->cpu);
    if (status) return status;
    if (options->threads > 1024)
        return ms_engine_fail(
            engine, MS_ERROR_ARGUMENT,
            "threads = %u: 1 to 1024 are allowed, 0 for the cores of this machine",
            options->threads);
    engine->threads = options->threads ? options->threads : machine.cores;
    engine->process = os->process_id(os->user);
    engine->owner = ms_thread_mark();
    engine->strict = options->strict;
    engine->pin = options->pin;
    engine->random.seed = options->seed;
    uint64_t limit = options->memory_bytes ? options->memory_bytes : machine.memory_bytes;
    if (!engine->executor->data && !options->memory_bytes) limit = UINT64_MAX >> 9;
    status = ms_strings_new(&engine->context, &engine->strings);
    if (!status) status = ms_pool_open(engine, limit);
    if (!status) status = engine->executor->open(engine);
    if (!status) status = ms_engine_stream(engine, "compute", &engine->current);
    if (!status)
        ms_log(&engine->context, MS_LOG_INFO, "engine on %s: %s, %u threads, %s kernels%s",
               engine->executor->name, machine.cpu, engine->threads, ms_isa_name(engine->isa),
               engine->strict ? ", strict" : "");
    return status;
}

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
        status = configure(engine, options);
        context.error = engine->context.error;
        if (status) ms_engine_free(engine);
        else *out = engine;
    }
    if (status && error) *error = context.error;
    return status;
}

void ms_engine_free(ms_engine *engine)
{
    if (!engine) return;
    for (uint16_t i = 0; i < engine->stream_count; i++)
        ms_engine_await(engine->streams[i], engine->streams[i]->enqueued);
    for (int slot = MS_SLOTS - 1; slot >= 0; slot--)
        if (engine->slots[slot].destroy)
            engine->slots[slot].destroy(engine, engine->slots[slot].object);
    for (uint16_t i = 0; i < engine->stream_count; i++) {
        engine->executor->stream_close(engine->streams[i]);
        ms_release(&engine->context, engine->streams[i]->spoiled);
        ms_release(&engine->context, engine->streams[i]);
    }
    if (engine->executor && engine->executor_state) engine->executor->close(engine);
    ms_storages_close(engine);
    if (engine->executor) ms_pool_close(engine);
    ms_trace_close(engine);
    ms_strings_free(engine->strings);
    ms_context context = engine->context;
    ms_release(&context, engine);
}

ms_context *ms_engine_context(ms_engine *engine) { return &engine->context; }
const ms_error *ms_engine_error(const ms_engine *engine) { return &engine->context.error; }
bool ms_engine_is_sim(const ms_engine *engine) { return !engine->executor->data; }
bool ms_engine_is_strict(const ms_engine *engine) { return engine->strict; }
uint32_t ms_engine_threads(const ms_engine *engine) { return engine->threads; }
ms_isa ms_engine_isa(const ms_engine *engine) { return engine->isa; }
bool ms_engine_isa_is_capped(const ms_engine *engine) { return engine->isa_is_capped; }
void ms_engine_set_script(ms_engine *engine, uint32_t id) { engine->script = id; }
uint32_t ms_engine_script(const ms_engine *engine) { return engine->script; }
ms_strings *ms_engine_strings(ms_engine *engine) { return engine->strings; }
ms_random ms_engine_random(const ms_engine *engine) { return engine->random; }
void ms_engine_set_random(ms_engine *engine, ms_random random) { engine->random = random; }

ms_random ms_engine_draw(ms_engine *engine)
{
    ms_random now = engine->random;
    engine->random.draw++;
    return now;
}

void *ms_engine_get(const ms_engine *engine, ms_engine_slot slot)
{
    return engine->slots[slot].object;
}

void ms_engine_set(ms_engine *engine, ms_engine_slot slot, void *object,
                   void (*destroy)(ms_engine *, void *))
{
    engine->slots[slot].object = object;
    engine->slots[slot].destroy = destroy;
}
