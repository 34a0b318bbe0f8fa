/* extra.c: the tokens that files beside a tokenizer's add to it. */
#include "text/extra.h"

#include <stdlib.h>

#include "text/build.h"
#include "text/json.h"

/* For messages, which show at most 60 bytes. */
#define SHOWN(span) \
    (int)(ms_span_bytes(span) < 60 ? ms_span_bytes(span) : 60), (const char *)(span).at

/* ---------------------------------------------------------------------- names */

/* The text of "<s>", or of { "content": "<s>" }. */
static ms_span text_of(const json_t *value)
{
    return ms_json_text(json_is_object(value) ? json_object_get(value, "content") : value);
}

static ms_status add_name(ms_context *context, ms_extra *extra, json_t *value)
{
    ms_span text = text_of(value);
    if (text.at == text.end) return MS_OK;
    if (json_object_setn(extra->names, (const char *)text.at, ms_span_bytes(text), value) == 0)
        return MS_OK;
    return ms_fail(context, MS_ERROR_MEMORY, "no memory for the names of special tokens");
}

/* The names that tokenizer_config.json or special_tokens_map.json has for certain purposes. */
static ms_status add_names(ms_context *context, ms_extra *extra, const json_t *file)
{
    static const char *const keys[] = { "bos_token", "eos_token", "unk_token", "sep_token",
                                        "pad_token", "cls_token", "mask_token" };
    ms_status status = MS_OK;
    for (size_t i = 0; !status && i < sizeof keys / sizeof *keys; i++)
        status = add_name(context, extra, json_object_get(file, keys[i]));
    return status;
}

/* The names of further special tokens: a list, or an object of them. */
static ms_status add_list(ms_context *context, ms_extra *extra, json_t *list)
{
    const char *key;
    json_t *value;
    ms_status status = MS_OK;
    for (size_t i = 0; !status && i < json_array_size(list); i++)
        status = add_name(context, extra, json_array_get(list, i));
    if (!json_is_object(list)) return status;
    json_object_foreach(list, key, value)
    {
        status = add_name(context, extra, value);
        if (status) return status;
    }
    return MS_OK;
}

/* Of special_tokens_map.json, transformers reads one of the two members only. */
static ms_status add_lists(ms_context *context, ms_extra *extra)
{
    static const char extra_tokens[] = "extra_special_tokens";
    ms_status status =
        add_list(context, extra, json_object_get(extra->config, "additional_special_tokens"));
    if (!status) status = add_list(context, extra, json_object_get(extra->config, extra_tokens));
    if (status || extra->decoder) return status;
    return add_list(context, extra, json_object_get(extra->map, extra_tokens));
}

static const json_t *named(const ms_extra *extra, ms_span text)
{
    return json_object_getn(extra->names, (const char *)text.at, ms_span_bytes(text));
}

/* --------------------------------------------------------------------- tokens */

/* What a file says of a token; a bare name says nothing. */
static ms_extra_token token_of(ms_span text, const json_t *value, bool special)
{
    special = ms_json_boolean(value, "special", false) || special;
    return (ms_extra_token){
        .text = text,
        .token = { .special = special,
                   .left = ms_json_boolean(value, "lstrip", false),
                   .right = ms_json_boolean(value, "rstrip", false),
                   .word = ms_json_boolean(value, "single_word", false) },
        .normalized = ms_json_boolean(value, "normalized", !special),
    };
}

static ms_status add_token(ms_context *context, ms_extra *extra, ms_extra_token token,
                           json_int_t id)
{
    if (id < 0 || id > MS_TOKEN_ID_MAX)
        return ms_fail(context, MS_ERROR_CORRUPT, "the added token '%.*s' has no id from 0 to %u",
                       SHOWN(token.text), MS_TOKEN_ID_MAX);
    /* It is nowhere in a text. */
    if (token.text.at == token.text.end) return MS_OK;
    ms_status status = ms_grow(context, (void **)&extra->tokens, &extra->capacity, extra->count + 1,
                               sizeof *extra->tokens);
    if (status) return status;
    token.token.id = (uint32_t)id;
    token.order = extra->count;
    extra->tokens[extra->count++] = token;
    return MS_OK;
}

