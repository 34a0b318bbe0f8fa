/* io_checkpoint.c: checkpoints appear as a whole: each file call failing once or for ever, the
 * order of syncs, each allocation failing. */
#include "io_support.h"

#include <sched.h>

static fault_files harmless; /* never fails; it spares the disk */
static ms_context context;
static ms_engine *engine;

static const char *const names_of_one[] = { "model/weight" };

/* A tensor whose first number is `mark`. */
static ms_tensor *tensor_of(float mark)
{
    const float values[4] = { mark, 1, 2, 3 };
    ms_tensor *tensor = NULL;
    assert_int_equal(ms_tensor_new(engine, MS_F32, 2, (const int64_t[]){ 2, 2 }, &tensor), MS_OK);
    assert_int_equal(ms_tensor_write(tensor, values, sizeof values), MS_OK);
    return tensor;
}

/* A snapshot of such a tensor. */
static ms_snapshot *snapshot_of(float mark)
{
    const float values[4] = { mark, 1, 2, 3 };
    ms_tensor *tensor = tensor_of(mark);
    ms_snapshot *snapshot = NULL;
    assert_int_equal(ms_snapshot_new(engine, names_of_one, &tensor, 1, &snapshot), MS_OK);
    assert_true(ms_snapshot_hashes(snapshot, 0)[0] == ms_hash(values, sizeof values, 0));
    ms_tensor_release(tensor);
    return snapshot;
}

static bool together; /* write_mark writes as several processes do */

/* A file of a second process comes first; then as one process commits. */
static ms_status write_together(ms_context *own, float mark, const char *name, const char *manifest,
                                size_t bytes)
{
    static const char *const files[] = { "rank-00001.safetensors", MS_CHECKPOINT_TENSORS };
    const char *folder = in_folder("run");
    ms_tensor *tensor = tensor_of(mark);
    uint64_t hashes[2];
    ms_context quiet;
    ms_context_init(&quiet, own->os);
    ms_status status = ms_checkpoint_begin(own, folder, name);
    for (int i = 0; i < 2 && !status; i++)
        status =
            ms_checkpoint_write_part(own, names_of_one, &tensor, 1, folder, name, files[i], hashes);
    if (!status) status = ms_checkpoint_commit(own, folder, name, manifest, bytes);
    if (status) (void)ms_checkpoint_discard(&quiet, folder, name);
    ms_tensor_release(tensor);
    return status;
}

static ms_status write_mark(ms_context *own, const char *name, float mark)
{
    char manifest[32];
    int length = snprintf(manifest, sizeof manifest, "mark %g", (double)mark);
    if (together) return write_together(own, mark, name, manifest, (size_t)length);
    ms_snapshot *snapshot = snapshot_of(mark);
    ms_status status =
        ms_checkpoint_write(own, snapshot, in_folder("run"), name, manifest, (size_t)length);
    ms_snapshot_free(snapshot);
    return status;
}

/* The mark of a checkpoint, 0 if there is none of that name. A folder with a manifest must be
 * whole, with both files from one save. */
static float read_mark(const char *name)
{
    char path[300];
    void *manifest = NULL;
    size_t bytes = 0;
    float values[4], mark = 0;
    ms_safetensors *file = NULL;
    snprintf(path, sizeof path, "%s/run/%s/%s", test_folder, name, MS_CHECKPOINT_MANIFEST);
    if (ms_file_read_all(&context, path, 100, &manifest, &bytes)) return 0;
    assert_int_equal(sscanf(manifest, "mark %f", &mark), 1);
    ms_release(&context, manifest);
    snprintf(path, sizeof path, "%s/run/%s/%s", test_folder, name, MS_CHECKPOINT_TENSORS);
    assert_int_equal(ms_safetensors_open(&context, path, &file), MS_OK);
    assert_int_equal(
        ms_safetensors_read(&context, file, ms_safetensors_find(file, "model/weight"), values),
        MS_OK);
    ms_safetensors_close(file);
    assert_true(values[0] == mark && values[3] == 3);
    return mark;
}

