/* frame.c: any bytes as a frame that another host's agent has sent: it is refused, or the first
 * agent carries it out and changes nothing that the other host may not change.
 * fuzz: engine/base engine/comm/hosts */
#include "comm/control/cluster/coordinator.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/control/cluster/local_ranks.h"
#include "comm/control/cluster/rank_copies.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { RANKS = 4, NODES = 3, SENDER = 1 };

static void check(bool holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "frame: %s\n", what);
    abort();
}

static void quiet(void *user, ms_log_level level, const char *message)
{
    (void)user;
    (void)level;
    (void)message;
}

/* The first agent of a job, without connections: what it sends goes nowhere. */
static ms_agent *first_agent(void)
{
    static ms_agent *agent;
    static ms_context context;
    if (agent) return agent;
    static ms_agent_options options = {
        .rendezvous = { .ranks = RANKS, .threads = 1, .heap_bytes = 1 << 20 },
        .nodes = NODES,
        .node_of = { 0, 0, 1, 2 },
        .names = { "a", "b", "c" },
        .endpoint = { .interface = "lo" },
        .init_ns = 1000000000,
        .lost_ns = 1000000000
    };
    ms_context_init(&context, NULL);
    context.log = quiet;
    check(ms_agent_open(&context, &options, &agent) == MS_OK, context.error.message);
    ms_agent_close_local_socket(agent);
    return agent;
}

/* As after the beginning, so that every input meets the same agent. */
static void begin_anew(ms_agent *agent)
{
    ms_control_file *control = agent->control;
    atomic_store(&control->aborted, 0);
    atomic_store(&control->agreed, 0);
    atomic_store(&control->groups, 1);
    memset(control->ids_used, 0, sizeof control->ids_used);
    memset(control->requests, 0, sizeof control->requests);
    memset(control->lines, 0, RANKS * sizeof *control->lines);
    memset(agent->pending, 0, sizeof agent->pending);
    agent->proposed = agent->decided = false;
    agent->still.stage = agent->still.calls_used = agent->still.counts_used = 0;
}

/* What no other host may change: the layout, and the lines of the ranks of this and of a third
 * host. The bell counts how often ranks were woken. */
static uint64_t hash_of_own(const ms_agent *agent)
{
    const ms_control_file *control = agent->control;
    uint64_t hash = ms_hash(control, offsetof(ms_control_file, requests), 0);
    static const uint32_t others[] = { 0, 1, 3 };
    for (int i = 0; i < 3; i++) {
        const ms_rank_line *line = &control->lines[others[i]];
        hash = ms_hash(&line->phase,
                       offsetof(ms_rank_line, hang_report) - offsetof(ms_rank_line, phase), hash);
        hash = ms_hash(line->flight, sizeof line->flight, hash);
    }
    return hash;
}

/* A frame with this head, which is right. */
static void receive(const ms_frame_head *head, const uint8_t *data)
{
    ms_agent *agent = first_agent();
    /* A block of its own size, so that a read after its end is seen. */
    void *body = malloc(head->bytes ? head->bytes : 1);
    if (head->bytes) memcpy(body, data, head->bytes);
    if (ms_frame_check_body(head, body)) {
        begin_anew(agent);
        uint64_t before = hash_of_own(agent);
        if (head->kind == MS_FRAME_WRITE) {
            const ms_write_body *write = body;
            ms_agent_apply(agent, SENDER, write->offset, write + 1, head->bytes - sizeof *write);
        } else ms_agent_agree(agent, SENDER, head, body);
        check(hash_of_own(agent) == before, "a host has changed what is not its own");
    }
    free(body);
}

/* The input with its own head, and with a right one before the rest. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    ms_frame_head head;
    if (size < sizeof head) return 0;
    memcpy(&head, data, sizeof head);
    size_t rest = size - sizeof head;
    if (ms_frame_check_head(&head) && head.bytes <= rest) {
        check(head.bytes <= MS_FRAME_BODY_MOST, "a body is longer than the longest");
        receive(&head, data + sizeof head);
    }
    head.magic = MS_FRAME_MAGIC;
    head.kind %= MS_FRAME_KINDS;
    head.bytes = (uint32_t)rest;
    if (ms_frame_check_head(&head)) receive(&head, data + sizeof head);
    return 0;
}
