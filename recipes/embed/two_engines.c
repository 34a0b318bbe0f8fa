/* two_engines.c: a C program that hosts two engines: two recipes at the same time, each in a
 * thread, a Lua state and an engine of its own.
 *
 *     two_engines [RECIPE [key=value ...] -- RECIPE [key=value ...]]
 *
 * Run in the checkout without arguments, it runs sine.lua and parity.lua. */
#include <moonshard/moonshard_lua.h>

#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* The recipe of one thread, and its result. */
typedef struct job {
    const char *recipe;
    const char *const *arguments;
    int count;
    int code;       /* the exit code of `moonshard run`; 0: done */
    ms_error error; /* the reason if code is not 0 */
    char *result;   /* what the recipe has returned, as JSON; NULL: nothing */
} job;

/* A line of a recipe's log, with the recipe's name in front. */
static void show_line(void *user, const char *text, bool is_warning)
{
    const job *mine = user;
    fprintf(is_warning ? stderr : stdout, "%s: %s\n", mine->recipe, text);
}

static void *run(void *object)
{
    job *mine = object;
    ms_lua_recipe recipe = { .path = mine->recipe,
                             .arguments = mine->arguments,
                             .count = mine->count,
                             .line = show_line,
                             .user = mine };
    mine->code = ms_lua_run_recipe(&recipe, &mine->result, &mine->error);
    return NULL;
}

/* One recipe and its arguments, up to "--" or the end; returns where the next begins. */
static char **read_job(char **at, char **end, job *out)
{
    out->recipe = at < end ? *at++ : NULL;
    out->arguments = (const char *const *)at;
    while (at < end && strcmp(*at, "--") != 0) {
        at++;
        out->count++;
    }
    return at < end ? at + 1 : end;
}

int main(int argc, char **argv)
{
    static const char *const few[] = { "steps=300" };
    job jobs[2] = { { .recipe = "recipes/embed/sine.lua", .arguments = few, .count = 1 },
                    { .recipe = "recipes/embed/parity.lua" } };
    if (argc > 1) {
        memset(jobs, 0, sizeof jobs);
        read_job(read_job(argv + 1, argv + argc, &jobs[0]), argv + argc, &jobs[1]);
    }
    if (!jobs[0].recipe || !jobs[1].recipe) {
        fprintf(stderr, "usage: two_engines RECIPE [key=value ...] -- RECIPE [key=value ...]\n");
        return 2;
    }
    pthread_t threads[2];
    int started = 0, code = 0;
    while (started < 2 && pthread_create(&threads[started], NULL, run, &jobs[started]) == 0)
        started++;
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
    if (started < 2) fprintf(stderr, "two_engines: no thread for %s\n", jobs[started].recipe);
    for (int i = 0; i < started; i++) {
        if (jobs[i].code)
            fprintf(stderr, "%s ended with %d: %s\n", jobs[i].recipe, jobs[i].code,
                    jobs[i].error.message);
        if (jobs[i].result) printf("%s has returned %s\n", jobs[i].recipe, jobs[i].result);
        ms_lua_free_result(jobs[i].result);
        if (!code) code = jobs[i].code;
    }
    return started < 2 ? 8 : code;
}
