/* node_list.c: reads the nodes of a job from a list or from a file. */
#include "comm/job/node_list.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* The bytes that a list may have; a file with more is no list of nodes. */
#define TEXT_MAX (1 << 20)

#define EXPECTED "expected a host, as node1, node1:4, node[01-03]:4 or [fd00::1]:4"

/* Where the reader is in the text. */
typedef struct reader {
    ms_context *context;
    const char *file; /* NULL: a list of the command line */
    uint32_t line;
    const char *begin, *at, *end; /* of the list, or of the line */
    ms_node_list list;
} reader;

/* A node as it is written. */
typedef struct element {
    const char *at, *end;        /* the name, of an address without its brackets */
    bool is_address, is_counted; /* is_counted: its ranks are given, after ':' */
    uint32_t ranks;
} element;

/* An error at a place of the text. */
static ms_status refuse(const reader *text, const char *at, const char *format, ...)
    MS_PRINTF(3, 4);
static ms_status refuse(const reader *text, const char *at, const char *format, ...)
{
    char what[512];
    unsigned character = (unsigned)(at - text->begin) + 1;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    if (!text->file)
        return ms_fail(text->context, MS_ERROR_ARGUMENT, "--hosts, character %u: %s", character,
                       what);
    return ms_fail(text->context, MS_ERROR_ARGUMENT, "%.200s, line %u, character %u: %s",
                   text->file, text->line, character, what);
}

/* An error about the character at a place, or about the end of the text. */
static ms_status refuse_character(const reader *text, const char *at, const char *expected)
{
    if (at == text->end)
        return refuse(text, at, "%s, not the end of the %s", expected,
                      text->file ? "line" : "list");
    if (*at > ' ' && *at <= '~') return refuse(text, at, "%s, not '%c'", expected, *at);
    return refuse(text, at, "%s, not a character of code %u", expected, (unsigned char)*at);
}

static bool is_digit(char c) { return c >= '0' && c <= '9'; }
static char lower(char c) { return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c; }
static bool is_letter_or_digit(char c)
{
    return is_digit(c) || (lower(c) >= 'a' && lower(c) <= 'z');
}
static bool is_of_name(char c) { return is_letter_or_digit(c) || c == '.' || c == '_' || c == '-'; }

static bool is_of_address(char c)
{
    return is_digit(c) || (lower(c) >= 'a' && lower(c) <= 'f') || c == ':' || c == '.';
}

static bool is_at(const reader *text, char c) { return text->at < text->end && *text->at == c; }

static void skip_blanks(reader *text)
{
    while (is_at(text, ' ') || is_at(text, '\t') || is_at(text, '\r')) text->at++;
}

/* Decimal digits before `end`, at most nine; false: there are none, or more. */
static bool read_digits(const char **at, const char *end, uint32_t *out)
{
    const char *began = *at;
    uint32_t value = 0;
    for (; *at < end && is_digit(**at); ++*at) {
        if (*at - began == 9) return false;
        value = value * 10 + (uint32_t)(**at - '0');
    }
    *out = value;
    return *at > began;
}

static ms_status read_ranks(reader *text, uint32_t *out)
{
    const char *began = text->at;
    if (read_digits(&text->at, text->end, out) && *out > 0 && *out <= MS_LISTED_RANKS_MAX)
        return MS_OK;
    return refuse(text, began, "expected a number of ranks, from 1 to %d%s", MS_LISTED_RANKS_MAX,
                  began < text->end && *began == ':' ? "; an IPv6 address stands in brackets" : "");
}

/* ---------------------------------------------------------------- nodes */

static bool is_same(const char *left, const char *right)
{
    while (*left && lower(*left) == lower(*right)) left++, right++;
    return *left == *right;
}

/* Adds a node that is at one->at in the text, alone or as one of several. */
static ms_status add(reader *text, const element *one, const char *name, size_t bytes)
{
    ms_node_list *list = &text->list;
    if (list->count == MS_LISTED_NODES_MAX)
        return refuse(text, one->at, "a job has at most %d hosts", MS_LISTED_NODES_MAX);
    if (list->ranks + one->ranks > MS_LISTED_RANKS_MAX)
        return refuse(text, one->at, "a job has at most %d ranks", MS_LISTED_RANKS_MAX);
    void *nodes = list->nodes;
    ms_status status = ms_grow(text->context, &nodes, &list->capacity, (size_t)list->count + 1,
                               sizeof *list->nodes);
    if (status) return status;
    list->nodes = nodes;
    ms_listed_node *node = &list->nodes[list->count];
    memcpy(node->name, name, bytes);
    node->name[bytes] = '\0';
    node->ranks = one->ranks;
    /* Names of nodes do not depend on case. */
    for (uint32_t i = 0; i < list->count; i++)
        if (is_same(list->nodes[i].name, node->name))
            return refuse(text, one->at,
                          "the host '%s' is named twice: name it once, with all its ranks",
                          node->name);
    list->count++;
    list->ranks += one->ranks;
    return MS_OK;
}

