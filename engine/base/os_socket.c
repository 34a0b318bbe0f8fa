/* os_socket.c: the part of the operating-system table that speaks through sockets: whole messages,
 * and files that go along. */
#include "base/os_socket.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define MS_FILES_MOST 160 /* of one message; the system allows 253 */

/* A name of Linux's abstract sockets (unix(7)): no file, and gone with the last process that has
 * the socket open. */
static bool is_abstract(const char *path) { return path[0] == '@'; }

/* The kernel names the peer's user (SO_PEERCRED): of a connection, that which its process had when
 * it connected, or called listen. */
static bool is_own(int descriptor)
{
    struct ucred peer = { .uid = (uid_t)-1 };
    socklen_t bytes = sizeof peer;
    return getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0
           && peer.uid == geteuid();
}

/* SOCK_SEQPACKET keeps the borders of messages, as datagrams do, and has connections, so that the
 * end of a peer is noticed. A path that does not fit the address is an error: a shortened one would
 * name another socket. */
static int open_socket(const char *path, struct sockaddr_un *address, socklen_t *bytes)
{
    *address = (struct sockaddr_un){ .sun_family = AF_UNIX };
    /* 108 bytes on Linux, far less than a path may have. */
    if (strlen(path) >= sizeof address->sun_path) return -ENAMETOOLONG;
    strcpy(address->sun_path, path);
    *bytes = sizeof *address;
    if (is_abstract(path)) {
        address->sun_path[0] = '\0';
        *bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path));
    }
    int descriptor = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    return descriptor < 0 ? -errno : descriptor;
}

/* Answers the descriptor or -errno. connect() does not wait for accept while the listener's queue
 * has room. */
static int connect_to(const char *path)
{
    struct sockaddr_un address;
    socklen_t bytes = 0;
    int descriptor = open_socket(path, &address, &bytes);
    if (descriptor < 0) return descriptor;
    int error = connect(descriptor, (struct sockaddr *)&address, bytes) == 0 ? 0 : -errno;
    /* Any user may listen on an abstract name. */
    if (error == 0 && is_abstract(path) && !is_own(descriptor)) error = -EACCES;
    if (error == 0) return descriptor;
    close(descriptor);
    return error;
}

/* Takes over a descriptor, or passes on the negative error in its place. On failure the descriptor
 * is closed. */
static int give(int descriptor, ms_file **out)
{
    int error = descriptor < 0 ? descriptor : ms_os_file_of(descriptor, out);
    if (error != 0 && descriptor >= 0) close(descriptor);
    return error;
}

/* The caller tries again while no process listens on the path yet (-ENOENT, -ECONNREFUSED), since
 * ranks start in any order. */
int ms_os_socket_connect(void *user, const char *path, ms_file **out)
{
    (void)user;
    return give(connect_to(path), out);
}

/* Removes a socket that a crash has left. Only a refused connection shows that it has no listener;
 * a live listener and a file of another kind are -EADDRINUSE and stay. */
static int remove_stale(const char *path)
{
    struct stat what;
    if (is_abstract(path)) return 0;
    if (lstat(path, &what) != 0) return errno == ENOENT ? 0 : -errno;
    /* A file of the user must never be removed. */
    if (!S_ISSOCK(what.st_mode)) return -EADDRINUSE;
    int other = connect_to(path);
    if (other >= 0) close(other);
    if (other != -ECONNREFUSED) return other >= 0 ? -EADDRINUSE : other;
    return unlink(path) == 0 ? 0 : -errno;
}

/* The socket is made before the old path is removed, and every error closes it again. A listener
 * that cannot listen takes its path away again, so that the next one does not find a stale socket.
 */
int ms_os_socket_listen(void *user, const char *path, ms_file **out)
{
    (void)user;
    struct sockaddr_un address;
    socklen_t bytes = 0;
    int descriptor = open_socket(path, &address, &bytes);
    if (descriptor < 0) return descriptor;
    int error = remove_stale(path);
    /* The mode of the socket decides who may connect, and holds from bind on. */
    if (error == 0) error = fchmod(descriptor, 0600) == 0 ? 0 : -errno;
    if (error == 0 && bind(descriptor, (struct sockaddr *)&address, bytes) != 0) error = -errno;
    /* As many as there may be ranks, so that none is refused while rank 0 is busy. */
    if (error == 0 && listen(descriptor, 128) != 0) {
        error = -errno;
        if (!is_abstract(path)) unlink(path);
    }
    if (error == 0) return give(descriptor, out);
    close(descriptor);
    return error;
}