static void test_checkpoints_are_written_replaced_and_removed(void **state)
{
    (void)state;
    assert_int_equal(write_mark(&context, "step-1", 1), MS_OK);
    assert_int_equal(write_mark(&context, "step-2", 2), MS_OK);
    assert_int_equal(write_mark(&context, "step-1", 3), MS_OK);
    assert_true(read_mark("step-1") == 3 && read_mark("step-2") == 2);
    assert_int_equal(count_names(in_folder("run")), 2);
    assert_int_equal(count_names(in_folder("run/step-1")), 2);
    assert_int_equal(ms_checkpoint_remove(&context, in_folder("run"), "step-1"), MS_OK);
    assert_true(read_mark("step-1") == 0 && read_mark("step-2") == 2);
    assert_int_equal(count_names(in_folder("run")), 1);
    assert_int_equal(ms_checkpoint_remove(&context, in_folder("run"), "step-1"),
                     MS_ERROR_NOT_FOUND);
}

static void test_a_renamed_one_is_whole_under_its_new_name(void **state)
{
    (void)state;
    assert_int_equal(write_mark(&context, "step-1", 1), MS_OK);
    assert_int_equal(write_mark(&context, "step-2", 2), MS_OK);
    assert_int_equal(ms_checkpoint_rename(&context, in_folder("run"), "step-1", "aside-1"), MS_OK);
    assert_true(read_mark("step-1") == 0 && read_mark("aside-1") == 1 && read_mark("step-2") == 2);
    /* A rename fails if the source does not exist, or if the target is another checkpoint. */
    assert_int_equal(ms_checkpoint_rename(&context, in_folder("run"), "step-1", "aside-1"),
                     MS_ERROR_NOT_FOUND);
    assert_int_not_equal(ms_checkpoint_rename(&context, in_folder("run"), "step-2", "aside-1"),
                         MS_OK);
    assert_true(read_mark("aside-1") == 1 && read_mark("step-2") == 2);
    /* A sweep leaves it alone. */
    assert_int_equal(ms_checkpoint_sweep(&context, in_folder("run")), MS_OK);
    assert_int_equal(count_names(in_folder("run")), 2);
}

/* Folders that a crash can leave: half written, half removed, or renamed during a replacement. */
static void test_a_sweep_restores_and_removes(void **state)
{
    (void)state;
    /* No folder, nothing to do. */
    assert_int_equal(ms_checkpoint_sweep(&context, in_folder("run")), MS_OK);
    assert_int_equal(write_mark(&context, "step-1", 1), MS_OK);
    assert_int_equal(write_mark(&context, "step-2", 2), MS_OK);
    assert_int_equal(rename(in_folder("run/step-1"), in_folder("run/.old-step-1")), 0);
    assert_int_equal(ms_folder_make(&context, in_folder("run/.tmp-step-3")), MS_OK);
    put_file(in_folder("run/.tmp-step-3/tensors.safetensors"), "half", 4);
    assert_int_equal(ms_folder_make(&context, in_folder("run/.old-step-2")), MS_OK);
    put_file(in_folder("run/notes.txt"), "the user's own", 14);
    put_file(in_folder("run/.tmp-notes"), "the user's own", 14);
    assert_int_equal(ms_checkpoint_sweep(&context, in_folder("run")), MS_OK);
    assert_true(read_mark("step-1") == 1 && read_mark("step-2") == 2);
    assert_int_equal(count_names(in_folder("run")), 4);
}

/* Every file call of a save fails in turn, on a fresh name and on one that is replaced; then the
 * program continues, or is dead. A committed checkpoint is never lost, and a folder that looks
 * committed is whole. */
