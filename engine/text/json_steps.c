/* json_steps.c: normalizers and pre-tokenizers of tokenizer.json. */
#include "text/json_steps.h"

#define NORMALIZERS \
    "NFC, NFD, NFKC, NFKD, Lowercase, Strip, StripAccents, Prepend, Replace, Sequence"
#define PRE_TOKENIZERS                                                                         \
    "ByteLevel, Split, Digits, Punctuation, Whitespace, WhitespaceSplit, CharDelimiterSplit, " \
    "Metaspace, Sequence"

/* GPT-2's cuts, which ByteLevel makes. */
#define GPT2_PATTERN \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
/* ASCII's punctuation, of which Unicode counts a part as symbols, and Unicode's. */
#define PUNCTUATION "[$+<=>^`|~\\p{P}]"

static ms_status keep_text(ms_context *context, const json_t *value, ms_buffer *out)
{
    ms_span text = ms_json_text(value);
    if (!json_is_string(value))
        return ms_fail(context, MS_ERROR_CORRUPT, "a component has no text where it needs one");
    return ms_buffer_add(context, out, text.at, ms_span_bytes(text));
}

/* -------------------------------------------------------------- normalizers */

static ms_status fill_normalizer(ms_context *context, const json_t *component,
                                 ms_normalizer *normalizer)
{
    const char *type = ms_json_type(component);
    ms_status status = MS_OK;
    if (strncmp(type, "NF", 2) == 0 && strlen(type) <= 4) {
        char last = type[strlen(type) - 1];
        normalizer->kind = MS_NORMALIZE_FORM;
        normalizer->composed = last == 'C';
        normalizer->compatible = type[2] == 'K';
        if ((last == 'C' || last == 'D') && (strlen(type) == 3 || type[2] == 'K')) return MS_OK;
    } else if (strcmp(type, "Lowercase") == 0) {
        normalizer->kind = MS_NORMALIZE_LOWER;
        return MS_OK;
    } else if (strcmp(type, "StripAccents") == 0) {
        normalizer->kind = MS_NORMALIZE_ACCENTS;
        return MS_OK;
    } else if (strcmp(type, "Strip") == 0) {
        normalizer->kind = MS_NORMALIZE_STRIP;
        normalizer->left = ms_json_boolean(component, "strip_left", true);
        normalizer->right = ms_json_boolean(component, "strip_right", true);
        return MS_OK;
    } else if (strcmp(type, "Prepend") == 0) {
        normalizer->kind = MS_NORMALIZE_PREPEND;
        return keep_text(context, json_object_get(component, "prepend"), &normalizer->content);
    } else if (strcmp(type, "Replace") == 0) {
        normalizer->kind = MS_NORMALIZE_REPLACE;
        status = keep_text(context, json_object_get(component, "content"), &normalizer->content);
        return status ? status
                      : ms_json_pattern(context, json_object_get(component, "pattern"),
                                        "normalizer", &normalizer->pattern);
    }
    return ms_json_refuse(context, "normalizer", type, NORMALIZERS);
}

static ms_status add_normalizer(ms_context *context, const json_t *component, void *to)
{
    ms_normalizers *normalizers = to;
    ms_status status = ms_grow(context, (void **)&normalizers->items, &normalizers->capacity,
                               normalizers->count + 1, sizeof *normalizers->items);
    /* It is counted first, so that it is freed whatever happens. */
    return status ? status
                  : fill_normalizer(context, component, &normalizers->items[normalizers->count++]);
}

ms_status ms_json_normalizer(ms_context *context, const json_t *value, ms_tokenizer *tokenizer)
{
    return ms_json_each(context, value, "normalizers", add_normalizer, &tokenizer->normalizers);
}

/* ----------------------------------------------------------- pre-tokenizers */

/* The pre-tokenizer that is being read; later ones see text in the byte alphabet. */
typedef struct cuts {
    ms_splitters *splitters;
    bool bytes, written;
} cuts;

