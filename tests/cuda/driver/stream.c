/* stream.c: streams and events. */
#include "work.h"

#include <stdlib.h>

static event *destroyed; /* work may still record one, or wait for it */

API int cuStreamCreateWithPriority(void **out, unsigned flags, int priority)
{
    int result = begin_in_context("cuStreamCreateWithPriority");
    count_call(priority < 0 ? "a stream of high priority" : "a stream of normal priority");
    if (!result && (flags > 1 || priority > 0 || priority < -5)) result = INVALID_VALUE;
    if (result) return result;
    pthread_mutex_lock(&stand_in_lock);
    stream *made = calloc(1, sizeof *made);
    if (!made) abort();
    made->last = &made->first;
    made->number = order_open();
    made->priority = priority;
    made->owner = pthread_self();
    made->next = streams;
    streams = made;
    driver.left++;
    pthread_mutex_unlock(&stand_in_lock);
    *out = made;
    return SUCCESS;
}
API int stand_in_priority(void *of) { return ((stream *)of)->priority; }
API int cuStreamDestroy_v2(void *gone)
{
    int result = begin_in_context("cuStreamDestroy_v2");
    pthread_mutex_lock(&stand_in_lock);
    stream **at = &streams;
    while (*at && *at != gone) at = &(*at)->next;
    if (*at) {
        stream *found = *at;
        if (found->capture) capture_broken(found->capture, "a stream is destroyed");
        while (found->first && !driver.stopped && go_on()) {}
        while (found->first) take_away(found);
        *at = found->next;
        order_close(found->number);
        free(found);
        driver.left--;
    } else result = INVALID_HANDLE;
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}
API int cuStreamSynchronize(void *on)
{
    int result = begin_in_context("cuStreamSynchronize");
    pthread_mutex_lock(&stand_in_lock);
    if (!result) result = capture_forbids("the host waits for a stream", ((stream *)on)->capture);
    while (!result && ((stream *)on)->first && go_on()) {}
    if (!result) result = driver.stopped;
    if (!result) order_join(&host, order_now(((stream *)on)->number));
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}
API int cuStreamWaitEvent(void *on, void *for_event, unsigned flags)
{
    int result = begin_in_context("cuStreamWaitEvent");
    if (result || flags) return result ? result : INVALID_VALUE;
    pthread_mutex_lock(&stand_in_lock);
    result = capture_wait(on, for_event);
    if (result == NOT_CAPTURED) {
        work *made = add_work(on, WAIT);
        made->name = "a wait";
        made->event = for_event;
        made->record = made->event->records;
        if (!made->record) order_fault("a stream waits for an event that was never recorded");
        result = SUCCESS;
    }
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}
API int cuEventCreate(void **out, unsigned flags)
{
    int result = begin_in_context("cuEventCreate");
    if (result || flags > 3) return result ? result : INVALID_VALUE;
    *out = calloc(1, sizeof(event));
    driver.left++;
    return *out ? SUCCESS : OUT_OF_MEMORY;
}
API int cuEventDestroy_v2(void *gone)
{
    int result = begin_in_context("cuEventDestroy_v2");
    driver.left--;
    event *one = gone;
    pthread_mutex_lock(&stand_in_lock);
    free(one->front.last);
    one->front = (front){ .last = NULL };
    one->next = destroyed;
    destroyed = one;
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}
API int cuEventRecord(void *recorded, void *on)
{
    int result = begin_in_context("cuEventRecord");
    if (result) return result;
    pthread_mutex_lock(&stand_in_lock);
    if (!capture_record(on, recorded)) {
        work *made = add_work(on, RECORD);
        made->name = "an event";
        made->event = recorded;
        made->record = ++made->event->records;
    }
    pthread_mutex_unlock(&stand_in_lock);
    return SUCCESS;
}
/* Looking does not make work run, but time passes. */
API int cuEventQuery(void *asked)
{
    int result = begin_in_context("cuEventQuery");
    event *found = asked;
    pthread_mutex_lock(&stand_in_lock);
    if (!result) result = capture_asks(found);
    if (!result && draw() % 2) (void)step_any();
    if (!result && !found->records)
        order_fault("the host asks for an event that was never recorded");
    if (!result && found->passed < found->records) result = NOT_READY;
    if (!result) order_join(&host, &found->clock);
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}
API int cuEventSynchronize(void *asked)
{
    int result = begin_in_context("cuEventSynchronize");
    event *found = asked;
    pthread_mutex_lock(&stand_in_lock);
    if (!result) result = capture_asks(found);
    if (!result && !found->records)
        order_fault("the host waits for an event that was never recorded");
    while (!result && found->passed < found->records && go_on()) {}
    if (!result) result = driver.stopped;
    if (!result) order_join(&host, &found->clock);
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}
API int cuEventElapsedTime_v2(float *ms, void *from, void *to)
{
    int result = begin_in_context("cuEventElapsedTime_v2");
    const event *first = from, *second = to;
    pthread_mutex_lock(&stand_in_lock);
    if (!result && (first->front.capture || second->front.capture)) {
        order_fault("the host asks for the time of an event of a capture");
        result = CAPTURED_EVENT;
    }
    pthread_mutex_unlock(&stand_in_lock);
    if (!result && (!first->passed || second->passed < second->records)) result = NOT_READY;
    if (!result) *ms = (float)((double)(int64_t)(second->ns - first->ns) * 1e-6);
    return result;
}
