/* alone.c: worlds in which a rank has no others, and the group of a rank by itself. */
#include "comm/control_table.h"

#include "comm/group.h"
#include "comm/transport_table.h"

/* A world of `size` ranks in which only this rank runs. The numbers of the others are taken to
 * equal its own. It works on every device, the simulated one included, as nothing moves. */
ms_status ms_comm_open_fake_on(ms_engine *engine, const ms_fake_world *fake, ms_group **world)
{
    uint32_t rank = fake->rank, size = fake->size;
    if (size < 1 || size > MS_FAKE_RANKS_MAX || rank >= size)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "rank %u of %u: a fake world has 1 to %d ranks, counted from 0", rank,
                              size, MS_FAKE_RANKS_MAX);
    if (fake->node_of && size > MS_LOCAL_RANKS_MAX)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "%u ranks: a job over several hosts has at most %d", size,
                              MS_LOCAL_RANKS_MAX);
    if (ms_comm_of(engine))
        return ms_engine_fail(engine, MS_ERROR_STATE, "this engine belongs to a world already");
    ms_membership membership = {
        .control = &ms_control_none, .transport = &ms_transport_fake, .rank = rank, .size = size
    };
    ms_status status = ms_comm_new(engine, &membership, world);
    if (!status && fake->node_of)
        ms_comm_place(ms_comm_of(engine), fake->node_of, size, fake->sum_by_ranks);
    return status;
}

ms_status ms_comm_open_fake(ms_engine *engine, uint32_t rank, uint32_t size, ms_group **world)
{
    ms_fake_world fake = { .rank = rank, .size = size };
    return ms_comm_open_fake_on(engine, &fake, world);
}

/* Made at first use and kept. */
ms_status ms_comm_alone(ms_engine *engine, ms_group **out)
{
    ms_comm *comm = ms_comm_of(engine);
    if (!comm) return ms_engine_fail(engine, MS_ERROR_STATE, "this engine has no world yet");
    if (!comm->alone) {
        const ms_group *world = comm->groups[0];
        ms_status status = ms_group_new(comm, MS_GROUP_ALONE, "self", 0, 1,
                                        &world->members[world->rank], &comm->alone);
        if (status) return status;
    }
    *out = comm->alone;
    return MS_OK;
}
