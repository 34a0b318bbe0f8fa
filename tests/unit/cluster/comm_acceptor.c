/* comm_acceptor.c: the callers at a port: crowds that are silent or slow beside one that is
 * awaited, what is taken of strangers, sessions that were recorded, and who goes where too many
 * have come. The clock stops, unless a test moves it. */
#include "comm/control/cluster/acceptor.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

#include "proof_support.h"

#define SECOND_NS ((uint64_t)1000000000)
#define AWAITED 3
#define MOST (AWAITED + MS_ACCEPTOR_MORE)

static const uint8_t TOKEN[MS_TOKEN_BYTES] = "s3cret-of-alice-0123";

typedef struct local_socket {
    ms_context context;
    ms_os os; /* the system's, but for its clock; it counts */
    const ms_os *system;
    uint16_t port;
    ms_acceptor *acceptor;
    pthread_t thread;
    _Atomic uint64_t now_ns;
    _Atomic uint32_t open, most_open, lines;
    _Atomic uint64_t taken;
    _Atomic bool no_files; /* the next accept finds that no more files can be opened */
    char log[8192];
    ms_accepted accepted;
    int error;
} local_socket;

static uint64_t still_ns(void *user) { return atomic_load(&((local_socket *)user)->now_ns); }

/* Comes back soon, so that a clock that a test has moved is noticed. */
static int await_briefly(void *user, ms_file *const *files, uint32_t count, uint64_t timeout_ns,
                         bool *ready)
{
    const local_socket *self = user;
    return self->system->tcp_await(self->system->user, files, count,
                                   timeout_ns < 1000000 ? timeout_ns : 1000000, ready);
}

static int accept_counted(void *user, ms_file *listener, uint64_t timeout_ns, ms_file **out)
{
    local_socket *self = user;
    if (atomic_exchange(&self->no_files, false)) return -EMFILE;
    int error = self->system->tcp_accept(self->system->user, listener, timeout_ns, out);
    if (error) return error;
    uint32_t open = atomic_fetch_add(&self->open, 1) + 1;
    if (open > atomic_load(&self->most_open)) atomic_store(&self->most_open, open);
    return 0;
}

static int64_t take_counted(void *user, ms_file *socket, void *message, size_t bytes)
{
    local_socket *self = user;
    int64_t taken = self->system->tcp_take(self->system->user, socket, message, bytes);
    if (taken > 0) atomic_fetch_add(&self->taken, (uint64_t)taken);
    return taken;
}

static int send_as_before(void *user, ms_file *socket, const void *message, size_t bytes,
                          uint64_t timeout_ns)
{
    const local_socket *self = user;
    return self->system->tcp_send(self->system->user, socket, message, bytes, timeout_ns);
}

static int entropy_as_before(void *user, void *buffer, size_t bytes)
{
    const local_socket *self = user;
    return self->system->entropy(self->system->user, buffer, bytes);
}

static void *allocate_as_before(void *user, size_t bytes, size_t alignment)
{
    const local_socket *self = user;
    return self->system->allocate(self->system->user, bytes, alignment);
}

static void release_as_before(void *user, void *memory)
{
    const local_socket *self = user;
    self->system->release(self->system->user, memory);
}

static void close_counted(void *user, ms_file *file)
{
    local_socket *self = user;
    atomic_fetch_sub(&self->open, 1);
    self->system->close(self->system->user, file);
}

static void note(void *user, ms_log_level level, const char *message)
{
    local_socket *self = user;
    (void)level;
    atomic_fetch_add(&self->lines, 1);
    size_t used = strlen(self->log);
    snprintf(self->log + used, sizeof self->log - used, "%s\n", message);
}

