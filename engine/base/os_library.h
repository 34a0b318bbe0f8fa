/* os_library.h: shared libraries of the operating-system table. Inside base only; others ask the
 * table. */
#ifndef MOONSHARD_BASE_OS_LIBRARY_H
#define MOONSHARD_BASE_OS_LIBRARY_H

#include "moonshard/base.h"

void *ms_os_library_load(void *user, const char *path, char *why, size_t bytes);
void *ms_os_library_load_apart(void *user, const char *path, char *why, size_t bytes);
void (*ms_os_library_symbol(void *user, void *library, const char *name))(void);
void ms_os_library_close(void *user, void *library);

#endif
