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

/* The text of one token of the model. *left: the bytes that the texts of it and of all tokens after
 * it may have. */
static ms_status add_model_token(ms_context *context, ms_tokenizer *tokenizer,
                                 const ms_decode_rules *rules, ms_matcher *matcher, uint32_t id,
                                 size_t *left)
{
    ms_buffer buffers[2] = { { .limit = *left }, { .limit = *left } };
    ms_span text = ms_vocabulary_text(&tokenizer->model.vocabulary, id);
    ms_status status = MS_OK;
    for (size_t i = 0; !status && !tokenizer->model.by_bytes && i < rules->count; i++) {
        ms_buffer *out = &buffers[i % 2];
        /* What the rule before last wrote is used up, unless all rules since have kept it. */
        if (text.at >= out->data && out->length && text.at <= out->data + out->length)
            out = &buffers[(i + 1) % 2];
        out->length = 0;
        status = apply(context, &rules->items[i], matcher, &text, out);
    }
    if (!status)
        status = ms_vocabulary_add(context, &tokenizer->decoding.texts, id, text, 0, false);
    if (!status) *left -= ms_span_bytes(text) < *left ? ms_span_bytes(text) : *left - 1;
    ms_buffer_free(context, &buffers[0]);
    ms_buffer_free(context, &buffers[1]);
    return status;
}

ms_status ms_decoding_build(ms_context *context, ms_tokenizer *tokenizer,
                            const ms_decode_rules *rules)
{
    const ms_vocabulary *own = &tokenizer->model.vocabulary, *added = &tokenizer->added;
    ms_matcher *matcher = NULL;
    size_t bytes = 0;
    for (uint32_t id = 0; id < tokenizer->model.size; id++)
        if (ms_vocabulary_has(own, id)) bytes += ms_span_bytes(ms_vocabulary_text(own, id));
    size_t left = ms_rewritten_max(bytes);
    ms_status status = ms_matcher_new(context, &matcher);
    for (uint32_t id = 0; !status && id < ms_tokenizer_size(tokenizer); id++) {
        if (ms_vocabulary_has(added, id))
            status = ms_vocabulary_add(context, &tokenizer->decoding.texts, id,
                                       ms_vocabulary_text(added, id), 0, false);
        else if (id < tokenizer->model.size && ms_vocabulary_has(own, id))
            status = add_model_token(context, tokenizer, rules, matcher, id, &left);
    }
    ms_matcher_free(matcher);
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