static void open_door(local_socket *self)
{
    ms_acceptor_options options = { .kind = MS_PORT_RANK_0,
                                    .awaits = MS_FRAME_COMING,
                                    .awaited = AWAITED,
                                    .place = "the port of this test" };
    memset(self, 0, sizeof *self);
    ms_context_init(&self->context, NULL);
    self->system = self->context.os;
    self->os = (ms_os){ .user = self,
                        .allocate = allocate_as_before,
                        .release = release_as_before,
                        .close = close_counted,
                        .tcp_accept = accept_counted,
                        .tcp_await = await_briefly,
                        .tcp_take = take_counted,
                        .tcp_send = send_as_before,
                        .entropy = entropy_as_before,
                        .monotonic_ns = still_ns };
    self->context.os = &self->os;
    self->context.log = note;
    self->context.log_user = self;
    memcpy(options.token, TOKEN, sizeof TOKEN);
    assert_int_equal(
        self->system->tcp_listen(self->system->user, "127.0.0.1", &self->port, &options.listener),
        0);
    atomic_fetch_add(&self->open, 1); /* the listener */
    assert_int_equal(ms_acceptor_open(&self->context, &options, &self->acceptor), MS_OK);
}

static void close_door(local_socket *self)
{
    ms_acceptor_close(self->acceptor);
    assert_int_equal(atomic_load(&self->open), 0);
}

static void *next_thread(void *argument)
{
    local_socket *self = argument;
    self->error = ms_acceptor_next(self->acceptor, UINT64_MAX, &self->accepted);
    return NULL;
}

/* The acceptor hears callers from here on, until a guest is there. */
static void begin(local_socket *self)
{
    assert_int_equal(pthread_create(&self->thread, NULL, next_thread, self), 0);
}

static const ms_accepted *finish(local_socket *self)
{
    pthread_join(self->thread, NULL);
    assert_int_equal(self->error, 0);
    return &self->accepted;
}

typedef struct coming {
    ms_frame_head head;
    ms_coming_body body;
} coming;

static coming coming_of(uint32_t rank)
{
    return (coming){ .head = { .magic = MS_FRAME_MAGIC,
                               .kind = MS_FRAME_COMING,
                               .bytes = sizeof(ms_coming_body) },
                     .body = { .rank = rank, .ranks = AWAITED + 1 } };
}

/* A rank comes, and is let in. */
static void come(local_socket *self, uint32_t rank)
{
    coming frame = coming_of(rank);
    ms_frame_head head;
    int connection = connect_here(self->port);
    assert_true(prove_by_hand(connection, MS_PORT_RANK_0, rank, TOKEN));
    assert_true(send_whole(connection, &frame, sizeof frame));
    const ms_accepted *accepted = finish(self);
    assert_int_equal(accepted->number, rank);
    assert_int_equal(accepted->body.coming.rank, rank);
    assert_int_equal(accepted->body.coming.ranks, AWAITED + 1);
    assert_true(ms_acceptor_answer(self->acceptor, &self->accepted, NULL));
    assert_true(receive_whole(connection, &head, sizeof head));
    assert_int_equal(head.kind, MS_FRAME_WELCOME);
    self->os.close(self, self->accepted.socket);
    close(connection);
}

/* A caller that has been challenged, so that the acceptor knows it. */
static int challenged(const local_socket *self, ms_challenge *challenge)
{
    ms_greeting greeting = greeting_of(MS_PORT_RANK_0, 1);
    int connection = connect_here(self->port);
    assert_true(send_whole(connection, &greeting, sizeof greeting));
    assert_true(receive_whole(connection, challenge, sizeof *challenge));
    assert_int_equal(challenge->magic, MS_GREETING_MAGIC);
    return connection;
}

/* Waits until the other side has closed; what has come before is no answer of it. */
static void assert_closed(int connection)
{
    uint8_t byte;
    assert_true(recv(connection, &byte, 1, 0) <= 0);
    close(connection);
}

/* The same for one to which at most a challenge is sent, which a reset may overtake. */
static void assert_closed_unproven(int connection)
{
    uint8_t bytes[256];
    size_t count = 0;
    for (ssize_t got = 1; got > 0; count += got > 0 ? (size_t)got : 0)
        got = recv(connection, bytes, sizeof bytes, 0);
    assert_true(count <= sizeof(ms_challenge));
    close(connection);
}

