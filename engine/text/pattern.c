/* pattern.c: regular expressions with Unicode classes, by PCRE2. */
#include "text/pattern.h"

#include <stdio.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

enum {
    PATTERN_BYTES_MAX = 1 << 16,
    JIT_STACK_FIRST = 1 << 15, /* bytes */
    JIT_STACK_MOST = 1 << 24
};

struct ms_pattern {
    ms_context context;
    pcre2_general_context *general;
    pcre2_code *code;
};

struct ms_matcher {
    ms_context context;
    pcre2_general_context *general;
    pcre2_match_context *limits;
    pcre2_match_data *data;
    pcre2_jit_stack *stack;
};

/* ------------------------------------------------------------------- memory */

/* PCRE2's memory comes from the context's table, too. */
static void *pcre2_take(size_t bytes, void *user)
{
    const ms_os *os = ((const ms_context *)user)->os;
    return os->allocate(os->user, bytes ? bytes : 1, 16);
}

static void pcre2_give(void *pointer, void *user) { ms_release(user, pointer); }

static ms_status no_memory(ms_context *context)
{
    return ms_fail(context, MS_ERROR_MEMORY, "no memory for a regular expression");
}

/* -------------------------------------------------------------- translation */

/* A pattern that is being rewritten for PCRE2. */
typedef struct translation {
    ms_context *context;
    const char *text, *at, *end;
    ms_dialect dialect;
    bool in_class;
    ms_buffer *out;
} translation;

static ms_status put(translation *t, const char *text)
{
    return ms_buffer_add(t->context, t->out, text, strlen(text));
}

/* Copies so many bytes of the pattern. */
static ms_status copy(translation *t, size_t bytes)
{
    size_t left = (size_t)(t->end - t->at);
    if (bytes > left) bytes = left;
    ms_status status = ms_buffer_add(t->context, t->out, t->at, bytes);
    t->at += bytes;
    return status;
}

static ms_status refuse(const translation *t, const char *what)
{
    return ms_fail(t->context, MS_ERROR_UNSUPPORTED,
                   "the regular expression '%.200s' has %s, which is not supported", t->text, what);
}

/* Unicode's White_Space: PCRE2's own \s has U+180E, too. */
#define SPACES                                                                          \
    "\\x09-\\x0d\\x20\\x85\\xa0\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}" \
    "\\x{205f}\\x{3000}"
/* Unicode's words (Unicode Technical Standard 18, annex C): PCRE2's own \w lacks marks. */
#define WORDS "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}"

/* \s, \S, \w, \W: as classes that are written out. Inside of a class the negated ones stay what
 * they are for PCRE2. */
static ms_status put_class(translation *t, char kind)
{
    bool spaces = kind == 's' || kind == 'S', negated = kind == 'S' || kind == 'W';
    const char *members = spaces                               ? SPACES
                          : t->dialect == MS_DIALECT_ONIGURUMA ? WORDS
                                                               : WORDS "\\p{Join_Control}";
    if (negated && t->in_class) return copy(t, 2);
    ms_status status = t->in_class ? MS_OK : put(t, negated ? "[^" : "[");
    if (!status) status = put(t, members);
    if (!status && !t->in_class) status = put(t, "]");
    t->at += 2;
    return status;
}

/* Whether PCRE2 knows a script of this name. */
static bool is_script(const char *name, size_t bytes)
{
    char pattern[64];
    int code, length = snprintf(pattern, sizeof pattern, "\\p{sc:%.*s}", (int)bytes, name);
    size_t offset;
    if (bytes > 40) return false;
    pcre2_code *compiled =
        pcre2_compile((PCRE2_SPTR)pattern, (size_t)length, PCRE2_UTF, &code, &offset, NULL);
    pcre2_code_free(compiled);
    return compiled != NULL;
}

/* \p{...}, \P{...}: a script's name means that script alone; to PCRE2 it would also mean characters
 * that several scripts share. */
static ms_status put_property(translation *t)
{
    const char *close = memchr(t->at, '}', (size_t)(t->end - t->at));
    if (t->end - t->at < 4 || t->at[2] != '{' || close == NULL) return copy(t, 3);
    const char *name = t->at + 3;
    size_t bytes = (size_t)(close - name);
    ms_status status = copy(t, 3);
    if (!status && bytes > 2 && is_script(name, bytes)) status = put(t, "sc:");
    return status ? status : copy(t, bytes + 1);
}

