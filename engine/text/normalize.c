/* normalize.c: what is changed in a text before it is cut into pieces. Normal forms come from
 * utf8proc. */
#include "text/normalize.h"

#include <utf8proc.h>

#include "text/character.h"

static ms_status add_span(ms_context *context, ms_buffer *out, ms_span text)
{
    return ms_buffer_add(context, out, text.at, ms_span_bytes(text));
}

/* -------------------------------------------------------------- normal forms */

/* The part of the text that can change: ASCII stays as it is, but the last character of it before
 * other characters may be composed with them. */
static ms_span next_run(ms_span text)
{
    const uint8_t *at = text.at;
    while (at < text.end && *at < 0x80) at++;
    ms_span run = { .at = at > text.at && at < text.end ? at - 1 : at, .end = at };
    while (run.end < text.end && *run.end >= 0x80) run.end++;
    return run;
}

/* Appends the normal form of valid UTF-8. */
static ms_status add_form(ms_context *context, const ms_normalizer *normalizer,
                          ms_normalizing *work, ms_span run, ms_buffer *out)
{
    utf8proc_option_t options = UTF8PROC_STABLE;
    options |= normalizer->composed ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE;
    if (normalizer->compatible) options |= UTF8PROC_COMPAT;
    utf8proc_ssize_t bytes = (utf8proc_ssize_t)ms_span_bytes(run), need = bytes, count = 0;
    do { /* Once more if there are more characters than bytes. */
        ms_status status = ms_grow(context, (void **)&work->codes, &work->code_capacity,
                                   (size_t)need + 1, sizeof *work->codes);
        if (status) return status;
        count = utf8proc_decompose(run.at, bytes, work->codes, need, options);
        if (count < 0)
            return ms_fail(context, MS_ERROR_UNSUPPORTED, "a normal form: %s",
                           utf8proc_errmsg(count));
    } while (count > need && (need = count));
    count = utf8proc_reencode(work->codes, count, options);
    return ms_buffer_add(context, out, work->codes, count > 0 ? (size_t)count : 0);
}

/* The same around each U+11A7, which begins and joins nothing: utf8proc before 2.9 drops it after a
 * Hangul syllable, as if it were a final consonant. */
static ms_status add_forms(ms_context *context, const ms_normalizer *normalizer,
                           ms_normalizing *work, ms_span run, ms_buffer *out)
{
    static const char filler[] = "\xe1\x86\xa7";
    size_t bytes = sizeof filler - 1;
    ms_status status = MS_OK;
    while (!status && run.at < run.end) {
        const uint8_t *found = memmem(run.at, ms_span_bytes(run), filler, bytes);
        ms_span before = { .at = run.at, .end = found ? found : run.end };
        if (before.at < before.end) status = add_form(context, normalizer, work, before, out);
        if (!status && found) status = ms_buffer_add(context, out, filler, bytes);
        run.at = found ? found + bytes : run.end;
    }
    return status;
}

static ms_status form(ms_context *context, const ms_normalizer *normalizer, ms_normalizing *work,
                      ms_span text, ms_buffer *out)
{
    while (text.at < text.end) {
        ms_span run = next_run(text);
        ms_status status = ms_buffer_add(context, out, text.at, (size_t)(run.at - text.at));
        /* A run may have bytes that are no UTF-8; they are copied. */
        while (!status && run.at < run.end) {
            ms_span valid = { .at = run.at, .end = ms_utf8_valid_end(run.at, run.end) };
            ms_span rest = { .at = valid.end, .end = ms_utf8_invalid_end(valid.end, run.end) };
            status = add_forms(context, normalizer, work, valid, out);
            if (!status) status = add_span(context, out, rest);
            run.at = rest.end;
        }
        if (status) return status;
        text.at = run.end;
    }
    return MS_OK;
}

/* ---------------------------------------------------------------- characters */

static ms_status add_lower(ms_context *context, uint32_t code, ms_buffer *out)
{
    uint32_t lower[2], count = ms_lower(code, lower);
    uint8_t bytes[8];
    uint32_t length = ms_utf8_write(lower[0], bytes);
    if (count == 2) length += ms_utf8_write(lower[1], bytes + length);
    return ms_buffer_add(context, out, bytes, length);
}

/* Small letters, or no marks; bytes that are no UTF-8 stay. */
static ms_status characters(ms_context *context, const ms_normalizer *normalizer, ms_span text,
                            ms_buffer *out)
{
    ms_status status = MS_OK;
    while (!status && text.at < text.end) {
        uint32_t code = 0, length = ms_utf8_character(text.at, text.end, &code);
        if (length && normalizer->kind == MS_NORMALIZE_LOWER)
            status = add_lower(context, code, out);
        else if (length == 0 || !ms_is_mark(code))
            status = ms_buffer_add(context, out, text.at, length ? length : 1);
        text.at += length ? length : 1;
    }
    return status;
}

