/* cores.c: sets of cores: lists in Linux' form, and shares. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moonshard/base.h"

static void add(ms_cores *cores, uint64_t core)
{
    if (core < MS_CORES_MOST) cores->words[core / 64] |= (uint64_t)1 << core % 64;
}

bool ms_cores_have(const ms_cores *cores, uint32_t core)
{
    return core < MS_CORES_MOST && (cores->words[core / 64] >> core % 64 & 1);
}

uint32_t ms_cores_count(const ms_cores *cores)
{
    uint32_t count = 0;
    for (size_t i = 0; i < sizeof cores->words / sizeof *cores->words; i++)
        count += (uint32_t)__builtin_popcountll(cores->words[i]);
    return count;
}

/* strtoul would take spaces and signs. */
static bool read_number(const char **text, uint64_t *out)
{
    uint64_t number = 0;
    const char *at = *text;
    for (; *at >= '0' && *at <= '9' && at - *text < 9; at++)
        number = number * 10 + (uint64_t)(*at - '0');
    if (at == *text || (*at >= '0' && *at <= '9')) return false;
    *text = at;
    *out = number;
    return true;
}

bool ms_cores_read(const char *text, ms_cores *out)
{
    ms_cores cores = { { 0 } };
    /* A node without cores has an empty list. */
    while (*text && *text != '\n') {
        uint64_t first, last;
        if (!read_number(&text, &first)) return false;
        last = first;
        if (*text == '-') {
            text++;
            if (!read_number(&text, &last) || last < first) return false;
        }
        for (uint64_t core = first; core <= last && core < MS_CORES_MOST; core++) add(&cores, core);
        if (*text == ',') {
            text++;
            if (!*text || *text == '\n') return false;
        } else if (*text && *text != '\n') return false;
    }
    if (*text && strcmp(text, "\n") != 0) return false;
    *out = cores;
    return true;
}

void ms_cores_write(const ms_cores *cores, char *text, size_t bytes)
{
    size_t used = 0;
    *text = '\0';
    for (uint32_t first = 0; first < MS_CORES_MOST; first++) {
        char part[32];
        uint32_t last = first;
        if (!ms_cores_have(cores, first)) continue;
        while (ms_cores_have(cores, last + 1)) last++;
        int length = snprintf(part, sizeof part, last > first ? "%s%u-%u" : "%s%u", used ? "," : "",
                              first, last);
        if (used + (size_t)length >= bytes) return;
        memcpy(text + used, part, (size_t)length + 1);
        used += (size_t)length;
        first = last;
    }
}

ms_cores ms_cores_both(const ms_cores *a, const ms_cores *b)
{
    ms_cores both;
    for (size_t i = 0; i < sizeof both.words / sizeof *both.words; i++)
        both.words[i] = a->words[i] & b->words[i];
    return both;
}

/* The position counts the cores of the set, whose numbers may have gaps. */
ms_cores ms_cores_share(const ms_cores *cores, uint32_t position, uint32_t parts)
{
    ms_cores share = { { 0 } };
    uint32_t count = ms_cores_count(cores) / parts, first = position * count, at = 0;
    for (uint32_t core = 0; core < MS_CORES_MOST; core++) {
        if (!ms_cores_have(cores, core)) continue;
        if (at >= first && at < first + count) add(&share, core);
        at++;
    }
    return share;
}
