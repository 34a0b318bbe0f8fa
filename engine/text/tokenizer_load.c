/* tokenizer_load.c: which files a tokenizer is read from, and what they are. */
#include "text/tokenizer_load.h"

#include <stdio.h>

#include "io/path.h"
#include "text/build.h"
#include "text/json_ends.h"
#include "text/json_model.h"
#include "text/json_steps.h"
#include "text/merges_file.h"
#include "text/ranks.h"
#include "text/sentencepiece.h"

/* A tokenizer that is being loaded. path: the file that is being read, for messages. */
typedef struct loading {
    ms_context *context;
    char *path;
    ms_tokenizer_options options;
    ms_tokenizer *tokenizer;
    ms_extra extra; /* of a folder */
} loading;

/* -------------------------------------------------------------------- formats */

/* Whether the text begins with a token in base64, a space and a rank. */
static bool is_ranks(ms_span data)
{
    const uint8_t *at = data.at;
    while (at < data.end && *at != ' ' && *at != '\n') {
        bool digit = (*at >= 'A' && *at <= 'Z') || (*at >= 'a' && *at <= 'z')
                     || (*at >= '0' && *at <= '9') || *at == '+' || *at == '/' || *at == '=';
        if (!digit) return false;
        at++;
    }
    bool base64 = at > data.at && (at - data.at) % 4 == 0 && at + 1 < data.end && *at == ' ';
    return base64 && at[1] >= '0' && at[1] <= '9';
}

