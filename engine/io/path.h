/* path.h: what the files of io/ share: memory that is not cleared first, joined texts, folders of
 * paths. */
#ifndef MOONSHARD_IO_PATH_H
#define MOONSHARD_IO_PATH_H

#include "moonshard/io.h"

/* As ms_allocate, but contents are undefined: for large buffers that are filled at once. */
ms_status ms_bytes_new(ms_context *context, size_t bytes, const char *what, void **out);
/* A new text: a, then b. */
ms_status ms_text_join(ms_context *context, const char *a, const char *b, char **out);
/* A new path: folder/name. */
ms_status ms_path_join(ms_context *context, const char *folder, const char *name, char **out);
/* Makes durable which names there are in the folder that path lies in. */
ms_status ms_folder_sync_of(ms_context *context, const char *path);
/* Bytes of the well-formed UTF-8 character at text, which ends with 0; 0 if there is none. */
size_t ms_text_character(const char *text);
/* Well-formed UTF-8, not too long, no control characters: a name that can be shown in any
 * message. */
bool ms_text_is_name(const char *text, size_t longest);

#endif
