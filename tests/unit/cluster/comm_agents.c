/* comm_agents.c: agents of several hosts in one process, with ranks that are threads: numbers
 * that hosts share, ids of groups, requests, the cause of the end, deadlocks, hosts that are lost,
 * and strangers at the port. Tensors do not move here. */
#include "comm/control/cluster/state.h"

#include <stdatomic.h>

#include "comm/control/shm/bell.h"
#include "comm/control/shm/ledger.h"
#include "comm/control/shm/call_record.h"
#include "comm/control/shm/wait.h"
#include "comm/group.h"
#include "comm/transport_table.h"
#include "comm_support.h"
#include "proof_support.h"

#define HOSTS_MOST 3

typedef struct cluster cluster;
typedef struct member {
    cluster *of;
    uint32_t number;
    ms_context context;
    ms_engine *engine;
    ms_group *world;
    char why[2048];
    ms_error error;
    ms_status status;
    uint64_t met_before; /* serial number of the step before which a request was met */
    pthread_t thread;
} member;

struct cluster {
    uint32_t ranks, nodes;
    ms_agent_options options[HOSTS_MOST];
    ms_context contexts[HOSTS_MOST];
    ms_agent *agents[HOSTS_MOST];
    pthread_t gathering[HOSTS_MOST];
    ms_status gathered[HOSTS_MOST];
    const ms_transport *transport; /* NULL: that of one host */
    const ms_os *os;               /* of the first host's agent; NULL: that of all others */
    void (*run)(member *self);
    member members[8];
    _Atomic uint32_t arrived, released;
};

#define MUST(condition)                                                                     \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            if (!*self->why)                                                                \
                snprintf(self->why, sizeof self->why, "%s:%d: rank %u: %s; last error: %s", \
                         __FILE__, __LINE__, self->number, #condition,                      \
                         self->engine ? ms_engine_error(self->engine)->message              \
                                      : self->context.error.message);                       \
            return;                                                                         \
        }                                                                                   \
    } while (0)

static void quiet(void *user, ms_log_level level, const char *message)
{
    (void)user;
    (void)level;
    (void)message;
}

/* ms_transport_local has the tasks of tensors, which these tests do not use. */
static void enter(member *self)
{
    ms_rendezvous *rendezvous = NULL;
    uint32_t node = self->of->options[0].node_of[self->number];
    ms_engine_options options = { .threads = 1, .memory_bytes = 64 << 20, .strict = true };
    ms_context_init(&self->context, NULL);
    self->context.log = quiet;
    MUST(ms_cluster_enter(&self->context, ms_agent_socket_path(self->of->agents[node]),
                          self->number, self->of->ranks, HANG_NS, &rendezvous)
         == MS_OK);
    MUST(ms_engine_new(&options, &self->error, &self->engine) == MS_OK);
    ms_membership membership = { .control = &ms_control_cluster,
                                 .transport = self->of->transport ? self->of->transport
                                                                  : &ms_transport_local,
                                 .rendezvous = rendezvous,
                                 .rank = self->number,
                                 .size = self->of->ranks };
    MUST(ms_comm_new(self->engine, &membership, &self->world) == MS_OK);
    ms_rendezvous_release(rendezvous);
    self->of->run(self);
}

static void *member_thread(void *argument)
{
    member *self = argument;
    enter(self);
    if (self->engine && *self->why) ms_comm_leave(self->engine, self->why);
    ms_engine_free(self->engine);
    return NULL;
}

static void *gather_thread(void *argument)
{
    struct {
        cluster *of;
        uint32_t node;
    } *what = argument;
    cluster *of = what->of;
    of->gathered[what->node] = ms_agent_gather(of->agents[what->node], &of->options[what->node]);
    return NULL;
}

