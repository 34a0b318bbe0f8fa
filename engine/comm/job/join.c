/* join.c: how processes that a launcher started become the ranks of a job: they tell rank 0 which
 * node each is on, rank 0 tells all, each node gets an agent, and rank 0 tells each process where
 * its agent's local socket is. They speak by the exchange (exchange.h), over MPI or TCP.
 *
 * Each process has forked another one before (comm/control/cluster/agent_process.h). The one that
 * the first rank of a node has forked becomes the agent of this node. The others end.
 *
 * Every message of the exchange says whether its sender has failed, so that all processes end with
 * one error: that of rank 0, or of the first rank of a node, which reports it. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "comm/control/cluster/agent_process.h"
#include "comm/control/cluster/state.h"
#include "comm/job/exchange.h"
#include "comm/job/hello.h"

/* In which a launcher has ended the other processes after the first has failed. Where a time limit
 * has passed, some more does not matter. */
#define MS_FIRST_NS ((uint64_t)500000000)
#define MS_LATE_FIRST_NS ((uint64_t)2000000000)
#define MS_HEARD_NS ((uint64_t)2000000000)

/* What rank 0 tells each, who fills options.node and options.token (make_token). */
typedef struct ms_plan {
    uint32_t failed;
    char why[MS_ERROR_MESSAGE_BYTES];
    uint8_t salt[MS_TOKEN_BYTES];
    ms_agent_options options;
} ms_plan;

/* Where a node's agent is met: the first rank of a node tells rank 0, which tells each rank. */
typedef struct ms_way_in {
    uint32_t failed;
    char why[MS_ERROR_MESSAGE_BYTES];
    char local_socket[108];
} ms_way_in;

/* Not freed after a failure, as the exchange may still use it. */
typedef struct ms_joining {
    ms_context *context;
    const ms_cluster_options *options;
    ms_cluster_place *place;
    ms_exchange *exchange;
    ms_file *agent;
    ms_introduction introduction;
    ms_hello_answer reception;
    ms_rank_hello hello;
    ms_plan plan;
    ms_way_in way;
    char heard; /* a message that says only that another was heard */
    ms_agent_answer served;
    ms_introduction introductions[MS_LOCAL_RANKS_MAX]; /* rank 0's, of the others */
    ms_node_id nodes[MS_LOCAL_RANKS_MAX];              /* rank 0's: of the nodes found so far */
    uint32_t cores[MS_LOCAL_RANKS_MAX];                /* rank 0's, of each node */
    ms_way_in ways[MS_LOCAL_RANKS_MAX];                /* rank 0's, of each node */
} ms_joining;

_Static_assert(sizeof(ms_rank_hello) <= MS_FRAME_BODY_MOST && sizeof(ms_plan) <= MS_FRAME_BODY_MOST,
               "a message of the meeting is one frame");

/* ---------------------------------------------------------------------- rank 0 */

/* Nodes are numbered in the order of their first ranks. */
static ms_status note_node(ms_joining *joining, const ms_rank_hello *hello, uint32_t rank)
{
    ms_agent_options *options = &joining->plan.options;
    uint32_t h = 0;
    while (h < options->nodes
           && strncmp(joining->nodes[h].identity, hello->node.identity, sizeof hello->node.identity)
                  != 0)
        h++;
    if (h == options->nodes) {
        joining->nodes[h] = hello->node;
        joining->cores[h] = hello->cores;
        memcpy(options->names[h], hello->node.name, sizeof options->names[h] - 1);
        options->nodes++;
    }
    options->node_of[rank] = (uint16_t)h;
    return MS_OK;
}

/* In one line, for the first such node. */
static void warn_of_crowds(const ms_joining *joining)
{
    const ms_agent_options *options = &joining->plan.options;
    uint32_t ranks[MS_LOCAL_RANKS_MAX] = { 0 }, first = 0, crowded = 0;
    char others[48] = "";
    for (uint32_t r = 0; r < joining->place->ranks; r++) ranks[options->node_of[r]]++;
    for (uint32_t h = options->nodes; h-- > 0;) {
        if (!joining->cores[h] || ranks[h] <= joining->cores[h]) continue;
        first = h;
        crowded++;
    }
    if (!crowded) return;
    if (crowded > 1) snprintf(others, sizeof others, " (%u hosts have too few)", crowded);
    ms_log(joining->context, MS_LOG_WARN,
           "host %s has %u ranks and only %u core%s%s: ranks that wait for a core slow all down",
           options->names[first], ranks[first], joining->cores[first],
           joining->cores[first] == 1 ? "" : "s", others);
}

