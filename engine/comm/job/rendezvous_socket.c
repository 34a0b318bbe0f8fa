/* rendezvous_socket.c: how ranks that no launcher started find each other: at a socket, where rank
 * 0 hands the memory files to the others.
 *
 * A message is a record of fixed size. A message of another length, magic or version, from another
 * user, or with a rank that is taken or does not exist is refused, and the answer says why. A
 * process that connects and then sends nothing for MS_MEET_SILENCE_NS is refused, too, so that it
 * does not delay the others. */
#include "comm/job/rendezvous_socket.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/control/shm/files.h"

#define MS_MEET_MAGIC 0x3154454d4d44534dull /* "MSDMMET1" */
#define MS_MEET_NS (120 * (uint64_t)1000000000)
#define MS_MEET_SILENCE_NS ((uint64_t)5 * 1000000000)
#define MS_MEET_RETRY_NS ((uint64_t)5 * 1000000)

/* The record that both sides send; see the top of the file. */
typedef struct ms_hello {
    uint64_t magic;
    char version[16];
    uint32_t ranks, rank;
    char refusal[160]; /* of rank 0; empty: welcome */
} ms_hello;

/* Built from zeros: records are compared and sent as bytes. The bytes between the fields are zero
 * as well. */
static ms_hello hello_of(uint32_t ranks, uint32_t rank)
{
    ms_hello hello = { .magic = MS_MEET_MAGIC, .ranks = ranks, .rank = rank };
    snprintf(hello.version, sizeof hello.version, "%s", ms_version());
    return hello;
}

/* 0 once the limit has passed: then the function that waits gives up, with a message. */
static uint64_t left_until(const ms_os *os, uint64_t limit)
{
    uint64_t now = os->monotonic_ns(os->user);
    return now < limit ? limit - now : 0;
}

/* Files that came with an answer that is refused. */
static void close_files(const ms_os *os, ms_file **files, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) os->close(os->user, files[i]);
}

/* ------------------------------------------------------------------- rank 0 */

/* Why this process is not admitted, or NULL. The text goes to that process, whose user has to
 * correct it. The first reason that applies is given. */
static const char *refusal_of(const ms_hello *hello, int64_t bytes, uint32_t ranks,
                              const bool *here)
{
    ms_hello mine = hello_of(ranks, 0);
    if (bytes != (int64_t)sizeof *hello || hello->magic != mine.magic)
        return "it is no rank of Moonshard";
    if (memcmp(hello->version, mine.version, sizeof mine.version) != 0)
        return "it is of another version of Moonshard";
    if (hello->ranks != ranks) return "its world_size is another one";
    if (hello->rank == 0 || hello->rank >= ranks) return "its rank is not one of this job";
    return here[hello->rank] ? "its rank is taken" : NULL;
}

/* Sends the files to a process that has connected, or refuses it. A failure here concerns this
 * process only: rank 0 goes on waiting for others. The process counts only after its files were
 * sent, so one that has gone away may connect again. */
static void receive_one(ms_context *context, ms_rendezvous *rendezvous, ms_file *connection,
                        bool *here, uint32_t *arrived)
{
    const ms_os *os = context->os;
    ms_hello hello = { .magic = 0 }, answer = hello_of(rendezvous->ranks, 0);
    ms_file *files[MS_LOCAL_RANKS_MAX + 1];
    uint32_t brought = 0;
    int64_t bytes = os->socket_receive(os->user, connection, &hello, sizeof hello,
                                       MS_MEET_SILENCE_NS, files, 0, &brought);
    const char *refusal = refusal_of(&hello, bytes, rendezvous->ranks, here);
    /* The answer is sent as well as it can be; a process that does not read it learns nothing. */
    if (refusal) {
        ms_log(context, MS_LOG_WARN, "a process at the rendezvous is refused: %s", refusal);
        snprintf(answer.refusal, sizeof answer.refusal, "%s", refusal);
        (void)os->socket_send(os->user, connection, &answer, sizeof answer, NULL, 0);
        return;
    }
    files[0] = ms_shm_files_of(rendezvous)->control_file;
    for (uint32_t r = 0; r < rendezvous->ranks; r++)
        files[r + 1] = ms_shm_files_of(rendezvous)->heaps[r].file;
    if (os->socket_send(os->user, connection, &answer, sizeof answer, files, rendezvous->ranks + 1))
        return;
    here[hello.rank] = true;
    (*arrived)++;
}