/* Rank r is on node_of[r]. */
static void begin(cluster *of, uint32_t ranks, const uint16_t *node_of)
{
    of->ranks = ranks;
    for (uint32_t r = 0; r < ranks; r++)
        if (node_of[r] + 1u > of->nodes) of->nodes = node_of[r] + 1u;
    for (uint32_t h = 0; h < of->nodes; h++) {
        ms_agent_options *options = &of->options[h];
        *options = (ms_agent_options){ .rendezvous = { .ranks = ranks,
                                                       .threads = 1,
                                                       .heap_bytes = 8 << 20,
                                                       .timeout_ns = HANG_NS },
                                       .nodes = of->nodes,
                                       .node = h,
                                       .endpoint = { .interface = "lo" },
                                       .init_ns = HANG_NS,
                                       .lost_ns = 1000000000u };
        memset(options->token, 7, sizeof options->token);
        for (uint32_t r = 0; r < ranks; r++) options->node_of[r] = node_of[r];
        for (uint32_t k = 0; k < of->nodes; k++)
            snprintf(options->names[k], sizeof options->names[k], "host%c", (char)('a' + k));
        if (h) options->endpoint = of->options[0].endpoint;
        ms_context_init(&of->contexts[h], h ? NULL : of->os);
        of->contexts[h].log = quiet;
        if (ms_agent_open(&of->contexts[h], options, &of->agents[h]))
            fail_msg("keeper %u: %s", h, of->contexts[h].error.message);
    }
}

/* Starts the agents' meeting, and the ranks. */
static void start(cluster *of, void (*run)(member *))
{
    static struct {
        cluster *of;
        uint32_t node;
    } what[HOSTS_MOST];
    of->run = run;
    for (uint32_t h = 0; h < of->nodes; h++) {
        what[h].of = of;
        what[h].node = h;
        assert_int_equal(pthread_create(&of->gathering[h], NULL, gather_thread, &what[h]), 0);
    }
    for (uint32_t r = 0; r < of->ranks; r++) {
        of->members[r].of = of;
        of->members[r].number = r;
        assert_int_equal(
            pthread_create(&of->members[r].thread, NULL, member_thread, &of->members[r]), 0);
    }
    for (uint32_t h = 0; h < of->nodes; h++) {
        pthread_join(of->gathering[h], NULL);
        if (of->gathered[h]) fail_msg("keeper %u: %s", h, of->contexts[h].error.message);
    }
}

/* Each agent waits for the goodbye of the others. */
static void finish_agents(const cluster *of)
{
    pthread_t closing[HOSTS_MOST];
    for (uint32_t h = 0; h < of->nodes; h++)
        pthread_create(&closing[h], NULL, (void *(*)(void *))(void (*)(void))ms_agent_finish,
                       of->agents[h]);
    for (uint32_t h = 0; h < of->nodes; h++) pthread_join(closing[h], NULL);
}

/* Ranks end, then agents. */
static void finish(cluster *of, bool well)
{
    for (uint32_t r = 0; r < of->ranks; r++) pthread_join(of->members[r].thread, NULL);
    finish_agents(of);
    for (uint32_t h = 0; h < of->nodes; h++) ms_agent_close(of->agents[h]);
    for (uint32_t r = 0; r < of->ranks && well; r++)
        if (*of->members[r].why) fail_msg("%s", of->members[r].why);
}

/* ------------------------------------------------------------------- numbers */

static const uint16_t two_by_two[] = { 0, 0, 1, 1 }, one_and_three[] = { 0, 1, 1, 1 },
                      three_alone[] = { 0, 1, 2 }, mixed[] = { 0, 1, 0, 2 };

