/* split.c: where a text is cut into pieces. No list of pieces is made: a splitter hands each piece
 * to the next splitter as soon as it is known. */
#include "text/split.h"

#include "text/alphabet.h"

/* One call of ms_split. */
typedef struct splitting {
    ms_context *context;
    const ms_splitters *splitters;
    ms_splitting *work;
    ms_piece_function piece;
    void *to;
} splitting;

/* A splitter at work on a text. `held` waits for what comes after it; held.at NULL: nothing
 * does. */
typedef struct cutting {
    const splitting *call;
    size_t step;
    ms_behavior behavior;
    ms_span text, held;
    bool held_match, after_match;
} cutting;

static ms_status apply(const splitting *call, size_t step, ms_span text);

/* Hands a piece on. */
static ms_status emit(const cutting *cut, ms_span piece)
{
    if (piece.at == piece.end) return MS_OK;
    piece.first = cut->text.first && piece.at == cut->text.at;
    return apply(cut->call, cut->step + 1, piece);
}

/* Hands on what is held, and holds the piece. */
static ms_status hold(cutting *cut, ms_span piece, bool match)
{
    ms_span held = cut->held;
    cut->held = piece;
    cut->held_match = match;
    return held.at ? emit(cut, held) : MS_OK;
}

/* The next part of the text, which is a match or is between two. */
static ms_status take(cutting *cut, ms_span part, bool match)
{
    bool extend = false;
    if (part.at == part.end) return MS_OK;
    switch (cut->behavior) {
    case MS_BEHAVIOR_REMOVED: return match ? MS_OK : emit(cut, part);
    case MS_BEHAVIOR_ISOLATED: return emit(cut, part);
    case MS_BEHAVIOR_MERGED_WITH_PREVIOUS:
        extend = match && !cut->after_match && cut->held.at;
        cut->after_match = match;
        break;
    /* Of several matches the last one is merged. */
    case MS_BEHAVIOR_MERGED_WITH_NEXT: extend = !match && cut->held.at && cut->held_match; break;
    case MS_BEHAVIOR_CONTIGUOUS: extend = cut->held.at && cut->held_match == match; break;
    }
    if (!extend) return hold(cut, part, match);
    cut->held.end = part.end;
    /* What has been merged with the next takes no more. */
    if (cut->behavior == MS_BEHAVIOR_MERGED_WITH_NEXT) cut->held_match = false;
    return MS_OK;
}

/* Cuts valid UTF-8. */
static ms_status cut_valid(cutting *cut, const ms_splitter *splitter)
{
    const splitting *call = cut->call;
    const uint8_t *at = cut->text.at, *end = cut->text.end;
    while (at < end) {
        ms_span found;
        ms_status status = ms_pattern_find(call->context, splitter->pattern, call->work->matcher,
                                           cut->text, at, &found);
        if (status) return status;
        ms_span before = { .at = at, .end = found.at ? found.at : end };
        status = take(cut, before, splitter->invert);
        if (!status && found.at) status = take(cut, found, !splitter->invert);
        if (status) return status;
        at = found.at ? found.end : end;
    }
    ms_span held = cut->held;
    return held.at ? emit(cut, held) : MS_OK;
}

static ms_status cut_text(const splitting *call, size_t step, ms_span text)
{
    const ms_splitter *splitter = &call->splitters->items[step];
    const uint8_t *begin = text.at;
    ms_status status = MS_OK;
    while (!status && text.at < text.end) {
        ms_span valid = { .at = text.at, .end = ms_utf8_valid_end(text.at, text.end) };
        ms_span rest = { .at = valid.end, .end = ms_utf8_invalid_end(valid.end, text.end) };
        valid.first = text.first && valid.at == begin;
        rest.first = text.first && rest.at == begin;
        cutting cut = { .call = call, .step = step, .behavior = splitter->behavior, .text = valid };
        if (valid.at < valid.end) status = cut_valid(&cut, splitter);
        if (!status && rest.at < rest.end) status = apply(call, step + 1, rest);
        text.at = rest.end;
    }
    return status;
}

static bool begins_with(ms_span text, ms_span content)
{
    size_t bytes = ms_span_bytes(content);
    return ms_span_bytes(text) >= bytes && memcmp(text.at, content.at, bytes) == 0;
}

/* Appends the text with `content` instead of spaces, and once more in front if that is wanted. */
static ms_status write_meta(ms_context *context, const ms_splitter *splitter, ms_span text,
                            ms_buffer *out)
{
    ms_span content = ms_buffer_span(&splitter->content, false);
    size_t bytes = ms_span_bytes(content);
    bool wanted = splitter->prepend == MS_PREPEND_ALWAYS
                  || (splitter->prepend == MS_PREPEND_FIRST && text.first);
    bool there = text.at < text.end && (*text.at == ' ' || begins_with(text, content));
    ms_status status = MS_OK;
    if (wanted && !there) status = ms_buffer_add(context, out, content.at, bytes);
    for (; !status && text.at < text.end; text.at++)
        status = *text.at == ' ' ? ms_buffer_add(context, out, content.at, bytes)
                                 : ms_buffer_add(context, out, text.at, 1);
    return status;
}

/* Hands the text on to splitter `step`; those that cut nothing write it again. */
static ms_status apply(const splitting *call, size_t step, ms_span text)
{
    if (text.at == text.end) return MS_OK;
    if (step == call->splitters->count) return call->piece(call->to, text);
    const ms_splitter *splitter = &call->splitters->items[step];
    ms_buffer *out = &call->work->texts[step];
    ms_status status = MS_OK;
    out->length = 0;
    switch (splitter->kind) {
    case MS_SPLIT_PATTERN: return cut_text(call, step, text);
    case MS_SPLIT_SPACE:
        if (*text.at == ' ') return apply(call, step + 1, text);
        status = ms_buffer_add(call->context, out, " ", 1);
        if (!status) status = ms_buffer_add(call->context, out, text.at, ms_span_bytes(text));
        break;
    case MS_SPLIT_META: status = write_meta(call->context, splitter, text, out); break;
    case MS_SPLIT_BYTES: status = ms_alphabet_write(call->context, text, out); break;
    }
    return status ? status : apply(call, step + 1, ms_buffer_span(out, text.first));
}

ms_status ms_split(ms_context *context, const ms_splitters *splitters, ms_splitting *work,
                   ms_span text, ms_piece_function piece, void *to)
{
    splitting call = {
        .context = context, .splitters = splitters, .work = work, .piece = piece, .to = to
    };
    return apply(&call, 0, text);
}

void ms_splitters_free(ms_context *context, ms_splitters *splitters)
{
    for (size_t i = 0; i < splitters->count; i++) {
        ms_pattern_free(splitters->items[i].pattern);
        ms_buffer_free(context, &splitters->items[i].content);
    }
    splitters->count = 0;
}

void ms_splitting_free(ms_context *context, ms_splitting *work)
{
    for (size_t i = 0; i < MS_SPLITTERS_MAX; i++) ms_buffer_free(context, &work->texts[i]);
}
