/* shards.c: files of text, or of lines of JSON, to files of tokens, on several threads. */
#include <inttypes.h>
#include <stdio.h>

#include "base/thread.h"
#include "moonshard/io.h"
#include "text/lines.h"
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
    ms_buffer out; /* tokens that wait to be written */
    uint64_t offset, tokens;
} writing;

/* OUT_BYTES: so many bytes of tokens are written at once. */
enum { HEADER_BYTES = 1024, TOKENS_MAX = INT32_MAX, OUT_BYTES = 1 << 20 };

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

/* Writes the tokens that wait. */
static ms_status flush(writing *one)
{
    if (one->out.length == 0) return MS_OK;
    ms_status status = ms_writer_write(one->writer, one->out.data, one->out.length, one->offset);
    one->offset += one->out.length;
    one->out.length = 0;
    return status;
}

/* Adds a document. path: the file that it is in. */
static ms_status add_document(writing *one, ms_span text, const char *path)
{
    const ms_encode_options options = { .special = one->all->options.special,
                                        .bos = MS_EDGE_NO,
                                        .eos = MS_EDGE_NO };
    uint32_t width = one->all->options.width, end = one->all->options.end;
    const uint32_t *ids = NULL;
    size_t count = 0;
    ms_status status = ms_encode(&one->context, one->encoder, (const char *)text.at,
                                 ms_span_bytes(text), &options, &ids, &count);
    if (status) return status;
    size_t all = count + (end != MS_NO_TOKEN);
    if (one->tokens + all > TOKENS_MAX)
        return ms_fail(&one->context, MS_ERROR_UNSUPPORTED,
                       "with '%s' its shard would have more than %d tokens: divide the file", path,
                       TOKENS_MAX);
    status = ms_buffer_reserve(&one->context, &one->out, all * width);
    if (status) return status;
    for (size_t i = 0; i < all; i++, one->out.length += width)
        put_number(one->out.data + one->out.length, i < count ? ids[i] : end, width);
    one->tokens += all;
    atomic_fetch_add(&one->all->tokens, all);
    return one->out.length < OUT_BYTES ? MS_OK : flush(one);
}

/* Tells who waits that so many bytes are done. */
static void note_done(ms_sharding *all, uint64_t bytes)
{
    atomic_fetch_add(&all->bytes, bytes);
    atomic_fetch_add(&all->changes, 1);
    ms_futex_wake(&all->changes, 1);
}

static ms_status write_file(writing *one, const char *path)
{
    void *data = NULL;
    size_t bytes = 0;
    ms_status status = ms_file_read_all(&one->context, path, MS_DOCUMENT_MAX, &data, &bytes);
    ms_span text = { .at = data, .end = bytes ? (const uint8_t *)data + bytes : data };
    if (!status) status = add_document(one, text, path);
    ms_release(&one->context, data);
    note_done(one->all, bytes);
    return status;
}

/* Puts file and line in front of the message. first: where the line begins. */
static ms_status name_line(writing *one, ms_lines *lines, uint64_t first, ms_status failed)
{
    char message[MS_ERROR_MESSAGE_BYTES];
    uint64_t number = 0;
    snprintf(message, sizeof message, "%s", one->context.error.message);
    ms_status status = ms_lines_number(&one->context, lines, first, &number);
    return status ? status
                  : ms_fail(&one->context, failed, "'%s', line %" PRIu64 ": %s", lines->path,
                            number, message);
}

static ms_status write_line(writing *one, ms_lines *lines, ms_span line, uint64_t first)
{
    json_t *root = NULL;
    ms_span text;
    ms_status status = ms_line_text(&one->context, line, one->all->options.field, &root, &text);
    if (status) status = name_line(one, lines, first, status);
    else status = add_document(one, text, lines->path);
    json_decref(root);
    return status;
}

static bool is_blank(ms_span line)
{
    while (line.at < line.end && (*line.at == ' ' || *line.at == '\t' || *line.at == '\r'))
        line.at++;
    return line.at == line.end;
}

/* Each line of the part is a document. */
static ms_status write_lines(writing *one, const ms_shard_part *part)
{
    ms_lines lines;
    ms_span line;
    uint64_t first = 0, told = 0;
    ms_status status = ms_lines_open(&one->context, part->path, part->begin, part->end, &lines);
    if (status) return status;
    while (!status && !atomic_load(&one->all->stop)) {
        status = ms_lines_next(&one->context, &lines, &line, &first);
        if (status || line.at == NULL) break;
        told += (uint64_t)(line.end - line.at) + 1;
        /* A mark of the order of bytes, which some programs write. */
        if (first == 0 && ms_span_bytes(line) >= 3 && memcmp(line.at, "\xef\xbb\xbf", 3) == 0)
            line.at += 3;
        if (!is_blank(line)) status = write_line(one, &lines, line, first);
        if (told < OUT_BYTES) continue;
        note_done(one->all, told);
        told = 0;
    }
    note_done(one->all, told);
    ms_lines_close(&one->context, &lines);
    return status;
}

static ms_status write_shard(writing *one, const ms_shard_job *job)
{
    one->offset = HEADER_BYTES;
    one->tokens = one->out.length = 0;
    ms_status status = ms_writer_new(&one->context, job->out, &one->writer);
    for (uint32_t i = 0; !status && i < job->count && !atomic_load(&one->all->stop); i++)
        status = one->all->options.field ? write_lines(one, &job->parts[i])
                                         : write_file(one, job->parts[i].path);
    /* What was stopped is not complete. */
    bool complete = !status && !atomic_load(&one->all->stop);
    if (complete) status = flush(one);
    if (complete && !status) status = write_header(one);
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
