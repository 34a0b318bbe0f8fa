/* fault_os.h: an operating-system table that counts the calls that can fail, and makes the n-th one
 * fail, once or from then on. */
#ifndef MOONSHARD_TESTS_FAULT_OS_H
#define MOONSHARD_TESTS_FAULT_OS_H

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "moonshard/base.h"

typedef struct fault_os {
    ms_os table;
    const ms_os *real;
    atomic_long calls, fail_at, live; /* fail_at 0: never */
    atomic_bool forever;
} fault_os;

static bool fault_now(fault_os *fault)
{
    long call = atomic_fetch_add(&fault->calls, 1) + 1, at = atomic_load(&fault->fail_at);
    return at > 0 && (call == at || (call > at && atomic_load(&fault->forever)));
}

static void *fault_allocate(void *user, size_t bytes, size_t alignment)
{
    fault_os *fault = user;
    void *memory =
        fault_now(fault) ? NULL : fault->real->allocate(fault->real->user, bytes, alignment);
    if (memory) atomic_fetch_add(&fault->live, 1);
    return memory;
}

static void *fault_reallocate(void *user, void *pointer, size_t bytes)
{
    fault_os *fault = user;
    void *memory =
        fault_now(fault) ? NULL : fault->real->reallocate(fault->real->user, pointer, bytes);
    if (memory && !pointer) atomic_fetch_add(&fault->live, 1);
    return memory;
}

static void fault_release(void *user, void *pointer)
{
    fault_os *fault = user;
    if (pointer) atomic_fetch_sub(&fault->live, 1);
    fault->real->release(fault->real->user, pointer);
}

static int fault_commit(void *user, void *address, size_t bytes, bool huge)
{
    fault_os *fault = user;
    return fault_now(fault) ? -ENOMEM
                            : fault->real->commit(fault->real->user, address, bytes, huge);
}

static int fault_decommit(void *user, void *address, size_t bytes)
{
    fault_os *fault = user;
    return fault_now(fault) ? -ENOMEM : fault->real->decommit(fault->real->user, address, bytes);
}

static void *fault_reserve(void *user, size_t bytes)
{
    fault_os *fault = user;
    return fault_now(fault) ? NULL : fault->real->reserve(fault->real->user, bytes);
}

static int fault_thread_start(void *user, const char *name, void (*run)(void *), void *argument,
                              ms_os_thread **out)
{
    fault_os *fault = user;
    return fault_now(fault)
               ? -EAGAIN
               : fault->real->thread_start(fault->real->user, name, run, argument, out);
}

/* Memory files count as live until they are closed. */
static int fault_shared_create(void *user, const char *name, uint64_t bytes, ms_file **out)
{
    fault_os *fault = user;
    int error = fault_now(fault) ? -ENOSPC
                                 : fault->real->shared_create(fault->real->user, name, bytes, out);
    if (!error) atomic_fetch_add(&fault->live, 1);
    return error;
}

static void fault_counted_close(void *user, ms_file *file)
{
    fault_os *fault = user;
    if (file) atomic_fetch_sub(&fault->live, 1);
    fault->real->close(fault->real->user, file);
}

static void *fault_shared_map(void *user, ms_file *file, uint64_t bytes)
{
    fault_os *fault = user;
    return fault_now(fault) ? NULL : fault->real->shared_map(fault->real->user, file, bytes);
}

static int fault_shared_populate(void *user, ms_file *file, void *address, uint64_t offset,
                                 uint64_t bytes)
{
    fault_os *fault = user;
    return fault_now(fault)
               ? -ENOMEM
               : fault->real->shared_populate(fault->real->user, file, address, offset, bytes);
}

static int fault_counted_open(void *user, const char *path, int flags, ms_file **out)
{
    fault_os *fault = user;
    int error = fault->real->open(fault->real->user, path, flags, out);
    if (!error) atomic_fetch_add(&fault->live, 1);
    return error;
}

/* Everything else goes to the real table, whose functions ignore `user`. */
static inline void fault_os_init(fault_os *fault)
{
    memset(fault, 0, sizeof *fault);
    fault->real = ms_os_posix();
    fault->table = *fault->real;
    fault->table.user = fault;
    fault->table.allocate = fault_allocate;
    fault->table.reallocate = fault_reallocate;
    fault->table.release = fault_release;
    fault->table.commit = fault_commit;
    fault->table.decommit = fault_decommit;
    fault->table.reserve = fault_reserve;
    fault->table.thread_start = fault_thread_start;
    fault->table.open = fault_counted_open;
    fault->table.close = fault_counted_close;
    fault->table.shared_create = fault_shared_create;
    fault->table.shared_map = fault_shared_map;
    fault->table.shared_populate = fault_shared_populate;
}

#endif
