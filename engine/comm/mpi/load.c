/* load.c: the module of an MPI, from a shared library. */
#include "comm/mpi/load.h"

ms_status ms_mpi_load(ms_context *context, const char *path, const ms_mpi_module **out)
{
    const ms_os *os = context->os;
    char why[512];
    void *library = os->library_load(os->user, path, why, sizeof why);
    if (!library) return ms_fail(context, MS_ERROR_NOT_FOUND, "cannot load MPI: %s", why);
    ms_mpi_module_function *function =
        (ms_mpi_module_function *)os->library_symbol(os->user, library, MS_MPI_MODULE_SYMBOL);
    if (!function)
        return ms_fail(context, MS_ERROR_UNSUPPORTED,
                       "'%s' is no module of Moonshard: it has no %s", path, MS_MPI_MODULE_SYMBOL);
    const ms_mpi_module *module = function();
    if (module->version != MS_MPI_MODULE_VERSION)
        return ms_fail(context, MS_ERROR_UNSUPPORTED,
                       "'%s' is a module of version %u, not %u: build it together with the engine",
                       path, module->version, MS_MPI_MODULE_VERSION);
    *out = module;
    return MS_OK;
}
