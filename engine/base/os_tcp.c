/* os_tcp.c: the part of the operating-system table that reaches other nodes: streams of bytes over
 * TCP, the addresses of this node, and what tells this node from others. */
#include "base/os_tcp.h"

#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "base/os_socket.h"

#define MS_TCP_RTO_MAX_MS 44 /* TCP_RTO_MAX_MS of linux/tcp.h of 6.15 */

/* ------------------------------------------------------------------- waiting */

/* Of the monotonic clock, which setting the time does not change. */
static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* The moment when so much time has passed; UINT64_MAX: never. */
static uint64_t limit_of(uint64_t timeout_ns)
{
    uint64_t now = now_ns();
    return timeout_ns > UINT64_MAX - now ? UINT64_MAX : now + timeout_ns;
}

/* Until one of them is ready; they are looked at once even where the limit has passed. poll counts
 * milliseconds; one is added so that the last fraction of one does not become a busy loop. Signals
 * do not shorten the wait. */
static int wait_for_any(struct pollfd *waits, uint32_t count, uint64_t limit)
{
    for (;;) {
        uint64_t now = now_ns(), ms = now < limit ? (limit - now) / 1000000 + 1 : 0;
        int ready = poll(waits, count, ms > 1000000 ? 1000000 : (int)ms);
        if (ready > 0) return 0;
        if (ready < 0 && errno != EINTR) return -errno;
        if (ready == 0 && ms == 0) return -ETIMEDOUT;
    }
}

static int wait_for(int descriptor, short events, uint64_t limit)
{
    struct pollfd wait = { .fd = descriptor, .events = events };
    return wait_for_any(&wait, 1, limit);
}

/* -------------------------------------------------------------- connections */

/* What was lost on the way is sent again within a second: TCP doubles its waits each time, and
 * after two seconds without a network the next one may be three seconds away, in which signs of
 * life would be missed. Linux bounds these waits from 6.15 on. An older one at least does not
 * double them where little is on its way. */
static void bound_waits(int descriptor)
{
    int on = 1, most_ms = 1000;
    (void)setsockopt(descriptor, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &on, sizeof on);
    (void)setsockopt(descriptor, IPPROTO_TCP, MS_TCP_RTO_MAX_MS, &most_ms, sizeof most_ms);
}

/* As a file of the table. Messages are small and wait for nothing: TCP_NODELAY. On failure the
 * descriptor is closed. */
static int give(int descriptor, ms_file **out)
{
    int on = 1;
    (void)setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    bound_waits(descriptor);
    int error = ms_os_file_of(descriptor, out);
    if (error) close(descriptor);
    return error;
}

/* Numeric addresses and names, of both families. flags: AI_PASSIVE to listen. */
static int look_up(const char *name, uint16_t port, int flags, struct addrinfo **out)
{
    char service[8];
    struct addrinfo wish = { .ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = flags | AI_NUMERICSERV };
    snprintf(service, sizeof service, "%u", port);
    int error = getaddrinfo(name, service, &wish, out);
    if (error == 0) return 0;
    if (error == EAI_MEMORY) return -ENOMEM;
    return error == EAI_SYSTEM ? -errno : -EHOSTUNREACH;
}

/* The port that the system has chosen, or that was asked for. */
static int port_of(int descriptor, uint16_t *port)
{
    struct sockaddr_storage at;
    socklen_t bytes = sizeof at;
    if (getsockname(descriptor, (struct sockaddr *)&at, &bytes)) return -errno;
    if (at.ss_family == AF_INET6) *port = ntohs(((struct sockaddr_in6 *)(void *)&at)->sin6_port);
    else *port = ntohs(((struct sockaddr_in *)(void *)&at)->sin_port);
    return 0;
}

/* One of the addresses that a name has. A port of a job that has just ended may be taken again; one
 * at which a process listens may not. */
static int listen_at(const struct addrinfo *at, uint16_t *port)
{
    int on = 1, off = 0,
        descriptor =
            socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, at->ai_protocol);
    if (descriptor < 0) return -errno;
    (void)setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (at->ai_family == AF_INET6)
        (void)setsockopt(descriptor, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    int error = bind(descriptor, at->ai_addr, at->ai_addrlen) ? -errno : 0;
    if (error == 0 && listen(descriptor, 128)) error = -errno;
    if (error == 0) error = port_of(descriptor, port);
    if (error == 0) return descriptor;
    close(descriptor);
    return error;
}

