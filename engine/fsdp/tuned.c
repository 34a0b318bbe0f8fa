/* tuned.c: the strategy "tuned". fsdp.h has its invariants; lua/moonshard/fsdp/tuned.lua is the
 * same in Lua, and tests compare the two. */
#include "fsdp/plans.h"

#include <string.h>

#include "base/assert.h"

/* Views have the times of the pass before the last. */
enum { LAG = 2 };
/* A gain that is smaller, as a part of the default's forecast, is none. */
static const double LEAST_GAIN = 0.001;

static double median(const double *samples, uint32_t count)
{
    double sorted[MS_TUNED_SAMPLES] = { 0 };
    MS_ASSERT(count > 0 && count <= MS_TUNED_SAMPLES);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = i;
        for (; at > 0 && sorted[at - 1] > samples[i]; at--) sorted[at] = sorted[at - 1];
        sorted[at] = samples[i];
    }
    return sorted[(count - 1) / 2];
}

static uint64_t order_of(const ms_prefetch_view *view)
{
    uint64_t order = view->count;
    for (uint32_t i = 0; i < view->count; i++) {
        uint32_t one[] = { view->uses[i].unit, view->uses[i].backward };
        order = ms_hash(one, sizeof one, order);
    }
    return order;
}

/* ---------------------------------------------------------------- candidates */

/* For each candidate: whether it fits the budget (`fits`), or its forecast (`forecasts`). */
typedef struct trials {
    uint32_t fits;
    double forecasts[MS_TUNED_CANDIDATES];
} trials;

static ms_status try_all(ms_context *context, const ms_prefetch_view *view, trials *out)
{
    ms_prefetch_plan plan = { 0 };
    size_t entries = view->count * sizeof *plan.entries;
    ms_status status =
        ms_allocate(context, entries + (ms_prefetch_room(view) + 1) * sizeof *plan.units, "a plan",
                    (void **)&plan.entries);
    if (!status) plan.units = (uint32_t *)(plan.entries + view->count);
    for (uint32_t c = 0; !status && c < MS_TUNED_CANDIDATES; c++) {
        int64_t most = 0;
        status = ms_prefetch_candidate_plan(context, view, c, &plan);
        if (!status) status = ms_prefetch_held(context, view, plan.entries, &most);
        if (!status) status = ms_prefetch_forecast(context, view, plan.entries, &out->forecasts[c]);
        if (most <= view->budget_bytes) out->fits |= 1u << c;
    }
    ms_release(context, plan.entries);
    return status;
}

/* The default is the first that fits. Where none does, it is the one that gathers nothing ahead. */
static void restart(ms_tuned *tuned, uint64_t order, uint32_t fits)
{
    enum { NOTHING_AHEAD = 1 };
    if (!fits) fits = 1u << NOTHING_AHEAD;
    tuned->begun = true;
    tuned->state = MS_TUNED_MEASURING;
    tuned->order = order;
    tuned->asked = tuned->samples = tuned->first = 0;
    tuned->fits = fits;
    while (!(fits & 1u << tuned->first)) tuned->first++;
    tuned->present = tuned->first;
}

/* -------------------------------------------------------------------- choosing */

/* By how much a candidate's forecast is below the default's: the median over the views. */
static double gain_of(const ms_tuned *tuned, uint32_t candidate)
{
    double gains[MS_TUNED_SAMPLES];
    for (uint32_t i = 0; i < tuned->samples; i++)
        gains[i] = tuned->forecasts[tuned->first][i] - tuned->forecasts[candidate][i];
    return median(gains, tuned->samples);
}

/* The arms are in the order of their gains after the default; of equal ones the first candidate. */
static void add_arm(ms_tuned *tuned, uint32_t candidate, double gain)
{
    uint32_t at = tuned->arm_count < MS_TUNED_ARMS ? tuned->arm_count++ : MS_TUNED_ARMS;
    for (; at > 1 && tuned->arms[at - 1].gain_ms < gain; at--)
        if (at < MS_TUNED_ARMS) tuned->arms[at] = tuned->arms[at - 1];
    if (at < MS_TUNED_ARMS)
        tuned->arms[at] = (ms_tuned_arm){ .candidate = candidate, .gain_ms = gain };
}

