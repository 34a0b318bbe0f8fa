/* comm_starter.c: the process that starts a job over several hosts, and the first agent: requests,
 * the exit code, strangers at the port, and what each side makes of the other's end or silence. */
#include "comm/control/cluster/starter_link.h"

#include "comm/control/shm/job_end.h"
#include "comm_support.h"
#include "proof_support.h"

#define LOST_NS 400000000u

typedef struct pair {
    ms_context contexts[2];
    ms_starter *starter;
    ms_agent *agent;
    char value[MS_STARTER_BYTES];
} pair;

static void quiet(void *user, ms_log_level level, const char *message)
{
    (void)user;
    (void)level;
    (void)message;
}

static void open_starter(pair *of)
{
    ms_context_init(&of->contexts[0], NULL);
    of->contexts[0].log = quiet;
    if (ms_starter_open(&of->contexts[0], "lo", LOST_NS, of->value, &of->starter))
        fail_msg("%s", of->contexts[0].error.message);
    setenv(MS_STARTER_VARIABLE, of->value, 1);
}

/* Of a job with two ranks on one host, which never come. */
static void open_keeper(pair *of)
{
    ms_agent_options options = {
        .rendezvous = { .ranks = 2, .threads = 1, .heap_bytes = 1 << 20 },
        .nodes = 1,
        .names = { "hosta" },
        .init_ns = 4000000000u,
        .lost_ns = LOST_NS,
    };
    ms_context_init(&of->contexts[1], NULL);
    of->contexts[1].log = quiet;
    if (ms_agent_open(&of->contexts[1], &options, &of->agent))
        fail_msg("%s", of->contexts[1].error.message);
}

static void open_both(pair *of)
{
    open_starter(of);
    open_keeper(of);
    if (ms_agent_call_starter(of->agent)) fail_msg("%s", of->contexts[1].error.message);
}

static void close_both(pair *of)
{
    ms_starter_close(of->starter);
    if (of->agent) ms_agent_close(of->agent);
    unsetenv(MS_STARTER_VARIABLE);
}

/* A moment in which nothing wakes this thread. */
static void pause_briefly(void)
{
    ms_word never = 0;
    ms_futex_wait(&never, 0, 1000000);
}

static ms_starter_state await_phase(const pair *of, ms_starter_phase phase)
{
    ms_starter_state state;
    for (int i = 0; i < 10000; i++) {
        ms_starter_look(of->starter, &state);
        if (state.phase == phase) return state;
        pause_briefly();
    }
    fail_msg("the starter is in phase %d, not %d", state.phase, phase);
    return state;
}

static ms_abort_record await_cause(const pair *of)
{
    ms_abort_record cause = { .reason = MS_ABORT_NONE };
    for (int i = 0; i < 10000 && !ms_shm_own_cause(of->agent->files, &cause); i++) pause_briefly();
    return cause;
}

/* To the port that the variable names; -1: no process listens there. */
static int connect_to(const pair *of) { return connect_here((uint16_t)atoi(of->value + 2)); }

static void read_token(const pair *of, uint8_t token[MS_TOKEN_BYTES])
{
    const char *digits = strchr(of->value + 2, ' ') + 1;
    for (int i = 0; i < MS_TOKEN_BYTES; i++) {
        unsigned byte = 0;
        assert_int_equal(sscanf(digits + 2 * i, "%2x", &byte), 1);
        token[i] = (uint8_t)byte;
    }
}

/* ---------------------------------------------------------- what they say */

static void test_requests_and_the_code_arrive(void **state)
{
    (void)state;
    pair of = { 0 };
    open_both(&of);
    await_phase(&of, MS_STARTER_CONNECTED);
    assert_int_equal(ms_agent_stop(of.agent), 0);
    ms_starter_request(of.starter, MS_REQUEST_STOP, 15);
    for (int i = 0; i < 10000 && !ms_agent_stop(of.agent); i++) pause_briefly();
    assert_int_equal(ms_agent_stop(of.agent), 15);
    bool wanted = ms_agent_flights_wanted(of.agent);
    assert_false(wanted);
    ms_starter_ask_flights(of.starter);
    for (int i = 0; i < 10000 && !wanted; i++) {
        pause_briefly();
        wanted = ms_agent_flights_wanted(of.agent);
    }
    assert_true(wanted);
    assert_false(ms_agent_flights_wanted(of.agent));
    /* The port is closed once the agent has come. */
    int late = connect_to(&of);
    assert_int_equal(late, -1);
    ms_agent_tell_code(of.agent, 75);
    assert_int_equal(await_phase(&of, MS_STARTER_TOLD).code, 75);
    close_both(&of);
}