static ms_status next_splitter(ms_context *context, ms_splitters *splitters, ms_splitter_kind kind,
                               ms_splitter **out)
{
    if (splitters->count == MS_SPLITTERS_MAX)
        return ms_fail(context, MS_ERROR_UNSUPPORTED,
                       "its pre-tokenizer has more than %d components", MS_SPLITTERS_MAX);
    *out = &splitters->items[splitters->count++];
    **out = (ms_splitter){ .kind = kind, .behavior = MS_BEHAVIOR_ISOLATED };
    return MS_OK;
}

/* A splitter at a pattern of ours. */
static ms_status add_pattern(ms_context *context, cuts *all, const char *pattern,
                             ms_behavior behavior, bool invert)
{
    ms_splitter *splitter = NULL;
    ms_status status = next_splitter(context, all->splitters, MS_SPLIT_PATTERN, &splitter);
    if (status) return status;
    splitter->behavior = behavior;
    splitter->invert = invert;
    return ms_pattern_new(context, pattern, strlen(pattern), MS_DIALECT_RUST, &splitter->pattern);
}

static ms_status read_behavior(ms_context *context, const json_t *component, ms_behavior *out)
{
    static const char *const names[] = { "Removed", "Isolated", "MergedWithPrevious",
                                         "MergedWithNext", "Contiguous" };
    const char *name = json_string_value(json_object_get(component, "behavior"));
    for (size_t i = 0; name && i < sizeof names / sizeof *names; i++) {
        if (strcmp(name, names[i]) != 0) continue;
        *out = (ms_behavior)i;
        return MS_OK;
    }
    return name ? ms_fail(context, MS_ERROR_CORRUPT, "its pre-tokenizer has the behavior \"%.60s\"",
                          name)
                : MS_OK;
}

static ms_status add_split(ms_context *context, const json_t *component, cuts *all)
{
    ms_splitter *splitter = NULL;
    ms_status status = next_splitter(context, all->splitters, MS_SPLIT_PATTERN, &splitter);
    if (!status) status = read_behavior(context, component, &splitter->behavior);
    if (status) return status;
    splitter->invert = ms_json_boolean(component, "invert", false);
    return ms_json_pattern(context, json_object_get(component, "pattern"), "pre-tokenizer",
                           &splitter->pattern);
}

static ms_status add_byte_level(ms_context *context, const json_t *component, cuts *all)
{
    ms_splitter *splitter = NULL;
    ms_status status = MS_OK;
    if (ms_json_boolean(component, "add_prefix_space", true))
        status = next_splitter(context, all->splitters, MS_SPLIT_SPACE, &splitter);
    if (!status && ms_json_boolean(component, "use_regex", true))
        status = add_pattern(context, all, GPT2_PATTERN, MS_BEHAVIOR_ISOLATED, false);
    all->bytes = true;
    return status;
}

static ms_status add_metaspace(ms_context *context, const json_t *component, cuts *all)
{
    const json_t *mark = json_object_get(component, "replacement"),
                 *scheme = json_object_get(component, "prepend_scheme");
    const char *name = json_string_value(scheme);
    ms_splitter *splitter = NULL;
    ms_status status = next_splitter(context, all->splitters, MS_SPLIT_META, &splitter);
    if (!status) status = keep_text(context, mark, &splitter->content);
    if (status) return status;
    splitter->prepend = MS_PREPEND_ALWAYS;
    /* Older files have a boolean instead. */
    if (name ? strcmp(name, "never") == 0 : !ms_json_boolean(component, "add_prefix_space", true))
        splitter->prepend = MS_PREPEND_NEVER;
    if (name && strcmp(name, "first") == 0) splitter->prepend = MS_PREPEND_FIRST;
    if (!ms_json_boolean(component, "split", true)) return MS_OK;
    status = next_splitter(context, all->splitters, MS_SPLIT_PATTERN, &splitter);
    if (status) return status;
    splitter->behavior = MS_BEHAVIOR_MERGED_WITH_NEXT;
    return ms_pattern_new(context, json_string_value(mark), json_string_length(mark),
                          MS_DIALECT_LITERAL, &splitter->pattern);
}