/* Hears all ranks, also after one that differs: each of them waits for the plan. */
static ms_status hear_all(ms_joining *joining)
{
    ms_context *context = joining->context;
    const ms_rank_hello *own = &joining->hello;
    ms_error first = { .status = MS_OK };
    void *memory = NULL;
    ms_status status = ms_allocate(context, sizeof(ms_rank_hello), "meeting", &memory);
    if (status) return status;
    if (own->failed) {
        (void)ms_fail(context, (ms_status)own->failed, "%s", own->why);
        first = context->error;
    }
    note_node(joining, &joining->hello, 0);
    for (uint32_t r = 1; r < joining->place->ranks; r++) {
        ms_rank_hello *hello = memory;
        /* After a failure the memory stays: MPI may still use it. */
        status = joining->exchange->receive(joining->exchange, r, hello, sizeof *hello);
        if (status) return status;
        ms_rank_hello_check(hello);
        if (ms_rank_hello_compare(context, own, hello, r) && !first.status) first = context->error;
        note_node(joining, hello, r);
    }
    ms_release(context, memory);
    if (first.status) context->error = first;
    else warn_of_crowds(joining);
    return first.status;
}

/* The agents' token. Where the ranks have one, it takes theirs to know that of the agents, which
 * is not sent; otherwise it came through MPI. */
static void make_token(ms_joining *joining)
{
    ms_plan *plan = &joining->plan;
    const uint8_t *token = joining->exchange->token;
    if (token) ms_token_derive(token, plan->salt, plan->options.token);
    else memcpy(plan->options.token, plan->salt, sizeof plan->salt);
}

/* The options of all agents; the first of them is opened now, so that its port is known. */
static ms_status make_plan(ms_joining *joining)
{
    ms_context *context = joining->context;
    ms_agent_options *options = &joining->plan.options;
    const ms_cluster_options *wishes = joining->options;
    options->rendezvous = wishes->rendezvous;
    options->rendezvous.ranks = joining->place->ranks;
    options->init_ns = wishes->init_ns;
    options->lost_ns = wishes->lost_ns;
    options->endpoint.port = wishes->port;
    options->alone = true;
    if (wishes->interface)
        snprintf(options->endpoint.interface, sizeof options->endpoint.interface, "%s",
                 wishes->interface);
    ms_status status = hear_all(joining);
    if (status) return status;
    uint8_t *salt = joining->plan.salt;
    int error = context->os->entropy(context->os->user, salt, sizeof joining->plan.salt);
    if (error) return ms_fail_os(context, error, "cannot make a job's token", NULL);
    make_token(joining);
    status = ms_agent_process_ask(context, joining->agent, options, &joining->served);
    if (status) return status;
    *options = joining->served.options;
    memcpy(joining->way.local_socket, joining->served.local_socket,
           sizeof joining->way.local_socket);
    return MS_OK;
}

/* ------------------------------------------------------------------- each rank */

/* The own error, for the others. It is reported before they hear of it: launchers end all processes
 * when the first one has ended with a code. */
static void write_failure(ms_joining *joining, ms_status status, uint32_t *failed, char *why)
{
    *failed = status;
    if (!status) return;
    snprintf(why, MS_ERROR_MESSAGE_BYTES, "%s", joining->context->error.message);
    if (joining->place->is_told || !joining->options->report) return;
    joining->options->report(joining->options->user, why);
    joining->place->is_told = true;
}

/* A failure that came in a message is reported by its sender. */
static ms_status read_failure(ms_joining *joining, uint32_t failed, char *why)
{
    why[MS_ERROR_MESSAGE_BYTES - 1] = '\0';
    if (!failed) return MS_OK;
    joining->place->is_told = true;
    return ms_fail(joining->context, (ms_status)failed, "%s", why);
}

