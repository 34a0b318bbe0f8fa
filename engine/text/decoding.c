/* decoding.c: the text of each token, worked out once when a tokenizer is loaded. */
#include "text/decoding.h"

#include "text/alphabet.h"

static int hexadecimal(uint8_t digit)
{
    if (digit >= '0' && digit <= '9') return digit - '0';
    return digit >= 'A' && digit <= 'F' ? digit - 'A' + 10 : -1;
}

int ms_byte_of_name(ms_span name)
{
    const uint8_t *at = name.at;
    if (ms_span_bytes(name) != 6 || memcmp(at, "<0x", 3) != 0 || at[5] != '>') return -1;
    int high = hexadecimal(at[3]), low = hexadecimal(at[4]);
    return high < 0 || low < 0 ? -1 : 16 * high + low;
}

static ms_span strip(const ms_decode_rule *rule, ms_span text)
{
    size_t bytes = rule->content.length;
    const uint8_t *content = rule->content.data;
    for (size_t i = 0; i < rule->begin && ms_span_bytes(text) >= bytes; i++) {
        if (memcmp(text.at, content, bytes) != 0) break;
        text.at += bytes;
    }
    for (size_t i = 0; i < rule->end && ms_span_bytes(text) >= bytes; i++) {
        if (memcmp(text.end - bytes, content, bytes) != 0) break;
        text.end -= bytes;
    }
    return text;
}

/* One rule; the result is the text itself or in `out`, which is empty. */
static ms_status apply(ms_context *context, const ms_decode_rule *rule, ms_matcher *matcher,
                       ms_span *text, ms_buffer *out)
{
    int byte = ms_byte_of_name(*text);
    uint8_t one = (uint8_t)byte;
    bool known = true;
    ms_status status = MS_OK;
    switch (rule->kind) {
    case MS_DECODE_STRIP: *text = strip(rule, *text); return MS_OK;
    case MS_DECODE_BYTES:
        if (byte < 0) return MS_OK;
        status = ms_buffer_add(context, out, &one, 1);
        break;
    case MS_DECODE_ALPHABET:
        status = ms_alphabet_read(context, *text, out, &known);
        if (!known) return status;
        break;
    case MS_DECODE_REPLACE:
        status = ms_replace_matches(context, rule->pattern, matcher, *text,
                                    ms_buffer_span(&rule->content, false), out);
        break;
    }
    *text = ms_buffer_span(out, false);
    return status;
}

/* The texts that are made of names. left: the bytes that those which are still to come may have. */
typedef struct writing {
    ms_tokenizer *tokenizer;
    const ms_decode_rules *rules;
    ms_matcher *matcher;
    size_t left;
} writing;

/* What the rules make of a token's name. */
static ms_status add_by_rules(ms_context *context, writing *all, uint32_t id, ms_span text)
{
    const ms_decode_rules *rules = all->rules;
    ms_buffer buffers[2] = { { .limit = all->left }, { .limit = all->left } };
    ms_status status = MS_OK;
    for (size_t i = 0; !status && i < rules->count; i++) {
        ms_buffer *out = &buffers[i % 2];
        /* What the rule before last wrote is used up, unless all rules since have kept it. */
        if (text.at >= out->data && out->length && text.at <= out->data + out->length)
            out = &buffers[(i + 1) % 2];
        out->length = 0;
        status = apply(context, &rules->items[i], all->matcher, &text, out);
    }
    if (!status)
        status = ms_vocabulary_add(context, &all->tokenizer->decoding.texts, id, text, 0, false);
    if (!status) all->left -= ms_span_bytes(text) < all->left ? ms_span_bytes(text) : all->left - 1;
    ms_buffer_free(context, &buffers[0]);
    ms_buffer_free(context, &buffers[1]);
    return status;
}

/* A model by bytes has its tokens as bytes, which is what the byte alphabet's rule would make of
 * their names. */
static bool keeps_bytes(const ms_tokenizer *tokenizer, const ms_decode_rules *rules)
{
    return tokenizer->model.by_bytes
           && (rules->count == 0
               || (rules->count == 1 && rules->items[0].kind == MS_DECODE_ALPHABET));
}

static ms_status add_model_token(ms_context *context, writing *all, uint32_t id)
{
    const ms_model *model = &all->tokenizer->model;
    ms_span text = ms_vocabulary_text(&model->vocabulary, id);
    if (keeps_bytes(all->tokenizer, all->rules))
        return ms_vocabulary_add(context, &all->tokenizer->decoding.texts, id, text, 0, false);
    /* A name that the alphabet cannot write is there as it is, and is not found. */
    if (!model->by_bytes
        || ms_vocabulary_find(&model->vocabulary, text.at, ms_span_bytes(text)) != id)
        return add_by_rules(context, all, id, text);
    ms_buffer name = { 0 };
    ms_status status = ms_alphabet_write(context, text, &name);
    if (!status) status = add_by_rules(context, all, id, ms_buffer_span(&name, false));
    ms_buffer_free(context, &name);
    return status;
}

/* An added token that is found in the normalized text represents what it replaces there. */
static ms_status add_normalized(ms_context *context, writing *all)
{
    const ms_added *set = &all->tokenizer->normalized;
    const ms_normalizers *normalizers = &all->tokenizer->normalizers;
    ms_status status = MS_OK;
    if (all->tokenizer->model.by_bytes || normalizers->count == 0
        || normalizers->items[0].kind == MS_NORMALIZE_SENTENCE)
        return MS_OK;
    for (size_t i = 0; !status && i < set->count; i++) {
        const uint8_t *at = set->text.data + set->tokens[i].offset;
        status = add_by_rules(context, all, set->tokens[i].id,
                              (ms_span){ .at = at, .end = at + set->tokens[i].length });
    }
    return status;
}

ms_status ms_decoding_build(ms_context *context, ms_tokenizer *tokenizer,
                            const ms_decode_rules *rules)
{
    const ms_vocabulary *own = &tokenizer->model.vocabulary, *added = &tokenizer->added;
    writing all = { .tokenizer = tokenizer, .rules = rules };
    size_t bytes = tokenizer->normalized.text.length;
    for (uint32_t id = 0; id < tokenizer->model.size; id++)
        if (ms_vocabulary_has(own, id)) bytes += ms_span_bytes(ms_vocabulary_text(own, id));
    all.left = ms_rewritten_max(bytes);
    ms_status status = ms_matcher_new(context, &all.matcher);
    for (uint32_t id = 0; !status && id < ms_tokenizer_size(tokenizer); id++) {
        if (ms_vocabulary_has(added, id))
            status = ms_vocabulary_add(context, &tokenizer->decoding.texts, id,
                                       ms_vocabulary_text(added, id), 0, false);
        else if (id < tokenizer->model.size && ms_vocabulary_has(own, id))
            status = add_model_token(context, &all, id);
    }
    if (!status) status = add_normalized(context, &all);
    ms_matcher_free(all.matcher);
    return status;
}

void ms_decode_rules_free(ms_context *context, ms_decode_rules *rules)
{
    for (size_t i = 0; i < rules->count; i++) {
        ms_pattern_free(rules->items[i].pattern);
        ms_buffer_free(context, &rules->items[i].content);
    }
    rules->count = 0;
}
