/* folder.c: folders and names: made, listed, removed and synced; the texts of paths. */
#include "io/path.h"

#include <errno.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>

/* Zero bytes give an address too, so that NULL always means a lack of memory. Alignment 64 is one
 * cache line. */
ms_status ms_bytes_new(ms_context *context, size_t bytes, const char *what, void **out)
{
    void *data = context->os->allocate(context->os->user, bytes != 0 ? bytes : 1, 64);
    if (data == NULL)
        return ms_fail(context, MS_ERROR_MEMORY, "%s: no memory for %zu bytes", what, bytes);
    *out = data;
    return MS_OK;
}

/* Three texts in one allocation, which the caller releases. */
static ms_status join(ms_context *context, const char *a, const char *between, const char *b,
                      char **out)
{
    size_t bytes = strlen(a) + strlen(between) + strlen(b) + 1;
    char *text = NULL;
    ms_status status = ms_bytes_new(context, bytes, "a path", (void **)&text);
    if (status) return status;
    snprintf(text, bytes, "%s%s%s", a, between, b);
    *out = text;
    return MS_OK;
}

/* With b "" it is the way to copy a text here. */
ms_status ms_text_join(ms_context *context, const char *a, const char *b, char **out)
{
    return join(context, a, "", b, out);
}

/* An empty folder gives "/name": callers check that a path is not empty. */
ms_status ms_path_join(ms_context *context, const char *folder, const char *name, char **out)
{
    size_t length = strlen(folder);
    return join(context, folder, length > 0 && folder[length - 1] == '/' ? "" : "/", name, out);
}

/* Refuses overlong forms, surrogates and code points beyond U+10FFFF, as RFC 3629 demands: one text
 * must not have two spellings. The zero that ends the text is no continuation byte, so a character
 * that is cut off is refused without reading past the end. Every byte that is looked at was reached
 * by a valid one before it. */
size_t ms_text_character(const char *characters)
{
    static const uint32_t least[] = { 0, 0, 0x80, 0x800, 0x10000 };
    const unsigned char *text = (const unsigned char *)characters;
    size_t bytes = 0;
    /* The first byte says how many follow; bytes 0x80 to 0xbf cannot be first and leave 0. */
    if (text[0] < 0x80) bytes = text[0] != 0;
    else if (text[0] >= 0xf0) bytes = 4;
    else if (text[0] >= 0xe0) bytes = 3;
    else if (text[0] >= 0xc0) bytes = 2;
    /* 0 is also the answer at the end of the text. */
    if (bytes <= 1) return bytes;
    /* The bits after the length mark. */
    uint32_t code = text[0] & (0xffu >> (bytes + 1));
    for (size_t i = 1; i < bytes; i++) {
        if ((text[i] & 0xc0) != 0x80) return 0;
        code = code << 6 | (text[i] & 0x3fu);
    }
    /* least[] has the smallest code that needs so many bytes. */
    if (text[0] >= 0xf8 || code < least[bytes] || code > 0x10ffff
        || (code >= 0xd800 && code < 0xe000))
        return 0;
    return bytes;
}

/* Control characters are refused because names go into messages and terminals: an escape sequence
 * in a file must not reach them. */
bool ms_text_is_name(const char *text, size_t longest)
{
    size_t length = strlen(text);
    if (length > longest) return false;
    while (*text) {
        size_t bytes = (unsigned char)*text < 0x20 || *text == 0x7f ? 0 : ms_text_character(text);
        if (bytes == 0) return false;
        text += bytes;
    }
    return true;
}

/* -------------------------------------------------------------------- names */

/* Room is made before the text, and the count rises last: after a failure the list is as it was. */
ms_status ms_names_add(ms_context *context, ms_names *names, const char *name)
{
    ms_status status = ms_grow(context, (void **)&names->items, &names->capacity, names->count + 1,
                               sizeof *names->items);
    if (!status) status = ms_text_join(context, name, "", &names->items[names->count]);
    if (!status) names->count++;
    return status;
}

/* Order of bytes, which no locale changes: every rank must see the same order. */
static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* qsort must not be given NULL, which an empty list has. */
void ms_names_sort(ms_names *names)
{
    if (names->count > 1) qsort(names->items, names->count, sizeof *names->items, compare_names);
}

/* The list can be used again after this. */
void ms_names_free(ms_context *context, ms_names *names)
{
    for (size_t i = 0; i < names->count; i++) ms_release(context, names->items[i]);
    ms_release(context, names->items);
    *names = (ms_names){ 0 };
}

/* ------------------------------------------------------------------ folders */

/* Makes the parents from left to right by cutting a copy of the path after each part. Several ranks
 * may make the same folder at once: whoever comes second finds it there, which is success. Each new
 * folder is synced in its parent at once, so a later crash leaves the whole path or a part of it
 * from the left. */
