/* json_ends.c: post-processors and decoders of tokenizer.json. */
#include "text/json_ends.h"

#include "text/decoding.h"

#define POST_PROCESSORS "ByteLevel, TemplateProcessing, BertProcessing, RobertaProcessing, Sequence"
#define DECODERS "ByteLevel, ByteFallback, Fuse, Replace, Strip, Metaspace, Sequence"

/* ------------------------------------------------------------ post-processors */

/* The ids of a special token of a template: those that the template lists by its name. */
static ms_status add_template_token(ms_context *context, const json_t *template,
                                    const json_t *token, ms_ids *to)
{
    const char *name = json_string_value(json_object_get(token, "id"));
    const json_t *entry =
        name ? json_object_get(json_object_get(template, "special_tokens"), name) : NULL;
    const json_t *ids = json_object_get(entry, "ids");
    ms_status status = MS_OK;
    if (!json_is_array(ids))
        return ms_fail(context, MS_ERROR_CORRUPT, "its template has no ids for the token '%.60s'",
                       name ? name : "");
    for (size_t i = 0; !status && i < json_array_size(ids); i++) {
        json_int_t id = json_integer_value(json_array_get(ids, i));
        if (id < 0 || id > MS_TOKEN_ID_MAX)
            return ms_fail(context, MS_ERROR_CORRUPT, "its template has an id that is none");
        status = ms_ids_add(context, to, (uint32_t)id);
    }
    return status;
}

/* What is before and after the text in the template for one text. */
static ms_status add_template(ms_context *context, const json_t *template, ms_tokenizer *tokenizer)
{
    const json_t *items = json_object_get(template, "single");
    uint32_t texts = 0;
    ms_status status = MS_OK;
    for (size_t i = 0; !status && i < json_array_size(items); i++) {
        const json_t *item = json_array_get(items, i),
                     *token = json_object_get(item, "SpecialToken");
        if (token)
            status = add_template_token(context, template, token,
                                        texts ? &tokenizer->suffix : &tokenizer->prefix);
        else texts += json_object_get(item, "Sequence") != NULL;
    }
    if (!status && texts != 1)
        status =
            ms_fail(context, MS_ERROR_UNSUPPORTED,
                    "its template for one text has it %u times, which is not supported", texts);
    return status;
}

/* ["<s>", 0]: as BertProcessing and RobertaProcessing name a token. */
static ms_status add_pair(ms_context *context, const json_t *pair, ms_ids *to)
{
    const json_t *id = json_array_get(pair, 1);
    if (!json_is_integer(id) || json_integer_value(id) < 0
        || json_integer_value(id) > MS_TOKEN_ID_MAX)
        return ms_fail(context, MS_ERROR_CORRUPT, "its post-processor has no \"cls\" or \"sep\"");
    return ms_ids_add(context, to, (uint32_t)json_integer_value(id));
}

static ms_status add_post_processor(ms_context *context, const json_t *component, void *to)
{
    ms_tokenizer *tokenizer = to;
    const char *type = ms_json_type(component);
    if (strcmp(type, "ByteLevel") == 0) return MS_OK; /* changes offsets only */
    if (strcmp(type, "TemplateProcessing") == 0) return add_template(context, component, tokenizer);
    if (strcmp(type, "BertProcessing") != 0 && strcmp(type, "RobertaProcessing") != 0)
        return ms_json_refuse(context, "post-processor", type, POST_PROCESSORS);
    ms_status status = add_pair(context, json_object_get(component, "cls"), &tokenizer->prefix);
    return status ? status
                  : add_pair(context, json_object_get(component, "sep"), &tokenizer->suffix);
}

ms_status ms_json_post_processor(ms_context *context, const json_t *value, ms_tokenizer *tokenizer)
{
    ms_status status = ms_json_each(context, value, "processors", add_post_processor, tokenizer);
    const ms_ids *ends[] = { &tokenizer->prefix, &tokenizer->suffix };
    for (size_t end = 0; !status && end < 2; end++)
        for (size_t i = 0; i < ends[end]->count; i++)
            if (!ms_vocabulary_has(&tokenizer->model.vocabulary, ends[end]->items[i])
                && !ms_vocabulary_has(&tokenizer->added, ends[end]->items[i]))
                return ms_fail(context, MS_ERROR_CORRUPT,
                               "its post-processor has the id %u, which is no token",
                               ends[end]->items[i]);
    /* The tokens that begin and end a text, unless another file names them. */
    if (!status && tokenizer->prefix.count) tokenizer->bos = tokenizer->prefix.items[0];
    if (!status && tokenizer->suffix.count) tokenizer->eos = tokenizer->suffix.items[0];
    return status;
}

/* ------------------------------------------------------------------- decoders */

/* The decoder that is being read. */
typedef struct reading {
    ms_tokenizer *tokenizer;
    ms_decode_rules rules;
    const char *fused; /* later components see the whole text, which this one makes; NULL: none */
} reading;