/* One number or range inside brackets. */
typedef struct range {
    uint32_t low, high;
    int digits; /* that a number has at least, by zeros in front */
} range;

static ms_status read_range(const reader *text, const char **at, const char *end, range *out)
{
    const char *began = *at;
    if (!read_digits(at, end, &out->low))
        return refuse(text, began,
                      "expected a number of at most nine digits, as in node[01-03,07]");
    out->digits = (int)(*at - began);
    out->high = out->low;
    if (*at < end && **at == '-') {
        const char *second = ++*at;
        if (!read_digits(at, end, &out->high) || out->high < out->low)
            return refuse(text, second,
                          "expected the end of a range: a number of at most nine digits, not below "
                          "%u",
                          out->low);
    }
    if (*at == end || **at == ',') return MS_OK;
    return refuse_character(text, *at, "expected ',', '-' or ']'");
}

/* The brackets of a name. */
typedef struct brackets {
    const char *open, *close;
} brackets;

static ms_status add_range(reader *text, const element *one, const brackets *around,
                           const range *numbers)
{
    char name[MS_LISTED_NAME_MAX + 1];
    int before = (int)(around->open - one->at), after = (int)(one->end - around->close) - 1;
    for (uint32_t number = numbers->low;; number++) {
        int bytes = snprintf(name, sizeof name, "%.*s%0*u%.*s", before, one->at, numbers->digits,
                             number, after, around->close + 1);
        if (bytes > MS_LISTED_NAME_MAX)
            return refuse(text, one->at, "a name has at most %d characters", MS_LISTED_NAME_MAX);
        ms_status status = add(text, one, name, (size_t)bytes);
        if (status || number == numbers->high) return status;
    }
}

/* The nodes of one element: several where the name has brackets. */
static ms_status add_all(reader *text, const element *one)
{
    const size_t bytes = (size_t)(one->end - one->at);
    brackets around = { .open = one->is_address ? NULL : memchr(one->at, '[', bytes) };
    if (!around.open) {
        if (bytes <= MS_LISTED_NAME_MAX) return add(text, one, one->at, bytes);
        return refuse(text, one->at, "a name has at most %d characters", MS_LISTED_NAME_MAX);
    }
    around.close = memchr(around.open, ']', (size_t)(one->end - around.open));
    for (const char *at = around.open + 1;; at++) {
        range numbers = { 0 };
        ms_status status = read_range(text, &at, around.close, &numbers);
        if (!status) status = add_range(text, one, &around, &numbers);
        if (status || at == around.close) return status;
    }
}

/* ---------------------------------------------------------------- elements */

static ms_status read_address(reader *text, element *out)
{
    out->is_address = true;
    out->at = ++text->at;
    while (text->at < text->end && is_of_address(*text->at)) text->at++;
    out->end = text->at;
    if (!is_at(text, ']'))
        return refuse_character(text, text->at, "expected an IPv6 address and ']'");
    text->at++;
    if (memchr(out->at, ':', (size_t)(out->end - out->at))) return MS_OK;
    return refuse(text, out->at, "expected an IPv6 address in the brackets, as [fd00::1]");
}

/* Letters and digits, with at most one pair of brackets, whose inside add_all reads. */
static ms_status read_name(reader *text, element *out)
{
    const char *open = NULL;
    out->at = text->at;
    if (text->at == text->end || !is_letter_or_digit(*text->at))
        return refuse_character(text, text->at, EXPECTED);
    for (; text->at < text->end && (is_of_name(*text->at) || *text->at == '['); text->at++) {
        if (*text->at != '[') continue;
        if (open) return refuse(text, text->at, "expected one pair of brackets in a name");
        open = text->at;
        text->at = memchr(open, ']', (size_t)(text->end - open));
        if (text->at) continue;
        text->at = text->end;
        return refuse(text, open, "expected ']' after this '['");
    }
    out->end = text->at;
    return MS_OK;
}

static ms_status read_element(reader *text, element *out)
{
    *out = (element){ .ranks = 1 };
    ms_status status = is_at(text, '[') ? read_address(text, out) : read_name(text, out);
    if (status || !is_at(text, ':')) return status;
    text->at++;
    out->is_counted = true;
    return read_ranks(text, &out->ranks);
}

/* ---------------------------------------------------------------- a list, a file */

static ms_status read_list(reader *text)
{
    for (;; text->at++) {
        element one;
        skip_blanks(text);
        ms_status status = read_element(text, &one);
        if (!status) status = add_all(text, &one);
        if (status) return status;
        skip_blanks(text);
        if (text->at == text->end) return MS_OK;
        if (*text->at != ',')
            return refuse_character(text, text->at, "expected ',' and another host");
    }
}

