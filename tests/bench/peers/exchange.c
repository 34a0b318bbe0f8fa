/* exchange.c: two processes send each other the same number of bytes at once, over a TCP connection
 * for each direction. No all-reduce of two hosts that sends each byte once can be faster.
 *     exchange listen PORT [BYTES...]
 *     exchange connect HOST PORT [BYTES...]
 * Both are given the same sizes. The first prints "listening", then one word when it is done; the
 * second prints the figures. */
#include "figures.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Up to here the socket's buffer takes a message at once, and one thread is faster than two. */
#define SMALL ((size_t)64 << 10)

/* The connections of the two directions, and what one size needs. */
typedef struct pair {
    int sends, receives;
    char *sent, *received;
    size size;
    pthread_barrier_t together; /* the two threads, before each run and after the last */
} pair;

static void fail(const char *what)
{
    fprintf(stderr, "exchange: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void send_one(const pair *two)
{
    for (size_t at = 0; at < two->size.bytes;) {
        ssize_t moved = send(two->sends, two->sent + at, two->size.bytes - at, MSG_NOSIGNAL);
        if (moved < 0) fail("send");
        at += (size_t)moved;
    }
}

static void receive_one(const pair *two)
{
    for (size_t at = 0; at < two->size.bytes;) {
        ssize_t moved = recv(two->receives, two->received + at, two->size.bytes - at, 0);
        if (moved == 0) errno = ECONNRESET;
        if (moved <= 0) fail("receive");
        at += (size_t)moved;
    }
}

/* The thread that sends large messages. */
static void *send_all(void *argument)
{
    pair *two = argument;
    for (unsigned run = 0; run < runs_of(&two->size); run++) {
        pthread_barrier_wait(&two->together);
        send_one(two);
    }
    pthread_barrier_wait(&two->together);
    return NULL;
}

static void exchange(pair *two, samples *all)
{
    const bool small = two->size.bytes <= SMALL;
    const unsigned runs = runs_of(&two->size);
    pthread_t sender;
    if (!small && pthread_create(&sender, NULL, send_all, two)) fail("thread");
    for (unsigned run = 0; run <= runs; run++) {
        if (!small) pthread_barrier_wait(&two->together);
        note_run(all, &two->size, run);
        if (run == runs) break;
        if (small) send_one(two);
        receive_one(two);
    }
    if (!small) pthread_join(sender, NULL);
}

static void exchange_all(const int sockets[2], const size_list *list, bool prints)
{
    pair two = { .sends = sockets[0], .receives = sockets[1] };
    samples all;
    pthread_barrier_init(&two.together, NULL, 2);
    for (size_t i = 0; i < list->count; i++) {
        two.size = list->sizes[i];
        two.sent = calloc(1, two.size.bytes);
        two.received = calloc(1, two.size.bytes);
        if (!two.sent || !two.received) fail("memory");
        exchange(&two, &all);
        if (prints) print_figures("tcp", &two.size, &all);
        free(two.sent);
        free(two.received);
    }
    pthread_barrier_destroy(&two.together);
}

static int prepared(int made)
{
    const int on = 1;
    if (made < 0) fail("connection");
    setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return made;
}

static void listen_for(const char *port, int sockets[2])
{
    const int on = 1;
    struct sockaddr_in any = { .sin_family = AF_INET,
                               .sin_port = htons((uint16_t)strtoul(port, NULL, 10)) };
    int listener = prepared(socket(AF_INET, SOCK_STREAM, 0));
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&any, sizeof any) || listen(listener, 2)) fail("listen");
    printf("listening\n");
    fflush(stdout);
    for (int i = 0; i < 2; i++) sockets[i] = prepared(accept(listener, NULL, NULL));
    close(listener);
}

/* The first connection that one side makes is the one on which it receives. */
static void connect_to(const char *host, const char *port, int sockets[2])
{
    const struct addrinfo wanted = { .ai_family = AF_INET, .ai_socktype = SOCK_STREAM };
    struct addrinfo *found = NULL;
    if (getaddrinfo(host, port, &wanted, &found)) fail(host);
    for (int i = 1; i >= 0; i--) {
        sockets[i] = prepared(socket(AF_INET, SOCK_STREAM, 0));
        if (connect(sockets[i], found->ai_addr, found->ai_addrlen)) fail(host);
    }
    freeaddrinfo(found);
}

int main(int count, char **arguments)
{
    bool listens = count >= 3 && strcmp(arguments[1], "listen") == 0;
    int used = listens ? 3 : 4, sockets[2];
    if (!listens && (count < 4 || strcmp(arguments[1], "connect") != 0)) {
        fprintf(stderr, "exchange listen PORT [BYTES...] | connect HOST PORT [BYTES...]\n");
        return 2;
    }
    const size_list list = sizes_of(count - used, arguments + used);
    if (listens) listen_for(arguments[2], sockets);
    else connect_to(arguments[2], arguments[3], sockets);
    exchange_all(sockets, &list, !listens);
    if (listens) printf("done\n");
    close(sockets[0]);
    close(sockets[1]);
    return 0;
}