ms_status ms_folder_make(ms_context *context, const char *path)
{
    const ms_os *os = context->os;
    char *part = NULL;
    ms_status status = ms_text_join(context, path, "", &part);
    if (status) return status;
    for (char *end = part; !status && *end;) {
        /* Slashes in a row, and one in front, make no part of their own. */
        end += strspn(end, "/");
        end += strcspn(end, "/");
        /* The path is cut here for the moment, and is whole again at the end of the turn. */
        char kept = *end;
        *end = 0;
        ms_file_info info;
        int error = os->make_directory(os->user, part);
        /* Whatever the reason of a refusal (an existing parent may be read-only), a folder that is
         * there is all that is wanted. */
        if (error && (os->info(os->user, part, &info) != 0 || !info.is_directory))
            status = ms_fail_os(context, error, "cannot make the folder", part);
        /* What will be written in it is durable only if the folder itself is. */
        if (!error) status = ms_folder_sync_of(context, part);
        *end = kept;
    }
    ms_release(context, part);
    return status;
}

/* What the table's list function calls back with. Its callback cannot return an error, so the first
 * one is kept here and the remaining names are dropped. */
typedef struct ms_listing {
    ms_context *context;
    ms_names names;
    ms_status status;
} ms_listing;

/* The table's list function calls this for each name; the name is the system's and is copied. */
static void add_entry(void *to, const char *name)
{
    ms_listing *listing = to;
    if (!listing->status) listing->status = ms_names_add(listing->context, &listing->names, name);
}

/* Names are collected apart and handed over at the end, so that `out` is unchanged after an error.
 * Only the new names are sorted; the names that `out` had stay before them. */
ms_status ms_folder_list(ms_context *context, const char *path, ms_names *out)
{
    ms_listing listing = { .context = context };
    int error = context->os->list(context->os->user, path, add_entry, &listing);
    ms_status status = listing.status;
    if (error) status = ms_fail_os(context, error, "cannot list the folder", path);
    if (!status)
        status = ms_grow(context, (void **)&out->items, &out->capacity,
                         out->count + listing.names.count, sizeof *out->items);
    if (!status) {
        ms_names_sort(&listing.names);
        for (size_t i = 0; i < listing.names.count; i++)
            out->items[out->count++] = listing.names.items[i];
        listing.names.count = 0; /* handed over */
    }
    ms_names_free(context, &listing.names);
    return status;
}

/* Not recursive on purpose: only folders that hold nothing but files are made here, and a wrong
 * path must not remove a tree. Nor is a link followed: what it leads to may be somebody's archive.
 */
ms_status ms_folder_remove(ms_context *context, const char *path)
{
    const ms_os *os = context->os;
    ms_names names = { 0 };
    ms_file_info info;
    bool is_link = os->info(os->user, path, &info) == 0 && info.is_link;
    ms_status status = is_link ? MS_OK : ms_folder_list(context, path, &names);
    for (size_t i = 0; i < names.count && !status; i++) {
        char *file = NULL;
        status = ms_path_join(context, path, names.items[i], &file);
        int error = status ? 0 : os->remove(os->user, file);
        if (error) status = ms_fail_os(context, error, "cannot remove", file);
        ms_release(context, file);
    }
    /* Empty by now, unless someone has written into it meanwhile; then the removal fails and says
     * so. */
    int error = status ? 0 : os->remove(os->user, path);
    if (error) status = ms_fail_os(context, error, "cannot remove", path);
    ms_names_free(context, &names);
    return status;
}

/* A created, renamed or removed name is durable only after its folder was synced; syncing the file
 * does not write the folder. */
ms_status ms_folder_sync(ms_context *context, const char *path)
{
    ms_file *folder = NULL;
    ms_status status = ms_file_open(context, path, MS_FILE_DIRECTORY, &folder);
    if (status) return status;
    int error = context->os->sync(context->os->user, folder);
    ms_file_close(context, folder);
    return error ? ms_fail_os(context, error, "cannot sync the folder", path) : MS_OK;
}

/* The folder is the path up to its last slash: the root if that is the first character, the current
 * folder if there is none. */
ms_status ms_folder_sync_of(ms_context *context, const char *path)
{
    char *folder = NULL;
    ms_status status = ms_text_join(context, path, "", &folder);
    if (status) return status;
    /* For the root, the slash itself is kept. */
    char *slash = strrchr(folder, '/');
    if (slash == folder) slash[1] = 0;
    else if (slash) *slash = 0;
    status = ms_folder_sync(context, slash ? folder : ".");
    ms_release(context, folder);
    return status;
}

/* Both paths are in one folder, so one sync makes the old name's end and the new name's beginning
 * durable. */
ms_status ms_folder_rename(ms_context *context, const char *from, const char *to)
{
    int error = context->os->rename(context->os->user, from, to);
    if (error) return ms_fail_os(context, error, "cannot rename to", to);
    return ms_folder_sync_of(context, to);
}
