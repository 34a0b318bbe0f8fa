/* comm_node_list.c: the hosts of a job from --hosts: what lists and files say, and every error. */
#include "comm/job/node_list.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static ms_context context;

static int set_up(void **state)
{
    (void)state;
    ms_context_init(&context, NULL);
    return 0;
}

/* What was read, as "name:ranks name:ranks". */
static const char *told(const ms_node_list *list)
{
    static char text[4096];
    size_t used = 0;
    uint32_t ranks = 0;
    text[0] = '\0';
    for (uint32_t i = 0; i < list->count; i++) {
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s:%u", i ? " " : "",
                                 list->nodes[i].name, list->nodes[i].ranks);
        assert_true(used < sizeof text);
        ranks += list->nodes[i].ranks;
    }
    assert_int_equal(ranks, list->ranks);
    return text;
}

/* The parser gets no byte more than the text has. */
static ms_status parse(const char *text, bool is_file, ms_node_list *out)
{
    size_t bytes = strlen(text);
    char *copy = malloc(bytes + !bytes);
    assert_non_null(copy);
    memcpy(copy, text, bytes);
    ms_status status = is_file ? ms_node_list_parse_file(&context, "hosts.txt", copy, bytes, out)
                               : ms_node_list_parse(&context, copy, bytes, out);
    free(copy);
    return status;
}

static void reads(const char *text, bool is_file, const char *expected)
{
    ms_node_list list = { 0 };
    if (parse(text, is_file, &list)) fail_msg("%s: %s", text, context.error.message);
    assert_string_equal(told(&list), expected);
    ms_node_list_free(&context, &list);
}

static void refuses(const char *text, bool is_file, const char *message)
{
    ms_node_list list = { 0 };
    assert_int_equal(parse(text, is_file, &list), MS_ERROR_ARGUMENT);
    assert_null(list.nodes);
    if (strcmp(context.error.message, message) != 0)
        fail_msg("%s\n  is:       %s\n  expected: %s", text, context.error.message, message);
}

#define EXPECTED "expected a host, as node1, node1:4, node[01-03]:4 or [fd00::1]:4"

