/* shards.c: files of text to files of tokens, on several threads. */
#include "base/thread.h"
#include "moonshard/io.h"
#include "text/tokenizer.h"

enum { THREADS_MAX = 256 };

/* jobs, options, tokenizer and count are constant. The numbers are shared with the threads; `error`
 * is written once, by the thread that sets `failed` first, before it ends. */
struct ms_sharding {
    ms_context context;
    ms_tokenizer *tokenizer;
    const ms_shard_job *jobs;
    uint32_t count;
    ms_sharding_options options;
    _Atomic uint64_t bytes, tokens;
    _Atomic uint32_t next, shards, running;
    atomic_bool failed, stop;
    ms_word changes;
    uint32_t seen; /* of changes, by the last wait */
    ms_error error;
    ms_os_thread *threads[THREADS_MAX];
    uint32_t thread_count;
};

/* ---------------------------------------------------------------- one shard */

/* A shard that a thread writes. llm.c's format: 256 numbers of 32 bits, of which the first three
 * are a magic number, a version and the count of tokens; then the tokens, all little-endian. */
typedef struct writing {
    ms_sharding *all;
    ms_context context;
    ms_encoder *encoder;
    ms_writer *writer;
    ms_buffer out; /* tokens as they are written */
    uint64_t offset, tokens;
} writing;

enum { HEADER_BYTES = 1024, TOKENS_MAX = INT32_MAX };

static void put_number(uint8_t *to, uint32_t value, uint32_t width)
{
    for (uint32_t i = 0; i < width; i++) to[i] = (uint8_t)(value >> 8 * i);
}

static ms_status write_header(writing *one)
{
    uint8_t header[HEADER_BYTES] = { 0 };
    bool narrow = one->all->options.width == 2;
    put_number(header, narrow ? 20240520 : 20240801, 4);
    put_number(header + 4, narrow ? 1 : 7, 4);
    put_number(header + 8, (uint32_t)one->tokens, 4);
    return ms_writer_write(one->writer, header, sizeof header, 0);
}

static ms_status write_ids(writing *one, const uint32_t *ids, size_t count, const char *path)
{
    uint32_t width = one->all->options.width, end = one->all->options.end;
    size_t all = count + (end != MS_NO_TOKEN);
    if (one->tokens + all > TOKENS_MAX)
        return ms_fail(&one->context, MS_ERROR_UNSUPPORTED,
                       "with '%s' its shard would have more than %d tokens: divide the file", path,
                       TOKENS_MAX);
    one->out.length = 0;
    ms_status status = ms_buffer_reserve(&one->context, &one->out, all * width);
    if (status || all == 0) return status;
    for (size_t i = 0; i < count; i++) put_number(one->out.data + i * width, ids[i], width);
    if (all > count) put_number(one->out.data + count * width, end, width);
    status = ms_writer_write(one->writer, one->out.data, all * width, one->offset);
    one->offset += all * width;
    one->tokens += all;
    atomic_fetch_add(&one->all->tokens, all);
    return status;
}

static ms_status write_document(writing *one, const char *path)
{
    const ms_encode_options options = { .special = one->all->options.special,
                                        .bos = MS_EDGE_NO,
                                        .eos = MS_EDGE_NO };
    void *data = NULL;
    size_t bytes = 0, count = 0;
    const uint32_t *ids = NULL;
    ms_status status = ms_file_read_all(&one->context, path, MS_DOCUMENT_MAX, &data, &bytes);
    if (!status)
        status = ms_encode(&one->context, one->encoder, data, bytes, &options, &ids, &count);
    ms_release(&one->context, data);
    if (!status) status = write_ids(one, ids, count, path);
    atomic_fetch_add(&one->all->bytes, bytes);
    atomic_fetch_add(&one->all->changes, 1);
    ms_futex_wake(&one->all->changes, 1);
    return status;
}

static ms_status write_shard(writing *one, const ms_shard_job *job)
{
    one->offset = HEADER_BYTES;
    one->tokens = 0;
    ms_status status = ms_writer_new(&one->context, job->out, &one->writer);
    for (uint32_t i = 0; !status && i < job->count && !atomic_load(&one->all->stop); i++)
        status = write_document(one, job->files[i]);
    /* What was stopped is not complete. */
    bool complete = !status && !atomic_load(&one->all->stop);
    if (complete) status = write_header(one);
    if (complete && !status) status = ms_writer_commit(one->writer);
    ms_writer_free(one->writer);
    one->writer = NULL;
    if (complete && !status) atomic_fetch_add(&one->all->shards, 1);
    return status;
}