/* Waits until there is something to receive or to accept. poll counts milliseconds; one is added so
 * that a short timeout does not become a busy loop. A signal gives -EAGAIN, and the caller decides
 * whether time is left. */
static int wait_readable(int descriptor, uint64_t timeout_ns)
{
    struct pollfd wait = { .fd = descriptor, .events = POLLIN };
    uint64_t ms = timeout_ns / 1000000 + 1;
    int ready = poll(&wait, 1, ms > 1 << 30 ? 1 << 30 : (int)ms);
    if (ready > 0) return 0;
    if (ready == 0) return -ETIMEDOUT;
    return errno == EINTR ? -EAGAIN : -errno;
}

/* Another user is refused here, whatever the permissions of the path: a message may carry files
 * that grant access to a rank's memory. */
int ms_os_socket_accept(void *user, ms_file *listener, uint64_t timeout_ns, ms_file **out)
{
    (void)user;
    int error = wait_readable(listener->descriptor, timeout_ns);
    if (error != 0) return error;
    int descriptor = accept4(listener->descriptor, NULL, NULL, SOCK_CLOEXEC);
    if (descriptor < 0) return errno == EINTR || errno == ECONNABORTED ? -EAGAIN : -errno;
    if (is_own(descriptor)) return give(descriptor, out);
    close(descriptor);
    return -EACCES;
}

/* One sendmsg is one message, whole or not at all, and the descriptors travel with it; the kernel
 * duplicates them, so the sender may close its own. MSG_NOSIGNAL: a closed peer is an error and not
 * SIGPIPE. */
int ms_os_socket_send(void *user, ms_file *socket, const void *message, size_t bytes,
                      ms_file *const *files, uint32_t count)
{
    (void)user;
    union {
        char bytes[CMSG_SPACE(MS_FILES_MOST * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec part = { .iov_base = (void *)(uintptr_t)message, .iov_len = bytes };
    struct msghdr header = { .msg_iov = &part, .msg_iovlen = 1 };
    if (count > MS_FILES_MOST) return -E2BIG;
    if (count > 0) {
        memset(&control, 0, sizeof control);
        header.msg_control = control.bytes;
        header.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(count * sizeof(int));
        int *descriptors = (int *)(void *)CMSG_DATA(rights);
        for (uint32_t i = 0; i < count; i++) descriptors[i] = files[i]->descriptor;
    }
    ssize_t sent;
    do sent = sendmsg(socket->descriptor, &header, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent < 0) return -errno;
    return (size_t)sent == bytes ? 0 : -EIO;
}

/* Takes the descriptors that came with a message, at most `most`. Those that cannot be kept are
 * closed, as the kernel has opened them in this process already. A message or a list of descriptors
 * that was cut off is -EMSGSIZE. Files taken before an error are the caller's. The caller's array
 * is filled as far as *count says. */
static int take_files(struct msghdr *header, ms_file **files, uint32_t most, uint32_t *count)
{
    int error = 0;
    for (struct cmsghdr *rights = CMSG_FIRSTHDR(header); rights;
         rights = CMSG_NXTHDR(header, rights)) {
        if (rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS) continue;
        size_t brought = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        const int *descriptors = (const int *)(void *)CMSG_DATA(rights);
        for (size_t i = 0; i < brought; i++) {
            if (error == 0 && *count == most) error = -E2BIG;
            if (error == 0) error = ms_os_file_of(descriptors[i], &files[*count]);
            if (error == 0) (*count)++;
            else close(descriptors[i]);
        }
    }
    if (error == 0 && (header->msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) error = -EMSGSIZE;
    return error;
}

/* MSG_CMSG_CLOEXEC closes received descriptors on exec from the start, so a fork between two calls
 * leaks none. A message that is cut off, or brings more files than the caller takes, is -EBADMSG;
 * the files that were taken until then are the caller's to close. */
int64_t ms_os_socket_receive(void *user, ms_file *socket, void *message, size_t bytes,
                             uint64_t timeout_ns, ms_file **files, uint32_t most, uint32_t *count)
{
    (void)user;
    union {
        char bytes[CMSG_SPACE(MS_FILES_MOST * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec part = { .iov_base = message, .iov_len = bytes };
    struct msghdr header = { .msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes };
    *count = 0;
    int error = wait_readable(socket->descriptor, timeout_ns);
    if (error != 0) return error;
    ssize_t received = recvmsg(socket->descriptor, &header, MSG_CMSG_CLOEXEC);
    if (received < 0) return -errno;
    return take_files(&header, files, most, count) == 0 ? received : -EBADMSG;
}