/* -------------------------------------------------------------------- crowds */

static void test_a_silent_crowd_keeps_nobody_out(void **state)
{
    (void)state;
    enum { CROWD = 200 };
    static local_socket self;
    int crowd[CROWD];
    open_door(&self);
    begin(&self);
    ms_greeting greeting = greeting_of(MS_PORT_RANK_0, 1);
    for (int i = 0; i < CROWD; i++) {
        crowd[i] = connect_here(self.port);
        assert_true(crowd[i] >= 0);
        /* Some have said a part, up to all but one byte of a greeting. */
        if (i % 4 == 1) assert_true(send_whole(crowd[i], &greeting, 1 + (size_t)i % 43));
    }
    for (uint32_t rank = 1; rank <= AWAITED; rank++) {
        come(&self, rank);
        if (rank < AWAITED) begin(&self);
    }
    /* The port and a guest are open beside them. */
    assert_true(atomic_load(&self.most_open) <= MOST + 2);
    assert_true(atomic_load(&self.most_open) > MS_ACCEPTOR_MORE);
    /* A crowd fills no log. */
    assert_in_range(atomic_load(&self.lines), 1, 20);
    assert_non_null(strstr(self.log, "a connection to the port of this test is closed: too many"));
    close_door(&self);
    for (int i = 0; i < CROWD; i++) assert_closed(crowd[i]);
}

/* One that has greeted stays, however many come that say nothing. */
static void test_those_that_have_said_least_go_first(void **state)
{
    (void)state;
    enum { CROWD = 2 * MOST };
    static local_socket self;
    int crowd[CROWD];
    uint8_t answer[MS_ANSWER_BYTES];
    ms_challenge challenge;
    open_door(&self);
    begin(&self);
    int first = challenged(&self, &challenge);
    for (int i = 0; i < CROWD; i++) crowd[i] = connect_here(self.port);
    /* The oldest of the crowd is closed, so the place for all is full. */
    assert_closed(crowd[0]);
    ms_greeting greeting = greeting_of(MS_PORT_RANK_0, 1);
    coming frame = coming_of(1);
    ms_proof_answer(TOKEN, MS_SIDE_CALLER, &greeting, &challenge, answer);
    assert_true(send_whole(first, answer, sizeof answer));
    assert_true(receive_whole(first, answer, sizeof answer));
    assert_true(ms_proof_is(TOKEN, MS_SIDE_LISTENER, &greeting, &challenge, answer));
    assert_true(send_whole(first, &frame, sizeof frame));
    assert_int_equal(finish(&self)->number, 1);
    self.os.close(&self, self.accepted.socket);
    close(first);
    close_door(&self);
    for (int i = 1; i < CROWD; i++) assert_closed(crowd[i]);
}

/* A byte now and then gives no more time: 10 s are for all of it. Others are heard meanwhile. */
static void test_slow_visitors_go_after_ten_seconds(void **state)
{
    (void)state;
    enum { SLOW = 20 };
    static local_socket self;
    int slow[SLOW];
    uint8_t byte;
    ms_challenge challenge;
    open_door(&self);
    begin(&self);
    for (int i = 0; i < SLOW; i++) slow[i] = challenged(&self, &challenge);
    for (int second = 1; second < 10; second++) {
        atomic_fetch_add(&self.now_ns, SECOND_NS);
        for (int i = 0; i < SLOW; i++) assert_true(send_whole(slow[i], "x", 1));
    }
    atomic_fetch_add(&self.now_ns, SECOND_NS - 1);
    come(&self, 1);
    for (int i = 0; i < SLOW; i++) {
        assert_int_equal(recv(slow[i], &byte, 1, MSG_DONTWAIT), -1);
        assert_int_equal(errno, EAGAIN);
    }
    begin(&self);
    atomic_fetch_add(&self.now_ns, 1);
    for (int i = 0; i < SLOW; i++) assert_closed(slow[i]);
    come(&self, 2);
    assert_non_null(strstr(self.log, "it has not shown in 10 s that it has this job's token"));
    close_door(&self);
}

