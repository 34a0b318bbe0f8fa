/* errors.h: what every file of the cuda device begins and ends with. */
#ifndef MOONSHARD_EXEC_CUDA_ERRORS_H
#define MOONSHARD_EXEC_CUDA_ERRORS_H

#include "exec/cuda/state.h"

/* Makes the context current, which the application may have changed: each function of the table
 * begins with it. */
ms_cuda_device *ms_cuda_enter(const ms_engine *engine);
/* The error of a call of the driver. */
ms_status ms_cuda_fail(ms_engine *engine, ms_cuda_result result, const char *what);
void ms_cuda_fail_stream(ms_stream *stream, uint64_t seq, uint32_t script, ms_status status,
                         const char *format, ...) MS_PRINTF(5, 6);
/* A call of the driver for number seq has failed, on a GPU that goes on. On any thread. */
void ms_cuda_fail_result(ms_stream *stream, uint64_t seq, uint32_t script, const char *name,
                         ms_cuda_result result);
/* A function of the host or the check of a flag has failed; name: what it is called. */
void ms_cuda_fail_named(ms_stream *stream, uint64_t seq, uint32_t script, const char *name,
                        ms_status status, const char *message);
void ms_cuda_fail_with(ms_stream *stream, uint64_t seq, uint32_t script, const ms_error *error);
/* As ms_stream_fail_after. */
void ms_cuda_fail_after(ms_stream *stream, uint64_t seq, const ms_stream *of, uint64_t of_seq);

#endif