static void share_numbers(member *self)
{
    enum { COUNT = 700 }; /* more than one piece */
    int64_t mine[COUNT], sum[COUNT];
    static _Thread_local int64_t all[COUNT * 8];
    uint32_t ranks = self->of->ranks;
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < COUNT; i++) mine[i] = (int64_t)self->number * 1000 + i + round;
        ms_sharing gather = { .kind = MS_ALL_GATHER, .dtype = MS_I64, .count = COUNT };
        MUST(ms_group_share(self->world, &gather, mine, all) == MS_OK);
        for (uint32_t r = 0; r < ranks; r++)
            for (int i = 0; i < COUNT; i++)
                MUST(all[r * COUNT + i] == (int64_t)r * 1000 + i + round);
        ms_sharing add = {
            .kind = MS_ALL_REDUCE, .op = MS_REDUCE_OP_SUM, .dtype = MS_I64, .count = COUNT
        };
        MUST(ms_group_share(self->world, &add, mine, sum) == MS_OK);
        for (int i = 0; i < COUNT; i++)
            MUST(sum[i]
                 == (int64_t)(ranks * (ranks - 1) / 2 * 1000) + (i + round) * (int64_t)ranks);
        ms_sharing from_last = {
            .kind = MS_BROADCAST, .root = ranks - 1, .dtype = MS_I64, .count = COUNT
        };
        MUST(ms_group_share(self->world, &from_last, mine, sum) == MS_OK);
        MUST(sum[3] == (int64_t)(ranks - 1) * 1000 + 3 + round);
    }
    /* Groups of other hosts get other numbers; numbers are shared in each. */
    ms_group *part = NULL;
    uint32_t members[2][8], sizes[2] = { 0 };
    for (uint32_t r = 0; r < ranks; r++) members[r % 2][sizes[r % 2]++] = r;
    memcpy(members[0] + sizes[0], members[1], sizes[1] * sizeof(uint32_t));
    MUST(ms_group_split(self->world, 2, sizes, members[0], &part) == MS_OK);
    int64_t one = self->number, total = -1, expected = 0;
    ms_sharing add = { .kind = MS_ALL_REDUCE, .op = MS_REDUCE_OP_SUM, .dtype = MS_I64, .count = 1 };
    for (uint32_t r = self->number % 2; r < ranks; r += 2) expected += r;
    MUST(ms_group_share(part, &add, &one, &total) == MS_OK);
    MUST(total == expected);
}

static void test_numbers(void **state)
{
    (void)state;
    const struct {
        uint32_t ranks;
        const uint16_t *node_of;
    } layouts[] = { { 4, two_by_two }, { 4, one_and_three }, { 3, three_alone }, { 4, mixed } };
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        cluster of = { 0 };
        begin(&of, layouts[i].ranks, layouts[i].node_of);
        start(&of, share_numbers);
        finish(&of, true);
    }
}

/* ------------------------------------------------------------------ requests */

/* Ranks step at their own pace; each notes the step before which it meets the request. */
static void step_on(member *self)
{
    uint8_t values[MS_REQUESTS];
    for (uint64_t serial = 1; serial < 4000 && !self->met_before; serial++) {
        ms_comm_step(self->engine, serial, (int64_t)serial, values);
        if (values[MS_REQUEST_SAVE]) self->met_before = serial;
        if (values[MS_REQUEST_SAVE]) MUST(values[MS_REQUEST_SAVE] == 12);
        if (serial == 40 && self->number == self->of->ranks - 1) {
            uint32_t node = self->of->options[0].node_of[self->number];
            ms_rendezvous_request(ms_agent_rendezvous(self->of->agents[node]), MS_REQUEST_SAVE, 12);
        }
        /* As ranks that train do: no rank is more than a step ahead. */
        int64_t number = (int64_t)serial;
        ms_sharing same = { .kind = MS_BROADCAST, .dtype = MS_I64, .count = 1 };
        MUST(ms_group_share(self->world, &same, &number, &number) == MS_OK);
    }
}

static void test_requests_are_met_before_one_step(void **state)
{
    (void)state;
    cluster of = { 0 };
    begin(&of, 4, two_by_two);
    start(&of, step_on);
    finish(&of, true);
    assert_true(of.members[0].met_before > 0);
    for (uint32_t r = 1; r < 4; r++)
        assert_int_equal(of.members[r].met_before, of.members[0].met_before);
}

/* ------------------------------------------------------------------- the end */