/* What the model leaves out is the same with all plans, and takes no less than 0: where passes are
 * faster than the default's forecast, the gain is smaller in proportion. */
static void report(ms_tuned *tuned, uint32_t chosen, const ms_tuned_arm *tried, double default_ms)
{
    tuned->reported = true;
    tuned->chosen = chosen;
    tuned->tried = tried->candidate;
    tuned->default_ms = default_ms;
    double part = default_ms < tuned->forecast_ms ? default_ms / tuned->forecast_ms : 1;
    tuned->predicted_ms = default_ms - part * tried->gain_ms;
}

static void settle(ms_tuned *tuned, uint32_t chosen, const ms_tuned_arm *tried, double measured_ms,
                   double default_ms)
{
    report(tuned, chosen, tried, default_ms);
    tuned->state = MS_TUNED_SETTLED;
    tuned->present = chosen;
    tuned->judged = true;
    tuned->measured_ms = measured_ms;
}

/* The default was measured: the best are tried, unless none gains anything. */
static void choose(ms_tuned *tuned)
{
    double ms = median(tuned->ms, tuned->samples);
    tuned->forecast_ms = median(tuned->forecasts[tuned->first], tuned->samples);
    tuned->arm_count = 1;
    tuned->arms[0] = (ms_tuned_arm){ .candidate = tuned->first };
    for (uint32_t c = 0; c < MS_TUNED_CANDIDATES; c++) {
        double gain = c == tuned->first || !(tuned->fits & 1u << c) ? 0 : gain_of(tuned, c);
        if (gain > LEAST_GAIN * tuned->forecast_ms) add_arm(tuned, c, gain);
    }
    if (tuned->arm_count == 1) {
        settle(tuned, tuned->first, &tuned->arms[0], ms, ms);
        return;
    }
    tuned->judged = false;
    report(tuned, tuned->arms[1].candidate, &tuned->arms[1], ms);
    tuned->state = MS_TUNED_TRIAL;
    tuned->asked = 0;
}

/* ------------------------------------------------------------------------ trial */

static void judge(ms_tuned *tuned)
{
    double medians[MS_TUNED_ARMS] = { 0 };
    uint32_t best = 1;
    for (uint32_t a = 0; a < tuned->arm_count; a++) {
        medians[a] = median(tuned->arms[a].samples, tuned->arms[a].count);
        if (a > 0 && medians[a] < medians[best]) best = a;
    }
    bool is_faster = medians[best] < medians[0];
    settle(tuned, tuned->arms[is_faster ? best : 0].candidate, &tuned->arms[best], medians[best],
           medians[0]);
}

/* `asked` counts the passes of the trial that have begun. */
static void try_next(ms_tuned *tuned, double pass_ms)
{
    if (tuned->asked >= LAG) {
        ms_tuned_arm *arm = &tuned->arms[(tuned->asked - LAG) % tuned->arm_count];
        arm->samples[arm->count++] = pass_ms;
    }
    if (tuned->arms[tuned->arm_count - 1].count == MS_TUNED_SAMPLES) {
        judge(tuned);
        return;
    }
    tuned->present = tuned->arms[tuned->asked++ % tuned->arm_count].candidate;
}

static void measure(ms_tuned *tuned, const trials *now, double pass_ms)
{
    if (tuned->asked++ < LAG) return;
    for (uint32_t c = 0; c < MS_TUNED_CANDIDATES; c++)
        tuned->forecasts[c][tuned->samples] = now->forecasts[c];
    tuned->ms[tuned->samples++] = pass_ms;
}

ms_status ms_tuned_ask(ms_tuned *tuned, ms_context *context, const ms_prefetch_view *view,
                       double pass_ms)
{
    uint64_t order = order_of(view);
    bool begins = !tuned->begun || tuned->order != order;
    trials now = { 0 };
    if (begins || tuned->state == MS_TUNED_MEASURING) {
        ms_status status = try_all(context, view, &now);
        if (status) return status;
    }
    if (begins) restart(tuned, order, now.fits);
    if (tuned->state == MS_TUNED_MEASURING) {
        measure(tuned, &now, pass_ms);
        if (tuned->samples == MS_TUNED_SAMPLES) choose(tuned);
    }
    if (tuned->state == MS_TUNED_TRIAL) try_next(tuned, pass_ms);
    return MS_OK;
}
