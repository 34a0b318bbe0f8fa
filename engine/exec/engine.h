/* engine.h: the plain settings of an engine, and what layers above keep on it. */
#ifndef MOONSHARD_EXEC_ENGINE_H
#define MOONSHARD_EXEC_ENGINE_H

#include "exec/device.h"

/* The device of the engine. */
const ms_device *ms_engine_device_of(const ms_engine *engine);
/* Whether it is the cuda device, or represents it (ms_engine_options.for_gpu). What the host
 * decides by the kind of device, it decides by this, so that a prediction of memory is right. */
bool ms_engine_is_for_gpu(const ms_engine *engine);
/* The kernels of a layer for the engine's device: one of `tables`, which end with NULL. Looked up
 * once for each engine. */
const ms_kernels *ms_engine_kernels(ms_engine *engine, ms_engine_slot layer,
                                    const ms_kernels *const *tables);

#endif
