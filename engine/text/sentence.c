/* sentence.c: how SentencePiece changes a text before it encodes it. */
#include "text/sentence.h"

/* ---------------------------------------------------------------------- map */

/* The fields of a unit of the trie. A string ends at a node with a leaf, whose unit is the value.
 */
static bool has_leaf(uint32_t unit) { return unit >> 8 & 1; }
static uint32_t value_of(uint32_t unit) { return unit & 0x7fffffff; }
static uint32_t label_of(uint32_t unit) { return unit & 0x800000ff; }
static uint32_t offset_of(uint32_t unit) { return unit >> 10 << ((unit & 0x200) >> 6); }

ms_status ms_charsmap_read(ms_context *context, ms_span data, ms_charsmap *out)
{
    uint32_t trie = 0;
    size_t bytes = ms_span_bytes(data);
    if (bytes == 0) return MS_OK;
    for (size_t i = 0; i < 4 && i < bytes; i++) trie |= (uint32_t)data.at[i] << 8 * i;
    if (bytes < 8 || trie > bytes - 4 || trie % 4 != 0 || trie == 0)
        return ms_fail(context, MS_ERROR_CORRUPT, "the map of characters is damaged");
    size_t text_bytes = bytes - 4 - trie;
    ms_charsmap map = { .unit_count = trie / 4, .text_bytes = text_bytes };
    ms_status status = ms_allocate(context, trie, "a map of characters", (void **)&map.units);
    if (!status) /* zeroed: the last text ends */
        status = ms_allocate(context, text_bytes + 1, "a map of characters", (void **)&map.texts);
    if (status) {
        ms_release(context, map.units);
        return status;
    }
    for (size_t i = 0; i < trie; i++) map.units[i / 4] |= (uint32_t)data.at[4 + i] << 8 * (i % 4);
    memcpy(map.texts, data.at + 4 + trie, text_bytes);
    *out = map;
    return MS_OK;
}

/* The longest string of the map that begins at `at`: its bytes and what it becomes; 0: none does.
 */
static size_t map_longest(const ms_charsmap *map, const uint8_t *at, const uint8_t *end,
                          const char **becomes)
{
    size_t longest = 0;
    if (map->unit_count == 0) return 0;
    uint32_t node = offset_of(map->units[0]);
    for (const uint8_t *c = at; c < end; c++) {
        node ^= *c;
        if (node >= map->unit_count || label_of(map->units[node]) != *c) break;
        uint32_t unit = map->units[node];
        node ^= offset_of(unit);
        if (!has_leaf(unit)) continue;
        if (node >= map->unit_count || value_of(map->units[node]) > map->text_bytes) break;
        longest = (size_t)(c + 1 - at);
        *becomes = map->texts + value_of(map->units[node]);
    }
    return longest;
}

/* ------------------------------------------------------------------ sentence */

/* The next part of a text, and what it becomes. */
static ms_span next_part(const ms_sentence *sentence, ms_span text, size_t *bytes)
{
    const char *becomes = NULL;
    const ms_added_token *fixed = ms_added_longest(&sentence->fixed, text.at, text.end);
    *bytes = fixed ? fixed->length : map_longest(&sentence->map, text.at, text.end, &becomes);
    if (becomes) {
        const uint8_t *to = (const uint8_t *)becomes;
        return (ms_span){ .at = to, .end = to + strlen(becomes) };
    }
    if (*bytes == 0) *bytes = ms_utf8_character(text.at, text.end, NULL);
    if (*bytes == 0) *bytes = 1; /* no UTF-8 */
    return (ms_span){ .at = text.at, .end = text.at + *bytes };
}

static ms_status add_space(ms_context *context, const ms_sentence *sentence, ms_buffer *out)
{
    return sentence->escape ? ms_buffer_add(context, out, "\xe2\x96\x81", 3)
                            : ms_buffer_add(context, out, " ", 1);
}

static ms_status add_part(ms_context *context, const ms_sentence *sentence, ms_span part,
                          ms_buffer *out)
{
    ms_status status = MS_OK;
    for (; !status && part.at < part.end; part.at++)
        status = *part.at == ' ' ? add_space(context, sentence, out)
                                 : ms_buffer_add(context, out, part.at, 1);
    return status;
}

/* Passes over the parts at the text's begin that become a space. */
static ms_span skip_spaces(const ms_sentence *sentence, ms_span text)
{
    while (text.at < text.end) {
        size_t bytes;
        ms_span part = next_part(sentence, text, &bytes);
        if (ms_span_bytes(part) != 1 || *part.at != ' ') break;
        text.at += bytes;
    }
    return text;
}

/* Removes spaces from the end of what was written from `begin` on. */
static void trim(const ms_sentence *sentence, ms_buffer *out, size_t begin)
{
    const char *space = sentence->escape ? "\xe2\x96\x81" : " ";
    size_t bytes = strlen(space);
    while (out->length - begin >= bytes
           && memcmp(out->data + out->length - bytes, space, bytes) == 0)
        out->length -= bytes;
}

static bool gets_prefix(const ms_sentence *sentence, ms_span text)
{
    size_t bytes;
    if (!sentence->prefix || sentence->suffix) return false;
    if (!sentence->once) return true;
    ms_span part = next_part(sentence, text, &bytes);
    bool space = part.at < part.end && *part.at == ' ',
         mark = ms_span_bytes(part) >= 3 && memcmp(part.at, "\xe2\x96\x81", 3) == 0;
    return text.first && !space && !mark;
}

ms_status ms_sentence_write(ms_context *context, const ms_sentence *sentence, ms_span text,
                            ms_buffer *out)
{
    size_t begin = out->length;
    bool after_space = sentence->collapse;
    if (sentence->collapse) text = skip_spaces(sentence, text);
    if (text.at == text.end) return MS_OK;
    ms_status status = MS_OK;
    if (gets_prefix(sentence, text)) status = add_space(context, sentence, out);
    while (!status && text.at < text.end) {
        size_t bytes;
        ms_span part = next_part(sentence, text, &bytes);
        while (after_space && part.at < part.end && *part.at == ' ') part.at++;
        status = add_part(context, sentence, part, out);
        if (part.at < part.end) after_space = part.end[-1] == ' ' && sentence->collapse;
        text.at += bytes;
    }
    if (!status && sentence->collapse) trim(sentence, out, begin);
    if (!status && sentence->prefix && sentence->suffix) status = add_space(context, sentence, out);
    return status;
}

void ms_sentence_free(ms_context *context, ms_sentence *sentence)
{
    ms_release(context, sentence->map.units);
    ms_release(context, sentence->map.texts);
    ms_added_free(context, &sentence->fixed);
}