/* Two ranks of different hosts end the job at the same time: all report one of the two causes. */
static void end_together(member *self)
{
    int64_t number = 1;
    ms_sharing same = { .kind = MS_ALL_REDUCE, .dtype = MS_I64, .count = 1 };
    self->status = ms_group_share(self->world, &same, &number, &number);
    if (self->number % 3 == 0) {
        char text[64];
        snprintf(text, sizeof text, "trouble on rank %u", self->number);
        ms_comm_leave(self->engine, text);
    }
    for (int i = 0; i < 1000 && !self->status; i++)
        self->status = ms_group_share(self->world, &same, &number, &number);
    self->error = *ms_engine_error(self->engine);
}

static void test_hosts_agree_on_the_cause(void **state)
{
    (void)state;
    for (int round = 0; round < 10; round++) {
        cluster of = { 0 };
        begin(&of, 4, two_by_two);
        start(&of, end_together);
        finish(&of, true);
        for (uint32_t r = 0; r < 4; r++) {
            assert_int_equal(of.members[r].status, MS_ERROR_ABORTED);
            assert_non_null(strstr(of.members[r].error.message, "trouble on rank "));
            assert_string_equal(of.members[r].error.message, of.members[0].error.message);
        }
    }
}

/* Each host's ranks wait for the other's in another group. */
static void wait_crosswise(member *self)
{
    ms_group *first = NULL, *second = NULL;
    const uint32_t all[] = { 0, 1, 2, 3 }, size = 4;
    MUST(ms_group_split(self->world, 1, &size, all, &first) == MS_OK);
    MUST(ms_group_split(self->world, 1, &size, all, &second) == MS_OK);
    int64_t number = 1;
    ms_sharing same = { .kind = MS_ALL_REDUCE, .dtype = MS_I64, .count = 1 };
    ms_group *mine = self->of->options[0].node_of[self->number] ? first : second;
    self->status = ms_group_share(mine, &same, &number, &number);
    self->error = *ms_engine_error(self->engine);
}

static void test_deadlocks_over_hosts_are_found(void **state)
{
    (void)state;
    cluster of = { 0 };
    begin(&of, 4, two_by_two);
    start(&of, wait_crosswise);
    finish(&of, true);
    for (uint32_t r = 0; r < 4; r++) {
        if (of.members[r].status != MS_ERROR_MISMATCH) fail_msg("%s", of.members[r].error.message);
        assert_non_null(strstr(of.members[r].error.message, "the ranks wait for each other"));
        assert_non_null(strstr(of.members[r].error.message, "rank 3 on host hostb: all_reduce"));
    }
}

/* A call that a rank has entered when all members have, as far as its host knows. */
static ms_task_result enter_and_leave(ms_run *run, void *arguments)
{
    const ms_comm_args *args = arguments;
    ms_shm_rank *self = args->group->comm->control_state;
    if (!ms_ledger_enter(self, args)) return ms_shm_fail(run, self, args);
    ms_ledger_landed(self, args->group->channels[args->channel].flight);
    return MS_TASK_DONE;
}
static const ms_task entering[MS_COLLECTIVES] = MS_COMM_TASKS(enter_and_leave);

static void enter_in_a_part(member *self)
{
    ms_group *part = NULL;
    const uint32_t all[] = { 0, 1, 2, 3 }, size = 4;
    MUST(ms_group_split(self->world, 1, &size, all, &part) == MS_OK);
    self->status = ms_group_barrier(part, 0);
    self->error = *ms_engine_error(self->engine);
}

/* Whether the job has ended, or each rank has stood still for so many looks: the agents make an
 * attempt to find a deadlock every eight. */
static bool have_waited(const cluster *of, uint32_t looks)
{
    for (uint32_t r = 0; r < of->ranks; r++) {
        const ms_control_file *control = of->agents[of->options[0].node_of[r]]->control;
        if (ms_shm_ended(control)) return true;
        if ((uint32_t)atomic_load(&control->lines[r].still) < looks) return false;
    }
    return true;
}

