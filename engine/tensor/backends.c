/* backends.c: the table of kernels that belongs to the engine's device. */
#include "tensor/backend.h"

#include <string.h>

#include "base/assert.h"
#include "exec/device.h"

static const ms_backend *const backends[] = { &ms_cpu_backend };

const ms_backend *ms_engine_backend(ms_engine *engine)
{
    const ms_backend *backend = ms_engine_kernels(engine, MS_SLOT_TENSOR);
    if (backend) return backend;
    const char *family = ms_engine_device_of(engine)->kernels;
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++)
        if (strcmp(backends[i]->family, family) == 0) backend = backends[i];
    MS_ASSERT(backend);
    ms_engine_set_kernels(engine, MS_SLOT_TENSOR, backend);
    return backend;
}

const ms_task *ms_engine_kernel(ms_engine *engine, ms_kernel kernel)
{
    return ms_engine_backend(engine)->tasks[kernel];
}
