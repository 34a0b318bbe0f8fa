/* mig.c: slices of GPUs (MIG) that CUDA_VISIBLE_DEVICES names. The driver shows a process one of
 * them, the first.
 *
 * So the launcher gives each rank's process a value that names its own slice
 * (bindings/program/processes.c). Ranks that are threads of one process would all see the same
 * slice, and so would ranks to which another launcher gives one list of several slices. Both are
 * refused, unless the ranks share a GPU (bindings/placement.c). Slices do not reach each other's
 * memory. */
#include <stdio.h>
#include <string.h>

#include "moonshard/exec.h"

/* The next entry of a list and its length. */
static const char *next_entry(const char **list, size_t *bytes)
{
    const char *entry = *list;
    *bytes = strcspn(entry, ",");
    *list = entry + *bytes + (entry[*bytes] == ',');
    return entry;
}

static bool is_new(const char *visible, const char *entry, size_t bytes)
{
    size_t length;
    for (const char *list = visible; list < entry;) {
        const char *other = next_entry(&list, &length);
        if (length == bytes && memcmp(other, entry, bytes) == 0) return false;
    }
    return true;
}

uint32_t ms_mig_slices(const char *visible)
{
    uint32_t count = 0;
    size_t bytes;
    for (const char *list = visible ? visible : ""; *list; count++) {
        const char *entry = next_entry(&list, &bytes);
        if (bytes < 5 || memcmp(entry, "MIG-", 4) != 0 || !is_new(visible, entry, bytes)) return 0;
    }
    return count;
}

void ms_mig_slice(const char *visible, uint32_t index, char *text, size_t size)
{
    size_t bytes = 0;
    const char *entry = visible;
    for (uint32_t i = 0; i <= index; i++) entry = next_entry(&visible, &bytes);
    snprintf(text, size, "%.*s", (int)bytes, entry);
}
