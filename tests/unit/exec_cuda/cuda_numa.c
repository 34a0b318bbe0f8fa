/* cuda_numa.c: NUMA nodes of GPUs and the cores of ranks, with a system whose /sys the test
 * writes; lists of slices (MIG). */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "exec/cuda/numa.h"
#include "moonshard/exec.h"

/* A system with these files, on which the thread may use these cores. */
typedef struct machine {
    ms_os os;
    struct {
        const char *path, *text;
    } files[16];
    const char *allowed;
    uint32_t quota; /* cores; 0: none */
} machine;

static int open_file(void *user, const char *path, int flags, ms_file **out)
{
    machine *self = user;
    assert_int_equal(flags, MS_FILE_READ);
    for (size_t i = 0; i < sizeof self->files / sizeof *self->files && self->files[i].path; i++)
        if (strcmp(self->files[i].path, path) == 0) {
            *out = (ms_file *)(uintptr_t)self->files[i].text;
            return 0;
        }
    return -ENOENT;
}
static int64_t read_file(void *user, ms_file *file, void *buffer, size_t bytes, uint64_t offset)
{
    (void)user;
    size_t length = strlen((const char *)file);
    assert_int_equal(offset, 0);
    if (length > bytes) length = bytes;
    memcpy(buffer, file, length);
    return (int64_t)length;
}
static void close_file(void *user, ms_file *file)
{
    (void)user;
    (void)file;
}
static int allowed_cores(void *user, ms_cores *out)
{
    return ms_cores_read(((machine *)user)->allowed, out) ? 0 : -EIO;
}
static int describe(void *user, ms_machine *out)
{
    machine *self = user;
    ms_cores cores;
    assert_true(ms_cores_read(self->allowed, &cores));
    *out = (ms_machine){ .cores = self->quota ? self->quota : ms_cores_count(&cores) };
    return 0;
}

#define GPU(bus) "/sys/bus/pci/devices/0000:" bus ":00.0/numa_node"
#define NODE(n) "/sys/devices/system/node/node" n "/cpulist"
#define NODES "/sys/devices/system/node/online"
#define CORES "/sys/devices/system/cpu/online"

/* Two sockets with 16 cores and 2 threads each; the GPUs 1a and 1b are on the first one, 9a on the
 * second, cb says nothing. */
static machine two_sockets(void)
{
    return (machine){ .os = { .open = open_file,
                              .read = read_file,
                              .close = close_file,
                              .cores = allowed_cores,
                              .machine = describe },
                      .files = { { GPU("1a"), "0\n" },
                                 { GPU("1b"), "0\n" },
                                 { GPU("9a"), "1\n" },
                                 { GPU("cb"), "-1\n" },
                                 { NODE("0"), "0-15,32-47\n" },
                                 { NODE("1"), "16-31,48-63\n" },
                                 { NODES, "0-1\n" },
                                 { CORES, "0-63\n" } },
                      .allowed = "0-63" };
}

/* What a rank gets: "node: cores", or "-". The GPUs are on these buses, in order. */
static const char *cores_of(machine *of, const char *buses, ms_gpu_rank rank)
{
    static char text[256];
    char list[200];
    ms_gpu gpus[8];
    uint32_t count = 0;
    ms_cores cores;
    memset(&cores, 0xaa, sizeof cores);
    ms_cores before = cores;
    of->os.user = of;
    for (; *buses; buses += 2 + (buses[2] == ' '), count++) {
        snprintf(gpus[count].pci, sizeof gpus->pci, "0000:%.2s:00.0", buses);
        gpus[count].node = ms_cuda_node_of(&of->os, gpus[count].pci);
    }
    int32_t node = ms_gpu_cores(&of->os, gpus, count, rank, &cores);
    if (node < 0) {
        assert_memory_equal(&cores, &before, sizeof cores);
        return "-";
    }
    ms_cores_write(&cores, list, sizeof list);
    snprintf(text, sizeof text, "%d: %s", (int)node, list);
    return text;
}

static const char *read_back(const char *list)
{
    static char text[64];
    ms_cores cores;
    memset(&cores, 0xaa, sizeof cores);
    ms_cores before = cores;
    if (ms_cores_read(list, &cores)) {
        ms_cores_write(&cores, text, sizeof text);
        return text;
    }
    assert_memory_equal(&cores, &before, sizeof cores);
    return "refused";
}

