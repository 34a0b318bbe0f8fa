/* os_posix.c: the operating-system table of Linux. What describes the machine is in os_machine.c,
 * sockets in os_socket.c and os_tcp.c. */
#include "base/os_library.h"
#include "base/os_machine.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/os_socket.h"
#include "base/os_tcp.h"
#include "base/thread.h"

/* ------------------------------------------------------------------- memory */

/* Zero bytes give an address too, so that NULL means a lack of memory and nothing else. */
static void *os_allocate(void *user, size_t bytes, size_t alignment)
{
    (void)user;
    void *pointer = NULL;
    if (bytes == 0) bytes = 1;
    /* Alignment 16 is malloc's own, which realloc keeps. */
    if (alignment <= 16) return malloc(bytes);
    return posix_memalign(&pointer, alignment, bytes) == 0 ? pointer : NULL;
}

/* Only for what was allocated with alignment 16: realloc keeps no more than malloc's own alignment.
 */
static void *os_reallocate(void *user, void *pointer, size_t bytes)
{
    (void)user;
    return realloc(pointer, bytes != 0 ? bytes : 1);
}

/* free() takes what malloc and posix_memalign gave alike, so the table needs no sizes. */
static void os_release(void *user, void *pointer)
{
    (void)user;
    free(pointer);
}

/* Address space without pages or access. MAP_NORESERVE keeps a large reservation from counting as
 * memory in use; a stray access to it is a fault instead of a new page. */
static void *os_reserve(void *user, size_t bytes)
{
    (void)user;
    void *address =
        mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return address == MAP_FAILED ? NULL : address;
}

/* Makes the range accessible; the kernel adds zeroed pages when they are first touched. */
static int os_commit(void *user, void *address, size_t bytes, bool huge)
{
    (void)user;
    if (mprotect(address, bytes, PROT_READ | PROT_WRITE) != 0) return -errno;
    /* Only advice: without huge pages all works, a little slower. */
    if (huge) (void)madvise(address, bytes, MADV_HUGEPAGE);
    return 0;
}