/* The id of a key of added_tokens_decoder; -1: it is none. */
static json_int_t id_of(const char *key)
{
    json_int_t id = 0;
    if (*key == '\0') return -1;
    for (; *key; key++) {
        if (*key < '0' || *key > '9' || id > MS_TOKEN_ID_MAX) return -1;
        id = 10 * id + (*key - '0');
    }
    return id;
}

/* "32000": { "content": "<x>", "special": true } */
static ms_status read_decoder(ms_context *context, ms_extra *extra)
{
    json_t *list = json_object_get(extra->config, "added_tokens_decoder"), *value;
    const char *key;
    ms_status status = MS_OK;
    if (!json_is_object(list))
        return ms_fail(context, MS_ERROR_CORRUPT,
                       "its \"added_tokens_decoder\" is no object of ids and tokens");
    json_object_foreach(list, key, value)
    {
        ms_span text = ms_json_text(json_object_get(value, "content"));
        if (text.at == NULL)
            return ms_fail(context, MS_ERROR_CORRUPT,
                           "the id '%.60s' of its \"added_tokens_decoder\" has no \"content\"",
                           key);
        status = add_token(context, extra, token_of(text, value, named(extra, text)), id_of(key));
        if (status) return status;
    }
    return status;
}

/* "<x>": 32000 */
static ms_status read_added(ms_context *context, ms_extra *extra)
{
    const char *name;
    size_t bytes;
    json_t *value;
    json_object_keylen_foreach(extra->added, name, bytes, value)
    {
        ms_span text = { .at = (const uint8_t *)name, .end = (const uint8_t *)name + bytes };
        json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
        ms_status status = add_token(context, extra, token_of(text, NULL, named(extra, text)), id);
        if (status) return status;
    }
    return MS_OK;
}

static int by_id(const void *a, const void *b)
{
    const ms_extra_token *x = a, *y = b;
    if (x->token.id != y->token.id) return x->token.id < y->token.id ? -1 : 1;
    return x->order < y->order ? -1 : 1;
}

ms_status ms_extra_collect(ms_context *context, ms_extra *extra)
{
    ms_status status = MS_OK;
    extra->decoder = json_object_get(extra->config, "added_tokens_decoder") != NULL;
    extra->file = extra->decoder ? "tokenizer_config.json" : "added_tokens.json";
    extra->names = json_object();
    if (extra->names == NULL)
        return ms_fail(context, MS_ERROR_MEMORY, "no memory for the names of special tokens");
    status = add_names(context, extra, extra->config);
    if (!status && !extra->decoder) status = add_names(context, extra, extra->map);
    /* What the decoder says of a token goes before a mere list. */
    if (!status && extra->decoder) status = read_decoder(context, extra);
    if (!status) status = add_lists(context, extra);
    if (!status && !extra->decoder) status = read_added(context, extra);
    if (!status && extra->count > 1)
        qsort(extra->tokens, extra->count, sizeof *extra->tokens, by_id);
    extra->failed = status != MS_OK;
    return status;
}

void ms_extra_free(ms_context *context, ms_extra *extra)
{
    json_decref(extra->config);
    json_decref(extra->map);
    json_decref(extra->added);
    json_decref(extra->names);
    ms_release(context, extra->tokens);
    *extra = (ms_extra){ 0 };
}

/* --------------------------------------------------------------------- adding */

static bool is_same(ms_span a, ms_span b)
{
    return ms_span_bytes(a) == ms_span_bytes(b) && memcmp(a.at, b.at, ms_span_bytes(a)) == 0;
}