/* A SentencePiece model begins with its first piece: field 1, which is a message. */
ms_text_format ms_format_of(ms_span data)
{
    const uint8_t *at = data.at;
    size_t bytes = ms_span_bytes(data);
    if (bytes >= 2 && at[0] == 0x0a && at[1] != '{' && at[1] != '\n' && at[1] >= 2)
        if (bytes >= 3 && at[2] == 0x0a) return MS_FORMAT_SENTENCEPIECE;
    while (at < data.end && (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r')) at++;
    if (at < data.end && *at == '{') return MS_FORMAT_JSON;
    if (is_ranks(data)) return MS_FORMAT_RANKS;
    if (bytes >= 8 && memcmp(data.at, "#version", 8) == 0) return MS_FORMAT_MERGES;
    /* Old lists of merges have no version: two tokens with one space, and nothing else. */
    const uint8_t *end = bytes ? memchr(data.at, '\n', bytes) : NULL;
    ms_span line = { .at = data.at, .end = end ? end : data.end };
    const uint8_t *space = bytes ? memchr(line.at, ' ', ms_span_bytes(line)) : NULL;
    bool two = space && space > line.at && space + 1 < line.end
               && memchr(space + 1, ' ', (size_t)(line.end - space - 1)) == NULL;
    return two && ms_utf8_valid_end(line.at, line.end) == line.end ? MS_FORMAT_MERGES
                                                                   : MS_FORMAT_UNKNOWN;
}

/* ---------------------------------------------------------------------- files */

/* The file's bytes; `data` is to be released. */
static ms_status read_file(loading *all, void **data, ms_span *out)
{
    size_t bytes = 0;
    ms_status status =
        ms_file_read_all(all->context, all->path, MS_TOKENIZER_FILE_MAX, data, &bytes);
    if (status) return status;
    *out = (ms_span){ .at = *data, .end = (const uint8_t *)*data + bytes };
    return MS_OK;
}

static bool exists(loading *all, const char *path)
{
    const ms_os *os = all->context->os;
    ms_file_info info;
    return os->info(os->user, path, &info) == 0 && !info.is_directory;
}

/* Goes on with another file of the same folder. */
static ms_status turn_to(loading *all, const char *name)
{
    const char *slash = strrchr(all->path, '/');
    size_t bytes = slash ? (size_t)(slash + 1 - all->path) : 0;
    char *path = NULL;
    ms_status status =
        ms_allocate(all->context, bytes + strlen(name) + 1, "a path", (void **)&path);
    if (status) return status;
    memcpy(path, all->path, bytes);
    memcpy(path + bytes, name, strlen(name) + 1);
    ms_release(all->context, all->path);
    all->path = path;
    return MS_OK;
}

/* The name that belongs to one of GPT-2's two files, as it is named by its two publishers. */
static const char *partner_of(const char *path)
{
    static const char *const pairs[][2] = { { "vocab.json", "merges.txt" },
                                            { "encoder.json", "vocab.bpe" } };
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    for (size_t i = 0; i < 2; i++) {
        if (strcmp(name, pairs[i][0]) == 0) return pairs[i][1];
        if (strcmp(name, pairs[i][1]) == 0) return pairs[i][0];
    }
    return NULL;
}

/* ----------------------------------------------------------------- two files */

static ms_status read_vocabulary(loading *all, const json_t *root)
{
    ms_model *model = &all->tokenizer->model;
    const char *name;
    size_t bytes;
    json_t *value;
    model->by_bytes = true;
    json_object_keylen_foreach((json_t *)(uintptr_t)root, name, bytes, value)
    {
        const uint8_t *at = (const uint8_t *)name;
        json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
        if (id < 0 || id > MS_TOKEN_ID_MAX)
            return ms_fail(all->context, MS_ERROR_CORRUPT,
                           "it is neither a tokenizer.json, which has a \"model\", nor a "
                           "vocabulary: '%.60s' has no id from 0 to %u",
                           name, MS_TOKEN_ID_MAX);
        ms_status status = ms_build_named(all->context, model, (uint32_t)id,
                                          (ms_span){ .at = at, .end = at + bytes });
        if (status) return status;
    }
    return MS_OK;
}

/* The vocabulary was read; all->path is its file. */
static ms_status read_merges(loading *all)
{
    const char *partner = partner_of(all->path);
    void *data = NULL;
    ms_span text = { 0 };
    if (partner == NULL)
        return ms_fail(all->context, MS_ERROR_ARGUMENT,
                       "it is a vocabulary, whose merges are in another file: name the files "
                       "vocab.json and merges.txt, or encoder.json and vocab.bpe");
    ms_status status = turn_to(all, partner);
    if (!status) status = read_file(all, &data, &text);
    if (!status)
        status = ms_format_merges(all->context, text, all->tokenizer, &all->options, &all->extra);
    ms_release(all->context, data);
    return status;
}

/* ------------------------------------------------------------------- one file */

/* Files that say themselves what the options are for. */
static ms_status refuse_options(const loading *all)
{
    if (all->options.pattern == NULL && all->options.special == NULL) return MS_OK;
    return ms_fail(all->context, MS_ERROR_ARGUMENT,
                   "it says itself where text is cut, and has its own special tokens: `pattern` "
                   "and `special` are for tiktoken's ranks and for vocab.json");
}

/* All parts, in the order in which they need each other. */
static ms_status read_parts(loading *all, const json_t *root)
{
    ms_context *context = all->context;
    ms_tokenizer *tokenizer = all->tokenizer;
    const json_t *pre_tokenizer = json_object_get(root, "pre_tokenizer");
    tokenizer->model.by_bytes = ms_json_is_byte_level(pre_tokenizer);
    ms_status status = ms_json_normalizer(context, json_object_get(root, "normalizer"), tokenizer);
    if (!status) status = ms_json_pre_tokenizer(context, pre_tokenizer, tokenizer);
    if (!status) status = ms_json_model(context, json_object_get(root, "model"), tokenizer);
    if (!status)
        status = ms_json_added_tokens(context, json_object_get(root, "added_tokens"), tokenizer);
    if (!status) status = ms_extra_apply(context, &all->extra, tokenizer);
    if (!status)
        status =
            ms_json_post_processor(context, json_object_get(root, "post_processor"), tokenizer);
    if (!status) status = ms_tokenizer_normalize_added(context, tokenizer);
    return status ? status : ms_json_decoder(context, json_object_get(root, "decoder"), tokenizer);
}

static ms_status read_json(loading *all, ms_span text)
{
    json_t *root = NULL;
    ms_status status = ms_json_parse(all->context, text.at, ms_span_bytes(text), &root);
    if (status) return status;
    if (json_is_object(json_object_get(root, "model"))) {
        status = refuse_options(all);
        if (!status) status = read_parts(all, root);
    } else {
        status = read_vocabulary(all, root);
        if (!status) status = read_merges(all);
    }
    json_decref(root);
    return status;
}

static ms_status read_content(loading *all, ms_span text)
{
    const char *partner = partner_of(all->path);
    ms_status status = MS_OK;
    switch (ms_format_of(text)) {
    case MS_FORMAT_JSON: return read_json(all, text);
    case MS_FORMAT_RANKS:
        return ms_format_ranks(all->context, text, all->tokenizer, &all->options, &all->extra);
    case MS_FORMAT_SENTENCEPIECE:
        status = refuse_options(all);
        if (status) return status;
        return ms_format_sentencepiece(all->context, text, all->tokenizer, &all->extra);
    case MS_FORMAT_MERGES:
        if (partner == NULL || strstr(partner, ".json") == NULL) break;
        return ms_fail(all->context, MS_ERROR_ARGUMENT,
                       "it is a list of merges: load the vocabulary beside it, %s", partner);
    default: break;
    }
    return ms_fail(all->context, MS_ERROR_CORRUPT,
                   "it is no tokenizer.json, vocab.json, SentencePiece model or file of "
                   "tiktoken's ranks");
}

static ms_status read_one(loading *all)
{
    void *data = NULL;
    ms_span text = { 0 };
    ms_status status = read_file(all, &data, &text);
    if (!status) status = read_content(all, text);
    ms_release(all->context, data);
    return status;
}

/* --------------------------------------------------------------------- folder */

/* The JSON of another file of the folder; NULL: it is not there. */
static ms_status read_beside(loading *all, const char *name, json_t **out)
{
    void *data = NULL;
    ms_span text = { 0 };
    ms_status status = turn_to(all, name);
    if (status || !exists(all, all->path)) return status;
    status = read_file(all, &data, &text);
    if (!status) status = ms_json_parse(all->context, text.at, ms_span_bytes(text), out);
    ms_release(all->context, data);
    if (status || json_is_object(*out)) return status;
    return ms_fail(all->context, MS_ERROR_CORRUPT, "it is no JSON object");
}

/* The files beside a tokenizer's that say more about its tokens. */
static ms_status read_extra(loading *all)
{
    ms_status status = read_beside(all, "tokenizer_config.json", &all->extra.config);
    if (!status) status = read_beside(all, "special_tokens_map.json", &all->extra.map);
    if (!status) status = read_beside(all, "added_tokens.json", &all->extra.added);
    return status ? status : ms_extra_collect(all->context, &all->extra);
}

/* An error was that of the file that names added tokens. */
static ms_status turn_to_failed(loading *all, ms_status failed)
{
    ms_status status = turn_to(all, all->extra.file);
    return status ? status : failed;
}

/* The first of the known files that is there. all->path is the folder. */
static ms_status read_folder(loading *all)
{
    static const char *const names[] = { "tokenizer.json", "tokenizer.model", "vocab.json",
                                         "encoder.json" };
    char *base = NULL;
    ms_status status = ms_path_join(all->context, all->path, "", &base);
    if (status) return status;
    ms_release(all->context, all->path);
    all->path = base;
    status = read_extra(all);
    if (all->extra.failed) status = turn_to_failed(all, status);
    for (size_t i = 0; !status && i < sizeof names / sizeof *names; i++) {
        status = turn_to(all, names[i]);
        if (status || !exists(all, all->path)) continue;
        status = read_one(all);
        if (!status) ms_extra_name_ends(&all->extra, all->tokenizer);
        return all->extra.failed ? turn_to_failed(all, status) : status;
    }
    if (!status) status = turn_to(all, "");
    return status ? status
                  : ms_fail(all->context, MS_ERROR_NOT_FOUND,
                            "it has no tokenizer.json, tokenizer.model, vocab.json or "
                            "encoder.json");
}

/* Whether a message has this path in quotes. */
static bool names(const char *message, const char *path)
{
    size_t bytes = strlen(path);
    for (const char *at = message; (at = strstr(at, path)) != NULL; at++)
        if (at > message && at[-1] == '\'' && at[bytes] == '\'') return true;
    return false;
}

/* Puts the file in front of a message that does not name it. */
static ms_status name_file(loading *all, ms_status status)
{
    char message[MS_ERROR_MESSAGE_BYTES];
    if (status == MS_OK || all->path == NULL || names(all->context->error.message, all->path))
        return status;
    snprintf(message, sizeof message, "%s", all->context->error.message);
    return ms_fail(all->context, status, "'%s': %s", all->path, message);
}

ms_status ms_tokenizer_load(ms_context *context, const char *path,
                            const ms_tokenizer_options *options, ms_tokenizer **out)
{
    loading all = { .context = context };
    ms_file_info info;
    if (options) all.options = *options;
    int error = context->os->info(context->os->user, path, &info);
    if (error) return ms_fail_os(context, error, "cannot open", path);
    ms_status status = ms_text_join(context, path, "", &all.path);
    if (!status) status = ms_tokenizer_new(context, &all.tokenizer);
    if (!status) status = info.is_directory ? read_folder(&all) : read_one(&all);
    status = name_file(&all, status);
    ms_extra_free(context, &all.extra);
    ms_release(context, all.path);
    if (status) {
        ms_tokenizer_release(all.tokenizer);
        return status;
    }
    ms_added_seal(&all.tokenizer->raw);
    ms_added_seal(&all.tokenizer->normalized);
    *out = all.tokenizer;
    return MS_OK;
}