/* All ranks hear of a failure before the first of them ends: a launcher may end others of its node
 * then, with messages for other nodes that MPI has not sent yet. Each tells rank 0 that it has
 * heard, and is told when all have, or waits a moment in vain. */
static void share_failure(ms_joining *joining)
{
    ms_exchange *exchange = joining->exchange;
    ms_error error = joining->context->error;
    ms_status status = MS_OK;
    ms_exchange_set_limit(exchange, MS_HEARD_NS);
    if (joining->place->rank) {
        status = exchange->send(exchange, 0, &joining->heard, 1);
        if (!status) (void)exchange->receive(exchange, 0, &joining->heard, 1);
    } else {
        for (uint32_t r = 1; r < joining->place->ranks && !status; r++)
            status = exchange->receive(exchange, r, &joining->heard, 1);
        for (uint32_t r = 1; r < joining->place->ranks && !status; r++)
            status = exchange->send(exchange, r, &joining->heard, 1);
    }
    joining->context->error = error;
}

/* Hears what rank 0 says last, a failure or none. */
static ms_status hear_outcome(ms_joining *joining, uint32_t failed, char *why)
{
    ms_status status = read_failure(joining, failed, why);
    if (status) share_failure(joining);
    return status;
}

/* Sends the same to all other ranks; the first failure. The error that was there stays. */
static ms_status tell_all(ms_joining *joining, const void *memory, size_t bytes)
{
    ms_status status = MS_OK;
    ms_exchange *exchange = joining->exchange;
    ms_error error = joining->context->error;
    for (uint32_t r = 1; r < joining->place->ranks; r++) {
        ms_status sent = exchange->send(exchange, r, memory, bytes);
        if (!status) status = sent;
    }
    if (!status) joining->context->error = error;
    return status;
}

/* Rank 0's message to all, which says whether it has failed (status): the first failure. */
static ms_status publish(ms_joining *joining, ms_status status, const void *memory, size_t bytes)
{
    ms_error error = joining->context->error;
    /* The limit of the exchange may have passed. */
    if (status) ms_exchange_set_limit(joining->exchange, MS_HEARD_NS);
    ms_status sent = tell_all(joining, memory, bytes);
    if (!status) return sent;
    joining->context->error = error;
    share_failure(joining);
    return status;
}

/* Hears all ranks, also after one of another version: each waits for the answer. */
static ms_status receive_all(ms_joining *joining)
{
    ms_exchange *exchange = joining->exchange;
    char *refusal = joining->reception.refusal;
    ms_status status = MS_OK;
    for (uint32_t r = 1; r < joining->place->ranks && !status; r++) {
        ms_introduction *theirs = &joining->introductions[r];
        status = exchange->receive(exchange, r, theirs, sizeof *theirs);
        if (!status && !*refusal)
            ms_introduction_compare(&joining->introduction, theirs, r, &joining->reception);
    }
    if (status) return status;
    return *refusal ? ms_fail(joining->context, MS_ERROR_MISMATCH, "%s", refusal) : MS_OK;
}

/* Ranks of different versions find that out by messages that all versions have. */
static ms_status introduce(ms_joining *joining)
{
    char why[MS_ERROR_MESSAGE_BYTES];
    uint32_t failed;
    ms_exchange *exchange = joining->exchange;
    ms_introduction *own = &joining->introduction;
    ms_hello_answer *reception = &joining->reception;
    ms_status status;
    ms_introduction_write(joining->context, own);
    if (joining->place->rank == 0) {
        status = receive_all(joining);
        write_failure(joining, status, &failed, why);
        if (status) snprintf(reception->refusal, sizeof reception->refusal, "%.500s", why);
        return publish(joining, status, reception, sizeof *reception);
    }
    status = exchange->send(exchange, 0, own, sizeof *own);
    if (!status) status = exchange->receive(exchange, 0, reception, sizeof *reception);
    if (status || !*reception->refusal) return status;
    snprintf(why, sizeof why, "%.*s", (int)sizeof reception->refusal - 1, reception->refusal);
    return hear_outcome(joining, MS_ERROR_MISMATCH, why);
}

