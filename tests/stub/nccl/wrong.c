/* wrong.c: which calls of the stub go wrong, and how. */
#include "nccl.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PLANS 8

static struct plan {
    char how[16], function[40];
    int k, value, rank, seen;
} plans[PLANS];
static int count;
static bool was_read;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

_Noreturn void stub_broken(const char *function, const char *rule)
{
    fprintf(stderr, "stub of NCCL: %s: %s\n", function, rule);
    abort();
}

static void add(const char *word)
{
    struct plan *p = &plans[count];
    char text[128];
    snprintf(text, sizeof text, "%s", word);
    char *at = strchr(text, '@');
    *p = (struct plan){ .rank = -1 };
    if (at) {
        p->rank = atoi(at + 1);
        *at = '\0';
    }
    if (count == PLANS
        || sscanf(text, "%15[^:]:%39[^:]:%d:%d", p->how, p->function, &p->k, &p->value) < 3)
        stub_broken(word, "this plan is not understood");
    count++;
}

static void read_plan(const char *plan)
{
    char text[512];
    char *rest = NULL;
    snprintf(text, sizeof text, "%s", plan ? plan : "");
    count = 0;
    was_read = true;
    for (char *word = strtok_r(text, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        add(word);
}

void stub_nccl_plan(const char *plan)
{
    pthread_mutex_lock(&lock);
    read_plan(plan);
    pthread_mutex_unlock(&lock);
}

static stub_due due_of(const struct plan *p)
{
    static const char *const names[] = { "", "fail", "async", "never", "late", "version" };
    for (int how = STUB_FAIL; how <= STUB_VERSION; how++)
        if (strcmp(p->how, names[how]) == 0)
            return (stub_due){ .how = (stub_how)how, .value = p->value };
    /* "hang" is left: this thread does not go on. */
    if (strcmp(p->how, "hang") != 0) stub_broken(p->how, "this plan is not understood");
    for (;;) pause();
}

stub_due stub_ask(const char *function, int rank)
{
    const struct plan *due = NULL;
    pthread_mutex_lock(&lock);
    if (!was_read) read_plan(getenv("MOONSHARD_STUB_NCCL"));
    for (int i = 0; i < count; i++) {
        struct plan *p = &plans[i];
        if (strcmp(p->function, function) == 0 && (p->rank < 0 || rank < 0 || p->rank == rank)
            && ++p->seen == p->k)
            due = p;
    }
    struct plan found = due ? *due : (struct plan){ .k = 0 };
    pthread_mutex_unlock(&lock);
    return found.k ? due_of(&found) : (stub_due){ .how = STUB_WELL };
}
