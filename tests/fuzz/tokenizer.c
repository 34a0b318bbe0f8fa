/* tokenizer.c: any bytes as a tokenizer's file: it is refused with a message that names it, or it
 * encodes and decodes a text with ids below its size. After a line of "=====" come the merges,
 * after further ones tokenizer_config.json and added_tokens.json: then the folder is loaded.
 * fuzz: engine/base engine/io engine/text */
#include "moonshard/tokenizer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "tokenizer: %s\n", what);
    abort();
}

/* ------------------------------------------------------------ files in memory */

enum { FILES = 4 };
static const char *const names[FILES] = { "x/vocab.json", "x/merges.txt", "x/tokenizer_config.json",
                                          "x/added_tokens.json" };

typedef struct memory_file {
    const char *name;
    const uint8_t *data;
    size_t size;
} memory_file;

typedef struct memory_files {
    const ms_os *real;
    memory_file files[FILES]; /* without data: not there */
} memory_files;

static const memory_file *find(const memory_files *all, const char *path)
{
    for (size_t i = 0; i < FILES; i++)
        if (all->files[i].data && strcmp(path, all->files[i].name) == 0) return &all->files[i];
    return NULL;
}

static int memory_info(void *user, const char *path, ms_file_info *out)
{
    const memory_file *file = find(user, path);
    if (strcmp(path, "x") == 0) {
        *out = (ms_file_info){ .is_directory = true };
        return 0;
    }
    if (!file) return -ENOENT;
    *out = (ms_file_info){ .bytes = file->size };
    return 0;
}

static int memory_open(void *user, const char *path, int flags, ms_file **out)
{
    (void)flags;
    *out = (ms_file *)(uintptr_t)find(user, path);
    return *out ? 0 : -ENOENT;
}

static int64_t memory_read(void *user, ms_file *opened, void *buffer, size_t bytes, uint64_t offset)
{
    const memory_file *file = (const memory_file *)(const void *)opened;
    (void)user;
    if (offset >= file->size) return 0;
    if (bytes > file->size - offset) bytes = (size_t)(file->size - offset);
    memcpy(buffer, file->data + offset, bytes);
    return (int64_t)bytes;
}

static int memory_size(void *user, ms_file *opened, uint64_t *bytes)
{
    (void)user;
    *bytes = ((const memory_file *)(const void *)opened)->size;
    return 0;
}

static void memory_close(void *user, ms_file *opened)
{
    (void)user;
    (void)opened;
}

/* ------------------------------------------------------------------------ checks */

static void use(ms_context *context, ms_tokenizer *tokenizer)
{
    static const char text[] = " Hello  w\xc3\xb6rld\xff\xe4\xb8\xad<s>\n12 ";
    ms_encoder *encoder = NULL;
    ms_decoder *decoder = NULL;
    const uint32_t *ids = NULL;
    const char *out;
    size_t count = 0, bytes, length;
    ms_encode_options options = { .special = MS_SPECIAL_PARSE };
    check(!ms_encoder_new(context, tokenizer, &encoder), "no encoder");
    check(!ms_decoder_new(context, tokenizer, true, &decoder), "no decoder");
    for (uint32_t id = 0; id < ms_tokenizer_size(tokenizer) && id < 100; id++)
        (void)ms_tokenizer_token(tokenizer, id, &length);
    if (!ms_encode(context, encoder, text, sizeof text - 1, &options, &ids, &count)) {
        for (size_t i = 0; i < count; i++)
            check(ids[i] < ms_tokenizer_size(tokenizer), "an id is not below the size");
        check(!ms_decoder_add(context, decoder, ids, count, &out, &bytes), "an id has no text");
        ms_decoder_finish(decoder, &out, &bytes);
    }
    ms_encoder_free(encoder);
    ms_decoder_free(decoder);
}

/* Cuts the input into files; returns how many there are. */
static size_t cut(memory_files *all, const uint8_t *data, size_t size)
{
    static const char line[] = "\n=====\n";
    const uint8_t *end = data + size;
    for (size_t i = 0;; i++) {
        size_t left = (size_t)(end - data);
        const uint8_t *next =
            left && i + 1 < FILES ? memmem(data, left, line, sizeof line - 1) : NULL;
        all->files[i] = (memory_file){ names[i], data, next ? (size_t)(next - data) : left };
        if (next == NULL) return i + 1;
        data = next + sizeof line - 1;
    }
}

static bool names_file(const char *message)
{
    for (size_t i = 0; i < FILES; i++)
        if (strstr(message, names[i])) return true;
    return false;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    memory_files all = { .real = ms_os_posix() };
    size_t count = cut(&all, data, size);
    ms_os os = *all.real;
    os.user = &all;
    os.info = memory_info;
    os.open = memory_open;
    os.read = memory_read;
    os.size = memory_size;
    os.close = memory_close;
    for (int with_pattern = 0; with_pattern < 2; with_pattern++) {
        ms_context context;
        ms_tokenizer *tokenizer = NULL;
        ms_tokenizer_options options = { .pattern = with_pattern ? "gpt2" : NULL };
        ms_context_init(&context, &os);
        if (ms_tokenizer_load(&context, count > 2 ? "x" : names[0], &options, &tokenizer)) {
            check(names_file(context.error.message), "the message names no file");
            check(tokenizer == NULL, "a refused file has left a tokenizer");
        } else use(&context, tokenizer);
        ms_tokenizer_release(tokenizer);
    }
    return 0;
}
