/* path.h: what the files of io/ share: memory that is not cleared first, joined texts, folders of
 * paths. */
#ifndef MOONSHARD_IO_PATH_H
#define MOONSHARD_IO_PATH_H

#include "moonshard/io.h"

/* Memory with undefined contents, for large buffers that are filled at once: clearing them as
 * ms_allocate does would touch every page twice. Release with ms_release. */
ms_status ms_bytes_new(ms_context *context, size_t bytes, const char *what, void **out);
/* A new text: a, then b. The caller releases it. */
ms_status ms_text_join(ms_context *context, const char *a, const char *b, char **out);
/* A new path: folder/name, with exactly one slash added if the folder has none at its end. The
 * caller releases it. */
ms_status ms_path_join(ms_context *context, const char *folder, const char *name, char **out);
/* Makes durable which names exist in the folder that contains `path`. */
ms_status ms_folder_sync_of(ms_context *context, const char *path);
/* Bytes of the well-formed UTF-8 character at text, which ends with 0; 0 if there is none. */
size_t ms_text_character(const char *text);
/* Whether the text is well-formed UTF-8 of at most `longest` bytes without control characters, so
 * that any message can show it. */
bool ms_text_is_name(const char *text, size_t longest);

#endif