/* What each rank has entered becomes known on the other hosts. */
static void deliver(const cluster *of, uint32_t group)
{
    for (uint32_t h = 0; h < of->nodes; h++)
        for (uint32_t c = 0; c < MS_CHANNELS; c++)
            for (uint32_t r = 0; r < of->ranks; r++) {
                uint32_t at = of->options[0].node_of[r];
                if (at == h) continue;
                const ms_member_line *from = ms_member(of->agents[at]->files, group, c, r);
                ms_member_line *to = ms_member(of->agents[h]->files, group, c, r);
                for (int s = 0; s < 2; s++) {
                    uint64_t number = atomic_load(&from->slots[s].seq);
                    if (!number) continue;
                    memcpy((char *)&to->slots[s] + sizeof number,
                           (const char *)&from->slots[s] + sizeof number,
                           sizeof to->slots[s] - sizeof number);
                    atomic_store(&to->slots[s].seq, number);
                }
            }
    for (uint32_t h = 0; h < of->nodes; h++)
        for (uint32_t r = 0; r < of->ranks; r++)
            if (of->options[0].node_of[r] == h) ms_shm_wake_line(&of->agents[h]->control->lines[r]);
}

/* All have entered a call of a group for which a rank of the first host has asked, and what tells
 * the other hosts is under way. */
static void test_a_message_under_way_is_no_deadlock(void **state)
{
    (void)state;
    static ms_transport slow;
    const struct timespec pause = { .tv_nsec = 1000000 };
    cluster of = { .transport = &slow };
    slow = ms_transport_local;
    slow.tasks = entering;
    begin(&of, 4, two_by_two);
    start(&of, enter_in_a_part);
    while (!have_waited(&of, 20)) nanosleep(&pause, NULL);
    deliver(&of, 1);
    finish(&of, true);
    for (uint32_t r = 0; r < 4; r++)
        if (of.members[r].status) fail_msg("%s", of.members[r].error.message);
}

/* A rank returns while the others go on. */
static void leave_early(member *self)
{
    int64_t number = 1;
    ms_sharing same = { .kind = MS_ALL_REDUCE, .dtype = MS_I64, .count = 1 };
    for (int i = 0; i < 10; i++) {
        if (i == 5 && self->number == 3) return;
        self->status = ms_group_share(self->world, &same, &number, &number);
        if (self->status) break;
    }
    self->error = *ms_engine_error(self->engine);
}

static void test_ranks_that_leave_early_are_named(void **state)
{
    (void)state;
    cluster of = { 0 };
    begin(&of, 4, two_by_two);
    start(&of, leave_early);
    finish(&of, true);
    for (uint32_t r = 0; r < 3; r++) {
        assert_int_not_equal(of.members[r].status, MS_OK);
        assert_non_null(strstr(of.members[r].error.message, "rank 3"));
    }
}

/* What rank 0 tells its agent is held back until it may pass. */
static cluster *held;
static _Atomic bool may_pass;
static int64_t receive_held(void *user, ms_file *socket, void *message, size_t bytes,
                            uint64_t timeout_ns, ms_file **files, uint32_t files_most,
                            uint32_t *files_count)
{
    const ms_os *os = ms_os_posix();
    int64_t got = os->socket_receive(user, socket, message, bytes, timeout_ns, files, files_most,
                                     files_count);
    if (socket == held->agents[0]->connections[0].socket)
        while (!atomic_load(&may_pass)) sched_yield();
    return got;
}

/* Ranks 0 and 2 enqueue a call and leave while it runs. Rank 1, on the host of rank 0, only leaves,
 * after rank 0. */
