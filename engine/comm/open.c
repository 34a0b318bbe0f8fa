/* open.c: joins a job: the control of the rendezvous, and the transport for this engine's device.
 */
#include "comm/rendezvous.h"

#include <string.h>

#include "comm/transport.h"
#include "exec/device.h"

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

/* Which transports may go with which control. The first one for the device's kernels is taken. A
 * transport over MPI or NCCL gets its row here. Its kernels name the devices whose memory it moves.
 */
static const struct pairing {
    const ms_control *control;
    const ms_transport *transport;
} pairings[] = { { &ms_control_host, &ms_transport_local },
                 { &ms_control_hosts, &ms_transport_local } };

/* Tensors of a device whose memory no transport moves are refused when the engine joins. */
static ms_status choose_transport(ms_engine *engine, const ms_control *control,
                                  const ms_transport **out)
{
    const ms_device *device = ms_engine_device_of(engine);
    for (size_t i = 0; i < sizeof pairings / sizeof *pairings; i++)
        if (pairings[i].control == control
            && strcmp(pairings[i].transport->kernels, device->kernels) == 0) {
            *out = pairings[i].transport;
            return MS_OK;
        }
    return ms_engine_fail(engine, MS_ERROR_UNSUPPORTED,
                          "no transport moves the memory of device %s between ranks that meet over "
                          "%s: use the device cpu",
                          device->name, control->name);
}

/* The hook for failed tasks is set last, when there is a job to end. */
ms_status ms_comm_open(ms_engine *engine, ms_rendezvous *rendezvous, uint32_t rank,
                       ms_group **world)
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
    const ms_transport *transport = NULL;
    const ms_control *control = rendezvous->kind->control;
    ms_status status = choose_transport(engine, control, &transport);
    if (!status)
        status =
            ms_comm_new(engine, control, transport, rendezvous, rank, rendezvous->ranks, world);
    if (!status) ms_engine_on_failure(engine, end_job);
    return status;
}