/* An escape: t->at is at the backslash. */
static ms_status put_escape(translation *t)
{
    char kind = t->end - t->at > 1 ? t->at[1] : 0;
    switch (kind) {
    case 's':
    case 'S':
    case 'w':
    case 'W': return put_class(t, kind);
    case 'p':
    case 'P': return put_property(t);
    case 'x':
        /* A code in braces, whose closing brace ends no repetition. */
        if (t->end - t->at > 2 && t->at[2] == '{') {
            const char *close = memchr(t->at, '}', (size_t)(t->end - t->at));
            if (close) return copy(t, (size_t)(close - t->at) + 1);
        }
        return copy(t, 2);
    case 'h':
    case 'H':
    case 'G':
    case 'K': return refuse(t, "\\h, \\H, \\G or \\K");
    case 'u': {
        char code[16] = "\\x{";
        if (t->end - t->at < 6 || t->at[2] == '{') return refuse(t, "\\u{...}");
        memcpy(code + 3, t->at + 2, 4);
        code[7] = '}';
        t->at += 6;
        return put(t, code);
    }
    default: return copy(t, 2);
    }
}

/* A character inside of a class. */
static ms_status put_member(translation *t)
{
    if (*t->at == '[' && t->end - t->at > 1 && t->at[1] == ':') {
        const char *close = memmem(t->at, (size_t)(t->end - t->at), ":]", 2);
        if (close) return copy(t, (size_t)(close - t->at) + 2);
    }
    if (*t->at == '[') return refuse(t, "a class inside of a class");
    if (t->end - t->at > 1 && t->at[0] == '&' && t->at[1] == '&')
        return refuse(t, "an intersection of classes (&&)");
    if (*t->at == ']') t->in_class = false;
    return copy(t, 1);
}

static ms_status put_next(translation *t)
{
    if (*t->at == '\\') return put_escape(t);
    if (t->in_class) return put_member(t);
    if (*t->at == '[') {
        t->in_class = true;
        ms_status status = copy(t, 1);
        if (!status && t->at < t->end && *t->at == '^') status = copy(t, 1);
        /* The first one is a member. */
        if (!status && t->at < t->end && *t->at == ']') status = put(t, "\\");
        return status || t->at == t->end || *t->at != ']' ? status : copy(t, 1);
    }
    /* In Ruby's syntax this repeats the repetition; to PCRE2 it would make it possessive. */
    if (t->dialect == MS_DIALECT_ONIGURUMA && t->end - t->at > 1 && t->at[0] == '}'
        && t->at[1] == '+')
        return refuse(t, "'+' after '{...}'");
    return copy(t, 1);
}

static ms_status translate(ms_context *context, const char *text, size_t bytes, ms_dialect dialect,
                           ms_buffer *out)
{
    translation t = { .context = context,
                      .text = text,
                      .at = text,
                      .end = text + bytes,
                      .dialect = dialect,
                      .out = out };
    ms_status status = MS_OK;
    while (!status && t.at < t.end) status = put_next(&t);
    return status;
}

/* --------------------------------------------------------------- compilation */

/* Compiles what was translated. Without the machine code of the just-in-time compiler PCRE2
 * interprets the pattern, with the same results. */
static ms_status compile(ms_context *context, ms_pattern *pattern, const ms_buffer *text,
                         ms_dialect dialect, const char *shown)
{
    uint32_t options = dialect == MS_DIALECT_LITERAL ? PCRE2_UTF | PCRE2_LITERAL
                                                     : PCRE2_UTF | PCRE2_UCP | PCRE2_NO_AUTO_CAPTURE
                                                           | PCRE2_NEVER_BACKSLASH_C;
    int code = 0;
    size_t offset = 0;
    /* Where lines end: Ruby's $ is before each line break, Rust's at the end of all. */
    if (dialect == MS_DIALECT_ONIGURUMA) options |= PCRE2_MULTILINE;
    if (dialect == MS_DIALECT_RUST) options |= PCRE2_DOLLAR_ENDONLY;
    pcre2_compile_context *settings = pcre2_compile_context_create(pattern->general);
    if (settings == NULL) return no_memory(context);
    pcre2_set_newline(settings, PCRE2_NEWLINE_LF);
    pattern->code = pcre2_compile(text->data, text->length, options, &code, &offset, settings);
    pcre2_compile_context_free(settings);
    if (pattern->code == NULL && code == PCRE2_ERROR_HEAP_FAILED) return no_memory(context);
    if (pattern->code == NULL) {
        unsigned char why[128] = "";
        pcre2_get_error_message(code, why, sizeof why);
        return ms_fail(context, MS_ERROR_ARGUMENT, "the regular expression '%.200s': %s", shown,
                       (const char *)why);
    }
    (void)pcre2_jit_compile(pattern->code, PCRE2_JIT_COMPLETE);
    return MS_OK;
}