static void leave_during_a_call(member *self)
{
    ms_group *part = NULL;
    const uint32_t all[] = { 0, 2, 1 }, sizes[] = { 2, 1 };
    ms_point ready;
    ms_collective barrier = { .kind = MS_BARRIER, .bucket = -1 };
    MUST(ms_group_split(self->world, 2, sizes, all, &part) == MS_OK);
    atomic_fetch_add(&self->of->arrived, 1);
    while (!atomic_load(&self->of->released)) sched_yield();
    if (self->number != 1) MUST(ms_group_enqueue(part, 1, &barrier, &ready) == MS_OK);
    const ms_control_file *control = self->of->agents[0]->control;
    while (self->number == 1 && !atomic_load(&control->lines[0].gone)) sched_yield();
    ms_comm_leave(self->engine, NULL);
    if (self->number != 1) self->status = ms_point_sync(self->engine, ready);
    self->error = *ms_engine_error(self->engine);
}

static bool has_entered(const cluster *of, uint32_t group, uint32_t number)
{
    const ms_shm_files *files = of->agents[of->options[0].node_of[number]]->files;
    for (uint32_t c = 0; c < MS_CHANNELS; c++)
        if (atomic_load(&ms_member(files, group, c, number)->slots[1].seq)) return true;
    return false;
}

/* Rank 0 leaves, and its process ends, before the agent has passed on what it has told of its
 * calls: until then other hosts hear of neither. The agent shows the lines of its ranks in their
 * order, so when the other host hears of the end of rank 1, all that it may know of rank 0 has
 * come. */
static void test_the_calls_of_a_rank_come_before_its_end(void **state)
{
    (void)state;
    static ms_transport slow;
    slow = ms_transport_local;
    slow.tasks = entering;
    ms_os os = *ms_os_posix();
    os.socket_receive = receive_held;
    cluster of = { .os = &os, .transport = &slow };
    held = &of;
    atomic_store(&may_pass, true);
    begin(&of, 3, (const uint16_t[]){ 0, 0, 1 });
    start(&of, leave_during_a_call);
    while (atomic_load(&of.arrived) < 3) sched_yield();
    atomic_store(&may_pass, false);
    atomic_store(&of.released, 1);
    ms_rank_line *lines = of.agents[0]->control->lines, *copies = of.agents[1]->control->lines;
    for (uint32_t r = 0; r < 2; r++) {
        while (!atomic_load(&lines[r].finished)) sched_yield();
        ms_rendezvous_left(ms_agent_rendezvous(of.agents[0]), r);
    }
    while (!atomic_load(&copies[1].gone)) sched_yield();
    while (!has_entered(&of, 1, 0) || !has_entered(&of, 1, 2)) sched_yield();
    uint32_t finished = atomic_load(&copies[0].finished), gone = atomic_load(&copies[0].gone);
    deliver(&of, 1);
    for (uint32_t r = 0; r < 3; r++) pthread_join(of.members[r].thread, NULL);
    atomic_store(&may_pass, true);
    while (!atomic_load(&copies[0].gone)) sched_yield();
    finish_agents(&of);
    const ms_member_line *line = ms_member(of.agents[1]->files, 1, 0, 0);
    uint64_t calls = atomic_load(&line->issued);
    for (uint32_t h = 0; h < 2; h++) ms_agent_close(of.agents[h]);
    for (uint32_t r = 0; r < 3; r++) {
        if (*of.members[r].why) fail_msg("%s", of.members[r].why);
        if (of.members[r].status) fail_msg("rank %u: %s", r, of.members[r].error.message);
    }
    assert_int_equal(finished, MS_UNFINISHED);
    assert_int_equal(gone, 0);
    assert_int_equal(calls, 1);
}

/* ------------------------------------------------------------- hosts and strangers */

static void wait_for_the_end(member *self)
{
    int64_t number = 1;
    ms_sharing same = { .kind = MS_ALL_REDUCE, .dtype = MS_I64, .count = 1 };
    MUST(ms_group_share(self->world, &same, &number, &number) == MS_OK);
    atomic_fetch_add(&self->of->arrived, 1);
    if (self->number >= 2) {
        while (!atomic_load(&self->of->released)) sched_yield();
        return;
    }
    self->status = ms_group_share(self->world, &same, &number, &number);
    self->error = *ms_engine_error(self->engine);
}