/* The pages go at once, and an access is a fault again. */
static int os_decommit(void *user, void *address, size_t bytes)
{
    (void)user;
    void *mapped = mmap(address, bytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return mapped == MAP_FAILED ? -errno : 0;
}

/* Gives back address space and pages, for private and shared mappings alike. */
static void os_unreserve(void *user, void *address, size_t bytes)
{
    (void)user;
    if (address != NULL) munmap(address, bytes);
}

/* -------------------------------------------------------------------- files */

/* The descriptor is closed on exec, so that ranks and readers that are started from here do not
 * inherit it. Mode 0666 and the process' umask give the permissions. The record is made first, so
 * that an opened descriptor always has an owner. */
static int os_open(void *user, const char *path, int flags, ms_file **out)
{
    (void)user;
    /* O_NONBLOCK: opening a pipe without a peer must not block. */
    int mode = O_CLOEXEC | O_NONBLOCK;
    if (flags & MS_FILE_DIRECTORY) mode |= O_RDONLY | O_DIRECTORY;
    else if (flags & (MS_FILE_WRITE | MS_FILE_APPEND))
        mode |= flags & MS_FILE_READ ? O_RDWR : O_WRONLY;
    else mode |= O_RDONLY;
    if (flags & MS_FILE_CREATE) mode |= O_CREAT;
    if (flags & MS_FILE_TRUNCATE) mode |= O_TRUNC;
    if (flags & MS_FILE_EXCLUSIVE) mode |= O_CREAT | O_EXCL;
    if (flags & MS_FILE_APPEND) mode |= O_APPEND; /* Linux then ignores the offset of a write */
    ms_file *file = malloc(sizeof *file);
    if (file == NULL) return -ENOMEM;
    do file->descriptor = open(path, mode, 0666);
    while (file->descriptor < 0 && errno == EINTR);
    if (file->descriptor < 0) {
        int error = errno;
        free(file);
        return -error;
    }
    *out = file;
    return 0;
}

/* pread has no file position, so threads can share one open file. A call that a signal interrupts
 * before it has moved a byte is repeated. */
static int64_t os_read(void *user, ms_file *file, void *buffer, size_t bytes, uint64_t offset)
{
    (void)user;
    ssize_t count;
    do count = pread(file->descriptor, buffer, bytes, (off_t)offset);
    while (count < 0 && errno == EINTR);
    return count < 0 ? -errno : count;
}

/* May write less than asked, on a full disk for example; ms_file_write goes on with the rest and
 * gets the error then. */
static int64_t os_write(void *user, ms_file *file, const void *buffer, size_t bytes,
                        uint64_t offset)
{
    (void)user;
    ssize_t count;
    do count = pwrite(file->descriptor, buffer, bytes, (off_t)offset);
    while (count < 0 && errno == EINTR);
    return count < 0 ? -errno : count;
}

/* Not repeated after a failure: the kernel may have dropped the dirty pages and then report success
 * for data that are lost. fsync and not fdatasync: the size of a file that has grown must be
 * durable, too. */
static int os_sync(void *user, ms_file *file)
{
    (void)user;
    return fsync(file->descriptor) == 0 ? 0 : -errno;
}

/* flock() belongs to the open file, so a second open in this process is refused too; the locks of
 * fcntl() would allow it. */
static int os_lock(void *user, ms_file *file)
{
    (void)user;
    return flock(file->descriptor, LOCK_EX | LOCK_NB) == 0 ? 0 : -errno;
}

/* Of the open file and not of its path: another file may have that name by now. */
static int os_size(void *user, ms_file *file, uint64_t *bytes)
{
    (void)user;
    struct stat what;
    if (fstat(file->descriptor, &what) != 0) return -errno;
    *bytes = (uint64_t)what.st_size;
    return 0;
}

/* Cuts the file at `bytes` or extends it with zeros. */
static int os_resize(void *user, ms_file *file, uint64_t bytes)
{
    (void)user;
    int result;
    do result = ftruncate(file->descriptor, (off_t)bytes);
    while (result != 0 && errno == EINTR);
    return result == 0 ? 0 : -errno;
}

/* The result of close() is ignored: what must be durable was synced before, and the descriptor is
 * gone in any case. */
static void os_close(void *user, ms_file *file)
{
    (void)user;
    if (file == NULL) return;
    close(file->descriptor);
    free(file);
}

/* stat() follows links, so a link to a folder counts as one. */
static int os_info(void *user, const char *path, ms_file_info *out)
{
    (void)user;
    struct stat what;
    if (lstat(path, &what) != 0) return -errno;
    out->is_link = S_ISLNK(what.st_mode);
    if (out->is_link && stat(path, &what) != 0) return -errno;
    out->bytes = (uint64_t)what.st_size;
    out->modified_ns = (int64_t)what.st_mtim.tv_sec * 1000000000 + what.st_mtim.tv_nsec;
    out->is_directory = S_ISDIR(what.st_mode);
    return 0;
}

/* Replaces an existing file in one step: readers see the old content or the new one. */
static int os_rename(void *user, const char *from, const char *to)
{
    (void)user;
    return rename(from, to) == 0 ? 0 : -errno;
}

/* remove() takes files and empty folders, and never follows a link. */
static int os_remove(void *user, const char *path)
{
    (void)user;
    return remove(path) == 0 ? 0 : -errno;
}

/* The umask takes from these permissions what the user does not want. */
static int os_make_directory(void *user, const char *path)
{
    (void)user;
    return mkdir(path, 0777) == 0 ? 0 : -errno;
}

/* Entries come in the file system's order. `entry` must not fail; the caller collects its own
 * errors. */
static int os_list(void *user, const char *path, void (*entry)(void *to, const char *name),
                   void *to)
{
    (void)user;
    DIR *folder = opendir(path);
    if (folder == NULL) return -errno;
    const struct dirent *found;
    errno = 0;
    while ((found = readdir(folder)) != NULL) {
        if (strcmp(found->d_name, ".") != 0 && strcmp(found->d_name, "..") != 0)
            entry(to, found->d_name);
        errno = 0; /* readdir tells its end from a failure by errno alone */
    }
    int error = errno;
    closedir(folder);
    return -error;
}

/* ------------------------------------------------------------ shared memory */

/* Wraps a descriptor. The file owns it once this succeeds. */
int ms_os_file_of(int descriptor, ms_file **out)
{
    ms_file *file = malloc(sizeof *file);
    if (file == NULL) return -ENOMEM;
    file->descriptor = descriptor;
    *out = file;
    return 0;
}

/* A memory file without a name in any folder: nothing is left when its last user ends, however it
 * ends. The name only shows in /proc. Its pages come when they are touched or populated. */
static int os_shared_create(void *user, const char *name, uint64_t bytes, ms_file **out)
{
    (void)user;
    int descriptor = memfd_create(name, MFD_CLOEXEC);
    if (descriptor < 0) return -errno;
    int error = ftruncate(descriptor, (off_t)bytes) == 0 ? 0 : -errno;
    if (error == 0) error = ms_os_file_of(descriptor, out);
    if (error != 0) close(descriptor);
    return error;
}

/* Programs that are started from here inherit the descriptor under its number, or no longer do. The
 * flag belongs to this process' descriptor, not to the file. */
static int os_shared_share(void *user, ms_file *file, bool inherit)
{
    (void)user;
    int flags = inherit ? 0 : FD_CLOEXEC;
    return fcntl(file->descriptor, F_SETFD, flags) == 0 ? file->descriptor : -errno;
}

/* The rank's end: takes over an inherited descriptor and keeps it from the programs that the rank
 * starts. */
static int os_shared_adopt(void *user, int descriptor, ms_file **out)
{
    (void)user;
    if (fcntl(descriptor, F_SETFD, FD_CLOEXEC) != 0) return -errno;
    return ms_os_file_of(descriptor, out);
}

/* MAP_NORESERVE: a mapping may be larger than memory, since only its populated parts are used. */
static void *os_shared_map(void *user, ms_file *file, uint64_t bytes)
{
    (void)user;
    void *address =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file->descriptor, 0);
    return address == MAP_FAILED ? NULL : address;
}

