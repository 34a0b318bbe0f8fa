/* status.c: the version, names of statuses, the error record, the log. */
#include "moonshard/base.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

const char *ms_version(void) { return MS_VERSION; }

/* The names from "not_found" on are part of the Lua API: scripts compare the third result of a
 * failed call with them. */
const char *ms_status_name(ms_status status)
{
    static const char *const names[] = {
        [MS_OK] = "ok",
        [MS_ERROR_ARGUMENT] = "argument",
        [MS_ERROR_STATE] = "state",
        [MS_ERROR_HAZARD] = "hazard",
        [MS_ERROR_TASK] = "task",
        [MS_ERROR_MEMORY] = "memory",
        [MS_ERROR_SCRIPT] = "script",
        [MS_ERROR_ABORTED] = "aborted",
        [MS_ERROR_NOT_FOUND] = "not_found",
        [MS_ERROR_DENIED] = "denied",
        [MS_ERROR_EXISTS] = "exists",
        [MS_ERROR_NO_SPACE] = "no_space",
        [MS_ERROR_CORRUPT] = "corrupt",
        [MS_ERROR_MISMATCH] = "mismatch",
        [MS_ERROR_TIMEOUT] = "timeout",
        [MS_ERROR_UNSUPPORTED] = "unsupported",
        [MS_ERROR_IO] = "io",
    };
    return (unsigned)status < sizeof names / sizeof *names ? names[status] : "unknown";
}

/* -1 means that a number does not apply; 0 would name rank 0. A field that an earlier error has set
 * would otherwise stay and be reported with the next one. */
static void error_clear(ms_error *error)
{
    memset(error, 0, sizeof *error);
    error->rank = -1;
    error->collective = -1;
    error->bucket = -1;
}

/* It allocates nothing, so a context can be made on the stack where there is none: in destructors
 * and on threads of one's own. */
void ms_context_init(ms_context *context, const ms_os *os)
{
    memset(context, 0, sizeof *context);
    context->os = os != NULL ? os : ms_os_posix();
    context->log_level = MS_LOG_WARN;
    error_clear(&context->error);
}

/* The message is cut at MS_ERROR_MESSAGE_BYTES. The record belongs to the context's thread, so no
 * lock is needed. */
ms_status ms_fail(ms_context *context, ms_status status, const char *format, ...)
{
    /* An argument may be the old message itself ("checkpoint: <reason>"), so the new one is made
     * beside it. */
    char message[MS_ERROR_MESSAGE_BYTES];
    va_list list;
    va_start(list, format);
    vsnprintf(message, sizeof message, format, list);
    va_end(list);
    error_clear(&context->error);
    context->error.status = status;
    memcpy(context->error.message, message, sizeof message);
    return status;
}

/* Groups errno by what a caller can do about it. Whatever has no remedy of its own is MS_ERROR_IO,
 * with the system's text in the message. */
static ms_status status_from_errno(int error)
{
    switch (error) {
    /* A part of the path that is a file counts as absent, too. */
    case ENOENT:
    case ENOTDIR: return MS_ERROR_NOT_FOUND;
    /* The caller may try again as another user, or later. */
    case EACCES:
    case EPERM:
    case EROFS:
    case ETXTBSY:
    case EWOULDBLOCK:
    case EBUSY: return MS_ERROR_DENIED;
    /* Something of another kind, or not empty, is in the way. */
    case EEXIST:
    case ENOTEMPTY:
    case EISDIR: return MS_ERROR_EXISTS;
    /* Quotas and limits of a file's size are handled as a full disk is: by making room elsewhere.
     */
    case ENOSPC:
    case EDQUOT:
    case EFBIG: return MS_ERROR_NO_SPACE;
    case ETIMEDOUT: return MS_ERROR_TIMEOUT;
    case ENOSYS:
    case EOPNOTSUPP: return MS_ERROR_UNSUPPORTED;
    case ENOMEM: return MS_ERROR_MEMORY;
    default: return MS_ERROR_IO;
    }
}

/* EWOULDBLOCK is a lock that another process holds; strerror would call it a resource that is
 * temporarily unavailable. */
ms_status ms_fail_os(ms_context *context, int errno_negative, const char *what, const char *path)
{
    /* A positive value is a mistake of the caller, and gets the general reason. */
    int error = errno_negative < 0 ? -errno_negative : EIO;
    const char *reason = error == EWOULDBLOCK ? "another process uses it" : strerror(error);
    if (path == NULL) return ms_fail(context, status_from_errno(error), "%s: %s", what, reason);
    return ms_fail(context, status_from_errno(error), "%s '%s': %s", what, path, reason);
}

/* The level is tested before the text is made, so a debug message that nobody wants costs a
 * comparison. */
void ms_log(ms_context *context, ms_log_level level, const char *format, ...)
{
    if (context->log == NULL || level < context->log_level) return;
    char message[MS_ERROR_MESSAGE_BYTES];
    va_list list;
    va_start(list, format);
    /* A message that is too long is cut; a log line has no second part. */
    vsnprintf(message, sizeof message, format, list);
    va_end(list);
    context->log(context->log_user, level, message);
}
