/* rates.c: the speeds of the simulated machine, and how long a call of some cost takes on it. The
 * results are estimates: calls do not slow each other down, and memory has no caches. */
#include "exec/sim/sim.h"

#include <math.h>
#include <string.h>

/* Two cores of an AMD EPYC (Zen 5, AVX-512-BF16) with one L3 cache, which tests/bench/README.md
 * describes; a rank has both of them:
 * - FLOP/s: what a loop of multiply-adds in registers reaches; f16 is computed in f32
 * - memory: what a loop reaches that reads and writes arrays larger than the caches
 * - links: two ranks in shared memory. An all-reduce of 256 MiB takes 16.0 ms, and an all-reduce of
 *   4 bytes 2 us or less where both ranks run. */
const ms_rates *ms_rates_default(void)
{
    static const ms_rates rates = {
        .flops_per_s = { [MS_COST_F32] = 530e9, [MS_COST_F16] = 530e9, [MS_COST_BF16] = 980e9 },
        .bytes_per_s = 57e9,
        .enqueue_ns = 0,
        .level_count = 1,
        .levels = { { .ranks = 0, .latency_ns = 1000, .bytes_per_s = 16.8e9 } },
    };
    return &rates;
}

_Static_assert(MS_LEVELS_MAX == 8 && MS_KERNEL_SHARES_MAX == 64, "ms_rates_problem says so");

/* Written so that NaN fails. */
static bool is_positive(double value) { return isfinite(value) && value > 0; }
static bool is_duration(double value) { return isfinite(value) && value >= 0; }
static bool is_share(double value) { return value > 0 && value <= 1; }

/* NULL if the rates can be used. Levels must ascend, since the search for a level takes the first
 * that holds all ranks. */
const char *ms_rates_problem(const ms_rates *rates)
{
    for (int i = 0; i < MS_COST_DTYPES; i++)
        if (!is_positive(rates->flops_per_s[i])
            && !(i == MS_COST_FP8 && rates->flops_per_s[i] == 0))
            return "flops_per_s must be above 0, for each of f32, f16 and bf16";
    if (!is_positive(rates->bytes_per_s)) return "bytes_per_s must be above 0";
    if (!is_duration(rates->enqueue_ns)) return "enqueue_ns must be 0 or more";
    if (!is_duration(rates->task_ns)) return "task_ns must be 0 or more";
    if (rates->share_count > MS_KERNEL_SHARES_MAX) return "shares must have 64 names or fewer";
    for (uint32_t i = 0; i < rates->share_count; i++) {
        const ms_kernel_share *share = &rates->shares[i];
        if (!is_share(share->flops) || !is_share(share->bytes))
            return "shares must be above 0, and 1 at most";
    }
    if (rates->level_count < 1 || rates->level_count > MS_LEVELS_MAX)
        return "links must have 1 to 8 levels";
    for (uint32_t i = 0; i < rates->level_count; i++) {
        const ms_level_rate *level = &rates->levels[i];
        bool last = i + 1 == rates->level_count;
        if (!is_duration(level->latency_ns)) return "links: latency_ns must be 0 or more";
        if (!is_positive(level->bytes_per_s)) return "links: bytes_per_s must be above 0";
        if (last && level->ranks != 0)
            return "links: the last level links all ranks, so it has no number of ranks";
        if (!last && (level->ranks == 0 || (i > 0 && level[-1].ranks >= level->ranks)))
            return "links: each level but the last has a number of ranks, more than the level "
                   "before it";
    }
    return NULL;
}

/* A collective works at the pace of the outermost level that its ranks span. Its latency is that of
 * a tree: log2(ranks) rounds of messages, and twice as many for an all-reduce, which gathers and
 * then spreads. */
static double collective_ns(const ms_rates *rates, const ms_task_cost *cost)
{
    const ms_level_rate *level = rates->levels;
    /* Ranks of one level are neighbours: first and last in one group means that all are. The last
     * level has no number of ranks and ends the search. */
    while (level->ranks && cost->first_rank / level->ranks != cost->last_rank / level->ranks)
        level++;
    uint32_t rounds = 0;
    while (rounds < 32 && (uint64_t)1 << rounds < cost->ranks) rounds++;
    if (cost->collective == MS_COST_ALL_REDUCE) rounds *= 2;
    return rounds * level->latency_ns + (double)cost->wire_bytes * 1e9 / level->bytes_per_s;
}

/* The shares of the rates that tasks of this name reach. */
static const ms_kernel_share *share_of(const ms_rates *rates, const char *name)
{
    static const ms_kernel_share all = { .flops = 1, .bytes = 1 };
    for (uint32_t i = 0; i < rates->share_count; i++)
        if (strcmp(rates->shares[i].name, name) == 0) return &rates->shares[i];
    return &all;
}

/* The roofline model: work inside a rank is bound by arithmetic or by memory, whichever takes
 * longer. */
double ms_rates_ns(const ms_rates *rates, const char *name, const ms_task_cost *cost)
{
    if (cost->ranks > 1) return collective_ns(rates, cost);
    uint32_t dtype = cost->dtype < MS_COST_DTYPES ? cost->dtype : MS_COST_F32;
    const ms_kernel_share *share = share_of(rates, name);
    double peak = rates->flops_per_s[dtype];
    if (dtype == MS_COST_FP8 && peak == 0) peak = 2 * rates->flops_per_s[MS_COST_BF16];
    double arithmetic = cost->flops * 1e9 / (peak * share->flops);
    double memory = (double)cost->bytes * 1e9 / (rates->bytes_per_s * share->bytes);
    return rates->task_ns + (arithmetic > memory ? arithmetic : memory);
}