/* Takes the pages of a range now. Touching a page when memory is used up would be a SIGBUS in the
 * middle of a task; here it is an error with a message. Kernels before 5.14 answer EINVAL to this
 * advice; fallocate then takes the file's pages without mapping them. */
static int os_shared_populate(void *user, ms_file *file, void *address, uint64_t offset,
                              uint64_t bytes)
{
    (void)user;
    enum { POPULATE_WRITE = 23 };
    int result;
    do result = madvise(address, bytes, POPULATE_WRITE);
    while (result != 0 && (errno == EINTR || errno == EAGAIN));
    if (result == 0) return 0;
    /* EFAULT: touching the range would raise SIGBUS, so there are no pages for it. */
    if (errno == EFAULT) return -ENOMEM;
    if (errno != EINVAL) return -errno;
    do result = fallocate(file->descriptor, 0, (off_t)offset, (off_t)bytes);
    while (result != 0 && errno == EINTR);
    if (result == 0) return 0;
    return errno == ENOSPC ? -ENOMEM : -errno;
}

/* Locks one byte of the file. Locks of fcntl() belong to the process, although all ranks share the
 * open file, and the kernel drops them when the process ends, however it ends: this is how other
 * ranks notice a death. Closing any descriptor of the file drops them too. */
static int os_shared_claim(void *user, ms_file *file, uint64_t place)
{
    (void)user;
    struct flock lock = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)place, .l_len = 1
    };
    return fcntl(file->descriptor, F_SETLK, &lock) ? -errno : 0;
}

/* F_GETLK reports a lock of another process only, so a process does not see its own claims. */
static int os_shared_is_claimed(void *user, ms_file *file, uint64_t place)
{
    (void)user;
    struct flock lock = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)place, .l_len = 1
    };
    if (fcntl(file->descriptor, F_GETLK, &lock)) return -errno;
    return lock.l_type != F_UNLCK;
}

/* --------------------------------------------------------------------- time */

/* Both clocks are read without a system call. clock_gettime cannot fail for them. */
static uint64_t clock_read(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Of the machine, not of the process: times of ranks on one node can be compared. */
static uint64_t os_monotonic_ns(void *user)
{
    (void)user;
    return clock_read(CLOCK_MONOTONIC);
}

/* May jump; for names and reports only. */
static uint64_t os_realtime_ns(void *user)
{
    (void)user;
    return clock_read(CLOCK_REALTIME);
}

/* --------------------------------------------------------- threads, process */

/* A thread and what it runs. The starter owns it until the join frees it, so it outlives the
 * thread, which reads it. */
struct ms_os_thread {
    pthread_t thread;
    pid_t process; /* a forked child has this record, but not the thread */
    void (*run)(void *);
    void *argument;
};

/* All threads of the engine flush denormals, so that a kernel gives the same bits on each of
 * them. */
static void *thread_main(void *argument)
{
    ms_os_thread *self = argument;
    ms_thread_flush_denormals();
    self->run(self->argument);
    return NULL;
}

/* A new thread inherits the mask of its starter, so all signals are blocked around the start:
 * handlers of the application and of Lua run on the application's threads only. */
static int os_thread_start(void *user, const char *name, void (*run)(void *), void *argument,
                           ms_os_thread **out)
{
    (void)user;
    ms_os_thread *made = malloc(sizeof *made);
    if (made == NULL) return -ENOMEM;
    made->process = getpid();
    made->run = run;
    made->argument = argument;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    /* The thread may run at once, so its record is complete before. */
    int error = pthread_create(&made->thread, NULL, thread_main, made);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        free(made);
        return -error;
    }
    char shortened[16]; /* all that the kernel keeps */
    snprintf(shortened, sizeof shortened, "%s", name);
    /* For debuggers and ps alone, so a failure does not matter. */
    pthread_setname_np(made->thread, shortened);
    *out = made;
    return 0;
}

/* In a forked child the thread does not exist, and pthread_join would wait for ever; only the
 * record is freed. */
static void os_thread_join(void *user, ms_os_thread *thread)
{
    (void)user;
    if (thread->process == getpid()) pthread_join(thread->thread, NULL);
    free(thread);
}

