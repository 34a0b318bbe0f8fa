/* listen.c: how a process listens for those of other nodes, and how they reach it. */
#include "comm/control/cluster/listen.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define MS_CONNECT_NS ((uint64_t)2 * 1000000000) /* for one address */
#define MS_RETRY_NS ((uint64_t)20 * 1000000)

/* Collects the addresses of an interface, or of all. */
typedef struct found_addresses {
    ms_endpoint *endpoint;
    bool interface_exists;
    char first[MS_CLUSTER_NAME_BYTES]; /* the interface of the first address */
} found_addresses;

static void add_address(void *to, const char *interface, const char *address)
{
    found_addresses *found = to;
    ms_endpoint *endpoint = found->endpoint;
    if (*endpoint->interface && strcmp(interface, endpoint->interface) != 0) return;
    if (!found->interface_exists) snprintf(found->first, sizeof found->first, "%s", interface);
    found->interface_exists = true;
    if (endpoint->address_count < MS_CLUSTER_ADDRESSES_MAX)
        snprintf(endpoint->addresses[endpoint->address_count++], MS_CLUSTER_ADDRESS_BYTES, "%s",
                 address);
}

ms_status ms_endpoint_listen(ms_context *context, const char *node, ms_endpoint *endpoint,
                             ms_file **out)
{
    const ms_os *os = context->os;
    found_addresses found = { .endpoint = endpoint };
    endpoint->address_count = 0;
    int error = os->addresses(os->user, add_address, &found);
    if (error) return ms_fail_os(context, error, "cannot read this host's addresses", NULL);
    if (*endpoint->interface && !found.interface_exists)
        return ms_fail(context, MS_ERROR_ARGUMENT,
                       "host %s has no interface '%s' that is up (--interface)", node,
                       endpoint->interface);
    error = os->tcp_listen(os->user, *endpoint->interface ? endpoint->addresses[0] : NULL,
                           &endpoint->port, out);
    if (error == -EADDRINUSE || error == -EACCES)
        return ms_fail(context, MS_ERROR_EXISTS,
                       "port %u of host %s %s: choose another one (--port), or none, and the "
                       "system chooses",
                       endpoint->port, node, error == -EACCES ? "may not be used" : "is in use");
    if (error) return ms_fail_os(context, error, "cannot listen for other hosts", NULL);
    memcpy(endpoint->interface, found.first, sizeof endpoint->interface);
    return MS_OK;
}

int ms_endpoint_connect(const ms_os *os, const ms_endpoint *endpoint, uint64_t timeout_ns,
                        ms_file **out)
{
    uint64_t limit = os->monotonic_ns(os->user) + timeout_ns;
    int error = -EHOSTUNREACH;
    do {
        for (uint32_t i = 0; i < endpoint->address_count; i++) {
            error = os->tcp_connect(os->user, endpoint->addresses[i], endpoint->port, MS_CONNECT_NS,
                                    out);
            if (!error) return 0;
        }
        ms_word never = 0;
        ms_futex_wait(&never, 0, MS_RETRY_NS);
    } while (os->monotonic_ns(os->user) < limit);
    return error;
}