/* Of any length; what is longer than the starter's room is cut. */
static void test_a_report_arrives_before_the_code(void **state)
{
    (void)state;
    enum { LONG = 100000, KEPT = MS_FRAME_BODY_MOST };
    for (int round = 0; round < 3; round++) {
        pair of = { 0 };
        open_both(&of);
        await_phase(&of, MS_STARTER_CONNECTED);
        char *text = calloc(1, LONG + 1);
        size_t bytes = round == 0 ? 0 : round == 1 ? 12 : LONG;
        for (size_t i = 0; i < bytes; i++) text[i] = (char)('a' + i % 23);
        assert_true(ms_agent_tell_report(of.agent, text, bytes));
        assert_string_equal(ms_starter_report(of.starter), "");
        ms_agent_tell_code(of.agent, 7);
        assert_int_equal(await_phase(&of, MS_STARTER_TOLD).code, 7);
        if (bytes > KEPT) text[KEPT] = '\0';
        assert_string_equal(ms_starter_report(of.starter), text);
        free(text);
        close_both(&of);
    }
    pair alone = { 0 };
    open_keeper(&alone);
    assert_false(ms_agent_tell_report(alone.agent, "text", 4));
    close_both(&alone);
}

static void test_an_abort_is_the_cause_of_the_end(void **state)
{
    (void)state;
    pair of = { 0 };
    open_both(&of);
    await_phase(&of, MS_STARTER_CONNECTED);
    ms_starter_abort(of.starter, "stopped at once");
    ms_abort_record cause = await_cause(&of);
    assert_int_equal(cause.reason, MS_ABORT_STOPPED);
    assert_string_equal(cause.error.message, "stopped at once");
    close_both(&of);
}

/* Each lives on for several times the limit, as both give signs of life. */
static void test_both_give_signs_of_life(void **state)
{
    (void)state;
    pair of = { 0 };
    ms_abort_record cause;
    open_both(&of);
    for (int i = 0; i < 1200; i++) pause_briefly();
    await_phase(&of, MS_STARTER_CONNECTED);
    assert_false(ms_shm_own_cause(of.agent->files, &cause));
    ms_agent_tell_code(of.agent, 0);
    assert_int_equal(await_phase(&of, MS_STARTER_TOLD).code, 0);
    close_both(&of);
}

/* ------------------------------------------------------------- their ends */

static void test_a_keeper_whose_starter_ends_ends_the_job(void **state)
{
    (void)state;
    pair of = { 0 };
    open_both(&of);
    ms_starter_close(of.starter);
    of.starter = NULL;
    ms_abort_record cause = await_cause(&of);
    assert_int_equal(cause.reason, MS_ABORT_DIED);
    assert_non_null(strstr(cause.error.message, "moonshard run --hosts) has ended"));
    /* It does not wait for ranks any more. */
    ms_agent_options options = { .init_ns = 0 };
    assert_int_equal(ms_agent_gather(of.agent, &options), MS_ERROR_ABORTED);
    ms_agent_tell_code(of.agent, 1);
    close_both(&of);
}

static void test_a_starter_whose_keeper_ends_says_so(void **state)
{
    (void)state;
    pair of = { 0 };
    open_both(&of);
    await_phase(&of, MS_STARTER_CONNECTED);
    ms_agent_close(of.agent);
    of.agent = NULL;
    ms_starter_state found = await_phase(&of, MS_STARTER_LOST);
    assert_non_null(strstr(found.why, "host hosta, where rank 0 is, is lost: the connection"));
    close_both(&of);
}

/* ------------------------------------------------------------- by hand */

typedef struct call {
    ms_frame_head head;
    ms_call_body body;
} call;

static call call_of(const char *version)
{
    call made = {
        .head = { .magic = MS_FRAME_MAGIC, .kind = MS_FRAME_CALL, .bytes = sizeof(ms_call_body) },
        .body = { .node = "handmade" }
    };
    snprintf(made.body.version, sizeof made.body.version, "%s", version);
    return made;
}

static void send_all(int descriptor, const void *bytes, size_t count)
{
    assert_true(send_whole(descriptor, bytes, count));
}