/* The token of that id, if it has the text of the added token that the tokenizer has there. */
static const ms_extra_token *find_same(const ms_extra *extra, const ms_tokenizer *tokenizer,
                                       uint32_t id)
{
    size_t low = 0, high = extra->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (extra->tokens[middle].token.id < id) low = middle + 1;
        else high = middle;
    }
    if (low == extra->count || extra->tokens[low].token.id != id) return NULL;
    bool same = is_same(extra->tokens[low].text, ms_vocabulary_text(&tokenizer->added, id));
    return same ? &extra->tokens[low] : NULL;
}

/* SentencePiece's own rules for spaces are at work. */
static bool is_sentence(const ms_tokenizer *tokenizer)
{
    const ms_normalizers *all = &tokenizer->normalizers;
    return all->count && all->items[0].kind == MS_NORMALIZE_SENTENCE;
}

/* Where a token is found. If each chunk between tokens gets a space in front, transformers searches
 * the text as it is. */
static ms_added *set_of(const ms_extra_token *extra, ms_tokenizer *tokenizer)
{
    bool raw = is_sentence(tokenizer) && tokenizer->normalizers.items[0].sentence.prefix;
    return extra->normalized && !raw ? &tokenizer->normalized : &tokenizer->raw;
}

static void remove_told(const ms_extra *extra, const ms_tokenizer *tokenizer, ms_added *set)
{
    for (size_t i = set->count; i-- > 0;)
        if (find_same(extra, tokenizer, set->tokens[i].id))
            set->tokens[i] = set->tokens[--set->count];
}

/* Finds a token that is there already by other rules. A special one stays special. */
static ms_status change(ms_context *context, const ms_extra_token *extra, ms_tokenizer *tokenizer)
{
    ms_token *known = &tokenizer->added.tokens[extra->token.id];
    ms_added_token token = extra->token;
    token.special = token.special || known->flags & MS_TOKEN_SPECIAL;
    if (token.special) known->flags |= MS_TOKEN_SPECIAL;
    return ms_added_add(context, set_of(extra, tokenizer), extra->text, token);
}

/* Gives the tokens of the tokenizer what added_tokens_decoder says of them. SentencePiece finds its
 * user-defined pieces nevertheless, where the new rules do not. */
static ms_status change_known(ms_context *context, const ms_extra *extra, ms_tokenizer *tokenizer)
{
    ms_status status = MS_OK;
    if (!extra->decoder || extra->count == 0) return MS_OK;
    remove_told(extra, tokenizer, &tokenizer->raw);
    if (!is_sentence(tokenizer)) remove_told(extra, tokenizer, &tokenizer->normalized);
    for (size_t i = 0; !status && i < extra->count; i++) {
        const ms_extra_token *one = &extra->tokens[i];
        uint32_t id = ms_vocabulary_find(&tokenizer->added, one->text.at, ms_span_bytes(one->text));
        if (id == one->token.id) status = change(context, one, tokenizer);
    }
    return status;
}

/* The id that the model has for a name; MS_NO_TOKEN: it has none. */
static ms_status find_name(ms_context *context, const ms_tokenizer *tokenizer, ms_span name,
                           uint32_t *id)
{
    ms_status status = ms_build_find(context, &tokenizer->model, name, id);
    if (*id >= tokenizer->model.size) *id = MS_NO_TOKEN;
    return status;
}

