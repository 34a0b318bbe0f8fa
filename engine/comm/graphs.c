/* graphs.c: whether the ranks of a job launch collectives as graphs. They agree once, when the
 * application asks for it. The transport then chooses for each call
 * (comm/transport/nccl/graphs.c). */
#include <string.h>

#include "comm/group.h"
#include "comm/transport_table.h"
#include "exec/engine.h"

static ms_status read_variable(ms_context *context, bool *wanted)
{
    const char *text = context->os->environment(context->os->user, MS_COMM_GRAPHS_VARIABLE);
    *wanted = !text || !*text || strcmp(text, "on") == 0;
    if (*wanted || strcmp(text, "off") == 0) return MS_OK;
    return ms_fail(context, MS_ERROR_ARGUMENT,
                   MS_COMM_GRAPHS_VARIABLE "=%.80s: whether collectives that come again become "
                                           "graphs, \"on\" or \"off\", is expected",
                   text);
}

/* One rank that does not want them is enough: they are for all ranks or for none. */
ms_status ms_comm_use_graphs(ms_engine *engine)
{
    ms_comm *comm = ms_comm_of(engine);
    bool wanted;
    ms_status status = read_variable(ms_engine_context(engine), &wanted);
    if (status || !comm || comm->graphs_asked || !comm->transport->choose) return status;
    bool is_own = strcmp(ms_engine_device_of(engine)->kernels, comm->transport->kernels) == 0;
    int32_t refused = !wanted || !is_own;
    ms_sharing sharing = { .kind = MS_ALL_REDUCE,
                           .op = MS_REDUCE_OP_MAX,
                           .dtype = MS_I32,
                           .count = 1,
                           .label = "graph = true" };
    status = ms_group_share(comm->groups[0], &sharing, &refused, &refused);
    comm->graphs_asked = !status;
    comm->has_graphs = !status && !refused;
    return status;
}
