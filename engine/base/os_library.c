/* os_library.c: shared libraries that are loaded at run time. */
#include "base/os_library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

void *ms_os_library_load(void *user, const char *path, char *why, size_t bytes)
{
    (void)user;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const char *text = library ? "" : dlerror();
    snprintf(why, bytes, "%s", text ? text : "unknown reason");
    return library;
}

/* A sanitizer's library cannot be there twice. */
#if defined(LM_ID_NEWLM) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
void *ms_os_library_load_apart(void *user, const char *path, char *why, size_t bytes)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (!library) library = dlmopen(LM_ID_NEWLM, path, RTLD_NOW | RTLD_LOCAL);
    return library ? library : ms_os_library_load(user, path, why, bytes);
}
#else
void *ms_os_library_load_apart(void *user, const char *path, char *why, size_t bytes)
{
    return ms_os_library_load(user, path, why, bytes);
}
#endif

void ms_os_library_close(void *user, void *library)
{
    (void)user;
    (void)dlclose(library);
}

/* ISO C has no conversion from a pointer to data to one to a function; POSIX gives them one form.
 */
void (*ms_os_library_symbol(void *user, void *library, const char *name))(void)
{
    (void)user;
    void *found = dlsym(library, name);
    void (*function)(void) = NULL;
    memcpy(&function, &found, sizeof function);
    return function;
}