/* Its connection breaks, as when the process of the agent is killed. */
static void test_a_host_that_is_lost_is_named(void **state)
{
    (void)state;
    cluster of = { 0 };
    begin(&of, 4, two_by_two);
    start(&of, wait_for_the_end);
    while (atomic_load(&of.arrived) < 4) sched_yield();
    const ms_os *os = of.agents[1]->os;
    os->socket_end(os->user, of.agents[1]->peers[0].socket);
    pthread_join(of.members[0].thread, NULL);
    atomic_store(&of.released, 1);
    of.members[0].thread = of.members[1].thread;
    pthread_join(of.members[1].thread, NULL);
    for (uint32_t r = 0; r < 2; r++) {
        assert_int_equal(of.members[r].status, MS_ERROR_ABORTED);
        assert_non_null(strstr(of.members[r].error.message, "host hostb (ranks 2, 3) is lost"));
    }
    for (uint32_t r = 2; r < 4; r++) pthread_join(of.members[r].thread, NULL);
    for (uint32_t h = 0; h < 2; h++) ms_agent_finish(of.agents[h]);
    for (uint32_t h = 0; h < 2; h++) ms_agent_close(of.agents[h]);
}

/* A crowd that says nothing or a part, noise, a hello without a proof, and one with a wrong token,
 * while the hosts meet: each connection is closed, and the job begins and ends as if they had not
 * been there. */
static void test_strangers_are_turned_away(void **state)
{
    (void)state;
    enum { STRANGERS = 100 };
    cluster of = { 0 };
    begin(&of, 4, two_by_two);
    struct {
        ms_frame_head head;
        ms_hello_body body;
    } hello = {
        .head = { .magic = MS_FRAME_MAGIC, .kind = MS_FRAME_HELLO, .bytes = sizeof(ms_hello_body) },
        .body = { .version = MS_VERSION, .node = 1, .nodes = 2, .ranks = 4 }
    };
    ms_greeting greeting = greeting_of(MS_PORT_AGENT, 1);
    int connections[STRANGERS];
    for (int i = 0; i < STRANGERS; i++) connections[i] = connect_here(of.options[0].endpoint.port);
    assert_true(send_whole(connections[0], "GET / HTTP/1.0\r\n\r\n", 18));
    assert_true(send_whole(connections[1], &hello, sizeof hello));
    shutdown(connections[1], SHUT_WR);
    shutdown(connections[2], SHUT_WR);
    for (int i = 3; i < STRANGERS; i += 2)
        assert_true(send_whole(connections[i], &greeting, 1 + (size_t)i % 43));
    /* This one greets as an agent, and has no answer. */
    assert_true(send_whole(connections[4], &greeting, sizeof greeting));
    assert_true(send_whole(connections[4], &greeting, sizeof greeting));
    start(&of, share_numbers);
    finish(&of, true);
    for (int i = 0; i < STRANGERS; i++) {
        char bytes[256];
        size_t count = 0;
        for (ssize_t got = 1; got > 0; count += got > 0 ? (size_t)got : 0)
            got = recv(connections[i], bytes, sizeof bytes, 0);
        assert_true(count <= sizeof(ms_challenge));
        close(connections[i]);
    }
}

/* Another program has the port, and makes up a proof. */
static void *pretend(void *argument)
{
    const int *listener = argument;
    static char sent[512];
    static size_t count;
    ms_challenge challenge = { .magic = MS_GREETING_MAGIC };
    int connection = accept(*listener, NULL, NULL);
    (void)send_whole(connection, &challenge, sizeof challenge);
    (void)send_whole(connection, challenge.nonce, sizeof challenge.nonce);
    count = 0;
    for (ssize_t got = 1; got > 0; count += got > 0 ? (size_t)got : 0)
        got = recv(connection, sent + count, sizeof sent - count, 0);
    close(connection);
    return &count;
}