/* Tells all ranks the plan, or why there is none; or hears it. */
static ms_status share_plan(ms_joining *joining)
{
    ms_plan *plan = &joining->plan;
    ms_exchange *exchange = joining->exchange;
    ms_status status = MS_OK;
    if (joining->place->rank) {
        status = exchange->send(exchange, 0, &joining->hello, sizeof joining->hello);
        if (!status) status = exchange->receive(exchange, 0, plan, sizeof *plan);
        if (!status) make_token(joining);
        return status ? status : hear_outcome(joining, plan->failed, plan->why);
    }
    status = make_plan(joining);
    write_failure(joining, status, &plan->failed, plan->why);
    memset(plan->options.token, 0, sizeof plan->options.token);
    status = publish(joining, status, plan, sizeof *plan);
    if (!status) make_token(joining);
    return status;
}

static uint32_t first_rank_of(const ms_joining *joining, uint32_t node)
{
    uint32_t first = 0;
    while (joining->plan.options.node_of[first] != node) first++;
    return first;
}

/* Rank 0 hears the way in of each node, also after one that has none, and tells all ranks theirs,
 * or why there is none. */
static ms_status pass_ways_on(ms_joining *joining)
{
    const ms_agent_options *options = &joining->plan.options;
    ms_exchange *exchange = joining->exchange;
    ms_status status = MS_OK;
    joining->ways[0] = joining->way;
    for (uint32_t h = 1; h < options->nodes && !status; h++)
        status = exchange->receive(exchange, first_rank_of(joining, h), &joining->ways[h],
                                   sizeof joining->ways[h]);
    for (uint32_t h = 1; h < options->nodes && !status; h++)
        status = read_failure(joining, joining->ways[h].failed, joining->ways[h].why);
    write_failure(joining, status, &joining->way.failed, joining->way.why);
    ms_error error = joining->context->error;
    for (uint32_t r = 1; r < joining->place->ranks; r++) {
        const ms_way_in *way = status ? &joining->way : &joining->ways[options->node_of[r]];
        ms_status sent = exchange->send(exchange, r, way, sizeof *way);
        if (status) joining->context->error = error;
        else status = sent;
    }
    if (joining->way.failed) share_failure(joining);
    return status;
}

/* The first rank of a node makes its forked process the agent, unless it is rank 0, which has done
 * so. */
static ms_status find_way_in(ms_joining *joining)
{
    ms_agent_options *options = &joining->plan.options;
    ms_way_in *way = &joining->way;
    ms_exchange *exchange = joining->exchange;
    uint32_t rank = joining->place->rank;
    options->node = options->node_of[rank];
    if (rank == 0) return pass_ways_on(joining);
    ms_status failed = MS_OK;
    if (options->node > 0 && first_rank_of(joining, options->node) == rank) {
        failed = ms_agent_process_ask(joining->context, joining->agent, options, &joining->served);
        memcpy(way->local_socket, joining->served.local_socket, sizeof way->local_socket);
        write_failure(joining, failed, &way->failed, way->why);
        ms_error error = joining->context->error;
        ms_status status = exchange->send(exchange, 0, way, sizeof *way);
        if (status && !failed) return status;
        joining->context->error = error;
    }
    ms_error error = joining->context->error;
    ms_status status = exchange->receive(exchange, 0, way, sizeof *way);
    if (!failed) return status ? status : hear_outcome(joining, way->failed, way->why);
    joining->context->error = error;
    share_failure(joining);
    return failed;
}

/* Where the local socket closes, the rank that forked the agent knows why, and the others say
 * nothing. */
static ms_status enter(ms_joining *joining)
{
    ms_cluster_place *place = joining->place;
    const ms_os *os = joining->context->os;
    const ms_agent_options *options = &joining->plan.options;
    joining->way.local_socket[sizeof joining->way.local_socket - 1] = '\0';
    ms_status status = ms_cluster_enter(joining->context, joining->way.local_socket, place->rank,
                                        place->ranks, 2 * options->init_ns, &place->rendezvous);
    if (status && first_rank_of(joining, options->node) == place->rank)
        return ms_agent_process_why(joining->context, joining->agent, options, status);
    if (status) {
        place->is_told = true;
        return status;
    }
    /* A process that is not needed ends now. */
    os->close(os->user, joining->agent);
    joining->exchange->end(joining->exchange, ms_shm_files_of(place->rendezvous));
    place->nodes = options->nodes;
    place->plan = *options;
    snprintf(place->node, sizeof place->node, "%s", options->names[options->node]);
    return MS_OK;
}