/* Proves itself to the starter, and calls it. */
static int call_as(const pair *of, const char *version)
{
    uint8_t token[MS_TOKEN_BYTES];
    call made = call_of(version);
    int connection = connect_to(of);
    read_token(of, token);
    assert_true(prove_by_hand(connection, MS_PORT_STARTER, 0, token));
    send_all(connection, &made, sizeof made);
    return connection;
}

static ms_frame_head receive_head(int descriptor)
{
    ms_frame_head head = { .kind = 0 };
    assert_int_equal(recv(descriptor, &head, sizeof head, MSG_WAITALL), (ssize_t)sizeof head);
    return head;
}

/* Noise, a call without a proof, a wrong token: each connection is closed. A crowd that is silent
 * or says a part keeps its places. The agent that comes then is admitted: it waits for its answer
 * for LOST_NS, and strangers have 10 s. */
static void test_strangers_are_turned_away(void **state)
{
    (void)state;
    enum { STRANGERS = 100 };
    pair of = { 0 };
    uint8_t token[MS_TOKEN_BYTES];
    int connections[STRANGERS];
    open_starter(&of);
    for (int i = 0; i < STRANGERS; i++) connections[i] = connect_to(&of);
    call unproven = call_of(MS_VERSION);
    send_all(connections[0], "GET / HTTP/1.0\r\n\r\n", 18);
    send_all(connections[1], &unproven, sizeof unproven);
    shutdown(connections[2], SHUT_WR);
    for (int i = 3; i < STRANGERS; i += 2) send_all(connections[i], "MSG", 3);
    read_token(&of, token);
    token[31] ^= 1;
    int wrong = connect_to(&of);
    assert_false(prove_by_hand(wrong, MS_PORT_STARTER, 0, token));
    close(wrong);
    open_keeper(&of);
    if (ms_agent_call_starter(of.agent)) fail_msg("%s", of.contexts[1].error.message);
    await_phase(&of, MS_STARTER_CONNECTED);
    for (int i = 0; i < STRANGERS; i++) {
        char byte;
        assert_true(recv(connections[i], &byte, 1, 0) <= 0);
        close(connections[i]);
    }
    close_both(&of);
}

static void test_another_version_is_refused(void **state)
{
    (void)state;
    pair of = { 0 };
    char why[512] = "";
    open_starter(&of);
    int connection = call_as(&of, "9.9.9");
    assert_int_equal(receive_head(connection).kind, MS_FRAME_REFUSED);
    assert_true(recv(connection, why, sizeof why - 1, 0) > 0);
    assert_non_null(strstr(why, "another version of Moonshard"));
    close(connection);
    close_both(&of);
}

static void test_a_variable_that_is_wrong_is_named(void **state)
{
    (void)state;
    pair of = { 0 };
    open_starter(&of);
    open_keeper(&of);
    *strchr(of.value + 2, ' ') = '-';
    setenv(MS_STARTER_VARIABLE, of.value, 1);
    assert_int_equal(ms_agent_call_starter(of.agent), MS_ERROR_ARGUMENT);
    assert_non_null(strstr(of.contexts[1].error.message, "MOONSHARD_STARTER"));
    close_both(&of);
}

/* An agent made by hand, after it was admitted. */
static int admitted(pair *of)
{
    open_starter(of);
    int connection = call_as(of, MS_VERSION);
    assert_int_equal(receive_head(connection).kind, MS_FRAME_WELCOME);
    return connection;
}

static void test_silence_of_a_keeper_is_noticed(void **state)
{
    (void)state;
    pair of = { 0 };
    int connection = admitted(&of);
    ms_starter_state found = await_phase(&of, MS_STARTER_LOST);
    assert_non_null(
        strstr(found.why, "host handmade, where rank 0 is, is lost: nothing was heard"));
    close(connection);
    close_both(&of);
}

static void test_a_keeper_that_speaks_nonsense_is_lost(void **state)
{
    (void)state;
    pair of = { 0 };
    int connection = admitted(&of);
    ms_code_body code = { .code = 256 };
    ms_frame_head head = { .magic = MS_FRAME_MAGIC, .kind = MS_FRAME_CODE, .bytes = sizeof code };
    send_all(connection, &head, sizeof head);
    send_all(connection, &code, sizeof code);
    await_phase(&of, MS_STARTER_LOST);
    close(connection);
    close_both(&of);
}