/* Without an address: IPv6's socket for all interfaces serves both families, where the system has
 * it; otherwise IPv4's. */
int ms_os_tcp_listen(void *user, const char *address, uint16_t *port, ms_file **out)
{
    (void)user;
    struct addrinfo *found = NULL;
    static const char *const any[] = { "::", "0.0.0.0" };
    int error = -EADDRNOTAVAIL;
    for (int i = 0; i < (address ? 1 : 2); i++) {
        error = look_up(address ? address : any[i], *port, AI_PASSIVE, &found);
        if (error) continue;
        error = listen_at(found, port);
        freeaddrinfo(found);
        /* A port that is taken is the answer, whatever the family. */
        if (error >= 0 || error == -EADDRINUSE || error == -EACCES) break;
    }
    return error < 0 ? error : give(error, out);
}

/* -EAGAIN: the visitor has gone again, and the caller accepts the next one. */
int ms_os_tcp_accept(void *user, ms_file *listener, uint64_t timeout_ns, ms_file **out)
{
    (void)user;
    int error = wait_for(listener->descriptor, POLLIN, limit_of(timeout_ns));
    if (error) return error;
    int descriptor = accept4(listener->descriptor, NULL, NULL, SOCK_CLOEXEC);
    if (descriptor >= 0) return give(descriptor, out);
    return errno == EINTR || errno == ECONNABORTED || errno == EWOULDBLOCK ? -EAGAIN : -errno;
}

/* The socket does not block while it connects, so that an address from which no answer comes costs
 * no more than the limit. */
static int connect_to(const struct addrinfo *at, uint64_t limit)
{
    int descriptor =
        socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, at->ai_protocol);
    if (descriptor < 0) return -errno;
    int error = connect(descriptor, at->ai_addr, at->ai_addrlen) ? -errno : 0;
    if (error == -EINPROGRESS) {
        socklen_t bytes = sizeof error;
        int waited = wait_for(descriptor, POLLOUT, limit);
        if (waited) error = waited;
        else if (getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &bytes)) error = -errno;
        else error = -error;
    }
    if (error == 0 && fcntl(descriptor, F_SETFL, 0)) error = -errno;
    if (error == 0) return descriptor;
    close(descriptor);
    return error;
}

/* Tries all addresses of the name in their order; the last failure is the answer. */
int ms_os_tcp_connect(void *user, const char *name, uint16_t port, uint64_t timeout_ns,
                      ms_file **out)
{
    (void)user;
    struct addrinfo *found = NULL;
    int error = look_up(name, port, 0, &found);
    if (error) return error;
    uint64_t limit = limit_of(timeout_ns);
    int descriptor = -EHOSTUNREACH;
    for (const struct addrinfo *at = found; at && descriptor < 0; at = at->ai_next)
        descriptor = connect_to(at, limit);
    freeaddrinfo(found);
    return descriptor < 0 ? descriptor : give(descriptor, out);
}

/* All bytes or an error; the limit is for all of them. After -ETIMEDOUT some may have been sent, so
 * the connection is of no more use. */
int ms_os_tcp_send(void *user, ms_file *socket, const void *message, size_t bytes,
                   uint64_t timeout_ns)
{
    (void)user;
    const char *from = message;
    uint64_t limit = limit_of(timeout_ns);
    while (bytes > 0) {
        ssize_t sent = send(socket->descriptor, from, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            from += sent;
            bytes -= (size_t)sent;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            int error = wait_for(socket->descriptor, POLLOUT, limit);
            if (error) return error;
        } else if (errno != EINTR) return -errno;
    }
    return 0;
}

/* -ETIMEDOUT: nothing has come, and the connection is as it was. The rest of a message that has
 * begun gets the same time again. */
int ms_os_tcp_receive(void *user, ms_file *socket, void *message, size_t bytes, uint64_t timeout_ns)
{
    (void)user;
    char *to = message;
    size_t got = 0;
    uint64_t limit = limit_of(timeout_ns);
    while (got < bytes) {
        ssize_t received = recv(socket->descriptor, to + got, bytes - got, MSG_DONTWAIT);
        if (received == 0) return -ECONNRESET;
        if (received > 0) {
            if (got == 0) limit = limit_of(timeout_ns);
            got += (size_t)received;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            int error = wait_for(socket->descriptor, POLLIN, limit);
            if (error) return error == -ETIMEDOUT && got > 0 ? -EPROTO : error;
        } else if (errno != EINTR) return -errno;
    }
    return 0;
}

