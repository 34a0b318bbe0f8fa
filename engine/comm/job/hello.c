/* hello.c: introductions and hellos of ranks. */
#include "comm/job/hello.h"

#include <stdio.h>
#include <string.h>

void ms_introduction_write(const ms_context *context, ms_introduction *out)
{
    ms_node_id node = { .name = "?" };
    memset(out, 0, sizeof *out);
    (void)context->os->node_id(context->os->user, &node);
    snprintf(out->version, sizeof out->version, "%s", ms_version());
    snprintf(out->node, sizeof out->node, "%s", node.name);
}

void ms_introduction_compare(const ms_introduction *own, ms_introduction *theirs, uint32_t rank,
                             ms_hello_answer *out)
{
    theirs->version[sizeof theirs->version - 1] = theirs->node[sizeof theirs->node - 1] = '\0';
    if (strcmp(own->version, theirs->version) == 0) return;
    snprintf(out->refusal, sizeof out->refusal,
             "rank %u on host %s runs Moonshard %s, rank 0 on host %s runs %s: install the same "
             "version on all hosts",
             rank, theirs->node, theirs->version, own->node, own->version);
}

void ms_rank_hello_write(ms_context *context, const ms_cluster_options *options, ms_status found,
                         ms_rank_hello *out)
{
    const ms_os *os = context->os;
    const char *agree = options->agree ? options->agree : "";
    ms_machine machine = { .node_cores = 0 };
    ms_status status = found;
    int error = os->node_id(os->user, &out->node);
    (void)os->machine(os->user, &machine);
    if (!status && options->refused)
        status = ms_fail(context, MS_ERROR_ARGUMENT, "%s", options->refused);
    if (!status && error)
        status = ms_fail_os(context, error, "cannot tell this host from others", NULL);
    if (!status && strlen(agree) >= MS_AGREE_BYTES)
        status = ms_fail(context, MS_ERROR_ARGUMENT,
                         "the options of this run have more than %d bytes", MS_AGREE_BYTES - 1);
    out->cores = machine.node_cores;
    out->failed = status;
    if (status) snprintf(out->why, sizeof out->why, "%s", context->error.message);
    snprintf(out->agree, sizeof out->agree, "%s", agree);
}

void ms_rank_hello_check(ms_rank_hello *hello)
{
    hello->why[sizeof hello->why - 1] = hello->agree[sizeof hello->agree - 1] = '\0';
    hello->node.name[sizeof hello->node.name - 1] = '\0';
}

/* The first line in which two lists of "name=value" differ; both are cut to that line. */
static bool first_difference(const char *a, const char *b, char *line_a, char *line_b, size_t bytes)
{
    while (*a || *b) {
        size_t in_a = strcspn(a, "\n"), in_b = strcspn(b, "\n");
        if (in_a != in_b || memcmp(a, b, in_a) != 0) {
            snprintf(line_a, bytes, "%.*s", (int)in_a, a);
            snprintf(line_b, bytes, "%.*s", (int)in_b, b);
            return true;
        }
        a += in_a + (a[in_a] != '\0');
        b += in_b + (b[in_b] != '\0');
    }
    return false;
}

ms_status ms_rank_hello_compare(ms_context *context, const ms_rank_hello *own,
                                const ms_rank_hello *hello, uint32_t rank)
{
    char mine[200], theirs[200];
    if (hello->failed)
        return ms_fail(context, (ms_status)hello->failed, "rank %u on host %s: %.900s", rank,
                       hello->node.name, hello->why);
    if (!first_difference(own->agree, hello->agree, mine, theirs, sizeof mine)) return MS_OK;
    return ms_fail(context, MS_ERROR_MISMATCH,
                   "the ranks were started differently:\n  rank 0 on host %s: %s\n  rank %u on "
                   "host %s: %s",
                   own->node.name, *mine ? mine : "(nothing)", rank, hello->node.name,
                   *theirs ? theirs : "(nothing)");
}
