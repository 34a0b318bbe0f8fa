/* membership.c: joins a job: the control of the rendezvous, and the transport for this engine's
 * device.
 *
 * The rendezvous names its control. Of the transports that go with this control (pairings), the
 * first one is taken that moves the memory of the engine's device, or the one that the user names
 * (ms_comm_options.transport). */
#include "comm/rendezvous.h"

#include <stdio.h>
#include <string.h>

#include "comm/group.h"
#include "comm/transport_table.h"
#include "exec/engine.h"

/* Called for a failed task. Peers would wait for this rank's later collectives for ever, so its
 * error ends the job for all. A forked child has a copy of the engine but is no rank of the job; it
 * reports nothing. It runs on the thread of the stream that failed, so it must not touch what
 * belongs to the host thread; control's abort may be called from any. */
static void end_job(ms_engine *engine, const ms_error *error)
{
    ms_comm *comm = ms_comm_of(engine);
    const ms_os *os = ms_engine_context(engine)->os;
    if (comm && os->process_id(os->user) == comm->process) comm->control->abort(comm, error);
}

/* Which transports may go with which control. The first one for the device's kernels is taken where
 * the user names none. */
static const struct pairing {
    const ms_control *control;
    const ms_transport *transport;
} pairings[] = { { &ms_control_shm, &ms_transport_local },
                 { &ms_control_cluster, &ms_transport_mpi },
                 { &ms_control_shm, &ms_transport_nccl },
                 { &ms_control_cluster, &ms_transport_nccl } };

/* A name that is wrong gets the names that are right. */
static ms_status refuse_name(ms_engine *engine, const ms_control *control, const char *name)
{
    char names[128] = "";
    for (size_t i = 0, used = 0; i < sizeof pairings / sizeof *pairings; i++)
        if (pairings[i].control == control && used < sizeof names)
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "",
                                     pairings[i].transport->name);
    return ms_engine_fail(
        engine, MS_ERROR_ARGUMENT,
        "transport \"%.40s\" is none of those between ranks that meet over %s: %s", name,
        control->name, names);
}

/* Tensors of a device whose memory no transport moves are refused when the engine joins. name: what
 * the user asks for, or NULL. */
static ms_status choose_transport(ms_engine *engine, const ms_control *control, uint32_t ranks,
                                  const char *name, const ms_transport **out)
{
    const ms_device *device = ms_engine_device_of(engine);
    bool is_known = !name;
    /* A rank that has no others needs no library between GPUs. */
    if (!name && ranks == 1 && strcmp(device->kernels, ms_transport_fake.kernels) != 0) {
        *out = &ms_transport_fake;
        return MS_OK;
    }
    for (size_t i = 0; i < sizeof pairings / sizeof *pairings; i++) {
        const ms_transport *transport = pairings[i].transport;
        if (pairings[i].control != control || (name && strcmp(transport->name, name) != 0))
            continue;
        is_known = true;
        bool moves_it = transport->other && strcmp(transport->other->family, device->kernels) == 0;
        if (strcmp(transport->kernels, device->kernels) != 0
            && !(name && (transport->any_device || moves_it)))
            continue;
        *out = transport;
        return MS_OK;
    }
    if (!is_known) return refuse_name(engine, control, name);
    return ms_engine_fail(engine, MS_ERROR_UNSUPPORTED,
                          "no transport moves the memory of device %s between ranks that meet over "
                          "%s: use the device cpu",
                          device->name, control->name);
}

/* The hook for failed tasks is set last, when there is a job to end. */
ms_status ms_comm_open_with(ms_engine *engine, ms_rendezvous *rendezvous, uint32_t rank,
                            const ms_comm_options *options, ms_group **world)
{
    /* Before the device's kernels are looked at: those of the sim device are the cpu's. */
    if (ms_engine_is_sim(engine))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "the sim device has no data to exchange: open a fake world");
    if (rank >= rendezvous->ranks)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "rank %u of %u: ranks count from 0", rank,
                              rendezvous->ranks);
    if (ms_comm_of(engine))
        return ms_engine_fail(engine, MS_ERROR_STATE, "this engine belongs to a world already");
    ms_membership membership = { .control = rendezvous->kind->control,
                                 .rendezvous = rendezvous,
                                 .rank = rank,
                                 .size = rendezvous->ranks,
                                 .options = *options };
    membership.options.transport = NULL; /* the caller's text */
    ms_status status = choose_transport(engine, membership.control, membership.size,
                                        options->transport, &membership.transport);
    if (!status) status = ms_comm_new(engine, &membership, world);
    if (!status) ms_engine_on_failure(engine, end_job);
    return status;
}

/* The usual transport, with its usual settings. */
ms_status ms_comm_open(ms_engine *engine, ms_rendezvous *rendezvous, uint32_t rank,
                       ms_group **world)
{
    ms_comm_options defaults = { 0 };
    return ms_comm_open_with(engine, rendezvous, rank, &defaults, world);
}