/* A starter made by hand: it welcomes the agent and says no more. One that has another token is
 * found before. */
typedef struct by_hand {
    int listener, connection;
    uint8_t token[MS_TOKEN_BYTES];
    char sent[512]; /* of the agent, without a proof */
    size_t count;
} by_hand;

static void *welcome(void *argument)
{
    by_hand *self = argument;
    call made;
    ms_frame_head answer = { .magic = MS_FRAME_MAGIC, .kind = MS_FRAME_WELCOME };
    self->connection = accept(self->listener, NULL, NULL);
    if (host_by_hand(self->connection, self->token)
        && receive_whole(self->connection, &made, sizeof made))
        (void)send_whole(self->connection, &answer, sizeof answer);
    return NULL;
}

/* It makes up a proof. */
static void *pretend(void *argument)
{
    by_hand *self = argument;
    ms_challenge challenge = { .magic = MS_GREETING_MAGIC };
    self->connection = accept(self->listener, NULL, NULL);
    (void)send_whole(self->connection, &challenge, sizeof challenge);
    (void)send_whole(self->connection, challenge.nonce, sizeof challenge.nonce);
    for (ssize_t got = 1; got > 0; self->count += got > 0 ? (size_t)got : 0)
        got = recv(self->connection, self->sent + self->count, sizeof self->sent - self->count, 0);
    return NULL;
}

/* The token of the variable is all zero. */
static void call_by_hand(pair *of, by_hand *self, void *(*run)(void *), pthread_t *thread)
{
    uint16_t port = 0;
    self->listener = listen_here(&port);
    assert_true(self->listener >= 0);
    int used = snprintf(of->value, sizeof of->value, "1 %u %064d 127.0.0.1", port, 0);
    assert_true(used > 0);
    setenv(MS_STARTER_VARIABLE, of->value, 1);
    assert_int_equal(pthread_create(thread, NULL, run, self), 0);
    open_keeper(of);
}

static void test_silence_of_a_starter_ends_the_job(void **state)
{
    (void)state;
    pair of = { 0 };
    by_hand self = { .token = { 0 } };
    pthread_t thread;
    call_by_hand(&of, &self, welcome, &thread);
    if (ms_agent_call_starter(of.agent)) fail_msg("%s", of.contexts[1].error.message);
    pthread_join(thread, NULL);
    ms_abort_record cause = await_cause(&of);
    assert_int_equal(cause.reason, MS_ABORT_DIED);
    assert_non_null(strstr(cause.error.message, "host hosta has heard nothing of the process"));
    close(self.connection);
    close(self.listener);
    close_both(&of);
}

/* Another program has the port. It is told nothing but a greeting and an answer. */
static void test_a_false_starter_is_found(void **state)
{
    (void)state;
    pair of = { 0 };
    by_hand self = { .token = { 0 } };
    pthread_t thread;
    call_by_hand(&of, &self, pretend, &thread);
    assert_int_equal(ms_agent_call_starter(of.agent), MS_ERROR_ABORTED);
    assert_non_null(strstr(of.contexts[1].error.message,
                           "has not proven to host hosta that it has this job's token"));
    ms_agent_close(of.agent);
    of.agent = NULL;
    pthread_join(thread, NULL);
    assert_int_equal(self.count, sizeof(ms_greeting) + MS_ANSWER_BYTES);
    close(self.connection);
    close(self.listener);
    close_both(&of);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_requests_and_the_code_arrive),
        cmocka_unit_test(test_a_report_arrives_before_the_code),
        cmocka_unit_test(test_an_abort_is_the_cause_of_the_end),
        cmocka_unit_test(test_both_give_signs_of_life),
        cmocka_unit_test(test_a_keeper_whose_starter_ends_ends_the_job),
        cmocka_unit_test(test_a_starter_whose_keeper_ends_says_so),
        cmocka_unit_test(test_strangers_are_turned_away),
        cmocka_unit_test(test_another_version_is_refused),
        cmocka_unit_test(test_a_variable_that_is_wrong_is_named),
        cmocka_unit_test(test_silence_of_a_keeper_is_noticed),
        cmocka_unit_test(test_a_keeper_that_speaks_nonsense_is_lost),
        cmocka_unit_test(test_silence_of_a_starter_ends_the_job),
        cmocka_unit_test(test_a_false_starter_is_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
