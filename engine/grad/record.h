/* record.h: running an operator and writing its node. */
#ifndef MOONSHARD_GRAD_RECORD_H
#define MOONSHARD_GRAD_RECORD_H

#include "grad/state.h"

/* MS_ERROR_STATE if a recorded write in place has changed this tensor's memory (NULL: fine) after
 * its history was recorded: a gradient through that history would ignore the write. */
ms_status ms_history_check(ms_engine *engine, const char *what, const ms_tensor *tensor);
/* If the first run of a recomputed function is on, notes those of the tensors (NULL: none) that
 * require a gradient or are a parameter's values. differentiable: whether what uses them can give
 * them a gradient. */
ms_status ms_capture(ms_engine *engine, ms_tensor *const *tensors, uint32_t count,
                     bool differentiable);
/* As ms_record, with edges to the captured nodes (handed over) after those to the inputs; f has no
 * results for them. */
ms_status ms_record_captured(ms_engine *engine, const ms_function *f, void *user,
                             ms_tensor *const *inputs, uint32_t input_count, ms_captures *captures,
                             ms_tensor *const *outputs, uint32_t output_count);

#endif
