/* export.c: device memory that several processes use. The device does the work; the checks are
 * here. */
#include "exec/state.h"

static ms_status unsupported(ms_engine *engine)
{
    return ms_engine_fail(engine, MS_ERROR_UNSUPPORTED,
                          "device \"%s\" has no memory that other processes can use: groups have "
                          "memory that their ranks reach (ms_group_storage)",
                          engine->device->name);
}

/* An empty storage has no memory that a handle could describe. */
ms_status ms_storage_export(const ms_storage *storage, ms_memory_handle *out)
{
    ms_engine *engine = storage->engine;
    if (!engine->device->share) return unsupported(engine);
    ms_status status = ms_storage_check(storage, 0, storage->bytes, false, "export");
    if (status) return status;
    if (storage->bytes == 0)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "export: the storage is empty");
    return engine->device->share(engine, storage->data, storage->bytes, out);
}

ms_status ms_memory_import(ms_engine *engine, const ms_memory_handle *handle, void **address)
{
    if (!engine->device->import) return unsupported(engine);
    return engine->device->import(engine, handle, address);
}

void ms_memory_forget(ms_engine *engine, void *address)
{
    if (address) engine->device->forget(engine, address);
}
