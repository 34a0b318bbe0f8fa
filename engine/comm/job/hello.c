/* hello.c: introductions and cards of ranks. */
#include "comm/job/hello.h"

#include <stdio.h>
#include <string.h>

void ms_introduction_write(const ms_context *context, ms_introduction *out)
{
    ms_host_id host = { .name = "?" };
    memset(out, 0, sizeof *out);
    (void)context->os->host(context->os->user, &host);
    snprintf(out->version, sizeof out->version, "%s", ms_version());
    snprintf(out->host, sizeof out->host, "%s", host.name);
}

void ms_introduction_compare(const ms_introduction *own, ms_introduction *theirs, uint32_t rank,
                             ms_reception *out)
{
    theirs->version[sizeof theirs->version - 1] = theirs->host[sizeof theirs->host - 1] = '\0';
    if (strcmp(own->version, theirs->version) == 0) return;
    snprintf(out->refusal, sizeof out->refusal,
             "rank %u on host %s runs Moonshard %s, rank 0 on host %s runs %s: install the same "
             "version on all hosts",
             rank, theirs->host, theirs->version, own->host, own->version);
}

void ms_card_write(ms_context *context, const ms_hosts_options *options, ms_status found,
                   ms_card *out)
{
    const ms_os *os = context->os;
    const char *agree = options->agree ? options->agree : "";
    ms_machine machine = { .host_cores = 0 };
    ms_status status = found;
    int error = os->host(os->user, &out->host);
    (void)os->machine(os->user, &machine);
    if (!status && options->refused)
        status = ms_fail(context, MS_ERROR_ARGUMENT, "%s", options->refused);
    if (!status && error)
        status = ms_fail_os(context, error, "cannot tell this host from others", NULL);
    if (!status && strlen(agree) >= MS_AGREE_BYTES)
        status = ms_fail(context, MS_ERROR_ARGUMENT,
                         "the options of this run have more than %d bytes", MS_AGREE_BYTES - 1);
    out->cores = machine.host_cores;
    out->failed = status;
    if (status) snprintf(out->why, sizeof out->why, "%s", context->error.message);
    snprintf(out->agree, sizeof out->agree, "%s", agree);
}

void ms_card_check(ms_card *card)
{
    card->why[sizeof card->why - 1] = card->agree[sizeof card->agree - 1] = '\0';
    card->host.name[sizeof card->host.name - 1] = '\0';
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

ms_status ms_card_compare(ms_context *context, const ms_card *own, const ms_card *card,
                          uint32_t rank)
{
    char mine[200], theirs[200];
    if (card->failed)
        return ms_fail(context, (ms_status)card->failed, "rank %u on host %s: %.900s", rank,
                       card->host.name, card->why);
    if (!first_difference(own->agree, card->agree, mine, theirs, sizeof mine)) return MS_OK;
    return ms_fail(context, MS_ERROR_MISMATCH,
                   "the ranks were started differently:\n  rank 0 on host %s: %s\n  rank %u on "
                   "host %s: %s",
                   own->host.name, *mine ? mine : "(nothing)", rank, card->host.name,
                   *theirs ? theirs : "(nothing)");
}
