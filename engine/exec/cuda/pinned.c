/* pinned.c: pinned memory of the host, and reads by way of it.
 *
 * What is freed is kept for the next request of its size, because the driver's calls for pinned
 * memory are slow and may wait for all work of the GPU. At most 512 MiB are kept (KEPT_MOST).
 *
 * Invariants
 * - Whoever frees a block has asked whether its copies are done (ms_point_reached), or the streams
 *   have ended. So nothing that is under way uses a block that is kept, and it is handed out
 *   without a question. What it holds is what its last user left there.
 * - Every block begins with a header, by which it is found again when it is freed. */
#include "exec/cuda/pinned.h"

#include <string.h>

#include "exec/cuda/errors.h"
#include "exec/cuda/offload.h"

/* The header, which keeps what follows it aligned. */
struct ms_cuda_pinned_block {
    _Alignas(64) ms_cuda_pinned_block *next; /* of those that are free */
    size_t bytes;                            /* with the header */
};

/* As many bytes are kept at most, of all sizes. It is above what the batches of some steps take
 * (256 images of 224 x 224 numbers are 154 MB), and little for a machine that has a GPU. */
#define KEPT_MOST ((size_t)512 << 20)

/* So many bytes are read in one piece: on its way for longer than a call takes. */
#define PIECE ((size_t)4 << 20)

/* -------------------------------------------------------------------- sizes */

/* A request's size is rounded up to five, six, seven or eight times a power of two, so that lists
 * are few and a fifth is unused at most. Small sizes are multiples of 64. NULL: too much to be
 * kept; then it is not rounded. */
static ms_cuda_pinned_block **list_of(ms_cuda_device *self, size_t *bytes)
{
    size_t step = 64, list = 0;
    if (*bytes > KEPT_MOST) return NULL;
    while (*bytes > 8 * step) {
        step *= 2;
        list += 4;
    }
    size_t steps = (*bytes + step - 1) / step;
    list += steps - 1;
    MS_ASSERT(list < MS_CUDA_PINNED_LISTS);
    *bytes = steps * step;
    return &self->pinned.lists[list];
}

/* ---------------------------------------------------------------- the driver */

void ms_cuda_give_pinned_back(ms_cuda_device *self)
{
    for (size_t i = 0; i < MS_CUDA_PINNED_LISTS; i++)
        for (ms_cuda_pinned_block *next = NULL; self->pinned.lists[i];
             self->pinned.lists[i] = next) {
            next = self->pinned.lists[i]->next;
            (void)self->cuda.host_release(self->pinned.lists[i]);
        }
    self->pinned.bytes = 0;
}

/* Before the driver's refusal counts, it gets back what is kept. */
static ms_cuda_pinned_block *new_block(ms_cuda_device *self, size_t bytes)
{
    void *memory = NULL;
    ms_cuda_result result = self->cuda.host_allocate(&memory, bytes, 0);
    if (result == MS_CUDA_OUT_OF_MEMORY && self->pinned.bytes > 0) {
        ms_cuda_give_pinned_back(self);
        result = self->cuda.host_allocate(&memory, bytes, 0);
    }
    if (result) return NULL;
    ms_cuda_pinned_block *block = memory;
    block->bytes = bytes;
    return block;
}

/* ------------------------------------------------------------------- requests */

void *ms_cuda_host_allocate(ms_engine *engine, size_t bytes)
{
    ms_cuda_device *self = ms_cuda_enter(engine);
    size_t whole = bytes + sizeof(ms_cuda_pinned_block);
    if (whole < bytes) return NULL;
    ms_cuda_pinned_block **list = list_of(self, &whole), *block = list ? *list : NULL;
    if (block) {
        *list = block->next;
        self->pinned.bytes -= whole;
    } else block = new_block(self, whole);
    return block ? block + 1 : NULL;
}

/* Where too much would be kept, sizes have changed, and what was kept before goes. */
void ms_cuda_host_release(ms_engine *engine, void *memory)
{
    ms_cuda_device *self = ms_cuda_enter(engine);
    ms_cuda_pinned_block *block = (ms_cuda_pinned_block *)memory - 1;
    size_t bytes = block->bytes;
    ms_cuda_pinned_block **list = list_of(self, &bytes);
    if (!list) {
        (void)self->cuda.host_release(block);
        return;
    }
    if (self->pinned.bytes + bytes > KEPT_MOST) ms_cuda_give_pinned_back(self);
    block->next = *list;
    *list = block;
    self->pinned.bytes += bytes;
}

/* ---------------------------------------------------------------------- reads */

/* The host empties one half of `pinned` while the GPU fills the other. After an error no copy is
 * under way. */
static ms_cuda_result read_pieces(const ms_cuda_device *self, char *host, const char *from,
                                  size_t bytes, char *pinned)
{
    size_t piece = bytes < PIECE ? bytes : PIECE;
    ms_cuda_result result = ms_cuda_copy_from(self, pinned, from, piece, self->reader);
    for (size_t at = 0, half = 0; at < bytes && !result; half = PIECE - half) {
        size_t next = at + piece, rest = bytes - next, more = rest < PIECE ? rest : PIECE;
        result = self->cuda.stream_synchronize(self->reader);
        if (!result && more)
            result =
                ms_cuda_copy_from(self, pinned + (PIECE - half), from + next, more, self->reader);
        if (!result) memcpy(host + at, pinned + half, piece);
        at = next;
        piece = more;
    }
    return result;
}

/* On a stream of its own, which waits for no other. A caller's memory is not pinned: the driver's
 * own staging of it is slower. Where there is no pinned memory, it serves all the same. The streams
 * find an error of the GPU as well, but not before these bytes are used. */
ms_status ms_cuda_read(ms_engine *engine, void *host, const void *from, size_t bytes)
{
    ms_cuda_device *self = ms_cuda_enter(engine);
    ms_cuda_result result;
    char *pinned = ms_cuda_host_allocate(engine, bytes <= PIECE ? bytes : 2 * PIECE);
    if (pinned) {
        result = read_pieces(self, host, from, bytes, pinned);
        ms_cuda_host_release(engine, pinned);
    } else {
        result = ms_cuda_copy_from(self, host, from, bytes, self->reader);
        if (!result) result = self->cuda.stream_synchronize(self->reader);
    }
    return result ? ms_cuda_fail(engine, result, "read from the GPU") : MS_OK;
}