static ms_status add_one(ms_context *context, const ms_extra_token *extra, ms_tokenizer *tokenizer)
{
    uint32_t id = extra->token.id, size = ms_tokenizer_size(tokenizer);
    uint32_t known =
        ms_vocabulary_find(&tokenizer->added, extra->text.at, ms_span_bytes(extra->text));
    ms_status status = MS_OK;
    if (known == id) return MS_OK;
    if (known == MS_NO_TOKEN) status = find_name(context, tokenizer, extra->text, &known);
    if (status) return status;
    if (known != MS_NO_TOKEN && known != id)
        return ms_fail(context, MS_ERROR_CORRUPT,
                       "the added token '%.*s' has the id %u, and the tokenizer has it as %u",
                       SHOWN(extra->text), id, known);
    if (ms_vocabulary_has(&tokenizer->added, id))
        return ms_fail(context, MS_ERROR_CORRUPT,
                       "the added token '%.*s' has the id %u, which is that of the token '%.*s'",
                       SHOWN(extra->text), id, SHOWN(ms_vocabulary_text(&tokenizer->added, id)));
    if (id > size)
        return ms_fail(context, MS_ERROR_CORRUPT,
                       "the added token '%.*s' has the id %u, and no token has those from %u on: "
                       "transformers would give it the id %u",
                       SHOWN(extra->text), id, size, size);
    return ms_tokenizer_add(context, tokenizer, extra->text, extra->token,
                            set_of(extra, tokenizer) == &tokenizer->normalized);
}

/* Whether a token that is named special is yet to be found as one: it has no rules of its own, or
 * those of SentencePiece's user-defined pieces. */
static bool is_plain(const ms_extra *extra, const ms_tokenizer *tokenizer, uint32_t known)
{
    return known == MS_NO_TOKEN
           || (is_sentence(tokenizer) && !find_same(extra, tokenizer, known)
               && !(tokenizer->added.tokens[known].flags & MS_TOKEN_SPECIAL));
}

/* What the files name as the end of a text and so on is special. */
static ms_status add_named(ms_context *context, const ms_extra *extra, ms_tokenizer *tokenizer)
{
    const char *name;
    size_t bytes;
    json_t *value;
    json_object_keylen_foreach(extra->names, name, bytes, value)
    {
        ms_span text = { .at = (const uint8_t *)name, .end = (const uint8_t *)name + bytes };
        uint32_t known = ms_vocabulary_find(&tokenizer->added, name, bytes);
        if (!is_plain(extra, tokenizer, known)) continue;
        ms_extra_token token = token_of(text, value, true);
        ms_status status = find_name(context, tokenizer, text, &token.token.id);
        if (!status && known != MS_NO_TOKEN) status = change(context, &token, tokenizer);
        else if (!status && token.token.id != MS_NO_TOKEN)
            status = ms_tokenizer_add(context, tokenizer, text, token.token,
                                      set_of(&token, tokenizer) == &tokenizer->normalized);
        if (status) return status;
    }
    return MS_OK;
}

ms_status ms_extra_apply(ms_context *context, ms_extra *extra, ms_tokenizer *tokenizer)
{
    ms_status status = change_known(context, extra, tokenizer);
    for (size_t i = 0; !status && i < extra->count; i++)
        status = add_one(context, &extra->tokens[i], tokenizer);
    if (!status) status = add_named(context, extra, tokenizer);
    extra->failed = status != MS_OK;
    return status;
}

/* --------------------------------------------------------------- other members */

/* The class of Llama has it by default, others have not. */
bool ms_extra_prefix_once(const ms_extra *extra)
{
    const char *name = json_string_value(json_object_get(extra->config, "tokenizer_class"));
    bool once = name && strncmp(name, "LlamaTokenizer", 14) == 0;
    return !ms_json_boolean(extra->config, "legacy", !once);
}

static void name_end(const json_t *file, const char *key, const ms_tokenizer *tokenizer,
                     uint32_t *id)
{
    ms_span text = text_of(json_object_get(file, key));
    if (text.at == NULL) return;
    uint32_t found = ms_tokenizer_find(tokenizer, (const char *)text.at, ms_span_bytes(text));
    if (found != MS_NO_TOKEN) *id = found;
}

void ms_extra_name_ends(const ms_extra *extra, ms_tokenizer *tokenizer)
{
    name_end(extra->config, "bos_token", tokenizer, &tokenizer->bos);
    name_end(extra->config, "eos_token", tokenizer, &tokenizer->eos);
    if (extra->decoder) return;
    name_end(extra->map, "bos_token", tokenizer, &tokenizer->bos);
    name_end(extra->map, "eos_token", tokenizer, &tokenizer->eos);
}