/* Names the ranks that have not come, since these are the ones to look at. */
static ms_status fail_missing(ms_context *context, uint32_t ranks, const bool *here)
{
    char missing[160] = "";
    size_t used = 0;
    for (uint32_t r = 1; r < ranks && used < sizeof missing - 16; r++)
        if (!here[r])
            used += (size_t)snprintf(missing + used, sizeof missing - used, "%s%" PRIu32,
                                     used ? ", " : "", r);
    return ms_fail(context, MS_ERROR_TIMEOUT,
                   "these ranks have not come to the rendezvous in %d s: %s",
                   (int)(MS_MEET_NS / 1000000000), missing);
}

/* Connections are served one after the other. One limit holds for all together, so that many
 * refused connections do not keep the job waiting. Each place in `here` is that of a rank; rank 0
 * is this process. */
static ms_status receive_all(ms_context *context, ms_rendezvous *rendezvous, ms_file *listener)
{
    const ms_os *os = context->os;
    bool here[MS_LOCAL_RANKS_MAX] = { true };
    uint32_t arrived = 1;
    uint64_t limit = os->monotonic_ns(os->user) + MS_MEET_NS;
    while (arrived < rendezvous->ranks) {
        ms_file *connection = NULL;
        uint64_t rest = left_until(os, limit);
        int error = rest ? os->socket_accept(os->user, listener, rest, &connection) : -ETIMEDOUT;
        if (error == -ETIMEDOUT) return fail_missing(context, rendezvous->ranks, here);
        /* The system's table has refused a process of another user. Rank 0 goes on waiting. */
        if (error == -EACCES)
            ms_log(context, MS_LOG_WARN, "a process of another user is refused at the rendezvous");
        else if (error && error != -EAGAIN)
            return ms_fail_os(context, error, "the rendezvous cannot admit other ranks", NULL);
        if (error) continue;
        receive_one(context, rendezvous, connection, here, &arrived);
        os->close(os->user, connection);
    }
    return MS_OK;
}

/* Rank 0 makes the files before it listens. The socket's file is removed when all have come or the
 * wait has failed, because a later job may use the same path. No launcher watches these ranks, so
 * they are told to look after each other (unsupervised). */
static ms_status hold(ms_context *context, const ms_rendezvous_options *options, const char *path,
                      ms_rendezvous **out)
{
    const ms_os *os = context->os;
    ms_rendezvous *made = NULL;
    ms_status status = ms_shm_files_new(context, options, &made);
    if (status) return status;
    ms_shm_files_of(made)->control->unsupervised = true;
    ms_file *listener = NULL;
    int error = os->socket_listen(os->user, path, &listener);
    if (error == -EADDRINUSE)
        status = ms_fail(context, MS_ERROR_EXISTS,
                         "rendezvous '%s': another job meets there, or it is another kind of file; "
                         "choose another path",
                         path);
    else if (error) status = ms_fail_os(context, error, "the rendezvous cannot be held at", path);
    if (!status) {
        status = receive_all(context, made, listener);
        os->close(os->user, listener);
        /* All have come, or none will be waited for any more. */
        (void)os->remove(os->user, path);
    }
    if (status) ms_shm_files_close(made);
    else *out = made;
    return status;
}

/* --------------------------------------------------------------- the others */

/* Rank 0 may come later than this one. It tries again every 5 ms until the limit; the futex of a
 * word that never changes is a sleep without a signal. */