/* After the proof the same 10 s go on. */
static void test_a_rank_that_says_no_more_goes(void **state)
{
    (void)state;
    static local_socket self;
    open_door(&self);
    begin(&self);
    int connection = connect_here(self.port);
    assert_true(prove_by_hand(connection, MS_PORT_RANK_0, 1, TOKEN));
    atomic_fetch_add(&self.now_ns, 10 * SECOND_NS);
    assert_closed(connection);
    come(&self, 2);
    close_door(&self);
}

static void test_without_files_a_visitor_goes(void **state)
{
    (void)state;
    static local_socket self;
    ms_challenge challenge;
    open_door(&self);
    begin(&self);
    int connection = challenged(&self, &challenge);
    atomic_store(&self.no_files, true);
    come(&self, 1);
    assert_closed(connection);
    close_door(&self);
}

static void test_the_limit_of_the_caller_is_kept(void **state)
{
    (void)state;
    static local_socket self;
    ms_accepted accepted;
    open_door(&self);
    assert_int_equal(ms_acceptor_next(self.acceptor, 0, &accepted), -ETIMEDOUT);
    close_door(&self);
}

/* ------------------------------------------------------------------ strangers */

/* Of a stranger that sends much, a greeting and an answer are taken, and it gets a challenge. */
static void test_little_is_taken_of_strangers(void **state)
{
    (void)state;
    static local_socket self;
    static uint8_t noise[65536];
    ms_greeting greeting = greeting_of(MS_PORT_RANK_0, 1);
    open_door(&self);
    begin(&self);
    int connection = connect_here(self.port);
    memcpy(noise, &greeting, sizeof greeting);
    (void)send_whole(connection, noise, sizeof noise);
    assert_closed_unproven(connection);
    assert_int_equal(atomic_load(&self.taken), MS_ACCEPTOR_STRANGER_BYTES);
    connection = connect_here(self.port);
    assert_true(send_whole(connection,
                           "GET /index.html HTTP/1.0\r\nHost: node1\r\nAccept: */*\r\n\r\n", 55));
    assert_closed(connection);
    assert_int_equal(atomic_load(&self.taken), MS_ACCEPTOR_STRANGER_BYTES + sizeof greeting);
    come(&self, 1);
    assert_non_null(strstr(self.log, "it has not this job's token"));
    assert_non_null(strstr(self.log, "it is of another program, or of another version"));
    close_door(&self);
}

/* Of another token, of another kind of port, or as somebody else than the answer says. */
static void test_wrong_answers_are_not_answered(void **state)
{
    (void)state;
    static local_socket self;
    const uint8_t other[MS_TOKEN_BYTES] = "s3cret-of-mallory";
    ms_greeting greeting = greeting_of(MS_PORT_RANK_0, 2);
    ms_challenge challenge;
    uint8_t answer[MS_ANSWER_BYTES];
    open_door(&self);
    begin(&self);
    int connection = connect_here(self.port);
    assert_false(prove_by_hand(connection, MS_PORT_RANK_0, 1, other));
    assert_closed(connection);
    connection = connect_here(self.port);
    assert_false(prove_by_hand(connection, MS_PORT_AGENT, 1, TOKEN));
    assert_closed(connection);
    connection = challenged(&self, &challenge);
    ms_proof_answer(TOKEN, MS_SIDE_CALLER, &greeting, &challenge, answer);
    assert_true(send_whole(connection, answer, sizeof answer));
    assert_closed(connection);
    come(&self, 1);
    close_door(&self);
}

