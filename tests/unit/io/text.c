/* text.c: UTF-8, merging, patterns, files cut at any byte, failing allocations. The ids are tested
 * by spec/tokenizer_spec.lua. */
#include <limits.h>

#include "io_support.h"

#include "moonshard/tokenizer.h"
#include "text/pattern.h"
#include "text/merges.h"

static ms_context context;

static ms_span span_of(const char *text)
{
    const uint8_t *at = (const uint8_t *)text;
    return (ms_span){ .at = at, .end = at + strlen(text), .first = true };
}

static void test_utf8_is_told_from_other_bytes(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t valid, unfinished;
    } cases[] = {
        { "", 0, 0 },
        { "abcdefghij", 10, 0 },
        { "abcdefgh\xc3\xa9", 10, 0 },
        { "\xe6\x82\xa8\xf0\x9f\x99\x82", 7, 0 },
        { "a\xc3", 1, 1 },
        { "a\xe6\x82", 1, 2 },
        { "a\xf0\x9f\x99", 1, 3 },
        { "\xc0\x80", 0, 0 },
        { "\xed\xa0\x80", 0, 0 },     /* half of a surrogate pair */
        { "\xed\xa0", 0, 0 },         /* ... which nothing can complete */
        { "\xf4\x90\x80\x80", 0, 0 }, /* above U+10FFFF */
        { "\xe0\x80\x80", 0, 0 },     /* overlong */
        { "a\x80\x80\x80\x80", 1, 0 },
        { "\xf0\x9f\x99\x82\x80", 4, 0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ms_span text = span_of(cases[i].text);
        assert_int_equal(ms_utf8_valid_end(text.at, text.end) - text.at, cases[i].valid);
        assert_int_equal(ms_utf8_unfinished(text.at, text.end), cases[i].unfinished);
    }
    for (uint32_t code = 0; code <= 0x10ffff; code += code < 0x3000 ? 1 : 97) {
        uint8_t bytes[4];
        uint32_t again, length = ms_utf8_write(code, bytes);
        if (code >= 0xd800 && code <= 0xdfff) continue;
        assert_int_equal(ms_utf8_character(bytes, bytes + length, &again), length);
        assert_int_equal(again, code);
        assert_int_equal(ms_utf8_character(bytes, bytes + length - 1, NULL), 0);
    }
}

/* Merges as a list of ids, ended by MS_NO_TOKEN. */
static void check_merged(const ms_merges *merges, const uint32_t *ids, size_t count,
                         const uint32_t *expected)
{
    ms_merging work = { 0 };
    ms_merging_begin(&work);
    for (size_t i = 0; i < count; i++)
        assert_int_equal(ms_merging_add(&context, &work, ids[i]), MS_OK);
    assert_int_equal(ms_merging_run(&context, &work, merges), MS_OK);
    for (int32_t at = count ? 0 : -1; at >= 0; at = work.symbols[at].next)
        assert_int_equal(work.symbols[at].id, *expected++);
    assert_int_equal(*expected, MS_NO_TOKEN);
    ms_merging_free(&context, &work);
}

static void test_the_lowest_rank_is_merged_first_and_then_the_leftmost(void **state)
{
    (void)state;
    /* a b -> 10 at rank 1, b c -> 11 at rank 0, 10 c -> 12 at rank 2, a a -> 13 at rank 3. */
    static const ms_merge all[] = {
        { 0, 1, 1, 10 }, { 1, 2, 0, 11 }, { 10, 2, 2, 12 }, { 0, 0, 3, 13 }
    };
    ms_merges merges = { 0 };
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(ms_merges_add(&context, &merges, all[i]), MS_OK);
    check_merged(&merges, (uint32_t[]){ 0, 1, 2 }, 3, (uint32_t[]){ 0, 11, MS_NO_TOKEN });
    check_merged(&merges, (uint32_t[]){ 0, 1, 3 }, 3, (uint32_t[]){ 10, 3, MS_NO_TOKEN });
    check_merged(&merges, (uint32_t[]){ 0, 0, 0 }, 3, (uint32_t[]){ 13, 0, MS_NO_TOKEN });
    check_merged(&merges, (uint32_t[]){ 3 }, 1, (uint32_t[]){ 3, MS_NO_TOKEN });
    check_merged(&merges, NULL, 0, (uint32_t[]){ MS_NO_TOKEN });
    ms_merges_free(&context, &merges);
}

