/* main.c: the command line: a Lua state, the library beside this program, and moonshard.cli; as a
 * whole, as one rank of a job, or as the agent of a node. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bindings/adopt.h"
#include "bindings/program/rank.h"
#include "bindings/program/requests.h"

/* What an agent logs, in one piece, from any of its threads: who was turned away at its port. */
static void agent_line(void *user, ms_log_level level, const char *message)
{
    char line[MS_ERROR_MESSAGE_BYTES + 64];
    (void)user;
    (void)level;
    int bytes = snprintf(line, sizeof line, "moonshard: %s\n", message);
    fwrite(line, 1, (size_t)bytes, stderr);
}

/* moonshard keep NUMBER ARGUMENTS: the process that a rank has forked, once it is needed. Its ranks
 * hear of an error from their launcher's first process, so it says nothing itself. */
static int keep(int count, char **values)
{
    ms_context context;
    ms_agent *agent = NULL;
    ms_context_init(&context, NULL);
    context.log = agent_line;
    char *end = NULL;
    long descriptor = strtol(values[2], &end, 10);
    if (*end || descriptor < 3 || descriptor > 1 << 20) return 2;
    if (ms_agent_serve(&context, (int)descriptor, &agent)) return 1;
    if (!agent) return 0;
    values[2] = values[0];
    int code = ms_program_of_agent(count - 2, values + 2, agent);
    ms_agent_tell_code(agent, code);
    ms_agent_close(agent);
    return code;
}

/* A process whose environment names a job is a rank of it. The program, stock interpreters and
 * applications read the same two variables (ms_lua_adopt). A rank removes them from its environment
 * only after it has adopted the files. */
int main(int argc, char **argv)
{
    ms_context context;
    ms_rendezvous *rendezvous = NULL;
    uint32_t rank = 0;
    ms_context_init(&context, NULL);
    if (ms_lua_adopt(&context, &rendezvous, &rank)) {
        fprintf(stderr, "moonshard: %s\n", context.error.message);
        return 1;
    }
    if (rendezvous) {
        /* A process that this one starts is not a rank. */
        unsetenv(MS_RENDEZVOUS_VARIABLE);
        unsetenv("MOONSHARD_RANK");
        ms_requests_of_rank();
    }
    if (argc > 3 && strcmp(argv[1], "keep") == 0) return keep(argc, argv);
    int code = ms_program(argc, argv, rendezvous, rank, false);
    ms_rendezvous_release(rendezvous);
    return code;
}