/* ------------------------------------------------------------------- threads */

/* Keeps the first error, and stops the others. */
static void note_error(ms_sharding *all, const ms_context *context)
{
    if (!atomic_exchange(&all->failed, true)) all->error = context->error;
    atomic_store(&all->stop, true);
}

static void work(void *argument)
{
    ms_sharding *all = argument;
    writing one = { .all = all };
    ms_context_init(&one.context, all->context.os);
    ms_status status = ms_encoder_new(&one.context, all->tokenizer, &one.encoder);
    while (!status && !atomic_load(&all->stop)) {
        uint32_t next = atomic_fetch_add(&all->next, 1);
        if (next >= all->count) break;
        status = write_shard(&one, &all->jobs[next]);
    }
    if (status) note_error(all, &one.context);
    ms_encoder_free(one.encoder);
    ms_buffer_free(&one.context, &one.out);
    atomic_fetch_sub(&all->running, 1);
    atomic_fetch_add(&all->changes, 1);
    ms_futex_wake(&all->changes, 1);
}

static void join(ms_sharding *sharding)
{
    const ms_os *os = sharding->context.os;
    for (uint32_t i = 0; i < sharding->thread_count; i++)
        os->thread_join(os->user, sharding->threads[i]);
    sharding->thread_count = 0;
}

/* -------------------------------------------------------------------- public */

static ms_status start_threads(ms_context *context, ms_sharding *sharding, uint32_t threads)
{
    const ms_os *os = context->os;
    for (uint32_t i = 0; i < threads; i++) {
        atomic_fetch_add(&sharding->running, 1);
        int error =
            os->thread_start(os->user, "ms-tokenize", work, sharding, &sharding->threads[i]);
        if (error) {
            atomic_fetch_sub(&sharding->running, 1);
            return ms_fail_os(context, error, "cannot start a thread", NULL);
        }
        sharding->thread_count++;
    }
    return MS_OK;
}

ms_status ms_sharding_start(ms_context *context, ms_tokenizer *tokenizer, const ms_shard_job *jobs,
                            uint32_t count, const ms_sharding_options *options, ms_sharding **out)
{
    uint32_t threads = options->threads < count ? options->threads : count;
    ms_sharding *made = NULL;
    if (options->width != 4 && (options->width != 2 || ms_tokenizer_size(tokenizer) > 65536))
        return ms_fail(context, MS_ERROR_ARGUMENT,
                       "tokens of %u bytes: the tokenizer has ids up to %u; a token has 2 or 4",
                       options->width, ms_tokenizer_size(tokenizer) - 1);
    ms_status status = ms_allocate(context, sizeof *made, "a tokenizing job", (void **)&made);
    if (status) return status;
    ms_context_init(&made->context, context->os);
    made->tokenizer = ms_tokenizer_retain(tokenizer);
    made->jobs = jobs;
    made->count = count;
    made->options = *options;
    status = start_threads(context, made, threads < THREADS_MAX ? threads : THREADS_MAX);
    if (status) {
        ms_sharding_free(made);
        return status;
    }
    *out = made;
    return MS_OK;
}

void ms_sharding_wait(ms_sharding *sharding, uint64_t timeout_ns, ms_sharding_state *out)
{
    if (atomic_load(&sharding->running))
        (void)ms_futex_wait(&sharding->changes, sharding->seen, timeout_ns);
    sharding->seen = atomic_load(&sharding->changes);
    /* First, so that the other numbers are final if nothing runs. */
    out->running = atomic_load(&sharding->running) > 0;
    out->bytes = atomic_load(&sharding->bytes);
    out->tokens = atomic_load(&sharding->tokens);
    out->shards = atomic_load(&sharding->shards);
}

ms_status ms_sharding_finish(ms_context *context, ms_sharding *sharding)
{
    join(sharding);
    if (!atomic_load(&sharding->failed)) return MS_OK;
    return ms_fail(context, sharding->error.status, "%s", sharding->error.message);
}

void ms_sharding_free(ms_sharding *sharding)
{
    if (sharding == NULL) return;
    ms_context context = sharding->context;
    atomic_store(&sharding->stop, true);
    join(sharding);
    ms_tokenizer_release(sharding->tokenizer);
    ms_release(&context, sharding);
}
