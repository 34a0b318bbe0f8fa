/* os_machine.c: cores, memory and processor of this process, by affinity, cgroup (version 2) and
 * /proc. */
#include "base/os_machine.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysinfo.h>
#include <unistd.h>

/* Reads the beginning of a small file as text; false if it cannot be read. These files have no
 * useful size, so one read must do. */
static bool read_text(const char *path, char *text, size_t bytes)
{
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    /* Not there on other kernels or in some containers: then there is no such limit. */
    if (descriptor < 0) return false;
    ssize_t count = read(descriptor, text, bytes - 1);
    close(descriptor);
    if (count < 0) return false;
    text[count] = '\0';
    return true;
}

/* cpu.max: quota over period, rounded up. "max" is no number and means no limit. Rounding down
 * would leave a part of the quota unused, and make a quota below one core zero. */
static void limit_cores(const char *text, ms_machine *machine)
{
    unsigned long long quota, period;
    if (sscanf(text, "%llu %llu", &quota, &period) != 2 || period == 0) return;
    unsigned long long cores = (quota + period - 1) / period;
    if (cores >= 1 && cores < machine->cores) machine->cores = (uint32_t)cores;
    if (cores >= 1 && cores < machine->node_cores) machine->node_cores = (uint32_t)cores;
}

/* memory.max: bytes, or "max" for no limit. */
static void limit_memory(const char *text, ms_machine *machine)
{
    unsigned long long bytes;
    if (sscanf(text, "%llu", &bytes) == 1 && bytes < machine->memory_bytes)
        machine->memory_bytes = bytes;
}

/* Lowers cores and memory to the limits of the cgroup (version 2). A limit may be set at any level
 * between this process' group and the root, so each level is read. Without cgroups, or in version
 * 1, nothing changes. */
static void limit_by_cgroup(ms_machine *machine)
{
    char groups[4096], path[4352], text[64];
    if (!read_text("/proc/self/cgroup", groups, sizeof groups)) return;
    /* Version 2 has one line, which begins with 0::, perhaps after lines of version 1. */
    char *group = strncmp(groups, "0::", 3) == 0 ? groups : strstr(groups, "\n0::");
    if (group == NULL) return;
    group = strchr(group, '/');
    if (group == NULL) return;
    group[strcspn(group, "\n")] = '\0';
    for (;;) {
        snprintf(path, sizeof path, "/sys/fs/cgroup%s/cpu.max", group);
        if (read_text(path, text, sizeof text)) limit_cores(text, machine);
        snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.max", group);
        if (read_text(path, text, sizeof text)) limit_memory(text, machine);
        /* One level up, until the root has been read. */
        char *slash = strrchr(group, '/');
        if (slash == NULL) break;
        *slash = '\0';
    }
}

/* The processor's name, for reports only. /proc/cpuinfo has no "model name" on some architectures;
 * then it is "unknown". */
static void find_model(ms_machine *machine)
{
    char text[4096];
    snprintf(machine->cpu, sizeof machine->cpu, "unknown");
    if (!read_text("/proc/cpuinfo", text, sizeof text)) return;
    const char *line = strstr(text, "model name");
    const char *name = line != NULL ? strchr(line, ':') : NULL;
    if (name == NULL) return;
    name += 1 + strspn(name + 1, " ");
    snprintf(machine->cpu, sizeof machine->cpu, "%.*s", (int)strcspn(name, "\n"), name);
}

/* Asked again each time: affinity and cgroup limits may change while a process runs. *out is
 * written only when all is known. */
int ms_os_machine(ms_machine *out)
{
    ms_machine machine = { 0 };
    cpu_set_t allowed;
    long count = sysconf(_SC_NPROCESSORS_ONLN);
    machine.cores = machine.node_cores = count > 0 ? (uint32_t)count : 1;
    /* With more processors than the set has bits it fails, and the count is still right. */
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0)
        machine.cores = (uint32_t)CPU_COUNT(&allowed);
    struct sysinfo system;
    if (sysinfo(&system) != 0) return -errno;
    machine.memory_bytes = (uint64_t)system.totalram * system.mem_unit;
    limit_by_cgroup(&machine);
    find_model(&machine);
    *out = machine;
    return 0;
}