static ms_status add_delimiter(ms_context *context, const json_t *component, cuts *all)
{
    ms_span delimiter = ms_json_text(json_object_get(component, "delimiter"));
    ms_splitter *splitter = NULL;
    ms_status status = next_splitter(context, all->splitters, MS_SPLIT_PATTERN, &splitter);
    if (status) return status;
    splitter->behavior = MS_BEHAVIOR_REMOVED;
    return ms_pattern_new(context, (const char *)delimiter.at, ms_span_bytes(delimiter),
                          MS_DIALECT_LITERAL, &splitter->pattern);
}

/* Components that are a pattern of ours. */
static ms_status add_known(ms_context *context, const json_t *component, cuts *all)
{
    const char *type = ms_json_type(component);
    ms_behavior behavior = MS_BEHAVIOR_ISOLATED;
    if (strcmp(type, "Digits") == 0) {
        bool single = ms_json_boolean(component, "individual_digits", false);
        return add_pattern(context, all, "\\p{N}",
                           single ? MS_BEHAVIOR_ISOLATED : MS_BEHAVIOR_CONTIGUOUS, false);
    }
    if (strcmp(type, "Punctuation") == 0) {
        ms_status status = read_behavior(context, component, &behavior);
        return status ? status : add_pattern(context, all, PUNCTUATION, behavior, false);
    }
    if (strcmp(type, "Whitespace") == 0)
        return add_pattern(context, all, "\\w+|[^\\w\\s]+", MS_BEHAVIOR_REMOVED, true);
    if (strcmp(type, "WhitespaceSplit") == 0)
        return add_pattern(context, all, "\\s", MS_BEHAVIOR_REMOVED, false);
    return ms_json_refuse(context, "pre-tokenizer", type, PRE_TOKENIZERS);
}

static ms_status add_pre_tokenizer(ms_context *context, const json_t *component, void *to)
{
    cuts *all = to;
    const char *type = ms_json_type(component);
    ms_splitter *splitter = NULL;
    /* What comes after ByteLevel sees the byte alphabet. */
    if (all->bytes && !all->written) {
        ms_status status = next_splitter(context, all->splitters, MS_SPLIT_BYTES, &splitter);
        if (status) return status;
        all->written = true;
    }
    if (all->written && (strcmp(type, "ByteLevel") == 0 || strcmp(type, "Metaspace") == 0))
        return ms_fail(context, MS_ERROR_UNSUPPORTED,
                       "its pre-tokenizer has \"%s\" after \"ByteLevel\", which is not supported",
                       type);
    if (strcmp(type, "Split") == 0) return add_split(context, component, all);
    if (strcmp(type, "ByteLevel") == 0) return add_byte_level(context, component, all);
    if (strcmp(type, "Metaspace") == 0) return add_metaspace(context, component, all);
    if (strcmp(type, "CharDelimiterSplit") == 0) return add_delimiter(context, component, all);
    return add_known(context, component, all);
}

ms_status ms_json_pre_tokenizer(ms_context *context, const json_t *value, ms_tokenizer *tokenizer)
{
    cuts all = { .splitters = &tokenizer->splitters };
    ms_status status = ms_json_each(context, value, "pretokenizers", add_pre_tokenizer, &all);
    tokenizer->model.alphabet = all.written;
    return status;
}

static ms_status note_byte_level(ms_context *context, const json_t *component, void *to)
{
    bool *found = to;
    (void)context;
    if (strcmp(ms_json_type(component), "ByteLevel") == 0) *found = true;
    return MS_OK;
}

/* What is wrong with the pre-tokenizer shows when it is read. */
bool ms_json_is_byte_level(const json_t *pre_tokenizer)
{
    ms_context context;
    bool found = false;
    ms_context_init(&context, NULL);
    (void)ms_json_each(&context, pre_tokenizer, "pretokenizers", note_byte_level, &found);
    return found;
}