static ms_status find_rank_0(ms_context *context, const char *path, uint64_t limit, ms_file **out)
{
    const ms_os *os = context->os;
    for (;;) {
        int error = os->socket_connect(os->user, path, out);
        if (error == 0) return MS_OK;
        if (error != -ENOENT && error != -ECONNREFUSED && error != -EAGAIN)
            return ms_fail_os(context, error, "cannot go to the rendezvous", path);
        if (left_until(os, limit) == 0)
            return ms_fail(context, MS_ERROR_TIMEOUT,
                           "rank 0 has not come to the rendezvous '%s' in %d s", path,
                           (int)(MS_MEET_NS / 1000000000));
        ms_word never = 0;
        ms_futex_wait(&never, 0, MS_MEET_RETRY_NS);
    }
}

/* What rank 0's answer of `bytes` bytes (or -errno), with `count` files, says to this rank. */
static ms_status check_answer(ms_context *context, const char *path, const ms_hello *answer,
                              int64_t bytes, uint32_t count, uint32_t expected)
{
    if (bytes < 0) return ms_fail_os(context, (int)bytes, "no answer at the rendezvous", path);
    if (bytes != (int64_t)sizeof *answer || answer->magic != MS_MEET_MAGIC)
        return ms_fail(context, MS_ERROR_CORRUPT,
                       "rendezvous '%s': the process that listens there is no rank of Moonshard",
                       path);
    if (*answer->refusal)
        return ms_fail(context, MS_ERROR_ARGUMENT,
                       "rendezvous '%s': rank 0 refuses this process: %s", path, answer->refusal);
    if (count == expected) return MS_OK;
    return ms_fail(context, MS_ERROR_CORRUPT,
                   "rendezvous '%s': rank 0 brought %u memory files, not %u", path, count,
                   expected);
}

/* A rank other than 0: says who it is, and gets the files. The socket is closed before the answer
 * is judged: nothing more is said on it. */
static ms_status go(ms_context *context, const ms_rendezvous_options *options, const char *path,
                    uint32_t rank, ms_rendezvous **out)
{
    const ms_os *os = context->os;
    uint64_t limit = os->monotonic_ns(os->user) + MS_MEET_NS;
    ms_file *socket = NULL, *files[MS_LOCAL_RANKS_MAX + 1];
    uint32_t count = 0, expected = options->ranks + 1;
    ms_status status = find_rank_0(context, path, limit, &socket);
    if (status) return status;
    ms_hello hello = hello_of(options->ranks, rank), answer = { .magic = 0 };
    int64_t bytes = os->socket_send(os->user, socket, &hello, sizeof hello, NULL, 0);
    if (!bytes)
        bytes = os->socket_receive(os->user, socket, &answer, sizeof answer, left_until(os, limit),
                                   files, expected, &count);
    os->close(os->user, socket);
    /* The text comes from another process. */
    answer.refusal[sizeof answer.refusal - 1] = '\0';
    status = check_answer(context, path, &answer, bytes, count, expected);
    if (!status) return ms_shm_files_take(context, options->ranks, files, out);
    close_files(os, files, count);
    return status;
}

/* Rank 0 listens, and the others connect to it. Which rank starts first does not matter. */
ms_status ms_shm_meet(ms_context *context, const ms_rendezvous_options *options, const char *path,
                      uint32_t rank, ms_rendezvous **out)
{
    if (options->ranks < 1 || options->ranks > MS_LOCAL_RANKS_MAX)
        return ms_fail(context, MS_ERROR_ARGUMENT, "%u ranks: 1 to %d are allowed on one machine",
                       options->ranks, MS_LOCAL_RANKS_MAX);
    if (rank >= options->ranks)
        return ms_fail(context, MS_ERROR_ARGUMENT, "rank %u of %u: ranks count from 0", rank,
                       options->ranks);
    return rank ? go(context, options, path, rank, out) : hold(context, options, path, out);
}