/* ---------------------------------------------------------------------- joining */

static bool has_mpi(const ms_context *context, const ms_launcher *launcher)
{
    const char *master = context->os->environment(context->os->user, "MOONSHARD_MASTER");
    return launcher->kind != MS_LAUNCHER_TORCHRUN && !(master && *master);
}

ms_status ms_cluster_launched(ms_context *context, ms_launched *out)
{
    ms_launcher launcher;
    memset(out, 0, sizeof *out);
    ms_status status = ms_launcher_find(context, &launcher);
    if (status || launcher.kind == MS_LAUNCHER_NONE) return status;
    /* One rank alone needs no job, but for the process that has asked for it on a node. */
    if (launcher.size == 1 && !context->os->environment(context->os->user, MS_STARTER_VARIABLE))
        return MS_OK;
    snprintf(out->name, sizeof out->name, "%s", launcher.name);
    out->rank = launcher.rank;
    out->size = launcher.size == MS_UNKNOWN ? 0 : launcher.size;
    out->local_rank = launcher.local_rank == MS_UNKNOWN ? out->size : launcher.local_rank;
    out->has_mpi = has_mpi(context, &launcher);
    return MS_OK;
}

/* A launcher ends this process in the meantime, where rank 0 has failed with the same error. */
static void let_first_report(const ms_joining *joining, const ms_launcher *launcher,
                             ms_status status)
{
    const ms_os *os = joining->context->os;
    ms_word never = 0;
    uint64_t now = os->monotonic_ns(os->user), limit = now,
             moment = status == MS_ERROR_TIMEOUT ? MS_LATE_FIRST_NS : MS_FIRST_NS;
    if (launcher->rank > 0) limit += launcher->local_rank > 0 ? 2 * moment : moment;
    for (; now < limit; now = os->monotonic_ns(os->user)) ms_futex_wait(&never, 0, limit - now);
}

/* Before the exchange each rank is alone with its error; the first process of each node reports.
 * MS_ERROR_STATE is an error that no other process has. */
static ms_status meet(ms_joining *joining)
{
    ms_launcher launcher;
    ms_cluster_place *place = joining->place;
    ms_status status = ms_launcher_find(joining->context, &launcher);
    if (status) return status;
    bool over_mpi = has_mpi(joining->context, &launcher);
    place->is_told =
        launcher.local_rank != MS_UNKNOWN ? launcher.local_rank > 0 : launcher.rank > 0;
    status = (over_mpi ? ms_exchange_over_mpi : ms_exchange_over_tcp)(
        joining->context, joining->options, &launcher, place, &joining->exchange);
    if (!status) place->is_told = false;
    else if (status != MS_ERROR_STATE) let_first_report(joining, &launcher, status);
    return status;
}

ms_status ms_cluster_join(ms_context *context, const ms_cluster_options *options,
                          ms_cluster_place *out)
{
    void *memory = NULL;
    memset(out, 0, sizeof *out);
    ms_status status = ms_allocate(context, sizeof(ms_joining), "joining", &memory);
    if (status) return status;
    ms_joining *joining = memory;
    joining->context = context;
    joining->options = options;
    joining->place = out;
    int error = context->os->shared_adopt(context->os->user, options->agent, &joining->agent);
    if (error) return ms_fail_os(context, error, "cannot speak to the keeper to be", NULL);
    status = meet(joining);
    if (status) return status;
    ms_rank_hello_write(context, options, joining->exchange->wrong, &joining->hello);
    status = introduce(joining);
    if (!status) status = share_plan(joining);
    if (!status) status = find_way_in(joining);
    if (!status) status = enter(joining);
    if (!status) ms_release(context, joining);
    return status;
}
