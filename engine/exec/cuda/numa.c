/* numa.c: NUMA nodes of GPUs, and the cores of ranks near them, by Linux' /sys.
 *
 * A rank takes its cores before its engine opens (bindings/placement.c). Linux places memory on the
 * NUMA node of the thread that touches it first. So the memory that the host thread and the threads
 * that it starts touch first, pinned memory too, is on the NUMA node of the GPU. Where there are
 * several NUMA nodes, the launcher therefore leaves all cores to the ranks. */
#include "exec/cuda/numa.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moonshard/exec.h"

/* The text of a small file; false: it cannot be read, or is longer. Such files have no useful
 * size. */
static bool read_text(const ms_os *os, const char *path, char *text, size_t bytes)
{
    ms_file *file = NULL;
    if (os->open(os->user, path, MS_FILE_READ, &file) != 0) return false;
    int64_t count = os->read(os->user, file, text, bytes, 0);
    os->close(os->user, file);
    if (count < 0 || (size_t)count >= bytes) return false;
    text[count] = '\0';
    return true;
}

static bool read_cores(const ms_os *os, const char *path, ms_cores *out)
{
    char text[4096];
    return read_text(os, path, text, sizeof text) && ms_cores_read(text, out);
}

/* The driver writes letters in capitals, and the system's names have small ones. A place becomes a
 * part of a path, so it has no other characters. */
int32_t ms_cuda_node_of(const ms_os *os, const char *pci)
{
    char path[96], text[32], *end = NULL;
    int at = snprintf(path, sizeof path, "/sys/bus/pci/devices/");
    if (strspn(pci, "0123456789abcdefABCDEF:.") != strlen(pci)) return -1;
    for (; *pci && (size_t)at < sizeof path - 16; pci++)
        path[at++] = (char)(*pci >= 'A' && *pci <= 'F' ? *pci - 'A' + 'a' : *pci);
    snprintf(path + at, sizeof path - (size_t)at, "/numa_node");
    if (!read_text(os, path, text, sizeof text)) return -1;
    long node = strtol(text, &end, 10);
    if (end == text || strcspn(end, "\n") != 0 || node < 0 || node >= MS_CORES_MOST) return -1;
    return (int32_t)node;
}

bool ms_has_numa_nodes(const ms_os *os)
{
    ms_cores nodes;
    if (!os) os = ms_os_posix();
    return read_cores(os, "/sys/devices/system/node/online", &nodes) && ms_cores_count(&nodes) > 1;
}

/* Whether the thread may not use all cores of the machine. */
static bool was_chosen(const ms_os *os, const ms_cores *allowed)
{
    ms_cores all;
    if (!read_cores(os, "/sys/devices/system/cpu/online", &all)) return true;
    return ms_cores_count(allowed) < ms_cores_count(&all);
}

/* The rank's share of the cores of its node, of which the others compute theirs in the same way.
 * Where a quota allows less than the cores, the system chooses which ones are used. */
static ms_cores share(const ms_os *os, const ms_gpu *gpus, uint32_t count, ms_gpu_rank rank,
                      const ms_cores *cores, const ms_cores *allowed)
{
    uint32_t before = 0, fellows = 0;
    ms_machine machine;
    if (rank.is_placed && count == 1) return *cores;
    if (os->machine(os->user, &machine)) return *cores;
    if (machine.cores < ms_cores_count(allowed)) return *cores;
    for (uint32_t place = 0; place < rank.ranks; place++) {
        bool is_fellow = gpus[place % count].node == gpus[rank.place % count].node;
        fellows += is_fellow;
        before += is_fellow && place < rank.place;
    }
    ms_cores part = ms_cores_share(cores, before, fellows);
    return ms_cores_count(&part) ? part : *cores;
}

int32_t ms_gpu_cores(const ms_os *os, const ms_gpu *gpus, uint32_t count, ms_gpu_rank rank,
                     ms_cores *out)
{
    char path[96];
    ms_cores near, allowed;
    if (!os) os = ms_os_posix();
    int32_t node = gpus[rank.place % count].node;
    if (node < 0 || !ms_has_numa_nodes(os) || os->cores(os->user, &allowed)) return -1;
    if (rank.is_placed && was_chosen(os, &allowed)) return -1;
    snprintf(path, sizeof path, "/sys/devices/system/node/node%d/cpulist", (int)node);
    if (!read_cores(os, path, &near)) return -1;
    near = ms_cores_both(&near, &allowed);
    if (!ms_cores_count(&near)) return -1;
    near = share(os, gpus, count, rank, &near, &allowed);
    if (rank.threads > ms_cores_count(&near)) return -1;
    *out = near;
    return node;
}
