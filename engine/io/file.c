/* file.c: whole files: reading, locking, and writing so that a crash leaves the old content or the
 * new. */
#include "base/thread.h"
#include "io/path.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The message has the path; those of later calls get it as an argument, because ms_file does not
 * keep it. */
ms_status ms_file_open(ms_context *context, const char *path, int flags, ms_file **out)
{
    int error = context->os->open(context->os->user, path, flags, out);
    return error == 0 ? MS_OK : ms_fail_os(context, error, "cannot open", path);
}

/* NULL is allowed, so that an error path closes whatever it has. */
void ms_file_close(ms_context *context, ms_file *file)
{
    if (file != NULL) context->os->close(context->os->user, file);
}

/* The system may move fewer bytes than asked for, so this loops until all have come. A file that
 * ends too early was truncated while it was read, or its header is: MS_ERROR_CORRUPT, with the
 * byte. The activity marks tell the deadlock detection that a rank blocked in a read is still at
 * work. */
ms_status ms_file_read(ms_context *context, ms_file *file, const char *path, void *buffer,
                       size_t bytes, uint64_t offset)
{
    for (size_t done = 0; done < bytes;) {
        ms_activity_begin(context->activity);
        int64_t count = context->os->read(context->os->user, file, (char *)buffer + done,
                                          bytes - done, offset + done);
        ms_activity_end(context->activity);
        if (count < 0) return ms_fail_os(context, (int)count, "cannot read", path);
        if (count == 0)
            return ms_fail(context, MS_ERROR_CORRUPT,
                           "'%s' ends at byte %" PRIu64 ", %zu bytes too early", path,
                           offset + done, bytes - done);
        done += (size_t)count;
    }
    return MS_OK;
}

/* The system may take fewer bytes than asked for. The activity marks are those of ms_file_read. */
ms_status ms_file_write(ms_context *context, ms_file *file, const char *path, const void *data,
                        size_t bytes, uint64_t offset)
{
    for (size_t done = 0; done < bytes;) {
        ms_activity_begin(context->activity);
        int64_t count = context->os->write(context->os->user, file, (const char *)data + done,
                                           bytes - done, offset + done);
        ms_activity_end(context->activity);
        /* A write that moves nothing and gives no reason counts as an error; the loop would never
         * end. */
        if (count <= 0)
            return ms_fail_os(context, count < 0 ? (int)count : -EIO, "cannot write", path);
        done += (size_t)count;
    }
    return MS_OK;
}

/* Concurrent appenders would make `before` wrong, and the cut after a failure would remove their
 * records. Therefore only one process may append. */
ms_status ms_file_append(ms_context *context, ms_file *file, const char *path, const void *data,
                         size_t bytes)
{
    const ms_os *os = context->os;
    /* Where the file ends now is where a failed record is cut off again. */
    uint64_t before = 0;
    int error = os->size(os->user, file, &before);
    if (error) return ms_fail_os(context, error, "cannot tell the size of", path);
    ms_status status = ms_file_write(context, file, path, data, bytes, before);
    /* Bytes that were written before the disk was full would precede the next record, so they are
     * cut off. A device has no size; the cut fails there, and that is ignored. */
    if (status) (void)os->resize(os->user, file, before);
    return status;
}

/* The limit bounds the memory that a hostile or wrong file can take; it is compared with the size
 * before anything is allocated. One more byte holds the zero that lets callers treat the content as
 * a string. */
ms_status ms_file_read_all(ms_context *context, const char *path, uint64_t limit, void **out,
                           size_t *bytes)
{
    ms_file *file = NULL;
    uint64_t size = 0;
    char *data = NULL;
    ms_status status = ms_file_open(context, path, MS_FILE_READ, &file);
    if (status) return status;
    int error = context->os->size(context->os->user, file, &size);
    if (error) status = ms_fail_os(context, error, "cannot tell the size of", path);
    /* One byte more is needed for the zero at the end. */
    else if (size > limit || size > SIZE_MAX - 1)
        status =
            ms_fail(context, MS_ERROR_CORRUPT,
                    "'%s' has %" PRIu64 " bytes; at most %" PRIu64 " are read", path, size, limit);
    if (!status) status = ms_bytes_new(context, (size_t)size + 1, path, (void **)&data);
    if (!status) status = ms_file_read(context, file, path, data, (size_t)size, 0);
    ms_file_close(context, file);
    if (status) {
        ms_release(context, data);
        return status;
    }
    data[size] = 0;
    *out = data;
    /* Without the zero. */
    *bytes = (size_t)size;
    return MS_OK;
}

/* ------------------------------------------------------------------ writing */

/* A file that is written under a temporary name in the final one's folder, since a rename is atomic
 * only within one file system. */
struct ms_writer {
    ms_context *context;
    ms_file *file;
    char *path, *temporary;
    bool made; /* the temporary file exists and is ours to remove */
};

/* The temporary file is beside the final one. It gets its permissions from the umask, as a file
 * that is written directly does. */
ms_status ms_writer_new(ms_context *context, const char *path, ms_writer **out)
{
    ms_writer *writer = NULL;
    char suffix[64];
    /* Process and time make the temporary name unique among all writers of this path. If it exists
     * all the same, MS_FILE_EXCLUSIVE makes this writer fail, so that two writers never share a
     * file. */
    snprintf(suffix, sizeof suffix, ".tmp-%" PRId64 "-%" PRIx64,
             context->os->process_id(context->os->user),
             context->os->monotonic_ns(context->os->user));
    ms_status status = ms_allocate(context, sizeof *writer, "a file writer", (void **)&writer);
    if (status) return status;
    writer->context = context;
    /* A copy, since the caller's path may go before the commit. */
    status = ms_text_join(context, path, "", &writer->path);
    if (!status) status = ms_text_join(context, path, suffix, &writer->temporary);
    if (!status) {
        int error =
            context->os->open(context->os->user, writer->temporary,
                              MS_FILE_WRITE | MS_FILE_CREATE | MS_FILE_EXCLUSIVE, &writer->file);
        if (error) status = ms_fail_os(context, error, "cannot write", path);
        else writer->made = true;
    }
    if (status) {
        ms_writer_free(writer);
        return status;
    }
    *out = writer;
    return MS_OK;
}