static ms_status next_rule(ms_context *context, reading *all, ms_decode_kind kind,
                           ms_decode_rule **out)
{
    if (all->rules.count == MS_DECODE_RULES_MAX)
        return ms_fail(context, MS_ERROR_UNSUPPORTED, "its decoder has more than %d components",
                       MS_DECODE_RULES_MAX);
    *out = &all->rules.items[all->rules.count++];
    **out = (ms_decode_rule){ .kind = kind };
    return MS_OK;
}

/* Strips tokens, or the begin of the text, which is known before its end is. */
static ms_status add_strip(ms_context *context, const json_t *component, reading *all)
{
    ms_span content = ms_json_text(json_object_get(component, "content"));
    json_int_t begin = json_integer_value(json_object_get(component, "start")),
               end = json_integer_value(json_object_get(component, "stop"));
    ms_decode_rule *rule = NULL;
    if (content.at == NULL || content.at == content.end || begin < 0 || end < 0
        || begin > UINT16_MAX || end > UINT16_MAX)
        return ms_fail(context, MS_ERROR_CORRUPT, "its decoder's \"Strip\" has no content");
    if (all->fused && (end > 0 || all->tokenizer->decoding.strip_count))
        return ms_fail(context, MS_ERROR_UNSUPPORTED,
                       "its decoder has a \"Strip\" at the end of the text, or two of them, which "
                       "is not supported");
    if (all->fused) {
        all->tokenizer->decoding.strip_count = (uint32_t)begin;
        return ms_buffer_add(context, &all->tokenizer->decoding.strip, content.at,
                             ms_span_bytes(content));
    }
    ms_status status = next_rule(context, all, MS_DECODE_STRIP, &rule);
    if (status) return status;
    rule->begin = (size_t)begin;
    rule->end = (size_t)end;
    return ms_buffer_add(context, &rule->content, content.at, ms_span_bytes(content));
}

/* The mark becomes a space, of which the first is not part of the text. */
static ms_status add_metaspace(ms_context *context, const json_t *component, reading *all)
{
    const json_t *mark = json_object_get(component, "replacement");
    const char *scheme = json_string_value(json_object_get(component, "prepend_scheme"));
    ms_decode_rule *rule = NULL;
    bool never = scheme ? strcmp(scheme, "never") == 0
                        : !ms_json_boolean(component, "add_prefix_space", true);
    ms_status status = next_rule(context, all, MS_DECODE_REPLACE, &rule);
    if (!status) status = ms_buffer_add(context, &rule->content, " ", 1);
    if (!status && !json_string_length(mark))
        status = ms_fail(context, MS_ERROR_CORRUPT, "its decoder has no \"replacement\"");
    if (!status)
        status = ms_pattern_new(context, json_string_value(mark), json_string_length(mark),
                                MS_DIALECT_LITERAL, &rule->pattern);
    if (status || never || all->tokenizer->decoding.strip_count) return status;
    all->tokenizer->decoding.strip_count = 1;
    return ms_buffer_add(context, &all->tokenizer->decoding.strip, " ", 1);
}

static ms_status add_replace(ms_context *context, const json_t *component, reading *all)
{
    ms_span content = ms_json_text(json_object_get(component, "content"));
    ms_decode_rule *rule = NULL;
    ms_status status = next_rule(context, all, MS_DECODE_REPLACE, &rule);
    if (!status)
        status = ms_buffer_add(context, &rule->content, content.at, ms_span_bytes(content));
    return status ? status
                  : ms_json_pattern(context, json_object_get(component, "pattern"), "decoder",
                                    &rule->pattern);
}

static ms_status add_decoder(ms_context *context, const json_t *component, void *to)
{
    reading *all = to;
    const char *type = ms_json_type(component);
    ms_decode_rule *rule = NULL;
    if (strcmp(type, "Strip") == 0) return add_strip(context, component, all);
    if (strcmp(type, "Fuse") == 0) {
        all->fused = "Fuse";
        return MS_OK;
    }
    /* What sees the whole text could change what spans tokens. */
    if (all->fused)
        return ms_fail(context, MS_ERROR_UNSUPPORTED,
                       "its decoder has \"%.60s\" after \"%s\", which is not supported", type,
                       all->fused);
    if (strcmp(type, "Replace") == 0) return add_replace(context, component, all);
    if (strcmp(type, "Metaspace") == 0) return add_metaspace(context, component, all);
    if (strcmp(type, "ByteFallback") == 0) return next_rule(context, all, MS_DECODE_BYTES, &rule);
    if (strcmp(type, "ByteLevel") == 0) {
        /* Characters may be in several tokens: it puts all of them together. */
        all->fused = "ByteLevel";
        return next_rule(context, all, MS_DECODE_ALPHABET, &rule);
    }
    return ms_json_refuse(context, "decoder", type, DECODERS);
}

ms_status ms_json_decoder(ms_context *context, const json_t *value, ms_tokenizer *tokenizer)
{
    reading all = { .tokenizer = tokenizer };
    ms_status status = ms_json_each(context, value, "decoders", add_decoder, &all);
    if (!status) status = ms_decoding_build(context, tokenizer, &all.rules);
    ms_decode_rules_free(context, &all.rules);
    return status;
}
