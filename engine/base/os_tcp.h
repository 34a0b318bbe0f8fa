/* os_tcp.h: connections to other nodes, and this node's names, of the operating-system table.
 * Inside base only; others ask the table. */
#ifndef MOONSHARD_BASE_OS_TCP_H
#define MOONSHARD_BASE_OS_TCP_H

#include "moonshard/base.h"

int ms_os_tcp_listen(void *user, const char *address, uint16_t *port, ms_file **out);
int ms_os_tcp_accept(void *user, ms_file *listener, uint64_t timeout_ns, ms_file **out);
int ms_os_tcp_connect(void *user, const char *name, uint16_t port, uint64_t timeout_ns,
                      ms_file **out);
int ms_os_tcp_send(void *user, ms_file *socket, const void *message, size_t bytes,
                   uint64_t timeout_ns);
int ms_os_tcp_receive(void *user, ms_file *socket, void *message, size_t bytes,
                      uint64_t timeout_ns);
int ms_os_tcp_await(void *user, ms_file *const *files, uint32_t count, uint64_t timeout_ns,
                    bool *ready);
int64_t ms_os_tcp_take(void *user, ms_file *socket, void *message, size_t bytes);
void ms_os_socket_end(void *user, ms_file *socket);
int ms_os_addresses(void *user, void (*one)(void *to, const char *interface, const char *address),
                    void *to);
int ms_os_node_id(void *user, ms_node_id *out);

#endif