static void test_a_false_first_agent_is_found(void **state)
{
    (void)state;
    cluster of = { 0 };
    uint16_t port = 0;
    pthread_t thread;
    void *count = NULL;
    begin(&of, 2, (const uint16_t[]){ 0, 1 });
    int listener = listen_here(&port);
    assert_int_equal(pthread_create(&thread, NULL, pretend, &listener), 0);
    of.options[1].endpoint = (ms_endpoint){ .port = port, .address_count = 1 };
    strcpy(of.options[1].endpoint.addresses[0], "127.0.0.1");
    assert_int_equal(ms_agent_gather(of.agents[1], &of.options[1]), MS_ERROR_ABORTED);
    assert_non_null(
        strstr(of.contexts[1].error.message,
               "of host hosta has not proven to host hostb that it has this job's token"));
    for (uint32_t h = 0; h < 2; h++) ms_agent_close(of.agents[h]);
    pthread_join(thread, &count);
    assert_int_equal(*(size_t *)count, sizeof(ms_greeting) + MS_ANSWER_BYTES);
    close(listener);
}

/* An agent with a wrong token gets no answer to it, and says so. */
static void test_a_wrong_token_is_refused(void **state)
{
    (void)state;
    cluster of = { 0 };
    begin(&of, 3, three_alone);
    of.options[0].init_ns = 500000000;
    for (uint32_t h = 0; h < 3; h++) of.agents[h]->init_ns = 500000000;
    of.agents[2]->token[5] ^= 1;
    pthread_t threads[3];
    struct {
        cluster *of;
        uint32_t node;
    } what[3];
    for (uint32_t h = 0; h < 3; h++) {
        what[h].of = &of;
        what[h].node = h;
        assert_int_equal(pthread_create(&threads[h], NULL, gather_thread, &what[h]), 0);
    }
    for (uint32_t h = 0; h < 3; h++) pthread_join(threads[h], NULL);
    assert_int_equal(of.gathered[0], MS_ERROR_TIMEOUT);
    assert_non_null(strstr(of.contexts[0].error.message, "these hosts have not reached port"));
    assert_non_null(strstr(of.contexts[0].error.message, ": hostc;"));
    assert_int_not_equal(of.gathered[2], MS_OK);
    assert_non_null(strstr(of.contexts[2].error.message, "token"));
    for (uint32_t h = 0; h < 3; h++) ms_agent_close(of.agents[h]);
}

static void test_interfaces_and_ports(void **state)
{
    (void)state;
    cluster of = { 0 };
    begin(&of, 2, (const uint16_t[]){ 0, 1 });
    ms_agent_options options = of.options[0];
    ms_agent *agent = NULL;
    ms_context context;
    ms_context_init(&context, NULL);
    assert_int_equal(ms_agent_open(&context, &options, &agent), MS_ERROR_EXISTS);
    assert_non_null(strstr(context.error.message, "is in use: choose another one (--port)"));
    strcpy(options.endpoint.interface, "none7");
    assert_int_equal(ms_agent_open(&context, &options, &agent), MS_ERROR_ARGUMENT);
    assert_non_null(strstr(context.error.message, "no interface 'none7'"));
    for (uint32_t h = 0; h < 2; h++) ms_agent_close(of.agents[h]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_requests_are_met_before_one_step),
        cmocka_unit_test(test_hosts_agree_on_the_cause),
        cmocka_unit_test(test_deadlocks_over_hosts_are_found),
        cmocka_unit_test(test_a_message_under_way_is_no_deadlock),
        cmocka_unit_test(test_ranks_that_leave_early_are_named),
        cmocka_unit_test(test_the_calls_of_a_rank_come_before_its_end),
        cmocka_unit_test(test_a_host_that_is_lost_is_named),
        cmocka_unit_test(test_strangers_are_turned_away),
        cmocka_unit_test(test_a_false_first_agent_is_found),
        cmocka_unit_test(test_a_wrong_token_is_refused),
        cmocka_unit_test(test_interfaces_and_ports),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