static void lists_of_cores_are_read_and_garbage_is_refused(void **state)
{
    (void)state;
    ms_cores cores;
    assert_string_equal(read_back("0-15,32-47\n"), "0-15,32-47");
    assert_string_equal(read_back("7"), "7");
    assert_string_equal(read_back("1,2,3,63-64,1023"), "1-3,63-64,1023");
    assert_string_equal(read_back(""), "");
    assert_string_equal(read_back("\n"), "");
    assert_string_equal(read_back("1000-5000"), "1000-1023");
    static const char *const garbage[] = { "x",   "0-",    "-3",  "3-1", "0,,1",          "0,",
                                           "0 1", "0-1-2", "0x4", "+1",  "99999999999,1", "1\n2" };
    for (size_t i = 0; i < sizeof garbage / sizeof *garbage; i++)
        assert_string_equal(read_back(garbage[i]), "refused");
    assert_true(ms_cores_read("0-1023", &cores));
    assert_int_equal(ms_cores_count(&cores), 1024);
    char text[8];
    assert_true(ms_cores_read("1,3,5,700", &cores));
    ms_cores_write(&cores, text, sizeof text);
    assert_string_equal(text, "1,3,5");
}

static void ranks_run_on_the_nodes_of_their_gpus(void **state)
{
    (void)state;
    machine of = two_sockets();
    assert_string_equal(cores_of(&of, "1a", (ms_gpu_rank){ .ranks = 1 }), "0: 0-15,32-47");
    assert_string_equal(cores_of(&of, "1A", (ms_gpu_rank){ .ranks = 1 }), "0: 0-15,32-47");
    ms_gpu_rank first = { .place = 0, .ranks = 2 }, second = { .place = 1, .ranks = 2 };
    assert_string_equal(cores_of(&of, "1a 9a", first), "0: 0-15,32-47");
    assert_string_equal(cores_of(&of, "1a 9a", second), "1: 16-31,48-63");
    assert_string_equal(cores_of(&of, "9a 1a", first), "1: 16-31,48-63");
}

static void ranks_on_one_node_share_its_cores(void **state)
{
    (void)state;
    machine of = two_sockets();
    ms_gpu_rank rank = { .ranks = 3 };
    assert_string_equal(cores_of(&of, "1a 9a 1b", rank), "0: 0-15");
    rank.place = 1;
    assert_string_equal(cores_of(&of, "1a 9a 1b", rank), "1: 16-31,48-63");
    rank.place = 2;
    assert_string_equal(cores_of(&of, "1a 9a 1b", rank), "0: 32-47");
    /* Ranks that share a GPU. */
    rank = (ms_gpu_rank){ .place = 3, .ranks = 4 };
    assert_string_equal(cores_of(&of, "1a", rank), "0: 40-47");
    /* More ranks than cores: the system chooses among them. */
    of.allowed = "0-1,16-31";
    assert_string_equal(cores_of(&of, "1a", rank), "0: 0-1");
}

static void what_the_user_has_fixed_stays(void **state)
{
    (void)state;
    machine of = two_sockets();
    ms_gpu_rank one = { .ranks = 1 }, second = { .place = 1, .ranks = 2 };
    of.allowed = "8-23";
    assert_string_equal(cores_of(&of, "1a", one), "0: 8-15");
    assert_string_equal(cores_of(&of, "1a 1b", second), "0: 12-15");
    of.allowed = "16-23";
    assert_string_equal(cores_of(&of, "1a", one), "-");
    of.allowed = "0-63";
    one.threads = 32;
    assert_string_equal(cores_of(&of, "1a", one), "0: 0-15,32-47");
    one.threads = 33;
    assert_string_equal(cores_of(&of, "1a", one), "-");
    /* A quota: the node, and no share of it. */
    of.quota = 4;
    assert_string_equal(cores_of(&of, "1a 1b", second), "0: 0-15,32-47");
}