static void test_each_file_call_may_fail(void **state)
{
    static const char *const names[] = { "step-1", "step-2" };
    for (int variant = 0; variant < 8; variant++) {
        bool replaces = variant & 1, forever = variant & 2, succeeded = false;
        together = variant & 4;
        for (long n = 1; !succeeded; n++) {
            fault_files fault;
            ms_context own;
            fault_files_init(&fault);
            ms_context_init(&own, &fault.table);
            assert_int_equal(write_mark(&context, "step-1", 1), MS_OK);
            fault.fail_at = n;
            fault.forever = forever;
            ms_status status = write_mark(&own, names[!replaces], 2);
            succeeded = fault.calls < n;
            /* That an old folder could not be removed, or a folder was there already, need not be
             * an error; success must be the truth. */
            if (succeeded) assert_int_equal(status, MS_OK);
            if (status == MS_OK) assert_true(read_mark(names[!replaces]) == 2);
            else assert_non_null(strstr(own.error.message, test_folder));
            float aside = read_mark(".old-step-1"), first = read_mark("step-1"),
                  second = read_mark("step-2");
            if (replaces) assert_true(first == 1 || first == 2 || aside == 1);
            else assert_true(first == 1 && (second == 0 || second == 2) && aside == 0);
            /* The next save finds its way. */
            assert_int_equal(write_mark(&context, "step-3", 3), MS_OK);
            assert_true(read_mark("step-3") == 3);
            assert_true(read_mark("step-1") == 1 || (replaces && read_mark("step-1") == 2));
            assert_int_equal(count_names(in_folder("run")), read_mark("step-2") == 2 ? 3 : 2);
            folder_teardown(state);
            folder_setup(state);
            assert_true(n < 200);
        }
    }
    together = false;
}

/* ------------------------------------------------------- the order of syncs */

/* Tracks the changes that a crash could still undo: writes to files that were not synced, and names
 * in folders that were not synced. */
typedef struct watcher {
    ms_os table;
    const ms_os *real;
    struct {
        ms_file *file;
        char path[256];
        bool folder, dirty;
    } open[32];
    char loose[32][256]; /* folders with names that are not durable yet */
    bool early;          /* a folder was renamed while something in it was not durable */
} watcher;

static void loosen(watcher *self, const char *path)
{
    char folder[256];
    snprintf(folder, sizeof folder, "%s", path);
    *strrchr(folder, '/') = 0;
    int i = 0;
    while (self->loose[i][0] && strcmp(self->loose[i], folder) != 0) i++;
    assert_true(i < 31);
    strcpy(self->loose[i], folder);
}

static void fasten(watcher *self, const char *folder)
{
    for (int i = 0; i < 32; i++)
        if (strcmp(self->loose[i], folder) == 0) strcpy(self->loose[i], "-");
}

static bool is_loose(const watcher *self, const char *folder)
{
    for (int i = 0; i < 32; i++)
        if (strcmp(self->loose[i], folder) == 0) return true;
    return false;
}

static int watch_open(void *user, const char *path, int flags, ms_file **out)
{
    watcher *self = user;
    int error = self->real->open(NULL, path, flags, out), i = 0;
    if (error) return error;
    while (self->open[i].file) i++;
    assert_true(i < 32);
    self->open[i].file = *out;
    self->open[i].folder = flags & MS_FILE_DIRECTORY;
    self->open[i].dirty = false;
    snprintf(self->open[i].path, sizeof self->open[i].path, "%s", path);
    if (flags & (MS_FILE_CREATE | MS_FILE_EXCLUSIVE)) loosen(self, path);
    return 0;
}

static int file_index(const watcher *self, const ms_file *file)
{
    int i = 0;
    while (self->open[i].file != file) i++;
    return i;
}

static int64_t watch_write(void *user, ms_file *file, const void *data, size_t bytes,
                           uint64_t offset)
{
    watcher *self = user;
    self->open[file_index(self, file)].dirty = true;
    return self->real->write(NULL, file, data, bytes, offset);
}

static int watch_sync(void *user, ms_file *file)
{
    watcher *self = user;
    int i = file_index(self, file);
    self->open[i].dirty = false;
    if (self->open[i].folder) fasten(self, self->open[i].path);
    return 0;
}

