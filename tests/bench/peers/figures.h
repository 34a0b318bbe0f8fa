/* figures.h: what the programs of this folder measure and print. They measure as `moonshard bench
 * collectives` does, so that their figures are beside its own: a sample is the mean of some runs,
 * one after another, because one run alone may find the bytes of a peer that was ahead.
 *
 * The command line names sizes, in bytes, or 65536x20: a size, and how many runs a sample has. Each
 * program prints a line of JSON for each size:
 *     {"peer": "tcp", "bytes": 4096, "us_med": 20.1, "us_min": 18.4, "moved": 16384000}
 * `moved` counts the bytes of all runs. */
#ifndef MOONSHARD_TESTS_BENCH_PEERS_FIGURES_H
#define MOONSHARD_TESTS_BENCH_PEERS_FIGURES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { SAMPLES = 7, SIZES_MAX = 32 };

typedef struct size {
    size_t bytes;
    unsigned runs; /* of a sample */
} size;

typedef struct size_list {
    size_t count;
    size sizes[SIZES_MAX];
} size_list;

/* How many runs a sample of `moonshard bench collectives` has. */
static inline unsigned usual_runs(size_t bytes)
{
    size_t runs = ((size_t)64 << 20) / (bytes / sizeof(float));
    return (unsigned)(runs < 3 ? 3 : runs > 500 ? 500 : runs);
}

static inline bool parse_size(const char *text, size *out)
{
    char *end = NULL;
    out->bytes = strtoul(text, &end, 10);
    if (out->bytes == 0 || out->bytes % sizeof(float)) return false;
    out->runs = *end == 'x' ? (unsigned)strtoul(end + 1, &end, 10) : usual_runs(out->bytes);
    return *end == '\0' && out->runs > 0;
}

/* The sizes that the rest of the command line names, or the usual ones. */
static inline size_list sizes_of(int count, char **arguments)
{
    static const char *const usual[] = { "4096", "65536", "1048576", "16777216", "67108864" };
    size_list list = { .count = count > 0 ? (size_t)count : sizeof usual / sizeof *usual };
    bool right = list.count <= SIZES_MAX;
    for (size_t i = 0; right && i < list.count; i++)
        right = parse_size(count > 0 ? arguments[i] : usual[i], &list.sizes[i]);
    if (right) return list;
    fprintf(stderr, "sizes are multiples of 4, as in 65536 or 65536x20, at most %d\n", SIZES_MAX);
    exit(2);
}

/* All runs: as many as a sample has warm up. */
static inline unsigned runs_of(const size *one) { return one->runs * (SAMPLES + 1); }

/* The time of a run, in each sample. note_run is called before each run, and after the last. */
typedef struct samples {
    double began, times[SAMPLES];
} samples;

static inline void note_run(samples *all, const size *one, unsigned run)
{
    struct timespec time;
    if (run % one->runs != 0) return;
    clock_gettime(CLOCK_MONOTONIC, &time);
    double now = (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
    unsigned sample = run / one->runs;
    if (sample > 1) all->times[sample - 2] = (now - all->began) / one->runs;
    all->began = now;
}

static inline int by_value(const void *left, const void *right)
{
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static inline void print_figures(const char *peer, const size *one, samples *all)
{
    qsort(all->times, SAMPLES, sizeof *all->times, by_value);
    printf("{\"peer\": \"%s\", \"bytes\": %zu, \"us_med\": %.1f, \"us_min\": %.1f, "
           "\"moved\": %zu}\n",
           peer, one->bytes, all->times[SAMPLES / 2], all->times[0], runs_of(one) * one->bytes);
    fflush(stdout);
}

#endif
