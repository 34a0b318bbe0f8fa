/* node_list.c: any text as a list and as a file of hosts: it is refused with a message, or what is
 * read keeps what list.h promises and, written as a list, is read as the same again.
 * fuzz: engine/base engine/comm/job/node_list.c */
#include "comm/job/node_list.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "node_list: %s\n", what);
    abort();
}

static void check_names(const ms_node_list *list)
{
    uint32_t ranks = 0;
    for (uint32_t i = 0; i < list->count; i++) {
        const ms_listed_node *node = &list->nodes[i];
        size_t length = strnlen(node->name, sizeof node->name);
        check(length > 0 && length <= MS_LISTED_NAME_MAX, "a name has no length, or too much");
        check(node->name[0] != '-', "a name looks like an option");
        check(!node->name[strspn(node->name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                             "0123456789._-:")],
              "a name has a character that no name has");
        check(node->ranks > 0, "a host has no rank");
        ranks += node->ranks;
        /* Not of all, which would take most of the time. */
        for (uint32_t k = i > 50 ? i - 50 : 0; k < i; k++)
            check(strcmp(node->name, list->nodes[k].name) != 0, "a host is there twice");
    }
    check(list->count > 0 && list->count <= MS_LISTED_NODES_MAX, "the number of hosts is wrong");
    check(ranks == list->ranks && ranks <= MS_LISTED_RANKS_MAX, "the number of ranks is wrong");
}

/* The list as text without Slurm's brackets. */
static size_t write_list(const ms_node_list *list, char *text, size_t room)
{
    size_t used = 0;
    for (uint32_t i = 0; i < list->count; i++) {
        const char *name = list->nodes[i].name;
        bool is_address = strchr(name, ':');
        used += (size_t)snprintf(text + used, room - used, "%s%s%s%s:%u", i ? "," : "",
                                 is_address ? "[" : "", name, is_address ? "]" : "",
                                 list->nodes[i].ranks);
        check(used < room, "the names have more characters than they can have");
    }
    return used;
}

static void try_again(const ms_node_list *list)
{
    const size_t room = (size_t)list->count * (MS_LISTED_NAME_MAX + 9) + 1;
    ms_context context;
    ms_node_list again = { 0 };
    char *text = malloc(room);
    check(text != NULL, "memory");
    ms_context_init(&context, NULL);
    ms_status status = ms_node_list_parse(&context, text, write_list(list, text, room), &again);
    check(!status, context.error.message);
    check(again.count == list->count
              && memcmp(list->nodes, again.nodes, list->count * sizeof *list->nodes) == 0,
          "the written list is read as another");
    ms_node_list_free(&context, &again);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *text = (const char *)data;
    for (int is_file = 0; is_file < 2; is_file++) {
        ms_context context;
        ms_node_list list = { 0 };
        ms_context_init(&context, NULL);
        ms_status status = is_file ? ms_node_list_parse_file(&context, "FILE", text, size, &list)
                                   : ms_node_list_parse(&context, text, size, &list);
        if (status) {
            check(status == MS_ERROR_ARGUMENT && !list.nodes, "text is refused in another way");
            check(strstr(context.error.message, is_file ? "FILE" : "--hosts") != NULL,
                  "the message does not say where");
            continue;
        }
        check_names(&list);
        try_again(&list);
        ms_node_list_free(&context, &list);
    }
    return 0;
}