static void ranks_of_another_launcher_keep_their_cores(void **state)
{
    (void)state;
    machine of = two_sockets();
    ms_gpu_rank second = { .place = 1, .ranks = 2, .is_placed = true };
    of.allowed = "8-15";
    assert_string_equal(cores_of(&of, "1a 1b", second), "-");
    of.allowed = "0-63";
    assert_string_equal(cores_of(&of, "1a 1b", second), "0: 32-47");
    /* It sees its own GPU alone. */
    assert_string_equal(cores_of(&of, "1b", second), "0: 0-15,32-47");
    /* Nothing says whether its cores were chosen. */
    of.files[7].path = "/none";
    assert_string_equal(cores_of(&of, "1a 1b", second), "-");
}

static void what_the_system_does_not_say_changes_nothing(void **state)
{
    (void)state;
    ms_gpu_rank one = { .ranks = 1 };
    machine of = two_sockets();
    assert_string_equal(cores_of(&of, "cb", one), "-");
    assert_string_equal(cores_of(&of, "cc", one), "-");
    static const char *const nodes[] = { "", "x", "0x", "99999999999", "1 2" };
    for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++) {
        of.files[0].text = nodes[i];
        assert_string_equal(cores_of(&of, "1a", one), "-");
    }
    of.files[0].text = "0\n";
    static const char *const lists[] = { "", "\n", "0-", "cores" };
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        of.files[4].text = lists[i];
        assert_string_equal(cores_of(&of, "1a", one), "-");
    }
    of = two_sockets();
    of.files[6].text = "0\n"; /* one node */
    assert_string_equal(cores_of(&of, "1a", one), "-");
    of.files[6].path = "/none";
    assert_string_equal(cores_of(&of, "1a", one), "-");
    assert_int_equal(ms_cuda_node_of(&of.os, "../../../etc"), -1);
}

static void a_thread_is_kept_to_cores(void **state)
{
    (void)state;
    const ms_os *os = ms_os_posix();
    ms_cores before, one, after;
    assert_int_equal(os->cores(os->user, &before), 0);
    assert_true(ms_cores_count(&before) > 0);
    one = ms_cores_share(&before, ms_cores_count(&before) - 1, ms_cores_count(&before));
    assert_int_equal(ms_cores_count(&one), 1);
    assert_int_equal(os->keep_to(os->user, &one), 0);
    assert_int_equal(os->cores(os->user, &after), 0);
    assert_memory_equal(&one, &after, sizeof one);
    assert_int_equal(os->keep_to(os->user, &before), 0);
}

static void lists_of_slices_are_read(void **state)
{
    (void)state;
    char text[32];
    assert_int_equal(ms_mig_slices(NULL), 0);
    assert_int_equal(ms_mig_slices(""), 0);
    assert_int_equal(ms_mig_slices("0,1"), 0);
    assert_int_equal(ms_mig_slices("MIG-a"), 1);
    assert_int_equal(ms_mig_slices("MIG-a,MIG-ab,MIG-b"), 3);
    assert_int_equal(ms_mig_slices("MIG-a,0"), 0);
    assert_int_equal(ms_mig_slices("MIG-a,,MIG-b"), 0);
    assert_int_equal(ms_mig_slices("MIG-,MIG-b"), 0);
    assert_int_equal(ms_mig_slices("MIG-a,MIG-b,MIG-a"), 0);
    ms_mig_slice("MIG-a,MIG-GPU-1/7/0,MIG-b", 1, text, sizeof text);
    assert_string_equal(text, "MIG-GPU-1/7/0");
    ms_mig_slice("MIG-a,MIG-GPU-1/7/0,MIG-b", 2, text, sizeof text);
    assert_string_equal(text, "MIG-b");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists_of_cores_are_read_and_garbage_is_refused),
        cmocka_unit_test(ranks_run_on_the_nodes_of_their_gpus),
        cmocka_unit_test(ranks_on_one_node_share_its_cores),
        cmocka_unit_test(what_the_user_has_fixed_stays),
        cmocka_unit_test(ranks_of_another_launcher_keep_their_cores),
        cmocka_unit_test(what_the_system_does_not_say_changes_nothing),
        cmocka_unit_test(a_thread_is_kept_to_cores),
        cmocka_unit_test(lists_of_slices_are_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