/* Errors name the final path, which the user knows, and not the temporary one. */
ms_status ms_writer_write(ms_writer *writer, const void *data, size_t bytes, uint64_t offset)
{
    return ms_file_write(writer->context, writer->file, writer->path, data, bytes, offset);
}

/* The order is what makes it durable. First the content is synced: a rename that reaches the disk
 * before the content would show an empty file after a crash. Then the name is replaced in one step.
 * Then the folder is synced, as the new name is its content. If that last step fails, the file has
 * its new name but may not keep it. */
ms_status ms_writer_commit(ms_writer *writer)
{
    ms_context *context = writer->context;
    const ms_os *os = context->os;
    ms_activity_begin(context->activity);
    int error = os->sync(os->user, writer->file);
    ms_activity_end(context->activity);
    ms_file_close(context, writer->file);
    /* Closed in any case: after a failed sync the descriptor is of no use. */
    writer->file = NULL;
    if (error) return ms_fail_os(context, error, "cannot write", writer->path);
    error = os->rename(os->user, writer->temporary, writer->path);
    if (error) return ms_fail_os(context, error, "cannot write", writer->path);
    writer->made = false;
    return ms_folder_sync_of(context, writer->path);
}

/* After a commit `made` is false, and only memory is released. */
void ms_writer_free(ms_writer *writer)
{
    if (writer == NULL) return;
    ms_context *context = writer->context;
    ms_file_close(context, writer->file);
    /* Best effort: a temporary file that stays is named as one. */
    if (writer->made) (void)context->os->remove(context->os->user, writer->temporary);
    ms_release(context, writer->temporary);
    ms_release(context, writer->path);
    ms_release(context, writer);
}

/* For content that is in memory as a whole. */
ms_status ms_file_write_atomic(ms_context *context, const char *path, const void *data,
                               size_t bytes)
{
    ms_writer *writer = NULL;
    ms_status status = ms_writer_new(context, path, &writer);
    if (!status) status = ms_writer_write(writer, data, bytes, 0);
    if (!status) status = ms_writer_commit(writer);
    ms_writer_free(writer);
    return status;
}

/* ------------------------------------------------------------------ locking */

/* Reads what the holder wrote into its lock file, for the error message. A file that cannot be read
 * gives an empty text: the lock itself was tested by the system, not by this text. */
static void read_holder(ms_context *context, ms_file *file, char *text, size_t bytes)
{
    /* The holder may be writing its text just now. */
    int64_t count = context->os->read(context->os->user, file, text, bytes - 1, 0);
    text[count > 0 ? count : 0] = 0;
    text[strcspn(text, "\n")] = 0;
}

/* Locks it. A process that asks whether it is locked has the lock for an instant, so a lock that is
 * held is tried again. */
static int try_lock(const ms_os *os, ms_file *file)
{
    enum { TRIES = 5, PAUSE_NS = 2000000 };
    ms_word nothing = 0;
    int error = os->lock(os->user, file);
    for (int i = 0; error == -EWOULDBLOCK && i < TRIES; i++) {
        (void)ms_futex_wait(&nothing, 0, PAUSE_NS);
        error = os->lock(os->user, file);
    }
    return error;
}

/* The system drops the lock when the file is closed or the process ends, however it ends. So the
 * file is never removed, and a crash leaves nothing to clean up. The file is not truncated: those
 * who are refused must still read the holder's text. */
ms_status ms_file_lock(ms_context *context, const char *path, ms_file **out)
{
    const ms_os *os = context->os;
    ms_file *file = NULL;
    char text[64];
    ms_status status =
        ms_file_open(context, path, MS_FILE_READ | MS_FILE_WRITE | MS_FILE_CREATE, &file);
    if (status) return status;
    int error = try_lock(os, file);
    if (error == -EWOULDBLOCK) {
        read_holder(context, file, text, sizeof text);
        status = ms_fail(context, MS_ERROR_DENIED,
                         "'%s' is locked by %s; wait until it has ended, or use another folder",
                         path, *text ? text : "another process");
    } else if (error) {
        status = ms_fail_os(context, error, "cannot lock", path);
    } else {
        /* Padded to one length, so that what an earlier and longer holder wrote does not show. */
        int length =
            snprintf(text, sizeof text, "process %-20" PRId64 "\n", os->process_id(os->user));
        status = ms_file_write(context, file, path, text, (size_t)length, 0);
    }
    if (status) {
        ms_file_close(context, file);
        return status;
    }
    *out = file;
    return MS_OK;
}

ms_status ms_file_is_locked(ms_context *context, const char *path, bool *locked)
{
    const ms_os *os = context->os;
    ms_file *file = NULL;
    *locked = false;
    ms_status status = ms_file_open(context, path, MS_FILE_READ | MS_FILE_WRITE, &file);
    if (status) return status == MS_ERROR_NOT_FOUND ? MS_OK : status;
    int error = os->lock(os->user, file);
    *locked = error == -EWOULDBLOCK;
    if (error && !*locked) status = ms_fail_os(context, error, "cannot lock", path);
    ms_file_close(context, file);
    return status;
}
