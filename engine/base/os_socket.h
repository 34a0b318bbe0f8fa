/* os_socket.h: sockets of the operating-system table, and what its files are. Inside base only;
 * others ask the table. */
#ifndef MOONSHARD_BASE_OS_SOCKET_H
#define MOONSHARD_BASE_OS_SOCKET_H

#include "moonshard/base.h"

/* Files, folders, shared memory and sockets are all one descriptor here. The table that opened it
 * closes it. */
struct ms_file {
    int descriptor;
};

/* 0 or -errno; the descriptor stays open on failure. */
int ms_os_file_of(int descriptor, ms_file **out);

int ms_os_socket_listen(void *user, const char *path, ms_file **out);
int ms_os_socket_accept(void *user, ms_file *listener, uint64_t timeout_ns, ms_file **out);
int ms_os_socket_connect(void *user, const char *path, ms_file **out);
int ms_os_socket_send(void *user, ms_file *socket, const void *message, size_t bytes,
                      ms_file *const *files, uint32_t count);
int64_t ms_os_socket_receive(void *user, ms_file *socket, void *message, size_t bytes,
                             uint64_t timeout_ns, ms_file **files, uint32_t most, uint32_t *count);

#endif