ms_status ms_pattern_new(ms_context *context, const char *text, size_t bytes, ms_dialect dialect,
                         ms_pattern **out)
{
    ms_pattern *pattern = NULL;
    ms_buffer translated = { 0 };
    if (bytes == 0 || bytes > PATTERN_BYTES_MAX)
        return ms_fail(context, MS_ERROR_ARGUMENT,
                       "a regular expression of %zu bytes: it must have 1 to %d", bytes,
                       PATTERN_BYTES_MAX);
    ms_status status =
        ms_allocate(context, sizeof *pattern, "a regular expression", (void **)&pattern);
    if (status) return status;
    ms_context_init(&pattern->context, context->os);
    pattern->general = pcre2_general_context_create(pcre2_take, pcre2_give, &pattern->context);
    if (pattern->general == NULL) status = no_memory(context);
    if (!status)
        status = dialect == MS_DIALECT_LITERAL
                     ? ms_buffer_add(context, &translated, text, bytes)
                     : translate(context, text, bytes, dialect, &translated);
    if (!status) status = compile(context, pattern, &translated, dialect, text);
    ms_buffer_free(context, &translated);
    if (status) {
        ms_pattern_free(pattern);
        return status;
    }
    *out = pattern;
    return MS_OK;
}

void ms_pattern_free(ms_pattern *pattern)
{
    if (pattern == NULL) return;
    ms_context context = pattern->context;
    pcre2_code_free(pattern->code);
    pcre2_general_context_free(pattern->general);
    ms_release(&context, pattern);
}

/* ------------------------------------------------------------------ matching */

ms_status ms_matcher_new(ms_context *context, ms_matcher **out)
{
    ms_matcher *matcher = NULL;
    ms_status status = ms_allocate(context, sizeof *matcher, "a matcher", (void **)&matcher);
    if (status) return status;
    ms_context_init(&matcher->context, context->os);
    matcher->general = pcre2_general_context_create(pcre2_take, pcre2_give, &matcher->context);
    matcher->limits = matcher->general ? pcre2_match_context_create(matcher->general) : NULL;
    matcher->data = matcher->limits ? pcre2_match_data_create(1, matcher->general) : NULL;
    if (matcher->data == NULL) {
        ms_matcher_free(matcher);
        return no_memory(context);
    }
    /* NULL where there is no just-in-time compiler: then it is not needed. */
    matcher->stack = pcre2_jit_stack_create(JIT_STACK_FIRST, JIT_STACK_MOST, matcher->general);
    pcre2_jit_stack_assign(matcher->limits, NULL, matcher->stack);
    *out = matcher;
    return MS_OK;
}

void ms_matcher_free(ms_matcher *matcher)
{
    if (matcher == NULL) return;
    ms_context context = matcher->context;
    pcre2_jit_stack_free(matcher->stack);
    pcre2_match_data_free(matcher->data);
    pcre2_match_context_free(matcher->limits);
    pcre2_general_context_free(matcher->general);
    ms_release(&context, matcher);
}

ms_status ms_pattern_find(ms_context *context, const ms_pattern *pattern, ms_matcher *matcher,
                          ms_span subject, const uint8_t *from, ms_span *found)
{
    size_t bytes = ms_span_bytes(subject), at = (size_t)(from - subject.at);
    const size_t *ends = pcre2_get_ovector_pointer(matcher->data);
    while (at < bytes) {
        int result = pcre2_match(pattern->code, subject.at, bytes, at, PCRE2_NO_UTF_CHECK,
                                 matcher->data, matcher->limits);
        if (result == PCRE2_ERROR_NOMATCH) break;
        if (result == PCRE2_ERROR_NOMEMORY) return no_memory(context);
        if (result < 0) {
            unsigned char why[128] = "";
            pcre2_get_error_message(result, why, sizeof why);
            return ms_fail(context, MS_ERROR_UNSUPPORTED,
                           "a regular expression gave up at byte %zu of a piece of %zu bytes: %s",
                           at, bytes, (const char *)why);
        }
        if (ends[1] > ends[0]) {
            *found = (ms_span){ .at = subject.at + ends[0], .end = subject.at + ends[1] };
            return MS_OK;
        }
        /* An empty match: the next one begins a character later. */
        at = ends[1];
        at += ms_utf8_character(subject.at + at, subject.end, NULL);
        if (at == ends[1]) break;
    }
    *found = (ms_span){ 0 };
    return MS_OK;
}