static void watch_close(void *user, ms_file *file)
{
    watcher *self = user;
    int i = file_index(self, file);
    /* Closed without a sync: the data may reach the disk after the name. */
    if (self->open[i].dirty) self->early = true;
    self->open[i].file = NULL;
    self->real->close(NULL, file);
}

static int watch_rename(void *user, const char *from, const char *to)
{
    watcher *self = user;
    if (is_loose(self, from)) self->early = true;
    loosen(self, to);
    return self->real->rename(NULL, from, to);
}

static int watch_make_directory(void *user, const char *path)
{
    int error = ((watcher *)user)->real->make_directory(NULL, path);
    if (!error) loosen(user, path);
    return error;
}

static void test_names_become_durable_after_what_they_name(void **state)
{
    (void)state;
    watcher self = { .real = ms_os_posix() };
    ms_context own;
    self.table = *self.real;
    self.table.user = &self;
    self.table.open = watch_open;
    self.table.write = watch_write;
    self.table.sync = watch_sync;
    self.table.close = watch_close;
    self.table.rename = watch_rename;
    self.table.make_directory = watch_make_directory;
    ms_context_init(&own, &self.table);
    for (int i = 0; i < 4; i++) { /* a fresh name, and one that is replaced */
        together = i >= 2;
        assert_int_equal(write_mark(&own, together ? "step-2" : "step-1", 1), MS_OK);
        assert_false(self.early);
        for (int k = 0; k < 32; k++)
            assert_true(!self.loose[k][0] || strcmp(self.loose[k], "-") == 0);
    }
    together = false;
}

/* -------------------------------------------------------------- on a thread */

static void test_a_job_writes_while_the_host_goes_on(void **state)
{
    (void)state;
    ms_checkpoint_job *job = NULL;
    assert_int_equal(ms_checkpoint_start(&context, snapshot_of(5), in_folder("run"), "step-5",
                                         "mark 5", 6, &job),
                     MS_OK);
    while (!ms_checkpoint_is_done(job)) sched_yield();
    assert_true(read_mark("step-5") == 5); /* on disk before a wait */
    assert_int_equal(ms_checkpoint_wait(&context, job), MS_OK);
    assert_true(read_mark("step-5") == 5);
    /* A late failure arrives with the wait. */
    put_file(in_folder("file"), "", 0);
    assert_int_equal(ms_checkpoint_start(&context, snapshot_of(6), in_folder("file"), "step-6",
                                         "mark 6", 6, &job),
                     MS_OK);
    assert_int_not_equal(ms_checkpoint_wait(&context, job), MS_OK);
    assert_non_null(strstr(context.error.message, "/file"));
}

static void test_each_allocation_may_fail(void **state)
{
    ms_status status = MS_ERROR_MEMORY;
    for (long n = 1; status; n++) {
        fault_os fault;
        ms_context own;
        ms_checkpoint_job *job = NULL;
        fault_os_init(&fault);
        ms_context_init(&own, &fault.table);
        ms_snapshot *snapshot = snapshot_of(7);
        atomic_store(&fault.fail_at, n);
        status = ms_checkpoint_start(&own, snapshot, in_folder("run"), "step-7", "mark 7", 6, &job);
        if (status) ms_snapshot_free(snapshot);
        else status = ms_checkpoint_wait(&own, job);
        if (status) assert_true(read_mark("step-7") == 0 || read_mark("step-7") == 7);
        else assert_true(read_mark("step-7") == 7);
        assert_int_equal(atomic_load(&fault.live), 0);
        folder_teardown(state);
        folder_setup(state);
        assert_true(n < 200);
    }
}

/* ------------------------------------------------------- memory of one part */

/* Counts the bytes of the large allocations. */
typedef struct counter {
    ms_os table;
    const ms_os *real;
    size_t live, peak;
    struct {
        void *memory;
        size_t bytes;
    } blocks[16];
} counter;

#define LARGE ((size_t)1 << 18)