/* All that a rank has sent, and all that rank 0 has, is of no use in another conversation. */
static void test_a_recorded_session_is_of_no_use(void **state)
{
    (void)state;
    static local_socket self;
    struct {
        ms_greeting greeting;
        uint8_t answer[MS_ANSWER_BYTES];
        coming frame;
    } session = { .greeting = greeting_of(MS_PORT_RANK_0, 1), .frame = coming_of(1) };
    uint8_t nodes[MS_ANSWER_BYTES];
    ms_challenge challenge;
    open_door(&self);
    begin(&self);
    int connection = challenged(&self, &challenge);
    ms_proof_answer(TOKEN, MS_SIDE_CALLER, &session.greeting, &challenge, session.answer);
    assert_true(send_whole(connection, session.answer, sizeof session.answer));
    assert_true(receive_whole(connection, nodes, sizeof nodes));
    assert_true(send_whole(connection, &session.frame, sizeof session.frame));
    finish(&self);
    self.os.close(&self, self.accepted.socket);
    close(connection);
    begin(&self);
    /* Again, as it was. */
    connection = connect_here(self.port);
    assert_true(send_whole(connection, &session, sizeof session));
    assert_closed_unproven(connection);
    /* The other side's answer, and its challenge, sent back. */
    connection = challenged(&self, &challenge);
    assert_true(send_whole(connection, nodes, sizeof nodes));
    assert_closed(connection);
    connection = challenged(&self, &challenge);
    assert_true(send_whole(connection, challenge.nonce, sizeof challenge.nonce));
    assert_closed(connection);
    come(&self, 2);
    close_door(&self);
}

/* With the token, but not as a rank of this version speaks. */
static void test_other_frames_are_refused(void **state)
{
    (void)state;
    static local_socket self;
    coming frames[4];
    for (int i = 0; i < 4; i++) frames[i] = coming_of(1);
    frames[0].head.kind = MS_FRAME_CAUSE;
    frames[0].head.bytes = sizeof(ms_abort_record);
    frames[1].head.bytes = 65536;
    frames[2].head.magic ^= 1;
    frames[3].head.kind = MS_FRAME_HELLO;
    open_door(&self);
    begin(&self);
    for (int i = 0; i < 4; i++) {
        int connection = connect_here(self.port);
        assert_true(prove_by_hand(connection, MS_PORT_RANK_0, 1, TOKEN));
        assert_true(send_whole(connection, &frames[i], sizeof frames[i]));
        assert_closed(connection);
    }
    come(&self, 1);
    assert_non_null(strstr(self.log, "it does not speak as this version of Moonshard does"));
    close_door(&self);
}

static void test_a_refusal_is_told(void **state)
{
    (void)state;
    static local_socket self;
    coming frame = coming_of(1);
    ms_frame_head head;
    char why[64] = "";
    open_door(&self);
    begin(&self);
    int connection = connect_here(self.port);
    assert_true(prove_by_hand(connection, MS_PORT_RANK_0, 1, TOKEN));
    assert_true(send_whole(connection, &frame, sizeof frame));
    finish(&self);
    assert_false(ms_acceptor_answer(self.acceptor, &self.accepted, "its rank has come before"));
    assert_true(receive_whole(connection, &head, sizeof head));
    assert_int_equal(head.kind, MS_FRAME_REFUSED);
    assert_true(head.bytes <= sizeof why);
    assert_true(receive_whole(connection, why, head.bytes));
    assert_string_equal(why, "its rank has come before");
    assert_closed(connection);
    assert_non_null(strstr(self.log, "its rank has come before"));
    close_door(&self);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_silent_crowd_keeps_nobody_out),
        cmocka_unit_test(test_those_that_have_said_least_go_first),
        cmocka_unit_test(test_slow_visitors_go_after_ten_seconds),
        cmocka_unit_test(test_a_rank_that_says_no_more_goes),
        cmocka_unit_test(test_without_files_a_visitor_goes),
        cmocka_unit_test(test_the_limit_of_the_caller_is_kept),
        cmocka_unit_test(test_little_is_taken_of_strangers),
        cmocka_unit_test(test_wrong_answers_are_not_answered),
        cmocka_unit_test(test_a_recorded_session_is_of_no_use),
        cmocka_unit_test(test_other_frames_are_refused),
        cmocka_unit_test(test_a_refusal_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
