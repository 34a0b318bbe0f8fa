/* io_support.h: for the tests of io: a folder of one's own, and a table whose n-th call for a file
 * fails. */
#ifndef MOONSHARD_TESTS_IO_SUPPORT_H
#define MOONSHARD_TESTS_IO_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

#include "fault_os.h"
#include "moonshard/io.h"

/* ---------------------------------------------------- a folder for the test */

static char test_folder[64];

static inline const char *in_folder(const char *name)
{
    static char paths[8][256]; /* one call may have several */
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", test_folder, name);
    return path;
}

static inline int folder_setup(void **state)
{
    (void)state;
    strcpy(test_folder, "/tmp/moonshard-io-XXXXXX");
    return mkdtemp(test_folder) ? 0 : -1;
}

static inline int folder_teardown(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", test_folder);
    return system(command);
}

static inline void put_file(const char *path, const void *data, size_t bytes)
{
    unlink(path); /* a new file: some file systems sync one that is truncated */
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    fclose(file);
}

/* How many names there are in a folder. */
static inline size_t count_names(const char *path)
{
    ms_context context;
    ms_names names = { 0 };
    ms_context_init(&context, NULL);
    assert_int_equal(ms_folder_list(&context, path, &names), MS_OK);
    size_t count = names.count;
    ms_names_free(&context, &names);
    return count;
}

/* -------------------------------------------- a table whose file calls fail */

typedef struct fault_files {
    ms_os table;
    const ms_os *real;
    long calls, fail_at; /* fail_at 0: never */
    bool forever;        /* all calls from then on, as if the process had been killed there */
    bool trickle;        /* a write or read moves one byte */
    long syncs;
} fault_files;

static inline int file_fault(void *user)
{
    fault_files *fault = user;
    long call = ++fault->calls;
    if (fault->fail_at == 0
        || (call != fault->fail_at && !(call > fault->fail_at && fault->forever)))
        return 0;
    return call % 2 ? -EIO : -ENOSPC;
}

static inline int fault_open(void *user, const char *path, int flags, ms_file **out)
{
    int error = file_fault(user);
    return error ? error : ((fault_files *)user)->real->open(NULL, path, flags, out);
}

static inline int64_t fault_read(void *user, ms_file *file, void *buffer, size_t bytes,
                                 uint64_t offset)
{
    fault_files *fault = user;
    int error = file_fault(user);
    if (error) return error;
    return fault->real->read(NULL, file, buffer, fault->trickle && bytes > 1 ? 1 : bytes, offset);
}

static inline int64_t fault_write(void *user, ms_file *file, const void *data, size_t bytes,
                                  uint64_t offset)
{
    fault_files *fault = user;
    int error = file_fault(user);
    /* A failing write has written half of its bytes. */
    if (error && bytes > 1) (void)fault->real->write(NULL, file, data, bytes / 2, offset);
    if (error) return error;
    return fault->real->write(NULL, file, data, fault->trickle && bytes > 1 ? 1 : bytes, offset);
}

static inline int fault_sync(void *user, ms_file *file)
{
    fault_files *fault = user;
    (void)file; /* no real sync: waiting for disks would take most of the time */
    fault->syncs++;
    return file_fault(user);
}

static inline int fault_size(void *user, ms_file *file, uint64_t *bytes)
{
    int error = file_fault(user);
    return error ? error : ((fault_files *)user)->real->size(NULL, file, bytes);
}

static inline int fault_resize(void *user, ms_file *file, uint64_t bytes)
{
    int error = file_fault(user);
    return error ? error : ((fault_files *)user)->real->resize(NULL, file, bytes);
}

static inline int fault_rename(void *user, const char *from, const char *to)
{
    int error = file_fault(user);
    return error ? error : ((fault_files *)user)->real->rename(NULL, from, to);
}

static inline int fault_remove(void *user, const char *path)
{
    int error = file_fault(user);
    return error ? error : ((fault_files *)user)->real->remove(NULL, path);
}

static inline int fault_make_directory(void *user, const char *path)
{
    int error = file_fault(user);
    return error ? error : ((fault_files *)user)->real->make_directory(NULL, path);
}

static inline int fault_list(void *user, const char *path, void (*entry)(void *, const char *),
                             void *to)
{
    int error = file_fault(user);
    return error ? error : ((fault_files *)user)->real->list(NULL, path, entry, to);
}

static inline void fault_files_init(fault_files *fault)
{
    memset(fault, 0, sizeof *fault);
    fault->real = ms_os_posix();
    fault->table = *fault->real;
    fault->table.user = fault;
    fault->table.open = fault_open;
    fault->table.read = fault_read;
    fault->table.write = fault_write;
    fault->table.sync = fault_sync;
    fault->table.size = fault_size;
    fault->table.resize = fault_resize;
    fault->table.rename = fault_rename;
    fault->table.remove = fault_remove;
    fault->table.make_directory = fault_make_directory;
    fault->table.list = fault_list;
}

#endif