static void *count_allocate(void *user, size_t bytes, size_t alignment)
{
    counter *self = user;
    void *memory = self->real->allocate(self->real->user, bytes, alignment);
    int i = 0;
    if (!memory || bytes < LARGE) return memory;
    while (self->blocks[i].memory) i++;
    assert_true(i < 15);
    self->blocks[i].memory = memory;
    self->blocks[i].bytes = bytes;
    self->live += bytes;
    if (self->live > self->peak) self->peak = self->live;
    return memory;
}

static void count_release(void *user, void *memory)
{
    counter *self = user;
    for (int i = 0; memory && i < 16; i++)
        if (self->blocks[i].memory == memory) {
            self->live -= self->blocks[i].bytes;
            self->blocks[i].memory = NULL;
        }
    self->real->release(self->real->user, memory);
}

/* 8 tensors of 1.25 blocks need the host memory of one while they are written, and each part of
 * them can be checked by the hashes. */
static void test_a_part_needs_the_memory_of_one_tensor(void **state)
{
    enum { COUNT = 8, LENGTH = 5 << 16, BYTES = 4 * LENGTH };
    static const char *const names[COUNT] = { "a", "b", "c", "d", "e", "f", "g", "h" };
    static float values[LENGTH];
    ms_tensor *tensors[COUNT] = { NULL };
    uint64_t hashes[3 * COUNT];
    counter self = { .real = ms_os_posix() };
    ms_context own;
    (void)state;
    self.table = *self.real;
    self.table.user = &self;
    self.table.allocate = count_allocate;
    self.table.release = count_release;
    ms_context_init(&own, &self.table);
    for (int i = 0; i < COUNT; i++) {
        values[LENGTH - 1] = (float)i;
        assert_int_equal(ms_tensor_new(engine, MS_F32, 1, (const int64_t[]){ LENGTH }, &tensors[i]),
                         MS_OK);
        assert_int_equal(ms_tensor_write(tensors[i], values, BYTES), MS_OK);
    }
    assert_int_equal(ms_checkpoint_begin(&own, in_folder("run"), "step-1"), MS_OK);
    assert_int_equal(ms_checkpoint_write_part(&own, names, tensors, COUNT, in_folder("run"),
                                              "step-1", "part.safetensors", hashes),
                     MS_OK);
    assert_true(self.peak >= BYTES && self.peak <= BYTES + 64 && self.live == 0);
    for (int i = 0; i < COUNT; i++) {
        const uint64_t *of = hashes + 3 * i;
        values[LENGTH - 1] = (float)i;
        assert_true(of[0] == ms_hash(values, BYTES, 0));
        assert_true(of[1] == ms_hash(values, MS_SAFETENSORS_BLOCK, 0));
        assert_true(of[2]
                    == ms_hash((const char *)values + MS_SAFETENSORS_BLOCK,
                               BYTES - MS_SAFETENSORS_BLOCK, 0));
        ms_tensor_release(tensors[i]);
    }
}

static int engine_setup(void **state)
{
    (void)state;
    fault_files_init(&harmless);
    ms_context_init(&context, &harmless.table);
    return ms_engine_new(&(ms_engine_options){ .threads = 1, .memory_bytes = 64u << 20 }, NULL,
                         &engine);
}

static int engine_teardown(void **state)
{
    (void)state;
    ms_engine_free(engine);
    return 0;
}

#define in_new_folder(test) cmocka_unit_test_setup_teardown(test, folder_setup, folder_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_new_folder(test_checkpoints_are_written_replaced_and_removed),
        in_new_folder(test_a_renamed_one_is_whole_under_its_new_name),
        in_new_folder(test_a_sweep_restores_and_removes),
        in_new_folder(test_each_file_call_may_fail),
        in_new_folder(test_names_become_durable_after_what_they_name),
        in_new_folder(test_a_job_writes_while_the_host_goes_on),
        in_new_folder(test_each_allocation_may_fail),
        in_new_folder(test_a_part_needs_the_memory_of_one_tensor),
    };
    return cmocka_run_group_tests(tests, engine_setup, engine_teardown);
}
