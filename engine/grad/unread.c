/* unread.c: writes of parameters that wait until the running backward has no use for the old values
 * any more.
 *
 * A node that takes part in a backward counts its reads in the storages that it saved, from its
 * discovery until it has run. So whether anything still reads a parameter is one look at its
 * storage, and only a write that has to wait costs more: it goes into a list, which is walked after
 * each node. */
#include "grad/unread.h"

#include <string.h>

#include "grad/node.h"

/* By bytes of the storage, so views and other parameters in the same flat storage are told apart.
 */
bool ms_tensor_is_awaited(const ms_tensor *tensor)
{
    size_t begin, end;
    ms_tensor_span(tensor, &begin, &end);
    return ms_storage_expects_reads(tensor->storage, begin, end);
}

/* A write waits for all of its tensors together. */
static bool any_awaited(ms_tensor *const *tensors, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (ms_tensor_is_awaited(tensors[i])) return true;
    return false;
}

/* Releases the tensors and user of an item that has left the list. */
static void unread_free(ms_context *context, ms_unread *item)
{
    for (uint32_t i = 0; i < item->count; i++) ms_tensor_release(item->tensors[i]);
    ms_release(context, item->tensors);
    if (item->free_user) item->free_user(item->user);
}

/* Appends an item to the list, which takes over its user; on failure the caller keeps it. The
 * tensors are retained: their storages are looked at after each node. */
static ms_status unread_add(ms_engine *engine, ms_tape *tape, ms_unread item,
                            ms_tensor *const *tensors)
{
    ms_context *context = ms_engine_context(engine);
    void *memory = NULL;
    ms_status status = ms_grow(context, (void **)&tape->unread, &tape->unread_capacity,
                               tape->unread_count + 1, sizeof *tape->unread);
    if (!status)
        status = ms_allocate(context, item.count * sizeof *tensors, "a write that waits", &memory);
    if (status) return status;
    item.tensors = memory;
    for (uint32_t i = 0; i < item.count; i++) item.tensors[i] = ms_tensor_retain(tensors[i]);
    tape->unread[tape->unread_count++] = item;
    return MS_OK;
}

/* user is freed in all cases but one: when the call waits, the list has taken it over. Outside of a
 * backward nothing is expected to be read, so f is called at once. */
ms_status ms_backward_when_unread(ms_engine *engine, ms_tensor *const *tensors, uint32_t count,
                                  ms_status (*f)(void *user), void *user,
                                  void (*free_user)(void *user))
{
    ms_tape *tape = NULL;
    ms_status status = ms_tape_of(engine, &tape);
    bool waits = !status && tape->pass && any_awaited(tensors, count);
    if (waits) {
        status = unread_add(
            engine, tape,
            (ms_unread){ .f = f, .user = user, .free_user = free_user, .count = count }, tensors);
        if (!status) return MS_OK;
    }
    if (!status) status = f(user);
    if (free_user) free_user(user);
    return status;
}

/* f may register others: they go to the end of the list, and the item is taken out of it before the
 * call. */
ms_status ms_unread_run(ms_tape *tape)
{
    ms_status status = MS_OK;
    for (size_t i = 0; i < tape->unread_count && !status;) {
        ms_unread item = tape->unread[i];
        if (any_awaited(item.tensors, item.count)) {
            i++;
            continue;
        }
        memmove(&tape->unread[i], &tape->unread[i + 1], (--tape->unread_count - i) * sizeof item);
        status = item.f(item.user);
        unread_free(ms_engine_context(ms_tensor_engine(item.tensors[0])), &item);
    }
    return status;
}

/* After a backward without errors the list is empty: all nodes have run, so nothing was left to
 * wait for. */
void ms_unread_drop(ms_tape *tape, ms_engine *engine)
{
    while (tape->unread_count > 0) {
        ms_unread item = tape->unread[--tape->unread_count];
        unread_free(ms_engine_context(engine), &item);
    }
}
