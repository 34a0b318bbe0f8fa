/* names.c: names of collectives and of their operations. */
#include "comm/names.h"

#include <string.h>

#include "moonshard/comm.h"

/* The names of the Lua API and of all reports. An unknown number gives a name, too: flight records
 * come from memory that another process writes. */
const char *ms_collective_name(ms_collective_kind kind)
{
    static const char *const names[MS_COLLECTIVES] = { "all_reduce", "reduce",     "reduce_scatter",
                                                       "all_gather", "all_to_all", "broadcast",
                                                       "gather",     "scatter",    "send",
                                                       "recv",       "barrier",    "split" };
    return (unsigned)kind < MS_COLLECTIVES ? names[kind] : "unknown";
}

/* In the order of ms_reduce_op. */
static const char *const op_names[MS_REDUCE_OPS] = { "sum", "avg",  "min",
                                                     "max", "prod", "premul_sum" };
/* Also for numbers from memory that another process writes. */
const char *ms_reduce_op_name(ms_reduce_op op)
{
    return (unsigned)op < MS_REDUCE_OPS ? op_names[op] : "unknown";
}

/* *out is unchanged if there is none of that name. */
bool ms_reduce_op_find(const char *name, ms_reduce_op *out)
{
    for (ms_reduce_op op = 0; op < MS_REDUCE_OPS; op++)
        if (strcmp(name, op_names[op]) == 0) {
            *out = op;
            return true;
        }
    return false;
}

/* The end of a path or a name says more than its beginning. */
void ms_copy_tail(char *to, size_t bytes, const char *text)
{
    size_t length = strlen(text);
    if (length >= bytes) {
        text += length - (bytes - 1);
        length = bytes - 1;
    }
    memcpy(to, text, length + 1);
}