static void lists(void **state)
{
    static const char *const cases[][2] = {
        { "a:4,b:4", "a:4 b:4" },
        { "a", "a:1" },
        { "a,b:2", "a:1 b:2" },
        { " a:1 ,\tb ", "a:1 b:1" },
        { "10.0.0.1:8,10.0.0.2:8", "10.0.0.1:8 10.0.0.2:8" },
        { "[fd00::1]:4,[::1],[::ffff:10.0.0.1]:2", "fd00::1:4 ::1:1 ::ffff:10.0.0.1:2" },
        { "node[01-03,07]:2", "node01:2 node02:2 node03:2 node07:2" },
        { "node[8-10]", "node8:1 node9:1 node10:1" },
        { "n[098-101]-ib.local:1",
          "n098-ib.local:1 n099-ib.local:1 n100-ib.local:1 n101-ib.local:1" },
        { "gpu[1-2],cpu[5],login_0.x-y:4093", "gpu1:1 gpu2:1 cpu5:1 login_0.x-y:4093" },
        { "9node:1", "9node:1" },
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        reads(cases[i][0], false, cases[i][1]);
}

static void files(void **state)
{
    static const char *const cases[][2] = {
        { "a\nb\n", "a:1 b:1" },
        { "a:2\nb:3", "a:2 b:3" },
        { "a slots=4\nb slots = 2 max_slots=2\nc max-slots=9 slots=9\nd max_slots=1\n",
          "a:4 b:2 c:9 d:1" },
        { "# our cluster\n\n  a:2  # the first\r\n\t\r\nb slots=1#no blank\n", "a:2 b:1" },
        { "[fd00::1] slots=3\nnode[1-2] slots=4\n", "fd00::1:3 node1:4 node2:4" },
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) reads(cases[i][0], true, cases[i][1]);
}

static void errors_of_lists(void **state)
{
    static const char *const cases[][2] = {
        { "", "1: " EXPECTED ", not the end of the list" },
        { "a,,b", "3: " EXPECTED ", not ','" },
        { "a:1,", "5: " EXPECTED ", not the end of the list" },
        { "-oProxyCommand", "1: " EXPECTED ", not '-'" },
        { "a,.b", "3: " EXPECTED ", not '.'" },
        { "a\xc3\xb6", "2: expected ',' and another host, not a character of code 195" },
        { "a b", "3: expected ',' and another host, not 'b'" },
        { "a/b", "2: expected ',' and another host, not '/'" },
        { "a:", "3: expected a number of ranks, from 1 to 4096" },
        { "a:0", "3: expected a number of ranks, from 1 to 4096" },
        { "a:4097", "3: expected a number of ranks, from 1 to 4096" },
        { "a:4294967297", "3: expected a number of ranks, from 1 to 4096" },
        { "a:-1", "3: expected a number of ranks, from 1 to 4096" },
        { "a:2x", "4: expected ',' and another host, not 'x'" },
        { "fd00::1:4",
          "6: expected a number of ranks, from 1 to 4096; an IPv6 address stands in brackets" },
        { "[fd00::1", "9: expected an IPv6 address and ']', not the end of the list" },
        { "[fd00::g]", "8: expected an IPv6 address and ']', not 'g'" },
        { "[10.0.0.1]", "2: expected an IPv6 address in the brackets, as [fd00::1]" },
        { "[fd00::1]x", "10: expected ',' and another host, not 'x'" },
        { "a[1-2", "2: expected ']' after this '['" },
        { "a[1]b[2]", "6: expected one pair of brackets in a name" },
        { "a[]", "3: expected a number of at most nine digits, as in node[01-03,07]" },
        { "a[1,]", "5: expected a number of at most nine digits, as in node[01-03,07]" },
        { "a[x]", "3: expected a number of at most nine digits, as in node[01-03,07]" },
        { "a[1234567890]", "3: expected a number of at most nine digits, as in node[01-03,07]" },
        { "a[1-]", "5: expected the end of a range: a number of at most nine digits, not below 1" },
        { "a[7-3]",
          "5: expected the end of a range: a number of at most nine digits, not below 7" },
        { "a[1;2]", "4: expected ',', '-' or ']', not ';'" },
        { "a:4,b:4,a:4", "9: the host 'a' is named twice: name it once, with all its ranks" },
        { "Node1,node[0-2]",
          "7: the host 'node1' is named twice: name it once, with all its ranks" },
        { "[FD00::1],[fd00::1]",
          "12: the host 'fd00::1' is named twice: name it once, with all its ranks" },
        { "n[1-1025]", "1: a job has at most 1024 hosts" },
        { "n[0-999999999]", "1: a job has at most 1024 hosts" },
        { "a:4096,b", "8: a job has at most 4096 ranks" },
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char message[256];
        snprintf(message, sizeof message, "--hosts, character %s", cases[i][1]);
        refuses(cases[i][0], false, message);
    }
}

static void errors_of_files(void **state)
{
    static const char *const cases[][2] = {
        { "a\nb:\n", "hosts.txt, line 2, character 3: expected a number of ranks, from 1 to 4096" },
        { "a,b\n", "hosts.txt, line 1, character 2: expected slots=, max_slots= or the end of the "
                   "line, not ','" },
        { "# x\n a b\n", "hosts.txt, line 2, character 4: expected slots=, max_slots= or the end "
                         "of the line, not 'b'" },
        { "a slots\n", "hosts.txt, line 1, character 8: expected '=', not the end of the line" },
        { "a slots=\n",
          "hosts.txt, line 1, character 9: expected a number of ranks, from 1 to 4096" },
        { "a slotsx=1\n", "hosts.txt, line 1, character 3: expected slots=, max_slots= or the end "
                          "of the line, not 's'" },
        { "a:2 slots=2\n", "hosts.txt, line 1, character 1: expected :2 or slots=2, not both" },
        { "a slots=4 max_slots=3\n",
          "hosts.txt, line 1, character 1: expected max_slots of at least 4" },
        { "a slots=4\n\nb\na slots=4\n", "hosts.txt, line 4, character 1: the host 'a' is named "
                                         "twice: name it once, with all its ranks" },
        { "", "hosts.txt names no host: " EXPECTED ", in each line" },
        { "# nothing\n\n", "hosts.txt names no host: " EXPECTED ", in each line" },
        { ":4\n", "hosts.txt, line 1, character 1: " EXPECTED ", not ':'" },
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        refuses(cases[i][0], true, cases[i][1]);
}

static void limits(void **state)
{
    ms_node_list list = { 0 };
    char headers[MS_LISTED_NAME_MAX + 1], text[MS_LISTED_NAME_MAX + 16];
    (void)state;
    memset(headers, 'a', MS_LISTED_NAME_MAX);
    headers[MS_LISTED_NAME_MAX] = '\0';
    assert_int_equal(parse(headers, false, &list), MS_OK);
    assert_string_equal(list.nodes[0].name, headers);
    ms_node_list_free(&context, &list);
    snprintf(text, sizeof text, "%sb", headers);
    refuses(text, false, "--hosts, character 1: a name has at most 255 characters");
    /* The numbers in brackets count, and the brackets do not. */
    snprintf(text, sizeof text, "%s[9]", headers + 1);
    assert_int_equal(parse(text, false, &list), MS_OK);
    assert_int_equal(strlen(list.nodes[0].name), MS_LISTED_NAME_MAX);
    ms_node_list_free(&context, &list);
    snprintf(text, sizeof text, "%s[9-10]", headers + 1);
    refuses(text, false, "--hosts, character 1: a name has at most 255 characters");
    assert_int_equal(parse("n[1-1024]:4", false, &list), MS_OK);
    assert_int_equal(list.count, MS_LISTED_NODES_MAX);
    assert_int_equal(list.ranks, MS_LISTED_RANKS_MAX);
    assert_string_equal(list.nodes[1023].name, "n1024");
    ms_node_list_free(&context, &list);
}

/* --hosts names a file if there is one, else it is a list. */
static void list_or_file(void **state)
{
    char folder[] = "/tmp/moonshard-hosts-XXXXXX", path[64], missing[64];
    ms_node_list list = { 0 };
    (void)state;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/hosts", folder);
    snprintf(missing, sizeof missing, "%s/others", folder);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs("a slots=2\nb\n", file);
    fclose(file);
    assert_int_equal(ms_node_list_read(&context, path, &list), MS_OK);
    assert_string_equal(told(&list), "a:2 b:1");
    ms_node_list_free(&context, &list);
    assert_int_equal(ms_node_list_read(&context, missing, &list), MS_ERROR_NOT_FOUND);
    assert_non_null(strstr(context.error.message, missing));
    assert_null(list.nodes);
    /* In the working folder, without a slash. */
    char before[4096];
    assert_non_null(getcwd(before, sizeof before));
    assert_int_equal(chdir(folder), 0);
    assert_int_equal(ms_node_list_read(&context, "hosts", &list), MS_OK);
    assert_string_equal(told(&list), "a:2 b:1");
    ms_node_list_free(&context, &list);
    assert_int_equal(ms_node_list_read(&context, "others", &list), MS_OK);
    assert_string_equal(told(&list), "others:1");
    ms_node_list_free(&context, &list);
    assert_int_equal(chdir(before), 0);
    unlink(path);
    rmdir(folder);
}

static void large_file(void **state)
{
    const size_t bytes = ((size_t)1 << 20) + 1;
    char *text = malloc(bytes);
    ms_node_list list = { 0 };
    (void)state;
    assert_non_null(text);
    memset(text, '\n', bytes);
    text[0] = 'a';
    assert_int_equal(ms_node_list_parse_file(&context, "hosts.txt", text, bytes, &list),
                     MS_ERROR_ARGUMENT);
    assert_string_equal(context.error.message, "hosts.txt has more than 1048576 bytes");
    assert_int_equal(ms_node_list_parse_file(&context, "hosts.txt", text, bytes - 1, &list), MS_OK);
    assert_string_equal(told(&list), "a:1");
    ms_node_list_free(&context, &list);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists),           cmocka_unit_test(files),
        cmocka_unit_test(errors_of_lists), cmocka_unit_test(errors_of_files),
        cmocka_unit_test(limits),          cmocka_unit_test(list_or_file),
        cmocka_unit_test(large_file),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