static void test_patterns_mean_what_they_mean_to_their_engine(void **state)
{
    (void)state;
    static const struct {
        const char *pattern, *text;
        ms_dialect dialect;
        int begin, end; /* -1: no match; -2: refused */
    } cases[] = {
        { "\\s+", "a\xe3\x80\x80 b", MS_DIALECT_RUST, 1, 5 },
        { "\\s", "\xe1\xa0\x8e", MS_DIALECT_RUST, -1, 0 }, /* U+180E is no space */
        { "\\S+", "\xe1\xa0\x8e", MS_DIALECT_RUST, 0, 3 },
        { "[^\\s]+", " \xe1\xa0\x8e ", MS_DIALECT_ONIGURUMA, 1, 4 },
        { "\\w+", "e\xcc\x81-", MS_DIALECT_RUST, 0, 3 }, /* a mark is part of a word */
        { "a$", "a\n", MS_DIALECT_RUST, -1, 0 },
        { "a$", "a\n", MS_DIALECT_ONIGURUMA, 0, 1 },
        { ".", ".", MS_DIALECT_LITERAL, 0, 1 },
        { ".", "a", MS_DIALECT_LITERAL, -1, 0 },
        { "x*", "aax", MS_DIALECT_RUST, 2, 3 }, /* empty matches are passed over */
        { "(?i:'s)", "'\xc5\xbf", MS_DIALECT_RUST, 0, 3 },
        { "[]a]", "]", MS_DIALECT_RUST, 0, 1 },
        { "[[:alpha:]]", "1a", MS_DIALECT_RUST, 1, 2 },
        { "\\p{Han}", "\xe3\x80\x83\xe4\xb8\xad", MS_DIALECT_RUST, 3, 6 },
        { "\\u4e2d", "\xe4\xb8\xad", MS_DIALECT_ONIGURUMA, 0, 3 },
        { "a{1,2}+a", "aaa", MS_DIALECT_RUST, 0, 3 },
        { "a{1,2}+a", "aaa", MS_DIALECT_ONIGURUMA, -2, 0 },
        { "[a&&b]", "", MS_DIALECT_RUST, -2, 0 },
        { "[a[b]]", "", MS_DIALECT_RUST, -2, 0 },
        { "\\h", "", MS_DIALECT_ONIGURUMA, -2, 0 },
        { "a(", "", MS_DIALECT_RUST, -2, 0 },
        { "\\", "", MS_DIALECT_RUST, -2, 0 },
        { "[", "", MS_DIALECT_RUST, -2, 0 },
        { "\\p{", "", MS_DIALECT_RUST, -2, 0 },
        { "\\p", "", MS_DIALECT_RUST, -2, 0 },
        { "", "", MS_DIALECT_RUST, -2, 0 },
    };
    ms_matcher *matcher = NULL;
    assert_int_equal(ms_matcher_new(&context, &matcher), MS_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ms_pattern *pattern = NULL;
        ms_span text = span_of(cases[i].text), found;
        ms_status status = ms_pattern_new(&context, cases[i].pattern, strlen(cases[i].pattern),
                                          cases[i].dialect, &pattern);
        if (status) assert_int_equal(cases[i].begin, -2);
        if (status) continue;
        assert_int_equal(ms_pattern_find(&context, pattern, matcher, text, text.at, &found), MS_OK);
        assert_int_equal(found.at ? found.at - text.at : -1, cases[i].begin);
        if (found.at) assert_int_equal(found.end - text.at, cases[i].end);
        ms_pattern_free(pattern);
    }
    ms_matcher_free(matcher);
}

/* --------------------------------------------------------------------- files */

/* A file of golden/tokenizers, and how it is loaded. */
typedef struct golden_file {
    const char *name, *pattern;
} golden_file;

static const golden_file golden_files[] = {
    { "byte_level/tokenizer.json", NULL },
    { "llama2/tokenizer.json", NULL },
    { "ranks.tiktoken", "llama3" },
    { "sentencepiece/tokenizer.model", NULL },
    { "mapped.model", NULL },
    { "gpt2/vocab.json", NULL },
};

static const char *golden_path(const char *name)
{
    static char path[512];
    const char *source = getenv("MOONSHARD_SOURCE");
    snprintf(path, sizeof path, "%s/tests/golden/tokenizers/%s", source ? source : ".", name);
    return path;
}

static void put_golden(const char *from, const char *to, size_t *bytes)
{
    void *data = NULL;
    assert_int_equal(ms_file_read_all(&context, golden_path(from), 1 << 20, &data, bytes), MS_OK);
    put_file(in_folder(to), data, *bytes);
    ms_release(&context, data);
}

/* Encodes and decodes; all ids are below the size. */
static void use(ms_tokenizer *tokenizer)
{
    static const char text[] = "The engine\xff runs \xf0\x9f\x99\x82<|turn|> tasks\n";
    ms_encoder *encoder = NULL;
    ms_decoder *decoder = NULL;
    const uint32_t *ids;
    const char *out;
    size_t count = 0, bytes = 0;
    ms_encode_options options = { .special = MS_SPECIAL_PARSE };
    assert_int_equal(ms_encoder_new(&context, tokenizer, &encoder), MS_OK);
    assert_int_equal(ms_decoder_new(&context, tokenizer, true, &decoder), MS_OK);
    if (ms_encode(&context, encoder, text, sizeof text - 1, &options, &ids, &count) == MS_OK) {
        for (size_t i = 0; i < count; i++) assert_true(ids[i] < ms_tokenizer_size(tokenizer));
        assert_int_equal(ms_decoder_add(&context, decoder, ids, count, &out, &bytes), MS_OK);
        ms_decoder_finish(decoder, &out, &bytes);
    }
    ms_encoder_free(encoder);
    ms_decoder_free(decoder);
}