/* `core` counts the cores that this process may use, since their system numbers need not begin at 0
 * under an affinity mask. -EINVAL: there are not so many. */
static int os_thread_pin(void *user, ms_os_thread *thread, uint32_t core)
{
    (void)user;
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return -errno;
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE; i++) {
        if (!CPU_ISSET(i, &allowed)) continue;
        if (core-- != 0) continue;
        CPU_SET(i, &one);
        /* It returns its error and leaves errno alone. */
        return -pthread_setaffinity_np(thread->thread, sizeof one, &one);
    }
    return -EINVAL;
}

/* The system's set has as many bits as ours. */
_Static_assert(MS_CORES_MOST == CPU_SETSIZE, "a set of the system fits into ms_cores");

static int os_cores(void *user, ms_cores *out)
{
    (void)user;
    cpu_set_t allowed;
    ms_cores cores = { { 0 } };
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return -errno;
    for (int i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &allowed)) cores.words[i / 64] |= (uint64_t)1 << i % 64;
    *out = cores;
    return 0;
}

/* Launchers call it between fork and exec, where nothing may allocate. */
static int os_keep_to(void *user, const ms_cores *cores)
{
    (void)user;
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i = 0; i < CPU_SETSIZE; i++)
        if (cores->words[i / 64] >> i % 64 & 1) CPU_SET(i, &set);
    return sched_setaffinity(0, sizeof set, &set) != 0 ? -errno : 0;
}

/* In a file of its own, since it parses text. */
static int os_machine(void *user, ms_machine *out)
{
    (void)user;
    return ms_os_machine(out);
}

/* getrandom may give fewer bytes than asked for, or be interrupted, for long requests. */
static int os_entropy(void *user, void *buffer, size_t bytes)
{
    (void)user;
    for (size_t done = 0; done < bytes;) {
        ssize_t count = getrandom((char *)buffer + done, bytes - done, 0);
        if (count < 0 && errno != EINTR) return -errno;
        if (count > 0) done += (size_t)count;
    }
    return 0;
}

/* Asked each time, because a forked child has another one. */
static int64_t os_process_id(void *user)
{
    (void)user;
    return getpid();
}

/* The text is the environment's and may change with setenv, so callers copy what they keep. */
static const char *os_environment(void *user, const char *name)
{
    (void)user;
    return getenv(name);
}

/* The functions ignore `user`: this table has no state, so it is constant and any thread may use
 * it. */
const ms_os *ms_os_posix(void)
{
    static const ms_os table = {
        .allocate = os_allocate,
        .reallocate = os_reallocate,
        .release = os_release,
        .reserve = os_reserve,
        .commit = os_commit,
        .decommit = os_decommit,
        .unreserve = os_unreserve,
        .open = os_open,
        .read = os_read,
        .write = os_write,
        .sync = os_sync,
        .lock = os_lock,
        .size = os_size,
        .resize = os_resize,
        .close = os_close,
        .info = os_info,
        .rename = os_rename,
        .remove = os_remove,
        .make_directory = os_make_directory,
        .list = os_list,
        .shared_create = os_shared_create,
        .shared_share = os_shared_share,
        .shared_adopt = os_shared_adopt,
        .shared_map = os_shared_map,
        .shared_populate = os_shared_populate,
        .shared_claim = os_shared_claim,
        .shared_is_claimed = os_shared_is_claimed,
        .socket_listen = ms_os_socket_listen,
        .socket_accept = ms_os_socket_accept,
        .socket_connect = ms_os_socket_connect,
        .socket_send = ms_os_socket_send,
        .socket_receive = ms_os_socket_receive,
        .socket_end = ms_os_socket_end,
        .tcp_listen = ms_os_tcp_listen,
        .tcp_accept = ms_os_tcp_accept,
        .tcp_connect = ms_os_tcp_connect,
        .tcp_send = ms_os_tcp_send,
        .tcp_receive = ms_os_tcp_receive,
        .tcp_await = ms_os_tcp_await,
        .tcp_take = ms_os_tcp_take,
        .addresses = ms_os_addresses,
        .node_id = ms_os_node_id,
        .monotonic_ns = os_monotonic_ns,
        .realtime_ns = os_realtime_ns,
        .thread_start = os_thread_start,
        .thread_join = os_thread_join,
        .thread_pin = os_thread_pin,
        .cores = os_cores,
        .keep_to = os_keep_to,
        .machine = os_machine,
        .library_load = ms_os_library_load,
        .library_load_apart = ms_os_library_load_apart,
        .library_symbol = ms_os_library_symbol,
        .library_close = ms_os_library_close,
        .entropy = os_entropy,
        .process_id = os_process_id,
        .environment = os_environment,
    };
    return &table;
}