int ms_os_tcp_await(void *user, ms_file *const *files, uint32_t count, uint64_t timeout_ns,
                    bool *ready)
{
    (void)user;
    struct pollfd waits[MS_TCP_AWAIT_MOST];
    if (count > MS_TCP_AWAIT_MOST) return -EINVAL;
    for (uint32_t i = 0; i < count; i++)
        waits[i] = (struct pollfd){ .fd = files[i]->descriptor, .events = POLLIN };
    int error = wait_for_any(waits, count, limit_of(timeout_ns));
    for (uint32_t i = 0; i < count; i++) ready[i] = !error && waits[i].revents != 0;
    return error;
}

int64_t ms_os_tcp_take(void *user, ms_file *socket, void *message, size_t bytes)
{
    (void)user;
    for (;;) {
        ssize_t received = recv(socket->descriptor, message, bytes, MSG_DONTWAIT);
        if (received > 0) return received;
        if (received == 0) return -ECONNRESET;
        if (errno == EAGAIN || errno == EWOULDBLOCK) return -EAGAIN;
        if (errno != EINTR) return -errno;
    }
}

/* Threads that wait on the socket come back; it stays open for them. */
void ms_os_socket_end(void *user, ms_file *socket)
{
    (void)user;
    (void)shutdown(socket->descriptor, SHUT_RDWR);
}

/* --------------------------------------------------------------------- names */

/* As text, without a scope; "" for other families. */
static void write_address(const struct sockaddr *at, char *text, size_t bytes)
{
    socklen_t length =
        at->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    if ((at->sa_family != AF_INET && at->sa_family != AF_INET6)
        || getnameinfo(at, length, text, (socklen_t)bytes, NULL, 0, NI_NUMERICHOST))
        *text = '\0';
    /* Link-local addresses mean something only together with an interface of this node. */
    if (strchr(text, '%')) *text = '\0';
}

/* Those of interfaces that are up, IPv4 before IPv6, loopback last, since other nodes do not reach
 * it. */
int ms_os_addresses(void *user, void (*one)(void *to, const char *interface, const char *address),
                    void *to)
{
    (void)user;
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all)) return -errno;
    for (int round = 0; round < 4; round++)
        for (const struct ifaddrs *at = all; at; at = at->ifa_next) {
            char text[NI_MAXHOST];
            if (!at->ifa_addr || !(at->ifa_flags & IFF_UP)) continue;
            bool loopback = at->ifa_flags & IFF_LOOPBACK, six = at->ifa_addr->sa_family == AF_INET6;
            if ((loopback ? 2 : 0) + (six ? 1 : 0) != round) continue;
            write_address(at->ifa_addr, text, sizeof text);
            if (*text) one(to, at->ifa_name, text);
        }
    freeifaddrs(all);
    return 0;
}

/* The beginning of a small file of the system, without its line's end. */
static void read_line(const char *path, char *text, size_t bytes)
{
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t count = descriptor < 0 ? 0 : read(descriptor, text, bytes - 1);
    if (descriptor >= 0) close(descriptor);
    text[count > 0 ? count : 0] = '\0';
    text[strcspn(text, "\n")] = '\0';
}

/* The same number for processes in the same namespace of this kind ("net", "pid"). */
static void read_namespace(const char *kind, char *text, size_t bytes)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/ns/%s", kind);
    ssize_t count = readlink(path, text, bytes - 1);
    text[count > 0 ? count : 0] = '\0';
}

/* Two processes are on the same node if the kernel has started once for both, and they see the same
 * network, processes and name: a container is a node of its own. */
int ms_os_node_id(void *user, ms_node_id *out)
{
    (void)user;
    struct utsname names;
    char boot[64], net[48], pid[48];
    if (uname(&names)) return -errno;
    read_line("/proc/sys/kernel/random/boot_id", boot, sizeof boot);
    read_namespace("net", net, sizeof net);
    read_namespace("pid", pid, sizeof pid);
    snprintf(out->name, sizeof out->name, "%.63s", names.nodename);
    snprintf(out->identity, sizeof out->identity, "%s %s %s %s", boot, net, pid, out->name);
    return 0;
}