/* slots=4 or max_slots=8, with blanks around the sign. */
static ms_status read_setting(reader *text, uint32_t *slots, uint32_t *most)
{
    static const struct {
        const char *name;
        bool limits;
    } known[] = { { "slots", false }, { "max_slots", true }, { "max-slots", true } };
    const char *began = text->at;
    while (text->at < text->end && is_of_name(*text->at)) text->at++;
    const size_t bytes = (size_t)(text->at - began);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strlen(known[i].name) != bytes || memcmp(known[i].name, began, bytes) != 0) continue;
        skip_blanks(text);
        if (!is_at(text, '=')) return refuse_character(text, text->at, "expected '='");
        text->at++;
        skip_blanks(text);
        return read_ranks(text, known[i].limits ? most : slots);
    }
    return refuse_character(text, began, "expected slots=, max_slots= or the end of the line");
}

static ms_status read_line(reader *text)
{
    element one;
    uint32_t slots = 0, most = 0;
    skip_blanks(text);
    if (text->at == text->end) return MS_OK;
    const char *began = text->at;
    ms_status status = read_element(text, &one);
    for (;;) {
        skip_blanks(text);
        if (status || text->at == text->end) break;
        status = read_setting(text, &slots, &most);
    }
    if (status) return status;
    if (slots && one.is_counted)
        return refuse(text, began, "expected :%u or slots=%u, not both", one.ranks, slots);
    if (slots) one.ranks = slots;
    if (most && most < one.ranks)
        return refuse(text, began, "expected max_slots of at least %u", one.ranks);
    return add_all(text, &one);
}

/* Each line up to its end or to a comment. */
static ms_status read_lines(reader *text)
{
    const char *next = text->begin, *const end = text->end;
    while (next < end) {
        const char *stop = memchr(next, '\n', (size_t)(end - next));
        if (!stop) stop = end;
        const char *comment = memchr(next, '#', (size_t)(stop - next));
        text->line++;
        text->begin = text->at = next;
        text->end = comment ? comment : stop;
        ms_status status = read_line(text);
        if (status) return status;
        next = stop < end ? stop + 1 : end;
    }
    if (text->list.count > 0) return MS_OK;
    return ms_fail(text->context, MS_ERROR_ARGUMENT, "%.200s names no host: %s, in each line",
                   text->file, EXPECTED);
}

static ms_status parse(reader *text, ms_node_list *out)
{
    if (text->end - text->begin > TEXT_MAX)
        return ms_fail(text->context, MS_ERROR_ARGUMENT, "%.200s has more than %d bytes",
                       text->file ? text->file : "--hosts", TEXT_MAX);
    ms_status status = text->file ? read_lines(text) : read_list(text);
    if (status) ms_node_list_free(text->context, &text->list);
    else *out = text->list;
    return status;
}

/* ---------------------------------------------------------------- public */

ms_status ms_node_list_parse(ms_context *context, const char *text, size_t bytes, ms_node_list *out)
{
    reader all = { .context = context, .begin = text, .at = text, .end = text + bytes };
    return parse(&all, out);
}

ms_status ms_node_list_parse_file(ms_context *context, const char *file, const char *text,
                                  size_t bytes, ms_node_list *out)
{
    reader all = {
        .context = context, .file = file, .begin = text, .at = text, .end = text + bytes
    };
    return parse(&all, out);
}

void ms_node_list_free(ms_context *context, ms_node_list *list)
{
    ms_release(context, list->nodes);
    *list = (ms_node_list){ 0 };
}

/* Reads what fits into the buffer. */
static ms_status read_file(ms_context *context, const char *path, char *buffer, size_t room,
                           size_t *bytes)
{
    const ms_os *os = context->os;
    ms_file *file = NULL;
    int64_t moved = os->open(os->user, path, MS_FILE_READ, &file);
    *bytes = 0;
    if (moved < 0) return ms_fail_os(context, (int)moved, "cannot read the hosts of", path);
    do {
        moved = os->read(os->user, file, buffer + *bytes, room - *bytes, *bytes);
        if (moved > 0) *bytes += (size_t)moved;
    } while (moved > 0 && *bytes < room);
    os->close(os->user, file);
    return moved < 0 ? ms_fail_os(context, (int)moved, "cannot read the hosts of", path) : MS_OK;
}

ms_status ms_node_list_read(ms_context *context, const char *argument, ms_node_list *out)
{
    const ms_os *os = context->os;
    ms_file_info info;
    void *buffer = NULL;
    size_t bytes = 0;
    /* No name of a node has a slash. */
    bool is_file =
        strchr(argument, '/') || (os->info(os->user, argument, &info) == 0 && !info.is_directory);
    if (!is_file) return ms_node_list_parse(context, argument, strlen(argument), out);
    ms_status status = ms_allocate(context, TEXT_MAX + 1, "the file of hosts", &buffer);
    if (status) return status;
    status = read_file(context, argument, buffer, TEXT_MAX + 1, &bytes);
    if (!status) status = ms_node_list_parse_file(context, argument, buffer, bytes, out);
    ms_release(context, buffer);
    return status;
}