static ms_span strip(const ms_normalizer *normalizer, ms_span text)
{
    uint32_t code, length;
    while (normalizer->left && (length = ms_utf8_character(text.at, text.end, &code))
           && ms_is_space(code))
        text.at += length;
    while (normalizer->right && (length = ms_character_before(text.at, text.end, &code))
           && ms_is_space(code))
        text.end -= length;
    return text;
}

/* -------------------------------------------------------------- replacements */

/* Patterns see valid UTF-8 only. */
static ms_status replace_valid(ms_context *context, const ms_pattern *pattern, ms_matcher *matcher,
                               ms_span text, ms_span content, ms_buffer *out)
{
    const uint8_t *at = text.at;
    while (at < text.end) {
        ms_span found;
        ms_status status = ms_pattern_find(context, pattern, matcher, text, at, &found);
        if (status) return status;
        const uint8_t *before = found.at ? found.at : text.end;
        status = ms_buffer_add(context, out, at, (size_t)(before - at));
        if (!status && found.at) status = add_span(context, out, content);
        if (status) return status;
        at = found.at ? found.end : text.end;
    }
    return MS_OK;
}

ms_status ms_replace_matches(ms_context *context, const ms_pattern *pattern, ms_matcher *matcher,
                             ms_span text, ms_span content, ms_buffer *out)
{
    ms_status status = MS_OK;
    while (!status && text.at < text.end) {
        ms_span valid = { .at = text.at, .end = ms_utf8_valid_end(text.at, text.end) };
        ms_span rest = { .at = valid.end, .end = ms_utf8_invalid_end(valid.end, text.end) };
        status = replace_valid(context, pattern, matcher, valid, content, out);
        if (!status) status = add_span(context, out, rest);
        text.at = rest.end;
    }
    return status;
}

/* -------------------------------------------------------------------- public */

/* One normalizer; *out is the text itself if it cannot change it. */
static ms_status apply(ms_context *context, const ms_normalizer *normalizer, ms_normalizing *work,
                       ms_span text, ms_buffer *into, ms_span *out)
{
    ms_span content = ms_buffer_span(&normalizer->content, false);
    ms_status status = MS_OK;
    *out = text;
    switch (normalizer->kind) {
    case MS_NORMALIZE_STRIP: *out = strip(normalizer, text); return MS_OK;
    case MS_NORMALIZE_FORM:
        if (next_run(text).at == text.end) return MS_OK;
        status = form(context, normalizer, work, text, into);
        break;
    case MS_NORMALIZE_LOWER:
    case MS_NORMALIZE_ACCENTS: status = characters(context, normalizer, text, into); break;
    case MS_NORMALIZE_PREPEND:
        if (text.at == text.end) return MS_OK;
        status = add_span(context, into, content);
        if (!status) status = add_span(context, into, text);
        break;
    case MS_NORMALIZE_REPLACE:
        status =
            ms_replace_matches(context, normalizer->pattern, work->matcher, text, content, into);
        break;
    case MS_NORMALIZE_SENTENCE:
        status = ms_sentence_write(context, &normalizer->sentence, text, into);
        break;
    }
    *out = ms_buffer_span(into, text.first);
    return status;
}

ms_status ms_normalize(ms_context *context, const ms_normalizers *normalizers, ms_normalizing *work,
                       ms_span text, ms_span *out)
{
    uint32_t next = 0;
    work->texts[0].limit = work->texts[1].limit = ms_rewritten_max(ms_span_bytes(text));
    for (size_t i = 0; i < normalizers->count; i++) {
        ms_span changed;
        /* `text` may be in the other buffer. */
        ms_buffer *into = &work->texts[next];
        into->length = 0;
        ms_status status = apply(context, &normalizers->items[i], work, text, into, &changed);
        if (status) return status;
        if (into->length) next = !next;
        text = changed;
    }
    *out = text;
    return MS_OK;
}

void ms_normalizers_free(ms_context *context, ms_normalizers *normalizers)
{
    for (size_t i = 0; i < normalizers->count; i++) {
        ms_pattern_free(normalizers->items[i].pattern);
        ms_buffer_free(context, &normalizers->items[i].content);
        ms_sentence_free(context, &normalizers->items[i].sentence);
    }
    ms_release(context, normalizers->items);
    *normalizers = (ms_normalizers){ 0 };
}

void ms_normalizing_free(ms_context *context, ms_normalizing *work)
{
    ms_buffer_free(context, &work->texts[0]);
    ms_buffer_free(context, &work->texts[1]);
    ms_release(context, work->codes);
}