/* What is cut is refused with the file's name, or it is a smaller tokenizer that works. */
static void test_files_that_end_early_are_refused_or_work(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof golden_files / sizeof *golden_files; i++) {
        size_t bytes = 0, step;
        put_golden(golden_files[i].name, "whole", &bytes);
        step = bytes / 150 + 1;
        for (size_t length = 0; length < bytes; length += length < 30 ? 1 : step) {
            void *data = NULL;
            size_t whole;
            ms_tokenizer *tokenizer = NULL;
            ms_tokenizer_options options = { .pattern = golden_files[i].pattern };
            assert_int_equal(ms_file_read_all(&context, in_folder("whole"), 1 << 20, &data, &whole),
                             MS_OK);
            put_file(in_folder("cut"), data, length);
            ms_release(&context, data);
            if (ms_tokenizer_load(&context, in_folder("cut"), &options, &tokenizer) == MS_OK)
                use(tokenizer);
            else assert_non_null(strstr(context.error.message, "/cut'"));
            ms_tokenizer_release(tokenizer);
        }
    }
}

/* The first allocations fail one by one, later ones with growing steps: a load has thousands. Not
 * all stop a load: a pattern without memory for machine code is interpreted. */
static void check_failing_allocations(const char *path, const char *pattern)
{
    long calls = LONG_MAX;
    for (long n = 1; n <= calls; n += n < 60 ? 1 : n / 8) {
        ms_tokenizer *tokenizer = NULL;
        ms_tokenizer_options options = { .pattern = pattern };
        fault_os fault;
        ms_context faulty;
        fault_os_init(&fault);
        ms_context_init(&faulty, &fault.table);
        atomic_store(&fault.fail_at, n);
        ms_status status = ms_tokenizer_load(&faulty, path, &options, &tokenizer);
        if (status) assert_int_equal(status, MS_ERROR_MEMORY);
        else calls = atomic_load(&fault.calls);
        ms_tokenizer_release(tokenizer);
        assert_int_equal(atomic_load(&fault.live), 0);
    }
}

static void test_failing_allocations_leave_nothing_behind(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof golden_files / sizeof *golden_files; i++)
        check_failing_allocations(golden_path(golden_files[i].name), golden_files[i].pattern);
}

/* ------------------------------------------------------------- tokens of other files */

static void put_text(const char *name, const char *text)
{
    put_file(in_folder(name), text, strlen(text));
}

/* A tokenizer.json with tokens and rules of all kinds, and a file that changes them and adds some.
 */
static const char changed_config[] =
    "{\"eos_token\":\"<|new|>\",\"mask_token\":{\"content\":\"the\"},\"added_tokens_decoder\":{"
    "\"600\":{\"content\":\"<mask>\",\"normalized\":true},"
    "\"601\":{\"content\":\"<word>\",\"special\":true,\"rstrip\":true},"
    "\"603\":{\"content\":\"caf\xc3\xa9\",\"normalized\":true},"
    "\"602\":{\"content\":\"<|new|>\",\"special\":true}}}";

static void test_tokens_of_other_files_leave_nothing_behind(void **state)
{
    (void)state;
    size_t bytes;
    char folder[512];
    snprintf(folder, sizeof folder, "%s", in_folder(""));
    put_golden("byte_level/tokenizer.json", "tokenizer.json", &bytes);
    put_text("tokenizer_config.json", changed_config);
    check_failing_allocations(folder, NULL);
    /* Cut anywhere, or with one byte changed, it is refused by name, or it works. */
    for (size_t i = 0; i < sizeof changed_config - 1; i++) {
        for (int changed = 0; changed < 2; changed++) {
            ms_tokenizer *tokenizer = NULL;
            char text[sizeof changed_config];
            memcpy(text, changed_config, sizeof text);
            text[i] = changed ? '7' : '\0';
            put_text("tokenizer_config.json", text);
            if (ms_tokenizer_load(&context, folder, NULL, &tokenizer) == MS_OK) use(tokenizer);
            else assert_non_null(strstr(context.error.message, "/tokenizer_config.json'"));
            ms_tokenizer_release(tokenizer);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_utf8_is_told_from_other_bytes),
        cmocka_unit_test(test_the_lowest_rank_is_merged_first_and_then_the_leftmost),
        cmocka_unit_test(test_patterns_mean_what_they_mean_to_their_engine),
        cmocka_unit_test_setup_teardown(test_files_that_end_early_are_refused_or_work, folder_setup,
                                        folder_teardown),
        cmocka_unit_test(test_failing_allocations_leave_nothing_behind),
        cmocka_unit_test_setup_teardown(test_tokens_of_other_files_leave_nothing_behind,
                                        folder_setup, folder_teardown),
    };
    ms_context_init(&context, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
